"""Make the built-in weights, each with a manifest of what was made: `python -m tangolite warmstart`.

A manifest holds the model's checksum, the first losses of every lesson and (of the verifier, and of the
CoVRL policy) the skill measured afterwards, so that a test can hold the shipped files against the
command that made them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tangolite.checkpoints import checksum, save_policy
from tangolite.covrl import CoVRL, CoVRLConfig
from tangolite.evaluate import evaluate
from tangolite.models import Policy, load_policy, tiny_policy
from tangolite.settings import RunError, load_recipe
from tangolite.tango import Tango, TangoConfig
from tangolite.warmstart import Lesson, covrl_lesson, tango_lessons, teach

FIRST = 20  # losses kept of each lesson, and averaged at its end
ATTEMPTS = 3  # initialisations tried until a lesson is learned


def make_weights(out: str | Path, seed: int, only: str | None = None) -> int:
    """All built-in models of a seed, in one folder; goes on where an earlier call stopped."""
    out = Path(out)
    if only in (None, "tango"):
        for name, course in tango_lessons(seed).items():
            begin = partial(_fresh, seed) if name == "base" else lambda _: _load(out / "tiny-base")
            _make(out, f"tiny-{name}", begin, course, seed)
    if only in (None, "covrl"):
        _make(out, "tiny-covrl", partial(_fresh, seed), [covrl_lesson(seed)], seed)
    _measure(out)
    return 0


def _fresh(seed: int, attempt: int) -> Policy:
    return tiny_policy(seed + 1000 * attempt)


def _load(folder: Path) -> Policy:
    policy = load_policy(folder)
    policy.model.requires_grad_(True)
    return policy


def _make(out: Path, name: str, begin: Callable[[int], Policy], course: list[Lesson], seed: int) -> None:
    """Teach one model; a lesson that was not learned starts over from another initialisation."""
    folder, began = out / name, time.monotonic()
    if (folder / "model.safetensors").exists():
        print(f"{name}: already in {folder}")
        return
    for attempt in range(ATTEMPTS):
        print(f"{name}, attempt {attempt + 1}:")
        policy, lessons = begin(attempt), []
        for lesson in course:
            losses = teach(policy, lesson, seed, lambda line: print(line, file=sys.stderr))
            lessons.append(_report(lesson, losses))
        if all(report["learned"] for report in lessons):
            break
    else:
        raise RunError(f"{name} did not learn {course[0].what!r} in {ATTEMPTS} attempts; take another --seed")
    save_policy(policy, folder)
    made = {"seed": seed, "attempt": attempt, "torch": torch.__version__, "lessons": lessons}
    _note(out, name, made | {"sha256": checksum(policy), "seconds": round(time.monotonic() - began)})


def _report(lesson: Lesson, losses: list[float]) -> dict:
    last = sum(losses[-FIRST:]) / FIRST
    return {
        "what": lesson.what, "updates": lesson.updates, "lr": lesson.lr, "last_loss": round(last, 5),
        "first_losses": [round(x, 5) for x in losses[:FIRST]],
        "learned": lesson.enough is None or last < lesson.enough,
    }  # fmt: skip


def _measure(out: Path) -> None:
    """The skill of what stands in the folder, on held-out problems: of both Tango players together."""
    if (out / "tiny-verifier" / "model.safetensors").exists():
        run = tango_start(out, load_recipe("tango-tiny"))
        _note(out, "tiny-verifier", {"skill": evaluate(run)})
    if (out / "tiny-covrl" / "model.safetensors").exists():
        _note(out, "tiny-covrl", {"skill": evaluate(covrl_start(out, load_recipe("covrl-tiny")))})
    print(f"weights and their manifests are in {out}")


def tango_start(weights: Path, config: TangoConfig) -> Tango:
    """A Tango run that starts from the models of a folder."""
    return Tango(config, _load(weights / "tiny-generator"), _load(weights / "tiny-verifier"))


def covrl_start(weights: Path, config: CoVRLConfig) -> CoVRL:
    """A CoVRL run that starts from the model of a folder."""
    return CoVRL(config, _load(weights / "tiny-covrl"))


def _note(out: Path, name: str, entry: dict) -> None:
    """Add to a model's manifest."""
    path = out / name / "manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(manifest | entry, indent=1, sort_keys=True) + "\n")
