"""What can this machine run, and what is missing? In words, without the network.

`python -m tangolite doctor`, or `python tangolite/doctor.py` before anything is installed: so the module
itself stands on the standard library alone, and looks for the rest when it is asked.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import math
import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parent
CORE = (
    "transformers",
    "safetensors",
    "numpy",
    "yaml",
    "tqdm",
    "jaxtyping",
    "math_verify",
    "sympy",
    "matplotlib",
)
JUPYTER = ("jupyterlab", "ipykernel", "ipywidgets", "nbconvert", "nbval")
LARGE = ("bitsandbytes", "peft", "accelerate")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
GIB = 2**30
INSTALL = "make setup, or: pip install -c constraints.txt -e '.[notebooks,large,test]'"


class Finding(NamedTuple):
    """One thing looked at; `state` is "ok", "warn" (limited) or "missing" (in the way of every run)."""

    what: str
    state: str
    sentence: str
    fix: str = ""


def installed(name: str) -> bool:
    """Whether a module could be imported, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def named(name: str) -> str:
    """A module and the version of its distribution, as far as that is known."""
    try:
        return f"{name} {importlib.metadata.version({'yaml': 'pyyaml'}.get(name, name))}"
    except importlib.metadata.PackageNotFoundError:
        return name


def load(name: str) -> ModuleType | None:
    """Import a module; None when that fails in any way."""
    try:
        return importlib.import_module(name)
    except Exception:  # a half-installed package raises what it likes
        return None


def packages(what: str, names: Sequence[str], otherwise: str) -> Finding:
    """A group of packages that are needed together; `otherwise` is the state if one is not installed."""
    missing = [name for name in names if not installed(name)]
    if missing:
        return Finding(what, otherwise, f"not installed: {', '.join(missing)}", INSTALL)
    return Finding(what, "ok", ", ".join(map(named, names)))


def check_python() -> Finding:
    """The interpreter, 3.11 or newer."""
    sentence = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info >= (3, 11):  # noqa: UP036  run as a script, this file may meet an older one
        return Finding("python", "ok", sentence)
    return Finding("python", "missing", f"{sentence}; 3.11 is needed", "make setup PYTHON=python3.11")


def check_torch() -> Finding:
    """torch and which build of it: CPU, CUDA or ROCm."""
    torch = load("torch")
    if torch is None:
        return Finding("torch", "missing", "torch cannot be imported", INSTALL)
    cuda, hip = torch.version.cuda, getattr(torch.version, "hip", None)
    build = f"built for CUDA {cuda}" if cuda else f"built for ROCm {hip}" if hip else "a build without CUDA"
    return Finding("torch", "ok", f"torch {torch.__version__}, {build}")


def check_core() -> Finding:
    """The other packages without which nothing runs."""
    return packages("core", CORE, "missing")


def check_large() -> Finding:
    """What 4-bit models with adapters need."""
    return packages("large", LARGE, "warn")


def check_jupyter() -> Finding:
    """JupyterLab, what executes and compares notebooks, and the notebooks themselves."""
    found = packages("jupyter", JUPYTER, "missing")
    count = len(list((PACKAGE.parent / "notebooks").glob("*.ipynb")))
    if found.state == "ok" and not count:
        return Finding(
            "jupyter", "warn", "no notebooks beside the package", "work in a clone of the repository"
        )
    return found._replace(sentence=f"{count} notebooks; {found.sentence}")


def check_cpu() -> Finding:
    """Cores, and how many threads torch will use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch = load("torch")
    threads = f", torch uses {torch.get_num_threads()} (1 is best for the tiny model)" if torch else ""
    return Finding("cpu", "ok", f"{cores} cores{threads}")


def memory_bytes() -> float:
    """Physical memory, or the container's limit where that is lower; infinite where nothing says."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        total = math.inf
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # not Linux, or "max"
        return total


def check_memory() -> Finding:
    """Main memory; the tiny notebooks want about 2 GiB for everything."""
    total = memory_bytes()
    if total == math.inf:
        return Finding("memory", "warn", "this system does not say how much memory it has")
    if total < 2 * GIB:
        return Finding("memory", "missing", f"{total / GIB:.1f} GiB of about 2 wanted", "raise the limit")
    return Finding("memory", "ok", f"{total / GIB:.1f} GiB")


def gpus() -> list:
    """torch's properties of each CUDA (or ROCm) GPU."""
    torch = load("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]


def check_gpu() -> Finding:
    """Every GPU with its memory, and whether it computes in bfloat16 (emulated below capability 8)."""
    found = [
        f"{gpu.name}, {gpu.total_memory / GIB:.0f} GiB, {'bfloat16' if gpu.major >= 8 else 'float16 alone'}"
        for gpu in gpus()
    ]
    if found:
        return Finding("gpu", "ok", "; ".join(found))
    return Finding(
        "gpu", "warn", "none that torch can use; the tiny notebooks need none", "torch's CUDA build, a GPU"
    )


def check_triton() -> Finding:
    """For the fused kernel of `linear_logprob` on CUDA; elsewhere slices in PyTorch do the same."""
    if not installed("triton"):
        fix = INSTALL if sys.platform == "linux" else "there is none for this system, and nothing needs it"
        return Finding(
            "triton", "warn", "not installed: log-probs are computed without the fused kernel, in slices", fix
        )
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return Finding("triton", "ok", f"{named('triton')}, in its interpreter (slow, for tests)")
    idle = "" if gpus() else ", idle without a GPU (TRITON_INTERPRET=1 runs its interpreter)"
    return Finding("triton", "ok", f"{named('triton')}{idle}")


def check_grading() -> Finding:
    """Grade one right and one wrong answer for real."""
    grading = load("tangolite.grading")
    if grading is None:
        return Finding("grading", "missing", "tangolite.grading cannot be imported", INSTALL)
    right, wrong = grading.answers_match(r"\frac{1}{2}", "0.5"), grading.answers_match("2", "3")
    if right and not wrong:
        return Finding("grading", "ok", "1/2 equals 0.5, and 2 does not equal 3")
    return Finding("grading", "missing", f"1/2 = 0.5 gave {right}, 2 = 3 gave {wrong}", INSTALL)


def check_weights() -> Finding:
    """The built-in warm starts."""
    folder = PACKAGE / "weights"
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    if sum(sizes):
        return Finding("weights", "ok", f"{len(sizes)} built-in files, {sum(sizes) / 2**20:.1f} MiB")
    return Finding(
        "weights", "missing", "no built-in weights in tangolite/weights", "clone the repository again"
    )


def check_disk() -> Finding:
    """Room for checkpoints and pages where we are."""
    free = shutil.disk_usage(Path.cwd()).free / GIB
    if free < 1:
        return Finding("disk", "warn", f"{free:.1f} GiB free here, little for checkpoints", "make clean")
    return Finding("disk", "ok", f"{free:.0f} GiB free here")


def check_downloads() -> Finding:
    """The variables that forbid downloads; the tiny path never makes one."""
    values = [f"{name}={os.environ[name]}" for name in OFFLINE if os.environ.get(name)]
    if values:
        return Finding("downloads", "ok", f"forbidden by {', '.join(values)}: models must be on disk already")
    return Finding("downloads", "ok", "allowed; only recipes that name a model or data set of a hub make any")


CHECKS = (
    check_python, check_torch, check_core, check_cpu, check_memory, check_gpu, check_triton, check_large,
    check_grading, check_weights, check_jupyter, check_disk, check_downloads,
)  # fmt: skip


def examine(checks: Sequence[Callable[[], Finding]] = CHECKS) -> list[Finding]:
    """Every check's finding; a check that itself fails becomes a finding, too."""
    findings = []
    for check in checks:
        try:
            findings.append(check())
        except Exception as error:
            sentence = f"could not be looked at ({type(error).__name__}: {error})"
            findings.append(Finding(check.__name__.removeprefix("check_"), "warn", sentence))
    return findings


def verdicts(findings: list[Finding], memory: float, gpu_memory: float) -> list[tuple[str, list[Finding]]]:
    """What can be run, smallest first, each with what is in its way; memories in GiB, the wants are rough."""
    tiny = [finding for finding in findings if finding.state == "missing"]
    base = [Finding("the tiny path", "missing", "does not work yet")] if tiny else []
    large = base + [f for f in findings if f.what == "large" and f.state != "ok"]
    return [
        ("the tiny notebooks and recipes (CPU, no network)", tiny),
        (
            "a 135M model of your own (CPU, slowly; estimate, no recipe ships yet)",
            base + wanted("main memory", 7, memory),
        ),
        (
            "a 0.5B model in 4 bits with adapters (GPU; estimate, no recipe ships yet)",
            large + wanted("GPU memory", 7, gpu_memory),
        ),
        (
            "a 7B model in 4 bits with adapters (GPU; estimate, no recipe ships yet)",
            large + wanted("GPU memory", 22, gpu_memory),
        ),
    ]


def wanted(what: str, least: float, have: float) -> list[Finding]:
    """No finding when there is enough of something, else one."""
    short = Finding(what, "missing", f"about {least} GiB are wanted, {have:.0f} are here", "a larger machine")
    return [] if have >= least else [short]


def tell(what: str, blockers: list[Finding]) -> str:
    """A verdict as a person would say it."""
    if not blockers:
        return f"You can run: {what}."
    why = "; ".join(f"{finding.what}: {finding.sentence}" for finding in blockers)
    fixes = dict.fromkeys(finding.fix for finding in blockers if finding.fix)
    return f"You cannot run {what}, because {why}; to fix: {'; '.join(fixes) or 'that first'}."


def doctor() -> int:
    """Print every finding and the verdicts; returns 0 when the tiny path works, else 1."""
    findings = examine()
    for finding in findings:
        print(f"{finding.state:<8}{finding.what:<11}{finding.sentence}")
        if finding.fix:
            print(f"{'':<19}to fix: {finding.fix}")
    print()
    largest = max((gpu.total_memory for gpu in gpus()), default=0)
    reached = verdicts(findings, memory_bytes() / GIB, largest / GIB)
    print("\n".join(tell(what, blockers) for what, blockers in reached))
    return 1 if reached[0][1] else 0


if __name__ == "__main__":
    sys.path[0] = str(
        PACKAGE.parent
    )  # as a script: the package lies above, and its modules are no top-level names
    sys.exit(doctor())
