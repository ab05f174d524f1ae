"""How much memory a piece of work holds at its peak, counted from torch's own allocations."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """The most bytes that torch had allocated on the CPU at once during ``work``, beyond what it had before.

    Allocations are counted, not pages: the same number on every machine, and nothing of other programs.
    """
    with silenced(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    now = most = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def peak_cuda_bytes(work: Callable[[], object]) -> int:
    """The same on the current CUDA device."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


@contextmanager
def silenced() -> Iterator[None]:
    """Nothing reaches standard error: the profiler writes lines there that no setting turns off."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
