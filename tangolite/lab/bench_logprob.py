"""Ours and others' log-probs in one run: `python -m tangolite bench logprob`.

Time, memory beyond inputs and gradients, and error against float64, at the sizes of real heads, beside what
the machine could do at best.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tangolite.lab.logprob_peers import MODES, Peer, peers
from tangolite.lab.memory import peak_bytes, peak_cuda_bytes
from tangolite.lab.roofline import Ceilings, cost, measure_ceilings, timed

QWEN_SMALL, QWEN_LARGE = (896, 151_936), (3_584, 152_064)  # (D, V) of the 0.5B and the 7B head
SIZES = {
    "cpu": [(256, *QWEN_SMALL, "bfloat16"), (1024, *QWEN_SMALL, "float32"), (2048, *QWEN_SMALL, "float32")],
    "cuda": [(8192, *QWEN_SMALL, "bfloat16"), (4096, *QWEN_LARGE, "bfloat16")],
}
PROBE_ROWS = (
    32  # a way is tried on so few rows first, and left out where all would take longer than the limit
)
CHECKED_ROWS = 32  # rows that are compared with float64


class Inputs(NamedTuple):
    """Random rows and a head whose logits spread by about 5, and the gradient that comes in."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    grad: Tensor


def draw(n: int, d: int, v: int, dtype: str, device: str, seed: int = 0) -> Inputs:
    """Half of the targets are likely words, as sampled tokens are."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, device=device)  # noqa: E731
    hidden, weight = normal(n, d), normal(v, d) * (5 / math.sqrt(d))
    kind = getattr(torch, dtype)
    hidden, weight = hidden.to(kind), weight.to(kind)
    target = torch.randint(v, (n,), generator=generator, device=device)
    for rows in torch.arange(0, n, 2, device=device).split(256):
        target[rows] = (hidden[rows].float() @ weight.float().T).argmax(-1)
    return Inputs(hidden, weight, target, normal(n))


def run(peer: Peer, inputs: Inputs, mode: str) -> dict[str, Tensor]:
    """Log-probs and, by mode, the gradients of hidden and weight."""
    hidden = inputs.hidden.detach().requires_grad_(mode != "no grad")
    weight = inputs.weight.detach().requires_grad_(mode.startswith("full"))
    with torch.set_grad_enabled(mode != "no grad"):
        if mode.endswith("entropy"):
            logp, entropy = peer.entropy(hidden, weight, inputs.target)
            results, grads = [logp, entropy], [inputs.grad.to(logp.dtype), inputs.grad.to(entropy.dtype)]
        else:
            logp = peer.logp(hidden, weight, inputs.target)
            results, grads = [logp], [inputs.grad.to(logp.dtype)]
    made = {"logp": logp.detach()}
    wanted = [x for x in (hidden, weight) if x.requires_grad]
    if wanted:
        made |= dict(zip(("hidden", "weight"), torch.autograd.grad(results, wanted, grads), strict=False))
    return made


def exact(inputs: Inputs, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probs, gradient of hidden) of some rows in float64."""
    hidden = inputs.hidden[rows].double().requires_grad_()
    logp = (hidden @ inputs.weight.double().T).log_softmax(-1)
    chosen = logp.gather(-1, inputs.target[rows][:, None])[:, 0]
    chosen.backward(inputs.grad[rows].double())
    return chosen.detach().cpu(), hidden.grad.cpu()


def extra_memory(peer: Peer, inputs: Inputs, mode: str) -> int:
    """Bytes allocated at the peak beyond the inputs and the gradients that are asked for."""
    shapes = {"no grad": (), "frozen head": (inputs.hidden,)}.get(mode, (inputs.hidden, inputs.weight))
    count = peak_cuda_bytes if inputs.hidden.is_cuda else peak_bytes
    return count(lambda: run(peer, inputs, mode)) - sum(x.nbytes for x in shapes)


def measure(peer: Peer, inputs: Inputs, mode: str, truth, rows, repeats: int, limit: float) -> dict:
    """One row of the table; only a reason where the way fails or would take too long."""
    device, n = inputs.hidden.device.type, len(inputs.target)
    few = Inputs(inputs.hidden[:PROBE_ROWS], inputs.weight, *(x[:PROBE_ROWS] for x in inputs[2:]))
    try:
        run(peer, few, mode)  # compiles what has to be compiled
        expected = timed(lambda: run(peer, few, mode), device) * n / PROBE_ROWS
        if expected > limit and not peer.name.startswith(("ours", "plain")):
            return {"skipped": f"about {expected:.0f} s, judging by {PROBE_ROWS} rows"}
        made: dict[str, Tensor] = {}
        again = lambda: made.update(run(peer, inputs, mode))  # noqa: E731
        first = timed(again, device)
        times = [timed(again, device) for _ in range(repeats)] if first < 20 else [first]
        errors = {"logp_error": float((made["logp"][rows].double().cpu() - truth[0]).abs().max())}
        if "hidden" in made and not mode.endswith("entropy"):
            gap = made["hidden"][rows].double().cpu() - truth[1]
            errors["grad_error"] = float(gap.norm() / truth[1].norm())
        made.clear()
        memory = extra_memory(peer, inputs, mode)
    except (RuntimeError, ValueError, AssertionError, ImportError) as error:
        return {"skipped": f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"}
    return {"seconds": statistics.median(times), "extra_bytes": memory} | errors


def bench_logprob(
    sizes=None, *, modes=MODES, repeats: int = 2, limit: float = 60.0, device: str | None = None
) -> dict:
    """Measures every way at every size; stopping it (Ctrl-C) keeps what has been measured.

    A way that would take longer than ``limit`` seconds, judging by a few rows, is left out with that reason.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    report = {"machine": machine(device), "rows": []}
    print(report["machine"])
    try:
        for n, d, v, dtype in sizes or SIZES[device]:
            _bench_size(report["rows"], n, d, v, dtype, device, modes, repeats, limit)
    except KeyboardInterrupt:
        print("stopped: the table ends here")
    return report


def _bench_size(table: list[dict], n, d, v, dtype, device, modes, repeats, limit) -> None:
    inputs = draw(n, d, v, dtype, device)
    rows = torch.linspace(0, n - 1, min(CHECKED_ROWS, n)).long()
    truth = exact(inputs, rows.to(device))
    ceilings = measure_ceilings(device, inputs.hidden.dtype)
    print(heading(n, d, v, dtype, ceilings))
    for mode in modes:
        for peer in peers(device, inputs.hidden.dtype):
            if mode.endswith("entropy") and peer.entropy is None:
                continue
            measured = measure(peer, inputs, mode, truth, rows, repeats, limit)
            products = peer.products[min(MODES.index(mode), 2)]
            bound = cost(
                n, d, v, products=products, keeps_logits=peer.keeps_logits, mode=mode,
                size=inputs.hidden.element_size(), ceilings=ceilings,
            )  # fmt: skip
            row = {"n": n, "d": d, "v": v, "dtype": dtype, "mode": mode, "way": peer.name, **measured}
            row |= {"flops": bound.flops, "bytes": bound.bytes, "limit_seconds": bound.seconds}
            row |= {"ceiling_flops": ceilings.flops, "ceiling_bandwidth": ceilings.bandwidth}
            table.append(row)
            print(line(row), flush=True)


def heading(n: int, d: int, v: int, dtype: str, ceilings: Ceilings) -> str:
    logits = n * v * 4 / 1e6
    return (
        f"\nN={n:,} D={d:,} V={v:,} {dtype}: float32 logits would be {logits:,.0f} MB; measured ceilings "
        f"{ceilings.flops / 1e9:,.0f} GFLOP/s, {ceilings.bandwidth / 1e9:,.0f} GB/s\n"
        f"{'mode':15}{'way':37}{'ms':>9}{'extra MB':>10}{'logp err':>10}{'grad err':>10}{'GFLOP':>9}{'GB':>7}"
        f"{'limit ms':>10}{'reached':>9}"
    )


def line(row: dict) -> str:
    """One measured way in the table."""
    if "skipped" in row:
        return f"{row['mode']:15}{row['way']:37}  not measured: {row['skipped']}"
    error = lambda name: f"{row[name]:10.1e}" if name in row else f"{'':10}"  # noqa: E731
    return (
        f"{row['mode']:15}{row['way']:37}{row['seconds'] * 1e3:9,.1f}{row['extra_bytes'] / 1e6:10,.1f}"
        f"{error('logp_error')}{error('grad_error')}{row['flops'] / 1e9:9,.0f}{row['bytes'] / 1e9:7,.1f}"
        f"{row['limit_seconds'] * 1e3:10,.1f}{row['limit_seconds'] / row['seconds']:9.0%}"
    )


def machine(device: str) -> str:
    """Card or processor, and the versions that matter."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"


def figure_of(report: dict, file: str | Path) -> None:
    """Time against extra memory, one panel per size, one mark per way; forward and backward."""
    from tangolite.plots import LOOKS, PAPER, figure

    sizes = list(dict.fromkeys((r["n"], r["d"], r["v"], r["dtype"]) for r in report["rows"]))
    ways = list(dict.fromkeys(r["way"] for r in report["rows"]))
    fig, panels = figure(len(sizes), width=max(4.0 * len(sizes), 6), height=3.6)
    for panel, size in zip(panels, sizes, strict=True):
        for row in report["rows"]:
            if (
                (row["n"], row["d"], row["v"], row["dtype"]) == size
                and row["mode"] == "full"
                and "seconds" in row
            ):
                look = LOOKS[ways.index(row["way"]) % len(LOOKS)]
                panel.scatter(
                    max(row["extra_bytes"], 1e5) / 1e6, row["seconds"] * 1e3, label=row["way"], s=60,
                    color=look.color, marker=look.marker,
                )  # fmt: skip
        panel.set(
            xscale="log", xlabel="memory beyond inputs and gradients, MB", ylabel="ms", xlim=(1, 10_000)
        )
        panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
        panel.set_title(f"N = {size[0]:,}, D = {size[1]:,}, {size[3]}")
    handles, labels = panels[-1].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    fig.savefig(file, facecolor=PAPER, metadata={"Software": None})


def write(report: dict, file: str | Path) -> None:
    """The report as JSON, and its figure beside it."""
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if any("seconds" in row for row in report["rows"]):
        figure_of(report, path.with_suffix(".png"))
