"""Completions of prompts: a KV-cache sampler of our own, or transformers' `generate`.

`sample` is what training calls.  For a plain Qwen2 model (the built-in ones, or Qwen2.5) it runs the
decoder written out below: prompts are read once per group, keys and values go into one preallocated
cache, finished rows leave the batch.  Any other model goes through `generate`.  Both return the
log-prob of every sampled token under the tempered distribution that it was drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tangolite.models import Policy, sampling_mode
from tangolite.parallel import brought_together, processes, put_together, share_out
from tangolite.rollouts import Rollouts, concatenate, length_mask, pad_left
from tangolite.sampling.decoder import cached, choose, is_plain_qwen2
from tangolite.sampling.generate import generate

__all__ = [
    "choose", "keep_served", "logp_of", "sample", "sample_generate", "sample_shared", "served_by",
]  # fmt: skip


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

    A policy with a ``sampler`` of its own (a vLLM server) samples there.  Temperature 0 decodes greedily.
    Raises ValueError for an empty prompt or list of prompts.
    """
    if policy.sampler is not None or not is_plain_qwen2(policy.model):
        sampler, settings = policy.sampler or sample_generate, {"n": n, "max_new_tokens": max_new_tokens}
        return sampler(policy, prompts, **settings, temperature=temperature, generator=generator)
    ids, length = _padded(policy, prompts)
    with sampling_mode(policy.model):
        tokens, logp = cached(policy, ids, length, n, max_new_tokens, temperature, generator)
    rollouts = _rollouts(policy, ids, length, n, tokens)
    logp = logp[:, : rollouts.mask.shape[1]].masked_fill(~rollouts.mask, 0.0)
    return rollouts.with_(old_logp=logp)


def sample_generate(
    policy: Policy, prompts, *, n=1, max_new_tokens, temperature=1.0, generator=None
) -> Rollouts:
    """As `sample`, but always through transformers' `generate`."""
    ids, length = _padded(policy, prompts)
    with sampling_mode(policy.model), policy.active():
        tokens = generate(policy, ids, length, n, max_new_tokens, temperature, generator)
    rollouts = _rollouts(policy, ids, length, n, tokens)
    return rollouts.with_(old_logp=logp_of(policy, rollouts, temperature))


def sample_shared(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    n: int = 1,
    chunk: int = 0,
    max_new_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator,
) -> Rollouts:
    """As `sample`, ``chunk`` prompts at a time, the chunks shared out over the processes of a run.

    Every chunk has a random generator of its own, so with a ``chunk`` the completions do not depend on the
    number of processes.  0 takes all prompts at once, or with several processes an equal share each.
    """
    settings = {"n": n, "max_new_tokens": max_new_tokens, "temperature": temperature}
    if processes() == 1 and not chunk:
        return sample(policy, prompts, generator=generator, **settings)
    chunk = chunk or -(-len(prompts) // processes())
    pieces = [prompts[i : i + chunk] for i in range(0, len(prompts), chunk)]
    seeds = torch.randint(2**62, (len(pieces),), generator=generator).tolist()
    with brought_together(policy):
        mine = {
            i: sample(policy, pieces[i], generator=torch.Generator().manual_seed(seeds[i]), **settings)
            for i in share_out(len(pieces))
        }
    return concatenate(put_together(len(pieces), mine), policy.pad_id)


def served_by(config, name: str, policy: Policy) -> Policy:
    """The policy, sampling at the recipe's server if it has one; ValueError with several processes."""
    if not config.server:
        return policy
    if processes() > 1:
        raise ValueError("a server samples for a run of one process: take server= away, or torchrun")
    from tangolite.sampling.vllm import VllmSampler

    return replace(policy, sampler=VllmSampler(config.server, name, folder=config.server_folder))


def keep_served(policy: Policy, changed: bool = False) -> dict[str, float]:
    """Give the server the policy's weights, at first and when they have changed; its gap as a metric."""
    if policy.sampler is None:
        return {}
    gap = policy.sampler.gap
    if changed or policy.sampler.published is None:
        policy.sampler.publish(policy)
    return {"server_gap": gap}


def logp_of(policy: Policy, rollouts: Rollouts, temperature: float, rows: int = 16) -> Float[Tensor, "B T"]:
    """Log-probs as training computes them, without gradients, some rows at a time."""
    width = rollouts.completion_ids.shape[1]
    with sampling_mode(policy.model):
        parts = [policy.logp(part, temperature=temperature).cpu() for part in rollouts.micro_batches(rows)]
    return torch.cat([F.pad(part, (0, width - part.shape[1])) for part in parts])


def _padded(policy: Policy, prompts) -> tuple[Int[Tensor, "U P"], Int[Tensor, " U"]]:
    if not prompts or not all(map(len, prompts)):
        raise ValueError("sample needs at least one prompt, and every prompt at least one token")
    return pad_left(prompts, policy.pad_id)


def _rollouts(policy, ids, prompt_length, n, tokens) -> Rollouts:
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
    )
