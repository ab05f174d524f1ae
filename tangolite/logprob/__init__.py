"""One log-probability per sampled token, from hidden states and the head's weight.

This is the place of the fused kernel.  What stands here now is the plain path, which is also its
oracle: float32 logits (float64 if the inputs are), shift-invariant log-softmax, and nothing computed
for rows outside ``mask``.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

BACKENDS = ("auto", "reference")


def linear_logprob(
    hidden: Float[Tensor, "... D"],
    weight: Float[Tensor, "V D"],
    target: Int[Tensor, "..."],
    *,
    temperature: float = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    return_entropy: bool = False,
    backend: str = "auto",
) -> Float[Tensor, "..."] | tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """log softmax((hidden @ weight.T) / temperature) at ``target``, and the entropy in nats if asked.

    Rows outside ``mask`` give log-prob 0, entropy 0 and gradient 0, whatever they hold.  A temperature
    of 0 stands for greedy decoding, whose log-probs are the untempered ones.
    Raises ValueError for shapes that do not fit, a target outside the vocabulary or an unknown backend.
    """
    _check(hidden, weight, target, temperature, mask, backend)
    keep = torch.ones_like(target, dtype=torch.bool) if mask is None else mask.bool()
    logits = _logits(hidden[keep], weight, bias, softcap, temperature)
    logp = torch.log_softmax(logits, dim=-1)
    chosen = logp.gather(-1, target[keep][:, None])[:, 0]
    full = logp.new_zeros(target.shape).masked_scatter(keep, chosen)
    if not return_entropy:
        return full
    # 0 * -inf would be NaN: a log-prob that underflows contributes nothing to the entropy.
    entropy = -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)
    return full, logp.new_zeros(target.shape).masked_scatter(keep, entropy)


def _logits(hidden, weight, bias, softcap, temperature) -> Float[Tensor, "N V"]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(wide) @ weight.to(wide).T
    if bias is not None:
        logits = logits + bias.to(wide)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits / temperature if temperature > 0 else logits


def _check(hidden, weight, target, temperature, mask, backend) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if not hidden.is_floating_point():
        raise ValueError(f"hidden must be floating point, got {hidden.dtype}: pass hidden states, not ids")
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
        raise ValueError(f"the last size of hidden must be the width of weight (V, D), got {shapes}")
    if target.shape != hidden.shape[:-1] or (mask is not None and mask.shape != target.shape):
        shapes = f"hidden {tuple(hidden.shape)}, target {tuple(target.shape)}"
        raise ValueError(f"target and mask must have the leading shape of hidden, got {shapes}")
    if temperature < 0:
        raise ValueError(f"temperature must not be negative, got {temperature}")
    seen = target if mask is None else target[mask.bool()]
    if seen.numel() and (int(seen.min()) < 0 or int(seen.max()) >= weight.shape[0]):
        raise ValueError(f"target must lie in 0..{weight.shape[0] - 1}; mask out what is not a token")
