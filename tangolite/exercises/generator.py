"""Checks for the exercises of notebook 04: the reward of a text, advantages of mixed groups, pass@k."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import torch
from jaxtyping import Float, Int
from torch import Tensor

# text, gold, reward, and what a wrong reward usually comes from
TEXTS = (
    (r"<think><step>28+5=2</step></think><answer>\boxed{2}</answer>", "2", 1.0, "a right answer is paid"),
    (r"<think><step>28+5=3</step></think><answer>\boxed{3}</answer>", "2", 0.0, "a wrong answer is not paid"),
    (r"<answer>\boxed{0.50}</answer>", r"\frac{1}{2}", 1.0,
     "equal numbers may be written differently: compare with answers_match, not as strings"),
    (r"<think>is it \boxed{4}?</think><answer>\boxed{5}</answer>", "4", 0.0,
     "a box inside the thinking is no answer"),
    (r"<answer>\boxed{12}, no, I dropped a carry: \boxed{15}</answer>", "12", 0.0,
     "of two boxes the last one counts; the first was taken back"),
    (r"<answer>\boxed{12}, no, I dropped a carry: \boxed{15}</answer>", "15", 1.0,
     "of two boxes the last one counts, and it alone"),
    (r"<answer>\boxed{8}. Checking once more: \boxed{9", "8", 0.0,
     "the last box is cut off, so there is no answer; do not fall back to an earlier box"),
    ("<answer>the answer is 4</answer>", "4", 0.0, "without a box there is no answer"),
    ("", "4", 0.0, "an empty text has no answer"),
    (r"<answer>\boxed{}</answer> 4", "4", 0.0, "an empty box is no answer"),
    (r"<answer>\boxed{4}</answer>", None, math.nan,
     "without a gold answer (None) nothing can be graded: NaN, which is not a wrong answer"),
    (r"<answer>\boxed{4}</answer>", "  ", math.nan,
     "a gold answer of blanks is none: NaN, which is not a wrong answer"),
    ("no box at all", None, math.nan,
     "no gold answer comes first: NaN even where the text holds no answer either"),
)  # fmt: skip


def reward_of(answer: Callable[[str, str | None], float]) -> None:
    """The outcome reward of a text: 1.0, 0.0, or NaN where there is no gold answer to compare with."""
    for text, gold, wanted, lesson in TEXTS:
        where = f"for the text {text!r} and the gold answer {gold!r}"
        try:
            found = answer(text, gold)
        except (TypeError, AttributeError, IndexError) as error:
            raise AssertionError(
                f"{where} it stopped with {type(error).__name__} ({error}); {lesson}"
            ) from error
        told = isinstance(found, int | float)
        assert told, f"{where} it gave {found!r}, expected a number: 1.0, 0.0 or NaN"
        same = math.isnan(found) if math.isnan(wanted) else found == wanted
        assert same, f"{where} it gave {found}, expected {wanted}: {lesson}"


ADVANTAGES = Callable[[Float[Tensor, " B"], Int[Tensor, " B"]], Float[Tensor, " B"]]


def group_advantage(answer: ADVANTAGES) -> None:
    """GRPO's advantage of every completion, in groups that may lie mixed, be dead, or hold a NaN."""
    one = _advantage(answer, [1, 0, 0, 1, 0, 0, 0, 0], [7] * 8)
    right = _grpo([1, 0, 0, 1, 0, 0, 0, 0])
    biased = [a * math.sqrt(8 / 7) for a in right]
    assert not _close(one, biased), "one group: the standard deviation divides by G; it should by G - 1"
    assert not _close(one, [r - 0.25 for r in (1, 0, 0, 1, 0, 0, 0, 0)]), (
        "one group: centred, but not divided by the standard deviation"
    )
    assert _close(one, right), (
        f"one group of rewards [1,0,0,1,0,0,0,0]: expected {_shown(right)}, got {_shown(one)}"
    )
    _mixed(answer)
    _dead(answer)
    _unscored(answer)


def _mixed(answer: ADVANTAGES) -> None:
    """Two groups that take turns: [1, 0, 0, 0] and [1, 1, 1, 0]."""
    reward, group = [1, 1, 0, 1, 0, 1, 0, 0], [3, 0, 3, 0, 3, 0, 3, 0]
    found, right = _advantage(answer, reward, group), [0.0] * 8
    right[0::2], right[1::2] = _grpo([1, 0, 0, 0]), _grpo([1, 1, 1, 0])
    halves = [*_grpo(reward[:4]), *_grpo(reward[4:])]
    assert not _close(found, _grpo(reward)), (
        "two groups: these are statistics of the whole batch, but each group has its own"
    )
    assert not _close(found, halves), (
        "two groups that lie mixed: the batch was cut into consecutive pieces; go by the group numbers"
    )
    assert _close(found, right), f"two mixed groups: expected {_shown(right)}, got {_shown(found)}"


def _dead(answer: ADVANTAGES) -> None:
    for value in (0.0, 1.0):
        found = _advantage(answer, [value] * 4 + [1, 0, 0, 0], [0] * 4 + [1] * 4)
        assert not any(map(math.isnan, found[:4])), (
            f"a dead group (all rewards {value:g}) gave NaN, 0/0: add 1e-6 to the standard deviation"
        )
        assert _close(found[:4], [0.0] * 4), (
            f"a dead group (all {value:g}) must give 0, got {_shown(found[:4])}"
        )
        assert _close(found[4:], _grpo([1, 0, 0, 0])), "a dead group changed the advantages of another group"
    for count in (3, 5, 6, 7):
        found = _advantage(answer, [0.1] * count, [0] * count)
        assert found == [0.0] * count, (
            f"a dead group of {count} rewards 0.1 gave {_shown(found)}, expected exactly 0: "
            "the mean is rounded in float32, and dividing by a tiny deviation makes the rest visible"
        )


def _unscored(answer: ADVANTAGES) -> None:
    found = _advantage(answer, [1, 0, math.nan, 0], [2] * 4)
    assert not math.isnan(found[0]), (
        "one reward of NaN made its whole group NaN: leave it out of mean and deviation"
    )
    a, b, c = _grpo([1, 0, 0])
    zeros = _grpo([1, 0, 0, 0])
    assert not _close(found[:2], zeros[:2]), (
        "a reward of NaN was counted as 0; it takes no part in the statistics"
    )
    assert found[2] == 0, f"the advantage of a reward of NaN must be 0, got {found[2]}"
    assert _close(found, [a, b, 0.0, c]), (
        f"rewards [1,0,NaN,0]: expected {_shown([a, b, 0, c])}, got {_shown(found)}"
    )


def pass_at_k(answer: Callable[[int, int, int], float]) -> None:
    """Unbiased chance that one of k samples is right, from n of which some are right."""
    cases = [(n, c, k) for n in range(1, 8) for c in range(n + 1) for k in range(1, n + 1)]
    found, right = [_called(answer, case) for case in cases], [_by_subsets(*case) for case in cases]
    mistakes = {
        "this is the chance that none of the k is right": lambda n, c, k: (
            math.comb(n - c, k) / math.comb(n, k)
        ),
        "this is the chance that all k are right": lambda n, c, k: math.comb(c, k) / math.comb(n, k),
        "this draws with replacement, 1 - (1 - c/n)^k, which is biased": lambda n, c, k: 1 - (1 - c / n) ** k,
        "this is the share of right samples, whatever k is": lambda n, c, k: c / n,
    }
    for words, mistake in mistakes.items():
        same = all(abs(f - mistake(*case)) < 1e-9 for f, case in zip(found, cases, strict=True))
        assert not same, f"{words}; expected, of all subsets of k samples, the share that holds a right one"
    for case, f, r in zip(cases, found, right, strict=True):
        where = "n={}, correct={}, k={}".format(*case)
        assert abs(f - r) < 1e-9, f"{where}: expected {r:.4f}, got {f:.4f}; list the subsets and count them"


def _by_subsets(n: int, correct: int, k: int) -> float:
    subsets = list(combinations([True] * correct + [False] * (n - correct), k))
    return sum(map(any, subsets)) / len(subsets)


def _called(answer: Callable[[int, int, int], float], case: tuple[int, int, int]) -> float:
    where = "n={}, correct={}, k={}".format(*case)
    try:
        found = answer(*case)
    except (ValueError, ZeroDivisionError) as error:
        raise AssertionError(
            f"{where} stopped with {type(error).__name__} ({error}): with fewer than k wrong samples every "
            "subset holds a right one, and the chance is 1"
        ) from error
    assert isinstance(found, int | float), f"{where} gave {found!r}, which is not a number"
    return float(found)


def _grpo(reward: list[float]) -> list[float]:
    mean = sum(reward) / len(reward)
    deviation = math.sqrt(sum((r - mean) ** 2 for r in reward) / (len(reward) - 1))
    return [(r - mean) / (deviation + 1e-6) for r in reward]


def _advantage(answer: ADVANTAGES, reward: list[float], group: list[int]) -> list[float]:
    found = answer(torch.tensor(reward, dtype=torch.float32), torch.tensor(group))
    assert isinstance(found, Tensor), f"the answer is a {type(found).__name__}, expected a tensor (B,)"
    assert found.shape == (len(reward),), (
        f"the answer has shape {tuple(found.shape)}, expected ({len(reward)},)"
    )
    return found.tolist()


def _close(found: list[float], right: list[float]) -> bool:
    return all(abs(a - b) < 1e-3 for a, b in zip(found, right, strict=True))


def _shown(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.3g}" for value in values) + "]"
