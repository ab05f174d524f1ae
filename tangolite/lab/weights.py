"""Make the built-in weights, each with a manifest of what was made: `python -m tangolite warmstart`.

A manifest holds the model's checksum, the first losses of every lesson and (of the verifier, and of the
CoVRL policy) the skill measured afterwards, so that a test can hold the shipped files against the
command that made them.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from tangolite.covrl import CoVRL, CoVRLConfig
from tangolite.evaluate import evaluate
from tangolite.models import Policy, load_policy, tiny_policy, trainable_copy
from tangolite.tango import Tango, TangoConfig
from tangolite.training import checksum, load_recipe, save_policy
from tangolite.warmstart import covrl_lesson, tango_lessons, teach

FIRST = 20  # losses kept of each lesson


def make_weights(out: str | Path, seed: int, only: str | None = None) -> int:
    """All built-in models of a seed, in one folder; goes on where an earlier call stopped."""
    out = Path(out)
    if only in (None, "tango"):
        for name, course in tango_lessons(seed).items():
            start = tiny_policy(seed) if name == "base" else trainable_copy(_load(out / "tiny-base"))
            _make(out, f"tiny-{name}", start, course, seed)
    if only in (None, "covrl"):
        _make(out, "tiny-covrl", tiny_policy(seed), [covrl_lesson(seed)], seed)
    _measure(out)
    return 0


def _load(folder: Path) -> Policy:
    policy = load_policy(folder)
    policy.model.requires_grad_(True)
    return policy


def _make(out: Path, name: str, policy: Policy, course, seed: int) -> None:
    folder = out / name
    if (folder / "model.safetensors").exists():
        print(f"{name}: already in {folder}")
        return
    print(f"{name}:")
    began, lessons = time.monotonic(), []
    for lesson in course:
        losses = teach(policy, lesson, seed, lambda line: print(line, file=sys.stderr))
        rounded = [round(loss, 5) for loss in losses]
        lessons.append({"what": lesson.what, "updates": lesson.updates, "lr": lesson.lr,
                        "first_losses": rounded[:FIRST], "last_loss": rounded[-1]})  # fmt: skip
    save_policy(policy, folder)
    _note(out, name, {"seed": seed, "sha256": checksum(policy), "torch": torch.__version__,
                      "seconds": round(time.monotonic() - began), "lessons": lessons})  # fmt: skip


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
