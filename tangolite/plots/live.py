"""Curves that grow inside a cell while training runs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tangolite.plots.base import INK, Look, figure, looks

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
            for name, look in zip(names, looks(len(names)), strict=True)
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
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
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
