"""Figures: live curves, curves over seeds, the verdicts on a solution, numbers on tokens.

Colours are those of Okabe and Ito, and nothing is said by colour alone: every line also has a marker and a
dash of its own, every verdict a mark and a word, every coloured token its number.  Backgrounds are white and
all text has an explicit colour, so a figure reads the same in a dark theme and on grey paper.  The figures
come from pyplot: a notebook shows them at the end of the cell that made them.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

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


# --- curves that grow while training runs ------------------------------------------------------------

WAIT = 0.5  # seconds between redraws, at least
SHARE = 0.1  # of the time that redrawing may take


class LiveCurves:
    """Curves that grow inside the cell: a callback of `training.train`, or ``live(None, done, metrics)``.

    ``panels`` maps a panel's title to names of metrics.  A panel titled with a player's name ("generator",
    "verifier") shows that player's own updates; ``"generator:reward"`` asks for a player's updates anywhere.
    Updates without a metric (or with NaN) are passed over.  Close it, or use it in a `with`, for the last
    state; ``live.figure`` can be saved after that.  Outside a notebook it collects in silence.
    """

    def __init__(
        self,
        panels: Mapping[str, Sequence[str]],
        total: int | None = None,
        title: str = "",
        *,
        window: int = 5,
    ) -> None:
        if not panels or not all(panels.values()) or any(isinstance(m, str) for m in panels.values()):
            raise ValueError("panels must map titles to lists of metric names, with at least one of each")
        self.total, self.title, self.window, self.done = total, title, window, 0
        self.curves = [
            _Curve(panel, name, look)
            for panel, names in panels.items()
            for name, look in zip(names, _cycle(len(names)), strict=True)
        ]
        self.figure, axes = figure(len(panels), width=min(4.0 * len(panels) + 1.0, 13.0), height=3.2)
        plt.close(self.figure)  # or the notebook would show it a second time at the end of the cell
        for ax, panel in zip(axes, panels, strict=True):
            _prepare(ax, panel, [c for c in self.curves if c.panel == panel], total)
        self._draw()
        self.handle = _display(self.figure) if _in_notebook() else None
        self.next_redraw = time.monotonic() + WAIT

    def __call__(self, run: Any, done: int, metrics: Mapping[str, Any]) -> None:
        """Take in the metrics of update number ``done`` (from 1); returns None, so it adds no metric."""
        self.done = done
        for curve in self.curves:
            curve.take(done, metrics)
        if self.handle is not None and time.monotonic() >= self.next_redraw:
            self._redraw()

    def series(self, panel: str, metric: str) -> tuple[list[int], list[float]]:
        """Update numbers and values collected so far.  Raises KeyError for a metric that is not drawn."""
        for curve in self.curves:
            if (curve.panel, curve.name) == (panel, metric):
                return curve.x, curve.y
        raise KeyError(f"{metric!r} is not drawn in a panel {panel!r}")

    def close(self) -> None:
        """Draw the last state.  May be called twice."""
        self._redraw()
        self.handle = None

    def __enter__(self) -> LiveCurves:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _draw(self) -> None:
        for curve in self.curves:
            curve.draw(self.window)
        for ax in self.figure.axes:
            ax.relim()
            ax.autoscale_view(scalex=self.total is None)
        count = f"update {self.done}" + (f" of {self.total}" if self.total else "")
        self.figure.suptitle(f"{self.title}: {count}" if self.title else count, color=INK, fontsize=11)

    def _redraw(self) -> None:
        began = time.monotonic()
        self._draw()
        if self.handle is not None:
            self.handle.update(self.figure)
        now = time.monotonic()
        self.next_redraw = now + max(WAIT, (now - began) / SHARE)


class _Curve:
    """One metric in one panel: its points, and a running mean through them."""

    def __init__(self, panel: str, name: str, look: Look) -> None:
        turn, colon, metric = name.partition(":")
        self.panel, self.name, self.look, self.x, self.y = panel, name, look, [], []
        self.metric, self.turn = (metric, turn) if colon else (name, panel)
        self.picky = bool(colon) or panel in ("generator", "verifier")

    def take(self, done: int, metrics: Mapping[str, Any]) -> None:
        value, turn = metrics.get(self.metric), metrics.get("turn")
        if value is None or math.isnan(value) or (self.picky and turn not in (None, self.turn)):
            return
        self.x.append(done)
        self.y.append(float(value))

    def draw(self, window: int) -> None:
        self.points.set_data(self.x, self.y)
        self.mean.set_data(self.x, running_mean(self.y, window))


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to ``window - 1`` before it."""
    spans = (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))
    return [sum(span) / len(span) for span in spans]


def _prepare(ax: Axes, panel: str, curves: Sequence[_Curve], total: int | None) -> None:
    for curve in curves:
        color, marker, dash = curve.look
        (curve.points,) = ax.plot([], [], marker, color=color, markersize=3.5, alpha=0.45)
        (curve.mean,) = ax.plot([], [], color=color, linestyle=dash, linewidth=2)
        ax.plot([], [], color=color, linestyle=dash, marker=marker, linewidth=2, label=curve.name)
    ax.set_title(panel, loc="left")
    ax.set_xlabel("update")
    if total:
        ax.set_xlim(0, total + 1)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18), "ncols": min(len(curves), 3)}
    ax.legend(frameon=False, labelcolor=INK, fontsize=9, **place)


def _in_notebook() -> bool:
    """Whether there is a front end that can show a figure and change it later."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return hasattr(get_ipython(), "kernel")


def _display(fig: Figure) -> Any:
    from IPython import display

    return display.display(fig, display_id=True)


# --- curves over seeds -------------------------------------------------------------------------------


def curves_over_seeds(
    rows: Iterable[Mapping[str, Any]],
    metric: str,
    *,
    x: str = "learned",
    ax: Axes | None = None,
    arms: Sequence[str] | None = None,
) -> Axes:
    """Mean over seeds with a band from the least to the greatest, one line for each arm, named at its end.

    ``rows`` are those of a table that `python -m tangolite claims` wrote (numbers or text): ``arm``,
    ``seed``, the metric, and ``x`` (``learned``, ``update`` or ``seconds``).  Empty cells and NaN are left
    out; of several evaluations at one ``x`` the latest stands.  ``arms`` chooses and orders.  Raises
    ValueError when nothing is left to draw.
    """
    table = _by_arm(rows, metric, x)
    arms = list(table) if arms is None else list(arms)
    missing = [arm for arm in arms if arm not in table]
    if missing or not arms:
        raise ValueError(f"no values of {metric!r} for {missing or 'any arm'}; there are {sorted(table)}")
    ax = ax or figure(width=7.5, height=3.6)[1][0]
    ends = {}
    for arm, (color, marker, dash) in zip(arms, _cycle(len(arms)), strict=True):
        at, low, mean, high = zip(*table[arm], strict=True)
        ax.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
        ax.plot(at, mean, color=color, marker=marker, linestyle=dash, linewidth=2, markersize=6, label=arm)
        ends[arm] = (at[-1], mean[-1], color)
    ax.set_xlabel({"learned": "updates of the learner", "update": "updates of all players"}.get(x, x))
    ax.set_ylabel(metric.removeprefix("eval/").replace("_", " "))
    _name_lines(ax, ends)
    return ax


def _cycle(count: int) -> list[Look]:
    return [LOOKS[i % len(LOOKS)] for i in range(count)]


def _number(value: Any) -> float:
    """A cell of a table as a number; NaN where it is empty."""
    return float(value) if value not in (None, "") else math.nan


def _by_arm(rows: Iterable[Mapping[str, Any]], metric: str, x: str) -> dict[str, list[tuple]]:
    """arm -> [(x, lowest, mean, highest over seeds)], ordered by x.

    Seeds are matched by the number of updates, since no two take the same seconds.
    """
    cells: dict[str, dict[float, list[tuple[float, float]]]] = {}
    for row in rows:
        place, value = _number(row.get(x)), _number(row.get(metric))
        if not math.isnan(place) and not math.isnan(value):
            moment = _number(row.get("update", place))
            cells.setdefault(row["arm"], {}).setdefault(moment, []).append((place, value))
    table = {}
    for arm, moments in cells.items():
        points = {}
        for _, found in sorted(moments.items()):
            at, values = (list(column) for column in zip(*found, strict=True))
            points[sum(at) / len(at)] = (min(values), sum(values) / len(values), max(values))
        table[arm] = [(at, *values) for at, values in sorted(points.items())]
    return table


def _name_lines(ax: Axes, ends: Mapping[str, tuple[float, float, str]]) -> None:
    """Each line's name right of its end, moved apart where two would touch."""
    gap, place = 0.085, -math.inf  # in heights of the axes
    low, high = ax.get_ylim()
    heights = sorted(((y - low) / (high - low), -rank) for rank, (_, y, _) in enumerate(ends.values()))
    for i, (height, rank) in enumerate(heights):
        room = 1.0 - gap * (len(heights) - 1 - i)  # so that those above still fit
        place = max(min(height, room), place + gap)
        arm, (x, y, color) = list(ends.items())[-rank]
        leader = {"arrowstyle": "-", "color": color, "linewidth": 1.2, "shrinkB": 4, "relpos": (0, 0.5)}
        where = {"xytext": (1.04, place), "textcoords": "axes fraction", "annotation_clip": False}
        ax.annotate(arm, (x, y), color=INK, va="center", fontsize=9, arrowprops=leader, **where)


# --- one solution, step by step and token by token ---------------------------------------------------

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
        _write(ax, left, 0.5, head.strip(), weight="bold")
        for cell, height, bottom in zip(cells, heights, bottoms, strict=True):
            (_verdict if head == "verdict" else _write)(ax, left, bottom + height / 2, cell)
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


def _write(ax: Axes, x: float, y: float, text: str, **looks: Any) -> None:
    """Text as it stands: a model may well write dollar signs that are no formula."""
    ax.text(x, y, text, **({"color": INK, "va": "center", "parse_math": False} | looks))


def _verdict(ax: Axes, left: float, middle: float, verdict: bool | None) -> None:
    words, fill, edge, hatch = VERDICTS[verdict]
    ax.add_patch(Rectangle((left - 0.1, middle - 0.38), 1.65, 0.76, facecolor=fill, edgecolor=edge))
    if hatch:  # beside the words, not under them
        place = (left - 0.28, middle - 0.38)
        ax.add_patch(Rectangle(place, 0.18, 0.76, facecolor=PAPER, edgecolor=edge, hatch=hatch))
    _write(ax, left, middle, words, fontsize=9)


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
    _write(ax, middle, y + 0.42, text, color=ink, ha="center", fontsize=8, family="DejaVu Sans Mono")
    if not math.isnan(number):
        _write(ax, middle, y - 0.42, f"{number:+.2g}" if number else "0", ha="center", fontsize=7)
