"""Slices of the vocabulary in PyTorch: every device, float32 logits (float64 for float64)."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tangolite.logprob.autograd import HALF, LOWEST, Head, RowTerms, RowValues, product


def operand(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """What the products multiply: 16 bits where CUDA adds them up in float32, the logits' type elsewhere."""
    if hidden.is_cuda and hidden.dtype == weight.dtype and hidden.dtype in HALF:
        return hidden.dtype
    return Head(hidden, weight, None, 1.0, None).wide


def buffer_dtype(head: Head) -> torch.dtype:
    """Of a slice of the logits and of their gradient."""
    return head.wide


def statistics(head: Head, target: Int[Tensor, " N"], entropy: bool, width: int) -> RowValues:
    """One pass over the vocabulary with a running maximum m, s = sum e^(z-m), e = sum e^(z-m) (z-m)."""
    hidden, vocabulary = head.hidden, head.weight.shape[0]
    row = hidden.new_zeros(hidden.shape[0], dtype=head.wide)
    m, s, e, chosen = torch.full_like(row, LOWEST), row.clone(), row.clone(), row.clone()
    buffer = hidden.new_empty(len(row) * width, dtype=head.wide)
    second = torch.empty_like(buffer) if entropy else None
    for start in range(0, vocabulary, width):
        stop = min(start + width, vocabulary)
        z = _logits(head, start, stop, buffer)
        chosen = torch.where(*_at_target(target, start, stop, z), chosen)
        top = torch.maximum(m, z.amax(-1))
        z.sub_(top[:, None])
        fade = (m - top).exp()
        if entropy:
            # Sums relative to the old maximum, moved to the new one: z-m = (z-m_old) + (m_old-m).
            p = torch.exp(z, out=second[: z.numel()].view_as(z))
            e = fade * (e + (m - top) * s)
            s = fade * s + p.sum(-1)
            e += p.mul_(z).sum(-1)
        else:
            s = fade * s + z.exp_().sum(-1)
        m = top
    log_sum = s.log()
    logp = ((chosen - m) - log_sum).clamp(max=0)
    return RowValues(logp, log_sum - e / s if entropy else row[:0], m, log_sum)


def logit_gradient(
    head: Head, target: Int[Tensor, " N"], rows: RowTerms, start: int, stop: int, buffer: Tensor
) -> Float[Tensor, "N W"]:
    """d loss / d (hidden weight' + bias) of the slice, made in the buffer."""
    z = _logits(head, start, stop, buffer)
    slope = None if head.softcap is None else 1 - (z / (head.softcap * head.scale)).square_()
    z.sub_(rows.maximum[:, None]).sub_(rows.log_sum[:, None])
    if rows.linear is None:
        z.exp_().mul_(-rows.constant[:, None])
    else:
        factor = torch.addcmul(rows.constant[:, None], rows.linear[:, None], z)
        z.exp_().mul_(factor.neg_())
    inside = (target >= start) & (target < stop)
    place = (target - start).clamp(0, stop - start - 1)[:, None]
    z.scatter_(1, place, torch.where(inside[:, None], rows.at_target[:, None], z.gather(1, place)))
    z = z if slope is None else z.mul_(slope)
    return z.to(head.hidden.dtype)


def _logits(head: Head, start: int, stop: int, buffer: Tensor) -> Float[Tensor, "N W"]:
    n = head.hidden.shape[0]
    z = buffer[: n * (stop - start)].view(n, stop - start)
    product(z, head.hidden, head.weight[start:stop].T)
    if head.bias is not None:
        z.add_(head.bias[start:stop]).clamp_(min=LOWEST)  # a word may be forbidden by a bias of -inf
    if head.softcap is not None:
        z.div_(head.softcap).tanh_().mul_(head.softcap)
    return z if head.scale == 1 else z.mul_(head.scale)


def _at_target(target, start, stop, z):
    """(is the target in this slice, its logit)"""
    place = (target - start).clamp(0, stop - start - 1)
    return (target >= start) & (target < stop), z.gather(1, place[:, None])[:, 0]
