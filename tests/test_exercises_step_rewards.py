"""The checks of notebook 06 accept its solutions and tell typical mistakes apart."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import pytest

from tangolite.exercises import step_rewards as checks

NAME = "06_step_rewards"


def starts(text: str) -> list[int]:
    return [i for i in range(len(text)) if text.startswith("</step>", i)]


def test_step_ends(solutions, told_apart) -> None:
    right = solutions(NAME)["step_ends"]

    def holder(pieces: list[str], characters: list[int]) -> list[int]:
        owner = [i for i, piece in enumerate(pieces) for _ in piece]
        return [owner[c] for c in characters]

    def late(pieces: list[str]) -> list[int]:  # the exclusive end, looked up as if it were the last character
        closed = list(accumulate(map(len, pieces)))
        return [bisect_right(closed, start + len("</step>")) for start in starts("".join(pieces))]

    told_apart(checks.step_ends, right, {
        "need not be a token of its own": lambda pieces: [i for i, p in enumerate(pieces) if p == "</step>"],
        "where the closing tag begins": lambda pieces: holder(pieces, starts("".join(pieces))),
        "one too far": late,
        "even where two share a token": lambda pieces: sorted(set(right(pieces))),
        "count tokens, not characters": lambda pieces: [s + 6 for s in starts("".join(pieces))],
        "return a list of indices, not NoneType": lambda pieces: None,
        r"expected \[3, 6\], got \[\]": lambda pieces: [],
    })  # fmt: skip


def test_turning_alpha(solutions, told_apart) -> None:
    right = solutions(NAME)["turning_alpha"]
    told_apart(checks.turning_alpha, right, {
        "no alpha in .* turns the token": lambda o, s: 0.5 if o == s else o / (o - s),
        "divide by 0": lambda o, s: o / (o - s),
        "weight of the .outcome.": lambda o, s: s / (s - o),
        "check the sign": lambda o, s: o / (o + s),
        "you return None": lambda o, s: None,
        "the mix is": lambda o, s: 0.5 if o * s < 0 else None,
    })  # fmt: skip


def loop(*, k=True, none=None, others="reward", start=0, before=False, average=2, go=True):
    """The solution as a loop with switches, each of which is a typical mistake."""

    def kept(same: bool, same_solution: bool) -> bool:
        return {"reward": not same, "all": True, "solution": not same_solution,
                "own": same_solution and not same}[others]  # fmt: skip

    def answer(ends, verifications, length):
        found = []  # (solution, token, reward)
        for b, verdict_lists in enumerate(verifications):
            for verdicts in verdict_lists:
                taken = verdicts or ([False] * len(ends[b]) if none else [])
                for end, verdict in zip(ends[b], taken, strict=False):
                    found.append((b, end, (1 if verdict else -1) / (len(ends[b]) if k else 1)))
        rows = [[0.0] * length for _ in ends]
        for i, (b, end, reward) in enumerate(found):
            rest = [r for j, (other, _, r) in enumerate(found) if kept(i == j, other == b)]
            for t in range(length):
                if (t <= end - start if go else t == end) or before:
                    r = len([v for v in verifications[b] if v]) if average == "read" else average
                    rows[b][t] += (reward - sum(rest) / len(rest)) / r
        return rows

    return answer


def test_leave_one_out(solutions, told_apart) -> None:
    checks.leave_one_out(loop())
    told_apart(checks.leave_one_out, solutions(NAME)["leave_one_out"], {
        "of the other 9, not of all 10": loop(others="all"),
        "not all those of its solution": loop(others="solution"),
        "not -1/K for every step": loop(none=True),
        "with K the number of steps": loop(k=False),
        "only tokens that complete a step": loop(go=False),
        "you sum over the whole solution": loop(before=True),
        "the sum begins with its own": loop(start=1),
        "still counts among the R": loop(average="read"),
        "averaged, not added up": loop(average=1),
        "not of each solution": loop(others="own"),
        "one list of length=8 numbers": lambda ends, verifications, length: [[0.0] * length],
        "solution 0, token 0: expected": lambda ends, verifications, length: [[7.0] * length] * 3,
    })  # fmt: skip


def test_an_answer_that_returns_words_stops_with_its_own_error() -> None:
    with pytest.raises((TypeError, ValueError)):
        checks.leave_one_out(lambda ends, verifications, length: [["a"] * length] * 3)
