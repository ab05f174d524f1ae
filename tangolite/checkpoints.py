"""The folder of a run: logs, checkpoints that survive `kill -9`, trained policies.

A checkpoint is written beside its place, made durable and renamed into it, so it is there whole or not at
all; one that was damaged later is told by its checksums.  Weights, optimizer and random state are
safetensors, the rest is JSON: nothing in it can run code.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tangolite.adapters import save_adapter
from tangolite.covrl import CoVRL
from tangolite.models import Policy
from tangolite.parallel import is_spread, like, rank, wait_for_all, whole
from tangolite.settings import RunError
from tangolite.tango import Tango

KEEP = 2  # checkpoints
LOGS = ("metrics.jsonl", "timing.jsonl")

Run = Tango | CoVRL


@contextmanager
def writing(what: str | Path) -> Iterator[None]:
    """A full disk or a folder that cannot be written becomes a RunError that says what to do."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{what} could not be written ({error}). Checkpoints already written are whole: make room, or "
            f"make the folder writable, then go on with --resume"
        ) from error


# --- a run and its weights ---------------------------------------------------------------------------


def learners(run: Run) -> dict[str, tuple[Policy, torch.optim.Optimizer]]:
    """Name -> (policy, optimizer) of everything that trains."""
    if isinstance(run, Tango):
        return {name: (player.policy, player.optimizer) for name, player in run.players.items()}
    return {"policy": (run.policy, run.optimizer)}


def checksum(policy: Policy) -> str:
    """A fingerprint of all weights, to tell whether two policies are the same bits."""
    digest = hashlib.sha256()
    for name, p in sorted(policy.model.named_parameters()):
        digest.update(name.encode() + whole(p.detach()).cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def origin(run: Run) -> dict[str, str]:
    """Fingerprints of what a run begins with: the weights of every learner, and the problems.

    A resumed run needs the same again: the references of the KL penalty are the starting weights, and the
    problems of later updates are drawn from the task.
    """
    found = {f"the weights of the {name}": checksum(policy) for name, (policy, _) in learners(run).items()}
    for name in ("task", "verifier_task"):
        if (task := getattr(run, name, None)) is not None:
            found[f"the {name}"] = hashlib.sha256(repr(task).encode()).hexdigest()
    return found


def save_policies(out: Path, run: Run) -> None:
    """The trained policies in `policies/`: all of them or none, which is what marks a run as finished."""
    beside = out / ".policies.writing"
    weights = {name: whole_state(policy) for name, (policy, _) in learners(run).items()}
    if rank() == 0:
        with writing(out / "policies"):
            shutil.rmtree(beside, ignore_errors=True)
            for name, (policy, _) in learners(run).items():
                save_policy(policy, beside / name, weights[name])
            os.rename(beside, out / "policies")
    wait_for_all()


def whole_state(policy: Policy) -> dict[str, torch.Tensor] | None:
    """Weights that are spread over the processes, brought together for a file; None where they are whole."""
    if not is_spread(policy):
        return None
    return {name: whole(p.detach()).cpu() for name, p in policy.model.named_parameters()}


def save_policy(policy: Policy, folder: str | Path, weights: dict | None = None) -> None:
    """A folder that `load_policy`, and transformers itself, can open; for an adapter one that peft opens."""
    from transformers.utils import logging

    if policy.adapter is not None:
        return save_adapter(policy, folder)
    logging.disable_progress_bar()
    policy.model.save_pretrained(folder, safe_serialization=True, state_dict=weights)
    policy.tokenizer.save_pretrained(folder)


def finished(out: str | Path) -> bool:
    """Has the run in this folder come to its end?"""
    return (Path(out) / "policies").is_dir()


# --- checkpoints -------------------------------------------------------------------------------------


def checkpoints(out: str | Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    return sorted(Path(out).glob("checkpoints/update-*"))


def save_checkpoint(out: str | Path, run: Run, done: int, began_with: dict[str, str]) -> Path:
    """Write everything that the next update depends on, all or nothing; the newest two are kept.

    ``began_with`` is the `origin` of the run, taken before its first update.
    """
    folder = Path(out) / "checkpoints"
    target, beside = folder / f"update-{done:06d}", folder / f".writing-{done:06d}"
    files = _files(run)
    if rank() == 0 and not target.exists():  # the same updates give the same bits
        _put_in_place(out, target, beside, files, run, done, began_with)
    wait_for_all()
    return target


def _put_in_place(out, target: Path, beside: Path, files, run: Run, done: int, began_with) -> None:
    folder = target.parent
    with writing(target):
        try:
            _write(beside, files, run, done, began_with)
            for log in LOGS:
                sync(Path(out) / log)
            os.rename(beside, target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
        sync(folder)
        prune(out)


def prune(out: str | Path) -> None:
    """Remove all checkpoints but the newest; one that is half removed is not taken for a whole one."""
    for old in checkpoints(out)[:-KEEP]:
        gone = old.with_name(f".old-{old.name}")
        os.rename(old, gone)
        shutil.rmtree(gone, ignore_errors=True)


def _files(run: Run) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of every file; where weights are spread out, all processes meet here."""
    files = {}
    for name, (policy, optimizer) in learners(run).items():
        files[f"{name}.safetensors"] = _weights(policy)
        files[f"{name}.optimizer.safetensors"] = _optimizer_tensors(optimizer)
    return files


def _write(beside: Path, files: dict, run: Run, done: int, began_with: dict[str, str]) -> None:
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for name, tensors in files.items():
        save_file(tensors, beside / name)
    save_file({"torch": torch.get_rng_state()}, beside / "rng.safetensors")
    state = {
        "format": 1, "update": done, "data_position": done, "seed": run.config.seed,
        "next_turn": run.config.turn(done) if isinstance(run, Tango) else "policy",
        "run": run.state_dict(), "torch": torch.__version__,
        "lr": {name: opt.param_groups[0]["lr"] for name, (_, opt) in learners(run).items()},
        "began_with": began_with,
    }  # fmt: skip
    (beside / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    sums = {path.name: _digest(path) for path in sorted(beside.iterdir())}
    (beside / "checksums.json").write_text(json.dumps(sums, indent=1), encoding="utf-8")
    for path in beside.iterdir():
        sync(path)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Make the operating system write a file down, or a folder's entries where it has a way to."""
    folder = path.is_dir()
    with suppress(OSError) if folder else suppress(FileNotFoundError):
        handle = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _weights(policy: Policy) -> dict[str, torch.Tensor]:
    named = policy.named_parameters()
    return {name: whole(p.detach()).cpu().contiguous().clone() for name, p in named.items()}


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"{i}.{k}": whole(torch.as_tensor(v)).cpu().clone()
        for i, slot in state.items()
        for k, v in slot.items()
    }


def remove_leftovers(out: Path) -> None:
    """What a killed process left beside the place that it was writing to."""
    for pattern in (".writing-*", ".old-*"):
        for path in out.glob(f"checkpoints/{pattern}"):
            shutil.rmtree(path, ignore_errors=True)


def load_checkpoint(path: str | Path, run: Run) -> int:
    """Put a run that has just been started into the state of a checkpoint; returns the updates done.

    Raises RunError, before anything of the run has changed, for a checkpoint that is damaged or that began
    with other weights or problems than this run.
    """
    path = Path(path)
    try:
        sums = json.loads((path / "checksums.json").read_text(encoding="utf-8"))
        if damaged := [name for name, value in sums.items() if _digest(path / name) != value]:
            raise ValueError(f"{', '.join(damaged)} changed after writing")
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        _same_origin(path, state["began_with"], origin(run))
        for name, (policy, optimizer) in learners(run).items():
            _load_weights(policy, load_file(path / f"{name}.safetensors"))
            _load_optimizer(optimizer, load_file(path / f"{name}.optimizer.safetensors"), state["lr"][name])
        run.load_state_dict(state["run"])
        torch.set_rng_state(load_file(path / "rng.safetensors")["torch"])
        return state["update"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RunError):
            raise
        others = [p for p in checkpoints(path.parent.parent) if p < path]
        before = f"from {others[-1].name}" if others else "from the start, since it is the only one"
        raise RunError(
            f"the checkpoint {path} cannot be used ({type(error).__name__}: {error}). Delete this folder and "
            f"give the same command again to go on {before}"
        ) from error


def _same_origin(path: Path, there: dict[str, str], here: dict[str, str]) -> None:
    if differ := [what for what in {**there, **here} if there.get(what) != here.get(what)]:
        raise RunError(
            f"the checkpoint {path} belongs to a run that began otherwise: {' and '.join(differ)} changed "
            f"since. Put back what the run began with, or start a new run in another folder"
        )


def _load_weights(policy: Policy, saved: dict[str, torch.Tensor]) -> None:
    own = policy.named_parameters()
    if set(own) != set(saved):
        raise ValueError(f"other parameters than the model's: {sorted(set(own) ^ set(saved))[:3]}")
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(like(p, saved[name]))


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, torch.Tensor], lr: float) -> None:
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in saved.items():
        index, name = key.split(".")
        slots.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    every = [p for group in optimizer.param_groups for p in group["params"]]
    for index, slot in slots.items():
        slots[index] = {k: like(every[index], v) if v.dim() else v for k, v in slot.items()}
    optimizer.load_state_dict({"state": slots, "param_groups": groups})
    for group in optimizer.param_groups:
        group["lr"] = lr


# --- logs --------------------------------------------------------------------------------------------


def append(path: Path, row: dict[str, Any]) -> None:
    """One more line of a log; a metric that has no value in this batch (NaN) is left out: JSON has none."""
    row = {k: v for k, v in row.items() if not isinstance(v, float) or math.isfinite(v)}
    with writing(path), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_metrics(out: str | Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`, also while it is being written."""
    return [json.loads(line) for line in _lines(Path(out) / "metrics.jsonl")]


def _lines(path: Path) -> list[str]:
    """The whole lines of a log: one that a kill cut off has no end."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if line.endswith("\n")]


def cut_logs(out: Path, done: int) -> None:
    """Drop what the logs say of updates after ``done``; they will be made again."""
    for path in (out / name for name in LOGS if (out / name).exists()):
        try:
            kept = [line for line in _lines(path) if json.loads(line)["update"] <= done]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(
                f"{path} was damaged ({error}): mend it, or move it away to go on without"
            ) from error
        replace_text(path, "".join(kept))


def replace_text(path: Path, text: str) -> None:
    """Write a whole file, so that a reader or a crash sees the old one or the new one."""
    beside = path.with_name(f".{path.name}.writing")
    with writing(path):
        beside.write_text(text, encoding="utf-8")
        sync(beside)
        os.replace(beside, path)
