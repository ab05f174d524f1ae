"""Exact enumeration of a world of 3 tokens and strings of length 3: what the estimators are, without
sampling.

A tabular autoregressive policy has one row of logits per prefix (1 + 3 + 9 = 13 rows). All 27 strings are
listed, so every expectation is a finite sum and every gradient of it exact; nothing here has sampling noise.
"""

from __future__ import annotations

import itertools
import math

import pytest
import sympy
import torch

from tangolite.advantages import outcome_advantage
from tangolite.losses import (
    composite_logp,
    covrl_kl,
    exact_composite_kl,
    hybrid_logp,
    kl_penalty,
    policy_loss,
)

V, T = 3, 3
STRINGS = torch.tensor(list(itertools.product(range(V), repeat=T)))
N = len(STRINGS)
PREFIX = torch.stack(
    [torch.zeros(N, dtype=torch.long), 1 + STRINGS[:, 0], 4 + V * STRINGS[:, 0] + STRINGS[:, 1]], 1
)
MASK = torch.ones(N, T, dtype=torch.bool)
SEEDS = pytest.mark.parametrize("seed", range(3))


def table(seed, width=1.0):
    """Logits of a random policy, in float64: (13, 3)."""
    draw = torch.Generator().manual_seed(seed)
    return (width * torch.randn(13, V, generator=draw, dtype=torch.float64)).requires_grad_()


def numbers(seed, n=N):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed + 100), dtype=torch.float64)


def token_logp(logits):
    """(27, 3): log-prob of each token of each string given its prefix."""
    return logits.log_softmax(-1)[PREFIX, STRINGS]


def prefix_weights(logp):
    """(27, 3): probability of the string, as a constant weight under which sums over strings are
    expectations."""
    return logp.detach().sum(1).exp()[:, None].expand(N, T)


def gradient(value, *leaves):
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, leaves, retain_graph=True)])


def cosine(a, b):
    return (a @ b / a.norm() / b.norm()).item()


def expected_gradient(logits, rewards, size, estimator, **options):
    """Expectation of policy_loss's gradient over every group of `size` strings, each weighted by its
    probability.

    All groups go through one call as one batch: the probability of a group is the sample_weight of its
    members. The result is scaled to the objective's gradient: times tokens of the batch, over members of a
    group, with the sign of ascent.
    """
    logp = token_logp(logits)
    members = torch.cartesian_prod(*[torch.arange(N)] * size).reshape(-1, size)
    probability = logp.detach().sum(1)[members].sum(1).exp().repeat_interleave(size)
    group, members = torch.arange(len(members)).repeat_interleave(size), members.flatten()
    mask = MASK[members]
    advantage = outcome_advantage(rewards[members], group, mask, estimator=estimator, **options)
    loss = policy_loss(logp[members], logp[members], advantage, mask, sample_weight=probability).loss
    return -gradient(loss, logits) * mask.sum() / size


def exact_gradient(logits, rewards):
    return gradient((token_logp(logits).sum(1).exp() * rewards).sum(), logits)


# ---- policy gradient


@SEEDS
def test_policy_loss_is_reinforce_in_expectation(seed):
    logits, rewards = table(seed), numbers(seed)
    logp = token_logp(logits)
    weight = logp.detach().sum(1).exp()
    loss = policy_loss(logp, logp, rewards[:, None].expand(N, T), MASK, sample_weight=weight).loss
    torch.testing.assert_close(-gradient(loss, logits) * N * T, exact_gradient(logits, rewards))


def test_one_string_at_a_time_gives_the_same_expectation():
    logits, rewards = table(0), numbers(0)
    total = torch.zeros(13 * V, dtype=torch.float64)
    for i in range(N):
        logp = token_logp(logits)[i : i + 1]
        loss = policy_loss(logp, logp, rewards[i].expand(1, T), MASK[:1]).loss
        total -= logp.detach().sum().exp() * T * gradient(loss, logits)
    torch.testing.assert_close(total, exact_gradient(logits, rewards))


@pytest.mark.parametrize("size", [2, 3])
def test_rloo_is_unbiased(size):
    logits, rewards = table(0), numbers(0)
    got = expected_gradient(logits, rewards, size, "rloo")
    torch.testing.assert_close(got, exact_gradient(logits, rewards))


@pytest.mark.parametrize("size", [2, 3])
def test_centring_alone_shrinks_the_gradient_by_the_share_of_the_others(size):
    logits, rewards = table(1), numbers(1)
    got = expected_gradient(logits, rewards, size, "grpo", scale=False)
    torch.testing.assert_close(got, exact_gradient(logits, rewards) * (size - 1) / size)


@pytest.mark.parametrize(("size", "std"), [(2, math.sqrt(1 / 2)), (3, math.sqrt(1 / 3))])
def test_grpo_has_the_exact_direction_when_all_mixed_groups_share_one_std(size, std):
    # Rewards 0 or 1: every group of 2 or 3 that is not dead has the same std, and GRPO is centring divided by
    # it.
    logits, rewards = table(2), (numbers(2) > 0.5).double()
    got, exact = expected_gradient(logits, rewards, size, "grpo"), exact_gradient(logits, rewards)
    assert cosine(got, exact) == pytest.approx(1, abs=1e-9)
    assert (got.norm() / exact.norm()).item() == pytest.approx((size - 1) / size / std, rel=1e-5)


def test_grpo_bends_the_direction_a_little_for_graded_rewards():
    logits, rewards = table(2), numbers(2)
    bent = cosine(expected_gradient(logits, rewards, 3, "grpo"), exact_gradient(logits, rewards))
    assert 0.9 < bent < 0.9999


# ---- KL of a policy against a reference


@SEEDS
def test_k1_and_k3_are_the_exact_kl_in_expectation_and_k2_is_not(seed):
    logp, ref = token_logp(table(seed)), token_logp(table(seed + 50))
    exact = (logp.sum(1).exp() * (logp - ref).sum(1)).sum().item()
    expected = {
        k: (prefix_weights(logp) * kl_penalty(logp, ref, kind=k)).sum().item() for k in ("k1", "k2", "k3")
    }
    assert expected["k1"] == pytest.approx(exact, rel=1e-9)
    assert expected["k3"] == pytest.approx(exact, rel=1e-9)
    assert abs(expected["k2"] - exact) > 0.01 * exact


def test_as_a_loss_k2_follows_the_kl_k3_its_reverse_and_k1_nothing():
    logits, ref = table(0), table(1).detach()
    policy, reference = logits[0].log_softmax(-1), ref[0].log_softmax(-1)
    forward = gradient((policy.exp() * (policy - reference)).sum(), logits)
    reverse = gradient((reference.exp() * (reference - policy)).sum(), logits)

    def expected(kind):
        penalty = kl_penalty(policy[None], reference[None], kind=kind)
        return gradient((policy.exp().detach() * penalty).sum(), logits)

    torch.testing.assert_close(expected("k2"), forward)
    torch.testing.assert_close(expected("k3"), reverse)
    torch.testing.assert_close(expected("k1"), torch.zeros(13 * V, dtype=torch.float64))
    assert cosine(forward, reverse) < 0.999


# ---- CoVRL's KL estimator


def sampler_of(name, log_p, log_q):
    """log pi and the arguments that tell covrl_kl about it."""
    own = torch.tensor([name == "prior"])
    if name in ("prior", "posterior"):
        return (log_p if name == "prior" else log_q), own, None
    log_pi = hybrid_logp(log_p, log_q, {"composite": 0.5, "hybrid": 0.1}[name])
    return log_pi, own, log_pi


@pytest.mark.parametrize("name", ["prior", "posterior", "composite", "hybrid"])
@SEEDS
def test_covrl_kl_is_unbiased_in_value_and_gradient_whatever_sampled_the_token(name, seed):
    prior, posterior = table(seed), table(seed + 50)
    log_p, log_q = prior[:1].log_softmax(-1), posterior[:1].log_softmax(-1)
    exact = exact_composite_kl(log_p, log_q).sum()
    log_pi, from_prior, given = sampler_of(name, log_p, log_q)
    estimate = covrl_kl(log_p, log_q, from_prior, sampler_logp=given)
    expectation = (log_pi.exp().detach() * estimate).sum()
    assert expectation.item() == pytest.approx(exact.item(), rel=1e-9)
    composite = composite_logp(log_p, log_q)
    naive = (composite.exp() * (composite - log_p)).sum()
    assert exact.item() == pytest.approx(naive.item(), rel=1e-9)
    wanted = torch.autograd.grad(naive, (prior, posterior), retain_graph=True)
    got = torch.autograd.grad(expectation, (prior, posterior))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("from_prior", [True, False])
def test_covrl_kl_over_whole_traces_is_the_kl_at_the_prefixes_they_visit(from_prior):
    prior, posterior = table(0), table(50)
    log_p, log_q = token_logp(prior), token_logp(posterior)
    weight = prefix_weights(log_p if from_prior else log_q)
    estimate = covrl_kl(log_p, log_q, torch.full((N,), from_prior))
    at_prefix = exact_composite_kl(prior.log_softmax(-1)[None], posterior.log_softmax(-1)[None])[0][PREFIX]
    torch.testing.assert_close((weight * estimate).sum(), (weight * at_prefix).sum())
    got = gradient((weight * estimate).sum(), prior, posterior)
    torch.testing.assert_close(got, gradient((weight * at_prefix).sum(), prior, posterior))


def through_the_denominator(log_p, log_q, from_prior):
    """The same estimate with the sampler's density left in the graph."""
    log_pi = log_p if from_prior else log_q
    p, composite = log_p.exp(), composite_logp(log_p, log_q)
    return (composite.exp() * (composite - log_p) - composite.exp() + p) / log_pi.exp()


def test_a_gradient_through_the_denominator_is_biased_and_the_detached_one_is_not():
    # How large the bias is depends on how peaked the worlds are: at width 1 it is .98 and .29.
    cosines, errors = [], []
    for seed in range(200):
        prior, posterior = table(seed, width=2.0), table(seed + 1000, width=2.0)
        log_p, log_q = prior[:1].log_softmax(-1), posterior[:1].log_softmax(-1)
        exact = gradient(exact_composite_kl(log_p, log_q).sum(), prior, posterior)
        for from_prior in (True, False):
            weight = (log_p if from_prior else log_q).exp().detach()
            attached = through_the_denominator(log_p, log_q, from_prior)
            detached = covrl_kl(log_p, log_q, torch.tensor([from_prior]))
            torch.testing.assert_close(attached, detached)  # one value, two gradients
            biased = gradient((weight * attached).sum(), prior, posterior)
            torch.testing.assert_close(gradient((weight * detached).sum(), prior, posterior), exact)
            cosines.append(cosine(biased, exact))
            errors.append(((biased - exact).norm() / exact.norm()).item())
    mean_cosine, mean_error = sum(cosines) / len(cosines), sum(errors) / len(errors)
    print(f"through the denominator: cosine {mean_cosine:.3f}, relative error {mean_error:.3f}")
    assert mean_cosine == pytest.approx(0.94, abs=0.02) and mean_error == pytest.approx(0.63, abs=0.05)


def test_the_posterior_sample_is_the_calmer_one_where_only_the_posterior_finds_the_token_likely():
    log_p = torch.tensor([[0.01, 0.98, 0.01]], dtype=torch.float64).log()
    log_q = torch.tensor([[0.98, 0.01, 0.01]], dtype=torch.float64).log()
    assert exact_composite_kl(log_p[None], log_q[None]).item() == pytest.approx(1.59, abs=5e-3)
    for from_prior, std in ((True, 14.4), (False, 1.3)):
        k = covrl_kl(log_p, log_q, torch.tensor([from_prior]))
        weight = (log_p if from_prior else log_q).exp()
        mean = (weight * k).sum()
        assert mean.item() == pytest.approx(1.59, abs=5e-3)
        assert (weight * (k - mean) ** 2).sum().sqrt().item() == pytest.approx(std, abs=0.05)


def test_both_printed_estimators_are_one_formula():
    p, q, s = sympy.symbols("p q s", positive=True)
    composite = (p + q) / 2

    def bregman(pi):
        return (composite * sympy.log(composite / p) - composite + p) / pi

    u, k3_ratio = composite / p, p / composite
    assert sympy.simplify(bregman(p) - (u * sympy.log(u) - u + 1)) == 0
    assert sympy.simplify(bregman(q) - (composite / q * sympy.log(composite / p) + composite / q - 1)) == 0
    assert sympy.simplify(bregman(composite) - (k3_ratio - 1 + sympy.log(composite / p))) == 0
    in_s = s * sympy.log(s / (2 * s - 1)) + s - 1  # p / q = 2 s - 1
    assert sympy.simplify(bregman(q).subs(p, (2 * s - 1) * q) - in_s) == 0
    assert sympy.simplify(sympy.diff(in_s, s, 2) - 1 / (s * (2 * s - 1) ** 2)) == 0
    assert in_s.subs(s, 1) == 0 and sympy.diff(in_s, s).subs(s, 1) == 0


def test_with_the_wrong_sign_or_no_control_variate_the_estimate_goes_negative():
    # s = 2, that is p = 3 q: the token is three times likelier under the prior.
    log_p, log_q = torch.tensor([[0.6]]).log(), torch.tensor([[0.2]]).log()
    right = covrl_kl(log_p, log_q, torch.tensor([False])).item()
    bare = 2 * math.log(2 / 3)
    assert right == pytest.approx(bare + 2 - 1, rel=1e-5) and right == pytest.approx(0.19, abs=5e-3)
    assert bare == pytest.approx(-0.81, abs=5e-3)
    assert bare - (2 - 1) == pytest.approx(-1.81, abs=5e-3)


# ---- CoVRL's bound and its policy gradient


def composite_table(prior, posterior):
    return composite_logp(prior.log_softmax(-1), posterior.log_softmax(-1)).detach()


def bound_and_evidence(prior, posterior, answer_logp):
    """E_p'[log p(y|z,x)] - KL(p' || p), and log p(y|x), by enumeration."""
    log_prior = prior.detach().log_softmax(-1)[PREFIX, STRINGS].sum(1)
    log_composite = composite_table(prior, posterior)[PREFIX, STRINGS].sum(1)
    bound = (log_composite.exp() * (answer_logp - log_composite + log_prior)).sum()
    return bound.item(), torch.logsumexp(log_prior + answer_logp, 0).item()


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_holds(seed):
    answer_logp = torch.nn.functional.logsigmoid(3 * numbers(seed))
    bound, evidence = bound_and_evidence(table(seed), table(seed + 50), answer_logp)
    assert bound < evidence


def test_the_bound_is_tight_when_the_composite_is_the_true_posterior():
    prior, answer_logp = table(0), torch.nn.functional.logsigmoid(0.3 * numbers(0))
    joint = (token_logp(prior).sum(1) + answer_logp).exp().detach()
    reached = torch.zeros(13, V, dtype=torch.float64)
    for t in range(T):
        reached.index_put_((PREFIX[:, t], STRINGS[:, t]), joint, accumulate=True)
    true_posterior = reached / reached.sum(1, keepdim=True)  # p(z_t | prefix, y)
    posterior = 2 * true_posterior - prior.detach().softmax(-1)  # so that (p + q) / 2 is the true posterior
    assert (posterior > 0).all()
    bound, evidence = bound_and_evidence(prior, posterior.log(), answer_logp)
    assert bound == pytest.approx(evidence, abs=1e-12)
    moved, evidence = bound_and_evidence(prior, table(50), answer_logp)
    assert moved < evidence - 0.01


def test_the_bound_is_tight_when_the_trace_does_not_matter_and_both_templates_agree():
    prior = table(3)
    bound, evidence = bound_and_evidence(prior, prior, torch.full((N,), -1.7, dtype=torch.float64))
    assert bound == pytest.approx(evidence, abs=1e-12) and evidence == pytest.approx(-1.7)


def covrl_policy_gradient(prior, posterior, rewards, length, weigh_sequences=False):
    """Expected gradient when half of all traces come whole from each template, on-policy (every ratio is
    1)."""
    log_p, log_q = token_logp(prior)[:, :length], token_logp(posterior)[:, :length]
    new = composite_logp(log_p, log_q)
    sampled = (log_p.sum(1).exp() + log_q.sum(1).exp()).detach() / 2
    weight = new.detach().sum(1).exp() if weigh_sequences else sampled
    advantage = rewards[:, None].expand(N, length)
    old = hybrid_logp(log_p, log_q, 0.5)
    loss = policy_loss(new, old, advantage, MASK[:, :length], clip_eps=0.3, sample_weight=weight).loss
    got = -gradient(loss, prior, posterior) * N * length
    exact = gradient((new.sum(1).exp() * rewards).sum(), prior, posterior)
    return got, exact


@SEEDS
def test_covrl_policy_term_is_exact_for_one_token_and_biased_for_whole_traces(seed):
    prior, posterior, rewards = table(seed), table(seed + 50), numbers(seed)
    first = rewards[torch.arange(N) // 9 * 9]  # a reward that depends on the first token alone
    got, exact = covrl_policy_gradient(prior, posterior, first, length=1)
    torch.testing.assert_close(got, exact)
    got, exact = covrl_policy_gradient(prior, posterior, rewards, length=3)
    assert cosine(got, exact) < 0.995
    got, exact = covrl_policy_gradient(prior, posterior, rewards, length=3, weigh_sequences=True)
    torch.testing.assert_close(got, exact)


def test_composite_gradient_is_shared_by_how_likely_each_template_finds_the_token():
    prior, posterior = table(0), table(50)
    log_p, log_q = prior.log_softmax(-1), posterior.log_softmax(-1)
    share = (log_p.exp() / (log_p.exp() + log_q.exp())).detach()
    for leaf, logp, w in ((prior, log_p, share), (posterior, log_q, 1 - share)):
        got = torch.autograd.grad(composite_logp(log_p, log_q)[0, 0], leaf, retain_graph=True)[0]
        alone = torch.autograd.grad(logp[0, 0], leaf, retain_graph=True)[0]
        torch.testing.assert_close(got, w[0, 0] * alone)
