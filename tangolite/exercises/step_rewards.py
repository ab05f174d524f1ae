"""Checks for the exercises of notebook 06, from judgements to numbers on tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy

import torch

from tangolite.advantages import step_advantage, to_go
from tangolite.rewards import step_rewards

Verdicts = Sequence[bool] | None

CUT = {
    "tags alone": (
        ["<think>", "<step>", "1+1=2", "</step>", "<step>", "2+1=3", "</step>", "</think>"],
        [3, 6],
    ),
    "tags in pieces": (["<", "step", ">", "x", "</", "step", ">", "<step>", "y", "</st", "ep>"], [6, 10]),
    "a token that goes on after the tag": (
        ["<step>x = 5", ".</step>\n", "<step>", "y", "</step>\n\n"],
        [1, 4],
    ),
    "two steps in one token": (["<step>", "a", "</step><step>b</step>", "<step>", "c", "</step>"], [2, 2, 5]),
    "no step at all": (["just", " talk"], []),
}


def step_ends(answer: Callable[[list[str]], list[int]]) -> None:
    """Index of the token that completes each `</step>`, given the text of every token.

    ``answer(pieces)`` gets the tokens' texts, which joined are the completion, and returns one index per
    `</step>`, in order: that of the token holding its last character, the `>`.
    """
    for kind, (pieces, right) in CUT.items():
        found = answer(list(pieces))
        assert isinstance(found, list), f"return a list of indices, not {type(found).__name__}"
        if found != right:
            raise AssertionError(f"{kind}, {pieces}: {_misplaced(pieces, right, [int(i) for i in found])}")


def _misplaced(pieces: list[str], right: list[int], found: list[int]) -> str:
    text = "".join(pieces)
    holder = [i for i, piece in enumerate(pieces) for _ in piece]
    closings = [i for i in range(len(text)) if text.startswith("</step>", i)]
    past = [holder[min(start + len("</step>"), len(text) - 1)] for start in closings]
    if found == [i for i, piece in enumerate(pieces) if piece == "</step>"]:
        return "a tag need not be a token of its own; look for it in the joined text"
    if found == sorted(set(right)):
        return f"{len(right)} steps end here, and each needs its index, even where two share a token"
    if found == [holder[start] for start in closings]:
        return "you give the token where the closing tag begins; the step is complete at its `>`"
    if found == past or found == [i + 1 for i in right]:
        return "one too far: the end of a span is exclusive, the last character of the tag lies before it"
    if found and max(found) >= len(pieces):
        return f"index {max(found)} is outside the {len(pieces)} tokens: count tokens, not characters"
    return f"expected {right}, got {found}"


def turning_alpha(answer: Callable[[float, float], float | None]) -> None:
    """The alpha at which a token's mixed advantage is 0, or None if blame stays blame and praise praise.

    ``answer(outcome, step)`` gets a token's outcome advantage and step advantage, neither of them 0, and
    returns the alpha in [0, 1] at which (1 - alpha) * outcome + alpha * step is 0.
    """
    for outcome, step in ((-0.5, 1.5), (1.0, -3.0), (-2.0, 0.5)):
        found = _call(answer, outcome, step)
        case = f"outcome {outcome:+}, step {step:+}"
        assert found is not None, f"{case}: the signs differ, so there is such an alpha; you return None"
        swapped = step / (step - outcome)
        assert not _near(found, swapped), (
            f"{case}: {found:.3f} is the weight of the *outcome*, not the step's"
        )
        assert not _near(found, outcome / (outcome + step)), (
            f"{case}: check the sign: outcome + alpha * (step - outcome) = 0; you divide by outcome + step"
        )
        left = (1 - found) * outcome + found * step
        assert abs(left) < 1e-6, f"{case}: at your alpha = {found:.3f} the mix is {left:+.3f}, not 0"
    for outcome, step in ((1.0, 1.0), (-0.5, -1.5), (0.5, 0.75)):
        found = _call(answer, outcome, step)
        assert found is None, (
            f"outcome {outcome:+}, step {step:+}: both say the same, so no alpha in [0, 1] turns the token; "
            f"return None, not {found:.3f}"
        )


def _call(answer: Callable[[float, float], float | None], outcome: float, step: float) -> float | None:
    try:
        found = answer(outcome, step)
    except ZeroDivisionError:
        case = f"outcome {outcome:+}, step {step:+}"
        raise AssertionError(f"{case}: you divide by 0 where the two are equal") from None
    return None if found is None else float(found)


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


# Three solutions of one question on eight tokens: where their steps end, and two verifications of each.
ENDS = [[2, 5], [1, 3, 5, 6], [4]]
VERIFICATIONS = [
    [[True, False], [True, True]],
    [[True, True, True, False], None],
    [[False], [True]],
]
LENGTH = 8


def leave_one_out(
    answer: Callable[[list[list[int]], list[list[Verdicts]], int], list[list[float]]],
) -> None:
    """RLOO's step advantage of one group, with several verifications of each solution, in plain Python.

    ``answer(ends, verifications, length)``: ``ends[b]`` are the tokens that complete the steps of solution b,
    ``verifications[b]`` its R lists of verdicts (or None, where a verification could not be read).  Each step
    reward of +-1/K counts with what it has above the mean of all *other* step rewards of the group; these
    are summed from each token on and averaged over the R verifications.  No constant factor.  The result
    holds one list of ``length`` numbers for each solution.
    """
    found = answer(deepcopy(ENDS), deepcopy(VERIFICATIONS), LENGTH)
    assert len(found) == len(ENDS) and all(len(row) == LENGTH for row in found), (
        f"return one list of length={LENGTH} numbers for each of the {len(ENDS)} solutions"
    )
    found = torch.tensor([[float(x) for x in row] for row in found], dtype=torch.float64)
    if not _equal(found, _right()):
        raise AssertionError(_miscounted(found))


def _pairs(unread: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Rewards and masks (3, 2, LENGTH) of the three solutions; ``unread`` is what None is taken for."""
    reward = torch.zeros(3, 2, LENGTH, dtype=torch.float64)
    mask = torch.zeros(3, 2, LENGTH, dtype=torch.bool)
    for b, (ends, found) in enumerate(zip(ENDS, VERIFICATIONS, strict=True)):
        for r, verdicts in enumerate(found):
            taken = verdicts if verdicts or unread is None else [unread] * len(ends)
            reward[b, r], mask[b, r] = step_rewards(taken, ends, LENGTH)
    return reward, mask


def _right(reward: torch.Tensor | None = None, mask: torch.Tensor | None = None, **options) -> torch.Tensor:
    """The package's answer for these rewards (those of the exercise unless told)."""
    known, where = _pairs()
    options = {"group": torch.zeros(3, dtype=torch.long), "estimator": "rloo", "scale": 1.0} | options
    everywhere = torch.ones(3, LENGTH, dtype=torch.bool)
    return step_advantage(
        known if reward is None else reward, where if mask is None else mask, mask=everywhere, **options
    )


def _centred() -> torch.Tensor:
    """Each step reward less the mean of the others, where it stands: (3, 2, LENGTH)."""
    reward, mask = _pairs()
    n = mask.sum()
    return torch.where(mask, (reward - reward.sum() / n) * n / (n - 1), 0.0)


def _without_own_solution() -> torch.Tensor:
    reward, mask = _pairs()
    rest = (reward.sum() - reward.sum((1, 2))) / (mask.sum() - mask.sum((1, 2)))
    return to_go(torch.where(mask, reward - rest[:, None, None], 0.0)).mean(1)


def _miscounted(found: torch.Tensor) -> str:
    reward, mask = _pairs()
    n_steps = torch.tensor([len(ends) for ends in ENDS])[:, None, None]
    centred, n = _centred(), int(mask.sum())
    read = mask.any(-1).sum(1, keepdim=True)
    mistakes = {
        "a verification that could not be read gives no rewards at all, not -1/K for every step":
            _right(*_pairs(unread=False)),
        f"leave the reward itself out of its mean: that of the other {n - 1}, not of all {n}":
            (n - 1) / n * _right(),
        "leave out the one step reward, not all those of its solution": _without_own_solution(),
        "a step is worth 1/K, with K the number of steps of its own solution": _right(reward * n_steps),
        "only tokens that complete a step have a number here; every token gets the sum still to come":
            centred.mean(1),
        "you sum over the whole solution: a token gets only what comes at or after it, not what came before":
            centred.sum(-1, keepdim=True).expand(3, 2, LENGTH).mean(1),
        "the token that completes a step still answers for that step: the sum begins with its own":
            (to_go(centred) - centred).mean(1),
        "a verification that could not be read still counts among the R of the average": 2 * _right() / read,
        "the R verifications are averaged, not added up": 2 * _right(),
        "the mean is that of all step rewards of the group, not of each solution":
            _right(group=torch.arange(3)),
        "these are sums of bare rewards: what is missing is the mean of the others": to_go(reward).mean(1),
        "that is GRPO: RLOO does not divide by the standard deviation": _right(estimator="grpo"),
    }  # fmt: skip
    for words, result in mistakes.items():
        if _equal(found, result):
            return words
    right = _right().double()
    b, t = (~torch.isclose(found, right, atol=1e-4, rtol=0.0)).nonzero()[0].tolist()
    return f"solution {b}, token {t}: expected {right[b, t]:+.3f}, got {found[b, t]:+.3f}"


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.allclose(a, b.double(), atol=1e-4, rtol=0.0))
