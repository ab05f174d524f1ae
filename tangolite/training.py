"""The loop around both methods: recipes, callbacks, metrics, checkpoints that survive `kill -9`.

A run's folder holds `recipe.yaml` (every setting), `metrics.jsonl` (one object per update, the same
bits however often the run was interrupted), `timing.jsonl` (what the clock said), `checkpoints/` and,
at the end, the trained policies in `policies/`.  A checkpoint is written beside its place and renamed
into it, so it is there whole or not at all.  Weights and optimizer state are safetensors, the rest JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

from tangolite.covrl import CoVRL, CoVRLConfig
from tangolite.models import Policy
from tangolite.rollouts import Rollouts
from tangolite.tango import Tango, TangoConfig
from tangolite.updates import NonFiniteError

RECIPES = Path(__file__).parent / "recipes"
KEEP = 2  # checkpoints

Config = TangoConfig | CoVRLConfig
Run = Tango | CoVRL
Callback = Callable[[Run, int, dict], dict | None]  # (run, updates done, metrics) -> more metrics


class RunError(RuntimeError):
    """Something about a run that its user can put right; the message says what to do."""


# --- recipes -----------------------------------------------------------------------------------------


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_recipe(name_or_file: str | Path, changes: Sequence[str] = ()) -> Config:
    """A recipe by name or YAML file, with ``key=value`` changes (``task.steps=4`` reaches inside).

    Raises RunError for an unknown recipe, key or value, naming what is known.
    """
    path = Path(name_or_file)
    if path.suffix not in (".yaml", ".yml"):
        path = RECIPES / f"{name_or_file}.yaml"
        if not path.is_file():
            known = ", ".join(recipe_names())
            raise RunError(f"unknown recipe {str(name_or_file)!r}: known are {known}, or give a YAML file")
    if not path.is_file():
        raise RunError(f"no recipe file at {path}")
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(settings, dict):
        raise RunError(f"{path}: a recipe is a mapping of settings, this is {type(settings).__name__}")
    for change in changes:
        _apply(settings, change)
    return config_of(settings, str(path))


def _apply(settings: dict, change: str) -> None:
    key, equals, value = change.partition("=")
    if not equals:
        raise RunError(f"--set takes key=value, got {change!r}")
    *outer, last = key.strip().split(".")
    for name in outer:
        settings = settings.setdefault(name, {})
        if not isinstance(settings, dict):
            raise RunError(f"--set {change}: {name!r} holds no settings of its own")
    settings[last] = yaml.safe_load(value)


def config_of(settings: dict, where: str) -> Config:
    """The dataclass of a method from plain settings, with types checked."""
    kinds = {"tango": TangoConfig, "covrl": CoVRLConfig}
    method = settings.get("method")
    if method not in kinds:
        raise RunError(f"{where}: method must be one of {', '.join(kinds)}, got {method!r}")
    known = {f.name: f for f in fields(kinds[method])}
    if unknown := sorted(set(settings) - set(known)):
        raise RunError(
            f"{where}: unknown setting {', '.join(unknown)}; {method} has {', '.join(sorted(known))}"
        )
    default = kinds[method]()
    try:
        values = {k: _typed(k, v, getattr(default, k)) for k, v in settings.items()}
        return kinds[method](**values)
    except ValueError as error:
        raise RunError(f"{where}: {error}") from None


def _typed(name: str, value, default):
    """``value`` as the type of the default; YAML reads 1e-4 as text, so numbers are read again."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
    elif isinstance(default, float | int):
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise ValueError(f"{name} must be a number, got {value!r}") from None
        if isinstance(default, int) and number != int(number):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        value = type(default)(number)
    elif isinstance(default, str) and not isinstance(value, str):
        raise ValueError(f"{name} must be text, got {value!r}")
    return value


def start(config: Config) -> Run:
    """The state of a new run."""
    return Tango(config) if config.method == "tango" else CoVRL(config)


# --- the loop ----------------------------------------------------------------------------------------


def train(
    config: Config,
    out: str | Path,
    *,
    resume: bool = False,
    callbacks: Iterable[Callback] = (),
    run: Run | None = None,
) -> Run:
    """Run a recipe to its end, in a folder of its own.

    Each callback sees (run, updates done, metrics) after every update; what it returns joins the metrics.
    An interrupt (Ctrl-C, or the stop button of a notebook) writes a checkpoint first.  Raises RunError for a
    folder that holds another run, or a finished or unfinished one without ``resume``.
    """
    out = Path(out)
    _claim(out, config, resume)
    run = run or start(config)
    done = _resume(out, config, run) if resume else 0
    progress, callbacks = Progress(config.updates, done), list(callbacks)
    try:
        while done < config.updates:
            metrics = _one_update(run, done, out, callbacks)
            done += 1
            _append(out / "metrics.jsonl", {"update": done} | metrics)
            _append(out / "timing.jsonl", {"update": done, "seconds": progress.tick(done, metrics)})
            if done % config.checkpoint_every == 0 or done == config.updates:
                save_checkpoint(out, config, run, done)
    except KeyboardInterrupt:
        save_checkpoint(out, config, run, done)
        raise RunError(f"stopped after update {done}; go on with --out {out} --resume") from None
    finally:
        progress.close()
    for name, (policy, _) in learners(run).items():
        save_policy(policy, out / "policies" / name)
    return run


def learners(run: Run) -> dict[str, tuple[Policy, torch.optim.Optimizer]]:
    """Name -> (policy, optimizer) of everything that trains."""
    if isinstance(run, Tango):
        return {name: (player.policy, player.optimizer) for name, player in run.players.items()}
    return {"policy": (run.policy, run.optimizer)}


def _one_update(run: Run, done: int, out: Path, callbacks: list[Callback]) -> dict:
    try:
        metrics = run.update(done)
    except NonFiniteError as error:
        path = out / f"nonfinite-update-{done + 1:06d}.safetensors"
        save_file(_tensors(error.batch), path)
        raise RunError(
            f"update {done + 1}: {error}. The weights were not changed; the batch is in {path}. The last "
            f"checkpoint is kept: lower the learning rate (--set lr=...) in a new run, or look at the batch."
        ) from None
    for callback in callbacks:
        metrics |= callback(run, done + 1, metrics) or {}
    return metrics


def _tensors(batch: dict[str, Rollouts]) -> dict[str, torch.Tensor]:
    pairs = (
        (f"{name}.{f.name}", getattr(part, f.name)) for name, part in batch.items() for f in fields(part)
    )
    return {key: value.detach().contiguous().clone() for key, value in pairs if value is not None}


def _append(path: Path, row: dict) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


class Progress:
    """A bar with rate and time left on a terminal; a line now and then elsewhere."""

    def __init__(self, total: int, done: int) -> None:
        from tqdm import tqdm

        self.bar = tqdm(
            total=total, initial=done, unit="update", disable=None, file=sys.stderr, dynamic_ncols=True
        )
        self.total, self.first, self.began = total, done, time.monotonic()
        self.last = self.spoken = self.began

    def tick(self, done: int, metrics: dict) -> float:
        """Count one update; returns the seconds it took."""
        now = time.monotonic()
        seconds, self.last = now - self.last, now
        shown = {k: f"{metrics[k]:.3f}" for k in ("reward", "step_truth", "step_balanced") if k in metrics}
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(1)
        if self.bar.disable and (now - self.spoken > 10 or done == self.total):
            self.spoken, rate = now, (now - self.began) / (done - self.first)
            left = (self.total - done) * rate
            print(
                f"update {done}/{self.total}, {rate:.2f} s each, {left:.0f} s left, {shown}", file=sys.stderr
            )
        return round(seconds, 4)

    def close(self) -> None:
        self.bar.close()


# --- the folder of a run -----------------------------------------------------------------------------


def _claim(out: Path, config: Config, resume: bool) -> None:
    recipe = out / "recipe.yaml"
    if recipe.exists():
        old = yaml.safe_load(recipe.read_text(encoding="utf-8"))
        new = json.loads(json.dumps(asdict(config)))
        differ = {k: (old.get(k), new.get(k)) for k in {**old, **new} if old.get(k) != new.get(k)}
        if not resume:
            raise RunError(
                f"{out} already holds a run; add --resume to go on with it, or choose another --out"
            )
        if differ:
            lines = "".join(f"\n  {k}: there {a!r}, asked for {b!r}" for k, (a, b) in sorted(differ.items()))
            raise RunError(f"{out} holds a run of another recipe, so it cannot be resumed:{lines}")
        return
    if out.exists() and (not out.is_dir() or any(not path.name.startswith(".") for path in out.iterdir())):
        raise RunError(f"{out} is not empty and holds no run; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    writing = out / ".recipe.yaml.writing"
    writing.write_text(
        yaml.safe_dump(json.loads(json.dumps(asdict(config))), sort_keys=False), encoding="utf-8"
    )
    os.replace(writing, recipe)


def recipe_of_run(out: str | Path) -> Config:
    """The recipe that a run's folder was made with."""
    path = Path(out) / "recipe.yaml"
    if not path.is_file():
        raise RunError(f"{out} holds no run (no recipe.yaml): start one with --recipe NAME --out {out}")
    return config_of(yaml.safe_load(path.read_text(encoding="utf-8")), str(path))


def checkpoints(out: str | Path) -> list[Path]:
    """Whole checkpoints of a run, oldest first."""
    return sorted(Path(out).glob("checkpoints/update-*"))


def save_checkpoint(out: str | Path, config: Config, run: Run, done: int) -> Path:
    """Write everything that the next update depends on, all or nothing."""
    folder = Path(out) / "checkpoints"
    target, writing = folder / f"update-{done:06d}", folder / f".writing-{done:06d}"
    if target.exists():
        return target  # the same updates give the same bits
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    for name, (policy, optimizer) in learners(run).items():
        save_file(_weights(policy), writing / f"{name}.safetensors")
        save_file(_optimizer_tensors(optimizer), writing / f"{name}.optimizer.safetensors")
    save_file({"torch": torch.get_rng_state()}, writing / "rng.safetensors")
    state = {
        "format": 1, "update": done, "next_turn": config.turn(done) if isinstance(run, Tango) else "policy",
        "data_position": done, "seed": config.seed, "run": run.state_dict(), "torch": torch.__version__,
        "lr": {name: opt.param_groups[0]["lr"] for name, (_, opt) in learners(run).items()},
    }  # fmt: skip
    (writing / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    for path in writing.iterdir():
        _sync(path)
    os.rename(writing, target)
    _sync(folder)
    for old in checkpoints(out)[:-KEEP]:
        gone = old.with_name(f".old-{old.name}")
        os.rename(old, gone)
        shutil.rmtree(gone, ignore_errors=True)
    return target


def _sync(path: Path) -> None:
    """Make the operating system write it down; folders cannot be opened on Windows."""
    with suppress(PermissionError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _weights(policy: Policy) -> dict[str, torch.Tensor]:
    named = policy.model.named_parameters()
    return {name: p.detach().cpu().contiguous().clone() for name, p in named if p.requires_grad}


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return {
        f"{i}.{k}": torch.as_tensor(v).cpu().clone() for i, slot in state.items() for k, v in slot.items()
    }


def _resume(out: Path, config: Config, run: Run) -> int:
    """Load the newest checkpoint and cut the logs back to it; returns the updates done."""
    for leftover in out.glob("checkpoints/.*"):
        shutil.rmtree(leftover, ignore_errors=True)
    found = checkpoints(out)
    done = load_checkpoint(found[-1], run) if found else 0
    for name in ("metrics.jsonl", "timing.jsonl"):
        _cut(out / name, done)
    return done


def load_checkpoint(path: str | Path, run: Run) -> int:
    """Put a run into the state of a checkpoint; returns the number of updates done.

    Raises RunError when the checkpoint cannot be read or belongs to other models.
    """
    path = Path(path)
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        for name, (policy, optimizer) in learners(run).items():
            _load_weights(policy, load_file(path / f"{name}.safetensors"))
            _load_optimizer(optimizer, load_file(path / f"{name}.optimizer.safetensors"), state["lr"][name])
        run.load_state_dict(state["run"])
        torch.set_rng_state(load_file(path / "rng.safetensors")["torch"])
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        hint = "delete this folder to go on from the checkpoint before it"
        raise RunError(f"the checkpoint {path} cannot be used ({error}); {hint}") from error
    return state["update"]


def _load_weights(policy: Policy, saved: dict[str, torch.Tensor]) -> None:
    own = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    if set(own) != set(saved):
        raise ValueError(f"other parameters than the model's: {sorted(set(own) ^ set(saved))[:3]}")
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(saved[name])


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, torch.Tensor], lr: float) -> None:
    slots: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in saved.items():
        index, name = key.split(".")
        slots.setdefault(int(index), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": slots, "param_groups": groups})
    for group in optimizer.param_groups:
        group["lr"] = lr


def _cut(path: Path, done: int) -> None:
    """Drop what a log says of updates after ``done``, and a last line that was cut off."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):
            if json.loads(line)["update"] <= done:
                kept.append(line + "\n")
    writing = path.with_name(f".{path.name}.writing")
    writing.write_text("".join(kept), encoding="utf-8")
    os.replace(writing, path)


def read_metrics(out: str | Path) -> list[dict]:
    """The rows of a run's `metrics.jsonl`."""
    lines = (Path(out) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def save_policy(policy: Policy, folder: str | Path) -> None:
    """A folder that `load_policy`, and transformers itself, can open."""
    policy.model.save_pretrained(folder, safe_serialization=True)
    policy.tokenizer.save_pretrained(folder)


def checksum(policy: Policy) -> str:
    """A fingerprint of all weights, to tell whether two policies are the same bits."""
    digest = hashlib.sha256()
    for name, p in sorted(policy.model.named_parameters()):
        digest.update(name.encode() + p.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def with_seed(config: Config, seed: int, **changes) -> Config:
    """The same recipe with another seed, and whatever else differs between the arms of a comparison."""
    return replace(config, seed=seed, **changes)
