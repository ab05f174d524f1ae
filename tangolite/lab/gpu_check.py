"""Is the kernel right and fast on this GPU?  `make gpu-check` runs `python -m tangolite.lab.gpu_check`.

Needs PyTorch and Triton on a CUDA card, and is meant to take about four minutes.  First correctness at the
heads of 0.5B and 7B models against float64, then every way and mode timed in one run beside the bare matrix
products, then what was aimed at and what was reached.  ``--rehearse`` runs it small on the CPU, interpreted.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from tangolite.lab.bench_logprob import SIZES, Inputs, bench_logprob, draw, run
from tangolite.lab.logprob_peers import Peer
from tangolite.lab.memory import peak_bytes, peak_cuda_bytes
from tangolite.lab.roofline import timed
from tangolite.logprob import linear_logprob

# |log-prob|, |entropy| in nats; gradients as relative Frobenius norms
TOLERANCE = {"logp": 1e-4, "entropy": 1e-4, "hidden": 5e-3, "weight": 5e-3}
REHEARSAL = [(48, 64, 300, "float32"), (40, 96, 257, "float16")]
OURS = Peer("ours, triton", partial(linear_logprob, backend="triton"), (2, 6, 8), False)
CANDIDATES = (
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (128, 128, 64, 8, 3),
    (128, 128, 64, 8, 4), (128, 128, 64, 4, 4), (64, 256, 64, 8, 4),
)  # fmt: skip
BLOCK = 1024  # rows of the float64 computation at a time


def gpu_check(sizes, device: str, *, repeats: int = 10) -> dict:
    """Correctness, times and aims as one report."""
    report = {"date": time.strftime("%Y-%m-%d"), "device": name_of(device), "versions": versions()}
    print(f"{report['device']}, {report['versions']}")
    report["correct"] = [correctness(draw(*size, device), size) for size in sizes]
    report["dead_rows"] = [dead_rows(draw(*size, device), size, repeats) for size in sizes]
    report["products"] = [bare_products(draw(*size, device), size, repeats) for size in sizes]
    report["bench"] = bench_logprob(sizes, device=device, repeats=repeats)["rows"]
    report["aims"] = aims(report) if device == "cuda" else []
    for aim in report["aims"]:
        print(f"{'reached' if aim['reached'] else 'MISSED ':8} {aim['aim']}: {aim['value']}")
    return report


def correctness(inputs: Inputs, size) -> dict:
    """Errors of the Triton backend against float64 of the same inputs, entropy and its gradient included."""
    logp, entropy, of_hidden, of_weight = exact(inputs)
    hidden, weight = (x.detach().requires_grad_() for x in inputs[:2])
    ours = linear_logprob(hidden, weight, inputs.target, return_entropy=True, backend="triton")
    grads = torch.autograd.grad(ours, (hidden, weight), (inputs.grad, inputs.grad.flip(0)))
    largest = lambda a, b: float((a.double() - b).abs().max())  # noqa: E731
    relative = lambda a, b: float((a.double() - b).norm() / b.norm())  # noqa: E731
    errors = {"logp": largest(ours[0].detach(), logp), "entropy": largest(ours[1].detach(), entropy)}
    errors |= {"hidden": relative(grads[0], of_hidden), "weight": relative(grads[1], of_weight)}
    peak = peak_cuda_bytes if inputs.hidden.is_cuda else peak_bytes
    fused = partial(linear_logprob, inputs.hidden, inputs.weight, inputs.target, backend="triton")
    row = {"size": size, "errors": errors, "no_grad_bytes": peak(fused)}
    row["ok"] = all(errors[key] <= TOLERANCE[key] for key in TOLERANCE)
    print(f"{size}: {'right' if row['ok'] else 'WRONG'}, errors {errors}")
    return row


def exact(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logp, entropy, and the gradients of hidden and weight in float64, by the formulas, block by block."""
    hidden, weight = inputs.hidden.double(), inputs.weight.double()
    logps, entropies, of_hidden, of_weight = [], [], [], torch.zeros_like(weight)
    both = inputs.grad.double(), inputs.grad.flip(0).double()
    for h, token, g, e in zip(*(x.split(BLOCK) for x in (hidden, inputs.target, *both)), strict=True):
        logp = (h @ weight.T).log_softmax(-1)
        p = logp.exp()
        entropy = -(p * logp).sum(-1)
        logps.append(logp.gather(-1, token[:, None])[:, 0])
        entropies.append(entropy)
        dz = -p * (g[:, None] + e[:, None] * (logp + entropy[:, None]))
        dz[range(len(token)), token] += g
        of_hidden.append(dz @ weight)
        of_weight += dz.T @ h
    return torch.cat(logps), torch.cat(entropies), torch.cat(of_hidden), of_weight


def dead_rows(inputs: Inputs, size, repeats: int) -> dict:
    """Milliseconds of the backward with all rows alive and with half of the gradients zero."""
    hidden, weight = (x.detach().requires_grad_() for x in inputs[:2])
    logp = linear_logprob(hidden, weight, inputs.target, backend="triton")
    half = inputs.grad.clone()
    half[::2] = 0
    device = inputs.hidden.device.type
    backward = lambda g: torch.autograd.grad(logp, (hidden, weight), g, retain_graph=True)  # noqa: E731
    row = {"size": size, "all_ms": ms(lambda: backward(inputs.grad), device, repeats)}
    return row | {"half_ms": ms(lambda: backward(half), device, repeats)}


def bare_products(inputs: Inputs, size, repeats: int) -> dict:
    """Milliseconds of the three matrix products alone, by the vendor's library, in the inputs' type."""
    hidden, weight, device = inputs.hidden, inputs.weight, inputs.hidden.device.type
    dz = hidden @ weight.T
    return {
        "size": size,
        "logits_ms": ms(lambda: hidden @ weight.T, device, repeats),
        "of_hidden_ms": ms(lambda: dz @ weight, device, repeats),
        "of_weight_ms": ms(lambda: dz.T @ hidden, device, repeats),
    }


def tile_sweep(sizes, device: str, repeats: int) -> list[dict]:
    """Milliseconds without and with gradients for other tiles: where there may be more to gain."""
    from tangolite.logprob import fused

    tried = [fused.Tiles(*t) for t in CANDIDATES]
    rows = []
    for size in sizes:
        inputs = draw(*size, device)
        for tiles in tried:
            with patch.multiple(fused, BULK_TILES=tiles, BULK_GRADIENT_TILES=tiles):
                row = {"size": size, "tiles": tiles}
                for mode in ("no grad", "full"):
                    row[mode] = ms(partial(run, OURS, inputs, mode), device, repeats)
            print(row)
            rows.append(row)
    return rows


def ms(work, device: str, repeats: int) -> float:
    work()
    return 1e3 * statistics.median(timed(work, device) for _ in range(repeats))


def aims(report: dict) -> list[dict]:
    """What the project aims at on a GPU, each with what was measured."""
    found = [
        {"aim": f"right at {row['size']}", "value": row["errors"], "reached": row["ok"]}
        for row in report["correct"]
    ]
    rows = [row for row in report["bench"] if "seconds" in row]
    for size in dict.fromkeys((r["n"], r["d"], r["v"]) for r in rows):
        here = [r for r in rows if (r["n"], r["d"], r["v"]) == size]
        for mode in ("no grad", "frozen head", "full"):
            ours = min(r["seconds"] for r in here if r["mode"] == mode and r["way"] == "ours, triton")
            peer = min(r["seconds"] for r in here if r["mode"] == mode and not r["way"].startswith("ours"))
            wanted = 0.95 if size[1] > 2000 else 1.0
            if mode != "full" or size[1] > 2000:
                aim = f"{mode} at D={size[1]}: at least {wanted} of the best other way's speed"
                found.append({"aim": aim, "value": round(peer / ours, 3), "reached": peer / ours >= wanted})
        most = max(r["extra_bytes"] for r in here if r["way"] == "ours, triton")
        share = most / (2 * size[0] * size[2])
        aim = f"memory at D={size[1]}: at most a tenth of the bf16 logits"
        found.append({"aim": aim, "value": round(share, 4), "reached": share <= 0.1})
    return found


def name_of(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU, Triton's interpreter (a rehearsal)"


def versions() -> dict[str, str]:
    import triton

    found = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__}
    return found | ({"cuda": torch.version.cuda} if torch.version.cuda else {})


def main(argv=None) -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", help="write the report to this file, as JSON")
    options.add_argument("--tiles", action="store_true", help="also time other tiles (minutes of compiling)")
    options.add_argument("--rehearse", action="store_true", help="small, on the CPU (TRITON_INTERPRET=1)")
    chosen = options.parse_args(argv)
    if not chosen.rehearse and not torch.cuda.is_available():
        print("no CUDA card that torch can use; TRITON_INTERPRET=1 … --rehearse runs this small on the CPU")
        return 1
    device = "cpu" if chosen.rehearse else "cuda"
    sizes, repeats = (REHEARSAL, 1) if chosen.rehearse else (SIZES["cuda"], 10)
    report = gpu_check(sizes, device, repeats=repeats)
    if chosen.tiles:
        report["tiles"] = tile_sweep(sizes, device, repeats)
    if chosen.out:
        Path(chosen.out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["ok"] for row in report["correct"]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
