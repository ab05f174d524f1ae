"""What a machine can do at best, measured on it, and what a log-prob costs there at least."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Ceilings(NamedTuple):
    """Measured on this machine: operations a second of a large matrix product, bytes a second of a copy."""

    flops: float
    bandwidth: float


class Cost(NamedTuple):
    """Operations and bytes that cannot be avoided, and the seconds they take at the ceilings."""

    flops: float
    bytes: float
    seconds: float


def cost(
    n: int, d: int, v: int, *, products: int, keeps_logits: bool, mode: str, size: int, ceilings: Ceilings
) -> Cost:
    """The larger of arithmetic and traffic.

    ``products`` counts in N V D operations; ``size`` is the bytes of an input's number.  Each product reads
    the weight once.  Kept logits cross the memory: written by the product, read and written by the softmax,
    and again so in the backward, in float32.  Slices stay in the cache, apart from their gradient.
    """
    flops = float(products) * n * v * d
    traffic = products / 2 * v * d * size + (v * d * size if mode.startswith("full") else 0)
    backward = mode != "no grad"
    if keeps_logits:
        traffic += n * v * (size + 4 + 4 + (3 * 4 + 2 * size if backward else 0))
    elif backward:
        traffic += 2 * n * v * size
    return Cost(flops, traffic, max(flops / ceilings.flops, traffic / ceilings.bandwidth))


def measure_ceilings(device: str, dtype: torch.dtype) -> Ceilings:
    """The best of several large square products, and of several copies of 256 MB."""
    side = 8192 if device == "cuda" else 2048
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    source = torch.empty(2**26, device=device)
    sink = torch.empty_like(source)
    product = best(lambda: torch.mm(a, b, out=out), device)
    copy = best(lambda: sink.copy_(source), device)
    return Ceilings(2 * side**3 / product, 2 * source.nbytes / copy)


def best(work: Callable[[], object], device: str, repeats: int = 7) -> float:
    """Seconds of the fastest of several runs, after one that is not counted."""
    return min(timed(work, device) for _ in range(repeats + 1))


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds, the device's queue included."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began
