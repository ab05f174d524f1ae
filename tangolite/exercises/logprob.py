"""Checks for the exercises of notebook 03: log-probs from summaries of stripes, and their derivatives.

A row of logits z is summarised by its maximum m and the sum s of exp(z - m).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tangolite.exercises import name_mistake
from tangolite.logprob import linear_logprob

if TYPE_CHECKING:
    from sympy import Expr, Symbol

Row = Float[Tensor, " N"]
STRIPES = (10, 100, 60, 60, 60, 10)  # how many words each has
SHARDS = (30, 50, 20)
PLACES = (("first", 0, 30), ("second", 30, 80), ("third", 80, 100))


def join(answer: Callable[[Float[Tensor, "S N"], Float[Tensor, "S N"]], tuple[Row, Row]]) -> None:
    """m and s of the whole vocabulary, both (N,), from the m and s of S stripes of it, both (S, N)."""
    draws = torch.Generator().manual_seed(8)
    for level in (0, -200):
        rows = level + 5 * torch.randn(20, 300, generator=draws)
        maximum, total = (torch.stack(x) for x in zip(*map(_summary, rows.split(STRIPES, 1)), strict=True))
        right = rows.amax(1)
        m, s = _pair(answer(maximum.clone(), total.clone()), (20,), "m", "s")
        _told(f"logits near {level}: m is not the largest logit of a row", m, right, {
            "m has a start of 0 in it, which is larger than logits below zero": maximum.amax(0).clamp(min=0),
            "m is the sum of the maxima": maximum.sum(0),
        })  # fmt: skip
        _told(f"logits near {level}: m is right, s is not", s, (rows - right[:, None]).exp().sum(1), {
            "s is the plain sum of the stripes' sums, but each is relative to a maximum of its own: "
            "move them to m before you add": total.sum(0),
            "the factor is upside down: a stripe with a lower maximum counts less, exp(maximum - m)":
                (total * (right - maximum).exp()).sum(0),
            "s is the sum itself, not its logarithm": (rows - right[:, None]).exp().sum(1).log(),
            "s is not relative to m: a sum of exp(z) overflows or vanishes for other logits":
                (total * maximum.exp()).sum(0),
        })  # fmt: skip


def _summary(z: Tensor) -> tuple[Tensor, Tensor]:
    m = z.amax(-1)
    return m, (z - m[:, None]).exp().sum(-1)


def tempered(answer: Callable[[Float[Tensor, "N V"], Int[Tensor, " N"], float], tuple[Row, Row]]) -> None:
    """Log-probability of the target and entropy of softmax(z / temperature), both (N,), from z (N, V)."""
    draws = torch.Generator().manual_seed(9)
    z, target = 2 * torch.randn(6, 50, generator=draws), torch.randint(50, (6,), generator=draws)

    def true(temperature):
        return linear_logprob(z, torch.eye(50), target, temperature=temperature, return_entropy=True)

    for t in (1.0, 0.5, 2.0):
        found = _pair(answer(z.clone(), target, t), (6,), "the log-probabilities", "the entropies")
        names = "the log-probabilities are", "the entropies are"
        for found_one, right, plain, twice, times, name in zip(
            found, true(t), true(1.0), true(t * t), true(1 / t), names, strict=True
        ):
            _told(f"T = {t}: {name} wrong", found_one, right, {
                f"T = {t}: {name} still those of T = 1: which m, s and e went into them?": plain,
                f"T = {t}: {name} those of T² = {t * t}: the temperature is applied twice": twice,
                f"T = {t}: {name} those of 1/T = {1 / t}: divide the logits by T, do not multiply": times,
                f"T = {t}: {name} right but for the sign": -right,
            })  # fmt: skip


def operations(answer: Callable[[Symbol, Symbol, Symbol, Symbol], Expr]) -> None:
    """Operations of forward and backward through a frozen head, as an expression in N, V, D and q.

    A share q of the N rows is dead: it has a log-prob, and no gradient arrives.  A product costs 2NVD.
    """
    import sympy

    N, V, D, q = sympy.symbols("N V D q", positive=True)
    units = sympy.simplify(answer(N, V, D, q) / (N * V * D))
    assert not units.free_symbols - {q}, f"every product is one of N tokens with V words, not {units} NVD"
    at_0, at_1 = units.subs(q, 0), units.subs(q, 1)
    assert (at_0, at_1) != (2, 6), "q is the share of dead rows, so 1 - q of them are alive"
    assert at_0 != 8, "nothing dead: 8NVD has a product for dW in it, which a frozen head does not need"
    assert at_0 != 4, "nothing dead: the logits are not kept, so the backward has to multiply them again"
    assert at_0 != 3, "nothing dead: a product is NVD multiplications and as many additions, 2NVD in all"
    assert at_0 == 6, f"nothing dead: {at_0} NVD; count the products, forward and backward"
    assert at_1 != 0, "everything dead: the log-probs are wanted all the same, so the forward remains"
    assert at_1 != 6, "everything dead: a dead row needs no backward at all, so something must be saved"
    assert at_1 == 2, f"everything dead: {at_1} NVD; what remains then?"
    assert sympy.simplify(units - (6 - 4 * q)) == 0, f"right at both ends, but {units} NVD in between"


def capped_gradient(answer: Callable[[Float[Tensor, " V"], int, float], Float[Tensor, " V"]]) -> None:
    """d log p(target) / dx, (V,), where the logits are z = cap tanh(x / cap), for one row x."""
    x, target = 3 * torch.linspace(-1, 1, 7, dtype=torch.float64), 5
    one = torch.nn.functional.one_hot(torch.tensor(target), 7)
    for cap in (2.0, 1e6):
        leaf = x.clone().requires_grad_()
        eye = torch.eye(7, dtype=torch.float64)
        linear_logprob(leaf, eye, torch.tensor(target), softcap=cap, backend="chunked").backward()
        found, z = answer(x.clone(), target, cap), cap * torch.tanh(x / cap)
        _shaped("the gradient", found, (7,))
        dz, slope = one - z.softmax(0), 1 - (z / cap) ** 2
        _told(f"cap {cap:g}: it should be {[f'{g:.3f}' for g in leaf.grad]}", found, leaf.grad, {
            "this is dz: the chain rule's factor dz/dx is missing": dz,
            "the softmax must be that of the capped z, not of x": (one - x.softmax(0)) * slope,
            "the cap is missing altogether: this is the gradient for z = x": one - x.softmax(0),
            "the sign is turned round: this is the gradient of the loss, -log p": -leaf.grad,
            "dz/dx is 1 - tanh², and tanh(x/c) is z/c rather than z": dz * (1 - z**2),
            "dz/dx is 1 - tanh²: the square is missing": dz * (1 - z / cap),
            "c and 1/c cancel in dz/dx: no further factor is left": dz * slope / cap,
            "dz/dx is 1 - tanh² of x/c; this is 1 - (x/c)², without a tanh": dz * (1 - (x / cap) ** 2),
        }, atol=1e-6)  # fmt: skip


def tempered_sums(
    answer: Callable[[Float[Tensor, "N D"], Float[Tensor, "V D"], Row], tuple[Row, Row]],
) -> None:
    """m and s, both (N,), of the logits hidden · weight' where row i counts times its own scale[i] = 1/T."""
    draws = torch.Generator().manual_seed(10)
    hidden, weight = torch.randn(21, 40, generator=draws), torch.randn(45, 40, generator=draws) / 4
    hidden[:, 0], weight[:, 0] = 1.0, -30.0
    scale = 1 / torch.linspace(0.5, 2, 21)
    m, s = _pair(answer(hidden, weight, scale), (21,), "m", "s")
    z = hidden @ weight.T
    right = torch.logsumexp(z * scale[:, None], 1)
    assert (m < -1).all(), "m is near 0, but all logits are low: words that do not exist were counted"
    found, steps = m + s.log(), f"rows of T = {1 / scale[0]:.2f} to {1 / scale[-1]:.2f}"
    _told(f"{steps}: m + log s is wrong in rows {_off_in(found, right)} (of 0 to 20)", found, right, {
        "the rows are all at T = 1: the scale is not applied": torch.logsumexp(z, 1),
        "the factor is upside down: scale is 1/T already": torch.logsumexp(z / scale[:, None], 1),
        "every row has the scale of the first: load one number for each row":
            torch.logsumexp(z * scale[0], 1),
        "only m is tempered: the factor must stand before m and s are updated":
            z.amax(1) * scale + (z - z.amax(1, keepdim=True)).exp().sum(1).log(),
    })  # fmt: skip


def sharded_logp(answer: Callable[[Float[Tensor, "N D"], list[Tensor], Int[Tensor, " N"]], Row]) -> None:
    """The log-prob of every target (N,) where each of several weights holds some of the words."""
    draws = torch.Generator().manual_seed(11)
    hidden, weight = torch.randn(60, 8, generator=draws), torch.randn(100, 8, generator=draws)
    target = torch.randint(100, (60,), generator=draws)
    for level in (0, -200):
        hidden[:, 0], weight[:, 0] = 1.0, level
        shards, right = list(weight.split(SHARDS)), linear_logprob(hidden, weight, target)
        found = answer(hidden.clone(), [shard.clone() for shard in shards], target)
        _shaped("the log-probabilities", found, (60,))
        off = [target[row] for row in _off_in(found, right)]
        where = [name for name, low, high in PLACES if any(low <= word < high for word in off)]
        mistakes = _sharding_mistakes(hidden, shards, target)
        _told(
            f"logits near {level}: wrong for targets on the {', '.join(where)} shard", found, right, mistakes
        )


def _sharding_mistakes(hidden: Tensor, shards: list[Tensor], target: Tensor) -> dict[str, Tensor]:
    z = [hidden @ shard.T for shard in shards]
    every, edges = torch.cat(z, 1), torch.tensor([0, 30, 80, 100])
    chosen, total = every.gather(1, target[:, None])[:, 0], every.logsumexp(1)
    home = torch.bucketize(target, edges, right=True) - 1
    own = torch.stack([part.logsumexp(1) for part in z])[home, torch.arange(60)]
    unmoved = torch.stack([part.gather(1, target.clamp(max=part.shape[1] - 1)[:, None])[:, 0] for part in z])
    moved = [part.gather(1, (target - low).clamp(0, part.shape[1] - 1)[:, None])[:, 0]
             for part, (low, _) in zip(z, pairwise(edges.tolist()), strict=True)]  # fmt: skip
    sums = sum((part - part.amax(1, keepdim=True)).exp().sum(1) for part in z)
    return {
        "each target is normalised over its own shard only: m and s of all cards are wanted": chosen - own,
        "a card counts its words from 0: subtract the shard's first word from the target":
            unmoved[home, torch.arange(60)] - total,
        "a card that does not have the word must add 0 to the target's logit": sum(moved) - total,
        "the target's logit is 0: the zeros of the other cards are larger, so add and do not take the "
        "maximum": -total,
        "s is added up as it is: each card's is relative to its own m, so fade it first":
            chosen - every.amax(1) - sums.log(),
        "the sum over all cards is 0, or its logarithm taken of 0: m starts at 0, far above these logits":
            torch.full_like(total, torch.inf),
    }  # fmt: skip


def _told(
    otherwise: str, found: Tensor, right: Tensor, mistakes: dict[str, Tensor], atol: float = 1e-3
) -> None:
    """Nothing if ``found`` is right; else the words of the mistake that it equals, or ``otherwise``."""
    assert not found.isnan().any(), "there is a NaN: infinity less infinity, or 0 times infinity?"
    otherwise = f"{otherwise} (off by up to {abs(found - right).max():.2g})"
    name_mistake(found, right, mistakes, otherwise, atol=atol)


def _off_in(found: Tensor, right: Tensor) -> list[int]:
    return (~torch.isclose(found, right, atol=1e-3)).nonzero()[:, 0].tolist()


def _shaped(name: str, x: object, shape: tuple[int, ...]) -> None:
    assert isinstance(x, Tensor), f"{name} must be a tensor, not {type(x).__name__}"
    assert x.shape == shape, f"{name} must have shape {shape}, not {tuple(x.shape)}"


def _pair(found: object, shape: tuple[int, ...], first: str, second: str) -> tuple[Tensor, Tensor]:
    assert isinstance(found, tuple | list) and len(found) == 2, f"return two tensors, {first} and {second}"
    for name, x in zip((first, second), found, strict=True):
        _shaped(name, x, shape)
    return tuple(found)
