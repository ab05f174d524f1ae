"""The plain way: all logits, then a softmax.  The oracle of the other two, and quickest for small logits."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def plain_logits(hidden, weight, bias=None, scale: float = 1.0, softcap: float | None = None):
    """(..., V) logits in float32 (float64 for float64): bias, then softcap, then scale."""
    wide = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    with torch.autocast(hidden.device.type, enabled=False):  # which would round the product to 16 bits
        logits = hidden.to(wide) @ weight.to(wide).T
    if bias is not None:
        logits = logits + bias.to(wide)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits if scale == 1 else logits * scale


def logp_and_entropy(
    hidden, weight, target, mask, bias, scale, softcap, entropy
) -> tuple[Float[Tensor, "..."], ...]:
    """The definition of `linear_logprob`, differentiated by autograd."""
    rows, tokens = (hidden, target) if mask is None else (hidden[mask], target[mask])
    logp = torch.log_softmax(plain_logits(rows, weight, bias, scale, softcap), dim=-1)
    chosen = logp.gather(-1, tokens[..., None])[..., 0]
    back = lambda x: x if mask is None else x.new_zeros(target.shape).masked_scatter(mask, x)  # noqa: E731
    if not entropy:
        return (back(chosen),)
    # 0 * -inf would be NaN: a log-prob that underflows contributes nothing to the entropy.
    uncertainty = -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)
    return back(chosen), back(uncertainty)
