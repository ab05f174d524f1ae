"""Speed on this machine: `python -m tangolite bench sampling`."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace

import torch

from tangolite.models import Policy, tiny_policy
from tangolite.prompts import TINY, solution_text
from tangolite.sampling import sample, sample_generate
from tangolite.tasks import ChainArithmetic, problems
from tangolite.updates import seeded

NEVER = (1_000_000,)  # an end-of-sequence id that is never sampled: every row gets its full length
SAMPLERS = (("ours", sample), ("generate", sample_generate))


def bench_sampling(
    sizes=(128, 256, 640), *, n: int = 8, new_tokens: int = 64, repeats: int = 5
) -> list[dict]:
    """Tokens per second of our sampler and of `generate`, in turns within one run; medians.

    The model is the built-in one, untrained, on the prompts of a generator (19 tokens) and of a verifier
    (84), each shared by a group of ``n``; the end of sequence is switched off so that both write the same
    number of tokens.
    """
    torch.set_num_threads(1)
    policy = replace(tiny_policy(0), eos_ids=NEVER)
    print(f"tokens per second of one thread, median of {repeats}, {new_tokens} new tokens")
    print(f"{'prompts':>10} {'sequences':>10} {'ours':>10} {'generate':>10} {'ratio':>6}")
    rows = []
    for kind in ("generator", "verifier"):
        for size in sizes:
            rates = _rates(policy, _prompts(policy, kind, size // n), n, new_tokens, repeats)
            ours, theirs = (statistics.median(rates[name]) for name, _ in SAMPLERS)
            spread = {name: [round(min(r)), round(max(r))] for name, r in rates.items()}
            row = {"prompts": kind, "sequences": size, "ours": round(ours), "generate": round(theirs)}
            rows.append(row | {"ratio": round(ours / theirs, 2), "spread": spread})
            print(f"{kind:>10} {size:10d} {ours:10,.0f} {theirs:10,.0f} {ours / theirs:6.2f}")
    return rows


def _rates(policy: Policy, prompts, n: int, new_tokens: int, repeats: int) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {name: [] for name, _ in SAMPLERS}
    for repeat in range(repeats + 1):
        for name, sampler in SAMPLERS:
            began = time.perf_counter()
            made = sampler(policy, prompts, n=n, max_new_tokens=new_tokens, generator=seeded(repeat))
            if repeat:  # the first is warm-up
                rates[name].append(made.n_tokens / (time.perf_counter() - began))
    return rates


def _prompts(policy: Policy, kind: str, count: int) -> list[list[int]]:
    task, rng = ChainArithmetic(), random.Random("bench")
    asked = problems(task, count, "bench")
    if kind == "generator":
        return [policy.encode(TINY.generator(p.question)) for p in asked]
    texts = [solution_text(*task.flawed(p, rng, 0.3)) for p in asked]
    return [policy.encode(TINY.verifier(p.question, t, 8)) for p, t in zip(asked, texts, strict=True)]
