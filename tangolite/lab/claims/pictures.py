"""Pictures of the claims: curves with bands over seeds, and every arm's difference from its reference, seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from tangolite.lab.claims.entries import LOOKS, Results
from tangolite.plots import BLUE, FAINT, INK, VERMILLION, curves_over_seeds, figure

Rows = list[dict]
TANGO_LINES = ("tango", "frozen warmed", "gold steps", "outcome only", "outcome only, gated", "frozen weak")
TANGO_PAIRS = (
    ("tango", "outcome only"), ("tango", "outcome only, gated"), ("tango", "frozen warmed"),
    ("tango", "frozen weak"), ("tango", "gold steps"), ("tango, rloo", "outcome only, rloo"),
    ("tango, reinforce++", "outcome only, reinforce++"), ("tango", "alpha 0.5 fixed"), ("tango", "alpha 0.1 decayed"),
    ("alpha 0.1 decayed", "alpha 0.1 fixed"),
)  # fmt: skip
COVRL_RIVALS = (
    "prior only", "sampling alpha 0.1", "sampling alpha 0.9", "KL coefficient 0.1", "NLL coefficient 0.1",
    "sum of log-probs", "mean of probs", "sum of probs", "exact KL", "density not held",
)  # fmt: skip
COVRL_PAIRS = (*(("covrl", rival) for rival in COVRL_RIVALS), ("exact KL", "KL balanced"))


def draw(out: Path, files: Sequence[dict]) -> list[Path]:
    """Every picture whose arms are there; returns their files."""
    rows = [{"arm": f["arm"], "seed": f["seed"]} | row for f in files for row in f["rows"]]
    results, seeds, made = Results(files), len({f["seed"] for f in files}), []
    for name, (arms, make) in PICTURES.items():
        if arms <= {row["arm"] for row in rows}:
            ax = make(rows, results)
            ax.set_title(f"{ax.get_title()} ({seeds} seeds)", loc="left", fontsize=10)
            ax.set_title("")
            made.append(out / f"{name}.png")
            ax.figure.savefig(made[-1], dpi=100, metadata={"Software": None}, bbox_inches="tight")
            plt.close(ax.figure)
    return made


def _curves(
    rows: Rows, metric: str, title: str, label: str, x: str, arms: Sequence[str], at: str = "learned"
) -> Axes:
    ax = curves_over_seeds(rows, metric, arms=arms, x=at)
    ax.set(title=f"{title}: mean, band from the lowest to the highest", ylabel=label, xlabel=x)
    return ax


def _till(rows: Rows, learned: int) -> Rows:
    return [row for row in rows if row["learned"] <= learned]


def tango_answers(rows: Rows, _: Results) -> Axes:
    x = "updates of the generator"
    return _curves(_till(rows, 60), "eval/answer", "Tango", "held-out answers, greedy", x, TANGO_LINES)


def tango_compute(rows: Rows, _: Results) -> Axes:
    arms = ("tango", "outcome only", "outcome only, gated")
    x = "processor seconds of training, verifier warm-up included"
    ax = _curves(
        rows, "eval/answer", "The same by compute", "held-out answers, greedy", x, arms, at="seconds"
    )
    ax.set_ylim(0, 1.02)
    return ax


def tango_verifier(rows: Rows, _: Results) -> Axes:
    kinds = {"eval/pool_step_balanced": "on the fixed pool", "eval/step_balanced": "on what is written now"}
    shown = [row | {"arm": f"{row['arm']}, {said}", "judged": row[metric]}
             for row in rows for metric, said in kinds.items()
             if row["arm"] in ("tango", "frozen warmed") and metric in row]  # fmt: skip
    x = "updates of both players (the first 60: the verifier's warm-up)"
    arms = [f"{arm}, {said}" for arm in ("tango", "frozen warmed") for said in kinds.values()]
    return _curves(shown, "judged", "Step judgements", "balanced accuracy", x, arms, at="update")


def tango_weights(rows: Rows, _: Results) -> Axes:
    arms = ("weights 1/count", "weights 1/sqrt(count)", "no class weights")
    x = "updates of the verifier"
    return _curves(rows, "eval/mix_final_balanced", "Class weights", "final judgements, balanced", x, arms)


def tango_hacking(rows: Rows, _: Results) -> Axes:
    kinds = {"eval/says_correct": "paid", "eval/is_correct": "right"}
    shown = [row | {"arm": f"{row['arm'].removeprefix('paid ')}: {said}", "share": row[metric]}
             for row in rows if row["arm"] in ("paid by scores", "paid by verdicts")
             for metric, said in kinds.items() if metric in row]  # fmt: skip
    x = "updates of the generator"
    arms = [f"by {judge}: {said}" for judge in ("scores", "verdicts") for said in kinds.values()]
    return _curves(shown, "share", "What is paid, and what is right", "share of solutions", x, arms)


def covrl_answers(rows: Rows, _: Results) -> Axes:
    arms = ("covrl", "exact KL", "KL balanced", "density not held", "prior only")
    x = "updates of the policy"
    return _curves(_till(rows, 60), "eval/answer", "CoVRL", "held-out answers, greedy", x, arms)


def differences(pairs: Sequence[tuple[str, str]], title: str) -> Callable[[Rows, Results], Axes]:
    """A dot for each seed: how much more the first of a pair answers than the second, mean of three looks."""

    def make(_: Rows, results: Results) -> Axes:
        _, (ax,) = figure(width=8.0, height=0.9 + 0.34 * len(pairs))
        ax.axvline(0, color=FAINT, linewidth=1)
        for row, (first, second) in enumerate(reversed(pairs)):
            ours, theirs = results.mean(first, "answer"), results.mean(second, "answer")
            values = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
            ax.plot(values, [row] * len(values), "o", color=BLUE, markersize=6, alpha=0.6)
            ax.plot(sum(values) / len(values), row, "|", color=VERMILLION, markersize=18, markeredgewidth=2.5)
        ax.set_yticks(
            range(len(pairs)), [f"{first} − {second}" for first, second in reversed(pairs)], color=INK
        )
        moments = ", ".join(map(str, LOOKS))
        ax.set(title=f"{title}: dots are seeds, bars means", ylim=(-0.6, len(pairs) - 0.4))
        ax.set_xlabel(f"difference in held-out answers, mean of the looks after {moments} updates")
        return ax

    return make


def _arms(pairs: Sequence[tuple[str, str]]) -> set[str]:
    return {arm for pair in pairs for arm in pair}


PICTURES: dict[str, tuple[set[str], Callable[[Rows, Results], Axes]]] = {
    "tango-answers": (set(TANGO_LINES), tango_answers),
    "tango-compute": ({"tango", "outcome only", "outcome only, gated"}, tango_compute),
    "tango-verifier": ({"tango", "frozen warmed"}, tango_verifier),
    "tango-weights": ({"no class weights", "weights 1/sqrt(count)", "weights 1/count"}, tango_weights),
    "tango-hacking": ({"paid by scores", "paid by verdicts"}, tango_hacking),
    "tango-arms": (
        _arms(TANGO_PAIRS),
        differences(TANGO_PAIRS, "Answers, first of each pair less the second"),
    ),
    "covrl-answers": ({"covrl", "exact KL", "KL balanced", "density not held", "prior only"}, covrl_answers),
    "covrl-arms": (
        _arms(COVRL_PAIRS),
        differences(COVRL_PAIRS, "Answers, first of each pair less the second"),
    ),
}
