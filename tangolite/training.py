"""The loop around both methods: updates, callbacks, metrics, checkpoints, and going on after an interruption.

A run's folder holds `recipe.yaml` (every setting), `metrics.jsonl` (one object per update, the same bits
however often the run was interrupted), `timing.jsonl` (what the clock said), `checkpoints/` and, at the
end, the trained policies in `policies/`.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file

from tangolite.checkpoints import (
    Run,
    append,
    checkpoints,
    cut_logs,
    finished,
    learners,
    load_checkpoint,
    origin,
    prune,
    remove_leftovers,
    replace_text,
    save_checkpoint,
    save_policies,
    writing,
)
from tangolite.covrl import CoVRL
from tangolite.parallel import agreed, join_team, processes, rank, wait_for_all
from tangolite.rollouts import Rollouts, tensors_of
from tangolite.settings import Config, RunError, load_recipe, plain
from tangolite.tango import Tango
from tangolite.updates import NonFiniteError, check_tensors

Callback = Callable[[Run, int, dict], dict | None]  # (run, updates done, metrics) -> more metrics
SHOWN = ("reward", "step_truth", "step_balanced")  # beside the progress


class Interrupted(RunError):
    """The user stopped a run; the message says how to go on."""


def start(config: Config) -> Run:
    """The state of a new run.  Raises OSError or ValueError for models or problems that cannot be read."""
    return Tango(config) if config.method == "tango" else CoVRL(config)


def train(
    config: Config,
    out: str | Path,
    *,
    resume: bool = False,
    callbacks: Iterable[Callback] = (),
    run: Run | None = None,
) -> Run:
    """Run a recipe to its end, in a folder of its own; a run given is one that has just been started.

    Each callback sees (run, updates done, metrics) after every update; what it returns joins the metrics.
    An interrupt (Ctrl-C, or the stop button of a notebook) lets the update end, writes a checkpoint and
    raises Interrupted; a second one stops at once, and the run goes on from the last checkpoint.  A finished
    run that is resumed is loaded and left as it is.  Raises RunError for a folder that holds another run, or
    a finished or unfinished one without ``resume``, and for a number that is not finite, which it names.
    """
    out = Path(out)
    join_team()
    _check_folder(out, config, resume)
    wait_for_all()
    run = run or start(config)
    if run.config != config:
        raise RunError("the run given has another recipe than the one to train")
    began_with = origin(run)
    if processes() > 1 and rank() == 0:
        print(f"{processes()} processes work on this run", file=sys.stderr)
    if finished(out):
        return _finished(out, run)
    _write_recipe(out, config)
    torch.manual_seed(config.seed)  # nothing here draws from it, but a model of your own may (dropout)
    done = _resume(out, run) if resume else 0
    try:
        _loop(run, out, done, began_with, list(callbacks))
    except KeyboardInterrupt:
        raise Interrupted(f"stopped within an update, which is lost; {_how_to_go_on(out)}") from None
    save_policies(out, run)
    return run


def _loop(run: Run, out: Path, done: int, began_with: dict[str, str], callbacks: list[Callback]) -> None:
    every, total = run.config.checkpoint_every, run.config.updates
    with Progress(total, done, silent=rank() > 0) as progress, Stop() as stop:
        while done < total:
            metrics = _one_update(run, done, out, callbacks)
            done += 1
            seconds, asked = progress.tick(done, metrics), agreed(stop.asked)
            if rank() == 0:
                append(out / "metrics.jsonl", {"update": done} | metrics)
                append(out / "timing.jsonl", {"update": done, "seconds": seconds})
            if done % every == 0 or done == total or asked:
                save_checkpoint(out, run, done, began_with)
            if asked and done < total:
                raise Interrupted(f"stopped after update {done}; {_how_to_go_on(out)}")


def _one_update(run: Run, done: int, out: Path, callbacks: list[Callback]) -> dict[str, Any]:
    try:
        metrics = run.update(done)
        for callback in callbacks:
            metrics |= callback(run, done + 1, metrics) or {}
        for name, (policy, _) in learners(run).items():  # before a checkpoint keeps them
            check_tensors(f"the {name}'s weight", policy.named_parameters(), {}, changed=True)
        return metrics
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise RunError(
            f"update {done + 1}: out of memory ({reason}). The last checkpoint is kept. Start "
            f"a new run with smaller parts (--set micro_batch=1 sample_batch=1 checkpointing=true), shorter "
            f"completions or 4 bits (quantize=nf4); train --dry-run says what a recipe needs"
        ) from None
    except NonFiniteError as error:
        kept = "This update is dropped" if error.changed else "The weights were not changed"
        raise RunError(
            f"update {done + 1}: {error}. {kept}, the last checkpoint is kept. {_saved(error.batch, out, done)}Go "
            f"on from there with --resume, or start a new run with a lower learning rate (--set lr=...)"
        ) from None


def _saved(batch: dict[str, Rollouts], out: Path, done: int) -> str:
    """Write a batch that made a number not finite, and say where; any process may have met it alone."""
    if not batch:
        return ""
    who = f"-process-{rank()}" if rank() else ""
    path = out / f"nonfinite-update-{done + 1:06d}{who}.safetensors"
    with writing(path):
        save_file(tensors_of(batch), path)
    return f"The batch is in {path}: look at it. "


class Stop:
    """Notes an interrupt, so that the update in hand becomes whole first; a second one stops at once.

    Interrupts reach the main thread alone: in another one there is nothing to note.
    """

    def __init__(self) -> None:
        self.asked = False
        self.main = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Stop:
        self.before = signal.signal(signal.SIGINT, self._ask) if self.main else None
        return self

    def __exit__(self, *_: object) -> None:
        if self.main:
            signal.signal(signal.SIGINT, self.before or signal.SIG_DFL)

    def _ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        with suppress(RuntimeError):  # where the interrupt came in the middle of another print
            print("\nstopping after this update; interrupt again to stop at once", file=sys.stderr)


class Progress:
    """A bar with rate and time left on a terminal; a line now and then elsewhere."""

    def __init__(self, total: int, done: int, every: float = 10.0, silent: bool = False) -> None:
        from tqdm import tqdm

        self.bar = tqdm(
            total=total, initial=done, unit="update", disable=silent or None, file=sys.stderr,
            dynamic_ncols=True,
        )  # fmt: skip
        self.silent = silent
        self.total, self.first, self.every, self.began = total, done, every, time.monotonic()
        self.last = self.spoken = self.began

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def tick(self, done: int, metrics: dict[str, Any]) -> float:
        """Count one update; returns the seconds it took."""
        now = time.monotonic()
        seconds, self.last = now - self.last, now
        shown = ", ".join(f"{name} {metrics[name]:.3f}" for name in SHOWN if name in metrics)
        self.bar.set_postfix_str(shown, refresh=False)
        self.bar.update(1)
        if self.bar.disable and not self.silent and (now - self.spoken > self.every or done == self.total):
            self.spoken, rate = now, (now - self.began) / (done - self.first)
            left = (self.total - done) * rate
            line = f"update {done}/{self.total}, {rate:.2f} s each, {left:.0f} s left, {shown}"
            print(line, file=sys.stderr, flush=True)
        return round(seconds, 4)


# --- the folder of a run -----------------------------------------------------------------------------


def _check_folder(out: Path, config: Config, resume: bool) -> None:
    """May this recipe be run here?  Looks only: what fails before the first update leaves no trace."""
    if not (out / "recipe.yaml").exists():
        empty = not out.exists() or (out.is_dir() and all(p.name.startswith(".") for p in out.iterdir()))
        if not empty:
            raise RunError(f"{out} is not an empty folder and holds no run; choose another --out")
        return
    if not resume:
        state = "a finished" if finished(out) else "an unfinished"
        raise RunError(f"{out} already holds {state} run; add --resume to go on, or choose another --out")
    old, new = plain(load_recipe(out / "recipe.yaml")), plain(config)
    differ = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if differ:
        lines = "".join(f"\n  {k}: there {old.get(k)!r}, asked for {new.get(k)!r}" for k in sorted(differ))
        raise RunError(f"{out} holds a run of another recipe, so it cannot be resumed:{lines}")


def _write_recipe(out: Path, config: Config) -> None:
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    if rank() == 0 and not (out / "recipe.yaml").exists():
        replace_text(out / "recipe.yaml", yaml.safe_dump(plain(config), sort_keys=False, allow_unicode=True))


def _resume(out: Path, run: Run) -> int:
    """Load the newest checkpoint and cut the logs back to it; returns the updates done."""
    found = checkpoints(out)
    done = load_checkpoint(found[-1], run) if found else 0
    say = f"going on after update {done}" if found else "no checkpoint yet: beginning with update 1"
    wait_for_all()
    if rank() == 0:
        print(f"{out}: {say}", file=sys.stderr)
        remove_leftovers(out)
        prune(out)  # a kill may have come between a new checkpoint and the removal of the oldest
        cut_logs(out, done)
    return done


def _finished(out: Path, run: Run) -> Run:
    if not checkpoints(out):
        raise RunError(f"{out} holds a finished run; its policies are in {out / 'policies'}")
    done = load_checkpoint(checkpoints(out)[-1], run)
    print(f"{out}: this run is finished ({done} updates); nothing was changed", file=sys.stderr)
    return run


def _how_to_go_on(out: Path) -> str:
    found = checkpoints(out)
    last = found[-1].name if found else "the start (there is no checkpoint yet)"
    return f"go on from {last} with: python -m tangolite train --out {out} --resume"
