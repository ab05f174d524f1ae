"""One solution: its steps with their verdicts, its tokens with their numbers."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tangolite.plots.base import BLUE, FAINT, INK, PAPER, VERMILLION, figure, write

VERDICTS = {
    True: ("\N{CHECK MARK} CORRECT", "#D6E9F5", BLUE, None),
    False: ("\N{BALLOT X} INCORRECT", "#FBE3D3", VERMILLION, "////"),
    None: ("? NOT READ", "#EEEEEE", FAINT, None),
}
TRUTHS = {True: "\N{CHECK MARK} true", False: "\N{BALLOT X} false", None: ""}


def step_strip(
    steps: Sequence[str],
    verdicts: Sequence[bool | None] | None,
    truth: Sequence[bool] | None = None,
    *,
    ends: Sequence[int] | None = None,
) -> Figure:
    """One row a step: its text, the verdict, the truth if known, whether they agree, and where it ends.

    ``verdicts`` None: the verification could not be read.  ``ends`` are token positions.  Raises ValueError
    for lists of other lengths than ``steps``.
    """
    verdicts = [None] * len(steps) if verdicts is None else verdicts
    for name, given in (("verdicts", verdicts), ("truth", truth), ("ends", ends)):
        if given is not None and len(given) != len(steps):
            raise ValueError(f"{name} has {len(given)} entries for {len(steps)} steps")
    columns = _columns(steps, verdicts, truth, ends)
    heights = [1.1 + 0.55 * text.count("\n") for text in columns["step"].cells]
    bottoms = [-total for total in accumulate(heights)]
    right = sum(column.width for column in columns.values())
    fig, (ax,) = figure(width=0.1 + 0.8 * right, height=0.5 + 0.3 * sum(heights))
    left = 0.0
    for head, (width, cells) in columns.items():
        write(ax, left, 0.5, head.strip(), weight="bold")
        for cell, height, bottom in zip(cells, heights, bottoms, strict=True):
            (_verdict if head == "verdict" else write)(ax, left, bottom + height / 2, cell)
        left += width
    ax.hlines(bottoms, 0, right, color=FAINT, linewidth=0.6)
    ax.set(xlim=(-0.1, right + 0.1), ylim=(-sum(heights) - 0.1, 1.1))
    ax.axis("off")
    return fig


class _Column(NamedTuple):
    width: float
    cells: Sequence


def _columns(steps, verdicts, truth, ends) -> dict[str, _Column]:
    """What a step strip says, from left to right; the width of the first text column follows the text."""
    texts = [textwrap.fill(text, 60) or "(empty)" for text in steps]
    longest = max((len(line) for text in texts for line in text.split("\n")), default=0)
    columns = {
        " ": _Column(0.35, [f"{k}" for k in range(1, len(steps) + 1)]),
        "step": _Column(0.4 + 0.09 * max(longest, 12), texts),
        "verdict": _Column(1.8, verdicts),
    }
    if truth is not None:
        columns["truth"] = _Column(0.9, [TRUTHS[true] for true in truth])
        agreement = [_agreement(verdict, true) for verdict, true in zip(verdicts, truth, strict=True)]
        columns["verifier"] = _Column(1.3, agreement)
    if ends is not None:
        columns["ends at token"] = _Column(1.4, [f"{end}" for end in ends])
    return columns


def _verdict(ax: Axes, left: float, middle: float, verdict: bool | None) -> None:
    words, fill, edge, hatch = VERDICTS[verdict]
    ax.add_patch(Rectangle((left - 0.1, middle - 0.38), 1.65, 0.76, facecolor=fill, edgecolor=edge))
    if hatch:  # beside the words, not under them
        place = (left - 0.28, middle - 0.38)
        ax.add_patch(Rectangle(place, 0.18, 0.76, facecolor=PAPER, edgecolor=edge, hatch=hatch))
    write(ax, left, middle, words, fontsize=9)


def _agreement(verdict: bool | None, truth: bool) -> str:
    return "no verdict" if verdict is None else "agrees" if bool(verdict) == bool(truth) else "DISAGREES"


def token_strip(
    tokens: Sequence[str], values: Sequence[float | None], *, title: str, width: int = 84
) -> Figure:
    """Tokens in reading order, coloured by a number that is also written under each.

    The colour map (cividis, centred on 0) grows steadily lighter from negative to positive, so it says the
    same in grey.  None or NaN leaves a token white.  ``width`` is a line's length in characters.  Raises
    ValueError for lists of different lengths, or none at all.
    """
    if len(tokens) != len(values) or not tokens:
        raise ValueError(f"{len(tokens)} tokens with {len(values)} values: give one value for each token")
    numbers = [math.nan if value is None else float(value) for value in values]
    known = [abs(number) for number in numbers if not math.isnan(number)]
    norm, cmap = CenteredNorm(0.0, max(known, default=0.0) or 1.0), plt.get_cmap("cividis")
    shown = [token.translate(UNSEEN) or "\N{EMPTY SET}" for token in tokens]
    places, lines = _flow(shown, width)
    fig, (ax,) = figure(width=9.5, height=0.6 + 0.5 * lines)
    for text, number, place in zip(shown, numbers, places, strict=True):
        _token(ax, text, number, PAPER if math.isnan(number) else to_hex(cmap(norm(number))), *place)
    ax.set(xlim=(-0.3, width + 0.3), ylim=(-lines * 2.0 + 0.9, 1.1))
    ax.set_title(title, loc="left", color=INK)
    ax.axis("off")
    return fig


UNSEEN = {
    ord(" "): "\N{MIDDLE DOT}",
    ord("\n"): "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}",
    ord("\t"): "\\t",
}


def _flow(tokens: Sequence[str], width: int) -> tuple[list[tuple[float, int, float]], int]:
    """Each token's (column, line, width), filling lines like text; and the number of lines."""
    column, line, places = 0.0, 0, []
    for token in tokens:
        size = max(len(token), 3.4) + 0.8
        if column and column + size > width:
            column, line = 0.0, line + 1
        places.append((column, line, size))
        column += size
    return places, line + 1


def _token(ax: Axes, text: str, number: float, fill: str, column: float, line: int, size: float) -> None:
    middle, y = column + (size - 0.25) / 2, -2.0 * line
    red, green, blue = to_rgb(fill)
    ink = INK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else PAPER
    box = Rectangle((column, y - 0.05), size - 0.25, 1.0, facecolor=fill, edgecolor=INK, linewidth=0.5)
    ax.add_patch(box)
    write(ax, middle, y + 0.42, text, color=ink, ha="center", fontsize=8, family="DejaVu Sans Mono")
    if not math.isnan(number):
        write(ax, middle, y - 0.42, f"{number:+.2g}" if number else "0", ha="center", fontsize=7)
