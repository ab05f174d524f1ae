"""The Triton kernels and what launches them, interpreted on the CPU where there is no GPU."""

from __future__ import annotations

import importlib.util
import mmap
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_logprob import both, close, drawn, exact, home, padded, shifted, transposed
from test_logprob_backward import gradients, incoming, off, true_gradients

from tangolite.logprob import autograd, choose_backend, linear_logprob

triton = pytest.importorskip("triton")
tl = triton.language

from tangolite.logprob import fused, kernels  # noqa: E402  (imports triton)

DEVICE = home("triton")


def head(hidden, weight, bias=None, softcap=None):
    return autograd.Head(hidden, weight, bias, 1.0, softcap)


# --- right ------------------------------------------------------------------------------------------------


SHAPES = {
    "one row, bulk": (1, 32, 129, True),
    "bulk": (7, 96, 300, True),
    "many rows, bulk": (37, 32, 129, True),
    "one row, pointers": (1, 33, 300, False),  # rows of an odd number of bytes
    "pointers": (7, 65, 129, False),
    "many rows, pointers": (37, 9, 33, False),
}
EXTRAS = {"plain": False, "bias, softcap, temperature": True}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("extras", EXTRAS)
def test_the_kernels_agree_with_float64(shape, dtype, extras):
    agree_with_float64(shape, dtype, extras)


@pytest.mark.parametrize("shape", ["bulk", "pointers"])
@pytest.mark.parametrize("extras", EXTRAS)
def test_the_kernels_agree_with_float64_in_bfloat16(shape, extras):
    # The interpreter multiplies no bfloat16: there, one side is widened before, the other after it is read.
    agree_with_float64(shape, torch.bfloat16, extras)


def agree_with_float64(shape, dtype, extras):
    rows, width, words, bulk = SHAPES[shape]
    *inputs, bias = drawn((rows,), width, words, dtype=dtype, size=3 / width**0.5, device=DEVICE)
    assert fused.describable(inputs[0]) == fused.describable(inputs[1]) == bulk
    options = {"bias": bias, "softcap": 4.0, "temperature": 0.7} if EXTRAS[extras] else {}
    most = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 5e-3}[dtype]
    wanted = exact(*inputs, **options)
    for entropy in (True, False):
        leaves = [x.detach().requires_grad_() for x in (*inputs[:2], bias)]
        offset = {"bias": leaves[2]} if EXTRAS[extras] else {}
        made = linear_logprob(
            *leaves[:2], inputs[2], **options | offset, return_entropy=entropy, backend="triton"
        )
        made, grads = made if entropy else (made,), incoming(inputs[2])[: 1 + entropy]
        close(made, wanted[: 1 + entropy])
        used = leaves[: 2 + EXTRAS[extras]]
        true = true_gradients(inputs, [*grads, None][:2], **options)
        for one, other in zip(torch.autograd.grad(made, used, grads), true, strict=True):
            assert one.dtype == dtype and off(one, other) <= most


@pytest.mark.parametrize("layouts", [(padded, padded), (transposed, shifted), (lambda x: x, transposed)])
def test_strided_inputs_are_read_by_pointers_and_give_the_same(layouts):
    hidden, weight, target, bias = drawn((7,), 32, 70, size=0.5, device=DEVICE)
    assert fused.tiles_for(head(hidden, weight), gradient=False)[1] == fused.interpreted()
    moved = [f(x) for f, x in zip(layouts, (hidden, weight), strict=True)]
    assert not fused.tiles_for(head(*moved), gradient=False)[1]
    close(
        both(*moved, target, bias=bias, backend="triton"),
        both(hidden, weight, target, bias=bias, backend="triton"),
    )


@pytest.mark.parametrize("low", [-200.0, -1e4])
@pytest.mark.parametrize("words", [129, 300])
@pytest.mark.parametrize("width", [32, 33], ids=["bulk", "pointers"])
def test_words_beyond_the_vocabulary_do_not_exist_however_low_the_others(low, words, width):
    # verl#2656, SkyRL#2141: padded words of logit 0, beside which all real ones vanished
    hidden, weight, target, _ = drawn((5,), width, words, size=0.3, device=DEVICE)
    bias = torch.full_like(weight[:, 0], low)
    made, plain = (both(hidden, weight, target, bias=b, backend="triton") for b in (bias, None))
    close(made, plain, 4e-3 if low == -1e4 else 1e-4)
    assert (made[0] < 0).all()
    grads = incoming(target)
    shift, none = (gradients((hidden, weight, target), grads, bias=b, backend="triton") for b in (bias, None))
    assert off(shift[0], none[0].double()) < 1e-2 and off(shift[1], none[1].double()) < 1e-2


@pytest.mark.parametrize("splits", [1, 2, 3, 4, 5, 6, 10])
@pytest.mark.parametrize("width", [32, 33], ids=["bulk", "pointers"])
def test_stripes_of_any_number_give_the_same(splits, width, monkeypatch):
    hidden, weight, target, bias = drawn((7,), width, 300, size=3 / width**0.5, device=DEVICE)
    options = {"bias": bias, "softcap": 6.0, "temperature": 0.7, "backend": "triton"}
    monkeypatch.setattr(fused, "split_count", lambda *_: 1)
    whole = both(hidden, weight, target, **options)
    monkeypatch.setattr(fused, "split_count", lambda *_: splits)
    close(both(hidden, weight, target, **options), whole, 2e-6)
    close(whole, exact(hidden, weight, target, **options))


@pytest.mark.parametrize(("rows", "width"), [(64, 300), (16, 256), (5, 96), (64, 33)])
def test_row_blocks_and_slices_give_the_same_gradients(rows, width, monkeypatch):
    *inputs, bias = drawn((20,), 16, 300, size=0.7, device=DEVICE)
    options = {"bias": bias, "softcap": 6.0, "backend": "triton"}
    whole = both(*inputs, **options), gradients(inputs, incoming(inputs[2]), **options)
    monkeypatch.setattr(autograd, "ROWS", rows)
    monkeypatch.setattr(autograd, "slice_width", lambda weight: width)
    close(both(*inputs, **options), whole[0], 2e-6)
    close(gradients(inputs, incoming(inputs[2]), **options), whole[1], 5e-6)


def test_a_float16_slice_of_the_gradient_is_rounded_once():
    # Equal rows add up without a further rounding: sums are float32, as those of the tensor cores.
    hidden, weight, target, _ = drawn((64,), 16, 33, dtype=torch.float16, size=0.5, device=DEVICE)
    hidden[:], target[:] = hidden[:1].clone(), target[:1].clone()
    grads = torch.ones(64, device=DEVICE), None
    made = gradients((hidden, weight, target), grads, backend="triton")
    true = true_gradients((hidden, weight, target), grads)
    assert all(off(one, other) <= 2 * 2**-11 for one, other in zip(made, true, strict=True))


@triton.jit
def tanh_of_a_row(x, out, B: tl.constexpr):
    place = tl.arange(0, B)
    tl.store(out + place, kernels.tanh(tl.load(x + place)))


def test_tanh_is_right_to_the_last_digits_of_float32():
    sizes = torch.logspace(-20, 2, 255, dtype=torch.float64)
    x = torch.cat([sizes, -sizes, torch.tensor([0.0, 1e30])]).float().to(DEVICE)
    out = torch.empty_like(x)
    tanh_of_a_row[(1,)](x, out, B=512)
    true = torch.tanh(x.double())
    assert ((out.double() - true).abs() <= 5e-6 * true.abs()).all()
    assert out[-2] == 0 and out[-1] == 1


@pytest.mark.parametrize("entropy", [False, True])
def test_entropy_is_compiled_in_only_when_asked_for(entropy, monkeypatch):
    # verl#2608, slime#2130
    seen = {}

    class Spy:
        def __init__(self, name):
            self.name, self.kernel = name, getattr(kernels, name)

        def __getitem__(self, grid):
            def launch(*arguments, **options):
                seen[self.name] = grid, options
                self.kernel[grid](*arguments, **options)

            return launch

    for name in ("statistics_kernel", "merge_kernel"):
        monkeypatch.setattr(kernels, name, Spy(name))
    hidden, weight, target, _ = drawn((37,), 16, 129, device=DEVICE)
    linear_logprob(hidden, weight, target, return_entropy=entropy, backend="triton")
    assert [options["ENTROPY"] for _, options in seen.values()] == [entropy] * 2
    grid, options = seen["statistics_kernel"]
    assert grid[0] == triton.cdiv(37, options["BM"])  # rows along x, where a grid may be long


def distant(rows: int, width: int, stride: int) -> torch.Tensor:
    """(rows, width) float16 numbers with rows so far apart that they need 64-bit offsets.

    The memory between them is asked for, but never touched: the system gives it none.  Offsets that wrap
    around at 32 bits would land on zeros, not outside.
    """
    reserve = 0x4000  # MAP_NORESERVE, which `mmap` does not name in every Python
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve
    memory = torch.frombuffer(mmap.mmap(-1, 2 * (2**32 + 2**20), flags=flags), dtype=torch.float16)
    return memory.as_strided((rows, width), (stride, 1), 2**31 + 1)


@pytest.mark.skipif(
    not fused.interpreted(), reason="on a GPU, memory that is not touched is taken all the same"
)
@pytest.mark.parametrize("far", ["hidden", "weight"])
def test_offsets_beyond_32_bits_are_counted_in_64(far, monkeypatch):
    # CCE#37, pytorch#85786: illegal memory access once V D or N V passes 2^31
    # The interpreter copies each storage back, here onto itself: eight gigabytes for nothing.
    monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *_: None)
    inputs = list(drawn((3,), 5, 3, dtype=torch.float16, device=DEVICE)[:3])
    near = both(*inputs, backend="triton"), gradients(inputs, incoming(inputs[2]), backend="triton")
    place = ("hidden", "weight").index(far)
    away = distant(3, 5, 2**30)
    away.copy_(inputs[place])
    assert away.stride(0) * 2 == 2**31 and away.abs().min() > 0
    inputs[place] = away
    assert all(map(torch.equal, both(*inputs, backend="triton"), near[0]))
    made = gradients(inputs, incoming(inputs[2]), backend="triton")
    assert all(map(torch.equal, made, near[1]))


# --- how they are launched --------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 300), st.integers(1, 1200), st.integers(1, 200))
def test_stripes_are_never_more_than_tiles_and_leave_the_fewest_processors_idle(rows, tiles, processors):
    def idle(splits):
        programs = rows * splits
        return (-programs % processors) / (programs + -programs % processors)  # of all turns

    chosen = fused.split_count(rows, tiles, processors)
    allowed = range(1, min(fused.MAX_SPLITS, tiles) + 1)
    assert chosen in allowed
    assert idle(chosen) <= min(map(idle, allowed)) + 0.0101  # to the nearest hundredth
    assert all(idle(fewer) > idle(chosen) for fewer in range(1, chosen))


@pytest.mark.parametrize(
    ("row_blocks", "tiles", "processors", "splits"),
    [(132, 594, 132, 1), (64, 594, 132, 2), (1, 594, 132, 16), (1, 3, 8, 3), (7, 1, 132, 1), (8, 594, 4, 1)],
)
def test_stripes_of_a_few_known_launches(row_blocks, tiles, processors, splits):
    assert fused.split_count(row_blocks, tiles, processors) == splits


def aligned(*shape, dtype=torch.float16):
    return torch.zeros(*shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize(
    ("matrix", "can"),
    [
        (aligned(5, 8), True),
        (aligned(5, 4, dtype=torch.float32), True),
        (aligned(9, 16)[::2], True),
        (aligned(9, 16)[1:], True),
        (aligned(5, 16)[:, 8:], True),
        (aligned(5, 16)[:, :9], True),  # the gap between rows is none of its business
        (aligned(5, 65), False),
        (aligned(5, 4), False),  # rows of 8 bytes
        (aligned(5, 16)[:, 1:9], False),  # starts at an odd address
        (aligned(8, 8).T, False),
        (aligned(5, 32)[:, ::2], False),
        (aligned(0, 8), False),
        (aligned(5, 0), False),
    ],
)
def test_the_copy_engine_reads_whole_rows_at_multiples_of_16_bytes(matrix, can):
    assert fused.describable(matrix) == can


@pytest.fixture
def card(monkeypatch):
    """Makes `fused` believe in a card: (major, minor, bytes of shared memory for a program)."""

    def install(major, minor, shared):
        properties = SimpleNamespace(
            major=major, minor=minor, shared_memory_per_block_optin=shared, multi_processor_count=132
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))
        monkeypatch.setattr(fused, "interpreted", lambda: False)

    return install


CARDS = {
    "A100": (8, 0, 166_912),
    "RTX 4090": (8, 9, 101_376),
    "H200": (9, 0, 232_448),
    "B200": (10, 0, 232_448),
    "RTX 5090": (12, 0, 101_376),
}


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("extras", [None, "bias", "softcap"])
def test_tiles_suit_the_card_and_the_type(name, dtype, gradient, extras, card):
    card(*CARDS[name])
    hidden, weight = aligned(64, 64, dtype=dtype), aligned(128, 64, dtype=dtype)
    many = head(
        hidden, weight, weight[:, 0] if extras == "bias" else None, 3.0 if extras == "softcap" else None
    )
    tiles, bulk = fused.tiles_for(many, gradient=gradient)
    assert bulk == (name in ("H200", "B200") and dtype != torch.float32)
    if dtype == torch.float32:
        assert tiles == fused.FULL_TILES
    elif not bulk:
        assert tiles == fused.HALF_TILES
    elif gradient:
        assert tiles == (fused.BULK_EXTRAS_TILES if extras else fused.BULK_GRADIENT_TILES)
    else:
        assert tiles == fused.BULK_TILES
    stages = tiles.num_stages * (tiles.BM + tiles.BN) * tiles.BK * dtype.itemsize
    assert stages <= CARDS[name][2]  # all that the pipeline may hold at once


def test_mixed_types_and_odd_rows_are_read_by_pointers(card):
    card(*CARDS["H200"])
    half, full, odd = aligned(64, 64), aligned(64, 64, dtype=torch.float32), aligned(64, 65)
    assert fused.tiles_for(head(half, full), gradient=False) == (fused.HALF_TILES, False)
    assert fused.tiles_for(head(full, half), gradient=False) == (fused.FULL_TILES, False)
    assert fused.tiles_for(head(odd, odd), gradient=True) == (fused.HALF_TILES, False)
    assert fused.operand(half, full) == torch.float32 and fused.operand(half, half) == torch.float16
    assert fused.operand(half.bfloat16(), half) == torch.float32
    assert fused.operand(half.bfloat16(), half.bfloat16()) == torch.bfloat16


def test_auto_leaves_cards_without_fast_kernels_to_the_chunked_backend(card):
    # Older than Ampere, triton uses no tensor cores, and the kernels for 16 bits spill kilobytes a thread.
    card(7, 5, 65_536)
    shape = lambda *s: SimpleNamespace(  # noqa: E731
        shape=s, numel=lambda: s[0] * s[1], dtype=torch.float16, is_cuda=True, device=torch.device("cuda")
    )
    assert choose_backend(shape(8192, 64), shape(151_936, 64)) == "chunked"


# --- what is refused --------------------------------------------------------------------------------------


def test_cpu_tensors_are_refused_unless_the_kernels_are_interpreted(monkeypatch):
    monkeypatch.setattr(fused, "interpreted", lambda: False)
    with pytest.raises(ValueError, match=r"needs CUDA tensors, got cpu.*chunked.*TRITON_INTERPRET=1"):
        linear_logprob(*drawn()[:3], backend="triton")


@pytest.mark.parametrize("which", [0, 1])
def test_float64_is_refused(which):
    inputs = list(drawn(device=DEVICE)[:3])
    inputs[which] = inputs[which].double()
    with pytest.raises(ValueError, match=r'float32: for float64 use "chunked" or "reference"'):
        linear_logprob(*inputs, backend="triton")


def test_without_triton_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'not installed: pip install triton, or backend="chunked"'):
        linear_logprob(*drawn(device=DEVICE)[:3], backend="triton")
