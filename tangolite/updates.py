"""What one update of any policy is made of: a seed, an optimizer, exact gradient accumulation.

An update's randomness depends on the run's seed and the update's number alone, so a resumed run draws
what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tangolite.models import Policy
from tangolite.parallel import add_up, add_up_gradients, my_parts, weight_of_loss, whole
from tangolite.rollouts import NonFiniteError, Rollouts, check_batch


def check_tensors(what: str, named: dict[str, Tensor], batch: dict[str, Rollouts], **kwargs) -> Tensor:
    """The norm of all tensors together; raises NonFiniteError that names the first one that is not finite."""
    norm = torch.nn.utils.get_total_norm([t.detach() for t in named.values()])
    if not torch.isfinite(whole(norm)):  # a norm may also overflow
        for name, tensor in named.items():
            if not whole(tensor.detach()).isfinite().all():
                raise NonFiniteError(f"{what} {name} is not finite", batch, **kwargs)
    return norm


def seeded(*parts: Any) -> torch.Generator:
    """A random generator that depends on the parts alone, e.g. ``seeded(seed, "traces", update)``."""
    return torch.Generator().manual_seed(random.Random("/".join(map(str, parts))).getrandbits(62))


def adamw(policy: Policy, lr: float) -> torch.optim.AdamW:
    """The optimizer of every player: no weight decay, which would pull a trained model towards zero."""
    return torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.0)


def set_lr(
    optimizer: torch.optim.Optimizer, lr: float, done: int, warmup: int, total: int | None = None
) -> None:
    """Linear warm-up over the player's own first updates; then constant, or with ``total`` a cosine to 0."""
    factor = min(1.0, (done + 1) / max(warmup, 1))
    if total is not None and done >= warmup:
        factor = 0.5 + 0.5 * math.cos(math.pi * (done - warmup) / max(total - warmup, 1))
    for group in optimizer.param_groups:
        group["lr"] = lr * factor


def optimise(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    parts: Sequence[Any],
    shares: Sequence[float],
    loss_of: Callable[[Any], NamedTuple],
    *,
    max_grad_norm: float,
    batch: dict[str, Rollouts],
) -> dict[str, float]:
    """One optimizer step on the sum of ``share * loss_of(part).loss``.

    The shares (a part's share of the tokens, or of the rollouts where each rollout counts once) make the
    accumulated gradient that of the whole batch, whatever the size of the parts.  Returns the fields of
    the losses, averaged with the shares, and the gradient's norm.  Raises NonFiniteError for a reward,
    advantage, log-prob, loss or gradient that is not finite, before the weights change; and for a weight.
    A reward of NaN, which advantages take for "unscorable", is none that a run itself ever gives.
    """
    named = policy.named_parameters()
    check_tensors("the weight", named, batch)
    check_batch(batch)
    optimizer.zero_grad(set_to_none=True)
    totals: dict[str, float] = {}
    policy.model.eval()  # no dropout: before an update the ratio to the policy that sampled is exactly 1
    for part, share in my_parts(policy, parts, shares):
        loss = loss_of(part)
        (loss.loss * share * weight_of_loss(policy)).backward()
        for name, value in loss._asdict().items():
            totals[name] = totals.get(name, 0.0) + float(value.detach()) * share
    totals = add_up(totals)
    if not math.isfinite(totals["loss"]):
        raise NonFiniteError(f"the loss is {totals['loss']}", batch)
    add_up_gradients(policy)
    gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
    norm = check_tensors("the gradient of", gradients, batch)
    if not torch.isfinite(whole(norm)):
        raise NonFiniteError(f"the norm of the gradient is {whole(norm).item()}", batch)
    torch.nn.utils.clip_grads_with_norm_(policy.parameters(), max_grad_norm, norm)
    optimizer.step()
    check_tensors("after the step the weight", named, batch, changed=True)
    return totals | {"grad_norm": float(whole(norm))}


def shares_of(parts: Sequence[Rollouts], aggregate: str) -> list[float]:
    """What each micro-batch counts for: its tokens where tokens are averaged, else its rollouts (for
    "sequence" those that have tokens)."""
    size = {"token": lambda part: part.n_tokens, "sequence": lambda part: int((part.length > 0).sum())}
    sizes = [size.get(aggregate, len)(part) for part in parts]
    return [size / max(sum(sizes), 1) for size in sizes]
