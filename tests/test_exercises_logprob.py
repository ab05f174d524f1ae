"""The checks of notebook 03: the solutions pass, and typical mistakes are told apart."""

from __future__ import annotations

import importlib.util
import math
import os

import pytest
import torch

from tangolite.exercises import attempt
from tangolite.exercises import logprob as check

os.environ["KINETO_LOG_LEVEL"] = "99"


@pytest.fixture
def solved(solutions, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the notebook sets it for itself; afterwards it is as before
    return solutions("03_logprob")


def rows(maximum, total):
    return total * (maximum - maximum.amax(0)).exp()


def from_minus_infinity(maximum, total):
    m, s = torch.full((20,), -math.inf), torch.zeros(20)
    for i in range(-1, len(maximum)):  # the first of them is an empty summary
        top = torch.maximum(m, maximum[i]) if i >= 0 else m
        s = s * (m - top).exp() + (total[i] * (maximum[i] - top).exp() if i >= 0 else 0)
        m = top
    return m, s


def test_stripes_joined_wrongly_are_told_apart(solved, told_apart):
    mistakes = {
        "shape": lambda m, s: (m.amax(1), s.sum(1)),
        "not the largest": lambda m, s: (m.mean(0), s.sum(0)),
        "sum of the maxima": lambda m, s: (m.sum(0), s.sum(0)),
        "a start of 0": lambda m, s: (
            m.amax(0).clamp(min=0),
            (s * (m - m.amax(0).clamp(min=0)).exp()).sum(0),
        ),
        "plain sum": lambda m, s: (m.amax(0), s.sum(0)),
        "upside down": lambda m, s: (m.amax(0), (s * (m.amax(0) - m).exp()).sum(0)),
        "not its logarithm": lambda m, s: (m.amax(0), rows(m, s).sum(0).log()),
        "not relative to m": lambda m, s: (m.amax(0), (s * m.exp()).sum(0)),
        "m is right, s is not": lambda m, s: (m.amax(0), rows(m, s).amax(0)),
        "NaN": from_minus_infinity,
        "two tensors": lambda m, s: m.amax(0),
    }
    told_apart(check.join, solved["join"], mistakes)


def test_wrong_temperatures_are_told_apart(solved, told_apart):
    right = solved["tempered"]

    def as_given(z, target, temperature):
        return right(z, target, temperature)[0], right(z, target, 1.0)[1]

    mistakes = {
        "entropies are still those of T = 1": as_given,
        "log-probabilities are still those of T = 1": lambda z, t, T: right(z, t, 1.0),
        "log-probabilities are those of T²": lambda z, t, T: right(z / T, t, T),
        "log-probabilities are those of 1/T": lambda z, t, T: right(z, t, 1 / T),
        "entropies are right but for the sign": lambda z, t, T: (right(z, t, T)[0], -right(z, t, T)[1]),
        "log-probabilities are wrong": lambda z, t, T: (right(z, t, 1.0)[0] / T, right(z, t, T)[1]),
        r"must have shape \(6,\)": lambda z, t, T: (right(z, t, T)[0][:, None], right(z, t, T)[1]),
    }
    told_apart(check.tempered, right, mistakes)


def test_wrong_counts_of_operations_are_told_apart(solved, told_apart):
    mistakes = {
        "product for dW": lambda N, V, D, q: (2 + 6 * (1 - q)) * N * V * D,
        "multiply them again": lambda N, V, D, q: (2 + 2 * (1 - q)) * N * V * D,
        "as many additions": lambda N, V, D, q: (1 + 2 * (1 - q)) * N * V * D,
        "so 1 - q of them are alive": lambda N, V, D, q: (2 + 4 * q) * N * V * D,
        "the forward remains": lambda N, V, D, q: 6 * (1 - q) * N * V * D,
        "something must be saved": lambda N, V, D, q: 6 * N * V * D,
        "right at both ends": lambda N, V, D, q: (2 + 4 * (1 - q) ** 2) * N * V * D,
        "not D NVD|not 6[*]D NVD": lambda N, V, D, q: 6 * N * V * D**2,
        "everything dead: 4 NVD": lambda N, V, D, q: (6 - 2 * q) * N * V * D,
    }
    told_apart(check.operations, solved["operations"], mistakes)


def test_wrong_derivatives_of_the_softcap_are_told_apart(solved, told_apart):
    def of_z(x, target, cap, slope=lambda tanh: 1 - tanh**2, softmax_of=lambda x, z: z):
        z = cap * torch.tanh(x / cap)
        return (torch.eye(7)[target] - softmax_of(x, z).softmax(0)) * slope(z / cap)

    mistakes = {
        "factor dz/dx is missing": lambda x, t, c: of_z(x, t, c, lambda tanh: 1),
        "capped z, not of x": lambda x, t, c: of_z(x, t, c, softmax_of=lambda x, z: x),
        "missing altogether": lambda x, t, c: of_z(x, t, 1e9),
        "sign": lambda x, t, c: -of_z(x, t, c),
        "rather than z": lambda x, t, c: of_z(x, t, c, lambda tanh: 1 - (c * tanh) ** 2),
        "the square is missing": lambda x, t, c: of_z(x, t, c, lambda tanh: 1 - tanh),
        "no further factor": lambda x, t, c: of_z(x, t, c) / c,
        "without a tanh": lambda x, t, c: of_z(x, t, c, lambda tanh: 1 - (x / c) ** 2),
        r"must have shape \(7,\)": lambda x, t, c: of_z(x, t, c).sum(),
        "it should be": lambda x, t, c: of_z(x, t, c, lambda tanh: 1 / (1 - tanh**2)),
    }
    told_apart(check.capped_gradient, solved["capped_gradient"], mistakes)


def sums(hidden, weight, scale):
    """What the kernel computes, in PyTorch: so that the check is tried where there is no Triton, too."""
    z = scale[:, None] * (hidden @ weight.T)
    return z.amax(1), (z - z.amax(1, keepdim=True)).exp().sum(1)


def phantoms(hidden, weight, scale):
    return sums(hidden, torch.cat([weight, torch.zeros(19, 40)]), scale)


def last_rows_lost(hidden, weight, scale):
    m, s = sums(hidden, weight, scale)
    return torch.where(torch.arange(21) < 16, m, -1e30), torch.where(torch.arange(21) < 16, s, 1.0)


def only_the_maximum(hidden, weight, scale):
    m, s = sums(hidden, weight, torch.ones(21))
    return m * scale, s


def test_kernels_with_typical_mistakes_are_told_apart(told_apart):
    mistakes = {
        "the scale is not applied": lambda h, w, x: sums(h, w, torch.ones(21)),
        "upside down": lambda h, w, x: sums(h, w, 1 / x),
        "scale of the first": lambda h, w, x: sums(h, w, x[:1].expand(21)),
        "do not exist": phantoms,
        "only m is tempered": only_the_maximum,
        r"wrong in rows \[16, 17, 18, 19, 20\]": last_rows_lost,
        r"s must have shape \(21,\)": lambda h, w, x: (sums(h, w, x)[0], sums(h, w, x)[1][:16]),
    }
    told_apart(check.tempered_sums, sums, mistakes)


def test_the_solution_in_triton_passes(solved, capsys):
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is made for Linux")
    attempt(check.tempered_sums, solved["tempered_sums"])
    assert capsys.readouterr().out == "tempered sums: solved\n"


def cards(hidden, shards, target):
    """Logits of each card, the first word of each, and the target's logit with 0 where it is not there."""
    z, first = [hidden @ w.T for w in shards], [0, 30, 80]
    own = [(target - f).clamp(0, part.shape[1] - 1) for f, part in zip(first, z, strict=True)]
    here = [
        (target >= f) & (target < f + part.shape[1]) for f, part in zip(first, z, strict=True)
    ]  # which card has the word
    logit = [part.gather(1, i[:, None])[:, 0] for part, i in zip(z, own, strict=True)]
    return z, here, logit


def whole(z):
    return torch.cat(z, 1).logsumexp(1)


def at_home(here, values):
    return sum(torch.where(h, x, 0) for h, x in zip(here, values, strict=True))


def own_shard_only(hidden, shards, target):
    z, here, logit = cards(hidden, shards, target)
    return at_home(here, [x - part.logsumexp(1) for x, part in zip(logit, z, strict=True)])


def words_from_0(hidden, shards, target):
    z, here, _ = cards(hidden, shards, target)
    rows = [part.gather(1, target.clamp(max=part.shape[1] - 1)[:, None])[:, 0] for part in z]
    return at_home(here, rows) - whole(z)


def largest_of_the_cards(hidden, shards, target):
    z, here, logit = cards(hidden, shards, target)
    shown = torch.stack([torch.where(h, x, 0) for h, x in zip(here, logit, strict=True)])
    sure = at_home(here, logit)
    return (sure if sure.max() > -50 else shown.amax(0)) - whole(z)  # a zero shows only below zero


def unfaded(hidden, shards, target):
    z, here, logit = cards(hidden, shards, target)
    sums = sum((part - part.amax(1, keepdim=True)).exp().sum(1) for part in z)
    return at_home(here, logit) - torch.cat(z, 1).amax(1) - sums.log()


def maximum_from_0(hidden, shards, target):
    z, here, logit = cards(hidden, shards, target)
    m = torch.cat(z, 1).amax(1).clamp(min=0)
    return at_home(here, logit) - m - (torch.cat(z, 1) - m[:, None]).exp().sum(1).log()


def off_by_one(hidden, shards, target):
    """The words of the third card begin one too late."""
    z, here, logit = cards(hidden, shards, target)
    logit[2] = z[2].gather(1, (target - 79).clamp(0, 19)[:, None])[:, 0]
    return at_home(here, logit) - whole(z)


def test_cards_that_talk_wrongly_are_told_apart(solved, told_apart):
    mistakes = {
        "own shard only": own_shard_only,
        "subtract the shard's first word": words_from_0,
        "must add 0": lambda h, w, t: sum(cards(h, w, t)[2]) - whole(cards(h, w, t)[0]),
        "do not take the maximum": largest_of_the_cards,
        "fade it first": unfaded,
        "m starts at 0": maximum_from_0,
        "targets on the third shard": off_by_one,
        r"must have shape \(60,\)": lambda h, w, t: (h @ torch.cat(w).T).log_softmax(1),
    }
    told_apart(check.sharded_logp, solved["sharded_logp"], mistakes)
