"""The data flow of each method, drawn from a list of boxes and arrows."""

from __future__ import annotations

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from tangolite.plots.base import BLUE, INK, PAPER, VERMILLION, figure, write


class Box(NamedTuple):
    """A stage at a place of the grid; players have a thick edge, and where one learns it says so."""

    x: float
    y: float
    text: str
    edge: str = INK
    player: bool = False


class Flow(NamedTuple):
    """Boxes by name, arrows between them ("from to", with a word beside each), and the size in inches."""

    boxes: dict[str, Box]
    arrows: list[tuple[str, str, str]]
    size: tuple[float, float]


WIDTH, HEIGHT = 1.72, 0.72  # of a box
COLUMN, ROW = 2.45, 1.25  # from one middle to the next

TANGO = Flow(
    {
        "question": Box(0, 1, "question x"),
        "generator": Box(1, 1, "generator\nlearns", BLUE, True),
        "solution": Box(2, 1, "solution:\nsteps, answer"),
        "grade": Box(3, 2, "graded\nagainst gold"),
        "verifier": Box(3, 0, "verifier\nlearns", VERMILLION, True),
        "outcome": Box(4, 2, "outcome reward\n0 or 1"),
        "judged": Box(4, 0, "a verdict a step,\nand a final one"),
        "mix": Box(5, 1, "advantage of\neach token"),
        "paid": Box(4, -1.15, "verifier's reward:\nfinal = graded?"),
    },
    [
        ("question", "generator", ""), ("generator", "solution", "writes"), ("solution", "grade", "answer"),
        ("solution", "verifier", "steps"), ("grade", "outcome", ""), ("verifier", "judged", "writes"),
        ("outcome", "mix", "1 - alpha"), ("judged", "mix", "alpha"), ("judged", "paid", "final only"),
        ("mix", "generator", "loss"), ("paid", "verifier", "loss"),
    ],
    (12.5, 4.6),
)  # fmt: skip

COVRL = Flow(
    {
        "question": Box(0, 1.5, "question x"),
        "answer": Box(0, -0.5, "answer y"),
        "prior": Box(1, 1.5, "prior\np(z | x)", BLUE, True),
        "posterior": Box(1, -0.5, "posterior\nq(z | x, y)", VERMILLION, True),
        "trace": Box(2.1, 0.5, "trace z, sampled\nby one of the two"),
        "score": Box(3.2, 1.5, "reward:\nlog p(y | x, z)"),
        "kl": Box(3.2, -0.5, "KL of the mean\n(p + q)/2 to p"),
        "loss": Box(4.4, 0.5, "one loss for\none set of weights"),
    },
    [
        ("question", "prior", ""), ("question", "posterior", ""), ("answer", "posterior", "seen"),
        ("prior", "trace", "alpha"), ("posterior", "trace", "1 - alpha"), ("trace", "score", ""),
        ("trace", "kl", ""), ("score", "loss", "policy, NLL"), ("kl", "loss", "penalty"),
    ],
    (11.0, 4.2),
)  # fmt: skip


def architecture(method: str) -> Figure:
    """The data flow of "tango" or "covrl" (Sec. 3 of either paper).  Raises ValueError for other names."""
    flows = {"tango": TANGO, "covrl": COVRL}
    if method not in flows:
        raise ValueError(f"method={method!r}: there is a picture of {' and of '.join(flows)}")
    boxes, arrows, (width, height) = flows[method]
    fig, (ax,) = figure(width=width, height=height)
    xs, ys = [COLUMN * box.x for box in boxes.values()], [ROW * box.y for box in boxes.values()]
    top = (
        max(ys) + 0.75 * ROW
        if any(boxes[end].x < boxes[start].x for start, end, _ in arrows)
        else max(ys) + 0.5
    )
    for box in boxes.values():
        _box(ax, box)
    for start, end, word in arrows:
        _arrow(ax, boxes[start], boxes[end], word, top)
    ax.set(xlim=(min(xs) - 1.0, max(xs) + 1.0), ylim=(min(ys) - 0.5, top + 0.2))
    ax.axis("off")
    return fig


def _box(ax: Axes, box: Box) -> None:
    x, y = COLUMN * box.x - WIDTH / 2, ROW * box.y - HEIGHT / 2
    shape = FancyBboxPatch(
        (x, y), WIDTH, HEIGHT, boxstyle="round,pad=0.03,rounding_size=0.1", facecolor=PAPER,
        edgecolor=box.edge, linewidth=3.0 if box.player else 1.2,
    )  # fmt: skip
    ax.add_patch(shape)
    weight = "bold" if box.player else "normal"
    write(ax, COLUMN * box.x, ROW * box.y, box.text, ha="center", fontsize=9.5, weight=weight)


def _arrow(ax: Axes, start: Box, end: Box, word: str, top: float) -> None:
    """Straight from edge to edge; what goes back turns at right angles, over the top or along below."""
    a, b = (COLUMN * start.x, ROW * start.y), (COLUMN * end.x, ROW * end.y)
    side, rise = WIDTH / 2 + 0.03, HEIGHT / 2 + 0.03
    if end.x > start.x:
        path = [(a[0] + side, a[1]), (b[0] - side, b[1])]
    elif end.x == start.x:
        rise = rise if end.y > start.y else -rise
        path = [(a[0], a[1] + rise), (b[0], b[1] - rise)]
    elif end.y > start.y:
        path = [(a[0] - side, a[1]), (b[0], a[1]), (b[0], b[1] - rise)]
    else:
        path = [(a[0], a[1] + rise), (a[0], top), (b[0], top), (b[0], b[1] + rise)]
    ax.plot(*zip(*path[:-1], strict=True), color=INK, linewidth=1.2, solid_joinstyle="round")
    ax.annotate("", path[-1], path[-2], arrowprops={**HEAD, "shrinkA": 0, "shrinkB": 0})
    if word:
        middle = (len(path) - 1) // 2
        (x, y), (u, v) = path[middle], path[middle + 1]
        behind = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}
        write(ax, (x + u) / 2, (y + v) / 2, word, ha="center", fontsize=8.5, bbox=behind)


HEAD = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.2}
