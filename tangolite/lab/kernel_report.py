"""What the Triton kernels become on cards that need not be here: `python -m tangolite.lab.kernel_report`.

Compiles every kernel ahead of time for Ampere, Hopper and Blackwell, with the tiles that `fused` chooses
there, and reads registers a thread, spilled bytes, shared memory and the decisive instructions of each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tangolite.logprob import fused, kernels

CARDS = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
# The instructions that feed and drive the tensor cores of each generation, in PTX.
TENSOR_CORE = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma"}
BULK_COPY = "cp.async.bulk.tensor"
KERNELS = ("statistics_kernel", "merge_kernel", "gradient_kernel")
VARIANTS = ((True, False), (False, False), (True, True), (False, True))  # entropy, extras


class Compiled(NamedTuple):
    """One kernel on one card; memory in bytes, registers per thread."""

    kernel: str
    card: str
    dtype: str
    bulk: bool
    entropy: bool
    extras: bool  # bias and softcap
    registers: int
    spilled: int
    shared: int
    tensor_core: bool
    bulk_copy: bool


def report(cards=tuple(CARDS), *, every: bool = False) -> list[Compiled]:
    """What runs there for bfloat16; ``every``: also other types, pointers, and a bias with a softcap."""
    made = []
    for card in cards:
        bulk = CARDS[card] >= 90
        ways = {("bf16", bulk)} | ({("bf16", False), ("fp16", bulk), ("fp32", False)} if every else set())
        for dtype, copies in sorted(ways):
            for entropy, extras in VARIANTS if every else VARIANTS[:2]:
                for name in KERNELS:
                    made.append(compile_one(name, card, dtype, copies, entropy=entropy, extras=extras))
    return made


def compile_one(
    name: str,
    card: str,
    dtype: str,
    bulk: bool,
    *,
    entropy: bool = True,
    extras: bool = False,
    tiles: fused.Tiles | None = None,
) -> Compiled:
    """Machine code of one kernel for one card."""
    chosen = fused.bulk_tiles(name == "gradient_kernel", extras) if bulk else fused.HALF_TILES
    tiles = tiles or (fused.FULL_TILES if dtype == "fp32" else chosen)
    source = source_of(getattr(kernels, name), dtype, bulk, entropy, extras, tiles)
    options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages, "maxnreg": tiles.maxnreg}
    code = triton.compile(source, target=GPUTarget("cuda", CARDS[card], 32), options=options)
    registers, spilled = usage(code.asm["cubin"])
    ptx = code.asm["ptx"]
    return Compiled(
        name, card, dtype, bulk, entropy, extras, registers, spilled, code.metadata.shared,
        TENSOR_CORE[card] in ptx, BULK_COPY in ptx,
    )  # fmt: skip


def source_of(kernel, dtype: str, bulk: bool, entropy: bool, extras: bool, tiles: fused.Tiles) -> ASTSource:
    """The kernel with the types of its arguments, as a launch with aligned tensors would specialise it."""
    names = [parameter.name for parameter in kernel.params]
    merging = kernel.fn.__name__ == "merge_kernel"
    values = {
        "BM": tiles.BM,
        "BN": tiles.BN,
        "BK": tiles.BK,
        "BULK": bulk,
        "CAPPED": extras,
        "ENTROPY": entropy,
    }
    if merging:
        values |= {"BM": fused.MERGE_ROWS, "BK": fused.MERGE_DEPTH}
    values |= (
        {"h_col": 1, "w_col": 1} | ({} if entropy else {"linear": None}) | ({} if extras else {"bias": None})
    )
    described = bulk and not merging
    types = {
        "hidden": f"tensordesc<{dtype}[{tiles.BM},{tiles.BK}]>" if described else f"*{dtype}",
        "weight": f"tensordesc<{dtype}[{tiles.BN},{tiles.BK}]>" if described else f"*{dtype}",
        "out": f"*{dtype}", "target": "*i64", "scale": "fp32", "softcap": "fp32",
    }  # fmt: skip
    types |= dict.fromkeys(("N", "V", "D", "first", "last", "per_split", "splits", "h_row", "w_row"), "i32")
    constexprs = {(names.index(name),): value for name, value in values.items() if name in names}
    signature = {name: "constexpr" if name in values else types.get(name, "*fp32") for name in names}
    aligned = ("D", "h_row", "w_row", "first")
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name].startswith("*") or (name in aligned and name in names)
    }
    return ASTSource(kernel, signature, constexprs, divisible)


def usage(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes it spills to its stack), as the toolkit's own reader says."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        text = subprocess.run(
            [tool, "-res-usage", file], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return int(registers), int(stack)


def word(flag: bool) -> str:
    return "yes" if flag else "no"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--every", action="store_true", help="also fp16, fp32, pointers, bias and softcap")
    options.add_argument("--json", help="write the rows to this file")
    chosen = options.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("unset TRITON_INTERPRET: interpreted kernels have no machine code")
        return 1
    rows = report(every=chosen.every)
    heads = (
        "kernel",
        "card",
        "type",
        "copies",
        "entropy",
        "extras",
        "registers",
        "spilled",
        "shared",
        "cores",
    )
    widths = (18, 7, 5, 9, 8, 7, 10, 8, 8, 7)
    print(*(head.ljust(width) for head, width in zip(heads, widths, strict=True)))
    for row in rows:
        words = ("bulk" if row.bulk_copy else "pointers", *(word(x) for x in (row.entropy, row.extras)))
        cells = (row.kernel, row.card, row.dtype, *words, row.registers, row.spilled, row.shared)
        cells += ("tensor" if row.tensor_core else "plain",)
        print(*(str(cell).ljust(width) for cell, width in zip(cells, widths, strict=True)))
    if chosen.json:
        Path(chosen.json).write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
