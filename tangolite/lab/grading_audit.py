"""Where does our answer checker disagree with plain math-verify, and who is right?

    python -m tangolite.lab.grading_audit --answers FILE.jsonl --pairs 20000 --seed 0 --out FILE.md

The answers (one JSON object a line, field "answer") are paired in four ways (`grading_pairs`): two at random;
an answer and the same one in other clothes; an answer and a near miss; and made pairs of kinds that the file
hardly holds. For all but the first the truth is known by construction. Both checkers grade every pair; each
disagreement is listed under the branch of ours that decided it, with the reason why that branch is right.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from tangolite import grading
from tangolite._grading.worker import Worker, serve
from tangolite.lab.grading_pairs import Pair, pairs

MAX_LINES, MAX_PER_GROUP = 400, 40
SECONDS = 30.0  # for either checker on one pair

WHY = [  # reason of ours (how it begins), our verdict, why it is right
    (
        "rational numbers",
        "match",
        "Both are the same rational number, in a spelling that math-verify does not read.",
    ),
    ("rational numbers", "differ", "Exact fractions differ; math-verify rounds to 6 decimals."),
    (
        "percent",
        "differ",
        "n% is n/100; math-verify also takes it for n, so that 0.5, 50% and 50 are not transitive.",
    ),
    ("percent", "match", "n% is n/100."),
    ("integers", "differ", "Two different integers."),
    ("integers", "match", "The same integer; math-verify reads a leading zero or a sign differently."),
    (
        "words",
        "match",
        "Words are compared without case, dots and quotes; math-verify multiplies their letters.",
    ),
    ("words", "differ", "Different words; to math-verify the product of their letters is the same."),
    ("different units", "differ", "Different units; math-verify drops units and compares the numbers."),
    ("different variables", "differ", "Values of different variables."),
    (
        "types: different brackets",
        "differ",
        "Brackets say whether ends belong to an interval, or list from tuple.",
    ),
    (
        "types",
        "differ",
        "A set is not a tuple, a matrix not a list, a word not a number: math-verify compares entries.",
    ),
    (
        "an entry differs",
        "differ",
        "An entry differs; math-verify compares after sorting, dropping or rounding.",
    ),
    ("a member is missing", "differ", "Something in one of the sets is not in the other."),
    ("entries agree", "match", "All entries agree, each by the rules for its own kind."),
    (
        "members agree",
        "match",
        "The same members in another order or notation (an inequality is an interval).",
    ),
    (
        "same after normalising",
        "match",
        "The same spelling once blanks, sizes and text commands are removed.",
    ),
    (
        "equal at high precision",
        "match",
        "Equal to 40 digits at three points; math-verify's simplification gave up.",
    ),
    (
        "different at high precision",
        "differ",
        "They differ within 40 digits; math-verify rounds to 6 decimals or drops text.",
    ),
    ("equations are proportional", "match", "One equation is a multiple of the other."),
    ("math-verify", "match", "The same algebra after our normalising, which math-verify's own reader lacks."),
    (
        "math-verify",
        "differ",
        "Without its removal of trailing letters as units, math-verify sees the difference too.",
    ),
    ("algebra cannot read it", "differ", "Not a formula; math-verify read a part of it and compared that."),
    ("same letter in both cases", "differ", "x and X are two variables here; math-verify reads both as x."),
    (
        "refused: not a formula",
        "differ",
        "A subscript on a number is its base, and 52 is no numeral in base 2; math-verify drops the base.",
    ),
    ("refused", "differ", "Too large to evaluate: equal only if spelt the same."),
    ("Python strings", "match", "The same Python string in other quotes."),
    ("Python strings", "differ", "Different Python strings: in a program case counts."),
    ("identical", "match", "The same text but for a full stop, blanks or dollars around it."),
]


# --- plain math-verify, in a process that can be killed ---


def _plain():
    import logging
    from functools import lru_cache

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    read_box = lru_cache(4096)(lambda text: parse(rf"\boxed{{{text}}}", parsing_timeout=None))
    return lambda r: {"match": verify(read_box(r["gold"]), read_box(r["answer"]), timeout_seconds=None)}


# --- the audit ---


class Row(NamedTuple):
    pair: Pair
    ours: grading.Grade
    theirs: str  # "match", "differ", "timeout"


def audit(sample: list[Pair], plain: Worker) -> tuple[list[Row], list[float]]:
    """Grade every distinct pair with both; also the seconds of ours that needed algebra."""
    rows, slow, begun = [], [], time.monotonic()
    for i, pair in enumerate(sample):
        before, start = len(grading._known), time.perf_counter()
        ours = grading.grade(pair.answer, pair.gold, timeout=SECONDS)
        if len(grading._known) != before:
            slow.append(time.perf_counter() - start)
        reply, _ = plain.ask({"gold": pair.gold, "answer": pair.answer}, SECONDS)
        theirs = "timeout" if reply is None else "match" if reply["match"] else "differ"
        rows.append(Row(pair, ours, theirs))
        if (i + 1) % 1000 == 0:
            print(f"{i + 1} of {len(sample)} distinct pairs, {time.monotonic() - begun:.0f} s", flush=True)
    return rows, slow


def _why(reason: str, status: str) -> str:
    fitting = [(len(r), why) for r, s, why in WHY if reason.startswith(r) and s == status]
    return max(fitting)[1] if fitting else "NOT YET EXPLAINED"


def _code(text: str) -> str:
    return "`" + text.replace("`", "'").replace("\n", " ").replace("|", "\\|") + "`"


def report(rows: list[Row], weights: Counter, slow: list[float]) -> str:
    """The audit as Markdown."""
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        if row.ours.status != row.theirs:
            groups[row.ours.reason, row.ours.status, row.theirs].append(row)
    total = sum(map(len, groups.values()))
    built = [r for r in rows if r.pair.same is not None]
    wrong = [r for r in built if (r.ours.status == "match") != r.pair.same]
    plain_wrong = [r for r in built if (r.theirs == "match") != r.pair.same]
    median = 1000 * statistics.median(slow)
    lines = [
        "# Where answers are graded differently by plain math-verify",
        "",
        f"{sum(weights.values())} pairs, {len(rows)} of them distinct; {total} are graded differently.",
        f"The truth of {len(built)} of these is known by construction: ours grades {len(wrong)} against it,",
        f"plain math-verify {len(plain_wrong)}. Pairs that need algebra took us {median:.0f} ms (median of",
        f"{len(slow)}); our child process was replaced {grading.worker_restarts()} times.",
        "",
        *_against(wrong),
    ]
    limit = MAX_PER_GROUP if total > MAX_LINES else total
    for (reason, ours, theirs), found in sorted(groups.items(), key=lambda g: (-len(g[1]), g[0])):
        count = sum(weights[r.pair] for r in found)
        lines += [f"## {reason}: ours {ours}, math-verify {theirs}", ""]
        lines += [_why(reason, ours), "", f"{len(found)} distinct pairs, {count} in the sample.", ""]
        lines += ["| gold | answer | how made |", "|---|---|---|"]
        for r in sorted(found, key=lambda r: (r.pair.how, r.pair.gold, r.pair.answer))[:limit]:
            lines.append(f"| {_code(r.pair.gold)} | {_code(r.pair.answer)} | {r.pair.how} |")
        lines.append("")
    return "\n".join(lines)


def _against(wrong: list[Row]) -> list[str]:
    if not wrong:
        return []
    lines = [
        "## Ours against the construction",
        "",
        "| gold | answer | how made | ours | reason |",
        "|---|---|---|---|---|",
    ]
    for r in wrong:
        p = r.pair
        lines.append(f"| {_code(p.gold)} | {_code(p.answer)} | {p.how} | {r.ours.status} | {r.ours.reason} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=Path, required=True, help='JSON lines with a field "answer"')
    parser.add_argument("--pairs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="Markdown file to write")
    options = parser.parse_args()
    lines = options.answers.read_text(encoding="utf-8").splitlines()
    sample = Counter(pairs([json.loads(line)["answer"] for line in lines], options.pairs, options.seed))
    plain = Worker(__file__, "--serve")
    try:
        rows, slow = audit(sorted(sample), plain)
    finally:
        plain.close()
    options.out.write_text(report(rows, sample, slow), encoding="utf-8")
    print(f"wrote {options.out}")


if __name__ == "__main__":
    serve(_plain) if sys.argv[1:] == ["--serve"] else main()
