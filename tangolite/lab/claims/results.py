"""What the trainings gave: CSV of every look, JSON of every claim, figures with bands, and the README's table."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from tangolite.lab.claims.arms import ARMS, COVRL, TANGO
from tangolite.lab.claims.entries import CLAIMS, Claim, Measure, Results

FIGURES = {  # file -> (arms, metric, title)
    "tango-answers": (("tango", "frozen warmed", "gold steps", "outcome only", "outcome only, gated", "frozen weak"),
                      "eval/answer", "Tango: held-out answers, greedy"),
    "tango-verifier": (("tango", "frozen warmed"), "eval/step_balanced", "Verifier: steps of the present generator"),
    "tango-estimators": (("tango", "outcome only", "tango, rloo", "outcome only, rloo", "tango, reinforce++",
                          "outcome only, reinforce++"), "eval/answer", "Three estimators"),
    "tango-alpha": (("tango", "alpha 0.5 fixed", "alpha 0.1 decayed", "alpha 0.1 fixed", "outcome only"),
                    "eval/answer", "Alpha"),
    "tango-weights": (("no class weights", "weights 1/sqrt(count)", "weights 1/count"),
                      "eval/mix_final_balanced", "Class weights: final judgements, balanced"),
    "tango-hacking": (("paid by scores", "paid by verdicts"), "eval/answer", "Paid without gold answers: true answers"),
    "covrl-alpha": (("covrl", "sampling alpha 0.1", "sampling alpha 0.9", "prior only"), "eval/answer",
                    "CoVRL: sampling alpha"),
    "covrl-terms": (("covrl", "KL coefficient 0.1", "NLL coefficient 0.1", "exact KL", "KL balanced",
                     "density not held"), "eval/answer", "CoVRL: KL and NLL"),
    "covrl-recipes": (("covrl", "sum of log-probs", "mean of probs", "sum of probs"), "eval/answer",
                      "CoVRL: reward recipes"),
}  # fmt: skip


def read_rows(out: Path) -> list[dict]:
    """Every finished arm and seed."""
    return [json.loads(path.read_text("utf-8")) for path in sorted((out / "rows").glob("*/seed-*.json"))]


def write_results(out: Path) -> None:
    """`tango.csv`, `covrl.csv`, `claims.json` and the figures, from the rows that are there; prints the table."""
    files = read_rows(out)
    for family, arms in (("tango", TANGO), ("covrl", COVRL)):
        names = [arm.name for arm in arms]
        write_csv(out / f"{family}.csv", [f for f in files if f["arm"] in names], names)
    found = judged(Results(files))
    versions = sorted({json.dumps(f["made"], sort_keys=True) for f in files})
    report = {"command": "python -m tangolite claims --seeds 5 --out figures/claims",
              "made": [json.loads(v) for v in versions], "claims": found}  # fmt: skip
    (out / "claims.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    draw(out, files)
    print(table(report))


def write_csv(path: Path, files: Sequence[dict], arms: Sequence[str]) -> None:
    """One line for every look, arms in their order."""
    rows = [{"arm": f["arm"], "seed": f["seed"]} | row
            for f in sorted(files, key=lambda f: (arms.index(f["arm"]), f["seed"])) for row in f["rows"]]  # fmt: skip
    names = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def judged(results: Results) -> list[dict]:
    """Every claim whose arms are all there, with its measures and verdict."""
    return [entry(claim, claim.test(results)) for claim in CLAIMS if ready(claim, results)]


def ready(claim: Claim, results: Results) -> bool:
    return set(claim.arms) <= results.rows.keys() and bool(_common(claim, results))


def _common(claim: Claim, results: Results) -> set[int]:
    return set.intersection(*(set(results.rows[arm]) for arm in claim.arms))


def entry(claim: Claim, measures: Sequence[Measure]) -> dict:
    return {
        "number": claim.number, "name": claim.name, "question": claim.question, "paper": claim.paper,
        "arms": {name: ARMS[name].what for name in claim.arms}, "verdict": claim.verdict(measures),
        "measures": [
            {"what": m.what, "mean": round(m.interval.mean, 4), "low": round(m.interval.low, 4),
             "high": round(m.interval.high, 4), "seeds": [round(v, 4) for v in m.seeds], "verdict": m.verdict}
            for m in measures
        ],
    }  # fmt: skip


def table(report: dict) -> str:
    """The README's table: claim, the paper's number, ours with its interval, and the verdict."""
    lines = ["| | claim | the paper | ours (mean, 95% interval, seeds) | here |", "|" + "---|" * 5]
    for claim in report["claims"]:
        ours = "<br>".join(_words(m) for m in claim["measures"])
        lines.append(
            f"| {claim['number']} | {claim['question']} | {claim['paper']} | {ours} | **{claim['verdict']}** |"
        )
    return "\n".join(lines)


def _words(measure: dict) -> str:
    digits = 0 if abs(measure["mean"]) >= 20 else 2
    numbers = [
        f"{measure[k]:+.{digits}f}" if measure["verdict"] else f"{measure[k]:.{digits}f}"
        for k in ("mean", "low", "high")
    ]
    context = "" if measure["verdict"] else "*"
    what = measure["what"].replace("|", "/")
    return f"{context}{what}: {numbers[0]} [{numbers[1]}, {numbers[2]}], {len(measure['seeds'])}{context}"


def draw(out: Path, files: Sequence[dict]) -> list[Path]:
    """Every figure whose arms are there: means over seeds, bands from the lowest to the highest."""
    import matplotlib.pyplot as plt

    from tangolite.plots import curves_over_seeds

    rows = [{"arm": f["arm"], "seed": f["seed"]} | row for f in files for row in f["rows"]]
    made = []
    for name, (arms, metric, title) in FIGURES.items():
        if not set(arms) <= {row["arm"] for row in rows if metric in row}:
            continue
        ax = curves_over_seeds(rows, metric, arms=arms)
        ax.set_title(title, loc="left")
        made.append(out / f"{name}.png")
        ax.figure.savefig(made[-1], dpi=100, metadata={"Software": None}, bbox_inches="tight")
        plt.close(ax.figure)
    return made
