"""The project as a whole: what may import what, what a fresh clone promises, and notebooks worth comparing.

Words that must not stand in any file are put together from pieces here, so that this file passes, too.
"""

from __future__ import annotations

import ast
import importlib
import io
import json
import re
import shutil
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tangolite.lab import figures, run_notebooks

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tangolite"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
NOTEBOOKS = sorted(p for p in (ROOT / "notebooks").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)

# The order of the data flow: no module imports one further down. _grading_x.py belongs to grading.
ORDER = (
    "rollouts", "tasks", "prompts", "parsing", "grading", "sources", "logprob", "models", "adapters",
    "parallel", "sampling", "rewards", "advantages", "losses", "updates", "warmstart", "tango", "covrl",
    "settings", "checkpoints", "training", "evaluate", "plots", "records", "inspector",
)  # fmt: skip
# Imported by none of the order:
FRONT = ("__init__", "__main__", "cli", "doctor", "recipes", "lab", "exercises")
MAY_IMPORT_LAB = ("__main__", "cli", "lab", "exercises")
HEAVY = ("bitsandbytes", "vllm", "triton", "datasets", "peft", "sympy", "matplotlib")
# Lines of code at most, without comments and docstrings, so that each part can be read alone.  What is in
# none of the named parts carries them: models, sampling, several processes, recipes, checkpoints, the loop.
# _grading/, _sources/, the command line, doctor and lab/ stand beside the order.
PARTS = {
    "the methods": (
        *("rollouts", "tasks", "prompts", "parsing", "grading", "rewards", "advantages", "losses"),
        *("warmstart", "tango", "covrl", "evaluate"),
    ),
    "the log-prob": ("logprob",),
    "what is shown": ("plots", "records", "inspector"),
}
BUDGETS = {"the methods": 2100, "the log-prob": 700, "what is shown": 1400, "what carries them": 1800}


# Imports


def module_of(path: Path) -> str:
    """The part of the package a file belongs to: tangolite/logprob/chunked.py -> logprob."""
    return owner(path.relative_to(PACKAGE).with_suffix("").parts[0])


def owner(name: str) -> str:
    """The module that a private one belongs to: _grading_exact -> grading; others are their own."""
    first = name.removeprefix("_").split("_")[0]
    return first if name.startswith("_") and first in ORDER else name


def imports_of(source: str, package: tuple[str, ...] = ("tangolite",)) -> set[str]:
    """Parts of the package that a source imports, lazily too; `package` is where relative ones start."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) + 1 - node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            names = [[*base, alias.name] for alias in node.names]
        else:
            continue
        found |= {owner(name[1]) for name in names if name[0] == "tangolite" and len(name) > 1}
    return found


def order_faults(module: str, imported: set[str]) -> list[str]:
    """Why a module must not import what it imports; empty if it may."""
    if module not in (*ORDER, *FRONT):
        return [f"{module} has no place in the order of modules"]
    allowed = set(ORDER[: ORDER.index(module) + 1]) if module in ORDER else {*ORDER, *FRONT}
    if module not in MAY_IMPORT_LAB:
        allowed -= {"lab"}
    modules = {path.stem for path in PACKAGE.iterdir()} | {
        *ORDER,
        *FRONT,
    }  # other names are functions of __init__
    return [f"{module} imports {name}" for name in sorted(imported & modules - allowed)]


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_module_imports_one_further_down(path: Path) -> None:
    package = ("tangolite", *path.relative_to(PACKAGE).parts[:-1])
    assert order_faults(module_of(path), imports_of(path.read_text("utf-8"), package)) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rewards", "from tangolite.losses import policy_loss"),
        ("rewards", "from tangolite import losses"),
        ("rewards", "from .losses import policy_loss"),
        ("rewards", "import tangolite.tango as t"),
        ("rewards", "def f():\n    from tangolite.training import train"),
        ("tango", "from tangolite.lab import x"),
        ("doctor", "import tangolite.lab.run_notebooks"),
        ("training", "from tangolite.cli import main"),
        ("newcomer", ""),
    ],
)
def test_the_order_rule_sees_every_way_to_break_it(module: str, source: str) -> None:
    assert order_faults(module, imports_of(source))


def test_the_order_rule_lets_through_what_it_should() -> None:
    assert order_faults("losses", imports_of("import torch\nfrom tangolite.rewards import as_float")) == []
    assert order_faults("cli", imports_of("from tangolite.lab import run_notebooks")) == []
    assert order_faults("logprob", imports_of("from .reference import f", ("tangolite", "logprob"))) == []


def loaded_by(statement: str, names: tuple[str, ...]) -> str:
    script = f"import sys; {statement}; print(*(name for name in {names} if name in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert loaded_by("import tangolite", HEAVY) == ""
    assert loaded_by("import tangolite, matplotlib", HEAVY) == "matplotlib"  # the check can see one


def test_no_module_loads_the_large_packages_before_they_are_used() -> None:
    there = {path.stem for path in PACKAGE.iterdir()}  # the inspector has a place but is not built yet
    every = ", ".join(f"tangolite.{name}" for name in ORDER if name in there)
    assert loaded_by(f"import {every}", ("bitsandbytes", "vllm", "triton", "datasets", "peft")) == ""


def code_lines(source: str) -> int:
    """Lines that do something: neither blank, nor comment, nor docstring."""
    silent = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in silent]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_only_lines_that_do_something_are_counted() -> None:
    silent = '"""Doc\nstring."""\n\n# comment\n\n'
    code = 'x = """a\nb"""  # counts\n\ndef f():\n    """Doc."""\n    return (\n        1\n    )\n'
    assert code_lines(silent + code) == 6


def test_the_core_stays_small() -> None:
    parts = {module: part for part, modules in PARTS.items() for module in modules}
    sums = dict.fromkeys(BUDGETS, 0)
    for path in SOURCES:
        module = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if module in ORDER:
            count = code_lines(path.read_text("utf-8"))
            sums[parts.get(module, "what carries them")] += count
            print(f"{count:5} {path.relative_to(ROOT).as_posix()}")
    print(*(f"{sums[part]:5} lines of {part}, of {most} at most" for part, most in BUDGETS.items()), sep="\n")
    assert all(0 < sums[part] < most for part, most in BUDGETS.items())


def test_every_test_file_holds_a_test() -> None:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    for path in files:
        functions = [
            n for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.FunctionDef)
        ]
        assert any(function.name.startswith("test_") for function in functions), path
    others = {p.name for p in (ROOT / "tests").rglob("*.py")} - {p.name for p in files}
    others -= {"no_network.py"}  # is run by the kernels of the notebooks
    assert others <= {"conftest.py", "__init__.py"}, f"pytest does not collect {others}"


# What is installed


def requirements(lines: list[str]) -> dict[str, Requirement]:
    found = [Requirement(line) for line in lines]
    return {requirement.name.lower().replace("_", "-"): requirement for requirement in found}


def constraints() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return requirements([line for line in lines if line and not line.startswith("#")])


def direct() -> dict[str, Requirement]:
    extras = PYPROJECT["project"]["optional-dependencies"]
    return requirements(
        [*PYPROJECT["project"]["dependencies"], *(line for group in extras.values() for line in group)]
    )


def test_every_direct_dependency_has_a_lower_bound_and_a_tested_pin_within_its_bounds() -> None:
    pins = constraints()
    for name, requirement in direct().items():
        assert any(bound.operator == ">=" for bound in requirement.specifier), requirement
        assert name in pins, f"{name} is missing from constraints.txt"
        (pin,) = pins[name].specifier
        assert pin.operator == "==" and pin.version in requirement.specifier, (requirement, pin)


def test_every_constraint_is_an_exact_version_and_torch_agrees_with_triton() -> None:
    for requirement in constraints().values():
        assert [bound.operator for bound in requirement.specifier] == ["=="], requirement
    pins = {name: str(requirement.specifier) for name, requirement in constraints().items()}
    assert (pins["torch"], pins["triton"]) == (
        "==2.13.0",
        "==3.7.1",
    )  # the CUDA build of that torch wants that triton


def test_triton_is_asked_for_only_where_it_exists() -> None:
    marker = direct()["triton"].marker
    here = {"sys_platform": "linux", "platform_machine": "x86_64"}
    assert marker is not None and marker.evaluate(here)
    for other in ({"sys_platform": "darwin"}, {"sys_platform": "win32"}, {"platform_machine": "aarch64"}):
        assert not marker.evaluate({**here, **other})


def test_what_the_code_imports_is_declared() -> None:
    spelled = {"yaml": "pyyaml", "math_verify": "math-verify", "IPython": "ipykernel"}
    brought = {"tokenizers", "huggingface_hub", "latex2sympy2_extended", "nbformat", "nbclient"}  # by those
    optional = {
        "vllm",
        "datasets",
        "gguf",
        "pyarrow",
        "pandas",
        "liger_kernel",
        "cut_cross_entropy",
        "atheris",
    }  # asked for by name where they are used
    peers = {"liger_kernel", "cut_cross_entropy"}  # compared with where they happen to be installed
    known = {*direct(), *brought, *optional, *peers, "tangolite"}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += (
                [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
            )
            for top in {name.split(".")[0] for name in names} - sys.stdlib_module_names:
                assert spelled.get(top, top) in known, (
                    f"{path.name} imports {top}, which pyproject.toml does not name"
                )


def test_conda_brings_python_and_pip_and_pip_brings_the_project_with_every_extra() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
    conda = [
        Requirement(re.sub(r"(?<![=<>])=(?!=)", "==", d))
        for d in environment["dependencies"]
        if isinstance(d, str)
    ]
    assert sorted(requirement.name for requirement in conda) == ["pip", "python"]
    (python,) = (requirement for requirement in conda if requirement.name == "python")
    (version,) = (bound.version for bound in python.specifier)
    assert f"{version}.0" in SpecifierSet(PYPROJECT["project"]["requires-python"])
    (pip,) = (d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    options = dict(line.split(" ", 1) for line in pip)
    assert options.keys() == {"-c", "-e"}
    assert (ROOT / options["-c"]).is_file()
    project = Requirement(options["-e"].replace(".", "tangolite", 1))
    assert project.extras == set(PYPROJECT["project"]["optional-dependencies"])


def test_make_setup_installs_what_the_environment_does() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    extras = set(re.search(r'-e "\.\[([\w,]+)\]"', makefile)[1].split(","))
    assert extras == set(PYPROJECT["project"]["optional-dependencies"])
    assert "$(STAMP): pyproject.toml constraints.txt" in makefile


# Commands and papers


def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.M))
    assert targets >= {"help", "setup", "run", "test", "lab", "lint", "notebooks", "clean", "doctor"}
    assert targets == set(re.search(r"^\.PHONY: (.+)$", makefile, re.M)[1].split())
    described = set(re.findall(r"^([a-z][\w-]*):.*?  ## \w", makefile, re.M))
    assert described == targets
    make = shutil.which("make")
    if make:  # Windows has none
        shown = subprocess.run([make], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
        assert set(re.findall(r"^  make (\S+) +\S", shown, re.M)) == targets


def test_ci_runs_make_test_here_and_in_the_workflow() -> None:
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    assert (
        script.startswith("#!/usr/bin/env bash\n")
        and "set -euo pipefail" in script
        and "\nmake test\n" in script
    )
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert steps[-1]["run"] == "bash .ci/run"


def test_make_test_compares_notebooks_strictly_and_counts_every_run() -> None:
    recipe = (ROOT / "Makefile").read_text("utf-8").split("\ntest:")[1].split("\n\n")[0]
    assert recipe.count("|| status=$$?") == 4 and "exit $$status" in recipe
    assert "-m pytest tests" in recipe and "-m pytest $(NBVAL) notebooks" in recipe
    nbval = re.search(r"^NBVAL := (.+)$", (ROOT / "Makefile").read_text("utf-8"), re.M)[1].split()
    assert nbval[:3] == ["--nbval", "--nbval-current-env", "--nbval-cell-timeout=600"]
    assert "--nbval-lax" not in nbval and "IPYTHONDIR=$(CURDIR)/tests/offline" in recipe


def test_the_licence_is_the_whole_apache_licence() -> None:
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License\n" in text and "Version 2.0, January 2004" in text
    assert all(f"\n   {number}. " in text for number in range(1, 10)) and len(text) > 10_000
    assert PYPROJECT["project"]["license"] == "Apache-2.0"


def test_the_citation_names_both_papers_and_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == PYPROJECT["project"]["version"]
    assert citation["license"] == PYPROJECT["project"]["license"]
    assert {reference["url"].rsplit("/", 1)[1] for reference in citation["references"]} == {
        "2505.15034",
        "2512.12576",
    }


PAPER_MAP = (ROOT / "PAPER_MAP.md").read_text("utf-8")
MAPPED = sorted(set(re.findall(r"`(tangolite(?:\.\w+)+)[^`]*`", PAPER_MAP)))


@pytest.mark.parametrize("dotted", MAPPED)
def test_every_name_in_the_paper_map_can_be_imported(dotted: str) -> None:
    parts = dotted.split(".")
    found = importlib.import_module(".".join(parts[:2]))
    for depth, name in enumerate(parts[2:], start=3):
        if not hasattr(found, name):
            importlib.import_module(".".join(parts[:depth]))
        found = getattr(found, name)


MATHEMATICS = {
    "rewards": "ClassWeights step_rewards verifier_reward answer_reward",
    "advantages": "to_go outcome_advantage step_advantage mix_advantages alpha_at",
    "losses": "policy_loss kl_penalty composite_logp hybrid_logp covrl_kl tango_loss covrl_loss",
    "parsing": "split_steps extract_answer parse_verification generator_format_score verifier_format_score "
    "step_end_positions",
    "grading": "answers_match",
    "logprob": "linear_logprob",
}


def test_the_paper_map_names_all_of_the_mathematics() -> None:
    wanted = {f"tangolite.{module}.{name}" for module, names in MATHEMATICS.items() for name in names.split()}
    assert wanted - set(MAPPED) == set()


# Words


SUFFIXES = {
    ".py",
    ".md",
    ".toml",
    ".txt",
    ".yml",
    ".yaml",
    ".ipynb",
    ".cff",
    ".cfg",
    ".json",
    ".svg",
    ".html",
    "",
}
SKIPPED = {".git", ".venv", "build", "dist", "runs", "__pycache__", "golden", "data", ".ipynb_checkpoints"}
MACHINE_PATH = re.compile(r"(?<![\w.~*-])/(?:root|home|Users|work|tmp)/\w|[A-Za-z]:\\+Users\b")
FORBIDDEN = [
    "/" + "work" + r"\b",
    "shared" + "/",
    "work" + "place",
    r"\bC" + r"EO\b",
    r"\b(?:method|cases|libraries|tiny|style|api)" + r"\.md\b",
    r"\bissue " + r"#?\d",
    "py" + r"pi\.org|" + "python" + "hosted",
    "/opt/" + "pypi",
]


def files_of_the_project() -> list[Path]:
    found = []
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        hidden = parts[0].startswith(".") and parts[0] not in (".ci", ".github", ".gitignore")
        if path.is_file() and path.suffix in SUFFIXES and not hidden and not SKIPPED & set(parts):
            found.append(path)
    return found


def words_of(path: Path) -> str:
    """A file's text; of a notebook, its text without pictures (base64 spells anything)."""
    if path.suffix != ".ipynb":
        return path.read_text("utf-8", errors="replace")
    return notebook_text(json.loads(path.read_text("utf-8")))


def test_no_file_speaks_of_anything_but_the_project() -> None:
    files = files_of_the_project()
    assert {"Makefile", "LICENSE", "pyproject.toml", "run", "ci.yml", "test_project.py"} <= {
        p.name for p in files
    }
    pattern = re.compile("|".join(FORBIDDEN))
    found = [f"{p.relative_to(ROOT)}: {match[0]}" for p in files for match in pattern.finditer(words_of(p))]
    assert found == []


@pytest.mark.parametrize(
    "word", ["see /" + "work/main", "work" + "place", "issue " + "#12", "the " + "C" + "EO"]
)
def test_the_list_of_words_bites(word: str) -> None:
    assert re.search("|".join(FORBIDDEN), word)


# Notebooks


def notebook_text(notebook: dict) -> str:
    """Sources and text outputs of a notebook, without pictures."""
    texts = []
    for cell in notebook["cells"]:
        texts.append("".join(cell["source"]))
        for output in cell.get("outputs", []):
            texts.append("".join(output.get("text", "")))
            texts += ["".join(v) for k, v in output.get("data", {}).items() if k.startswith("text/")]
    return "\n".join(texts)


def notebook_faults(notebook: dict) -> list[str]:
    """Why strict nbval would compare nothing of a notebook, or why it should not be committed as it is."""
    kernel = notebook["metadata"].get("kernelspec", {}).get("name")
    faults = [] if kernel == "python3" else [f"the kernel is {kernel}, not python3"]
    code = [c for c in notebook["cells"] if c["cell_type"] == "code" and "".join(c["source"]).strip()]
    if not code:
        faults.append("there is no code")
    for number, cell in enumerate(code, start=1):
        outputs = cell["outputs"]
        if cell.get("execution_count") is None:
            faults.append(f"code cell {number} was never executed, so nothing compares it")
        if any(output["output_type"] == "error" for output in outputs):
            faults.append(f"code cell {number} ended in an error")
        if len(json.dumps(outputs)) > 200_000:
            faults.append(f"code cell {number} has {len(json.dumps(outputs)) // 1000} kB of output")
    faults += [
        f"a path of somebody's machine: {match[0]}"
        for match in MACHINE_PATH.finditer(notebook_text(notebook))
    ]
    return faults


def committed(outputs: list[dict] | None = None, *, count: int | None = 1, kernel: str = "python3") -> dict:
    """A notebook of one cell, as JSON."""
    cell = nbformat.v4.new_code_cell("print(3)", outputs=outputs or [], execution_count=count)
    notebook = nbformat.v4.new_notebook(
        cells=[cell], metadata={"kernelspec": {"name": kernel, "display_name": ""}}
    )
    return json.loads(nbformat.writes(notebook))


def printed(text: str) -> list[dict]:
    return [nbformat.v4.new_output("stream", text=text)]


def test_a_well_kept_notebook_has_no_faults() -> None:
    url = "https://example.org/home/page and tests/tmp/x"
    assert notebook_faults(committed(printed(f"3\n{url}\n"))) == []


@pytest.mark.parametrize(
    ("notebook", "fault"),
    [
        (committed(count=None), "never executed"),  # stripped: passes strict nbval and compares nothing
        (committed(kernel="mine"), "not python3"),
        (committed(printed("x" * 200_001)), "kB of output"),
        (committed(printed("saved to /" + "home/ada/run.pt")), "somebody's machine"),
        (committed(printed("File /" + "tmp/ipykernel_7/1.py")), "somebody's machine"),
        (committed(printed("C:\\" + "Users\\ada")), "somebody's machine"),
        (
            committed([nbformat.v4.new_output("error", ename="E", evalue="", traceback=[])]),
            "ended in an error",
        ),
        (committed() | {"cells": []}, "no code"),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_the_guard_fails_on_a_notebook_that_would_compare_nothing(notebook: dict, fault: str) -> None:
    (found,) = notebook_faults(notebook)
    assert fault in found


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebooks_have_no_faults(path: Path) -> None:
    nbformat.validate(nbformat.read(path, as_version=4))
    assert notebook_faults(json.loads(path.read_text("utf-8"))) == []


def test_every_figure_is_told_in_words_and_made_by_a_notebook_or_a_command() -> None:
    assert figures.faults(ROOT) == []


def test_the_guard_of_the_figures_sees_untold_missing_and_old_ones(tmp_path) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "figures" / "odd").mkdir(parents=True)
    cells = [nbformat.v4.new_markdown_cell("*`figures/01_a.png`: a line* and `figures/01_b.png`")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "notebooks" / "01_x.ipynb")
    for name in ("01_a", "01_c"):
        (tmp_path / "figures" / f"{name}.png").touch()
    found = figures.faults(tmp_path, since=(tmp_path / "figures" / "01_a.png").stat().st_mtime + 9)
    assert [line.split(":")[0] for line in found] == [
        "figures/01_c.png", "figures/01_b.png", "figures/odd/", "figures/01_a.png", "figures/01_c.png",
    ]  # fmt: skip


def test_a_notebook_of_make_test_cannot_reach_the_network(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(shutil.copytree(ROOT / "tests" / "offline", tmp_path / "offline")))
    path = tmp_path / "asks.ipynb"
    write_notebook(path, "import socket\nsocket.create_connection(('192.0.2.1', 80), timeout=1)")
    with pytest.raises(run_notebooks.NotebookFailed, match="the course runs without a network"):
        run_notebooks.execute(path)


def write_notebook(path: Path, *cells: str) -> str:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    path.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, path)
    return path.read_text("utf-8")


DRAWS = "from IPython.display import Image\nImage(bytes.fromhex('89504e470d0a1a0a'), format='png')"


def test_running_a_notebook_makes_a_page_and_its_figures_and_leaves_the_notebook_alone(
    tmp_path, capfd
) -> None:
    path = tmp_path / "notebooks" / "one.ipynb"
    before = write_notebook(path, "import os\nprint(os.getcwd())", DRAWS)
    assert run_notebooks.main([str(path), "--build", str(tmp_path / "build")]) == 0
    assert path.read_text("utf-8") == before
    page = (tmp_path / "build" / "pages" / "one.html").read_text("utf-8")
    assert str(path.parent.resolve()) in page  # a notebook runs in its own folder
    assert (tmp_path / "build" / "figures" / "one-1.png").read_bytes() == bytes.fromhex("89504e470d0a1a0a")
    shown = capfd.readouterr().out
    assert re.search(r"\[1/1\] .*one.ipynb -> .*one.html in \d+ s", shown)
    assert str(tmp_path / "build" / "pages") in shown and str(tmp_path / "build" / "figures") in shown


def test_a_failing_notebook_stops_the_run_and_says_where(tmp_path, capfd) -> None:
    bad, after = tmp_path / "bad.ipynb", tmp_path / "later.ipynb"
    write_notebook(bad, "x = 1", "# the dividing cell\nx / 0", "x = 2")
    write_notebook(after, "1")
    assert run_notebooks.main([str(bad), str(after), "--build", str(tmp_path)]) == 1
    shown = capfd.readouterr()
    assert "bad.ipynb stopped: ZeroDivisionError: division by zero" in shown.err
    assert "# the dividing cell" in shown.err
    assert "later.ipynb" not in shown.out and not (tmp_path / "pages").exists()


def test_refreshing_in_place_leaves_a_notebook_that_the_guard_accepts(tmp_path) -> None:
    path = tmp_path / "one.ipynb"
    write_notebook(path, "print(3)")
    assert notebook_faults(json.loads(path.read_text("utf-8")))
    assert run_notebooks.main([str(path), "--in-place"]) == 0
    first = path.read_text("utf-8")
    assert notebook_faults(json.loads(first)) == []
    assert json.loads(first)["metadata"]["language_info"] == {
        "name": "python"
    }  # no version of this machine's
    assert run_notebooks.main([str(path), "--in-place"]) == 0
    assert path.read_text("utf-8") == first  # the same bytes again: no clock, no machine


def test_no_notebook_is_an_error(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_notebooks.main([]) == 2
    assert run_notebooks.main(["gone.ipynb"]) == 2
    assert "gone.ipynb" in capsys.readouterr().err


def test_solutions_and_checkpoints_are_not_run_but_solutions_are_refreshed(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b", "a", "solutions/a", ".ipynb_checkpoints/a"):
        path = Path("notebooks") / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    run = [path.as_posix() for path in run_notebooks.find([], in_place=False)]
    assert run == ["notebooks/a.ipynb", "notebooks/b.ipynb"]
    assert [path.as_posix() for path in run_notebooks.find([], in_place=True)] == [
        *run,
        "notebooks/solutions/a.ipynb",
    ]
