"""Several processes as one: who samples what, whose gradients are added up, weights that are spread out.

Every process holds the whole batch of rollouts and computes rewards and advantages from it, which is cheap
and makes them the same everywhere.  What is dear is shared: chunks of prompts are sampled, and micro-batches
are learned from, by one process each; then completions are gathered and gradients added.  So a run with a
`sample_batch` gives the same numbers on any number of processes, up to the order of sums; without one each process
draws its share of the completions from a random generator of its own.

Processes are started by torchrun or `accelerate launch`; with one process nothing here does anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tangolite.models import Policy


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def join_team() -> None:
    """Take part in the run that torchrun or `accelerate launch` started; alone there is nothing to join."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        from accelerate import PartialState

        PartialState(cpu=not torch.cuda.is_available())


def wait_for_all() -> None:
    if processes() > 1:
        dist.barrier()


def agreed(flag: bool) -> bool:
    """True on all processes as soon as it is on one."""
    if processes() == 1:
        return flag
    return any(gathered(flag))


def gathered(mine: Any) -> list[Any]:
    """What each process holds, in the order of their ranks, on all of them."""
    found: list[Any] = [None] * processes()
    dist.all_gather_object(found, mine)
    return found


def share_out(count: int) -> list[int]:
    """Which of ``count`` pieces of work are this process's."""
    return list(range(rank(), count, processes()))


def put_together(count: int, mine: dict[int, Any]) -> list[Any]:
    """All pieces in order, from the processes that made them."""
    if processes() == 1:
        return [mine[i] for i in range(count)]
    every = {i: piece for part in gathered(mine) for i, piece in part.items()}
    return [every[i] for i in range(count)]


# --- learning ------------------------------------------------------------------------------------------


def my_parts(policy: Policy, parts: Sequence[Any], shares: Sequence[float]) -> list[tuple[Any, float]]:
    """This process's micro-batches and what each counts for.

    Where weights are spread out, every forward is a meeting of all processes, so those with a micro-batch
    less repeat their last one with a share of 0.
    """
    mine = [(parts[i], shares[i]) for i in share_out(len(parts))]
    if is_spread(policy):
        most = -(-len(parts) // processes())
        mine += [(parts[-1], 0.0)] * (most - len(mine))
    return mine


def add_up(totals: dict[str, float]) -> dict[str, float]:
    """Sums over the processes; one without micro-batches has none of the names."""
    if processes() == 1:
        return totals
    every = gathered(totals)
    names = dict.fromkeys(name for part in every for name in part)
    return {name: sum(part.get(name, 0.0) for part in every) for name in names}


def add_up_gradients(policy: Policy) -> None:
    """The sum of all processes' gradients on each of them; spread weights have done it in their backward."""
    if processes() == 1 or is_spread(policy):
        return
    parameters = policy.parameters()
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    flat = torch.cat([p.grad.reshape(-1) for p in parameters])
    dist.all_reduce(flat)
    for p, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(total.view_as(p))


def weight_of_loss(policy: Policy) -> float:
    """Spread weights get the mean of the processes' gradients, where the sum is wanted."""
    return float(processes()) if is_spread(policy) else 1.0


def whole(x: Tensor) -> Tensor:
    """The full tensor of one that is spread over the processes; a meeting of all of them."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def like(p: Tensor, x: Tensor) -> Tensor:
    """A full tensor, spread over the processes as ``p`` is."""
    if not hasattr(p, "device_mesh"):
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.to(p.device), p.device_mesh, p.placements)


# --- weights that are spread out (FSDP2) ---------------------------------------------------------------


class Gate(nn.Module):
    """The root of a model with spread weights: what is computed inside its forward finds them whole."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function, *arguments):
        return function(*arguments)


def is_spread(policy: Policy) -> bool:
    return policy.gate is not None


def spread(policy: Policy) -> Policy:
    """Every layer's weights, gradients and optimizer state over all processes, brought together when used.

    On GPUs they compute in bfloat16, and stay float32 where they learn: steps of 1e-6 would be rounded away.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    settings = {"mp_policy": half} if policy.device.type == "cuda" else {}
    gate = Gate(policy.model)
    for layer in layers_of(policy.model):
        fully_shard(layer, **settings)
    fully_shard(gate, reshard_after_forward=True, **settings)  # an optimizer must find its own shards
    gate(lambda: None)  # the first forward settles which module is the root
    return replace(policy, gate=gate)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks: the longest list of modules."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList)]
    return list(max(lists, key=len)) if lists else []


def spread_modules(gate: nn.Module) -> list[nn.Module]:
    from torch.distributed.fsdp import FSDPModule

    return [m for m in gate.modules() if isinstance(m, FSDPModule)]


@contextmanager
def brought_together(policy: Policy) -> Iterator[None]:
    """All weights whole on every process for as long as it lasts: no meeting at every sampled token."""
    modules = spread_modules(policy.gate) if is_spread(policy) else []
    for module in modules:
        module.set_reshard_after_forward(False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(True)
            module.reshard()
