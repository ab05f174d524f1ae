"""Checks for the exercises of notebook 08, right for the wrong reason."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product

from tangolite.evaluate import first_error, processbench_f1

Verdicts = Sequence[bool] | None
Counts = tuple[int, int, int, int]  # right on true steps, true steps, right on false steps, false steps

WAYS = ("right place", "wrong place", "no place", "wrong final")
T, F = True, False

JUDGED = (
    [T, T, T], None, [T, T, F], [T, T, F, T], [F, F, T, F], None, [F, T, F, T], [F, F], [F, T, T, F], [F, T, T],
)  # fmt: skip
TRUTHS = (
    [T, T, T], [T, T, T, T], [T, T, T], [T, F, T, T], [F, T, T, T], [T, T, T], [F, F, F, F], [F, F],
    [T, T, T, F], [F, T, F],
)  # fmt: skip


def first_error_f1(answer: Callable[[Sequence[Verdicts], Sequence[Sequence[bool]]], float]) -> None:
    """ProcessBench F1: the harmonic mean of two accuracies at naming the first error.

    ``answer(judgements, truths)`` takes one list of bools a solution (True is CORRECT, or true), or None for
    a verification that could not be read, and returns a number from 0 to 1.  One accuracy is over the
    solutions that hold a false step, the other over those that hold none (there no error is to be named).
    An unread verification is wrong; where both accuracies are 0, so is F1.
    """
    found, right = _f1(answer, JUDGED, TRUTHS), _f1_of(JUDGED, TRUTHS)
    if not math.isclose(found, right, abs_tol=1e-9):
        raise AssertionError(f"{_wrong_f1(found)} On {len(TRUTHS)} solutions F1 is {right:.3f}")
    whole, names = ([[T, F], [T, T]],) * 2, "both accuracies are 1"
    assert math.isclose(_f1(answer, *whole), 1.0), f"where {names}, so is F1, not {_f1(answer, *whole)}"
    blind = ([[T, T], [F, T]], [[T, F], [T, T]])
    try:
        found = _f1(answer, *blind)
    except ZeroDivisionError:
        raise AssertionError("where both accuracies are 0 you divide by 0; F1 is then 0") from None
    assert found == 0, f"where nothing is judged rightly F1 is 0, not {found}"


def _f1(answer: Callable[..., float], judged: Sequence[Verdicts], truths: Sequence[Sequence[bool]]) -> float:
    found = answer(judged, truths)
    assert isinstance(found, int | float) and not isinstance(found, bool), (
        f"return one number, not {type(found).__name__}"
    )
    return float(found)


def _f1_of(judged: Sequence[Verdicts], truths: Sequence[Sequence[bool]]) -> float:
    return processbench_f1([first_error(j) for j in judged], [first_error(t) for t in truths])


def _accuracies(named: Sequence[int | None], true: Sequence[int]) -> tuple[float, float]:
    kinds = [[n == t for n, t in zip(named, true, strict=True) if (t == -1) is none] for none in (F, T)]
    erroneous, clean = (sum(kind) / len(kind) for kind in kinds)
    return erroneous, clean


def _wrong_f1(found: float) -> str:
    """Which typical mistake gives this number on the table of the check."""
    named, true = [first_error(j) for j in JUDGED], [first_error(t) for t in TRUTHS]
    forgiven = [-1 if n is None else n for n in named]
    read = [(j, t) for j, t in zip(JUDGED, TRUTHS, strict=True) if j is not None]
    spotted = [n if n is None or t == -1 or n == -1 else t for n, t in zip(named, true, strict=True)]
    last = [None if j is None else max((k for k, v in enumerate(j) if not v), default=-1) for j in JUDGED]
    last_true = [max((k for k, v in enumerate(t) if not v), default=-1) for t in TRUTHS]
    erroneous, clean = _accuracies(named, true)
    hits = sum(n == t != -1 for n, t in zip(named, true, strict=True))
    precision, recall = hits / sum(n not in (None, -1) for n in named), erroneous
    table = {
        (erroneous + clean) / 2: "This is the plain mean of the two accuracies; F1 is their harmonic mean.",
        sum(n == t for n, t in zip(named, true, strict=True)) / len(true): "This is one accuracy over all "
        "solutions; take it over those with and without a false step apart.",
        processbench_f1(forgiven, true): "You take an unread verification for one that names no error; it "
        "is wrong.",
        _f1_of(*zip(*read, strict=True)): "You leave out what could not be read; it counts as wrong.",
        processbench_f1(spotted, true): "You pay for naming any error; the place must be that of the first.",
        processbench_f1(last, last_true): "You compare the last errors, not the first.",
        2 * precision * recall / (precision + recall): "This is the F1 of precision and recall; here it is "
        "made of two accuracies, with and without a false step.",
    }
    return next((said for value, said in table.items() if math.isclose(found, value, abs_tol=1e-6)),
                f"You get {found:.3f}.")  # fmt: skip


def coin_ways(answer: Callable[[float, Sequence[bool]], Mapping[str, float]]) -> None:
    """The four ways of judging a wrong solution, for a verifier that tosses a coin.

    ``answer(rate, truth)`` returns a probability for each of the four names.  Each step is called INCORRECT
    with the chance ``rate``, whatever is true and whatever was said before; the final judgement is INCORRECT
    exactly when some step's is.  ``truth`` may hold no false step (only the answer was wrong): then there is
    no right place to name.
    """
    for rate, truth in ((0.3, [T, T, F, T, T]), (0.2, [T, F, F, T, T]), (0.3, [F, T, T]), (0.4, [T, T, T])):
        found, right = answer(rate, truth), _tossed(rate, truth)
        assert isinstance(found, Mapping) and set(found) == set(WAYS), (
            f"return a dictionary with the keys {', '.join(WAYS)}"
        )
        where = f"rate {rate}, truth {truth}"
        for way in ("no place", "wrong final", "right place", "wrong place"):
            if not math.isclose(found[way], right[way], abs_tol=1e-9):
                said = _wrong_coin(way, found, rate, truth)
                raise AssertionError(
                    f"{where}: {said} {way!r} has probability {right[way]:.4f}, not {found[way]:.4f}"
                )


def _tossed(rate: float, truth: Sequence[bool]) -> dict[str, float]:
    """By counting all 2^K lists of verdicts."""
    sums, true = dict.fromkeys(WAYS, 0.0), first_error(truth)
    for verdicts in product((T, F), repeat=len(truth)):
        chance = math.prod(1 - rate if verdict else rate for verdict in verdicts)
        named = first_error(verdicts)
        sums["wrong final" if named == -1 else "right place" if named == true else "wrong place"] += chance
    return sums


def _wrong_coin(way: str, found: Mapping[str, float], rate: float, truth: Sequence[bool]) -> str:
    value, k, n = found[way], first_error(truth), len(truth)
    same = lambda guess: math.isclose(value, guess, abs_tol=1e-9)  # noqa: E731
    if way == "no place":
        return "if no step is called INCORRECT, neither is the whole."
    if way == "wrong final":
        return (
            "that is the chance that all steps are called INCORRECT."
            if same(rate**n) else "the final judgement is wrong when every step is called CORRECT."
        )  # fmt: skip
    if way == "wrong place":
        return "the four must add up to 1." if not math.isclose(sum(found.values()), 1.0) else ""
    if k == -1:
        return "there is no false step, so no place can be the right one."
    if same(rate):
        return "the steps before the first error must be called CORRECT as well."
    if same(rate * (1 - rate) ** (k + 1)):
        return "only the steps before the first error matter, and you count one too many."
    false = truth.count(False)
    if same(rate**false * (1 - rate) ** (n - false)):
        return "the steps after the named one may be judged either way."
    return "the first INCORRECT must stand at the first error."


POOL: list[Counts] = [(180, 200, 90, 100)] * 10
NOW: list[Counts] = [
    (184, 200, 88, 100), (196, 200, 97, 100), (174, 200, 84, 100), (170, 200, 80, 100),
    (170, 200, 76, 100), (162, 200, 72, 100), (160, 200, 66, 100), (150, 200, 60, 100), (140, 200, 62, 100),
    (181, 200, 90, 100),
]  # fmt: skip


def first_hacked(answer: Callable[[Sequence[Counts], Sequence[Counts], float], int | None]) -> None:
    """The first measurement at which the verifier does worse on the current generator than noise explains.

    ``answer(pool, now, z)`` takes two lists of (right on true steps, true steps, right on false steps, false
    steps), one entry a measurement, and returns an index or None.  Balanced accuracy is the mean of the two
    shares; the share p of n steps has the variance p (1 - p) / n, and variances of independent numbers add
    (a constant factor comes out squared).  Hacked: pool minus now exceeds ``z`` standard errors of itself.
    """
    right = _alarm(POOL, NOW, 3.0)
    found = answer(POOL, NOW, 3.0)
    if found != right or isinstance(found, bool):
        raise AssertionError(f"{_wrong_alarm(found)} Here it is measurement {right}, and you say {found!r}")
    calm = (POOL[:2], NOW[:2])
    found = answer(*calm, 3.0)
    assert found is None, f"where no gap exceeds the noise return None, not {found!r}"
    few = ([tuple(n // 10 for n in row) for row in POOL], [tuple(n // 10 for n in row) for row in NOW])
    found = answer(*few, 3.0)
    assert found == _alarm(*few, 3.0), (
        f"with a tenth of the steps the same gaps are noise up to {_alarm(*few, 3.0)}, and you say {found!r}"
    )
    assert answer(POOL, NOW, 1.0) == _alarm(POOL, NOW, 1.0), (
        f"at z = 1 it is {_alarm(POOL, NOW, 1.0)}: z must count"
    )


def _alarm(pool: Sequence[Counts], now: Sequence[Counts], z: float, error: str = "right") -> int | None:
    """The answer; ``error`` computes the noise in a wrong way that readers choose."""
    for index, pair in enumerate(zip(pool, now, strict=True)):
        (then, variance), (present, other) = map(_balanced, pair)
        noise = {
            "right": math.sqrt(variance + other),
            "now only": math.sqrt(other),
            "added": math.sqrt(variance) + math.sqrt(other),
            "variance": variance + other,
            "sum of shares": 2 * math.sqrt(variance + other),
            "half": math.sqrt(2 * (variance + other)),
        }[error]
        if then - present > z * noise:
            return index
    return None


def _balanced(counts: Counts) -> tuple[float, float]:
    """Balanced accuracy and the variance of its estimate."""
    true_right, true, false_right, false = counts
    p, q = true_right / true, false_right / false
    return (p + q) / 2, (p * (1 - p) / true + q * (1 - q) / false) / 4


def _wrong_alarm(found: object) -> str:
    if isinstance(found, bool) or not isinstance(found, int | None):
        return "Return an index (a whole number) or None."
    pairs = list(zip(map(_balanced, POOL), map(_balanced, NOW), strict=True))
    sizes = [abs(p[0] - n[0]) > 3 * math.sqrt(p[1] + n[1]) for p, n in pairs]
    table = {
        sizes.index(True): "A verifier that does *better* on the current generator is not hacked.",
        _alarm(POOL, NOW, 0.0): "You take any gap; it must exceed z standard errors.",
        _alarm(POOL, NOW, 3.0, "now only"): "The pool was measured too: its variance belongs to the noise.",
        _alarm(POOL, NOW, 3.0, "added"): "Variances add, standard errors do not: the root comes last.",
        _alarm(POOL, NOW, 3.0, "sum of shares"): "Balanced accuracy is the mean of two shares: the half "
        "must go into the noise too, squared.",
        _alarm(POOL, NOW, 3.0, "half"): "The variance of a mean of two takes the factor 1/4, not 1/2.",
        len(POOL) - 1 - [p[0] - n[0] > 3 * math.sqrt(p[1] + n[1]) for p, n in pairs][::-1].index(True): "You "
        "return the last such measurement.",
        None: "You find none.",
    }
    return table.get(found, "Look at the standard error of pool minus now once more.")
