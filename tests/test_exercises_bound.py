"""The checks of notebook 9's exercises: each accepts its solution and tells typical mistakes apart."""

from __future__ import annotations

import math

import pytest
import torch

from tangolite.exercises import bound
from tangolite.losses import composite_logp, covrl_kl, hybrid_logp

ANYONE = torch.tensor([True])


@pytest.fixture
def solved(solutions):
    return solutions("09_bound")


# ---- the bound and its gap


def parts(logp_prior, answer_logp, logp_r):
    log_p, log_r = logp_prior.sum(1), logp_r.sum(1)
    joint = log_p + answer_logp
    return log_p, log_r, joint, joint - joint.logsumexp(0)


def wrong_bound(value):
    """A bound of `value(log_p, log_r, joint, answer_logp)` beside a gap that is right."""

    def answer(logp_prior, answer_logp, logp_r):
        log_p, log_r, joint, true = parts(logp_prior, answer_logp, logp_r)
        return value(log_p, log_r, joint, answer_logp), (log_r.exp() * (log_r - true)).sum()

    return answer


def wrong_gap(value):
    def answer(logp_prior, answer_logp, logp_r):
        log_p, log_r, joint, true = parts(logp_prior, answer_logp, logp_r)
        return (log_r.exp() * (joint - log_r)).sum(), value(log_p, log_r, joint, true)

    return answer


def kl(a, b):
    return (a.exp() * (a - b)).sum()


def test_bound_and_gap(solved, told_apart):
    solution = solved["bound_and_gap"]
    told_apart(
        bound.bound_and_gap,
        solution,
        {
            "two numbers": lambda *given: solution(*given)[0],
            "swapped": lambda *given: solution(*given)[::-1],
            "dim 1": lambda p, a, r: ((r.exp() * (a[:, None] + p - r)).sum(0), torch.tensor(0.0)),
            r"log p\(y\|x\) itself": wrong_bound(lambda p, r, joint, a: joint.logsumexp(0)),
            "The KL has the wrong sign": wrong_bound(lambda p, r, joint, a: (r.exp() * a).sum() + kl(r, p)),
            "is missing": wrong_bound(lambda p, r, joint, a: (r.exp() * a).sum()),
            r"KL is the wrong way round: KL\(r": wrong_bound(
                lambda p, r, joint, a: (r.exp() * a).sum() - kl(p, r)
            ),
            "mean is taken under the prior": wrong_bound(
                lambda p, r, joint, a: (p.exp() * (joint - r)).sum()
            ),
            "A plain mean over traces": wrong_bound(lambda p, r, joint, a: (joint - r).mean()),
            "The bound is 0.0000": wrong_bound(lambda p, r, joint, a: torch.tensor(0.0)),
            "gap has the wrong sign": wrong_gap(lambda p, r, joint, true: kl(r, true).neg()),
            "the KL the other way round": wrong_gap(lambda p, r, joint, true: kl(true, r)),
            r"This is KL\(r \|\| prior\)": wrong_gap(lambda p, r, joint, true: kl(r, p)),
            "not normalised": wrong_gap(lambda p, r, joint, true: kl(r, joint)),
        },
    )


def test_traces_that_r_never_writes_must_count_zero(solved, told_apart):
    def careless(logp_prior, answer_logp, logp_r):
        _, log_r, joint, true = parts(logp_prior, answer_logp, logp_r)
        return (log_r.exp() * (joint - log_r)).sum(), kl(log_r, true)

    def drops_too_many(logp_prior, answer_logp, logp_r):
        kept = logp_r.sum(1) > (-3.0 if torch.isinf(logp_r).any() else -torch.inf)
        _, log_r, joint, true = parts(logp_prior, answer_logp, logp_r)
        return (log_r.exp() * (joint - log_r))[kept].sum(), (log_r.exp() * (log_r - true))[kept].sum()

    def infinite(logp_prior, answer_logp, logp_r):
        bound_is, gap = solved["bound_and_gap"](logp_prior, answer_logp, logp_r)
        return (bound_is, torch.tensor(math.inf)) if torch.isinf(logp_r).any() else (bound_is, gap)

    told_apart(
        bound.bound_and_gap,
        solved["bound_and_gap"],
        {"NaN": careless, "never writes some": drops_too_many, "not infinity": infinite},
    )


# ---- the estimator of posterior tokens


def ours(log_p, log_q):
    return covrl_kl(log_p, log_q, torch.zeros(len(log_p), dtype=torch.bool))


def terms(log_p, log_q):
    p, q = log_p.exp(), log_q.exp()
    c = (p + q) / 2
    return c / p, c / q


def literal(log_p, log_q):
    u, s = terms(log_p, log_q)
    return s * u.log() + s - 1


def in_log_space(log_p, log_q):
    """Finite everywhere, but the difference of numbers near 1 is left in."""
    log_c = torch.logaddexp(log_p, log_q) - math.log(2)
    s = (log_c - log_q).exp()
    return s * (log_c - log_p) + s - 1


def test_posterior_kl(solved, told_apart):
    def of(value):
        return lambda log_p, log_q: value(*terms(log_p, log_q))

    told_apart(
        bound.posterior_kl,
        solved["posterior_kl"],
        {
            "One number a token": lambda p, q: in_log_space(p, q).sum(1),
            r"\*prior\*": of(lambda u, s: u * u.log() - u + 1),
            "control variate s - 1 is missing": of(lambda u, s: s * u.log()),
            "control variate has the wrong sign": of(lambda u, s: s * u.log() - s + 1),
            r"estimates KL\(p' \|\| q\)": of(lambda u, s: s * s.log() - s + 1),
            "upside down": of(lambda u, s: u.log() / s + 1 / s - 1),
            "Wrong values": of(lambda u, s: u),
            "stay in log space": literal,
            "Use expm1": in_log_space,
            "no gradient reaches log q": lambda p, q: ours(p, q.detach()),
            "a record": lambda p, q: ours(p, q) * (q.detach() - q).exp(),
            "gradient to log p is not": lambda p, q: ours(p.detach(), q) + 0 * p,
            "No gradient flows": lambda p, q: ours(p, q).detach(),
        },
    )


# ---- the calmest alpha


def chosen(spread):
    return lambda log_p, log_q, alphas: min(alphas, key=lambda alpha: spread(log_p, log_q, alpha))


def moments(weight, k):
    mean = (weight * k).sum()
    return float((weight * (k - mean) ** 2).sum())


def estimate(log_p, log_q, alpha):
    log_pi = hybrid_logp(log_p[None], log_q[None], alpha)
    return log_pi[0].exp(), covrl_kl(log_p[None], log_q[None], ANYONE, sampler_logp=log_pi)[0]


def test_calmest_alpha(solved, told_apart):
    solution = solved["calmest_alpha"]

    def own(log_p, log_q, alpha):
        ends = [moments(*estimate(log_p, log_q, end)) for end in (1.0, 0.0)]
        return alpha * ends[0] + (1 - alpha) * ends[1]

    told_apart(
        bound.calmest_alpha,
        solution,
        {
            "one number of the list": lambda p, q, alphas: [solution(p, q, alphas)],
            "place in the list": lambda p, q, alphas: alphas.index(solution(p, q, alphas)),
            "most variance": chosen(lambda p, q, a: -moments(*estimate(p, q, a))),
            r"share of the \*prior\*": chosen(lambda p, q, a: moments(*estimate(p, q, 1 - a))),
            "own template's density": chosen(own),
            "weighted with p'": chosen(
                lambda p, q, a: moments(composite_logp(p, q).exp(), estimate(p, q, a)[1])
            ),
            "plain variance": chosen(lambda p, q, a: float(estimate(p, q, a)[1].var())),
            "At 0.5 every ratio": lambda p, q, alphas: 0.5,
            "not one of the candidates": lambda p, q, alphas: 0.123,
            "least variance is at": lambda p, q, alphas: 0.05,
        },
    )


def test_calmest_alpha_may_be_a_tensor(solved):
    bound.calmest_alpha(lambda *given: torch.tensor(solved["calmest_alpha"](*given)))


def test_the_worlds_have_one_calmest_alpha_inside_the_list():
    for log_p, log_q, alphas in bound.WORLDS:
        variance = sorted(moments(*estimate(log_p, log_q, alpha)) for alpha in alphas)
        best = min(alphas, key=lambda alpha: moments(*estimate(log_p, log_q, alpha)))
        assert variance[1] > 1.02 * variance[0] and best not in (min(alphas), max(alphas))
