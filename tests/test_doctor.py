"""The doctor tells the truth about a machine, whatever is missing from it."""

from __future__ import annotations

import builtins
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tangolite import doctor as module
from tangolite.doctor import Finding, doctor, examine, tell, verdicts

EVERYTHING = ("torch", "triton", *module.CORE, *module.JUPYTER, *module.LARGE)


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)  # importing it now raises ImportError


def fake_torch(*gpus: SimpleNamespace, cuda: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        __version__="9.9",
        version=SimpleNamespace(cuda=cuda, hip=None),
        get_num_threads=lambda: 3,
        cuda=SimpleNamespace(
            is_available=lambda: bool(gpus),
            device_count=lambda: len(gpus),
            get_device_properties=lambda index: gpus[index],
        ),
    )


T4 = SimpleNamespace(name="Tesla T4", total_memory=16 * 2**30, major=7)
A100 = SimpleNamespace(name="A100", total_memory=80 * 2**30, major=8)


def healthy() -> list[Finding]:
    return [Finding(check.__name__.removeprefix("check_"), "ok", "fine") for check in module.CHECKS]


def test_every_check_has_a_finding_of_a_known_state_and_a_sentence() -> None:
    findings = examine()
    assert len(findings) == len(module.CHECKS) == len({finding.what for finding in findings})
    assert {finding.state for finding in findings} <= {"ok", "warn", "missing"}
    assert all(finding.sentence for finding in findings)
    assert all(finding.fix for finding in findings if finding.state == "missing")


def test_nothing_crashes_when_every_package_is_missing(monkeypatch, capsys) -> None:
    hide(monkeypatch, *EVERYTHING, "tangolite.grading")
    assert doctor() == 1
    printed = capsys.readouterr().out
    for name in EVERYTHING:
        assert name in printed
    assert "You cannot run the tiny notebooks" in printed
    assert "make setup" in printed


@pytest.mark.parametrize(
    ("name", "check", "state"),
    [
        ("torch", module.check_torch, "missing"),
        ("transformers", module.check_core, "missing"),
        ("yaml", module.check_core, "missing"),
        ("ipykernel", module.check_jupyter, "missing"),
        ("bitsandbytes", module.check_large, "warn"),
        ("peft", module.check_large, "warn"),
        ("accelerate", module.check_large, "warn"),
        ("triton", module.check_triton, "warn"),
        ("tangolite.grading", module.check_grading, "missing"),
    ],
)
def test_a_missing_package_is_named_with_a_way_to_fix_it(monkeypatch, name, check, state) -> None:
    hide(monkeypatch, name)
    finding = check()
    assert finding.state == state
    assert name in finding.sentence or name == "triton"
    assert finding.fix


def test_a_package_that_fails_while_importing_counts_as_missing(monkeypatch) -> None:
    real_import = module.importlib.import_module

    def broken(name: str):
        if name == "torch":
            raise OSError("undefined symbol")
        return real_import(name)

    monkeypatch.setattr(module.importlib, "import_module", broken)
    assert module.check_torch().state == "missing"


def test_a_check_that_raises_becomes_a_warning() -> None:
    def check_moon() -> Finding:
        raise RuntimeError("eclipse")

    (finding,) = examine([check_moon])
    assert (finding.what, finding.state) == ("moon", "warn")
    assert "eclipse" in finding.sentence


@pytest.mark.parametrize(("right", "wrong"), [(False, False), (True, True)])
def test_a_grader_that_grades_wrongly_is_not_ok(monkeypatch, right, wrong) -> None:
    grader = SimpleNamespace(answers_match=lambda answer, gold: right if gold == "0.5" else wrong)
    monkeypatch.setitem(sys.modules, "tangolite.grading", grader)
    assert module.check_grading().state == "missing"


def test_a_grader_that_grades_rightly_is_ok(monkeypatch) -> None:
    grader = SimpleNamespace(answers_match=lambda answer, gold: gold == "0.5")
    monkeypatch.setitem(sys.modules, "tangolite.grading", grader)
    assert module.check_grading().state == "ok"


def test_gpus_are_named_with_memory_and_bfloat16(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(T4, A100, cuda="13.0"))
    sentence = module.check_gpu().sentence
    assert "Tesla T4, 16 GiB, float16 alone" in sentence
    assert "A100, 80 GiB, bfloat16" in sentence
    assert "CUDA 13.0" in module.check_torch().sentence


def test_no_gpu_is_a_limit_but_not_in_the_way_of_the_tiny_path(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    assert module.check_gpu().state == "warn"


def test_triton_names_its_interpreter(monkeypatch) -> None:
    monkeypatch.setattr(module, "installed", lambda name: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreter (slow" in module.check_triton().sentence
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setitem(sys.modules, "torch", fake_torch())
    assert "idle without a GPU" in module.check_triton().sentence
    monkeypatch.setitem(sys.modules, "torch", fake_torch(A100))
    assert "idle" not in module.check_triton().sentence


def test_memory_is_unknown_where_the_system_has_no_sysconf(monkeypatch) -> None:
    monkeypatch.delattr(os, "sysconf", raising=False)  # Windows
    monkeypatch.setattr(Path, "read_text", lambda self: "max\n")
    assert module.memory_bytes() == float("inf")
    assert module.check_memory().state == "warn"


def test_a_container_limit_below_the_machine_counts(monkeypatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: str(2**30))
    assert module.memory_bytes() == 2**30
    assert module.check_memory().state == "missing"


def test_cores_are_counted_where_there_is_no_affinity(monkeypatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert module.check_cpu().sentence.startswith("7 cores")


def test_weights_are_found_only_when_there_are_bytes(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(module, "PACKAGE", tmp_path)
    assert module.check_weights().state == "missing"
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny.safetensors").touch()
    assert module.check_weights().state == "missing"
    (tmp_path / "weights" / "tiny.safetensors").write_bytes(b"12345")
    assert module.check_weights().state == "ok"


def test_a_full_disk_and_forbidden_downloads_are_said(monkeypatch) -> None:
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))
    assert module.check_disk().state == "warn"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE=1" in module.check_downloads().sentence
    for name in module.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    assert "allowed" in module.check_downloads().sentence


def test_a_healthy_machine_without_gpu_runs_the_two_smaller_things() -> None:
    blocked = [bool(blockers) for _, blockers in verdicts(healthy(), memory=16, gpu_memory=0)]
    assert blocked == [False, False, True, True]


def test_memory_decides_between_the_larger_things() -> None:
    assert [bool(b) for _, b in verdicts(healthy(), memory=4, gpu_memory=16)] == [False, True, False, True]
    assert [bool(b) for _, b in verdicts(healthy(), memory=64, gpu_memory=80)] == [False] * 4


def test_one_missing_thing_blocks_everything_and_a_warning_blocks_nothing() -> None:
    missing = [*healthy(), Finding("torch", "missing", "gone", "install it")]
    assert all(blockers for _, blockers in verdicts(missing, memory=64, gpu_memory=80))
    limited = [*healthy(), Finding("triton", "warn", "gone", "install it")]
    assert not any(blockers for _, blockers in verdicts(limited, memory=64, gpu_memory=80))


def test_missing_adapters_block_the_large_models_alone() -> None:
    findings = [*healthy(), Finding("large", "warn", "not installed: peft", "pip")]
    assert [bool(b) for _, b in verdicts(findings, memory=64, gpu_memory=80)] == [False, False, True, True]


def test_a_verdict_says_why_and_how_to_fix_it() -> None:
    assert tell("x", []) == "You can run: x."
    said = tell(
        "x", [Finding("torch", "missing", "gone", "install it"), Finding("y", "missing", "off", "install it")]
    )
    assert said == "You cannot run x, because torch: gone; y: off; to fix: install it."


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("warn", 0), ("missing", 1)])
def test_the_exit_code_follows_the_tiny_path(monkeypatch, capsys, state, code) -> None:
    monkeypatch.setattr(module, "examine", lambda: [Finding("torch", state, "so it is", "do that")])
    assert doctor() == code
    assert "so it is" in capsys.readouterr().out


def test_the_network_is_not_touched(monkeypatch, capsys) -> None:
    def refuse(*arguments, **keywords):
        raise AssertionError("the doctor reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    doctor()
    assert "reached for the network" not in capsys.readouterr().out


def test_importing_it_needs_the_standard_library_alone(monkeypatch) -> None:
    foreign = []
    real_import = builtins.__import__

    def watch(name, *arguments, **keywords):
        if name.split(".")[0] not in sys.stdlib_module_names:
            foreign.append(name)
        return real_import(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", watch)
    exec(
        compile(Path(module.__file__).read_text("utf-8"), module.__file__, "exec"),
        {"__name__": "doctor_alone", "__file__": module.__file__},
    )
    assert foreign == []


def test_it_runs_as_a_script_in_a_python_without_any_package(tmp_path) -> None:
    command = [sys.executable, "-I", "-S", str(Path(module.__file__))]  # -S: no site-packages
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1, result.stderr
    assert "torch cannot be imported" in result.stdout
    assert "You cannot run the tiny notebooks" in result.stdout
