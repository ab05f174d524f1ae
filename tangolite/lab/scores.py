"""What an evaluation's records say: every score with a bootstrap interval over problems.

Scores are functions of sums over problems (right and all, of each kind).  So one bootstrap serves them all:
problems are drawn with replacement, and the score is made again from the sums; the several solutions of one
problem stay together.  `evaluate.bootstrap` does the same for plain means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tangolite.evaluate import Interval, first_error, majority, pass_at_k
from tangolite.records import Record

METRICS = {
    "accuracy": "Problems answered rightly, decoding greedily.",
    "pass": "Unbiased chance that at least one of k samples is right; k = 1 is the mean accuracy.",
    "maj": "Problems whose most frequent answer among k samples is right (equal answers vote together).",
    "answered": "Share of solutions from which an answer could be read.",
    "truncated": "Share of solutions cut at the length limit.",
    "undecided": "Share of answers that the grader gave up on; they count as wrong.",
    "step_truth": "Share of true steps in the greedy solutions.",
    "final_accuracy": "Share of verifications whose final judgement is right; a missing one is wrong.",
    "final_balanced": "Mean of that share over right and over wrong solutions.",
    "final_parsed": "Share of verifications with a final judgement.",
    "step_parsed": "Share of verifications with one judgement per step.",
    "step_balanced": "Mean of the shares of true and of false steps judged rightly, where they were read.",
    "error_found": "ProcessBench: solutions with a wrong step whose first one is named (unread is wrong).",
    "error_free": "ProcessBench: solutions without a wrong step in which none is named.",
    "first_error_f1": "ProcessBench F1: harmonic mean of the two.",
}

Sums = np.ndarray  # (..., C): C counts, summed over problems


class Score(NamedTuple):
    """A score and its value in every resample, NaN where a resample lacks what it needs."""

    value: float
    resampled: np.ndarray

    def interval(self, level: float = 0.95) -> Interval:
        known = self.resampled[~np.isnan(self.resampled)]
        if not known.size or np.isnan(self.value):
            return Interval(self.value, float("nan"), float("nan"))
        low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
        return Interval(self.value, float(low), float(high))


def scored(
    rows: Sequence[Sequence[float]],
    statistic: Callable[[Sums], np.ndarray],
    *,
    draws: int = 2000,
    seed: int = 0,
) -> Score:
    """A statistic of the sums of ``rows`` (P, C), one row a problem, and of ``draws`` resamples of them."""
    counts, rng = np.asarray(rows, dtype=float), np.random.default_rng(seed)
    even = np.full(len(counts), 1 / len(counts))
    sizes = [min(100, draws - begun) for begun in range(0, draws, 100)]  # a few at a time: P may be 12,000
    with np.errstate(divide="ignore", invalid="ignore"):
        sums = np.concatenate([rng.multinomial(len(counts), even, size) @ counts for size in sizes])
        return Score(float(statistic(counts.sum(0))), statistic(sums))


def share(sums: Sums) -> np.ndarray:
    """right / all."""
    return sums[..., 0] / sums[..., 1]


def balanced(sums: Sums) -> np.ndarray:
    """Mean of the shares of two kinds, or the one share where only one kind occurs."""
    first, second = share(sums), share(sums[..., 2:])
    return np.where(np.isnan(first), second, np.where(np.isnan(second), first, (first + second) / 2))


def harmonic(sums: Sums) -> np.ndarray:
    """Harmonic mean of the shares of two kinds (ProcessBench): 0 where both are, NaN where one is missing."""
    first, second = share(sums), share(sums[..., 2:])
    return np.where(first + second == 0, 0.0, 2 * first * second / (first + second))


# --- from records ------------------------------------------------------------------------------------


def scores(records: Sequence[Record]) -> dict[str, Interval]:
    """Every score that these records allow, in the order of `METRICS`; raises ValueError without records."""
    if not records:
        raise ValueError("there are no records to score")
    found = answer_scores(records) | verifier_scores(records)
    return {name: score.interval() for name, score in found.items()}


def scores_by_source(records: Sequence[Record]) -> dict[str, dict[str, Interval]]:
    """`scores` of every data set in these records, and with several the mean F1 of them all."""
    sources = dict.fromkeys(record["source"] for record in records)
    parts = {source: [r for r in records if r["source"] == source] for source in sources}
    found = {source: scores(part) for source, part in parts.items()}
    f1 = [s["first_error_f1"] for part in parts.values() if "first_error_f1" in (s := verifier_scores(part))]
    if len(f1) > 1:  # resampled set by set, as the sets have sizes of their own
        mean = Score(float(np.mean([s.value for s in f1])), np.mean([s.resampled for s in f1], axis=0))
        found["mean of the sets"] = {"first_error_f1": mean.interval()}
    return found


def answer_scores(records: Sequence[Record]) -> dict[str, Score]:
    """Of the solutions that a policy wrote: greedy accuracy, pass@k and maj@k, how many could be read."""
    written = [[s for s in r["solutions"] if s["kind"] != "given"] for r in records]
    greedy = [[s for s in row if s["kind"] == "greedy"] for row in written]
    sampled = [[s for s in row if s["kind"] == "sample"] for row in written]
    rows = {
        "accuracy": [_count(s["correct"] for s in row) for row in greedy],
        **_of_samples(sampled),
        "answered": [_count(s["answer"] is not None for s in row) for row in written],
        "truncated": [_count(s["truncated"] for s in row) for row in written],
        "undecided": [_count(s["status"] == "timeout" for s in row) for row in written],
        "step_truth": [_count(true for s in row for true in s["truth"] or []) for row in greedy],
    }
    if not any(right for right, _ in rows["undecided"]):
        del rows["undecided"]
    return {name: scored(row, share) for name, row in rows.items() if sum(total for _, total in row)}


def _of_samples(sampled: Sequence[Sequence[dict]]) -> dict[str, list[tuple[float, int]]]:
    n = min(map(len, sampled))
    rows = {}
    for k in sizes(n):
        right = [sum(s["correct"] for s in row[:n]) for row in sampled]
        rows[f"pass@{k}"] = [(pass_at_k(n, c, k), 1) for c in right]
    for k in sizes(n)[1:]:
        rows[f"maj@{k}"] = [_count(won(row[i : i + k]) for i in range(0, n - k + 1, k)) for row in sampled]
    return rows


def sizes(n: int) -> list[int]:
    """1, 2, 4, … and n itself; empty without samples."""
    return sorted({1 << i for i in range(n.bit_length())} | {n}) if n else []


def won(samples: Sequence[dict]) -> bool:
    """Is the most frequent answer right?  Answers that `answers_match` calls equal vote together."""
    chosen = majority([s["vote"] for s in samples])
    return next((s["correct"] for s in samples if chosen is not None and s["vote"] == chosen), False)


def verifier_scores(records: Sequence[Record]) -> dict[str, Score]:
    """Of all verifications: final judgements against the outcome, steps and first errors where known."""
    read = [[(s, v) for s in r["solutions"] for v in s["verifications"]] for r in records]
    judged = [[(s, v) for s, v in row if v["judgements"] is not None] for row in read]
    steps = [[p for s, v in row if s["truth"] for p in zip(v["judgements"], s["truth"], strict=True)]
             for row in judged]  # fmt: skip
    finals = [[(v["final"], s["correct"]) for s, v in row] for row in read]
    errors = [[(first_error(v["judgements"]), s["label"]) for s, v in row if s["label"] is not None]
              for row in read]  # fmt: skip
    kinds = [_by_kind(row, lambda label: label != -1) for row in errors]
    truth = {
        "final_accuracy": (share, [_count(f == c for f, c in row) for row in finals]),
        "final_balanced": (balanced, [_by_kind(row, bool) for row in finals]),
        "final_parsed": (share, [_count(f is not None for f, _ in row) for row in finals]),
        "step_parsed": (share, [_count(v["judgements"] is not None for _, v in row) for row in read]),
        "step_balanced": (balanced, [_by_kind(row, bool) for row in steps]),
        "error_found": (share, [row[:2] for row in kinds]),
        "error_free": (share, [row[2:] for row in kinds]),
        "first_error_f1": (harmonic, kinds),
    }
    return {
        name: scored(rows, statistic) for name, (statistic, rows) in truth.items()
        if sum(sum(row[1::2]) for row in rows)
    }  # fmt: skip


def _count(outcomes: Iterable[bool]) -> tuple[int, int]:
    """(right, all)"""
    outcomes = list(outcomes)
    return sum(map(bool, outcomes)), len(outcomes)


def _by_kind(pairs: Iterable[tuple], first: Callable[[object], bool]) -> tuple[int, int, int, int]:
    """(right, all) of the pairs (said, true) whose truth is of the first kind, then of the others."""
    pairs = list(pairs)
    kinds = [[said == true for said, true in pairs if first(true) == kind] for kind in (True, False)]
    return (*_count(kinds[0]), *_count(kinds[1]))


def table(found: dict[str, Interval]) -> str:
    """Scores, intervals and what they mean, one a line."""
    lines = []
    for name, (mean, low, high) in found.items():
        about = METRICS[name.partition("@")[0]]
        lines.append(f"{name:16s} {mean:6.3f}  [{low:.3f}, {high:.3f}]  {about}")
    return "\n".join(lines)
