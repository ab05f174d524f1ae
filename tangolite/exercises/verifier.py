"""Checks for the exercises of notebook 05: class weights from counts, a vote, a total parser."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tangolite.exercises import name_mistake

# --- 1: class weights -------------------------------------------------------------------------------

Weights = Callable[[float, float, Bool[Tensor, " B"]], Float[Tensor, " B"]]


def weights_of(answer: Weights) -> None:
    """Weights 1/sqrt(count of the class), with mean 1 over the batch, from the classes' average counts.

    ``answer(right, wrong, is_correct)``: two counts and the truth of each sample (B,) bool; returns (B,).
    """
    batch = torch.tensor([False, True, False, False, True, False])
    found = _weighed(answer, 1.5, 6.0, batch)
    raw = torch.where(batch, 1.5**-0.5, 6.0**-0.5)
    one_class_one = torch.where(batch, 1.5**-0.5, 6.0**-0.5) * 2 / (1.5**-0.5 + 6.0**-0.5)
    inverse = torch.where(batch, 1 / 1.5, 1 / 6.0)
    mistakes = {
        "these are 1/sqrt(count), but not scaled: their mean over the batch must be 1": raw,
        "the *rarer* class weighs more: the classes are swapped, or the weights grow with the count": _scaled(
            torch.where(batch, *_roots(6.0, 1.5))
        ),
        "this is 1/count; the exercise asks for 1/sqrt(count)": _scaled(inverse),
        "1/count without a scale, and the square root is missing": inverse,
        "their sum is 1; their mean must be, or the step shrinks with the batch": raw / raw.sum(),
        "the two weights have mean 1, the *samples'* weights do not: scale over the batch": one_class_one,
        "the counts are those of this batch; use the averages that are given": _scaled(
            torch.where(batch, *_roots(2.0, 4.0))
        ),
    }
    otherwise = f"expected {_shown(_scaled(raw))}, got {_shown(found)}"
    name_mistake(found, _scaled(raw), mistakes, otherwise, atol=1e-5)
    _one_class(answer)


def _one_class(answer: Weights) -> None:
    for is_correct in (False, True):
        found = _weighed(answer, 1.4, 6.6, torch.tensor([is_correct] * 4))
        assert _same(found, torch.ones(4)), (
            f"a batch with {'right' if is_correct else 'wrong'} solutions only has weights 1, not "
            f"{_shown(found)}: the mean is taken over the samples of this batch"
        )
    try:
        found = _weighed(answer, 0.0, 8.0, torch.tensor([False] * 3))
    except ZeroDivisionError:
        raise AssertionError("a count of 0 divides by zero; nobody in the batch needs that weight") from None
    assert found.isfinite().all(), (
        f"where a class has count 0 and is not in the batch, the weights are {_shown(found)}: "
        "0 times infinity is NaN, so pick the weights and do not multiply with a mask"
    )
    assert _same(found, torch.ones(3)), (
        f"wrong solutions only, count 0 for right ones: {_shown(found)}, not 1"
    )


def _weighed(answer: Weights, right: float, wrong: float, batch: Tensor) -> Tensor:
    found = answer(right, wrong, batch)
    assert isinstance(found, Tensor), f"expected a tensor of weights, got {type(found).__name__}"
    assert found.shape == batch.shape, (
        f"one weight for each of the {len(batch)} samples is wanted; the shape is {tuple(found.shape)}"
    )
    return found


def _roots(right: float, wrong: float) -> tuple[float, float]:
    return right**-0.5, wrong**-0.5


def _scaled(weights: Tensor) -> Tensor:
    return weights / weights.mean()


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.double(), b.double(), atol=1e-5)


def _shown(weights: Tensor) -> str:
    return "[" + ", ".join(f"{w:.3g}" for w in weights.tolist()) + "]"


# --- 2: a vote --------------------------------------------------------------------------------------

VOTES = (  # final judgements, verdict, and what another verdict usually comes from
    ([True, True, False], True, "two of three say CORRECT"),
    ([False, True, False], False, "two of three say INCORRECT"),
    ([True, False], None, "a tie is no verdict"),
    ([True, None, None, None], True, "None does not vote: one CORRECT against nothing is CORRECT"),
    ([None, None, False], False, "None does not vote, but the one INCORRECT does"),
    ([True, True, False, None, None], True, "the majority is of those that could be read, not of all"),
    ([None, None], None, "nobody could be read, so there is no verdict: None is not INCORRECT"),
    ([True, False, None], None, "a tie stays a tie: a None does not break it"),
    ([], None, "there may be no verifications at all"),
)


def vote_of(answer: Callable[[list[bool | None]], bool | None]) -> None:
    """The majority of R final judgements, each True, False or None; None for a tie or without votes."""
    for finals, wanted, lesson in VOTES:
        given = list(finals)
        try:
            found = answer(given)
        except (ZeroDivisionError, ValueError, IndexError, TypeError) as error:
            words = f"for {finals} it stopped with {type(error).__name__} ({error}): {lesson}"
            raise AssertionError(words) from error
        assert found is None or isinstance(found, bool), (
            f"for {finals} it gave {found!r}, expected True, False or None"
        )
        assert found is wanted, f"for {finals} it gave {found}, expected {wanted}: {lesson}"
        assert given == finals, "the list that was handed in is changed; others may still need it"


# --- 3: a total parser ------------------------------------------------------------------------------

GOOD = "1. 28+5=2 -> PASS\n2. 2-4=29, not 28 -> FAIL\n3. 28+6=3 -> PASS"
LINES = (  # text, number of steps, verdicts, and what other verdicts usually come from
    (GOOD, 3, [True, False, True], "one verdict for each line, PASS is True"),
    ("1. fine -> pass.\n2. 29 -> Fail . \n", 2, [True, False], "any case, with blanks and full stops after it"),
    ("1. I would say PASS, but 2-4=29 -> FAIL", 1, [False],
     "the verdict stands behind the arrow; the analysis may say PASS as well"),
    ("1. 2 -> 29 -> PASS", 1, [True], "the *last* arrow counts; the analysis may hold others"),
    ("1. at first -> PASS, no -> FAIL", 1, [False], "the *last* arrow counts, and not the first"),
    ("I begin.\n1. 2 -> PASS\nso far so good -> FAIL\n2. 3 -> PASS", 2, [True, True],
     "lines that do not begin with a number and a full stop are talk"),
    ("1. 2 -> PASS", 2, None, "one line for two steps: nobody knows which of them it judges"),
    (GOOD, 2, None, "three lines for two steps: do not cut the list to fit"),
    ("1. 2 -> PASS\n1. 2 -> FAIL", 2, None, "the numbers are to be 1, 2; here are two lines 1"),
    ("2. 3 -> PASS\n1. 2 -> FAIL", 2, None, "the numbers are out of order: they must go from 1 to n_steps"),
    ("1. 2 -> PASS\n2. 3 -> perhaps", 2, None, "one verdict is unreadable: neither FAIL nor to be left out"),
    ("1. 2 -> PASS as it should", 1, None, "PASS must close the line; words after it make it unreadable"),
    ("1. 2 = 2, PASS", 1, None, "without an arrow there is no verdict"),
    ("1. 2 ->", 1, None, "behind the arrow stands nothing"),
    ("", 1, None, "an empty text judges nothing"),
    ("", 0, None, "no steps, no judgements: None, not an empty list"),
    (f"{'9' * 5000}. 2 -> PASS", 1, None, "a number of 5000 digits; int() refuses it, so compare texts"),
    ("1\u00b2. 2 -> PASS", 1, None, "a superscript counts as a digit for str.isdigit, and int() refuses it"),
)  # fmt: skip


def read_lines(answer: Callable[[str, int], list[bool] | None]) -> None:
    """A total parser of lines `2. analysis -> FAIL`: a verdict for each of n_steps steps, or None."""
    for text, n_steps, wanted, lesson in LINES:
        shown = text if len(text) < 80 else text[:20] + "..."
        where = f"for {shown!r} and n_steps={n_steps}"
        found = _read(answer, text, n_steps, f"{where} ", lesson)
        assert found == wanted, f"{where} it gave {found!r}, expected {wanted!r}: {lesson}"
    draw = random.Random(5)
    pieces = [
        "1.",
        "2.",
        "3.",
        " ",
        "\n",
        "->",
        "PASS",
        "FAIL",
        ".",
        "2-4=29",
        "\t",
        "-",
        ">",
        "\u00b2",
        "\r\n",
    ]
    for _ in range(2000):
        text, n_steps = "".join(draw.choices(pieces, k=draw.randrange(16))), draw.randrange(4)
        _read(
            answer, text, n_steps, f"for random pieces, {text!r} and n_steps={n_steps}, ", "any text may come"
        )


def _read(answer: Callable, text: str, n_steps: int, where: str, lesson: str) -> list[bool] | None:
    try:
        found = answer(text, n_steps)
    except NotImplementedError:
        raise
    except Exception as error:
        words = f"{where}it stopped with {type(error).__name__} ({str(error)[:60]}): {lesson}"
        raise AssertionError(words) from error
    whole = isinstance(found, list) and len(found) == n_steps > 0 and all(isinstance(v, bool) for v in found)
    assert found is None or whole, (
        f"{where}it gave {found!r}, expected None or a list of exactly {n_steps} bools: {lesson}"
    )
    return found
