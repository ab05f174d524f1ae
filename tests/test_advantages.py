"""Advantages: the released trainer's numbers, hand-derived cases, a five-line loop, and invariances."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import pad

from tangolite.advantages import alpha_at, mix_advantages, outcome_advantage, step_advantage, to_go

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "advantages.json").read_text(encoding="utf-8"))
SCHEDULES = json.loads((GOLDEN / "alpha_schedule.json").read_text(encoding="utf-8"))
STEP_CASES = [(i, case) for i, case in enumerate(CASES) if "step_reward" in case]


def outcome(rewards, group=None, estimator="grpo", **options):
    """One number per rollout, on completions of one token."""
    rewards = torch.as_tensor(rewards, dtype=torch.float32)
    group = torch.zeros(len(rewards), dtype=torch.long) if group is None else torch.tensor(group)
    mask = torch.ones(len(rewards), 1, dtype=torch.bool)
    return outcome_advantage(rewards, group, mask, estimator=estimator, **options)[:, 0].tolist()


def placed(length, *solutions):
    """Step rewards (B, 1, T) and their mask from one {position: reward} per solution."""
    reward = torch.zeros(len(solutions), 1, length)
    mask = torch.zeros_like(reward, dtype=torch.bool)
    for b, solution in enumerate(solutions):
        for position, value in solution.items():
            reward[b, 0, position], mask[b, 0, position] = value, True
    return reward, mask


def step(length, *solutions, **options):
    """Step advantage of one group with full masks."""
    group = torch.zeros(len(solutions), dtype=torch.long)
    mask = torch.ones(len(solutions), length, dtype=torch.bool)
    return step_advantage(*placed(length, *solutions), group, mask, **options)


# ---- golden vectors


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["estimator"])
def test_outcome_advantage_matches_the_released_trainer(case):
    reward, group = torch.tensor(case["outcome_reward_at_last_token"]), torch.tensor(case["group"])
    mask = torch.tensor(case["response_mask"])
    got = outcome_advantage(reward, group, mask, estimator=case["estimator"])
    torch.testing.assert_close(got, torch.tensor(case["outcome_advantage"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "case", [c for _, c in STEP_CASES], ids=[f"{i}-{c['estimator']}" for i, c in STEP_CASES]
)
def test_mixed_advantage_matches_the_released_trainer(case):
    reward, group = torch.tensor(case["outcome_reward_at_last_token"]), torch.tensor(case["group"])
    step_reward, step_mask = torch.tensor(case["step_reward"]), torch.tensor(case["step_mask"])
    mask, estimator = torch.tensor(case["response_mask"]), case["estimator"]
    from_outcome = outcome_advantage(reward, group, mask, estimator=estimator)
    from_steps = step_advantage(step_reward, step_mask, group, mask, estimator=estimator)
    if case["alpha"] is None:
        got = from_outcome + from_steps
    else:
        got = mix_advantages(from_outcome, from_steps, case["alpha"])
    torch.testing.assert_close(got, torch.tensor(case["advantage"]), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("case", SCHEDULES, ids=lambda case: f"{case['schedule']}-{case['alpha0']}")
def test_alpha_matches_the_released_trainer_up_to_its_last_update(case):
    total = case["total_steps"]
    for at, expected in case["at"].items():
        got = alpha_at(int(at), total, alpha0=case["alpha0"], schedule=case["schedule"])
        if int(at) > total and case["schedule"] == "cosine":
            # Here we differ: the released cosine runs on past the end and alpha rises again.
            assert expected > 5e-3 and got == 1e-3
        else:
            assert got == pytest.approx(expected, rel=1e-5)


# ---- alpha and the mix


def test_alpha_after_44_updates_of_the_recipe_and_before_the_generators_turn():
    assert alpha_at(3, 300, alpha0=0.1) == pytest.approx(0.1 * math.exp(-math.log(100) * 3 / 300))
    assert alpha_at(3, 300, alpha0=0.1) == pytest.approx(0.0955, abs=5e-5)
    for schedule in ("exp", "linear", "cosine", "none"):
        assert alpha_at(-1, 300, alpha0=0.1, schedule=schedule) == 0.0


@pytest.mark.parametrize("schedule", ["exp", "linear", "cosine"])
def test_alpha_never_rises_and_stays_at_its_minimum(schedule):
    values = [alpha_at(s, 60, alpha0=0.5, schedule=schedule) for s in range(130)]
    assert values[0] == 0.5 and set(values[60:]) == {1e-3}
    assert all(later <= earlier for earlier, later in itertools.pairwise(values))


def test_alpha_without_a_schedule_or_already_at_the_minimum_is_constant():
    assert {alpha_at(s, 10, alpha0=0.3, schedule="none") for s in (0, 5, 10, 99)} == {0.3}
    assert {alpha_at(s, 10, alpha0=0.0) for s in (0, 5, 10, 99)} == {0.0}


@pytest.mark.parametrize(
    "bad",
    [
        {"schedule": "exponential"},
        {"total_steps": 0},
        {"alpha0": -0.1},
        {"alpha_min": 0.0, "schedule": "exp"},
    ],
)
def test_alpha_refuses_what_has_no_meaning(bad):
    arguments = {"total_steps": 10, "alpha0": 0.1} | bad
    with pytest.raises(ValueError, match=next(iter(bad))):
        alpha_at(1, **arguments)


def test_mix_weighs_both_parts_and_refuses_nonsense():
    mixed = mix_advantages(torch.tensor([[1.0, 2.0]]), torch.tensor([[5.0, -2.0]]), 0.25)
    assert mixed.tolist() == [[2.0, 1.0]]
    with pytest.raises(ValueError, match="alpha"):
        mix_advantages(mixed, mixed, 1.5)
    with pytest.raises(ValueError, match=r"step has shape \(1, 3\), expected \(1, 2\)"):
        mix_advantages(mixed, torch.ones(1, 3), 0.5)


def test_to_go_sums_what_is_still_to_come_over_the_last_dimension():
    assert to_go(torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, -1.0]])).tolist() == [[6, 5, 3], [-1, -1, -1]]


# ---- outcome advantage


def test_grpo_uses_the_unbiased_std_and_a_small_epsilon():
    assert outcome([1, 0, 0, 0]) == pytest.approx([1.499997, -0.499999, -0.499999, -0.499999], abs=5e-7)


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce++"])
@pytest.mark.parametrize("value", [1.0, 0.0, 0.1, -3.7])
def test_rewards_that_are_all_equal_give_exactly_zero(estimator, value):
    assert outcome([value] * 7, estimator=estimator) == [0.0] * 7


def test_share_of_dead_groups_is_that_of_the_binomial():
    dead = 0.0
    for rewards in itertools.product([0, 1], repeat=4):
        probability = math.prod(0.25 if r else 0.75 for r in rewards)
        dead += probability * (not any(outcome(rewards)))
    assert dead == pytest.approx(0.25**4 + 0.75**4) == pytest.approx(0.3203, abs=5e-5)


def test_a_group_of_one_keeps_its_reward_under_grpo_and_gives_zero_under_rloo():
    assert outcome([1.0]) == pytest.approx([1.0], abs=2e-6)
    assert outcome([1.0], scale=False) == [1.0]
    assert outcome([1.0], estimator="rloo") == [0.0]


def test_rloo_compares_with_the_mean_of_the_others():
    assert outcome([1, 0, 0, 0], estimator="rloo") == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    eight = outcome([1, 1, 1, 0, 0, 0, 0, 0], estimator="rloo")
    assert eight == pytest.approx([0.7143] * 3 + [-0.4286] * 5, abs=5e-5)
    rewards = [0.3, -1.2, 2.0]
    others = [r - (sum(rewards) - r) / 2 for r in rewards]
    assert outcome(rewards, estimator="rloo") == pytest.approx(others, abs=1e-6)


def test_centring_alone_has_a_name_and_belongs_to_grpo():
    assert outcome([1, 0, 0, 0], scale=False) == pytest.approx([0.75, -0.25, -0.25, -0.25])
    for estimator in ("rloo", "reinforce++"):
        with pytest.raises(ValueError, match="scale=False"):
            outcome([1, 0], estimator=estimator, scale=False)


def test_groups_do_not_leak_into_each_other_in_any_order():
    assert outcome([1, 0, 1, 1], [0, 0, 1, 1]) == pytest.approx([0.7071, -0.7071, 0, 0], abs=5e-5)
    assert outcome([1, 1, 0, 1], [7, -3, 7, -3]) == pytest.approx([0.7071, 0, -0.7071, 0], abs=5e-5)


@pytest.mark.parametrize("unscorable", [math.nan, math.inf, -math.inf])
def test_an_unscorable_reward_is_not_a_wrong_one(unscorable):
    assert outcome([1, 0, 0, unscorable]) == pytest.approx([1.1547, -0.5774, -0.5774, 0], abs=1e-4)
    assert outcome([1, 0, 0, unscorable], estimator="rloo") == pytest.approx([1, -0.5, -0.5, 0])
    whitened = outcome([1, 0, 0, unscorable], estimator="reinforce++")
    assert whitened == pytest.approx([1.1547, -0.5774, -0.5774, 0], abs=1e-4)
    assert outcome([unscorable] * 3) == [0.0] * 3


def test_truncated_completions_can_be_dropped_before_or_after_the_baseline():
    after = outcome([1, 0, 0, 0])[:3]
    before = outcome([1, 0, 0])
    assert after == pytest.approx([1.5, -0.5, -0.5], abs=1e-5)
    assert before == pytest.approx([1.1547, -0.5774, -0.5774], abs=1e-4)


def test_reinforce_whitens_over_tokens_so_a_long_completion_counts_more():
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    got = outcome_advantage(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]), mask, estimator="reinforce++")
    # Four tokens with returns 1, 1, 1, 0: mean 3/4, unbiased variance 1/4.
    torch.testing.assert_close(got, torch.tensor([[0.5, 0.5, 0.5], [-1.5, 0, 0]]))


def test_whitening_a_single_valid_token_gives_zero():
    mask = torch.zeros(2, 4, dtype=torch.bool)
    mask[1, 0] = True
    reward, group = torch.tensor([3.0, 1.0]), torch.tensor([0, 0])
    assert not outcome_advantage(reward, group, mask, estimator="reinforce++").any()
    step_reward, step_mask = placed(4, {}, {0: 1.0})
    assert not step_advantage(step_reward, step_mask, group, mask, estimator="reinforce++").any()


# ---- step advantage


def test_grpo_steps_are_set_against_all_step_rewards_of_the_group():
    advantage = step(5, {0: 1.0}, {0: 0.25, 1: 0.25, 2: 0.25, 3: -0.25})
    assert advantage[0].tolist() == pytest.approx([1.5652, 0, 0, 0, 0], abs=5e-5)
    standardised = advantage[1, :4] - advantage[1, 1:]
    assert standardised.tolist() == pytest.approx([-0.1118, -0.1118, -0.1118, -1.2298], abs=5e-5)
    assert advantage[1, 0].item() == pytest.approx(-1.5652, abs=5e-5)


def test_rloo_steps_carry_the_released_factor_ten_under_a_name():
    solutions = {2: 0.5, 5: -0.5}, {2: -0.5, 5: -0.5}
    plain = step(6, *solutions, estimator="rloo", scale=1.0)
    assert 0.5 * plain[0, 0].item() == pytest.approx(0.3333, abs=5e-5)
    released = step(6, *solutions, estimator="rloo")
    assert 0.5 * released[0, 0].item() == pytest.approx(3.3333, abs=5e-5)
    torch.testing.assert_close(step(6, *solutions, scale=3.0), 3 * step(6, *solutions))


def test_reinforce_steps_whiten_the_return_to_go_over_tokens():
    advantage = step(6, {2: 0.5, 5: -0.5}, {2: -0.5, 5: -0.5}, estimator="reinforce++")
    returns = torch.tensor([[0, 0, 0, -0.5, -0.5, -0.5], [-1, -1, -1, -0.5, -0.5, -0.5]])
    torch.testing.assert_close(advantage, (returns - returns.mean()) / returns.std())


def test_reinforce_steps_leave_out_rollouts_that_no_verification_judged():
    judged = step(6, {2: 0.5, 5: -0.5}, {2: -0.5, 5: -0.5}, estimator="reinforce++")
    more = step(6, {2: 0.5, 5: -0.5}, {}, {2: -0.5, 5: -0.5}, {}, estimator="reinforce++")
    torch.testing.assert_close(more[[0, 2]], judged)
    assert not more[[1, 3]].any()


def test_tokens_after_the_last_step_get_outcome_advantage_only():
    solutions = {2: 0.5, 5: 0.5}, {1: -1.0}
    from_steps = step(8, *solutions)
    assert not from_steps[0, 6:].any() and not from_steps[1, 2:].any()
    assert from_steps[0, :6].all() and from_steps[1, :2].all()
    from_outcome = outcome_advantage(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]), torch.ones(2, 8))
    assert mix_advantages(from_outcome, from_steps, 0.1)[0, 7].item() == pytest.approx(
        0.9 * 0.70711, abs=1e-4
    )


def test_a_single_step_reward_in_a_group_is_kept_by_grpo_and_zero_under_rloo():
    assert step(3, {1: 0.5}, {})[0].tolist() == pytest.approx([0.5, 0.5, 0], abs=1e-6)
    assert not step(3, {1: 0.5}, {}, estimator="rloo").any()


def test_equal_step_rewards_give_exactly_zero():
    for estimator in ("grpo", "rloo"):
        assert not step(3, {0: 0.1, 2: 0.1}, {1: 0.1}, estimator=estimator).any()


def random_batch(seed, rollouts=9, verifications=3, length=11):
    """Unordered groups of unequal size, some verifications without any judgement."""
    draw = torch.Generator().manual_seed(seed)
    group = torch.randint(0, 4, (rollouts,), generator=draw) * 5 - 3
    lengths = torch.randint(1, length + 1, (rollouts,), generator=draw)
    mask = torch.arange(length) < lengths[:, None]
    step_mask = (torch.rand(rollouts, verifications, length, generator=draw) < 0.3) & mask[:, None]
    step_mask &= torch.rand(rollouts, verifications, 1, generator=draw) < 0.7
    step_reward = torch.randn(rollouts, verifications, length, generator=draw) * step_mask
    return torch.randn(rollouts, generator=draw), step_reward, step_mask, group, mask


def looped_steps(step_reward, step_mask, group, mask, estimator):
    z = torch.zeros_like(step_reward)
    for g in group.unique():
        here = step_mask & (group == g)[:, None, None]
        values, n = step_reward[here], int(here.sum())
        if estimator == "grpo":
            z[here] = (values - values.mean()) / (values.std() + 1e-6) if n > 1 else values / (1 + 1e-6)
        else:
            z[here] = 10 * n / (n - 1) * (values - values.mean()) if n > 1 else 0 * values
    total = torch.zeros_like(z)
    for t in range(z.shape[-1]):
        total[..., t] = z[..., t:].sum(-1)
    return total.mean(1) * mask


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("seed", range(5))
def test_step_advantage_equals_a_plain_loop(estimator, seed):
    _, *batch = random_batch(seed)
    got = step_advantage(*batch, estimator=estimator)
    torch.testing.assert_close(got, looped_steps(*batch, estimator), rtol=1e-4, atol=1e-5)


def both(batch, estimator):
    reward, step_reward, step_mask, group, mask = batch
    from_steps = step_advantage(step_reward, step_mask, group, mask, estimator=estimator)
    return outcome_advantage(reward, group, mask, estimator=estimator), from_steps


ALL = pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce++"])


@ALL
def test_permuting_the_batch_permutes_the_result(estimator):
    batch = random_batch(0)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    for plain, permuted in zip(
        both(batch, estimator), both([x[order] for x in batch], estimator), strict=True
    ):
        torch.testing.assert_close(permuted, plain[order], rtol=1e-4, atol=1e-5)


@ALL
@pytest.mark.parametrize("garbage", [1e9, math.nan, math.inf])
def test_longer_padding_and_whatever_it_holds_change_nothing(estimator, garbage):
    reward, step_reward, step_mask, group, mask = random_batch(0)
    spoiled = step_reward.masked_fill(~step_mask, garbage)
    spoiled = pad(spoiled, (0, 4), value=garbage)
    padded = reward, spoiled, pad(step_mask, (0, 4)), group, pad(mask, (0, 4))
    for plain, longer in zip(both(random_batch(0), estimator), both(padded, estimator), strict=True):
        torch.testing.assert_close(longer[:, :11], plain)
        assert not longer[:, 11:].any()


@ALL
def test_results_are_float32_unless_float64_went_in_and_zero_outside_the_mask(estimator):
    reward, step_reward, step_mask, group, mask = random_batch(2)
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        batch = reward.to(dtype), step_reward.to(dtype), step_mask.int(), group.int(), mask.float()
        for advantage in both(batch, estimator):
            assert advantage.dtype == expected and not advantage[~mask].any()


def test_wrong_shapes_and_names_are_reported_by_name():
    reward, step_reward, step_mask, group, mask = random_batch(0)
    with pytest.raises(ValueError, match=r"estimator='ppo' .*'grpo', 'rloo', 'reinforce\+\+'"):
        outcome_advantage(reward, group, mask, estimator="ppo")
    with pytest.raises(ValueError, match=r"group has shape \(4,\), expected \(9,\)"):
        outcome_advantage(reward, group[:4], mask)
    with pytest.raises(ValueError, match=r"mask has shape \(9, 10\), expected \(9, 11\)"):
        step_advantage(step_reward, step_mask, group, mask[:, :10])
    with pytest.raises(ValueError, match=r"step_mask has shape \(9, 11\), expected \(B, R, T\)"):
        step_advantage(step_reward[:, 0], step_mask[:, 0], group, mask)
    with pytest.raises(ValueError, match="estimator"):
        step_advantage(step_reward, step_mask, group, mask, estimator="GRPO")


@ALL
def test_a_step_reward_past_the_mask_gives_nothing_outside_it(estimator):
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1]]).bool()
    got = step_advantage(
        *placed(6, {1: 0.5, 5: -0.5}, {2: 1.0}), torch.zeros(2).long(), mask, estimator=estimator
    )
    assert got[0, :2].all() and not got[0, 3:].any()


def test_no_verification_at_all_gives_zeros():
    mask = torch.ones(3, 5)
    empty = torch.zeros(3, 0, 5)
    assert step_advantage(empty, empty, torch.zeros(3, dtype=torch.long), mask).shape == (3, 5)
