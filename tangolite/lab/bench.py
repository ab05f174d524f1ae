"""Speed on this machine: `python -m tangolite bench sampling`."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch

from tangolite.models import tiny_policy
from tangolite.prompts import TINY
from tangolite.sampling import sample, sample_generate
from tangolite.tasks import ChainArithmetic, problems
from tangolite.updates import seeded

NEVER = (-1,)  # an end-of-sequence id that is never sampled: every row gets its full length


def bench_sampling(
    sizes=(128, 256, 640), *, n: int = 8, new_tokens: int = 64, repeats: int = 5
) -> list[dict]:
    """Tokens per second of our sampler and of `generate`, in turns within one run; medians.

    The model is the built-in one, untrained, on prompts of chained arithmetic shared by groups of ``n``;
    the end of sequence is switched off so that both write the same number of tokens.
    """
    torch.set_num_threads(1)
    policy = replace(tiny_policy(0), eos_ids=NEVER)
    rows = []
    print(f"tokens per second, median of {repeats}")
    print(f"{'sequences':>9} {'ours':>10} {'generate':>10} {'ratio':>6}")
    for size in sizes:
        prompts = [
            policy.encode(TINY.generator(p.question)) for p in problems(ChainArithmetic(), size // n, "bench")
        ]
        rates: dict[str, list[float]] = {"ours": [], "generate": []}
        for repeat in range(repeats + 1):
            for name, sampler in (("ours", sample), ("generate", sample_generate)):
                began = time.perf_counter()
                made = sampler(policy, prompts, n=n, max_new_tokens=new_tokens, generator=seeded(repeat))
                if repeat:  # the first is warm-up
                    rates[name].append(made.n_tokens / (time.perf_counter() - began))
        ours, theirs = (statistics.median(rates[name]) for name in ("ours", "generate"))
        spread = {name: [round(min(r)), round(max(r))] for name, r in rates.items()}
        row = {
            "sequences": size,
            "ours": round(ours),
            "generate": round(theirs),
            "ratio": round(ours / theirs, 2),
        }
        rows.append(row | {"spread": spread})
        print(f"{size:9d} {ours:10,.0f} {theirs:10,.0f} {ours / theirs:6.2f}")
    return rows
