"""What the trainings gave: CSV of every look, JSON and Markdown of every claim, pictures, and the README's table."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tangolite.lab.claims.arms import ARMS, COVRL, TANGO
from tangolite.lab.claims.entries import CLAIMS, Claim, Measure, Results

COMMAND = "python -m tangolite claims --seeds {seeds} --out figures/claims"


def read_rows(out: Path) -> list[dict]:
    """Every finished arm and seed."""
    return [json.loads(path.read_text("utf-8")) for path in sorted((out / "rows").glob("*/seed-*.json"))]


def write_results(out: Path) -> None:
    """CSV, `claims.json`, `README.md` and the pictures, from the rows that are there; prints the short table."""
    from tangolite.lab.claims.pictures import draw

    files = read_rows(out)
    for family, arms in (("tango", TANGO), ("covrl", COVRL)):
        names = [arm.name for arm in arms]
        write_csv(out / f"{family}.csv", [f for f in files if f["arm"] in names], names)
    report = reported(files)
    (out / "claims.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (out / "README.md").write_text(details(report, files), encoding="utf-8")
    draw(out, files)
    print(table(report))


def reported(files: Sequence[dict]) -> dict:
    """Every claim with its measures and verdict, the command, and what made the rows."""
    versions = sorted({json.dumps(f["made"], sort_keys=True) for f in files})
    command = COMMAND.format(seeds=len({f["seed"] for f in files}))
    return {"command": command, "made": [json.loads(v) for v in versions], "claims": judged(Results(files))}


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
             "high": round(m.interval.high, 4), "seeds": [round(v, 4) for v in m.seeds], "verdict": m.verdict,
             "levels": m.levels and [round(v, 4) for v in m.levels]}
            for m in measures
        ],
    }  # fmt: skip


# --- in words --------------------------------------------------------------------------------------------


def table(report: dict) -> str:
    """The README's table: each claim, the paper's number, the difference that decided here, and the verdict."""
    counts = Counter(claim["verdict"] for claim in report["claims"])
    lines = [", ".join(f"{count} × {said}" for said, count in counts.most_common()) + ".", ""]
    lines += ["| | claim | the paper | here | verdict |", "|" + "---|" * 5]
    for claim in report["claims"]:
        decisive = next(m for m in claim["measures"] if m["verdict"] == claim["verdict"])
        here = f"{re.split('[,:]', decisive['what'])[0]} {short(decisive)}"
        cells = claim["number"], claim["question"], claim["paper"], here, f"**{claim['verdict']}**"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def short(measure: dict) -> str:
    """`0.95 against 0.76 (+0.19 [+0.12, +0.25])`: both means, the mean difference and its interval."""
    mean, low, high = (number(measure[key], True) for key in ("mean", "low", "high"))
    if measure["levels"] is None:
        return f"{mean} [{low}, {high}]"
    first, second = (number(level) for level in measure["levels"])
    return f"{first} against {second} ({mean} [{low}, {high}])"


def number(value: float, signed: bool = False) -> str:
    """Two decimals below ten, none from twenty on."""
    digits = 0 if abs(value) >= 20 else 2
    value = round(value, digits) + 0.0  # no minus zero
    return f"{value:{'+' if signed else ''}.{digits}f}"


def details(report: dict, files: Sequence[dict]) -> str:
    """Every measure of every claim, seed by seed, and how they were made."""
    seeds = sorted({f["seed"] for f in files})
    made = [
        f"- {', '.join(f'{key} {value}' for key, value in version.items())}" for version in report["made"]
    ]
    lines = [
        "# The claims, with every number", "",
        f"`{report['command']}`; seeds {', '.join(map(str, seeds))}. Written by that command, not by hand. In brackets:"
        " 95% bootstrap intervals over seeds. A verdict is read from Student's 95% interval of the same values, which"
        " is wider, and from at least three seeds. Measures without a verdict stand there for context.", "",
        "Made with:", "", *made,
    ]  # fmt: skip
    for claim in report["claims"]:
        lines += ["", f"## {claim['number']}. {claim['question']}: {claim['verdict']}", "",
                  f"The paper: {claim['paper']}. `python -m tangolite claims {claim['name']}`", "",
                  "| measure | | by seed | |", "|---|---|---|---|"]  # fmt: skip
        for m in claim["measures"]:
            by_seed = " ".join(number(value) for value in m["seeds"])
            found = (
                short(m)
                if m["levels"]
                else "{} [{}, {}]".format(*(number(m[k]) for k in ("mean", "low", "high")))
            )
            lines.append(f"| {m['what']} | {found} | {by_seed} | {m['verdict'] or ''} |")
    lines += ["", "## The arms", "", "| arm | what it is |", "|---|---|"]
    there = {f["arm"] for f in files}
    lines += [f"| {arm.name} | {arm.what} |" for arm in ARMS.values() if arm.name in there]
    return "\n".join(lines) + "\n"
