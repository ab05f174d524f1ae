"""Recipes: YAML files read into the dataclass of their method, every key and type checked.

What is wrong with a recipe is said before anything is loaded or written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from tangolite.covrl import CoVRLConfig
from tangolite.tango import TangoConfig

RECIPES = Path(__file__).parent / "recipes"
METHODS = {"tango": TangoConfig, "covrl": CoVRLConfig}
POSITIVE = {
    *("updates", "checkpoint_every", "questions", "group", "traces", "verifications", "max_new_tokens"),
    *("verifier_max_new_tokens", "micro_batch", "temperature", "max_grad_norm"),
}
OWN_TASK = {  # what may stand beside the setting that takes the place of a built-in task
    "file": ("file", "question", "answer"),
    "source": ("source", "path", "split", "limit"),
}

Config = TangoConfig | CoVRLConfig


class RunError(RuntimeError):
    """Something about a run that its user can put right; the message says what to do."""


def recipe_names() -> list[str]:
    """The shipped recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def load_recipe(name_or_file: str | Path, changes: Sequence[str] = ()) -> Config:
    """A recipe by name or YAML file, with ``key=value`` changes (``task.steps=4`` reaches inside).

    ``task.file=FILE`` or ``task.source=NAME`` replaces a built-in task, for the verifier too unless it is
    given one of its own.
    Raises RunError for an unknown recipe, key or value, naming what is known.
    """
    path = Path(name_or_file)
    if path.suffix not in (".yaml", ".yml"):
        path = RECIPES / f"{name_or_file}.yaml"
        if not path.is_file():
            known = ", ".join(recipe_names())
            raise RunError(f"unknown recipe {str(name_or_file)!r}: known are {known}, or give a YAML file")
    settings = read_settings(path)
    for change in changes:
        _apply(settings, change)
    keys = [change.partition("=")[0].strip() for change in changes]
    if {"task.file", "task.source"} & set(keys) and not any(key.startswith("verifier_task") for key in keys):
        settings |= {"verifier_task": None} if "verifier_task" in settings else {}
    return config_of(settings, str(name_or_file))


def recipe_of_run(out: str | Path, changes: Sequence[str] = ()) -> Config:
    """The recipe that a run's folder was made with, with changes; raises RunError where there is no run."""
    if not (Path(out) / "recipe.yaml").is_file():
        raise RunError(f"{out} holds no run (no recipe.yaml): start one with --recipe NAME --out {out}")
    return load_recipe(Path(out) / "recipe.yaml", changes)


def read_settings(path: Path) -> dict[str, Any]:
    """The plain mapping that a recipe's file holds; raises RunError when it cannot be read as one."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"no recipe file at {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RunError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise RunError(f"{path}: a recipe is a mapping of settings, this is {type(settings).__name__}")
    return settings


def _apply(settings: dict, change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals:
        raise RunError(f"--set takes key=value, got {change!r}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise RunError(f"--set {change}: the value cannot be read; texts with : or {{ need quotes") from None
    *outer, last = key.strip().split(".")
    for name in outer:
        inner = settings.get(name)
        if not isinstance(inner, dict | None):
            raise RunError(f"--set {change}: {name!r} holds no settings of its own")
        inner = dict(inner or {})
        settings[name] = inner
        settings = inner
    if outer and last in OWN_TASK:  # a task of one's own: what described the built-in one goes
        for name in set(settings) - set(OWN_TASK[last]):
            del settings[name]
    settings[last] = value


def config_of(settings: dict[str, Any], where: str) -> Config:
    """The dataclass of a method from plain settings; raises RunError for what is unknown or out of range."""
    method = settings.get("method")
    if not isinstance(method, str) or method not in METHODS:
        raise RunError(f"{where}: method must be one of {', '.join(METHODS)}, got {method!r}")
    default = METHODS[method]()
    known = [f.name for f in fields(default)]
    if unknown := [key for key in settings if key not in known]:
        raise RunError(f"{where}: {'; '.join(_unknown(key, known, method) for key in unknown)}")
    try:
        return METHODS[method](**{k: _typed(k, v, getattr(default, k)) for k, v in settings.items()})
    except ValueError as error:
        raise RunError(f"{where}: {error}") from None


def _unknown(key: Any, known: list[str], method: str) -> str:
    close = get_close_matches(str(key), known)
    hint = f"did you mean {' or '.join(close)}?" if close else f"{method} has {', '.join(sorted(known))}"
    return f"unknown setting {key!r}: {hint}"


def _typed(name: str, value: Any, default: Any) -> Any:
    """``value`` as the type of the default."""
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
    elif isinstance(default, float | int):
        return type(default)(_number(name, value, whole=isinstance(default, int)))
    elif isinstance(default, str):
        if not isinstance(value, str):
            raise ValueError(f"{name} must be text, got {value!r}; a text like a number needs quotes")
    elif not isinstance(value, dict) and (value is not None or default is not None):
        raise ValueError(f"{name} must be a mapping of settings, got {value!r}")
    return value


def _number(name: str, value: Any, whole: bool) -> float | int:
    """A finite number in the setting's range; YAML reads 1e-4 as text, so texts are read again."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError(f"{name} must be a {'whole ' if whole else ''}number, got {value!r}")
    if whole and number != int(number):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if number < 0 and name != "seed":
        raise ValueError(f"{name} must not be negative, got {value!r}")
    if number == 0 and name in POSITIVE:
        raise ValueError(f"{name} must be larger than 0, got {value!r}")
    return value if whole and isinstance(value, int) else number  # a float cannot hold every seed


def plain(config: Config) -> dict[str, Any]:
    """Every setting, in what YAML and JSON can hold."""
    return json.loads(json.dumps(asdict(config)))


def with_seed(config: Config, seed: int, **changes: Any) -> Config:
    """The same recipe with another seed, and whatever else differs between the arms of a comparison."""
    return replace(config, seed=seed, **changes)
