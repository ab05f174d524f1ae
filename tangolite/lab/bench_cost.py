"""What one update costs as it grows: `python -m tangolite bench cost`.

Time and memory of one Tango generator update (sampling, verifying, learning) against completions, tokens of a
completion, width of the model and steps of a solution, each over a decade, with fitted exponents.  And the memory
of this process over 200 updates.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from tangolite.lab.memory import peak_bytes
from tangolite.models import Policy, load_policy, tiny_policy
from tangolite.tango import Tango, TangoConfig, generator_update
from tangolite.warmstart import fit, solution_example, verification_example

NEVER = (1_000_000,)  # an end of sequence that is never sampled: every completion gets its full length
BASE = TangoConfig(
    questions=8, group=8, max_new_tokens=80, verifier_max_new_tokens=112, verifier_updates="never",
    task={"kind": "chain", "steps": 8}, micro_batch=64, lr=1e-6, gate=False,
)  # fmt: skip


def completions(count: int) -> Tango:
    """``count`` completions of the built-in generator, judged by the built-in verifier."""
    return _run(replace(BASE, questions=count // BASE.group), *_built_in())


def tokens(count: int) -> Tango:
    """Completions of exactly ``count`` tokens; nothing to verify in them, so outcome only."""
    endless = replace(tiny_policy(0), eos_ids=NEVER)
    config = replace(BASE, questions=4, max_new_tokens=count, step_source="none")
    return _run(config, endless, tiny_policy(1))


def width(count: int) -> Tango:
    """A model ``count`` wide, with heads of 16; outcome only, 40 tokens each."""
    wide = replace(tiny_policy(0, width=count, heads=count // 16), eos_ids=NEVER)
    return _run(replace(BASE, questions=4, max_new_tokens=40, step_source="none"), wide, tiny_policy(1))


def steps(count: int) -> Tango:
    """Solutions of ``count`` steps, by small models that were taught to write that many."""
    config = replace(BASE, questions=4, max_new_tokens=8 * count + 24, verifier_max_new_tokens=16 * count + 32,
                     task={"kind": "chain", "steps": count, "modulus": 2, "operands": [0, 1]})  # fmt: skip
    return _run(config, *_taught(count))


AXES: dict[str, tuple[Callable[[int], Tango], tuple[int, ...]]] = {
    "completions": (completions, (16, 40, 80, 160)),
    "tokens": (tokens, (32, 80, 160, 320)),
    "width": (width, (32, 80, 160, 320)),
    "steps": (steps, (2, 5, 10, 20)),
}


def bench_cost(repeats: int = 3, updates: int = 200, axes: Sequence[str] = tuple(AXES)) -> dict:
    """Rows, exponents of the fit seconds = a x^b (and of memory), and the memory over many updates; prints."""
    torch.set_num_threads(1)
    report: dict = {"torch": torch.__version__, "axes": {}}
    if updates:  # first: memory that something else had left free would hide a leak
        report["over_time"] = over_time(updates)
    for name in axes:
        make, sizes = AXES[name]
        rows = [measure(make(size), size, repeats) for size in sizes]
        found = {
            kind: round(exponent(sizes, [row[kind] for row in rows]), 2) for kind in ("seconds", "bytes")
        }
        steep = steepest(sizes, [row["seconds"] for row in rows])
        report["axes"][name] = {"rows": rows, "exponents": found, "steepest_seconds": round(steep, 2)}
        print(
            f"{name:12} "
            + "  ".join(f"{r['size']}: {r['seconds']:.2f} s, {r['bytes'] / 1e6:.0f} MB" for r in rows)
        )
        print(f"{'':12} time ~ {name}^{found['seconds']} (between neighbours at most ^{steep:.2f}), "
              f"memory ~ {name}^{found['bytes']}", flush=True)  # fmt: skip
    return report


def measure(run: Tango, size: int, repeats: int) -> dict:
    """Median seconds of an update and torch's peak allocation in one; the first update is warm-up."""
    generator_update(run, 0)
    seconds = []
    for number in range(1, repeats + 1):
        began = time.process_time()
        metrics = generator_update(run, number)
        seconds.append(time.process_time() - began)
    peak = peak_bytes(lambda: generator_update(run, repeats + 1))
    spread = [round(f(seconds), 4) for f in (min, max)]
    return {"size": size, "seconds": round(statistics.median(seconds), 4), "range": spread, "bytes": peak,
            "length": round(metrics["length"], 1)}  # fmt: skip


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Slope of the least-squares line through the logarithms."""
    x, y = [math.log(v) for v in sizes], [math.log(v) for v in values]
    mean_x, mean_y = statistics.mean(x), statistics.mean(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return slope / sum((a - mean_x) ** 2 for a in x)


def steepest(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The largest exponent between two neighbouring sizes, which a fit over all of them smooths away."""
    pairs = list(zip(sizes, values, strict=True))
    return max(exponent(*zip(a, b, strict=True)) for a, b in pairwise(pairs))


def over_time(updates: int, every: int = 20) -> dict:
    """Resident memory and torch's live tensors every 20 updates of one run: neither may go on growing."""
    run, rows = completions(32), []
    for number in range(updates + 1):
        if number % every == 0:
            gc.collect()
            live = sum(t.numel() * t.element_size() for t in gc.get_objects() if _is_tensor(t))
            rows.append({"update": number, "resident_mb": _resident_mb(), "tensor_mb": round(live / 1e6, 3)})
        if number < updates:
            generator_update(run, number)
    half = rows[len(rows) // 2 :]
    grown = {k: round(half[-1][k] - half[0][k], 3) for k in ("resident_mb", "tensor_mb")}
    for name in grown:
        print(f"over {updates} updates, {name}: {rows[1][name]:.2f} after {every}, {rows[-1][name]:.2f} at the end, "
              f"{grown[name]:+.2f} over the second half")  # fmt: skip
    return {"rows": rows, "second_half": grown}


def _is_tensor(thing: object) -> bool:
    return issubclass(type(thing), torch.Tensor)


def _resident_mb() -> float:
    """Memory that this process holds now, in MB; NaN where the system does not say."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return round(next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) / 1e3, 1)
    except OSError:
        return math.nan


def _run(config: TangoConfig, generator: Policy, verifier: Policy) -> Tango:
    return Tango(config, generator, verifier)


def _built_in() -> tuple[Policy, Policy]:
    policies = load_policy("tiny-generator"), load_policy("tiny-verifier")
    for policy in policies:
        policy.model.requires_grad_(True)
    return policies


def _taught(count: int, updates: int = 150) -> tuple[Policy, Policy]:
    """A generator and a verifier of the built-in shape that can write ``count`` steps, and little else."""
    from functools import partial

    from tangolite.tasks import ChainArithmetic

    task = ChainArithmetic(modulus=2, steps=count, operands=(0, 1))
    players = []
    for seed, lesson in enumerate((
        lambda policy, draw: solution_example(policy, task, draw, lambda fact: str(draw.randrange(2))),
        lambda policy, draw: verification_example(policy, task, draw, flip=0.5),
    )):  # fmt: skip
        policy = tiny_policy(seed)
        fit(policy, partial(lesson, policy), updates=updates, lr=3e-3, seed=seed, batch=8)
        players.append(policy)
    return players[0], players[1]
