"""Checks for the exercises of notebook 9, the bound of CoVRL; answers are held against full enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from tangolite.losses import composite_logp, covrl_kl, hybrid_logp

MANY = 1e-6  # how close 64-bit answers must be


def _same(got: Tensor | float, wanted: Tensor | float, tolerance: float = MANY) -> bool:
    got, wanted = (torch.as_tensor(value, dtype=torch.float64) for value in (got, wanted))
    return got.shape == wanted.shape and torch.allclose(got, wanted, rtol=tolerance, atol=tolerance * 0.1)


def _refuse(got: Tensor, mistakes: Iterable[tuple[Tensor, str]], otherwise: str) -> None:
    """Fail with what is known about a wrong value: the first mistake that gives it, else `otherwise`."""
    for wrong, words in mistakes:
        assert not _same(got, wrong, 1e-4), words
    raise AssertionError(otherwise)


# --- 1: the bound and its gap -----------------------------------------------------------------------


def bound_and_gap(answer: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Exercise 1: the ELBO of r and its gap KL(r || true posterior), from all N traces.

    ``answer(logp_prior, answer_logp, logp_r)``: token log-probs (N, T), log p(y|z,x) (N,), token log-probs
    (N, T), where -inf is a token that r never writes; returns (bound, gap), two scalars.
    """
    for seed in range(3):
        logp_prior, answer_logp, logp_r = _traces(seed)
        found = answer(logp_prior, answer_logp, logp_r)
        assert isinstance(found, tuple | list) and len(found) == 2, (
            f"Return two numbers, (bound, gap); this returned {type(found).__name__}."
        )
        _check_bound(torch.as_tensor(found[0]), torch.as_tensor(found[1]), logp_prior, answer_logp, logp_r)
    logp_prior, answer_logp, logp_r = _traces(0)
    logp_r = _never_first_token_zero(logp_r)
    found = [float(value) for value in answer(logp_prior, answer_logp, logp_r)]
    assert not any(math.isnan(value) for value in found), (
        "NaN where r gives a trace probability zero: a computer finds 0 * (-inf) NaN; such a trace counts 0."
    )
    bound, gap = _bound(logp_prior, answer_logp, logp_r), _gap(logp_prior, answer_logp, logp_r)
    assert all(map(math.isfinite, found)), "A trace that r never writes counts 0, not infinity."
    assert _same(found[0], bound) and _same(found[1], gap), (
        "Right where r writes every trace, wrong where it never writes some: only those count 0."
    )


def _traces(seed: int, length: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Three tokens, traces of two: token log-probs under a prior and an r, and log p(y|z,x); float64."""
    draw = torch.Generator().manual_seed(seed)
    traces = torch.tensor(list(itertools.product(range(3), repeat=length)))
    row = torch.stack([0 * traces[:, 0], 1 + traces[:, 0]], 1)
    tables = 1.5 * torch.randn(2, 4, 3, generator=draw, dtype=torch.float64)
    logp_prior, logp_r = (table.log_softmax(-1)[row, traces] for table in tables)
    chance = torch.randn(len(traces), generator=draw, dtype=torch.float64)
    return logp_prior, torch.nn.functional.logsigmoid(2 * chance - 1), logp_r


def _never_first_token_zero(logp_r: Tensor) -> Tensor:
    """r made to never begin with token 0 (the first three of nine traces), normalised again."""
    first = logp_r[:, 0] - math.log(1 - float(logp_r[0, 0].exp()))
    first[:3] = -torch.inf
    return torch.stack([first, logp_r[:, 1]], 1)


def _mean(log_r: Tensor, values: Tensor) -> Tensor:
    return (log_r.exp() * values.masked_fill(log_r == -torch.inf, 0.0)).sum()


def _bound(logp_prior: Tensor, answer_logp: Tensor, logp_r: Tensor) -> Tensor:
    log_p, log_r = logp_prior.sum(1), logp_r.sum(1)
    return _mean(log_r, answer_logp + log_p - log_r)


def _gap(logp_prior: Tensor, answer_logp: Tensor, logp_r: Tensor) -> Tensor:
    joint = logp_prior.sum(1) + answer_logp
    return joint.logsumexp(0) + _mean(logp_r.sum(1), logp_r.sum(1) - joint)


def _check_bound(bound: Tensor, gap: Tensor, logp_prior: Tensor, answer_logp: Tensor, logp_r: Tensor) -> None:
    log_p, log_r = logp_prior.sum(1), logp_r.sum(1)
    joint, r, p = log_p + answer_logp, log_r.exp(), log_p.exp()
    evidence, kl = joint.logsumexp(0), (r * (log_r - log_p)).sum()
    true, right, rest = (
        joint - evidence, _bound(logp_prior, answer_logp, logp_r), _gap(logp_prior, answer_logp, logp_r)
    )  # fmt: skip
    assert bound.ndim == 0 and gap.ndim == 0, (
        f"Both are single numbers; these have shapes {tuple(bound.shape)} and {tuple(gap.shape)}. "
        "Sum the tokens of a trace first (dim 1), then over traces."
    )
    assert not (_same(bound, rest) and _same(gap, right)), "The two are swapped: the bound comes first."
    if not _same(bound, right):
        _refuse(
            bound,
            [
                (evidence, "This is log p(y|x) itself, not the bound at r: r does not enter it."),
                ((r * answer_logp).sum() + kl, "The KL has the wrong sign: it is subtracted from the mean."),
                ((r * answer_logp).sum(), "Only the mean of log p(y|z,x) under r: KL(r || p) is missing."),
                ((r * answer_logp).sum() - (p * (log_p - log_r)).sum(),
                 "The KL is the wrong way round: KL(r || p) is a mean under r of log r - log p."),
                ((p * (joint - log_r)).sum(), "The mean is taken under the prior; the traces come from r."),
                ((p * answer_logp).sum() - kl, "The mean of log p(y|z,x) is under the prior, not under r."),
                ((joint - log_r).mean(), "A plain mean over traces: weight each with its probability in r."),
                ((joint - log_r).sum(), "A plain sum over traces: weight each with its probability in r."),
            ],
            f"The bound is {float(bound):.4f}, and should be {float(right):.4f}.",
        )  # fmt: skip
    if not _same(gap, rest):
        _refuse(
            gap,
            [
                (-rest, "The gap has the wrong sign: it is never negative."),
                ((true.exp() * (true - log_r)).sum(),
                 "The gap is KL(r || true posterior), a mean under r; this is the KL the other way round."),
                (kl, "This is KL(r || prior), a part of the bound; the gap is KL(r || true posterior)."),
                (-right, "The true posterior is not normalised: subtract the logsumexp over traces."),
                ((r * (log_r - answer_logp + answer_logp.logsumexp(0))).sum(),
                 "The true posterior lacks the prior: it is p(z|x) p(y|z,x), normalised."),
            ],
            f"The bound is right; the gap is {float(gap):.4f}, and should be {float(rest):.4f}.",
        )  # fmt: skip


# --- 2: the estimator of posterior tokens -----------------------------------------------------------


def posterior_kl(answer: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Exercise 2: s log(p'/p) + s - 1, s = p'/q, for tokens that the posterior wrote, (B, T) float32.

    Finite for a prior of log p = -200, never negative and accurate where p is nearly q, and with the gradient
    that treats the sampler's density as a constant.
    """
    log_p = torch.tensor([[-0.4, -1.6, -2.3], [-3.0, -0.7, -1.1]], dtype=torch.float32)
    log_q = torch.tensor([[-1.6, -1.2, -0.7], [-0.5, -4.0, -1.6]], dtype=torch.float32)
    _check_posterior_values(answer(log_p, log_q), log_p, log_q)
    far = answer(torch.tensor([[-200.0]]).float(), torch.tensor([[-1.0]]).float())
    wanted = (199 - math.log(2)) / 2 - 0.5
    assert bool(torch.isfinite(far).all()), (
        f"At log p = -200, log q = -1 it is {float(far):g}, and should be {wanted:.2f}. "
        "exp(-200) is 0 in 32 bits: stay in log space."
    )
    assert _same(float(far), wanted, 1e-3), (
        f"At log p = -200, log q = -1 it is {float(far):g}, and should be {wanted:.2f}."
    )
    _check_posterior_near(answer)
    _check_posterior_gradient(answer, log_p[0], log_q[0])


def _check_posterior_values(found: Tensor, log_p: Tensor, log_q: Tensor) -> None:
    assert isinstance(found, Tensor) and found.shape == log_p.shape, (
        f"One number a token, shape {tuple(log_p.shape)}; got {tuple(getattr(found, 'shape', ()))}."
    )
    p, q = log_p.double().exp(), log_q.double().exp()
    c = (p + q) / 2
    u, s, bare = c / p, c / q, c / q * (c / p).log()
    if not _same(found.detach(), bare + s - 1, 1e-4):
        _refuse(
            found.detach(),
            [
                (u * u.log() - u + 1, "This is the estimator for tokens of the *prior* (u = p'/p)."),
                (bare, "The control variate s - 1 is missing: right on average, but negative at times."),
                (bare - s + 1, "The control variate has the wrong sign: add s - 1."),
                (
                    s * s.log() - s + 1,
                    "This estimates KL(p' || q): the logarithm is of p'/p.",
                ),
                (s * s.log() + s - 1, "The logarithm must be of p'/p, although s = p'/q."),
                (q / c * (c / p).log() + q / c - 1, "s is upside down: it is p'/q."),
                (u - 1 - u.log(), "This is k3 of the wrong pair: the formula begins with s log(p'/p)."),
            ],
            "Wrong values for ordinary log-probs. Check them with section 5's draft.",
        )


def _check_posterior_near(answer: Callable[[Tensor, Tensor], Tensor]) -> None:
    log_q = torch.full((1, 60), -1.0, dtype=torch.float32)
    log_p = log_q - torch.logspace(-4, -2, 60, dtype=torch.float32)
    found = answer(log_p, log_q).detach()
    assert bool((found >= 0).all()), (
        f"For p nearly q it is {float(found.min()):.1e}, below 0: numbers near 1 were subtracted. Use expm1."
    )
    gap = (log_q - log_p).double()
    x = torch.log1p(torch.expm1(gap) / 2)  # log(p'/p), accurate for small gaps in 64 bits
    true = (x - gap).exp() * (x + torch.expm1(-x))
    worst = float(((found.double() - true) / true).abs().max())
    assert worst < 0.05, (
        f"For p nearly q it is off by a factor of up to {1 + worst:.2f}: digits are lost in a difference of "
        "numbers near 1. Use expm1."
    )


def _check_posterior_gradient(
    answer: Callable[[Tensor, Tensor], Tensor], log_p: Tensor, log_q: Tensor
) -> None:
    def gradients(function: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        leaves = [x.detach()[None].clone().requires_grad_() for x in (log_p, log_q)]
        value = function(*leaves)
        assert value.requires_grad, "No gradient flows at all: only the sampler's density is a constant."
        found = torch.autograd.grad(value.sum(), leaves, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]

    own = torch.tensor([False])
    wanted, got = gradients(lambda p, q: covrl_kl(p, q, own)), gradients(answer)
    assert _same(got[0], wanted[0], 1e-3), (
        "The values are right, the gradient to log p is not: nothing of log p is a constant here."
    )
    assert bool(got[1].abs().max() > 0), (
        "The values are right, but no gradient reaches log q: q is half of p'. Detach the denominator only."
    )
    assert _same(got[1], wanted[1], 1e-3), (
        "The values are right, the gradient to log q is not. The density that drew the token is a record: "
        "detach it in the denominator of s, and there alone."
    )


# --- 3: the calmest alpha ---------------------------------------------------------------------------


def calmest_alpha(answer: Callable[[Tensor, Tensor, list[float]], float]) -> None:
    """Exercise 3: which alpha of a list gives the estimate of KL(p' || p) the least variance.

    Every token is drawn from alpha p + (1 - alpha) q, and the estimate divided by that density.
    ``answer(log_p, log_q, alphas)``: log-probs (V,) over the vocabulary; returns one of the alphas.
    """
    for log_p, log_q, alphas in WORLDS:
        found = answer(log_p, log_q, list(alphas))
        assert isinstance(found, int | float) or getattr(found, "ndim", None) == 0, (
            f"Return one number of the list; this returned {type(found).__name__}."
        )
        found = float(found)
        right, mistakes = _best(log_p, log_q, alphas, _spread), _alpha_mistakes(log_p, log_q, alphas)
        if not math.isclose(found, right, rel_tol=1e-5):
            for wrong, words in mistakes:
                assert not math.isclose(found, wrong, rel_tol=1e-5), words
            assert any(math.isclose(found, a, rel_tol=1e-5) for a in alphas), (
                f"{found:g} is not one of the candidates {alphas}: return an element of the list."
            )
            raise AssertionError(f"In one world this says {found:g}; the least variance is at {right:g}.")


def _distribution(*weights: float) -> Tensor:
    weight = torch.tensor(weights, dtype=torch.float64)
    return (weight / weight.sum()).log()


CANDIDATES = [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
WORLDS = (  # a mirror world, then lopsided ones: in one of them at least each typical mistake picks another
    (_distribution(1, 7, 55), _distribution(55, 7, 1), [0.98, 0.9, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02]),
    (_distribution(1, 50, 20, 50), _distribution(4, 2, 8, 90), CANDIDATES),
    (_distribution(1, 20, 1, 2), _distribution(4, 1, 2, 90), CANDIDATES),
)  # fmt: skip


def _estimate(log_p: Tensor, log_q: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """(chance, estimate) of every token, drawn from the hybrid and divided by its density."""
    log_pi = hybrid_logp(log_p[None], log_q[None], alpha)
    k = covrl_kl(log_p[None], log_q[None], torch.tensor([True]), sampler_logp=log_pi)
    return log_pi[0].exp(), k[0]


def _variance(chance: Tensor, k: Tensor) -> float:
    mean = (chance * k).sum() / chance.sum()
    return float((chance * (k - mean) ** 2).sum() / chance.sum())


def _spread(log_p: Tensor, log_q: Tensor, alpha: float) -> float:
    return _variance(*_estimate(log_p, log_q, alpha))


def _own_spread(log_p: Tensor, log_q: Tensor, alpha: float) -> float:
    return alpha * _spread(log_p, log_q, 1.0) + (1 - alpha) * _spread(log_p, log_q, 0.0)


def _weighted_by(log_weight: Tensor) -> Callable[[Tensor, Tensor, float], float]:
    return lambda log_p, log_q, alpha: _variance(log_weight.exp(), _estimate(log_p, log_q, alpha)[1])


def _flat(log_p: Tensor, log_q: Tensor, alpha: float) -> float:
    return float(_estimate(log_p, log_q, alpha)[1].var())


def _best(log_p: Tensor, log_q: Tensor, alphas: list[float], spread: Callable, pick: Callable = min) -> float:
    return pick(alphas, key=lambda alpha: spread(log_p, log_q, alpha))


def _alpha_mistakes(log_p: Tensor, log_q: Tensor, alphas: list[float]) -> list[tuple[float, str]]:
    place = alphas.index(_best(log_p, log_q, alphas, _spread))
    swapped = _best(log_q, log_p, alphas, lambda q, p, alpha: _spread(p, q, 1 - alpha))
    return [
        (place, f"{place} is a place in the list: return the alpha that stands there."),
        (_best(log_p, log_q, alphas, _spread, max), "This alpha has the most variance, not the least."),
        (swapped, "alpha is the share of the *prior*; here it seems to weight the posterior."),
        (_best(log_p, log_q, alphas, _own_spread),
         "Calmest if each token is divided by its own template's density; here it is the hybrid's."),
        (_best(log_p, log_q, alphas, _weighted_by(composite_logp(log_p, log_q))),
         "The variance is weighted with p'; the tokens are drawn from alpha p + (1 - alpha) q."),
        (_best(log_p, log_q, alphas, _flat),
         "A plain variance over the vocabulary: weight each token with its chance of being drawn."),
        (0.5, "At 0.5 every ratio p'/p_hyb is 1; that is not the least variance. Compare all candidates."),
    ]  # fmt: skip
