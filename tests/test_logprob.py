"""`linear_logprob` forward, every backend: against float64, at the edges, and what it must refuse.

Comments such as "verl#2656" name the public bug of another project that a test would have caught.
"""

from __future__ import annotations

import importlib.util
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tangolite.logprob import SMALL, autograd, choose_backend, linear_logprob, reference

NO_TRITON = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
TRITON = pytest.param("triton", marks=NO_TRITON)
BACKENDS = pytest.mark.parametrize("backend", ["reference", "chunked", TRITON])
SLICED = pytest.mark.parametrize("backend", ["chunked", TRITON])  # those that never hold all logits
NAN, INF = float("nan"), float("inf")


def home(backend: str) -> str:
    """Where a backend's tensors are: without a GPU, the kernels run interpreted on the CPU."""
    return "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"


def drawn(shape=(3, 5), width=8, vocabulary=11, seed=0, dtype=torch.float32, size=2.0, device="cpu"):
    """(hidden, weight, target, bias) with logits a few units apart."""
    draw = torch.Generator().manual_seed(seed)
    numbers = lambda *n: torch.randn(*n, generator=draw, dtype=torch.float64)  # noqa: E731
    target = torch.randint(vocabulary, shape, generator=draw).to(device)
    tensors = size * numbers(*shape, width), numbers(vocabulary, width), numbers(vocabulary)
    hidden, weight, bias = (x.to(device, dtype) for x in tensors)
    return hidden, weight, target, bias


def exact(hidden, weight, target, *, temperature=1.0, bias=None, softcap=None, mask=None, **_):
    """(logp, entropy) in float64 from all logits; differentiable."""
    logits = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logp = torch.log_softmax(logits / temperature if temperature else logits, -1)
    chosen = logp.gather(-1, target.clamp(0, len(weight) - 1)[..., None])[..., 0]
    entropy = -(logp.exp() * logp.clamp(min=-1e300)).sum(-1)
    return (chosen, entropy) if mask is None else (chosen * mask, entropy * mask)


def naive(hidden, weight, target, *, temperature=1.0, bias=None, softcap=None):
    """The definition in float64, row by row, without a thought for stability."""
    logp, entropy = [], []
    for state, token in zip(hidden.double().reshape(-1, hidden.shape[-1]), target.reshape(-1), strict=True):
        logits = weight.double() @ state + (0 if bias is None else bias.double())
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        logits = logits / temperature if temperature else logits
        p = logits.exp() / logits.exp().sum()
        logp.append(p[token].log())
        entropy.append(-(p * p.log()).sum())
    return torch.stack(logp).reshape(target.shape), torch.stack(entropy).reshape(target.shape)


def both(*inputs, backend, **options):
    return linear_logprob(*inputs, backend=backend, return_entropy=True, **options)


def close(made, wanted, digits=1e-5):
    """Within 1e-5, absolute plus relative, whatever the types."""
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), atol=digits, rtol=digits)


# --- the definition ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "reference", "chunked", TRITON])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0, 0.0])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"bias": True}, {"bias": True, "softcap": 3.0}])
def test_logp_and_entropy_equal_the_definition_in_float64(backend, temperature, options):
    # slime#557: temperature missing; RL-Kernel#81: applied twice; OpenRLHF#1319: entropy without it
    hidden, weight, target, bias = drawn(device=home(backend))
    options = options | {"temperature": temperature} | ({"bias": bias} if "bias" in options else {})
    results = both(hidden, weight, target, backend=backend, **options)
    close(results, naive(hidden, weight, target, **options))
    close(exact(hidden, weight, target, **options), naive(hidden, weight, target, **options), 1e-12)
    assert torch.equal(linear_logprob(hidden, weight, target, backend=backend, **options), results[0])


@BACKENDS
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 2, 3), (0,), (2, 0)])
def test_any_leading_shape_goes_in_and_comes_out(backend, shape):
    hidden, weight, target, _ = drawn(shape, device=home(backend))
    logp, entropy = both(hidden, weight, target, backend=backend)
    assert logp.shape == entropy.shape == shape
    if target.numel():
        close((logp, entropy), naive(hidden, weight, target))
        mask = torch.ones_like(target, dtype=torch.bool)
        assert torch.equal(linear_logprob(hidden, weight, target, mask=mask, backend=backend), logp)


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@BACKENDS
@pytest.mark.parametrize("of_weight", FLOATS, ids=str)
@pytest.mark.parametrize("of_hidden", FLOATS, ids=str)
def test_logits_are_float32_or_better_whatever_goes_in(backend, of_hidden, of_weight):
    hidden, weight, target, bias = drawn(device=home(backend))
    hidden, weight, bias = hidden.to(of_hidden), weight.to(of_weight), bias.to(of_weight)
    wide = torch.float64 in (of_hidden, of_weight)
    if wide and backend == "triton":
        with pytest.raises(ValueError, match="float32: for float64 use"):
            linear_logprob(hidden, weight, target, backend=backend)
        return
    logp, entropy = both(hidden, weight, target, bias=bias, backend=backend)
    assert logp.dtype == entropy.dtype == (torch.float64 if wide else torch.float32)
    close((logp, entropy), exact(hidden, weight, target, bias=bias), 1e-10 if wide else 1e-5)


@BACKENDS
@pytest.mark.parametrize("which", ["hidden", "weight", "both", "neither"])
def test_autocast_does_not_round_the_logits(backend, which):
    hidden, weight, target, _ = drawn((4, 6), 32, 50, size=1.0, device=home(backend))
    hidden = hidden.bfloat16() if which in ("hidden", "both") else hidden
    weight = weight.bfloat16() if which in ("weight", "both") else weight
    plain = both(hidden, weight, target, backend=backend)
    with torch.autocast(home(backend), dtype=torch.bfloat16):
        inside = both(hidden, weight, target, backend=backend)
    assert all(map(torch.equal, inside, plain))
    close(inside, exact(hidden, weight, target))


def bf16_logits(hidden, weight, target):
    """What most trainers compute: logits rounded to bfloat16, then a softmax in float32."""
    logp = torch.log_softmax((hidden.float() @ weight.float().T).bfloat16().float(), -1)
    return logp.gather(-1, target[..., None])[..., 0], -(logp.exp() * logp).sum(-1)


def worst(made, wanted) -> float:
    return (made.double() - wanted).abs().max().item()


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_keep_the_digits_that_bfloat16_logits_lose(backend, dtype):
    hidden, weight, target, _ = drawn((24,), 96, 200, dtype=dtype, size=0.4, device=home(backend))
    wanted, rounded = exact(hidden, weight, target), bf16_logits(hidden, weight, target)
    for made, true, usual in zip(both(hidden, weight, target, backend=backend), wanted, rounded, strict=True):
        torch.testing.assert_close(
            made.double(), true, atol=1e-5 if dtype == torch.float32 else 1e-4, rtol=1e-5
        )
        assert worst(made, true) <= worst(usual, true) / 10
        assert worst(usual, true) > 1e-3  # so that the line above says something


@BACKENDS
def test_the_temperature_belongs_to_the_log_prob(backend):
    logits, eye = torch.tensor([[2.0, 1.0, 0.0]], device=home(backend)), torch.eye(3, device=home(backend))
    first = torch.tensor([0], device=home(backend))
    logp = lambda t: linear_logprob(logits, eye, first, temperature=t, backend=backend).item()  # noqa: E731
    assert logp(0.5) == pytest.approx(4 - math.log(math.exp(4) + math.exp(2) + 1), abs=1e-6)
    assert logp(0.5) == pytest.approx(-0.14293, abs=1e-5)
    assert logp(1.0) == pytest.approx(-0.40761, abs=1e-5)
    assert logp(0.0) == logp(1.0)  # greedy: nothing is divided


@BACKENDS
def test_a_softcap_bounds_the_logits_before_the_temperature(backend):
    # unsloth-zoo#593, TRL#5691: 124 under a cap of 30 is 29.98, and the temperature divides that
    where = home(backend)
    hidden, second = (
        torch.tensor([[124.0, 0.0], [1e6, 0.0]], device=where),
        torch.tensor([1, 1], device=where),
    )
    capped = linear_logprob(
        hidden, torch.eye(2, device=where), second, softcap=30.0, temperature=0.5, backend=backend
    )
    assert capped.tolist() == pytest.approx([-2 * 30 * math.tanh(124 / 30), -60.0], abs=1e-5)
    assert 30 * math.tanh(124 / 30) == pytest.approx(29.98, abs=0.01)


@BACKENDS
@pytest.mark.parametrize("what", ["int32 targets", "a mask of integers"])
def test_other_integer_types_mean_the_same(backend, what):
    hidden, weight, target, _ = drawn(device=home(backend))
    mask = target % 2 == 0
    wanted = both(hidden, weight, target, mask=mask, backend=backend)
    target, mask = (target.int(), mask) if "int32" in what else (target, mask.long())
    assert all(map(torch.equal, both(hidden, weight, target, mask=mask, backend=backend), wanted))


@BACKENDS
def test_inference_mode_gives_the_same(backend):
    hidden, weight, target, bias = drawn(device=home(backend))
    with torch.inference_mode():
        inside = both(hidden, weight, target, bias=bias, backend=backend)
    assert all(map(torch.equal, inside, both(hidden, weight, target, bias=bias, backend=backend)))


# --- logits far from zero ---------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("value", [-20.0, -200.0, -1e4, 200.0, 0.0])
@pytest.mark.parametrize("vocabulary", [129, 1, 128])
def test_equal_logits_give_the_uniform_distribution_however_low_they_are(backend, value, vocabulary):
    # verl#2656, verl#2899: a vocabulary that is no multiple of the tile had phantom words of logit 0;
    # SkyRL#2141: a maximum that starts at 0
    where = home(backend)
    hidden, weight = torch.full((3, 2), value / 2, device=where), torch.ones(vocabulary, 2, device=where)
    target = torch.tensor([0, vocabulary // 2, vocabulary - 1], device=where)
    logp, entropy = both(hidden, weight, target, backend=backend)
    assert logp.tolist() == pytest.approx([-math.log(vocabulary)] * 3, abs=1e-5)
    assert entropy.tolist() == pytest.approx([math.log(vocabulary)] * 3, abs=1e-5)
    assert (logp <= 0).all()


@BACKENDS
def test_the_log_prob_of_a_certain_token_is_never_above_zero(backend):
    # verl#2656: up to +124.  In the kernels, the target's logit is summed apart, in another order.
    hidden, target = drawn((40,), 96, device=home(backend))[0], torch.arange(40, device=home(backend))
    logp, entropy = both(hidden, 3 * hidden, target, backend=backend)
    assert (logp <= 0).all() and logp.min() > -2e-3 and entropy.abs().max() < 2e-3


@BACKENDS
def test_very_low_logits_differ_among_themselves_as_logits_near_zero_do(backend):
    hidden, weight, target, bias = drawn((6,), vocabulary=70, device=home(backend))
    low = both(hidden, weight, target, bias=bias - 256.0, backend=backend)
    close(low, exact(hidden, weight, target, bias=bias), 1e-3)
    assert (low[0] < 0).all()


@BACKENDS
@pytest.mark.parametrize("offset", [1e4, -1e4])
@pytest.mark.parametrize("through", ["bias", "a constant column"])
def test_a_common_offset_costs_two_of_its_last_digits_at_most(backend, offset, through):
    # mlx#4188, pytorch#195829: log-probs of exactly 0 or -inf from z_t - logsumexp(z)
    hidden, weight, target, _ = drawn((6,), vocabulary=40, device=home(backend))
    plain = both(hidden, weight, target, backend=backend)
    options = {}
    if through == "bias":
        options = {"bias": torch.full_like(weight[:, 0], offset)}
    else:
        hidden = torch.cat([hidden, torch.ones_like(hidden[:, :1])], 1)
        weight = torch.cat([weight, torch.full_like(weight[:, :1], offset)], 1)
    logp, entropy = both(hidden, weight, target, backend=backend, **options)
    ulp = 2.0**-10  # of a float32 near 1e4
    assert worst(logp, plain[0]) <= 2 * ulp and worst(entropy, plain[1]) <= 2 * ulp
    assert (logp < 0).all() and (entropy > 0).all()


@SLICED
@pytest.mark.parametrize("offset", [4096.0, -4096.0, 2.0**20])
def test_an_offset_that_rounds_no_logit_changes_no_bit(backend, offset):
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randint(-32, 32, (5, 40), generator=draw).div(8).to(home(backend))
    eye, target = torch.eye(40, device=home(backend)), torch.arange(5, device=home(backend))
    plain = both(hidden, eye, target, backend=backend)
    moved = both(hidden, eye, target, backend=backend, bias=torch.full_like(eye[0], offset))
    assert all(map(torch.equal, moved, plain))


@BACKENDS
def test_huge_logits_neither_overflow_nor_lose_their_gradient(backend):
    where = home(backend)
    hidden = torch.tensor([[1e4, -1e4], [-1e4, 1e4]], device=where, requires_grad=True)
    logp, entropy = both(
        hidden, torch.eye(2, device=where), torch.tensor([0, 0], device=where), backend=backend
    )
    assert logp.tolist() == [0.0, -2e4] and entropy.tolist() == [0.0, 0.0]
    (logp + entropy).sum().backward()
    assert torch.allclose(hidden.grad.cpu(), torch.tensor([[0.0, 0.0], [1.0, -1.0]]))


@BACKENDS
@pytest.mark.parametrize("low", [-1e4, -INF])
def test_a_word_of_probability_zero_gives_finite_entropy_and_gradients(backend, low):
    # VeOmni#720: p (log p + H) is 0 times -inf
    hidden, weight, target, bias = drawn(device=home(backend))
    bias[3] = low
    target = target.masked_fill(target == 3, 0)
    wanted = exact(hidden, weight, target, bias=bias)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    results = both(hidden, weight, target, bias=bias, backend=backend)
    close(results, wanted)
    gradients = torch.autograd.grad(sum(x.sum() for x in results), leaves)
    assert all(x.isfinite().all() for x in gradients)
    assert not gradients[1][3].any() and gradients[2][3] == 0


@BACKENDS
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_row_that_is_not_finite_stays_alone(backend, bad):
    hidden, weight, target, _ = drawn((7,), device=home(backend))
    plain = both(hidden, weight, target, backend=backend)
    hidden[2, 1] = bad
    others = torch.arange(7, device=hidden.device) != 2
    for made, wanted in zip(both(hidden, weight, target, backend=backend), plain, strict=True):
        assert torch.equal(made[others], wanted[others]) and made[2].isnan()


# --- rows outside the mask --------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("garbage", [NAN, INF, 1e30])
def test_masked_rows_are_never_read_and_get_no_gradient(backend, garbage):
    # CCE#59, flash-attn#714: sentinel targets such as -100 met a padded word or other memory
    hidden, weight, target, bias = drawn(device=home(backend))
    mask = (torch.rand(target.shape, generator=torch.Generator().manual_seed(1)) < 0.6).to(target.device)
    assert mask.any() and not mask.all()
    results = []
    for dirty in (False, True):
        h, w, b = hidden.clone(), weight.clone().requires_grad_(), bias.clone().requires_grad_()
        t = target.clone()
        if dirty:
            h[~mask] = garbage
            t[~mask] = -100  # not a token either
        h.requires_grad_()
        logp, entropy = both(h, w, t, bias=b, mask=mask, temperature=0.7, backend=backend)
        (2 * logp + entropy).sum().backward()
        assert not logp[~mask].any() and not entropy[~mask].any()
        assert torch.equal(h.grad[~mask], torch.zeros_like(h.grad[~mask]))
        assert h.grad[mask].abs().sum(-1).min() > 0
        results.append((logp, entropy, h.grad[mask], w.grad, b.grad))
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean, other)
    alone = both(hidden[mask], weight, target[mask], bias=bias, temperature=0.7, backend=backend)
    close((results[0][0][mask], results[0][1][mask]), alone, 1e-6)


@BACKENDS
@pytest.mark.parametrize("rows", ["all masked", "none at all"])
def test_without_rows_all_is_zero_and_so_is_every_gradient(backend, rows):
    # cosmos-rl#155, Liger#1338, TRL#6859: NaN, unwritten memory, or no gradient at all
    shape = (3, 5) if rows == "all masked" else (0,)
    hidden, weight, target, bias = drawn(shape, device=home(backend))
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    mask = torch.zeros(shape, dtype=torch.bool, device=hidden.device) if rows == "all masked" else None
    target = target if mask is None else target.fill_(-100)
    logp, entropy = both(hidden, weight, target, bias=bias, mask=mask, backend=backend)
    assert not logp.any() and not entropy.any()
    (logp + entropy).sum().backward()
    for leaf in leaves:
        assert leaf.grad is not None and leaf.grad.shape == leaf.shape and not leaf.grad.any()


# --- sizes and layouts ------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize(
    ("rows", "width", "vocabulary"),
    [(1, 65, 33), (7, 1, 2), (7, 96, 129), (129, 3, 5), (2, 300, 31), (1, 8, 1), (3, 0, 4)],
)
def test_no_size_has_to_be_a_multiple_of_anything(backend, rows, width, vocabulary):
    # verl: D a multiple of 128; QuACK: N of 8; Liger: M of 128 and V of 256
    hidden, weight, target, bias = drawn((rows,), width, vocabulary, size=0.5, device=home(backend))
    results = both(hidden, weight, target, bias=bias, backend=backend)
    close(results, exact(hidden, weight, target, bias=bias))


def padded(x):
    """The same numbers, with a column between one row and the next."""
    return torch.cat([x, torch.full_like(x[..., :1], NAN)], -1)[..., :-1]


def stepped(x):
    """The same numbers, in every second row of a tensor."""
    return torch.stack([x, torch.full_like(x, 3)], 1)[:, 0]


def transposed(x):
    return x.T.contiguous().T


def shifted(x):
    """The same numbers, in the middle of a tensor."""
    return torch.cat([torch.full_like(x[:1], 3), x, torch.full_like(x[:1], 3)])[1:-1]


LAYOUTS = {
    "hidden without a last column": (padded, None, None, None),
    "every second row of hidden": (stepped, None, None, None),
    "hidden transposed": (transposed, None, None, None),
    "a view of the embedding": (None, shifted, None, None),
    "weight transposed": (None, transposed, None, None),
    "weight with gaps": (None, padded, None, None),
    "every second row of weight": (None, stepped, None, None),
    "every second target": (None, None, stepped, None),
    "every second bias": (None, None, None, stepped),
    "targets and bias in the middle": (None, None, shifted, shifted),
    "all of it": (stepped, transposed, stepped, stepped),
}


@BACKENDS
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("width", [16, 9])
def test_strides_change_nothing(backend, layout, width):
    # verl and Liger read strided inputs as if they were contiguous
    inputs = drawn((7,), width, 35, size=1.0, device=home(backend))
    moved = [x if f is None else f(x) for f, x in zip(LAYOUTS[layout], _by_role(*inputs), strict=True)]
    assert any(not x.is_contiguous() or x.storage_offset() for x in moved)
    results = []
    for hidden, weight, target, bias in (_by_role(*inputs), moved):
        leaves = [x.detach().requires_grad_() for x in (hidden, weight, bias)]
        logp, entropy = both(leaves[0], leaves[1], target, bias=leaves[2], backend=backend)
        results.append((logp, entropy, *torch.autograd.grad((logp + 2 * entropy).sum(), leaves)))
    close(*results)


def _by_role(hidden, weight, target, bias):
    return hidden, weight, target, bias


@BACKENDS
def test_one_number_expanded_to_a_bias_is_read_in_place(backend):
    hidden, weight, target, _ = drawn((3,), vocabulary=40, device=home(backend))
    bias = torch.tensor([2.5], device=hidden.device).expand(40)
    close(both(hidden, weight, target, bias=bias, backend=backend), exact(hidden, weight, target), 1e-5)


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_more_rows_than_a_grid_axis_can_count(backend):
    # Liger#1294: 65535 programs along y, of one row each.  The Triton backend sees `ROWS` rows at most.
    rows = 70_000
    hidden, weight, target, _ = drawn((rows,), 1, 3, size=1.0)
    assert autograd.ROWS < 65_536 < rows and len(autograd.row_blocks(rows)) > 1
    close(both(hidden, weight, target, backend=backend), exact(hidden, weight, target))


@SLICED
@pytest.mark.parametrize("asked", [False, True])
def test_entropy_is_computed_only_when_asked_for(backend, asked, monkeypatch):
    # verl#2608, slime#2130
    module, seen = autograd.backend_module(backend), []
    statistics = module.statistics

    def watched(head, target, entropy, width):
        seen.append(entropy)
        return statistics(head, target, entropy, width)

    monkeypatch.setattr(module, "statistics", watched)
    hidden, weight, target, _ = drawn((4,), device=home(backend))
    result = linear_logprob(hidden, weight, target, return_entropy=asked, backend=backend)
    assert seen == [asked] and isinstance(result, tuple) == asked
    close(result if asked else (result,), exact(hidden, weight, target)[: 1 + asked])
    values = autograd.head_logp(hidden, weight, target, None, None, 1.0, None, asked, backend)
    assert values[1].numel() == (4 if asked else 0)


# --- properties -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_logp_entropy_and_gradient_are_those_of_a_distribution(backend, data):
    size = lambda most: data.draw(st.integers(1, most))  # noqa: E731
    rows, width, vocabulary, slices = size(9), size(12), size(40), size(40)
    hidden, weight, target, _ = drawn((rows,), width, vocabulary, data.draw(st.integers(0, 99)))
    hidden = data.draw(st.sampled_from([lambda x: x, padded, stepped, transposed]))(hidden)
    weight = data.draw(st.sampled_from([lambda x: x, padded, transposed, shifted]))(weight)
    temperature = data.draw(st.sampled_from([0.3, 1.0, 4.0]))
    steps = torch.linspace(-2, 3, 2 * rows)[::2]
    grads = data.draw(st.sampled_from([torch.ones(1).expand(rows), steps]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autograd, "slice_width", lambda weight: slices)
        results = both(hidden, weight, target, temperature=temperature, backend=backend)
        # With the identity for a weight, the gradient of hidden is that of the logits.
        logits = (hidden @ weight.T).requires_grad_()
        again = both(logits, torch.eye(vocabulary), target, temperature=temperature, backend=backend)
        (gradient,) = torch.autograd.grad(again, logits, (grads, grads))
    logp, entropy = results
    close(results, exact(hidden, weight, target, temperature=temperature), 2e-5)
    assert (logp <= 0).all() and (entropy >= -1e-5).all() and (entropy <= math.log(vocabulary) + 1e-5).all()
    largest = max(1.0, grads.abs().max().item()) / temperature
    assert gradient.sum(-1).abs().max() <= 2e-5 * largest
    close(again, results, 1e-4)


# --- which backend ----------------------------------------------------------------------------------------


def stand_in(rows, width, dtype=torch.float32, cuda=False):
    """What `choose_backend` asks of a tensor, without the memory."""
    shape = (rows, width)
    device = torch.device("cuda" if cuda else "cpu")
    return SimpleNamespace(shape=shape, numel=lambda: rows * width, dtype=dtype, is_cuda=cuda, device=device)


def believe_in_a_hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(major=9, minor=0))


@pytest.mark.parametrize(
    ("rows", "vocabulary", "cuda", "dtypes", "chosen"),
    [
        (1024, SMALL // 1024, False, (torch.float32,) * 2, "reference"),
        (1024, SMALL // 1024 + 1, False, (torch.float32,) * 2, "chunked"),
        (8192, 151_936, False, (torch.bfloat16,) * 2, "chunked"),
        (8192, 151_936, True, (torch.float64, torch.float32), "chunked"),
        (8192, 151_936, True, (torch.float32, torch.float64), "chunked"),
        (8, 100, True, (torch.bfloat16,) * 2, "reference"),
        pytest.param(8192, 151_936, True, (torch.bfloat16,) * 2, "triton", marks=NO_TRITON),
        pytest.param(8192, 151_936, True, (torch.float32,) * 2, "triton", marks=NO_TRITON),
    ],
)
def test_auto_takes_what_suits_size_device_and_type(rows, vocabulary, cuda, dtypes, chosen, monkeypatch):
    believe_in_a_hopper(monkeypatch)
    hidden, weight = (stand_in(n, 64, d, cuda) for n, d in zip((rows, vocabulary), dtypes, strict=True))
    assert choose_backend(hidden, weight) == chosen


def test_auto_does_without_triton_where_it_is_not_installed(monkeypatch):
    believe_in_a_hopper(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    hidden, weight = stand_in(8192, 64, cuda=True), stand_in(151_936, 64, cuda=True)
    assert choose_backend(hidden, weight) == "chunked"


@pytest.mark.parametrize("asked", ["reference", "chunked"])
def test_a_backend_that_is_asked_for_is_taken_whatever_the_size(asked, monkeypatch):
    hidden, weight, target, _ = drawn()
    assert choose_backend(hidden, weight, asked) == asked
    seen = []
    plain = reference.logp_and_entropy
    monkeypatch.setattr(reference, "logp_and_entropy", lambda *a: (seen.append("reference"), plain(*a))[1])
    linear_logprob(hidden, weight, target, backend=asked)
    assert seen == ["reference"] * (asked == "reference")


def test_auto_never_makes_large_logits(monkeypatch):
    monkeypatch.setattr(reference, "logp_and_entropy", None)
    monkeypatch.setattr("tangolite.logprob.SMALL", 10)
    hidden, weight, target, _ = drawn()
    close((linear_logprob(hidden, weight, target),), exact(hidden, weight, target)[:1])


# --- what is refused --------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # unsloth#5121, unsloth#708: logits passed as hidden states
        ({"weight": torch.ones(11, 7)}, r"width of weight.*\(3, 5, 8\).*\(11, 7\)"),
        ({"hidden": torch.ones(3, 5, 11)}, r"width of weight.*\(3, 5, 11\).*\(11, 8\)"),
        ({"weight": torch.ones(1, 11, 8)}, r"width of weight"),
        ({"hidden": torch.tensor(1.0)}, r"width of weight"),
        ({"target": torch.zeros(3, 4, dtype=torch.long)}, r"leading shape of hidden"),
        ({"target": torch.zeros(15, dtype=torch.long)}, r"leading shape of hidden"),
        ({"mask": torch.ones(3, 4, dtype=torch.bool)}, r"leading shape of hidden"),
        ({"target": torch.zeros(3, 5)}, r"token ids.*float32"),
        ({"target": torch.ones(3, 5, dtype=torch.bool)}, r"token ids.*bool"),
        ({"hidden": torch.zeros(3, 5, 8, dtype=torch.long)}, r"hidden must be floating point.*int64"),
        ({"weight": torch.zeros(44, 1, dtype=torch.uint8)}, r"weight must be floating point.*quantised"),
        ({"bias": torch.ones(10)}, r"bias must be \(V,\) = \(11,\).*\(10,\)"),
        ({"bias": torch.ones(11, 1)}, r"bias must be"),
        ({"weight": torch.ones(11, 8, device="meta")}, r"meta device"),
        ({"temperature": -1.0}, r"temperature.*-1\.0"),
        ({"softcap": 0.0}, r"softcap.*0\.0"),
        ({"softcap": -3.0}, r"softcap.*-3\.0"),
    ],
)
def test_what_does_not_fit_is_named_before_anything_runs(backend, changes, message, monkeypatch):
    monkeypatch.setattr(autograd, "head_logp", None)
    monkeypatch.setattr(reference, "logp_and_entropy", None)
    hidden, weight, target, _ = drawn()
    with pytest.raises(ValueError, match=message):
        linear_logprob(**{"hidden": hidden, "weight": weight, "target": target} | changes, backend=backend)


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match=r"backend.*'fast'"):
        linear_logprob(*drawn()[:3], backend="fast")


class Placed(torch.Tensor):
    """Looks like a DTensor from outside."""

    placements = ("Shard(dim=0)",)


def of_zero3(size):
    weight = torch.nn.Parameter(torch.ones(size))
    weight.ds_id = 7
    return weight


@BACKENDS
@pytest.mark.parametrize(
    "weight",
    [
        torch.ones(0),  # ZeRO-3 leaves an empty tensor behind
        torch.ones(0, 8),
        torch.ones(88),  # FSDP1 flattens
        torch.ones(8),
        of_zero3((0,)),
        torch.ones(11, 8).as_subclass(Placed),
    ],
    ids=["empty", "no rows", "flat", "one row", "ds_id, empty", "placements"],
)
def test_a_weight_that_is_not_all_there_has_to_be_gathered(backend, weight):
    # TRL#3368, TRL#6372, TRL#6065, Liger#1289, LlamaFactory#5941
    hidden, _, target, _ = drawn()
    with pytest.raises(ValueError, match=r"not the whole head.*gathered first"):
        linear_logprob(hidden, weight, target, backend=backend)


def test_a_real_dtensor_has_to_be_gathered():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hidden, weight, target, _ = drawn()
    # Two processes, of which one is here and the other is not: nothing is sent, no socket is opened.
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        shard = DTensor.from_local(weight, mesh, [Shard(0)])
        assert shard.shape == (22, 8)
        for backend in ("auto", "reference", "chunked"):
            with pytest.raises(ValueError, match=r"\(22, 8\) \(DTensor\).*gathered first.*full_tensor"):
                linear_logprob(hidden, shard, target, backend=backend)
    finally:
        torch.distributed.destroy_process_group()


@BACKENDS
@pytest.mark.parametrize("outside", [11, 2**40, -1, -100])
def test_one_target_outside_the_vocabulary_is_enough(backend, outside):
    # CCE#37: illegal memory access; CCE#59: -100 met a padded word; pytorch#90793
    hidden, weight, target, _ = drawn(device=home(backend))
    target[1, 2] = outside
    with pytest.raises(ValueError, match=rf"0\.\.10, got {outside} in 1 row.*mask out"):
        linear_logprob(hidden, weight, target, backend=backend)
    mask = torch.ones_like(target, dtype=torch.bool)
    mask[1, 2] = False
    assert linear_logprob(hidden, weight, target, mask=mask, backend=backend)[1, 2] == 0
    mask[1, 2], mask[0, 0] = True, False
    with pytest.raises(ValueError, match="in 1 row"):
        linear_logprob(hidden, weight, target, mask=mask, backend=backend)


@SLICED
def test_the_operator_itself_refuses_a_target_outside_the_vocabulary(backend):
    hidden, weight, target, _ = drawn(device=home(backend))
    target[0, 0] = 11
    with pytest.raises(ValueError, match=r"0\.\.10, got 11"):
        autograd.head_logp(hidden, weight, target, None, None, 1.0, None, False, backend)


# --- torch.compile ----------------------------------------------------------------------------------------


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@BACKENDS
@pytest.mark.parametrize("masked", [False, True])
def test_compiled_in_one_graph_it_gives_the_same_gradients_too(backend, masked):
    # Liger#1292, torchtune#2741: graph breaks
    hidden, weight, target, bias = drawn(device=home(backend))
    mask = target % 3 != 0 if masked else None

    def function(*leaves):
        return both(leaves[0], leaves[1], target, bias=leaves[2], mask=mask, temperature=0.7, backend=backend)

    results = []
    for call in (function, compiled(function)):
        leaves = [x.detach().requires_grad_() for x in (hidden, weight, bias)]
        made = call(*leaves)
        results.append((*made, *torch.autograd.grad(sum(x.sum() for x in made), leaves)))
    close(*results, 1e-6)


@SLICED
def test_compiled_it_takes_other_sizes_and_refuses_wrong_targets(backend):
    hidden, weight, target, _ = drawn((7,), device=home(backend))
    call = compiled(lambda h, t: linear_logprob(h, weight, t, backend=backend))
    for rows in (7, 5, 3):
        close((call(hidden[:rows], target[:rows]),), exact(hidden[:rows], weight, target[:rows])[:1])
    for outside in (11, -1, -100):
        target[1] = outside
        with pytest.raises(ValueError, match=f"got {outside} in 1 row"):
            call(hidden, target)


def test_compiled_the_plain_way_does_not_let_wrong_targets_pass():
    # An index is checked inside the compiled program: the error is that of torch, but it is one.
    hidden, weight, target, _ = drawn((7,))
    call = compiled(lambda t: linear_logprob(hidden, weight, t, backend="reference"))
    call(target)
    for outside in (11, -1, -100):
        target[1] = outside
        with pytest.raises((ValueError, RuntimeError)):
            call(target)
