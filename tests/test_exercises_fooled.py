"""The checks of notebook 08 accept its solutions and tell typical mistakes apart."""

from __future__ import annotations

import math
from functools import partial

import pytest

from tangolite.exercises import fooled as checks

NAME = "08_right_for_the_wrong_reason"


def first(flags, last=False):
    wrong = [k for k, flag in enumerate(flags) if not flag]
    return (wrong[-1 if last else 0]) if wrong else -1


def f1(judgements, truths, *, unread=None, last=False, spotted=False, mean="harmonic", safe=True):
    """The solution with switches, each of which is a typical mistake."""
    pairs = [
        (unread if j is None else first(j, last), first(t, last))
        for j, t in zip(judgements, truths, strict=True)
        if j is not None or unread != "left out"
    ]
    if spotted:
        pairs = [(t if n not in (None, -1) and t != -1 else n, t) for n, t in pairs]
    right = lambda kind: sum(n == t for n, t in kind) / len(kind)  # noqa: E731
    a, b = right([p for p in pairs if p[1] != -1]), right([p for p in pairs if p[1] == -1])
    if mean == "plain":
        return (a + b) / 2
    if mean == "one":
        return right(pairs)
    if mean == "precision":
        b = sum(n == t != -1 for n, t in pairs) / sum(n not in (None, -1) for n, _ in pairs)
    return 2 * a * b / (a + b) if a + b or not safe else 0.0


def test_first_error_f1(solutions, told_apart) -> None:
    checks.first_error_f1(f1)
    told_apart(checks.first_error_f1, solutions(NAME)["first_error_f1"], {
        "plain mean of the two": partial(f1, mean="plain"),
        "one accuracy over all": partial(f1, mean="one"),
        "for one that names no error": partial(f1, unread=-1),
        "You leave out": partial(f1, unread="left out"),
        "You pay for naming any error": partial(f1, spotted=True),
        "You compare the last errors": partial(f1, last=True),
        "precision and recall": partial(f1, mean="precision"),
        "you divide by 0": partial(f1, safe=False),
        "return one number, not list": lambda judgements, truths: [],
        r"You get 0\.900": lambda judgements, truths: 0.9,
        "where nothing is judged rightly F1 is 0, not nan": lambda judgements, truths: (
            f1(judgements, truths) or math.nan
        ),
        "both accuracies are 1, so is F1": lambda judgements, truths: (
            0.5 if len(truths) == 2 else f1(judgements, truths)
        ),
    })  # fmt: skip


def coin(rate, truth, *, before=0, ahead=True, after=False, final="none", lost=False, blank=True):
    """The solution with switches, each of which is a typical mistake."""
    k, n, false = first(truth), len(truth), truth.count(False)
    silent = (1 - rate) ** n if final == "none" else rate**n if final == "all" else 1 - (1 - rate) ** n
    right = rate * (1 - rate) ** (k + before) if ahead else rate
    if after:
        right = rate**false * (1 - rate) ** (n - false)
    if k == -1 and blank:
        right = 0.0
    rest = 0.0 if lost else 1 - silent - right
    return {"right place": right, "wrong place": rest, "no place": 0.0, "wrong final": silent}


def test_coin_ways(solutions, told_apart) -> None:
    checks.coin_ways(coin)
    told_apart(checks.coin_ways, solutions(NAME)["coin_ways"], {
        "you count one too many": partial(coin, before=1),
        "the steps before the first error must be called CORRECT": partial(coin, ahead=False),
        "may be judged either way": partial(coin, after=True),
        "all steps are called INCORRECT": partial(coin, final="all"),
        "the final judgement is wrong when every step": partial(coin, final="any"),
        "the four must add up to 1": partial(coin, lost=True),
        "there is no false step": partial(coin, blank=False),
        "neither is the whole": lambda rate, truth: coin(rate, truth) | {"no place": rate},
        "the first INCORRECT must stand": lambda rate, truth: coin(rate, truth) | {"right place": 0.9},
        "return a dictionary with the keys": lambda rate, truth: [0.25] * 4,
    })  # fmt: skip


def test_the_coin_is_counted_over_every_list_of_verdicts() -> None:
    for rate, truth in ((0.5, [True, False]), (0.1, [False] * 4), (0.7, [True] * 5)):
        counted = checks._tossed(rate, truth)
        assert counted == pytest.approx(coin(rate, truth), abs=1e-12)
        assert sum(counted.values()) == pytest.approx(1.0)


def alarm(pool, now, z, *, part=0.25, both=True, added=False, sided=True, fixed=None, last=False, none=None):
    """The solution with switches, each of which is a typical mistake."""

    def share(counts):
        a, n, b, m = counts
        p, q = a / n, b / m
        return (p + q) / 2, part * (p * (1 - p) / n + q * (1 - q) / m)

    found = []
    for index, (then, present) in enumerate(zip(pool, now, strict=True)):
        (p, v), (q, w) = share(then), share(present)
        noise = math.sqrt(v) + math.sqrt(w) if added else math.sqrt(v * both + w)
        gap = p - q if sided else abs(p - q)
        if gap > (z * noise if fixed is None else fixed):
            found.append(index)
    return (found[-1 if last else 0]) if found else none


def test_first_hacked(solutions, told_apart) -> None:
    checks.first_hacked(alarm)
    told_apart(checks.first_hacked, solutions(NAME)["first_hacked"], {
        "does .better. on the current": partial(alarm, sided=False),
        "You take any gap": partial(alarm, fixed=0.0),
        "its variance belongs to the noise": partial(alarm, both=False),
        "standard errors do not": partial(alarm, added=True),
        "the half must go into": partial(alarm, part=1.0),
        "the factor 1/4, not 1/2": partial(alarm, part=0.5),
        "You return the last": partial(alarm, last=True),
        "where no gap exceeds the noise": partial(alarm, none=-1),
        "with a tenth of the steps": partial(alarm, fixed=0.09),
        "at z = 1": lambda pool, now, z: alarm(pool, now, 3.0),
        "You find none": lambda pool, now, z: None,
        "Return an index": lambda pool, now, z: True,
    })  # fmt: skip
