"""Exercises of notebook 2: the leave-one-out advantage, what a baseline costs, shares of micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tangolite.exercises import name_mistake
from tangolite.losses import aggregate


def leave_one_out(answer: Callable[[Float[Tensor, "N G"]], Float[Tensor, "N G"]]) -> None:
    """``answer(reward)``: the RLOO advantage of N groups of G completions, one group a row.

    A completion's baseline is the mean reward of the *other* completions of its group.
    """
    rows = ([1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [0.5, 0.25, 0.0, 1.0])
    for size in (4, 3):
        reward = torch.tensor(rows)[:, :size]
        found = _tensor(answer(reward.clone()))
        assert found.shape == reward.shape, (
            f"rewards {tuple(reward.shape)} have advantages of that shape, not {tuple(found.shape)}"
        )
        total, every = reward.sum(1, keepdim=True), reward.sum()
        others = (total - reward) / (size - 1)
        faults = {
            "this is the baseline; the advantage is the reward less the baseline": others,
            "the sign is turned round: a reward above the others' must come out positive": others - reward,
            "the mean holds the completion's own reward; only the others' may count": reward - total / size,
            "the others' sum is divided by G, but there are G - 1 of them": reward - (total - reward) / size,
            "the mean runs over the whole batch; every row is a group of its own": reward
            - (every - reward) / (reward.numel() - 1),
            "the mean runs down the columns; a group is a row": reward - reward.mean(0),
            "it is divided by the group's standard deviation, which RLOO does not do": (reward - total / size)
            / (reward.std(1, keepdim=True) + 1e-6),
        }
        _explain(found, reward - others, faults, f"the group {[1, 0, 0, 0][:size]} should give 1 first")


def own_share(answer: Callable[[Float[Tensor, "G G"]], Float[Tensor, " G"]]) -> None:
    """``answer(weight)``: by what each completion's expected gradient is multiplied.

    Its baseline is ``sum_j weight[i, j] * reward[j]`` over all G completions of the group, itself included;
    all are independent draws.  The check measures the factors by listing every group of a world of three
    strings.
    """
    make = torch.Generator().manual_seed(0)
    for size in (2, 3):
        weight = torch.rand(size, size, generator=make, dtype=torch.float64)
        found = _tensor(answer(weight.clone()))
        assert found.shape == (size,), (
            f"a group of {size} has {size} factors, one for each completion; yours is {tuple(found.shape)}: "
            "completions with different weights on themselves lose different amounts"
        )
        own = weight.diagonal()
        faults = {
            "that is the part that is lost; the factor is what remains": own,
            "the others' weights lose nothing: their rewards do not depend on this completion": 1
            - weight.sum(1),
            "column i says what i's reward does to the others' baselines; those need not concern i": 1
            - weight.sum(0),
            "(G-1)/G is right for the plain mean only; here the weights are any numbers": torch.full_like(
                own, (size - 1) / size
            ),
            "you have undone the loss: that is the factor to multiply with, to mend it": 1 / (1 - own),
        }
        _explain(found, _measured(weight), faults, f"in a group of {size}, from the listing of all groups")


def micro_batches(answer: Callable[[Bool[Tensor, "b T"], Bool[Tensor, "B T"], str], float]) -> None:
    """``answer(part, whole, how)``: the weight of a micro-batch's loss, so that the sum is the whole's loss.

    ``part`` and ``whole`` are the masks of a micro-batch and of the whole batch; ``how`` is "token",
    "sequence" or "constant", as in `tangolite.losses.aggregate`.  A completion may have no tokens.
    """
    whole = torch.arange(4) < torch.tensor([4, 1, 0, 3, 2, 2])[:, None]
    values = torch.arange(1.0, 25.0).view(6, 4).sqrt()
    rows = (slice(0, 1), slice(1, 3), slice(3, 6))
    some = whole.any(1)
    share = {
        "token": torch.stack([whole[r].sum() / whole.sum() for r in rows]),
        "sequence": torch.stack([some[r].sum() / some.sum() for r in rows]),
        "constant": torch.tensor([len(whole[r]) / len(whole) for r in rows]),
    }
    for how, right in share.items():
        losses = torch.stack([aggregate(values[r], whole[r], how) for r in rows])
        torch.testing.assert_close(losses @ right, aggregate(values, whole, how))
        given = [answer(whole[r], whole, how) for r in rows]
        assert all(isinstance(g, int | float | Tensor) for g in given), (
            f"one number is wanted, you return {type(given[0]).__name__}"
        )
        assert all(isinstance(g, int | float) or g.numel() == 1 for g in given), (
            f"one number for the micro-batch is wanted, you return a tensor of shape {tuple(given[0].shape)}"
        )
        found = torch.tensor([float(g) for g in given])
        _explain(found, right, _share_faults(how, share), f"{how!r}, micro-batches of 1, 2 and 3 rows")


CONFUSED = {  # (what is asked for, whose shares were given): why that is not it
    ("token", "sequence"): "it divides by tokens, you weigh by completions",
    ("token", "constant"): "it divides by tokens, you weigh by rows",
    ("sequence", "token"): "it counts completions, however long they are; you weigh by tokens",
    ("sequence", "constant"): "a completion without tokens takes no part in its mean, and you count it",
    ("constant", "token"): "its divisor is fixed, whatever the tokens are; you weigh by tokens",
    ("constant", "sequence"): "it divides by all rows; you left out those without tokens",
}


def _share_faults(how: str, share: dict[str, Float[Tensor, " parts"]]) -> dict[str, Tensor]:
    """What the shares of one aggregation come out as under typical mistakes, and what to say then."""
    right = share[how]
    faults = {
        "every micro-batch counts the same, so what is in a small one counts too much": torch.full(
            (3,), 1 / 3
        ),
        "the parts are summed as they are; the shares must add up to 1": torch.ones(3),
        "the fraction is upside down": 1 / right,
    }
    faults |= {words: share[given] for (asked, given), words in CONFUSED.items() if asked == how}
    return {f"{how!r}: {words}": wrong for words, wrong in faults.items()}


def _measured(weight: Float[Tensor, "G G"]) -> Float[Tensor, " G"]:
    """The factors themselves: the expected gradient of each place over all groups, against the exact one."""
    logits = torch.tensor([0.3, -0.4, 0.9], dtype=torch.float64)
    reward = torch.tensor([1.0, 0.2, -0.5], dtype=torch.float64)
    chance = logits.softmax(0)
    score = torch.eye(3, dtype=torch.float64) - chance
    exact = (chance * reward) @ score
    total = torch.zeros(len(weight), 3, dtype=torch.float64)
    for group in itertools.product(range(3), repeat=len(weight)):
        members = torch.tensor(group)
        advantage = reward[members] - weight @ reward[members]
        total += chance[members].prod() * advantage[:, None] * score[members]
    return total @ exact / (exact @ exact)


def _tensor(found: Any) -> Tensor:
    assert isinstance(found, Tensor), f"a tensor is wanted, you return {type(found).__name__}"
    return found


def _explain(found: Tensor, right: Tensor, faults: dict[str, Tensor], otherwise: str) -> None:
    """Passes what is right; else names the mistake that gives what was found, or shows the numbers."""
    numbers = [[round(x, 3) for x in t.double().flatten().tolist()[:4]] for t in (found, right)]
    name_mistake(found, right, faults, f"{otherwise}: you have {numbers[0]}, and it should be {numbers[1]}")
