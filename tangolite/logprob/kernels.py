"""The Triton kernels: a tile of logits lives in registers, in float32, and only sums over it are written.

Two tiles of the inputs, BM rows and BN words wide and BK of the hidden size deep, meet in the tensor cores
until a BM x BN tile of logits is complete.  BULK says that `hidden` and `weight` are tensor descriptors,
which the copy engine of Hopper and later reads in bulk; otherwise they are pointers with strides.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1e30)  # stands for -inf, of which a difference would be NaN


@triton.jit
def tanh(x):
    """tanh in float32: the exponential form loses the digits of small arguments, which a series keeps."""
    square = x * x
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315))))
    return tl.where(square < 0.01, series, 2 * tl.sigmoid(2 * x) - 1)


@triton.jit
def load_rows(x, first, k, rows, depth, row_stride, stride, B: tl.constexpr, BK: tl.constexpr):
    """A (B, BK) tile of a strided matrix, zeros beyond its edges; 64-bit offsets, as V D may exceed 2^31."""
    i, j = first + tl.arange(0, B), k + tl.arange(0, BK)
    place = i.to(tl.int64)[:, None] * row_stride + j[None, :] * stride
    return tl.load(x + place, mask=(i < rows)[:, None] & (j < depth)[None, :], other=0.0)


@triton.jit
def logits_tile(
    hidden, weight, bias, row, word, N, V, D, h_row, h_col, w_row, w_col, scale, softcap,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BULK: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """(BM, BN) logits from row `row` and word `word` on: bias, softcap, scale, in float32."""
    z = tl.zeros((BM, BN), tl.float32)
    for k in range(0, D, BK):
        if BULK:
            h = hidden.load([row, k])
            w = weight.load([word, k])
        else:
            h = load_rows(hidden, row, k, N, D, h_row, h_col, BM, BK)
            w = load_rows(weight, word, k, V, D, w_row, w_col, BN, BK).to(h.dtype)
        z = tl.dot(h, w.T, z, input_precision="ieee")
    words = word + tl.arange(0, BN)
    if bias is not None:
        z += tl.load(bias + words, mask=words < V, other=0.0).to(tl.float32)[None, :]
    if CAPPED:
        z = softcap * tanh(z / softcap)
    z *= scale
    # Words beyond the vocabulary do not exist, however low the others are; a bias of -inf forbids one.
    return tl.where((words >= V)[None, :] | (z < LOWEST), LOWEST, z)


@triton.jit
def statistics_kernel(
    hidden, weight, bias, maximum, total, moment, N, V, D, h_row, h_col, w_row, w_col, scale, softcap,
    per_split,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BULK: tl.constexpr, CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
):  # fmt: skip
    """m = max z, s = sum e^(z-m), e = sum e^(z-m) (z-m) of BM rows over one stripe of the vocabulary.

    Row blocks are the fast axis of the grid, so that all of them read one stripe of the weight together.
    """
    row, split = tl.program_id(0) * BM, tl.program_id(1)
    m = tl.full((BM,), LOWEST, tl.float32)
    s = tl.zeros((BM,), tl.float32)
    e = tl.zeros((BM,), tl.float32)
    for tile in range(split * per_split, min((split + 1) * per_split, tl.cdiv(V, BN))):
        z = logits_tile(
            hidden, weight, bias, row, tile * BN, N, V, D, h_row, h_col, w_row, w_col, scale, softcap,
            BM, BN, BK, BULK, CAPPED,
        )  # fmt: skip
        top = tl.maximum(m, tl.max(z, 1))
        fade = tl.exp(m - top)
        z -= top[:, None]
        p = tl.exp(z)
        if ENTROPY:
            e = fade * (e + (m - top) * s) + tl.sum(p * z, 1)
        s = fade * s + tl.sum(p, 1)
        m = top
    rows = row + tl.arange(0, BM)
    place = split * N + rows
    tl.store(maximum + place, m, mask=rows < N)
    tl.store(total + place, s, mask=rows < N)
    if ENTROPY:
        tl.store(moment + place, e, mask=rows < N)


@triton.jit
def merge_kernel(
    hidden, weight, bias, target, maximum, total, moment, logp, entropy, log_sum, N, D,
    h_row, h_col, w_row, w_col, scale, softcap, splits,
    BM: tl.constexpr, BK: tl.constexpr, CAPPED: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Joins the stripes of BM rows, and takes the logit of each row's target by a product of its own."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    live = rows < N
    m = tl.full((BM,), LOWEST, tl.float32)
    s = tl.zeros((BM,), tl.float32)
    e = tl.zeros((BM,), tl.float32)
    for split in range(splits):
        place = split * N + rows
        m_new = tl.load(maximum + place, mask=live, other=LOWEST)
        s_new = tl.load(total + place, mask=live, other=1.0)
        top = tl.maximum(m, m_new)
        if ENTROPY:
            e_new = tl.load(moment + place, mask=live, other=0.0)
            e = tl.exp(m - top) * (e + (m - top) * s) + tl.exp(m_new - top) * (e_new + (m_new - top) * s_new)
        s = tl.exp(m - top) * s + tl.exp(m_new - top) * s_new
        m = top

    words = tl.load(target + rows, mask=live, other=0)
    z = tl.zeros((BM,), tl.float32)
    for k in range(0, D, BK):
        j = k + tl.arange(0, BK)
        inside = live[:, None] & (j < D)[None, :]
        h = tl.load(hidden + rows.to(tl.int64)[:, None] * h_row + j[None, :] * h_col, mask=inside, other=0.0)
        w = tl.load(weight + words[:, None] * w_row + j[None, :] * w_col, mask=inside, other=0.0)
        z += tl.sum(h.to(tl.float32) * w.to(tl.float32), 1)
    if bias is not None:
        z += tl.load(bias + words, mask=live, other=0.0).to(tl.float32)
    if CAPPED:
        z = softcap * tanh(z / softcap)
    z *= scale
    ls = tl.log(s)
    value = (tl.where(z < LOWEST, LOWEST, z) - m) - ls
    value = tl.where(value > 0, 0.0, value)  # summed in another order than m, z may come out a digit above it
    tl.store(logp + rows, value, mask=live)
    tl.store(log_sum + rows, ls, mask=live)
    tl.store(maximum + rows, m, mask=live)
    if ENTROPY:
        tl.store(entropy + rows, ls - e / s, mask=live)


@triton.jit
def gradient_kernel(
    hidden, weight, bias, target, maximum, log_sum, at_target, constant, linear, out, N, V, D, first, last,
    h_row, h_col, w_row, w_col, scale, softcap,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BULK: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Words first … last of d loss / d logits, -p (constant + linear log p), written tile by tile."""
    row, word = tl.program_id(0) * BM, first + tl.program_id(1) * BN
    z = logits_tile(
        hidden, weight, bias, row, word, N, V, D, h_row, h_col, w_row, w_col, scale, softcap,
        BM, BN, BK, BULK, CAPPED,
    )  # fmt: skip
    rows, words = row + tl.arange(0, BM), word + tl.arange(0, BN)
    live = rows < N
    m = tl.load(maximum + rows, mask=live, other=0.0)
    ls = tl.load(log_sum + rows, mask=live, other=0.0)
    logp = (z - m[:, None]) - ls[:, None]
    factor = tl.load(constant + rows, mask=live, other=0.0)[:, None]
    if linear is not None:
        factor += tl.load(linear + rows, mask=live, other=0.0)[:, None] * logp
    chosen = tl.load(target + rows, mask=live, other=-1)[:, None] == words[None, :]
    dz = tl.where(chosen, tl.load(at_target + rows, mask=live, other=0.0)[:, None], -tl.exp(logp) * factor)
    if CAPPED:
        slope = tl.where((words < V)[None, :], z / (softcap * scale), 0.0)  # tanh of the uncapped logit
        dz *= 1 - slope * slope
    place = rows.to(tl.int64)[:, None] * (last - first) + (words - first)[None, :]
    tl.store(out + place, dz.to(out.dtype.element_ty), mask=live[:, None] & (words < last)[None, :])
