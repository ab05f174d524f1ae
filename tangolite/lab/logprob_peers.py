"""The ways to a log-prob per token that `bench logprob` compares, ours and others', as plain functions.

Each takes hidden (N, D), weight (V, D) and target (N,), gives logp (N,), and is differentiated by autograd.
What others do is called where it installs, and otherwise written down here in our own words.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tangolite.logprob import linear_logprob

MODES = ("no grad", "frozen head", "full", "full + entropy")


class Peer(NamedTuple):
    """A way, the products of N V D that it does in each mode, and whether it keeps the logits."""

    name: str
    logp: Callable[[Tensor, Tensor, Tensor], Tensor]
    products: tuple[int, int, int]  # no grad, frozen head, full
    keeps_logits: bool
    entropy: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None


def peers(device: str, dtype: torch.dtype) -> list[Peer]:
    """Every way that this machine can run, the plain one first."""
    found = [
        Peer("plain logits", plain, (2, 4, 6), True, partial(plain, entropy=True)),
        Peer("selective log-softmax (TRL's way)", selective, (2, 4, 6), True),
    ]
    if hasattr(F, "linear_cross_entropy"):
        found += [
            Peer("torch linear_cross_entropy", partial(torch_loss, chunked=False), (2, 4, 6), True),
            Peer("torch linear_cross_entropy, chunked", partial(torch_loss, chunked=True), (2, 8, 8), False),
        ]
    if device == "cuda" and importlib.util.find_spec("liger_kernel"):
        found.append(Peer("Liger fused linear cross-entropy", liger, (2, 6, 6), False))
    if device == "cuda" and importlib.util.find_spec("cut_cross_entropy") and dtype != torch.float32:
        found.append(Peer("cut cross-entropy (CCE)", cce, (2, 8, 8), False))
    for backend in ("chunked", "triton") if device == "cuda" or can_interpret() else ("chunked",):
        way = partial(linear_logprob, backend=backend)
        found.append(Peer(f"ours, {backend}", way, (2, 6, 8), False, partial(way, return_entropy=True)))
    return found


def can_interpret() -> bool:
    """Whether Triton's kernels run on the CPU, for a rehearsal."""
    return os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


def plain(hidden: Tensor, weight: Tensor, target: Tensor, *, entropy: bool = False):
    """Logits in the inputs' type, then a float32 log-softmax: what most code does."""
    logp = F.linear(hidden, weight).float().log_softmax(-1)
    chosen = logp.gather(-1, target[:, None])[:, 0]
    return (chosen, -(logp.exp() * logp).sum(-1)) if entropy else chosen


def selective(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """z_t - logsumexp(z), row by row so that no second matrix of logits is made; in 16 bits a softmax."""
    logits = F.linear(hidden, weight)
    if logits.dtype in (torch.float16, torch.bfloat16):
        rows = [row.log_softmax(-1)[token] for row, token in zip(logits, target, strict=True)]
        return torch.stack(rows)
    chosen = logits.gather(-1, target[:, None])[:, 0]
    return chosen - torch.stack([row.logsumexp(-1) for row in logits])


def torch_loss(hidden: Tensor, weight: Tensor, target: Tensor, *, chunked: bool) -> Tensor:
    """torch's own, in its two modes, per row: the mean and the sum cannot carry a policy gradient."""
    options = torch.nn.LinearCrossEntropyOptions() if chunked else None
    return -F.linear_cross_entropy(hidden, weight, target, reduction="none", options=options)


def liger(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    result = liger_fused_linear_cross_entropy(hidden, weight, target, reduction="none")
    return -(result[0] if isinstance(result, tuple) else result)


def cce(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, target, reduction="none")
