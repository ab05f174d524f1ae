"""Exercises of notebook 1: masks from lengths, the shift by one, and a test that can fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tangolite.exercises import name_mistake
from tangolite.models import Policy, load_policy
from tangolite.prompts import TINY
from tangolite.rollouts import Rollouts, length_mask
from tangolite.sampling import sample

Score = Callable[[Rollouts], Float[Tensor, "B T"]]


def mask_of(answer: Callable[[Int[Tensor, " B"], int], Bool[Tensor, "B T"]]) -> None:
    """``answer(length, width)``: True on the first ``length[b]`` of ``width`` positions of row b.

    The end of sequence is counted in the length, and no token is looked at.
    """
    length, width = torch.tensor([3, 1, 5]), 6
    found = answer(length, width)
    _is_tensor(found)
    assert found.shape == (3, 6), (
        f"the mask has shape {tuple(found.shape)}, but 3 rows of width 6 need (3, 6)"
        + (": the width is given, it need not be the longest length" if found.shape == (3, 5) else "")
    )
    assert found.dtype == torch.bool, f"a mask is bool, so that ~mask works; yours is {found.dtype}"
    right = length_mask(length, width)
    faults = {
        "the last token of a completion, its end of sequence, is left out": length_mask(length - 1, width),
        "one position too many: position `length` is padding already": length_mask(length + 1, width),
        "it is turned round: padding is counted and completions are not": ~right,
        "completions begin at position 0; yours end at the last one": right.flip(1),
    }
    name_mistake(
        found, right, faults, f"the rows should count {length.tolist()} tokens from the left", atol=1e-5
    )


def logp_of(answer: Callable[[Tensor, Tensor, int, float], Float[Tensor, "B T"]]) -> None:
    """``answer(logits, ids, prompt, temperature)``: log-probs of the tokens after the first ``prompt``.

    logits (B, S, V) and ids (B, S) are of prompt and completion together, S = prompt + T.  Logits at t - 1
    predict token t; they are divided by the temperature, in float32, before the log-softmax.  Returns (B, T).
    """
    make = torch.Generator().manual_seed(0)
    logits, ids = torch.randn(3, 6, 5, generator=make), torch.randint(5, (3, 6), generator=make)
    found = answer(logits, ids, 2, 1.0)
    _is_tensor(found)
    _has_shape(found)
    every, after = torch.log_softmax(logits, -1), ids[:, 2:]
    faults = {
        "logits at t have read token t already; those at t - 1 predict it": _pick(every[:, 2:], after),
        "the states are right, but the targets are one place early": _pick(every[:, 1:-1], ids[:, 1:-1]),
        "these are the logits of the tokens: the log-softmax is missing": _pick(logits[:, 1:-1], after),
        "these are probabilities: their logarithm is missing": _pick(every[:, 1:-1], after).exp(),
    }
    name_mistake(
        found,
        _pick(every[:, 1:-1], ids[:, 2:]),
        faults,
        "compare with the three lines of section 4",
        atol=1e-5,
    )
    _tempered(answer, logits, ids)
    _stable(answer, logits, ids)


def _has_shape(found: Tensor) -> None:
    hints = {
        (3, 5): ": the prompt's tokens are in it, but nobody sampled those",
        (3, 6): ": the prompt's tokens are in it, but nobody sampled those",
        (3, 4, 5): ": of each row of the vocabulary, take the number of the token that was sampled (gather)",
        (3, 4, 1): ": gather leaves a last dimension of one; take it away",
        (3, 3): ": one token is lost; the first completion token is predicted by the last of the prompt",
    }
    hint = hints.get(tuple(found.shape), "")
    assert found.shape == (3, 4), f"4 completion tokens in 3 rows need (3, 4), not {tuple(found.shape)}{hint}"


def _tempered(answer: Callable, logits: Tensor, ids: Tensor) -> None:
    right, once, sharp = (
        _pick(torch.log_softmax(logits / t, -1)[:, 1:-1], ids[:, 2:]) for t in (2.0, 1.0, 0.5)
    )
    faults = {
        "the temperature is not used": once,
        "log-probs over a temperature are no distribution any more: divide the logits": once / 2,
        "the logits are multiplied by the temperature, which sharpens where it should flatten": sharp,
    }
    name_mistake(answer(logits, ids, 2, 2.0), right, faults, "right at temperature 1, not at 2", atol=1e-5)


def _stable(answer: Callable, logits: Tensor, ids: Tensor) -> None:
    far = answer(logits + 200, ids, 2, 1.0)
    assert far.isfinite().all(), "logits around 200 overflow: exp before the maximum is taken away"
    half = logits.bfloat16()
    right = _pick(torch.log_softmax(half.float(), -1)[:, 1:-1], ids[:, 2:])
    found = answer(half, ids, 2, 1.0)
    assert found.dtype == torch.float32 and torch.allclose(found, right, atol=1e-5), (
        "make bfloat16 logits float32 before the log-softmax: rounded log-probs make a ratio of 1 wobble"
    )


def trustworthy(answer: Callable[[Score, Rollouts], bool]) -> None:
    """``answer(score, rollouts)``: whether ``score(rollouts)`` (B, T) is to be trusted.

    ``rollouts.old_logp`` holds what the sampler recorded; where the mask is False a score may hold anything.
    """
    policy, rollouts = _material()
    logp = policy.logp(rollouts).detach()
    for what, score in {
        "log-probs that agree up to float32 rounding": lambda r: logp + 1e-6,
        "a score with NaN where the mask is False": lambda r: logp.masked_fill(~r.mask, torch.nan),
    }.items():
        assert answer(score, rollouts), f"your test rejects {what}"
    for what, wrong in _broken(policy, rollouts, logp).items():
        assert not answer(lambda r, wrong=wrong: wrong, rollouts), f"your test trusts {what}"


def _broken(policy: Policy, rollouts: Rollouts, logp: Tensor) -> dict[str, Tensor]:
    """Scores that are wrong, the easy ones first."""
    width, every = rollouts.prompt_ids.shape[1], torch.ones_like(rollouts.prompt_length)
    place = torch.arange(logp.shape[1])[None].expand_as(logp)
    turned = torch.where(rollouts.mask, rollouts.length[:, None] - 1 - place, place)
    shifted = rollouts.with_(completion_ids=rollouts.completion_ids.roll(1, dims=1))
    padded = rollouts.with_(prompt_length=every * width)
    return {
        "the log-probs of other tokens: the targets are off by one": policy.logp(shifted).detach(),
        "log-probs at temperature 1.3 of what was sampled at 1": policy.logp(
            rollouts, temperature=1.3
        ).detach(),
        "rows turned end to start: the means are right, the tokens are not": logp.gather(1, turned),
        "a model that attends to the left padding: only shorter prompts show it": policy.logp(
            padded
        ).detach(),
    }


@cache
def _material() -> tuple[Policy, Rollouts]:
    """The built-in generator and eight solutions of four questions of different lengths."""
    policy = load_policy("tiny-generator")
    prompts = [policy.encode(TINY.generator(question)) for question in ("3+4", "17-5+2", "9+8-3-6", "2-5")]
    make = torch.Generator().manual_seed(0)
    return policy, sample(policy, prompts, n=2, max_new_tokens=48, generator=make)


def _pick(rows: Float[Tensor, "B T V"], ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    return rows.gather(-1, ids[..., None])[..., 0]


def _is_tensor(found: object) -> None:
    assert isinstance(found, Tensor), f"a tensor is wanted, not {type(found).__name__}"
