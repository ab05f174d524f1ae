"""Pictures of single ideas: one group's rewards, a verifier over time, the variance of estimators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tangolite.plots.base import FAINT, INK, LOOKS, PAPER, figure, looks, write


def group_panel(
    reward: Sequence[float],
    advantage: Sequence[float],
    to_go: Sequence[Sequence[float]] | None = None,
    *,
    names: Sequence[str] | None = None,
) -> Figure:
    """The G completions of one prompt: rewards, the same standardised, and what is still to come per token.

    ``to_go`` holds one list of numbers a completion, of any length.  Raises ValueError for lists of other
    lengths than ``reward``.
    """
    count = len(reward)
    for name, given in (("advantage", advantage), ("to_go", to_go), ("names", names)):
        if given is not None and len(given) != count:
            raise ValueError(f"{name} has {len(given)} entries for {count} rewards")
    names = [f"{i + 1}" for i in range(count)] if names is None else list(names)
    fig, axes = figure(2 if to_go is None else 3, width=8.0 if to_go is None else 12.0, height=3.2)
    for ax, values, title in zip(axes, (reward, advantage), ("reward", "advantage"), strict=False):
        _bars(ax, names, values)
        ax.set_title(title, loc="left")
        ax.set_xlabel("completion")
    for values, name, (color, marker, dash) in zip(to_go or (), names, looks(count), strict=False):
        often = max(1, len(values) // 6)
        options = {"color": color, "marker": marker, "linestyle": dash, "markevery": often, "linewidth": 1.8}
        axes[2].plot(range(len(values)), list(values), label=name, **options)
    if to_go is not None:
        axes[2].axhline(0, color=FAINT, linewidth=0.8)
        axes[2].set_title("return to go", loc="left")
        axes[2].set_xlabel("token")
        axes[2].legend(title="completion", frameon=False, fontsize=8, ncols=1 + (count > 8), **BESIDE)
    return fig


BESIDE = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}


def _bars(ax: Axes, names: Sequence[str], values: Sequence[float]) -> None:
    """Bars that say their number; those below zero are hatched, so that the sign shows without colour."""
    above, below = LOOKS[0].color, LOOKS[1].color
    for place, value in enumerate(values):
        fill = (
            {"facecolor": above} if value >= 0 else {"facecolor": PAPER, "edgecolor": below, "hatch": "////"}
        )
        ax.bar(place, value, 0.7, **fill)
        ax.annotate(
            f"{value:.3g}", (place, value), xytext=(0, 3 if value >= 0 else -3), textcoords="offset points",
            ha="center", va="bottom" if value >= 0 else "top", fontsize=8, color=INK,
        )  # fmt: skip
    ax.axhline(0, color=INK, linewidth=0.8)
    ax.set_xticks(range(len(names)), names)
    ax.margins(y=0.18)


def verifier_panel(moments: Mapping[str, Sequence[tuple[float, bool]]]) -> Figure:
    """What a verifier's votes are worth at several moments: confusion tables, and calibration.

    ``moments`` maps a label ("before", "after 30 updates") to pairs: the share of a solution's sampled
    verifications that end in CORRECT, in [0, 1], and whether the solution is right.  A share of more than one
    half counts as the verdict CORRECT.  Calibration: within five equal ranges of the share, how many of the
    solutions are right; on the diagonal a vote is worth what it says.  Raises ValueError without any pair.
    """
    if not moments or not all(moments.values()):
        raise ValueError(
            "moments must map labels to pairs (share of CORRECT votes, is it right), one at least"
        )
    count = len(moments)
    fig, axes = figure(count + 1, width=2.9 * count + 4.2, height=3.2)
    for ax, (label, pairs) in zip(axes, moments.items(), strict=False):
        _confusion(ax, label, pairs)
    _calibration(axes[-1], moments)
    return fig


def _confusion(ax: Axes, label: str, pairs: Sequence[tuple[float, bool]]) -> None:
    """Two by two: truth downwards, verdict across; the darker, the larger the share of its row."""
    for row, truth in enumerate((True, False)):
        votes = [share > 0.5 for share, right in pairs if bool(right) is truth]
        for column, verdict in enumerate((True, False)):
            number = votes.count(verdict)
            share = number / len(votes) if votes else 0.0
            grey = 1.0 - 0.75 * share
            ax.add_patch(Rectangle((column, -row), 1, 1, facecolor=(grey,) * 3, edgecolor=INK))
            ink = PAPER if grey < 0.5 else INK
            text = f"{number}\n{share:.0%}" if votes else "none"
            write(ax, column + 0.5, -row + 0.5, text, ha="center", color=ink, fontsize=11)
    ax.set(xlim=(0, 2), ylim=(-1, 1), aspect="equal")
    ax.set_xticks([0.5, 1.5], ["says\nCORRECT", "says\nINCORRECT"], fontsize=8)
    ax.set_yticks([0.5, -0.5], ["is right", "is wrong"], fontsize=8)
    ax.tick_params(length=0)
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.set_title(label, loc="left")


def _calibration(ax: Axes, moments: Mapping[str, Sequence[tuple[float, bool]]]) -> None:
    ax.plot([0, 1], [0, 1], color=FAINT, linestyle=":", linewidth=1.5, label="calibrated")
    for (label, pairs), (color, marker, dash) in zip(moments.items(), looks(len(moments)), strict=True):
        bins: list[list[tuple[float, bool]]] = [[] for _ in range(5)]
        for share, right in pairs:
            bins[min(int(share * 5), 4)].append((share, bool(right)))
        points = [
            tuple(sum(column) / len(found) for column in zip(*found, strict=True)) for found in bins if found
        ]
        at, right = zip(*points, strict=True)
        ax.plot(at, right, color=color, marker=marker, linestyle=dash, linewidth=2, label=label)
    ax.set(
        xlim=(-0.03, 1.03),
        ylim=(-0.03, 1.03),
        xlabel="share of votes for CORRECT",
        ylabel="share truly right",
    )
    ax.set_title("calibration", loc="left")
    ax.legend(frameon=False, fontsize=8, **BESIDE)


def kl_variance(
    x: Sequence[float], variances: Mapping[str, Sequence[float]], *, xlabel: str, ylabel: str = "variance"
) -> Figure:
    """Variance of estimators against ``x``, on a logarithmic scale, each line named at its side.

    A variance of 0 has no place on that scale and is left out.  Raises ValueError for lists of other lengths
    than ``x``.
    """
    fig, (ax,) = figure(width=7.5, height=3.4)
    for (name, values), (color, marker, dash) in zip(variances.items(), looks(len(variances)), strict=True):
        if len(values) != len(x):
            raise ValueError(f"{name} has {len(values)} variances for {len(x)} places")
        shown = [value if value > 0 else float("nan") for value in values]
        often = max(1, len(x) // 10)
        options = {"color": color, "marker": marker, "linestyle": dash, "markevery": often, "linewidth": 2}
        ax.plot(list(x), shown, label=name, **options)
    ax.set_yscale("log")
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.legend(frameon=False, fontsize=9, **BESIDE)
    return fig
