"""The canvas of every figure, and how its lines are told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, VERMILLION, GREEN, PINK, ORANGE, SKY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"
INK, FAINT, PAPER = "#222222", "#BBBBBB", "white"
MAX_DPI = 100  # committed notebooks and pages stay small


class Look(NamedTuple):
    """How one line is told from the others: three ways, of which any one is enough."""

    color: str
    marker: str
    dash: str | tuple


LOOKS = (
    Look(BLUE, "o", "-"), Look(VERMILLION, "s", "--"), Look(GREEN, "^", "-."), Look(PINK, "D", ":"),
    Look(ORANGE, "v", (0, (8, 2))), Look(SKY, "P", (0, (3, 1, 1, 1))), Look("#000000", "X", (0, (1, 3))),
    Look("#8C7A00", "*", (0, (6, 1, 1, 1, 1, 1))),  # the palette's yellow, darkened: it has to show on white
)  # fmt: skip

STYLE = {
    "axes.facecolor": PAPER, "axes.edgecolor": INK, "axes.labelcolor": INK, "axes.titlecolor": INK,
    "text.color": INK, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": False,
    "font.size": 10, "axes.titlesize": 11, "font.family": "DejaVu Sans",
}  # fmt: skip


def figure(
    panels: int = 1, *, width: float = 8.0, height: float = 3.0, dpi: int = 100
) -> tuple[Figure, list[Axes]]:
    """A white figure with panels side by side; sizes in inches.  Raises ValueError for a dpi over 100."""
    if dpi > MAX_DPI:
        raise ValueError(f"dpi={dpi}: figures here have at most {MAX_DPI}, so that notebooks stay small")
    # Made outside the context: the first figure loads the backend, which in a notebook turns interactive
    # drawing on; leaving the context would turn that off again, and figures would no longer be shown.
    fig = plt.figure(figsize=(width, height), dpi=dpi, layout="constrained", facecolor=PAPER)
    with rc_context(STYLE):
        axes = fig.subplots(1, panels, squeeze=False)
    for ax in axes[0]:
        ax.tick_params(colors=INK)  # ticks are made late, under whatever style holds then
    return fig, list(axes[0])


def save(fig: Figure, name: str) -> str:
    """Write ``figures/NAME.png`` under the repository; returns that path, relative and with slashes.

    The repository is the nearest folder upwards with a ``pyproject.toml``; without one, the current folder.
    Raises ValueError for a name that is not a plain file name.
    """
    name = name.removesuffix(".png")
    if not name or Path(name).name != name or "\\" in name:
        raise ValueError(f"name={name!r} must be a plain file name such as '00_verdicts'")
    here = Path.cwd()
    root = next((f for f in (here, *here.parents) if (f / "pyproject.toml").is_file()), here)
    (root / "figures").mkdir(exist_ok=True)
    options = {"dpi": min(fig.dpi, MAX_DPI), "facecolor": PAPER, "bbox_inches": "tight"}
    fig.savefig(root / "figures" / f"{name}.png", metadata={"Software": None}, **options)
    return f"figures/{name}.png"


def looks(count: int) -> list[Look]:
    """As many looks as there are lines, in their order; the ninth is the first again."""
    return [LOOKS[i % len(LOOKS)] for i in range(count)]


def write(ax: Axes, x: float, y: float, text: str, **options: Any) -> None:
    """Text as it stands: a model may well write dollar signs that are no formula."""
    ax.text(x, y, text, **({"color": INK, "va": "center", "parse_math": False} | options))
