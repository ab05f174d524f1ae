"""Checks for the exercises of notebook 10, CoVRL: the reward's recipes, the token ratio, a collapse."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tangolite.losses import composite_logp, hybrid_logp
from tangolite.rewards import answer_reward

RECIPES = ("mean_logp", "sum_logp", "mean_prob", "sum_prob")
Rows = list[dict[str, float]]


def _same(got: Tensor, wanted: Tensor) -> bool:
    got, wanted = got.detach().double(), wanted.detach().double()
    return got.shape == wanted.shape and torch.allclose(got, wanted, rtol=1e-4, atol=1e-6)


def _refuse(got: Tensor, mistakes: Iterable[tuple[Tensor, str]], otherwise: str) -> None:
    for wrong, words in mistakes:
        assert not _same(got, wrong), words
    raise AssertionError(otherwise)


# --- 1: the recipes of the reward -------------------------------------------------------------------


def reward(answer: Callable[[Tensor, Tensor, str], Tensor]) -> None:
    """Exercise 1: the reward of each trace, from the log-probs of the reference's tokens after it.

    ``answer(answer_logp, answer_mask, recipe)``: (B, A) float, (B, A) bool, one of "mean_logp", "sum_logp",
    "mean_prob", "sum_prob"; returns (B,). Only tokens under the mask count, whatever stands elsewhere.
    """
    chance = torch.tensor([[0.9, 0.9, 0.5, 0.5], [0.8, 0.7, 0.6, 0.95], [0.2, 0.5, 0.3, 0.5]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 1, 0]]).bool()
    for recipe in RECIPES:
        logp = chance.log()
        _check_reward(answer(logp, mask, recipe), logp, mask, recipe)
        spoilt = logp.masked_fill(~mask, -torch.inf)
        found = answer(spoilt, mask, recipe)
        assert _same(found, answer_reward(logp, mask, recipe=recipe)), (
            f"{recipe}: what stands outside the mask must not matter; with -inf there the reward is "
            f"{[round(x, 3) for x in found.tolist()]}. -inf * 0 is NaN: fill those places first."
        )


def _check_reward(found: Tensor, logp: Tensor, mask: Tensor, recipe: str) -> None:
    assert isinstance(found, Tensor) and found.shape == logp.shape[:1], (
        f"{recipe}: one reward a trace, {tuple(logp.shape[:1])}; got {tuple(getattr(found, 'shape', ()))}."
    )
    right = answer_reward(logp, mask, recipe=recipe)
    if _same(found, right):
        return
    named = {other: answer_reward(logp, mask, recipe=other) for other in (*RECIPES, "prod_prob")}
    token = logp if recipe.endswith("logp") else logp.exp()
    count = mask.sum(1)
    mistakes = [
        (
            named["prod_prob"],
            f"{recipe}: this is the product of the probabilities, exp of the summed log-probs.",
        ),
        (
            named["mean_logp"].exp(),
            f"{recipe}: exp of the mean log-prob is a geometric mean. Take exp per token.",
        ),
        (named["mean_prob"].log(), f"{recipe}: the log of the mean probability; the mean is over log-probs."),
        (named["sum_prob"].log(), f"{recipe}: the log of summed probabilities; the sum is over log-probs."),
        (token.sum(1), f"{recipe}: tokens outside the mask are counted."),
        (token.mean(1), f"{recipe}: tokens outside the mask are counted."),
        (
            (token * mask).sum(1) / logp.shape[1],
            f"{recipe}: divided by the width A; divide by the masked count.",
        ),
        ((logp * mask).exp().sum(1), f"{recipe}: masked places became exp(0) = 1. Mask after the exp."),
        (
            (logp * mask).exp().sum(1) / count,
            f"{recipe}: masked places became exp(0) = 1. Mask after the exp.",
        ),
        ((logp * mask).exp().mean(1), f"{recipe}: masked places became exp(0) = 1. Mask after the exp."),
        *((value, f"{recipe}: this is the recipe {other}.") for other, value in named.items()),
    ]
    _refuse(found, mistakes, f"{recipe}: {found.tolist()}, and should be {right.tolist()}.")


# --- 2: the token ratio -----------------------------------------------------------------------------


def token_ratio(answer: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]) -> None:
    """Exercise 2: p'_new / p_hyb,old of every token, from log-probs under both prompts, (B, T) each.

    ``answer(logp_prior, logp_posterior, old_prior, old_posterior, alpha)``. In log space, and with gradients
    to the new log-probs only.
    """
    draw = torch.Generator().manual_seed(0)
    new_p, new_q, old_p, old_q = (
        -4 * torch.rand(4, 2, 3, generator=draw, dtype=torch.float64) - 0.1
    ).unbind()
    for alpha in (0.5, 0.2):
        _check_ratio(answer(new_p, new_q, old_p, old_q, alpha), new_p, new_q, old_p, old_q, alpha)
    far = torch.tensor([[-200.0, -150.0]])
    found = answer(far, far - 1, far, far - 1, 0.5)
    assert bool(torch.isfinite(found).all()) and _same(found, torch.ones(1, 2)), (
        f"Old and new alike at log-probs near -200, alpha 0.5: the ratio is 1, this gives {found.tolist()}. "
        "The probabilities are 0 in 32 bits: stay in log space (logaddexp)."
    )
    leaves = [x.clone().requires_grad_() for x in (new_p, new_q, old_p, old_q)]
    value = answer(*leaves, 0.5).sum()
    assert value.requires_grad, "No gradient reaches the new log-probs: only the old ones are constants."
    got = torch.autograd.grad(value, leaves, allow_unused=True)
    assert got[0] is not None and got[1] is not None, "The gradient reaches one of the new log-probs only."
    assert all(g is None or not g.any() for g in got[2:]), (
        "A gradient reaches the old log-probs: they are records of how the tokens were drawn. Detach them."
    )


def _check_ratio(
    found: Tensor, new_p: Tensor, new_q: Tensor, old_p: Tensor, old_q: Tensor, alpha: float
) -> None:
    assert isinstance(found, Tensor) and found.shape == new_p.shape, (
        f"One ratio a token, shape {tuple(new_p.shape)}; got {tuple(getattr(found, 'shape', ()))}."
    )
    new, old = composite_logp(new_p, new_q), hybrid_logp(old_p, old_q, alpha)
    right = (new - old).exp()
    if _same(found, right):
        return
    swapped = hybrid_logp(old_q, old_p, alpha)
    mistakes = [
        (new - old, "This is the log of the ratio: take exp."),
        ((old - new).exp(), "The ratio is upside down: new over old."),
        ((new - composite_logp(old_p, old_q)).exp(),
         "The denominator is the old composite; the tokens were drawn from the hybrid, which knows alpha."),
        ((new - swapped).exp(), "alpha is the share of the *prior*; here it weights the posterior."),
        ((hybrid_logp(new_p, new_q, alpha) - old).exp(),
         "The numerator is the new hybrid; what is trained is the composite, half and half for any alpha."),
        ((new_p - old).exp(), "The numerator is the prior alone; it is the composite."),
        ((new - old_p).exp(), "The denominator is the old prior alone; others wrote, too."),
        ((new - old_q).exp(), "The denominator is the old posterior alone; others wrote, too."),
        ((new + math.log(2) - old).exp(), "The composite lacks its factor 1/2."),
        ((new - old).sum(1, keepdim=True).exp().expand_as(new),
         "This multiplies up the ratios of a trace; CoVRL clips one ratio a token."),
        ((new - old).cumsum(1).exp(), "This multiplies up ratios along a trace; one a token is asked for."),
    ]  # fmt: skip
    _refuse(found, mistakes, f"alpha {alpha}: {found.tolist()}, and should be {right.tolist()}.")


# --- 3: a collapse in a table -----------------------------------------------------------------------

TRUTH, WINDOW, SHARE = "step_truth_posterior", 5, 0.8


def runs() -> dict[str, Rows]:
    """Four made-up runs of forty updates, with five of `tangolite.covrl.METRICS`; no model made them."""
    draw = random.Random(0)
    columns = ("reward_prior", "reward_posterior", "kl", "step_truth_prior", TRUTH)
    first, noise = (-3.1, -1.2, 0.019, 0.60, 0.84), (0.25, 0.15, 0.002, 0.03, 0.03)
    last = {
        "A": (-2.0, -0.6, 0.012, 0.72, 0.91), "B": (-1.5, -0.2, 0.016, 0.55, 0.30),
        "C": (-2.2, -0.7, 0.013, 0.70, 0.88), "D": (-2.9, -0.9, 0.060, 0.42, 0.80),
    }  # fmt: skip
    made = {name: [] for name in last}
    for name, rows in made.items():
        for step in range(40):
            line = [a + (b - a) * step / 39 for a, b in zip(first, last[name], strict=True)]
            values = [x + draw.uniform(-n, n) for x, n in zip(line, noise, strict=True)]
            rows.append(dict(zip(columns, (round(x, 3) for x in values), strict=True)))
    made["C"][17][TRUTH] = 0.41  # one hard batch is no collapse
    return made


def collapse(answer: Callable[[Rows], int | None]) -> None:
    """Exercise 3: the first update at which the posterior has collapsed, or None.

    ``answer(rows)``, one dict an update. Collapsed: the mean of the last five known values of
    `step_truth_posterior` is below 0.8 of the mean of the first five. An update whose traces were all the
    prior's does not have the key; such an update is passed over, and keeps its number.
    """
    made = runs()
    _check_collapse(answer(made["B"]), made["B"])
    for name, why in (
        ("A", "nothing fell"),
        ("C", "one bad batch is noise, and the mean of five forgives it"),
        ("D", "the *prior's* steps fell and the KL grew; the posterior's steps held"),
    ):
        found = answer(made[name])
        assert found is None, f"Run {name} has not collapsed ({why}): the answer is None, not {found!r}."
    weak = [{TRUTH: 0.6, "reward_prior": -1.0, "reward_posterior": -1.0}] * 12
    assert answer(weak) is None, (
        "A posterior that starts at 0.6 and stays there has not collapsed: compare with 0.8 of its own start."
    )
    assert answer(weak[:3]) is None, "With fewer than five values there is nothing to say yet: None."
    _check_gaps(answer)


def _check_collapse(found: int | None, rows: Rows) -> None:
    assert found is not None, f"Run B has collapsed (look at {TRUTH}); this says None."
    assert not isinstance(found, bool), "Return the number of the update (from 0), not True or False."
    truth = [row[TRUTH] for row in rows]
    start = sum(truth[:WINDOW]) / WINDOW
    right = _first(truth, SHARE * start, WINDOW)
    if found == right:
        return
    mistakes = [
        (_first(truth, SHARE * start, 1), "A single update is noise: take the mean of the last five."),
        (_first(truth, SHARE, WINDOW), "The threshold is 0.8 of the mean of the first five, not 0.8 itself."),
        (
            _first(truth, SHARE * truth[0], WINDOW),
            "The start is the mean of the first five, not the first alone.",
        ),
        (_first(truth, start - 0.2, WINDOW), "Below 0.8 *times* the start, not 0.2 less than it."),
        (
            right + 1,
            "One too late: updates are numbered from 0, and the update itself is among its last five.",
        ),
        (right - WINDOW + 1, "This is where the window begins; the answer is the update at which it ends."),
        (len(rows) - 1, "This is the last update at which it holds; the first is asked for."),
    ]
    for wrong, words in mistakes:
        assert found != wrong, words
    raise AssertionError(f"Run B: this says update {found!r}, and should say {right}.")


def _first(values: list[float], threshold: float, window: int) -> int | None:
    """The first place at which the mean of the last `window` values is below the threshold."""
    for place in range(window - 1, len(values)):
        if sum(values[place - window + 1 : place + 1]) / window < threshold:
            return place
    return None


def _check_gaps(answer: Callable[[Rows], int | None]) -> None:
    """Updates 2, 6 and 11 drew no posterior trace; the fall begins at update 9."""
    rows = [{TRUTH: 0.9 if step < 9 else 0.3, "reward_prior": -1.0} for step in range(20)]
    for step in (2, 6, 11):
        del rows[step][TRUTH]
    try:
        found = answer(rows)
    except KeyError as error:
        raise AssertionError(
            f"KeyError {error}: an update whose traces were all the prior's has no {TRUTH}. Pass over it."
        ) from None
    known = [step for step, row in enumerate(rows) if TRUTH in row]
    place = _first([rows[step][TRUTH] for step in known], SHARE * 0.9, WINDOW)
    assert found != place, (
        f"{found} counts only updates that have a value; an update that lacks one keeps its number."
    )
    assert found == known[place], (
        f"With updates 2, 6 and 11 lacking a value this says {found!r}, and should say {known[place]}: take "
        "the last five *known* values; a missing one is not 0."
    )
