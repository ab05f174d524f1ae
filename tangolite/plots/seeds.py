"""Curves over seeds: the mean, and a band from the lowest to the highest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tangolite.plots.base import FAINT, INK, Look, figure, looks


def curves_over_seeds(
    rows: Iterable[Mapping[str, Any]],
    metric: str,
    *,
    x: str = "learned",
    ax: Axes | None = None,
    arms: Sequence[str] | None = None,
    look: Mapping[str, Look] | None = None,
) -> Axes:
    """Mean over seeds with a band from the least to the greatest, one line for each arm, named at its end.

    ``rows`` are those of a table that `python -m tangolite claims` wrote (numbers or text): ``arm``,
    ``seed``, the metric, and ``x`` (``learned``, ``update`` or ``seconds``).  Empty cells and NaN are left
    out; of several evaluations at one ``x`` the latest stands.  ``arms`` chooses and orders; ``look`` gives
    arms looks of another figure.  Raises ValueError when nothing is left to draw.
    """
    table = _by_arm(rows, metric, x)
    arms = list(table) if arms is None else list(arms)
    missing = [arm for arm in arms if arm not in table]
    if missing or not arms:
        raise ValueError(f"no values of {metric!r} for {missing or 'any arm'}; there are {sorted(table)}")
    ax = ax or figure(width=7.5, height=3.6)[1][0]
    ends = {}
    look = dict(zip(arms, looks(len(arms)), strict=True)) | dict(look or {})
    for arm in arms:
        color, marker, dash = look[arm]
        at, low, mean, high = zip(*table[arm], strict=True)
        ax.fill_between(at, low, high, color=color, alpha=0.15, linewidth=0)
        ax.plot(at, mean, color=color, marker=marker, linestyle=dash, linewidth=2, markersize=6, label=arm)
        ends[arm] = (at[-1], mean[-1])
    ax.set_xlabel({"learned": "updates of the learner", "update": "updates of all players"}.get(x, x))
    ax.set_ylabel(metric.removeprefix("eval/").replace("_", " "))
    _name_lines(ax, ends)
    return ax


def two_players(
    rows: Iterable[Mapping[str, Any]],
    generator: str,
    verifier: str,
    *,
    x: str = "learned",
    arms: Sequence[str] | None = None,
) -> Figure:
    """A metric of each player beside each other, bands over seeds: see `curves_over_seeds`.

    An arm without the verifier's metric, such as outcome-only training, stands on the left alone.
    """
    rows = list(rows)
    arms = list(_by_arm(rows, generator, x)) if arms is None else list(arms)
    look = dict(zip(arms, looks(len(arms)), strict=True))
    judged = _by_arm(rows, verifier, x)
    fig, axes = figure(2, width=12.0, height=3.8)
    curves_over_seeds(rows, generator, x=x, ax=axes[0], arms=arms, look=look)
    curves_over_seeds(rows, verifier, x=x, ax=axes[1], arms=[a for a in arms if a in judged], look=look)
    for ax, player in zip(axes, ("generator", "verifier"), strict=True):
        ax.set_title(player, loc="left")
    return fig


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


def _name_lines(ax: Axes, ends: Mapping[str, tuple[float, float]]) -> None:
    """Each line's name right of its end, moved apart where two would touch."""
    gap, place = 0.085, -math.inf  # in heights of the axes
    low, high = ax.get_ylim()
    heights = sorted(((y - low) / (high - low), -rank) for rank, (_, y) in enumerate(ends.values()))
    for i, (height, rank) in enumerate(heights):
        room = 1.0 - gap * (len(heights) - 1 - i)  # so that those above still fit
        place = max(min(height, room), place + gap)
        arm, (x, y) = list(ends.items())[-rank]
        leader = {"arrowstyle": "-", "color": FAINT, "linewidth": 0.9, "linestyle": ":", "shrinkB": 4,
                  "relpos": (0, 0.5)}  # faint, so that nobody takes it for more of the curve  # fmt: skip
        where = {"xytext": (1.04, place), "textcoords": "axes fraction", "annotation_clip": False}
        ax.annotate(arm, (x, y), color=INK, va="center", fontsize=9, arrowprops=leader, **where)
