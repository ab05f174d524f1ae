"""Completions of prompts: a KV-cache sampler of our own, or transformers' `generate`.

`sample` is what training calls.  For a plain Qwen2 model (the built-in ones, or Qwen2.5) it runs the
decoder written out below: prompts are read once per group, keys and values go into one preallocated
cache, finished rows leave the batch.  Any other model goes through `generate`.  Both return the
log-prob of every sampled token under the tempered distribution that it was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from tangolite.models import Policy, sampling_mode
from tangolite.rollouts import Rollouts, length_mask, pad_left
from tangolite.sampling.decoder import cached, choose, is_plain_qwen2
from tangolite.sampling.generate import generate

__all__ = ["choose", "sample", "sample_generate"]


def sample(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    n: int = 1,
    max_new_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Rollouts:
    """``n`` completions of each prompt; row ``i`` answers prompt ``i // n`` and has group ``i // n``.

    A policy with a ``sampler`` of its own (a vLLM server) samples there.  Temperature 0 decodes greedily.  Raises ValueError for an empty prompt or list of prompts.
    """
    if policy.sampler is not None:
        return policy.sampler(
            policy, prompts, n=n, max_new_tokens=max_new_tokens, temperature=temperature, generator=generator
        )
    ids, length = _padded(policy, prompts)
    run = cached if is_plain_qwen2(policy.model) else generate
    with sampling_mode(policy.model):
        tokens, logp = run(policy, ids, length, n, max_new_tokens, temperature, generator)
    return _rollouts(policy, ids, length, n, tokens, logp)


def sample_generate(
    policy: Policy, prompts, *, n=1, max_new_tokens, temperature=1.0, generator=None
) -> Rollouts:
    """As `sample`, but always through transformers' `generate`."""
    ids, length = _padded(policy, prompts)
    with sampling_mode(policy.model):
        tokens, logp = generate(policy, ids, length, n, max_new_tokens, temperature, generator)
    return _rollouts(policy, ids, length, n, tokens, logp)


def _padded(policy: Policy, prompts) -> tuple[Int[Tensor, "U P"], Int[Tensor, " U"]]:
    if not prompts or not all(map(len, prompts)):
        raise ValueError("sample needs at least one prompt, and every prompt at least one token")
    return pad_left(prompts, policy.pad_id)


def _rollouts(policy, ids, prompt_length, n, tokens, logp) -> Rollouts:
    eos = torch.isin(tokens, torch.tensor(policy.eos_ids))
    ended = eos.any(1)
    length = torch.where(ended, eos.int().argmax(1) + 1, tokens.shape[1])
    width = int(length.max())
    mask = length_mask(length, width)
    return Rollouts(
        prompt_ids=ids.repeat_interleave(n, 0),
        prompt_length=prompt_length.repeat_interleave(n, 0),
        completion_ids=tokens[:, :width].masked_fill(~mask, policy.pad_id),
        length=length,
        terminated=ended,
        group=torch.arange(len(ids)).repeat_interleave(n, 0),
        old_logp=logp[:, :width].masked_fill(~mask, 0.0),
    )
