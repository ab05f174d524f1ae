"""A close look at what a verifier said: `render_feedback`, a static page, and `VerifierInspector`, a widget.

Both take records as `python -m tangolite eval --records` writes them (see `tangolite.records`), or shorter
ones made by hand: what can be read from the texts (steps, answer, judgements) may be left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tangolite.inspector.page import page, render_feedback
from tangolite.inspector.reading import record_of

if TYPE_CHECKING:
    from tangolite.inspector.widget import VerifierInspector

__all__ = ["VerifierInspector", "page", "record_of", "render_feedback"]


def __getattr__(name: str):
    """The widget is loaded when it is asked for: the static page needs no ipywidgets."""
    if name == "VerifierInspector":
        try:
            from tangolite.inspector.widget import VerifierInspector
        except ModuleNotFoundError as error:
            if error.name != "ipywidgets":
                raise
            raise ModuleNotFoundError(
                'the inspector is made of ipywidgets: pip install "tangolite[notebooks]"; '
                "render_feedback(record) works without",
                name="ipywidgets",
            ) from error
        return VerifierInspector
    raise AttributeError(f"module 'tangolite.inspector' has no attribute {name!r}")
