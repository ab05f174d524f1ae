"""RL Tango and CoVRL for language models, from a laptop CPU up.

The names below are what most notebooks need; everything else is one module away, and the modules stand
in the order in which data flows through them (see the README).
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

_PLACES = {
    "Rollouts": "rollouts",
    "ChainArithmetic": "tasks",
    "LastLetters": "tasks",
    "Problem": "tasks",
    "answers_match": "grading",
    "Policy": "models",
    "load_policy": "models",
    "sample": "sampling",
    "Tango": "tango",
    "CoVRL": "covrl",
    "load_recipe": "settings",
    "train": "training",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str):
    """Load a name's module when it is first asked for, so that `import tangolite` stays light."""
    if name in _PLACES:
        return getattr(import_module(f"tangolite.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'tangolite' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
