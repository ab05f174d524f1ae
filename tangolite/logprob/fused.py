"""Launches the Triton kernels: which tiles, how many stripes of the vocabulary, and bulk copies or not."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor
from triton import cdiv
from triton.tools.tensor_descriptor import TensorDescriptor

from tangolite.logprob import kernels
from tangolite.logprob.autograd import HALF, Head, RowTerms, RowValues


class Tiles(NamedTuple):
    """Rows, words and depth of a tile; warps, pipeline stages and most registers a thread of a program."""

    BM: int
    BN: int
    BK: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


# Chosen so that no register spills on any of the cards of `python -m tangolite.lab.kernel_report`.
BULK_TILES = Tiles(128, 256, 64, 8, 3)  # 16-bit inputs through the copy engine of Hopper and later
BULK_GRADIENT_TILES = Tiles(256, 128, 64, 8, 3)
BULK_EXTRAS_TILES = Tiles(
    128, 128, 64, 8, 4
)  # the gradient with a bias or a softcap, which needs more registers
HALF_TILES = Tiles(128, 128, 64, 8, 3, 255)  # 16-bit inputs by pointers: any card, any layout
FULL_TILES = Tiles(64, 64, 32, 8, 2)  # float32, multiplied exactly rather than as TF32
SMALL_TILES = Tiles(16, 32, 32, 4, 1)  # for the interpreter, where tests are small
MERGE_ROWS, MERGE_DEPTH = 16, 128
MAX_SPLITS = 16
ROOM = 160 * 1024  # bytes of shared memory that the bulk tiles need: small Blackwell cards have less


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter: TRITON_INTERPRET was 1 when they were imported."""
    return not isinstance(kernels.statistics_kernel, triton.runtime.jit.JITFunction)


def operand(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """What the matrix products multiply: the type of both, or the wider of two."""
    common = torch.promote_types(hidden.dtype, weight.dtype)
    # The interpreter multiplies the bits of bfloat16 as if they were integers (triton 3.7).
    return torch.float32 if interpreted() and common == torch.bfloat16 else common


def buffer_dtype(head: Head) -> torch.dtype:
    """Of a slice of the logits' gradient: rounded once, to what the products take."""
    return head.hidden.dtype


def statistics(head: Head, target: Int[Tensor, " N"], entropy: bool, width: int) -> RowValues:
    """One pass over the vocabulary in as many stripes as fill the card; a second kernel joins them."""
    (n, depth), words = head.hidden.shape, head.weight.shape[0]
    logp, uncertainty, log_sum = head.hidden.new_empty((3, n), dtype=torch.float32)
    if not entropy:
        uncertainty = uncertainty[:0]
    if n == 0:
        return RowValues(logp, uncertainty, logp.clone(), log_sum)
    tiles, bulk = tiles_for(head, gradient=False)
    row_blocks, word_tiles = cdiv(n, tiles.BM), cdiv(words, tiles.BN)
    per_split = cdiv(word_tiles, split_count(row_blocks, word_tiles, processors(head.hidden.device)))
    splits = cdiv(word_tiles, per_split)  # no stripe without words
    partial = head.hidden.new_empty((3 if entropy else 2, splits, n), dtype=torch.float32)
    sums = (partial[0], partial[1], partial[-1])
    options = {"CAPPED": head.softcap is not None, "ENTROPY": entropy}
    kernels.statistics_kernel[(row_blocks, splits)](
        *operands(head, tiles, bulk), head.bias, *sums, n, words, depth, *strides(head), head.scale,
        head.softcap or 1.0, per_split, **tiles._asdict(), **options, BULK=bulk,
    )  # fmt: skip
    kernels.merge_kernel[(cdiv(n, MERGE_ROWS),)](
        head.hidden, head.weight, head.bias, target, *sums, logp, uncertainty, log_sum, n, depth,
        *strides(head), head.scale, head.softcap or 1.0, splits, BM=MERGE_ROWS, BK=MERGE_DEPTH, **options,
    )  # fmt: skip
    return RowValues(logp, uncertainty, partial[0, 0], log_sum)


def logit_gradient(
    head: Head, target: Int[Tensor, " N"], rows: RowTerms, start: int, stop: int, buffer: Tensor
) -> Float[Tensor, "N W"]:
    """d loss / d (hidden weight' + bias) of the slice, in the buffer."""
    n, width = len(target), stop - start
    tiles, bulk = tiles_for(head, gradient=True)
    out = buffer[: n * width].view(n, width)
    if n:
        kernels.gradient_kernel[(cdiv(n, tiles.BM), cdiv(width, tiles.BN))](
            *operands(head, tiles, bulk), head.bias, target, rows.maximum, rows.log_sum, rows.at_target,
            rows.constant, rows.linear, out, n, head.weight.shape[0], head.hidden.shape[1], start, stop,
            *strides(head), head.scale, head.softcap or 1.0, **tiles._asdict(), BULK=bulk,
            CAPPED=head.softcap is not None,
        )  # fmt: skip
    return out


def tiles_for(head: Head, *, gradient: bool) -> tuple[Tiles, bool]:
    """The tiles for these inputs on this card, and whether they are read through tensor descriptors."""
    hidden, weight = head.hidden, head.weight
    bulk = hidden.dtype == weight.dtype and describable(hidden) and describable(weight)
    if interpreted():
        return SMALL_TILES, bulk
    if hidden.dtype not in HALF:
        return FULL_TILES, False
    card = torch.cuda.get_device_properties(hidden.device)
    if bulk and card.major >= 9 and card.shared_memory_per_block_optin >= ROOM:
        return bulk_tiles(gradient, head.bias is not None or head.softcap is not None), True
    return HALF_TILES, False


def bulk_tiles(gradient: bool, extras: bool) -> Tiles:
    """For the copy engine; ``extras`` are a bias or a softcap."""
    if not gradient:
        return BULK_TILES
    return BULK_EXTRAS_TILES if extras else BULK_GRADIENT_TILES


def describable(x: Tensor) -> bool:
    """Whether the copy engine can read it: rows without gaps inside, each on an address divisible by 16."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1] and aligned and x.numel() > 0


def operands(head: Head, tiles: Tiles, bulk: bool):
    """Hidden and weight as the kernels take them."""
    if not bulk:
        return head.hidden, head.weight
    return (
        TensorDescriptor.from_tensor(head.hidden, [tiles.BM, tiles.BK]),
        TensorDescriptor.from_tensor(head.weight, [tiles.BN, tiles.BK]),
    )


def strides(head: Head) -> tuple[int, int, int, int]:
    return (*head.hidden.stride(), *head.weight.stride())


def split_count(row_blocks: int, word_tiles: int, processors: int) -> int:
    """Stripes of the vocabulary that leave the fewest processors idle in the last wave; the fewest such."""

    def busy(splits: int) -> float:
        programs = row_blocks * splits
        return programs / (-(-programs // processors) * processors)

    return max(range(1, min(MAX_SPLITS, word_tiles) + 1), key=lambda s: (round(busy(s), 2), -s))


def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
