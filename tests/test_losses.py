"""Losses: the released numbers, hand-derived cases, the naive form beside the stable one, invariances."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

from tangolite import losses
from tangolite.losses import (
    aggregate,
    composite_logp,
    covrl_kl,
    covrl_loss,
    exact_composite_kl,
    hybrid_logp,
    kl_penalty,
    policy_loss,
    tango_loss,
)

CASES = json.loads((Path(__file__).parent / "golden" / "policy_loss.json").read_text(encoding="utf-8"))
GARBAGE = pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e9])
AGGREGATIONS = pytest.mark.parametrize("how", ["token", "sequence", "constant"])
P, Q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.2, 0.3, 0.5])
FULL = torch.ones(1, 1, dtype=torch.bool)


def row(*values):
    return torch.tensor([values], dtype=torch.float32)


# ---- golden vectors


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_policy_loss_and_penalties_match_the_released_trainer(case):
    logp = torch.tensor(case["logp"], requires_grad=True)
    old_logp, advantage, ref_logp, mask = (
        torch.tensor(case[k]) for k in ("old_logp", "advantage", "ref_logp", "response_mask")
    )
    weight = None if case["sample_weight"] is None else torch.tensor(case["sample_weight"])
    got = policy_loss(
        logp, old_logp, advantage, mask, clip_eps=case["clip_eps"], sample_weight=weight, aggregate="token"
    )
    got.loss.backward()
    assert got.loss.item() == pytest.approx(case["policy_loss"], rel=1e-5)
    torch.testing.assert_close(logp.grad, torch.tensor(case["grad_logp"]), rtol=1e-5, atol=1e-8)
    assert got.clip_fraction.item() == pytest.approx(case["clip_fraction"], rel=1e-5)
    k3 = aggregate(kl_penalty(logp, ref_logp, clamp=10.0), mask)
    assert k3.item() == pytest.approx(case["kl_k3_mean"], rel=1e-5)
    k2 = aggregate(kl_penalty(logp, ref_logp, kind="k2"), mask)
    assert k2.item() == pytest.approx(case["kl_mse_mean"], rel=1e-5)


# ---- policy loss


def test_clipping_keeps_the_pessimistic_branch_and_its_gradient():
    ratio, advantage = row(1.5, 0.5, 1.5, 0.5), row(1, 1, -1, -1)
    logp = ratio.log().requires_grad_()
    mask = torch.ones(1, 4)
    objective = [-policy_loss(logp[:, [i]], row(0), advantage[:, [i]], FULL).loss.item() for i in range(4)]
    assert objective == pytest.approx([1.2, 0.5, -1.5, -0.8])
    got = policy_loss(logp, torch.zeros(1, 4), advantage, mask)
    got.loss.backward()
    assert logp.grad.tolist()[0] == pytest.approx([0, -0.5 / 4, 1.5 / 4, 0])
    assert got.clip_fraction.item() == 0.5
    naive_kl = (ratio - 1 - ratio.log()).mean().item()
    assert got.approx_kl.item() == pytest.approx(naive_kl)


def test_every_token_has_its_own_ratio():
    got = policy_loss(row(-0.9, -0.9, -0.9), row(-1, -1, -1), row(1, 1, 1), torch.ones(1, 3))
    assert got.loss.item() == pytest.approx(-1.1052, abs=5e-5) and got.clip_fraction.item() == 0
    summed = policy_loss(row(-2.7), row(-3.0), row(1), FULL)
    assert summed.loss.item() == pytest.approx(-1.2) and summed.clip_fraction.item() == 1


@pytest.mark.parametrize(("how", "expected"), [("token", 1 / 3), ("sequence", 0.0), ("constant", 0.25)])
def test_aggregation_decides_how_much_length_counts(how, expected):
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    advantage = torch.tensor([[1.0], [-1.0]]).expand(2, 4)
    logp = torch.full((2, 4), -2.0)
    loss = policy_loss(logp, logp, advantage, mask, aggregate=how).loss.item()
    assert loss == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("how", ["token", "sequence"])
def test_a_completion_without_tokens_counts_nowhere(how):
    values, mask = torch.tensor([[1.0, 3.0], [9.0, 9.0]]), torch.tensor([[1, 1], [0, 0]])
    assert aggregate(values, mask, how).item() == 2.0


def test_constant_aggregation_takes_a_fixed_length():
    values, mask = torch.ones(2, 4), torch.ones(2, 4)
    assert aggregate(values, mask, "constant").item() == 1.0
    assert aggregate(values, mask, "constant", constant_length=16).item() == 0.25


def test_a_loss_of_zero_at_the_first_step_still_has_a_gradient():
    logp = torch.full((2, 3), -1.0, requires_grad=True)
    advantage = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    got = policy_loss(logp, logp, advantage, torch.ones(2, 3), aggregate="sequence")
    got.loss.backward()
    assert got.loss.item() == pytest.approx(0, abs=1e-7) and logp.grad.norm() > 0.1
    assert got.clip_fraction.item() == got.approx_kl.item() == 0  # the ratio of the first step is 1


def test_a_dead_group_without_kl_has_no_gradient():
    logp = torch.randn(4, 5).requires_grad_()
    got = tango_loss(logp, logp, torch.zeros(4, 5), torch.ones(4, 5), ref_logp=torch.randn(4, 5), kl_coef=0)
    got.loss.backward()
    assert not logp.grad.any()


def test_sample_weight_multiplies_the_loss_of_its_rollout():
    logp, advantage, mask = torch.randn(2, 3), torch.randn(2, 3), torch.ones(2, 3)
    old = logp + 0.1 * torch.randn(2, 3)
    alone = [policy_loss(logp[[b]], old[[b]], advantage[[b]], mask[[b]]).loss for b in range(2)]
    weighted = policy_loss(logp, old, advantage, mask, sample_weight=torch.tensor([3.0, 0.5])).loss
    torch.testing.assert_close(weighted, (3 * alone[0] + 0.5 * alone[1]) / 2)


@pytest.mark.parametrize("log_ratio", [-300.0, -3.0, -0.01, 0.0, 0.01, 1.0, 3.0, 300.0])
def test_soft_clip_bounds_the_ratio_and_leaves_it_alone_near_one(log_ratio):
    c = math.log(5)
    loss = policy_loss(row(log_ratio), row(0), row(-1), FULL, clip_eps=1e9, soft_clip=c).loss.item()
    assert loss == pytest.approx(math.exp(c * math.tanh(log_ratio / c)), rel=1e-5)
    assert 1 / 5 - 1e-6 <= loss <= 5 + 1e-5
    if abs(log_ratio) < 0.1:
        assert loss == pytest.approx(math.exp(log_ratio), rel=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
def test_huge_log_ratios_stay_finite_in_value_and_gradient(sign):
    for log_ratio in (-1e9, -200.0, 200.0, 1e9):
        logp = row(log_ratio).requires_grad_()
        got = policy_loss(logp, row(0), row(sign), FULL)
        got.loss.backward()
        assert got.loss.isfinite() and logp.grad.isfinite().all()


# ---- KL penalties


def test_kl_penalties_have_the_direction_and_the_numbers_of_the_textbook():
    logp, ref = P.log()[None], Q.log()[None]
    expected = {"k1": 0.6349, "k2": 0.6952, "k3": 0.6349}
    for kind, value in expected.items():
        assert (P * kl_penalty(logp, ref, kind=kind)).sum().item() == pytest.approx(value, abs=1e-4)
    third = {k: kl_penalty(logp, ref, kind=k)[0, 2].item() for k in ("k1", "k2", "k3", "abs")}
    assert third == pytest.approx({"k1": -1.6094, "k2": 1.2951, "k3": 2.3906, "abs": 1.6094}, abs=5e-5)
    assert kl_penalty(ref, logp)[0, 2].item() == pytest.approx(0.8094, abs=5e-5)


def test_k3_is_exact_unless_a_clamp_is_asked_for():
    for clamp, value, slope in ((None, 49.598, 1 - math.exp(4)), (10.0, 10.0, 0.0)):
        logp = row(-5.0).requires_grad_()
        kl = kl_penalty(logp, row(-1.0), clamp=clamp)
        kl.sum().backward()
        assert kl.item() == pytest.approx(value, abs=1e-3)
        assert logp.grad.item() == pytest.approx(slope, rel=1e-5)


def test_k3_in_float32_equals_the_naive_form_and_is_never_negative():
    d = torch.cat([10.0 ** torch.linspace(-9, 1, 400), -(10.0 ** torch.linspace(-9, 1, 400))])[None]
    k3 = kl_penalty(torch.zeros_like(d), d)
    naive = d.double().exp() - d.double() - 1
    assert (k3 >= 0).all()
    torch.testing.assert_close(k3.double(), naive, rtol=1e-5, atol=1e-7)


def test_a_clamped_k3_of_an_enormous_difference_has_no_nan_gradient():
    logp = row(-500.0).requires_grad_()
    kl_penalty(logp, row(0.0), clamp=10.0).sum().backward()
    assert logp.grad.item() == 0


# ---- CoVRL's pieces


def test_bregman_numbers_tell_the_two_directions_apart():
    # Tokens from p: with r = q/p, E[(r-1) - ln r] is KL(p||q) and E[r ln r - (r-1)] is KL(q||p).
    forward = (P * kl_penalty(P.log()[None], Q.log()[None])).sum().item()
    r = Q / P
    backward = (P * (r * r.log() - (r - 1))).sum().item()
    assert forward == pytest.approx(0.6349, abs=5e-5) and backward == pytest.approx(0.6758, abs=5e-5)
    # CoVRL's estimator is the second form, towards the prior: with q = 2 p' - p it gives KL(p'||p).
    composite = (P + Q) / 2
    kl = (P * covrl_kl(P.log()[None], Q.log()[None], torch.tensor([True]))).sum().item()
    assert kl == pytest.approx((composite * (composite / P).log()).sum().item(), rel=1e-5)


def test_composite_and_hybrid_equal_the_naive_form_and_its_gradient():
    log_p, log_q = P.log()[None].requires_grad_(), Q.log()[None].requires_grad_()
    torch.testing.assert_close(composite_logp(log_p, log_q), ((P + Q) / 2).log()[None])
    torch.testing.assert_close(hybrid_logp(log_p, log_q, 0.3), (0.3 * P + 0.7 * Q).log()[None])
    torch.testing.assert_close(hybrid_logp(log_p, log_q, 0.5), composite_logp(log_p, log_q))
    grads = torch.autograd.grad(composite_logp(log_p, log_q).sum(), (log_p, log_q))
    torch.testing.assert_close(torch.cat(grads), torch.stack([P / (P + Q), Q / (P + Q)]))


@pytest.mark.parametrize("alpha", [0, 0.0, 1, 1.0])
def test_hybrid_of_one_template_is_that_template_with_finite_gradients(alpha):
    log_p, log_q = row(-80.0, -1e-6).requires_grad_(), row(-1e-6, -80.0).requires_grad_()
    hybrid = hybrid_logp(log_p, log_q, alpha)
    assert torch.equal(hybrid, log_p if alpha else log_q)
    (hybrid.sum() + composite_logp(log_p, log_q).sum()).backward()
    assert log_p.grad.isfinite().all() and log_q.grad.isfinite().all()


@pytest.mark.parametrize("from_prior", [True, False])
def test_covrl_kl_in_float32_equals_the_papers_naive_forms(from_prior):
    log_p, log_q = -3 * torch.rand(1, 500), -3 * torch.rand(1, 500)
    got = covrl_kl(log_p, log_q, torch.tensor([from_prior]))
    p, q = log_p.double().exp(), log_q.double().exp()
    u, s = (p + q) / 2 / p, (p + q) / 2 / q
    naive = u * u.log() - u + 1 if from_prior else s * u.log() + s - 1
    torch.testing.assert_close(got.double(), naive, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("from_prior", [True, False])
def test_covrl_kl_is_never_negative_even_for_nearly_equal_densities(from_prior):
    gap = torch.cat([torch.zeros(1), 10.0 ** torch.linspace(-10, 1, 500)])
    log_p = -12 * torch.rand(2, 501)
    log_q = log_p + torch.stack([gap, -gap])
    kl = covrl_kl(log_p, log_q, torch.tensor([from_prior] * 2))
    assert (kl >= 0).all() and (kl[:, 0] < 1e-12).all()


@pytest.mark.parametrize("log_p, log_q", [(-80.0, -1e-6), (-1e-6, -80.0), (-80.0, -80.0), (-1e-6, -1e-6)])
@pytest.mark.parametrize("from_prior", [True, False])
def test_covrl_kl_stays_finite_and_right_at_the_extremes(log_p, log_q, from_prior):
    p, q = torch.tensor([[log_p]], requires_grad=True), torch.tensor([[log_q]], requires_grad=True)
    kl = covrl_kl(p, q, torch.tensor([from_prior]))
    kl.sum().backward()
    assert p.grad.isfinite().all() and q.grad.isfinite().all()
    log_composite = torch.logaddexp(p.double(), q.double()).item() - math.log(2)
    x, pi = log_composite - p.item(), p.item() if from_prior else q.item()
    expected = math.exp(log_composite - pi) * (x - 1 + math.exp(-x))
    assert kl.item() == pytest.approx(expected, rel=1e-4, abs=1e-12)


def test_covrl_kl_takes_the_sampler_as_a_constant():
    log_p, log_q = row(-1.0).requires_grad_(), row(-2.0).requires_grad_()
    own = covrl_kl(log_p, log_q, torch.tensor([True]))
    given = covrl_kl(log_p, log_q, torch.tensor([False]), sampler_logp=log_p)
    recorded = covrl_kl(log_p, log_q, torch.tensor([False]), sampler_logp=row(-1.0))
    grads = [torch.autograd.grad(kl.sum(), (log_p, log_q)) for kl in (own, given, recorded)]
    assert own.item() == given.item() == recorded.item()
    assert grads[0] == grads[1] == grads[2]


def test_exact_composite_kl_sums_over_the_vocabulary():
    logits = torch.randn(2, 2, 3, 5)
    log_p, log_q = logits.log_softmax(-1)
    composite = (log_p.exp() + log_q.exp()) / 2
    naive = (composite * (composite.log() - log_p)).sum(-1)
    torch.testing.assert_close(exact_composite_kl(log_p, log_q), naive, rtol=1e-4, atol=1e-6)
    assert not exact_composite_kl(log_p, log_p).gt(1e-10).any()


# ---- the whole objectives


def tango_batch(rollouts=6, length=7, seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    logp, noise, ref, advantage, entropy = -torch.rand(5, rollouts, length, generator=draw, dtype=dtype)
    lengths = torch.randint(1, length + 1, (rollouts,), generator=draw)
    mask = torch.arange(length) < lengths[:, None]
    named = {
        "ref_logp": ref,
        "entropy": -entropy,
        "sample_weight": torch.rand(rollouts, generator=draw) + 0.5,
    }
    return {
        "logp": logp,
        "old_logp": logp + 0.6 * (noise + 0.5),
        "advantage": 4 * (advantage + 0.5),
        "mask": mask,
    } | named


def covrl_batch(rollouts=6, length=7, answer=3, seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    p, q, noise_p, noise_q = -2 * torch.rand(4, rollouts, length, generator=draw, dtype=dtype)
    lengths = torch.randint(1, length + 1, (rollouts,), generator=draw)
    answer_lengths = torch.randint(1, answer + 1, (rollouts,), generator=draw)
    advantage = torch.tensor([1.0, -0.7, 0.6, 1.2, -1.0, 0.4])[:, None].expand(rollouts, length).to(dtype)
    return {
        "logp_prior": p,
        "logp_posterior": q,
        "answer_logp": -torch.rand(rollouts, answer, generator=draw, dtype=dtype),
        "old_logp_prior": p + 0.2 * (noise_p + 1),
        "old_logp_posterior": q + 0.2 * (noise_q + 1),
        "advantage": advantage,
        "mask": torch.arange(length) < lengths[:, None],
        "answer_mask": torch.arange(answer) < answer_lengths[:, None],
        "from_prior": torch.tensor([1, 1, 1, 0, 0, 1]).bool(),
        "valid": torch.tensor([1, 1, 0, 1, 1, 1]).bool(),
        "truncated": torch.tensor([0, 1, 0, 0, 1, 0]).bool(),
        "nll_weight": torch.rand(rollouts, generator=draw) + 0.5,
    }


OBJECTIVES = pytest.mark.parametrize(
    ("objective", "make"), [(tango_loss, tango_batch), (covrl_loss, covrl_batch)], ids=["tango", "covrl"]
)
LEAVES = ("logp", "entropy", "logp_prior", "logp_posterior", "answer_logp")


def value_and_gradients(objective, batch, **options):
    batch = {k: v.clone().requires_grad_() if k in LEAVES else v for k, v in batch.items()}
    got = objective(**batch, **options)
    got.loss.backward()
    return got, {k: batch[k].grad for k in LEAVES if k in batch}


def test_tango_loss_is_policy_minus_entropy_plus_kl_by_hand():
    got = tango_loss(
        row(-1.0, -2.0),
        row(-1.0, -2.0),
        row(2.0, 2.0),
        torch.ones(1, 2),
        ref_logp=row(-1.0, -1.0),
        entropy=row(0.5, 1.5),
        kl_coef=0.1,
        entropy_coef=0.01,
        sample_weight=torch.tensor([3.0]),
    )
    k3 = (0 + math.e - 2) / 2
    parts = [got.policy.item(), got.kl.item(), got.entropy.item()]
    assert parts == pytest.approx([-6.0, k3, 1.0])  # the weight 3 touches the policy term only
    assert got.loss.item() == pytest.approx(-6.0 - 0.01 * 1.0 + 0.1 * k3)


def test_tango_loss_without_reference_or_entropy_is_the_policy_loss():
    batch = tango_batch()
    four = [batch[k] for k in ("logp", "old_logp", "advantage", "mask")]
    got, plain = tango_loss(*four), policy_loss(*four)
    assert (got.loss, got.clip_fraction, got.approx_kl) == plain
    assert got.kl.item() == got.entropy.item() == 0


def test_tango_recipe_clamps_k3_and_reinforce_uses_k2():
    arguments = row(-5.0), row(-5.0), row(0.0), FULL
    assert tango_loss(*arguments, ref_logp=row(-1.0)).kl.item() == 10.0
    assert tango_loss(*arguments, ref_logp=row(-1.0), kl_clamp=None).kl.item() == pytest.approx(
        49.598, abs=1e-3
    )
    assert tango_loss(*arguments, ref_logp=row(-1.0), kl_kind="k2").kl.item() == 8.0
    far = row(-7.0).requires_grad_()  # past the clamp of k3, with a gradient
    kl = tango_loss(far, far.detach(), *arguments[2:], ref_logp=row(-1.0), kl_kind="k2", kl_coef=1.0)
    kl.loss.backward()
    assert kl.kl.item() == 18.0 and far.grad.item() == pytest.approx(-6.0)


@AGGREGATIONS
def test_covrl_loss_equals_a_loop_over_traces_and_tokens(how):
    b = {k: v.double() if v.is_floating_point() else v for k, v in covrl_batch().items()}
    alpha, eps, c = 0.4, 0.3, math.log(5)
    got = covrl_loss(**b, alpha=alpha, kl_coef=0.7, nll_coef=0.3, aggregate=how)
    policy, kl, nll = [], [], []  # per trace: a list per token, or one number
    for i in range(6):
        n = int(b["mask"][i].sum())
        p, q, old_p, old_q = (
            b[k][i, :n].exp()
            for k in ("logp_prior", "logp_posterior", "old_logp_prior", "old_logp_posterior")
        )
        composite, advantage = (p + q) / 2, b["advantage"][i, :n]
        raw = composite / (alpha * old_p + (1 - alpha) * old_q)
        ratio = torch.exp(c * torch.tanh(raw.log() / c))
        policy.append(-torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - eps, 1 + eps)))
        pi = old_p if b["from_prior"][i] else old_q
        bregman = (composite * (composite / p).log() - composite + p) / pi
        kl.append(bregman * (not b["truncated"][i]))
        kept = bool(b["from_prior"][i] and b["valid"][i] and advantage[0] > 0)
        answer = b["answer_logp"][i][b["answer_mask"][i]].sum() * b["nll_weight"][i]
        nll.append(-answer * kept / n * torch.ones(n, dtype=torch.float64))
    for name, expected in (("policy", policy), ("kl", kl), ("nll", nll)):
        if how == "token":
            value = torch.cat(expected).mean()
        elif how == "sequence":
            value = torch.stack([x.mean() for x in expected]).mean()
        else:
            value = torch.cat(expected).sum() / (6 * 7)
        assert getattr(got, name).item() == pytest.approx(value.item(), rel=1e-9), name
    torch.testing.assert_close(got.loss, got.policy + 0.3 * got.nll + 0.7 * got.kl)


@pytest.mark.parametrize("change", ["from_prior", "valid", "advantage"])
def test_only_valid_prior_traces_with_positive_advantage_teach_the_answer(change):
    batch = covrl_batch()
    taught = [0, 5]  # from the prior, valid, advantage > 0
    _, gradients = value_and_gradients(covrl_loss, batch)
    assert gradients["answer_logp"].abs().sum(1).nonzero().flatten().tolist() == taught
    batch[change] = (
        -batch[change] if change == "advantage" else batch[change].clone().index_fill_(0, torch.tensor(0), 0)
    )
    _, gradients = value_and_gradients(covrl_loss, batch)
    assert not gradients["answer_logp"][0].any()


def test_nll_is_divided_by_trace_tokens_not_by_answer_tokens():
    batch = covrl_batch() | {"nll_weight": None}
    got = covrl_loss(**batch)
    answers = (batch["answer_logp"] * batch["answer_mask"]).sum(1)[[0, 5]].sum()
    assert got.nll.item() == pytest.approx(-answers.item() / batch["mask"].sum().item(), rel=1e-5)


def test_kl_is_skipped_on_truncated_traces_but_their_tokens_still_count():
    batch = covrl_batch()
    counted = covrl_loss(**batch | {"truncated": torch.zeros(6).bool()})
    skipped = covrl_loss(**batch)
    sampler = torch.where(batch["from_prior"][:, None], batch["old_logp_prior"], batch["old_logp_posterior"])
    per_token = covrl_kl(
        batch["logp_prior"], batch["logp_posterior"], batch["from_prior"], sampler_logp=sampler
    )
    lost = (per_token * batch["mask"])[batch["truncated"]].sum() / batch["mask"].sum()
    assert lost > 0
    torch.testing.assert_close(counted.kl - skipped.kl, lost)
    assert covrl_loss(**batch | {"truncated": torch.ones(6).bool()}).kl.item() == 0


def test_kl_balancing_stops_the_gradient_into_the_posterior_and_nothing_else():
    batch = covrl_batch() | {"advantage": torch.zeros(6, 7)}  # the KL alone is left
    both, gradients = value_and_gradients(covrl_loss, batch)
    balanced, stopped = value_and_gradients(covrl_loss, batch, kl_gradient="prior")
    assert both.loss.item() == balanced.loss.item()
    assert gradients["logp_posterior"].abs().sum() > 0.01 and not stopped["logp_posterior"].any()
    torch.testing.assert_close(stopped["logp_prior"], gradients["logp_prior"])


def test_a_kl_handed_in_takes_the_place_of_the_estimate():
    batch = covrl_batch()
    exact = torch.rand(6, 7).requires_grad_()
    got = covrl_loss(**batch, kl=exact, kl_coef=2.0)
    kept = batch["mask"] & ~batch["truncated"][:, None]
    torch.testing.assert_close(got.kl, (exact * kept).sum().detach() / batch["mask"].sum())
    got.loss.backward()
    torch.testing.assert_close(exact.grad, 2 * kept / batch["mask"].sum())


def test_first_step_at_alpha_one_half_has_ratio_one():
    batch = covrl_batch()
    batch |= {f"old_logp_{k}": batch[f"logp_{k}"] for k in ("prior", "posterior")}
    got = covrl_loss(**batch)
    assert got.clip_fraction.item() == 0 and got.approx_kl.item() < 1e-12
    assert covrl_loss(**batch, alpha=0.1).approx_kl.item() > 1e-4


PRIOR_ONLY = {
    "logp_posterior": None,
    "old_logp_posterior": None,
    "from_prior": torch.ones(6, dtype=torch.bool),
}


def test_prior_only_baseline_has_the_plain_ratio_and_no_kl():
    batch = covrl_batch() | PRIOR_ONLY
    got = covrl_loss(**batch, alpha=1, soft_clip=None)
    four = [batch[k] for k in ("logp_prior", "old_logp_prior", "advantage", "mask")]
    plain = policy_loss(*four, clip_eps=0.3)
    assert got.policy.item() == plain.loss.item() and got.clip_fraction == plain.clip_fraction
    assert got.kl.item() == 0 and got.nll.item() > 0


def test_prior_only_calls_that_contradict_themselves_are_refused():
    batch = covrl_batch()
    with pytest.raises(ValueError, match="alpha=1"):
        covrl_loss(**batch | PRIOR_ONLY, alpha=0.5)
    with pytest.raises(ValueError, match="from_prior"):
        covrl_loss(**batch | PRIOR_ONLY | {"from_prior": batch["from_prior"]}, alpha=1)
    with pytest.raises(ValueError, match="kl=None"):
        covrl_loss(**batch | PRIOR_ONLY, alpha=1, kl=torch.zeros(6, 7))
    with pytest.raises(ValueError, match="both"):
        covrl_loss(**batch | {"old_logp_posterior": None})


# ---- invariances of both objectives


@OBJECTIVES
def test_everything_but_the_new_policy_is_a_constant(objective, make):
    batch = {k: v.clone().requires_grad_() if v.is_floating_point() else v for k, v in make().items()}
    objective(**batch).loss.backward()
    learned = {k for k, v in batch.items() if v.requires_grad and v.grad is not None and v.grad.any()}
    assert learned == set(batch) & set(LEAVES)


@OBJECTIVES
@AGGREGATIONS
@GARBAGE
def test_masked_places_touch_neither_value_nor_gradient(objective, make, how, garbage):
    batch = make()
    clean, clean_gradients = value_and_gradients(objective, batch, aggregate=how)
    masks = {"answer_logp": batch.get("answer_mask")}
    spoiled = {
        k: v.masked_fill(~masks.get(k, batch["mask"]), garbage)
        if v.ndim == 2 and v.is_floating_point()
        else v
        for k, v in batch.items()
    }
    got, gradients = value_and_gradients(objective, spoiled, aggregate=how)
    assert got == clean
    for name, gradient in gradients.items():
        assert torch.equal(gradient, clean_gradients[name]), name
        assert not gradient[~masks.get(name, batch["mask"])].any(), name


@OBJECTIVES
@AGGREGATIONS
def test_without_any_token_the_loss_is_zero_with_a_graph(objective, make, how):
    batch = make()
    batch["mask"] = torch.zeros_like(batch["mask"])
    got, gradients = value_and_gradients(objective, batch, aggregate=how)
    assert [value.item() for value in got] == [0.0] * len(got)
    assert all(g is None or not g.any() for g in gradients.values())


@OBJECTIVES
@AGGREGATIONS
def test_longer_padding_and_another_order_change_nothing(objective, make, how):
    batch, order = make(), torch.tensor([3, 0, 5, 1, 4, 2])
    fixed = {"aggregate": how, "constant_length": 7}
    expected = objective(**batch, **fixed)
    longer = {k: pad(v, (0, 5)) if v.ndim == 2 else v for k, v in batch.items()}
    permuted = {k: v[order] for k, v in batch.items()}
    for other in (longer, permuted):
        torch.testing.assert_close(tuple(objective(**other, **fixed)), tuple(expected))


@OBJECTIVES
@pytest.mark.parametrize("sizes", [[1] * 6, [4, 2], [5, 1]])
def test_micro_batches_weighted_by_their_tokens_add_up_to_the_whole(objective, make, sizes):
    batch = make()
    whole, gradients = value_and_gradients(objective, batch)
    tokens, total, summed = batch["mask"].sum(), 0.0, {k: [] for k in gradients}
    pieces = {k: v.split(sizes) for k, v in batch.items()}
    for i in range(len(sizes)):
        micro = {k: v[i] for k, v in pieces.items()}
        got, parts = value_and_gradients(objective, micro)
        share = micro["mask"].sum() / tokens
        total = total + share * got.loss
        for name, gradient in parts.items():
            summed[name].append(share * gradient)
    torch.testing.assert_close(total, whole.loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(torch.cat(summed[name]), gradient, msg=name)


@OBJECTIVES
@AGGREGATIONS
def test_gradients_agree_with_finite_differences_in_float64(objective, make, how):
    batch = make(dtype=torch.float64, seed=3)
    names = [k for k in LEAVES if k in batch]

    def loss(*leaves):
        return objective(**batch | dict(zip(names, leaves, strict=True)), aggregate=how).loss

    assert loss(*(batch[k] for k in names)).dtype == torch.float64
    assert torch.autograd.gradcheck(loss, [batch[k].clone().requires_grad_() for k in names])


def test_gradients_of_the_pieces_agree_with_finite_differences_in_float64():
    log_p, log_q, ref = (-3 * torch.rand(3, 2, 4, dtype=torch.float64)).unbind()
    leaves = log_p.requires_grad_(), log_q.requires_grad_()
    from_prior = torch.tensor([True, False])
    assert torch.autograd.gradcheck(composite_logp, leaves)
    assert torch.autograd.gradcheck(lambda p, q: hybrid_logp(p, q, 0.2), leaves)
    assert torch.autograd.gradcheck(lambda p, q: covrl_kl(p, q, from_prior, sampler_logp=ref), leaves)
    assert torch.autograd.gradcheck(exact_composite_kl, [x[None] for x in leaves])
    for kind in ("k1", "k2", "k3", "abs"):
        assert torch.autograd.gradcheck(lambda p, kind=kind: kl_penalty(p, ref, kind=kind), leaves[:1])


@OBJECTIVES
def test_half_precision_goes_in_and_float32_comes_out(objective, make):
    batch = {k: v.bfloat16() if v.is_floating_point() else v for k, v in make().items()}
    assert {value.dtype for value in objective(**batch)} == {torch.float32}


@OBJECTIVES
def test_only_the_loss_carries_a_gradient(objective, make):
    got, _ = value_and_gradients(objective, make())
    assert [field for field in got._fields if getattr(got, field).requires_grad] == ["loss"]


# ---- what is refused


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("aggregate", {"values": row(1, 2), "mask": row(1)}, r"mask has shape \(1, 1\), expected \(1, 2\)"),
        ("aggregate", {"values": torch.ones(3), "mask": torch.ones(3)}, r"values has shape .*\(B, T\)"),
        ("aggregate", {"values": row(1), "mask": row(1), "how": "mean"}, r"aggregate='mean' .*'constant'"),
        ("kl_penalty", {"logp": row(1), "ref_logp": row(1, 2)}, "ref_logp has shape"),
        (
            "kl_penalty",
            {"logp": row(1), "ref_logp": row(1), "kind": "k4"},
            "kind='k4' .*'k1', 'k2', 'k3', 'abs'",
        ),
        ("composite_logp", {"logp_prior": row(1), "logp_posterior": row(1, 2)}, "logp_posterior has shape"),
        ("hybrid_logp", {"logp_prior": row(1), "logp_posterior": row(1), "alpha": 1.1}, r"alpha=1\.1"),
        (
            "covrl_kl",
            {"logp_prior": row(1), "logp_posterior": row(1), "from_prior": torch.ones(2)},
            r"from_prior has shape \(2,\), expected \(1,\)",
        ),
    ],
)
def test_wrong_shapes_and_names_are_reported_by_name(function, arguments, message):
    with pytest.raises(ValueError, match=message):
        getattr(losses, function)(**arguments)


@pytest.mark.parametrize("name", ["old_logp", "advantage", "mask", "sample_weight", "ref_logp", "entropy"])
def test_tango_loss_names_the_argument_of_a_wrong_shape(name):
    batch = tango_batch()
    batch[name] = batch[name][:-1]
    with pytest.raises(ValueError, match=f"^{name} has shape"):
        tango_loss(**batch)


@pytest.mark.parametrize("name", [k for k in covrl_batch() if k not in ("logp_prior", "mask")])
def test_covrl_loss_names_the_argument_of_a_wrong_shape(name):
    batch = covrl_batch()
    batch[name] = batch[name][:-1]
    with pytest.raises(ValueError, match=f"^{name} has shape"):
        covrl_loss(**batch)


def test_options_without_meaning_are_refused():
    four = row(0), row(0), row(1), FULL
    with pytest.raises(ValueError, match="soft_clip=0"):
        policy_loss(*four, soft_clip=0)
    with pytest.raises(ValueError, match="kl_gradient='posterior'"):
        covrl_loss(**covrl_batch(), kl_gradient="posterior")
