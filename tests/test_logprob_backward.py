"""The gradients of `linear_logprob`: right to float64, cheap in rows and in memory, never in place."""

from __future__ import annotations

import math

import pytest
import torch
from test_logprob import BACKENDS, INF, NAN, SLICED, both, close, compiled, drawn, exact, home

from tangolite.logprob import autograd, chunked, linear_logprob

MEMORY = [torch.profiler.ProfilerActivity.CPU]
BF16 = 2.0**-8  # relative size of one rounding to bfloat16


def gradients(inputs, grads, *, run=both, bias=None, **options):
    """Gradients of hidden, weight (and bias) of sum g logp + sum h H; either of g, h may be None."""
    hidden, weight, target = inputs
    leaves = [x.detach().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    offset = {} if bias is None else {"bias": leaves[2]}
    results = run(leaves[0], leaves[1], target, **offset, **options)
    used = [(x, g.to(x.dtype)) for x, g in zip(results, grads, strict=True) if g is not None]
    return torch.autograd.grad([x for x, _ in used], leaves, [g for _, g in used])


def true_gradients(inputs, grads, *, bias=None, **options):
    hidden, weight, target = inputs
    double = None if bias is None else bias.double()
    return gradients((hidden.double(), weight.double(), target), grads, run=exact, bias=double, **options)


def off(made, wanted) -> float:
    """Relative, in the Frobenius norm."""
    return ((made.double() - wanted).norm() / wanted.norm()).item()


def incoming(target, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(target.shape, generator=draw).to(target.device) for _ in range(2)]


# --- right ------------------------------------------------------------------------------------------------

OPTIONS = {
    "plain": {},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 2": {"temperature": 2.0},
    "softcap": {"softcap": 3.0, "temperature": 0.7},
}


@BACKENDS
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("of", ["logp", "entropy", "both"])
@pytest.mark.parametrize("offset", [False, True], ids=["no bias", "bias"])
def test_gradients_are_within_1e_5_of_float64(backend, options, of, offset):
    # TRL#6625: the gradient of the entropy was accepted and dropped; slime#557, RL-Kernel#81: temperature
    *inputs, bias = drawn((9,), 20, 70, size=0.5, device=home(backend))
    g, h = incoming(inputs[2])
    grads = (g if of != "entropy" else None, h if of != "logp" else None)
    options = options | ({"bias": bias} if offset else {})
    wanted = true_gradients(inputs, grads, **options)
    for made, true in zip(gradients(inputs, grads, backend=backend, **options), wanted, strict=True):
        assert made.dtype == torch.float32 and off(made, true) <= 1e-5
        assert true.norm() > 0.1


@BACKENDS
@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 5e-3), (torch.float16, 1e-3)], ids=str)
def test_gradients_of_16_bit_inputs_are_rounded_once(backend, dtype, most):
    *inputs, bias = drawn((16,), 64, 150, dtype=dtype, size=0.4, device=home(backend))
    grads, options = incoming(inputs[2]), {"bias": bias, "temperature": 0.7}
    wanted = true_gradients(inputs, grads, **options)
    for made, true in zip(gradients(inputs, grads, backend=backend, **options), wanted, strict=True):
        assert made.dtype == dtype and off(made, true) <= most


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_gradients_of_logp_and_entropy_agree_with_finite_differences(
    backend, softcap, temperature, monkeypatch
):
    monkeypatch.setattr(autograd, "slice_width", lambda weight: 3)
    monkeypatch.setattr(autograd, "ROWS", 2)
    hidden, weight, target, bias = drawn((5,), 4, 7, dtype=torch.float64, size=1.0)
    mask = torch.tensor([True, True, False, True, True])

    def function(h, w, b):
        return both(
            h, w, target, bias=b, mask=mask, softcap=softcap, temperature=temperature, backend=backend
        )

    assert torch.autograd.gradcheck(function, [x.requires_grad_() for x in (hidden, weight, bias)])


def test_the_plain_way_has_second_derivatives():
    hidden, weight, target, bias = drawn((3,), 3, 5, dtype=torch.float64, size=1.0)
    mask = torch.tensor([True, False, True])

    def function(h, w, b):
        return both(h, w, target, bias=b, mask=mask, softcap=3.0, temperature=0.7, backend="reference")

    assert torch.autograd.gradgradcheck(function, [x.requires_grad_() for x in (hidden, weight, bias)])


@SLICED
def test_second_derivatives_are_refused_in_words(backend):
    hidden, weight, target, _ = drawn((3,), device=home(backend))
    hidden.requires_grad_()
    logp = linear_logprob(hidden, weight, target, backend=backend)
    (first,) = torch.autograd.grad(logp.sum(), hidden, create_graph=True)
    (plain,) = torch.autograd.grad(linear_logprob(hidden, weight, target, backend=backend).sum(), hidden)
    assert torch.equal(first, plain)
    with pytest.raises(RuntimeError, match=r'first derivatives only.*backend="reference"'):
        first.pow(2).sum().backward()


@BACKENDS
def test_the_gradient_of_a_log_prob_is_one_hot_minus_the_probabilities(backend):
    where = home(backend)
    logits = torch.tensor([[2.0, 1.0, 0.0]], device=where, requires_grad=True)
    second = torch.tensor([1], device=where)
    linear_logprob(logits, torch.eye(3, device=where), second, temperature=0.5, backend=backend).backward()
    expected = (torch.tensor([[0.0, 1.0, 0.0]]) - (2 * logits.detach().cpu()).softmax(-1)) / 0.5
    torch.testing.assert_close(logits.grad.cpu(), expected)


@BACKENDS
def test_the_gradient_of_a_softcap_is_one_minus_tanh_squared(backend):
    # unsloth-zoo#593
    where = home(backend)
    logits = torch.tensor([[24.0, 23.0, -31.0]], device=where, requires_grad=True)
    first = torch.tensor([0], device=where)
    logp = linear_logprob(logits, torch.eye(3, device=where), first, softcap=30.0, backend=backend)
    logp.backward()
    z = logits.detach().cpu().double()
    capped = 30 * torch.tanh(z / 30)
    slope = 1 - torch.tanh(z / 30) ** 2
    expected = (torch.tensor([[1.0, 0.0, 0.0]]) - capped.softmax(-1)) * slope
    torch.testing.assert_close(logits.grad.cpu().double(), expected, atol=0, rtol=1e-4)


@BACKENDS
def test_every_row_has_its_own_incoming_gradient(backend):
    # Liger#968, Liger#680: with no reduction, all rows got that of the first
    *inputs, _ = drawn((6,), device=home(backend))
    g = torch.tensor([0.0, 1.0, -2.0, 0.5, 1e-3, 3.0], device=home(backend))
    made = gradients(inputs, (g, None), backend=backend)
    for one, true in zip(made, true_gradients(inputs, (g, None)), strict=True):
        assert off(one, true) <= 1e-5
    assert not made[0][0].any()
    alone = [
        gradients((inputs[0][i : i + 1], inputs[1], inputs[2][i : i + 1]), (g[:1] + 1, None), backend=backend)
        for i in range(6)
    ]
    close((made[1],), (sum(float(x) * w for x, (_, w) in zip(g, alone, strict=True)),))


@BACKENDS
@pytest.mark.parametrize("layout", ["every second number", "one number expanded", "a column"])
def test_strides_of_the_incoming_gradient_change_nothing(backend, layout):
    # verl#6960: a strided gradient was read as if it were contiguous
    *inputs, _ = drawn((6,), device=home(backend))
    base = torch.linspace(-2, 3, 12, device=home(backend))
    grads = {
        "every second number": [base[::2], base[1::2]],
        "one number expanded": [base[3:4].expand(6), base[8].expand(6)],
        "a column": list(base.view(6, 2).T),
    }[layout]
    assert not any(x.is_contiguous() for x in grads)
    made = gradients(inputs, grads, backend=backend)
    assert all(map(torch.equal, made, gradients(inputs, [x.contiguous() for x in grads], backend=backend)))
    assert all(off(*pair) <= 1e-5 for pair in zip(made, true_gradients(inputs, grads), strict=True))


@SLICED
@pytest.mark.parametrize("of", ["logp", "entropy"])
def test_a_result_that_is_not_used_costs_nothing_in_the_backward(backend, of, monkeypatch):
    # TRL#6625: zeros were made for the gradient of the result that was not used
    seen, terms = [], autograd.row_terms

    def watched(values, g, h, scale):
        seen.append((g is None, h is None))
        return terms(values, g, h, scale)

    monkeypatch.setattr(autograd, "row_terms", watched)
    hidden, weight, target, _ = drawn((4,), device=home(backend))
    hidden.requires_grad_()
    logp, entropy = both(hidden, weight, target, backend=backend)
    (logp if of == "logp" else entropy).sum().backward()
    assert seen == [(of == "entropy", of == "logp")]
    assert hidden.grad.abs().max() > 0.1


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_confident_token_keeps_its_small_gradient(backend, dtype):
    # Liger#1329, TransformerEngine#3193: bfloat16(p) - 1 has no digit left at p = 0.999
    logits = torch.zeros(2, 5, dtype=dtype, device=home(backend))
    logits[0, 2], logits[1, 4] = 8.3125, 9.5
    inputs = logits, torch.eye(5, dtype=dtype, device=home(backend)), logits.argmax(-1)
    grads = torch.ones(2, device=home(backend)), None
    made, true = gradients(inputs, grads, backend=backend)[0].double(), true_gradients(inputs, grads)[0]
    assert 0.99 < exact(*inputs)[0].exp().min() < 0.9995 and true[0, 2] < 1.1e-3
    assert ((made - true) / true).abs().max() < (1e-3 if dtype == torch.float32 else 1e-2)


def test_the_share_of_a_confident_target_has_all_the_digits_of_its_log_prob():
    logp = torch.tensor([-1e-3, -1e-6, -3e-8, -5.0])
    values = autograd.RowValues(logp, -logp, torch.zeros(4), -logp)
    terms = autograd.row_terms(values, torch.ones(4), None, 2.0)
    wanted = [-2 * math.expm1(x) for x in logp.tolist()]
    assert terms.at_target.tolist() == pytest.approx(wanted, rel=1e-6)
    assert 1 - math.exp(-5.0) == pytest.approx(wanted[3] / 2)


@BACKENDS
def test_a_weight_that_is_an_embedding_too_gets_both_gradients(backend):
    _, weight, target, _ = drawn((9,), device=home(backend))
    ids = target.flip(0)
    results = []
    for run, w in ((both, weight), (exact, weight.double())):
        w = w.detach().requires_grad_()
        logp, entropy = run(torch.tanh(w[ids]), w, target, backend=backend)
        results.append(torch.autograd.grad((logp + entropy).sum(), w)[0])
    assert off(*results) <= 1e-5


@BACKENDS
def test_autocast_does_not_round_the_gradients(backend):
    hidden, weight, target, _ = drawn((6,), 32, 50, device=home(backend))
    weight = weight.bfloat16()  # float32 states meet a bfloat16 head
    leaves, grads = [hidden.requires_grad_(), weight.requires_grad_()], incoming(target)
    with torch.autocast(home(backend), dtype=torch.bfloat16):
        results = both(hidden, weight, target, backend=backend)
        if backend != "reference":  # whose backward is that of torch: to be called outside, as torch advises
            made = torch.autograd.grad(results, leaves, grads, retain_graph=True)
    outside = torch.autograd.grad(results, leaves, grads)
    assert backend == "reference" or all(map(torch.equal, made, outside))
    assert [x.dtype for x in outside] == [torch.float32, torch.bfloat16]
    true = true_gradients((hidden, weight, target), grads)
    assert off(outside[0], true[0]) <= 1e-5 and off(outside[1], true[1]) <= BF16


# --- only what is required --------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("needed", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1)])
def test_what_needs_no_gradient_gets_none_and_the_rest_is_the_same(backend, needed):
    # prime-rl#3011: a frozen head
    hidden, weight, target, bias = drawn((6,), device=home(backend))
    g, h = incoming(target)
    every = gradients((hidden, weight, target), (g, h), bias=bias, softcap=4.0, backend=backend)
    leaves = [x.clone().requires_grad_(bool(n)) for x, n in zip((hidden, weight, bias), needed, strict=True)]
    logp, entropy = both(leaves[0], leaves[1], target, bias=leaves[2], softcap=4.0, backend=backend)
    torch.autograd.backward([logp, entropy], [g, h])
    for leaf, wanted, need in zip(leaves, every, needed, strict=True):
        assert (leaf.grad is not None) == bool(need)
        assert not need or torch.equal(leaf.grad, wanted)


@BACKENDS
def test_without_gradients_there_is_no_graph(backend):
    hidden, weight, target, _ = drawn(device=home(backend))
    assert not linear_logprob(hidden, weight, target, backend=backend).requires_grad
    with torch.no_grad():
        assert not linear_logprob(hidden.requires_grad_(), weight, target, backend=backend).requires_grad


def saved_bytes(run, inputs) -> list[int]:
    """Of every storage that the graph holds on to, beyond those of the inputs."""
    ours, held = {x.untyped_storage().data_ptr() for x in inputs}, {}

    def pack(x):
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = run()
    assert result is not None
    return [size for place, size in held.items() if place not in ours and size]


@SLICED
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("entropy", "per_row"), [(False, 12), (True, 16)])
def test_a_row_leaves_12_bytes_behind_or_16_with_its_entropy(backend, entropy, per_row, masked):
    hidden, weight, target, bias = drawn((20,), vocabulary=300, device=home(backend))
    mask = target % 2 == 0
    inputs = [hidden.requires_grad_(), weight.requires_grad_(), target, bias, mask]

    def run():
        return linear_logprob(
            *inputs[:3], bias=bias, mask=mask if masked else None, return_entropy=entropy, backend=backend
        )

    assert sum(saved_bytes(run, inputs)) == per_row * 20
    with torch.no_grad():
        assert saved_bytes(run, inputs) == []


def peak_bytes(run) -> int:
    """Most memory in use at once while it runs, its results included, above what there was."""
    with torch.profiler.profile(activities=MEMORY, profile_memory=True) as profile:
        results = run()
    now = most = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    assert results and most > 0
    return most


ROWS, WIDTH, WORDS = 256, 64, 50_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("options", "share"), [({}, 20), ({"return_entropy": True}, 20), ({"softcap": 20.0}, 10)], ids=str
)
def test_forward_and_backward_need_a_small_part_of_the_memory_of_the_logits(options, share, dtype):
    hidden, weight, target, _ = drawn((ROWS,), WIDTH, WORDS, size=0.5, dtype=dtype)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]

    def run():
        results = linear_logprob(*leaves, target, backend="chunked", **options)
        return torch.autograd.grad(sum(results) if isinstance(results, tuple) else results, leaves, ones)

    ones = torch.ones(ROWS)
    of_gradients = sum(x.numel() * x.element_size() for x in leaves)
    assert peak_bytes(run) - of_gradients <= 4 * ROWS * WORDS / share


def test_a_frozen_head_never_has_a_gradient_of_its_size():
    # prime-rl#3011, Liger, verl, TRL: made and thrown away
    hidden, weight, target, _ = drawn((8,), WIDTH, WORDS)
    hidden.requires_grad_()
    of_weight = 4 * WORDS * WIDTH

    def run():
        return torch.autograd.grad(linear_logprob(hidden, weight, target, backend="chunked").sum(), hidden)

    assert peak_bytes(run) < of_weight / 10
    weight.requires_grad_()
    assert of_weight <= peak_bytes(run) < 1.1 * of_weight  # the measure can see one


# --- only the rows that matter ----------------------------------------------------------------------------


@pytest.fixture
def visited(monkeypatch):
    """Rows of which `chunked` makes the logits again, one number for each slice."""
    counts, plain = [], chunked.logit_gradient

    def watched(head, *rest):
        counts.append(len(head.hidden))
        return plain(head, *rest)

    monkeypatch.setattr(chunked, "logit_gradient", watched)
    return counts


@pytest.mark.parametrize("of", ["logp", "entropy", "both"])
def test_rows_without_an_incoming_gradient_are_not_visited(of, visited):
    *inputs, _ = drawn((10,))
    g, h = torch.zeros(10), torch.zeros(10)
    g[[1, 4]], h[[4, 8]] = 2.0, -1.0
    grads = (g if of != "entropy" else None, h if of != "logp" else None)
    made = gradients(inputs, grads, backend="chunked")
    live = {"logp": [1, 4], "entropy": [4, 8], "both": [1, 4, 8]}[of]
    assert visited == [len(live)]
    assert made[0].abs().sum(-1).nonzero().flatten().tolist() == live
    assert all(off(*pair) <= 1e-5 for pair in zip(made, true_gradients(inputs, grads), strict=True))


def test_rows_outside_the_mask_are_not_visited_whatever_their_gradient(visited):
    *inputs, _ = drawn((2, 5))
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 0, 0, 0, 1]]).bool()
    inputs[0][~mask], inputs[2][~mask] = NAN, -100
    made = gradients(inputs, incoming(inputs[2]), mask=mask, backend="chunked")
    assert visited == [4] and all(x.isfinite().all() for x in made)


def test_with_no_live_row_at_all_gradients_are_zeros(visited):
    *inputs, bias = drawn((4,))
    made = gradients(inputs, (torch.zeros(4), torch.zeros(4)), bias=bias, backend="chunked")
    assert visited == [0] and not any(x.any() for x in made)


@SLICED
def test_rows_that_drop_out_change_no_bit_of_the_others(backend):
    hidden, weight, target, bias = drawn((12,), device=home(backend))
    live = torch.arange(12, device=hidden.device) % 3 != 1
    g, h = incoming(target)
    saved = list(autograd.head_logp(hidden, weight, target, None, bias, 2.0, 4.0, True, backend))

    def run(keep, *grads):
        picked = [x[keep] for x in (*grads, *saved, hidden, target)]
        return autograd.head_logp_gradient(
            *picked[:2], picked[2:6], picked[6], weight, picked[7], None, bias, 2.0, 4.0, backend, [True] * 3
        )

    with_dead = run(torch.ones_like(live), g * live, h * live)
    alone = run(live, g, h)
    assert torch.equal(with_dead[0][live], alone[0]) and not with_dead[0][~live].any()
    assert torch.equal(with_dead[1], alone[1]) and torch.equal(with_dead[2], alone[2])


@SLICED
@pytest.mark.parametrize("garbage", [NAN, INF, 1e30])
def test_what_a_row_without_gradient_holds_changes_no_bit_of_the_others(backend, garbage):
    *inputs, bias = drawn((12,), device=home(backend))
    live = torch.arange(12, device=bias.device) % 3 != 1
    grads = [x * live for x in incoming(inputs[2])]
    clean = gradients(inputs, grads, bias=bias, backend=backend)
    inputs[0][~live] = garbage
    dirty = gradients(inputs, grads, bias=bias, backend=backend)
    assert all(map(torch.equal, dirty, clean)) and all(x.isfinite().all() for x in dirty)


# --- sums of many slices and blocks -----------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 7, 16, 40, 64], ids="rows {}".format)
@pytest.mark.parametrize(
    ("slices", "narrowest", "width"),
    [(64, 1, 256), (64, 257, 512), (64, 600, 700), (64, 1024, 700), (2, 1, 512), (1, 1, 700)],
)
def test_slices_and_blocks_of_any_size_give_the_same(rows, slices, narrowest, width, monkeypatch):
    *inputs, bias = drawn((40,), 12, 700, size=0.5)
    options = {"bias": bias, "softcap": 5.0, "temperature": 0.7, "backend": "chunked"}
    whole = both(*inputs, **options), gradients(inputs, incoming(inputs[2]), **options)
    monkeypatch.setattr(autograd, "SLICES", {"cpu": slices})
    monkeypatch.setattr(autograd, "NARROWEST", narrowest)
    monkeypatch.setattr(autograd, "ROWS", rows)
    assert autograd.slice_width(inputs[1]) == width
    close(both(*inputs, **options), whole[0], 2e-6)
    close(gradients(inputs, incoming(inputs[2]), **options), whole[1], 5e-6)


@pytest.mark.parametrize("width", [1, 3, 37, 70])
def test_slices_narrower_than_any_that_are_used_give_the_same(width, monkeypatch):
    *inputs, _ = drawn((6,), 12, 70, size=0.5)
    whole = both(*inputs, backend="chunked"), gradients(inputs, incoming(inputs[2]), backend="chunked")
    monkeypatch.setattr(autograd, "slice_width", lambda weight: width)
    close(both(*inputs, backend="chunked"), whole[0], 2e-6)
    close(gradients(inputs, incoming(inputs[2]), backend="chunked"), whole[1], 5e-6)


def rounded_once(made, true, unit=BF16) -> bool:
    """Whether every number is off by one rounding at most, and what float32 sums lose."""
    noise = 3e-6 * true.abs().max()
    return bool(((made.double() - true).abs() <= 1.001 * unit * true.abs() + noise).all())


@pytest.mark.parametrize("rows", [64, 4096])
@pytest.mark.parametrize("width", [1, 13, 64])
def test_the_gradient_of_a_bfloat16_weight_is_rounded_once_however_many_rows_add_up(rows, width, monkeypatch):
    # Liger#512, Liger#830, axolotl#1601, CCE#14: sums in bfloat16 stop growing
    monkeypatch.setattr(autograd, "ROWS", rows)
    monkeypatch.setattr(autograd, "slice_width", lambda weight: width)
    hidden, weight, target, bias = drawn((4096,), 64, 64, size=0.3, dtype=torch.bfloat16)
    hidden[:], target[:] = hidden[:1], target[:1]  # equal rows, so that nothing cancels
    grads = torch.full((4096,), 0.25), torch.full((4096,), 0.5)
    inputs = hidden, weight, target
    made = gradients(inputs, grads, bias=bias, backend="chunked")
    true = true_gradients(inputs, grads, bias=bias)
    assert all(rounded_once(*pair) for pair in zip(made, true, strict=True))


@pytest.mark.parametrize("rows", [5, 40])
def test_the_gradient_of_bfloat16_states_is_rounded_once_however_many_slices_add_up(rows, monkeypatch):
    # verl: the gradient of the hidden states was summed in bfloat16, slice by slice
    monkeypatch.setattr(autograd, "ROWS", rows)
    monkeypatch.setattr(autograd, "slice_width", lambda weight: 20)
    *inputs, _ = drawn((40,), 32, 2000, size=0.3, dtype=torch.bfloat16)
    grads = incoming(inputs[2])
    made, true = gradients(inputs, grads, backend="chunked"), true_gradients(inputs, grads)
    assert all(rounded_once(*pair) for pair in zip(made, true, strict=True))


# --- nothing in place -------------------------------------------------------------------------------------


@BACKENDS
def test_a_second_backward_gives_the_same_and_no_input_is_touched(backend):
    # torch's linear_cross_entropy refuses a second backward; Liger writes gradients over its inputs
    hidden, weight, target, bias = drawn(device=home(backend))
    mask = target % 4 != 0
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    g, h = incoming(target)
    tensors = [*leaves, target, mask, g, h]
    before = [(x._version, x.detach().clone()) for x in tensors]
    results = both(
        hidden, weight, target, bias=bias, mask=mask, softcap=4.0, temperature=0.5, backend=backend
    )
    values = [x.detach().clone() for x in results]
    first = torch.autograd.grad(results, leaves, (g, h), retain_graph=True)
    kept = [x.clone() for x in first]
    second = torch.autograd.grad(results, leaves, (g, h), retain_graph=True)
    third = torch.autograd.grad(results, leaves, (2 * g, 2 * h))
    assert all(map(torch.equal, first, second)) and all(map(torch.equal, first, kept))
    close(third, [2 * x for x in first], 1e-6)
    assert all(map(torch.equal, results, values))
    for tensor, (version, value) in zip(tensors, before, strict=True):
        assert tensor._version == version and torch.equal(tensor, value)


# --- the operator -----------------------------------------------------------------------------------------


@SLICED
@pytest.mark.parametrize("case", ["plain", "everything", "frozen head", "no rows"])
def test_the_operator_is_what_it_declares(backend, case):
    hidden, weight, target, bias = drawn((0,) if case == "no rows" else (2, 3), device=home(backend))
    mask = target % 2 == 0 if case == "everything" else None
    bias = bias.requires_grad_() if case == "everything" else None
    arguments = hidden.requires_grad_(), weight.requires_grad_(case != "frozen head"), target, mask, bias
    more = (0.7, 3.0, True) if case == "everything" else (1.0, None, False)
    torch.library.opcheck(autograd.head_logp, (*arguments, *more, backend))


@SLICED
@pytest.mark.parametrize(
    ("offset", "needed"),
    [
        (True, [True, True, True]),
        (False, [True, True, False]),
        (False, [True, False, False]),  # a frozen head
        (False, [False, True, False]),
        (True, [False, False, True]),
    ],
)
def test_the_gradient_operator_is_what_it_declares(backend, offset, needed):
    hidden, weight, target, bias = drawn((2, 3), dtype=torch.bfloat16, device=home(backend))
    mask, bias = target % 2 == 0, bias if offset else None
    g, h = incoming(target)
    saved = list(autograd.head_logp(hidden, weight, target, mask, bias, 0.7, 3.0, True, backend))
    arguments = g, h, saved, hidden, weight, target, mask, bias, 0.7, 3.0, backend, needed
    torch.library.opcheck(autograd.head_logp_gradient, arguments)


@SLICED
def test_compiled_with_a_frozen_head_it_gives_the_same(backend):
    hidden, weight, target, _ = drawn((7,), device=home(backend))
    hidden.requires_grad_()
    results = []
    for call in (linear_logprob, compiled(linear_logprob)):
        logp = call(hidden, weight, target, temperature=0.7, backend=backend)
        results.append((logp, *torch.autograd.grad(logp.sum(), hidden)))
    close(*results, 1e-6)
