"""`linear_logprob` against a float64 softmax, finite differences, and hidden states that must not be read."""

from __future__ import annotations

import math

import pytest
import torch

from tangolite.logprob import linear_logprob

BACKENDS = pytest.mark.parametrize("backend", ["auto", "reference", "chunked"])


def drawn(shape=(3, 5), width=8, vocabulary=11, seed=0, dtype=torch.float32, size=2.0):
    """(hidden, weight, target, bias) with logits a few units apart."""
    draw = torch.Generator().manual_seed(seed)
    numbers = lambda *n: torch.randn(*n, generator=draw, dtype=torch.float64)  # noqa: E731
    target = torch.randint(vocabulary, shape, generator=draw)
    tensors = size * numbers(*shape, width), numbers(vocabulary, width), numbers(vocabulary)
    hidden, weight, bias = (x.to(dtype) for x in tensors)
    return hidden, weight, target, bias


def naive(hidden, weight, target, *, temperature=1.0, bias=None, softcap=None):
    """The definition in float64, row by row."""
    logp, entropy = [], []
    for state, token in zip(hidden.double().reshape(-1, hidden.shape[-1]), target.reshape(-1), strict=True):
        logits = weight.double() @ state + (0 if bias is None else bias.double())
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        logits = logits / temperature if temperature else logits
        p = logits.exp() / logits.exp().sum()
        logp.append(p[token].log())
        entropy.append(-(p * p.log()).sum())
    return torch.stack(logp).reshape(target.shape), torch.stack(entropy).reshape(target.shape)


@BACKENDS
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0, 0.0])
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"bias": True}, {"bias": True, "softcap": 3.0}])
def test_logp_and_entropy_equal_the_definition_in_float64(backend, temperature, options):
    hidden, weight, target, bias = drawn()
    options = options | {"temperature": temperature} | ({"bias": bias} if "bias" in options else {})
    logp, entropy = linear_logprob(hidden, weight, target, return_entropy=True, backend=backend, **options)
    expected, uncertainty = naive(hidden, weight, target, **options)
    torch.testing.assert_close(logp.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), uncertainty, atol=1e-5, rtol=1e-5)
    assert torch.equal(linear_logprob(hidden, weight, target, backend=backend, **options), logp)


@BACKENDS
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (2, 2, 3), (0,), (2, 0)])
def test_any_leading_shape_goes_in_and_comes_out(backend, shape):
    hidden, weight, target, _ = drawn(shape)
    logp, entropy = linear_logprob(hidden, weight, target, return_entropy=True, backend=backend)
    assert logp.shape == entropy.shape == shape
    if target.numel():
        torch.testing.assert_close(logp.double(), naive(hidden, weight, target)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_logits_are_float32_or_better_whatever_goes_in(given, made):
    hidden, weight, target, bias = drawn(dtype=given)
    logp = linear_logprob(hidden, weight, target, bias=bias)
    assert logp.dtype == made
    torch.testing.assert_close(
        logp.double(), naive(hidden, weight, target, bias=bias)[0], atol=1e-5, rtol=1e-5
    )


def test_the_temperature_belongs_to_the_log_prob():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    logp = lambda t: linear_logprob(logits, torch.eye(3), torch.tensor([0]), temperature=t).item()  # noqa: E731
    assert logp(0.5) == pytest.approx(4 - math.log(math.exp(4) + math.exp(2) + 1), abs=1e-6)
    assert logp(0.5) == pytest.approx(-0.14293, abs=1e-5)
    assert logp(1.0) == pytest.approx(-0.40761, abs=1e-5)
    assert logp(0.0) == logp(1.0)  # greedy: nothing is divided


def test_a_softcap_bounds_the_logits_before_the_temperature():
    capped = linear_logprob(
        torch.tensor([[1e6, 0.0]]), torch.eye(2), torch.tensor([1]), softcap=2.0, temperature=0.5
    )
    assert capped.item() == pytest.approx(-math.log1p(math.exp(4.0)), abs=1e-6)


def test_huge_logits_neither_overflow_nor_lose_their_gradient():
    hidden = torch.tensor([[1e4, -1e4], [-1e4, 1e4]], requires_grad=True)
    logp, entropy = linear_logprob(hidden, torch.eye(2), torch.tensor([0, 0]), return_entropy=True)
    assert logp.tolist() == [0.0, -2e4] and entropy.tolist() == [0.0, 0.0]
    (logp + entropy).sum().backward()
    assert torch.allclose(hidden.grad, torch.tensor([[0.0, 0.0], [1.0, -1.0]]))


def test_entropy_of_equal_logits_is_the_logarithm_of_the_vocabulary():
    _, entropy = linear_logprob(
        torch.zeros(2, 4), torch.ones(7, 4), torch.tensor([0, 6]), return_entropy=True
    )
    assert entropy.tolist() == pytest.approx([math.log(7)] * 2)


def test_a_word_of_probability_zero_gives_finite_entropy_and_gradients():
    hidden, weight, target, bias = drawn()
    bias[3] = float("-inf")
    hidden.requires_grad_()
    logp, entropy = linear_logprob(
        hidden, weight, target.masked_fill(target == 3, 0), bias=bias, return_entropy=True
    )
    (logp + entropy).sum().backward()
    assert logp.isfinite().all() and entropy.isfinite().all() and hidden.grad.isfinite().all()


# --- rows outside the mask -----------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_masked_rows_are_never_read_and_get_no_gradient(backend, garbage):
    hidden, weight, target, bias = drawn()
    mask = torch.rand(target.shape, generator=torch.Generator().manual_seed(1)) < 0.6
    assert mask.any() and not mask.all()
    results = []
    for dirty in (False, True):
        h, w, b = hidden.clone(), weight.clone().requires_grad_(), bias.clone().requires_grad_()
        t = target.clone()
        if dirty:
            h[~mask] = garbage
            t[~mask] = -100  # not a token either
        h.requires_grad_()
        logp, entropy = linear_logprob(
            h, w, t, bias=b, mask=mask, temperature=0.7, return_entropy=True, backend=backend
        )
        (2 * logp + entropy).sum().backward()
        assert not logp[~mask].any() and not entropy[~mask].any()
        assert torch.equal(h.grad[~mask], torch.zeros_like(h.grad[~mask]))
        assert h.grad[mask].abs().sum(-1).min() > 0
        results.append((logp, entropy, h.grad[mask], w.grad, b.grad))
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean, other)
    alone = linear_logprob(hidden[mask], weight, target[mask], bias=bias, temperature=0.7)
    torch.testing.assert_close(results[0][0][mask], alone, atol=1e-6, rtol=0)


@BACKENDS
def test_with_every_row_masked_all_is_zero_with_a_graph(backend):
    hidden, weight, target, _ = drawn()
    hidden.requires_grad_()
    mask = torch.zeros(target.shape, dtype=torch.bool)
    logp, entropy = linear_logprob(hidden, weight, target, mask=mask, return_entropy=True, backend=backend)
    assert not logp.any() and not entropy.any()
    (logp + entropy).sum().backward()
    assert not hidden.grad.any()


# --- gradients -----------------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_gradients_of_logp_and_entropy_agree_with_finite_differences(backend, softcap, temperature):
    hidden, weight, target, bias = drawn((2, 3), 4, 5, dtype=torch.float64, size=1.0)
    mask = torch.tensor([[True, True, False], [True, False, True]])

    def function(h, w, b):
        return linear_logprob(
            h, w, target, bias=b, mask=mask, softcap=softcap, temperature=temperature,
            return_entropy=True, backend=backend,
        )  # fmt: skip

    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    assert torch.autograd.gradcheck(function, inputs)


def test_the_gradient_of_a_log_prob_is_one_hot_minus_the_probabilities():
    logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    linear_logprob(logits, torch.eye(3), torch.tensor([1]), temperature=0.5).sum().backward()
    expected = (torch.tensor([[0.0, 1.0, 0.0]]) - (2 * logits.detach()).softmax(-1)) / 0.5
    torch.testing.assert_close(logits.grad, expected)


# --- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.ones(11, 7)}, r"width of weight.*\(3, 5, 8\).*\(11, 7\)"),
        ({"weight": torch.ones(8)}, r"width of weight"),
        ({"target": torch.zeros(3, 4, dtype=torch.long)}, r"leading shape of hidden"),
        ({"mask": torch.ones(3, 4, dtype=torch.bool)}, r"leading shape of hidden"),
        ({"hidden": torch.zeros(3, 5, 8, dtype=torch.long)}, r"floating point.*int64"),
        ({"temperature": -1.0}, r"temperature.*-1\.0"),
        ({"backend": "fast"}, r"backend.*'fast'"),
        ({"target": torch.full((3, 5), 11)}, r"0\.\.10"),
        ({"target": torch.full((3, 5), -1)}, r"0\.\.10"),
    ],
)
def test_what_does_not_fit_is_named(changes, message):
    hidden, weight, target, _ = drawn()
    arguments = {"hidden": hidden, "weight": weight, "target": target} | changes
    with pytest.raises(ValueError, match=message):
        linear_logprob(**arguments)


def test_one_target_outside_the_vocabulary_is_enough():
    hidden, weight, target, _ = drawn()
    target[1, 2] = 11
    with pytest.raises(ValueError, match="mask out"):
        linear_logprob(hidden, weight, target)
    mask = torch.ones(target.shape, dtype=torch.bool)
    mask[1, 2] = False
    assert linear_logprob(hidden, weight, target, mask=mask)[1, 2] == 0
