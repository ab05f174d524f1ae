"""Rewards: sizes and signs by hand, the released class weights, and what happens without a judgement."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tangolite.advantages import outcome_advantage, to_go
from tangolite.rewards import ClassWeights, answer_reward, generator_reward, step_rewards, verifier_reward

GOLDEN = json.loads((Path(__file__).parent / "golden" / "class_weights.json").read_text(encoding="utf-8"))


def labels(correct: int, incorrect: int) -> torch.Tensor:
    return torch.tensor([True] * correct + [False] * incorrect)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["method"])
def test_class_weights_and_averages_match_the_released_trainer(case):
    weights_of = ClassWeights(decay=case["decay"], method=case["method"])
    for step in case["steps"]:
        weights = weights_of(torch.tensor(step["labels"]))
        torch.testing.assert_close(weights, torch.tensor(step["weights"]), rtol=1e-5, atol=0)
        state = weights_of.state_dict()
        assert state["correct_ema"] == pytest.approx(step["pos_ema"], rel=1e-12)
        assert state["incorrect_ema"] == pytest.approx(step["neg_ema"], rel=1e-12)


@pytest.mark.parametrize(
    ("method", "right", "wrong"), [("sqrt_inverse", 3.7720, 0.6040), ("inverse", 6.7826, 0.1739)]
)
def test_a_class_that_first_appears_in_the_second_batch_is_counted_before_it_is_weighted(
    method, right, wrong
):
    weights_of = ClassWeights(method=method)
    weights_of(labels(0, 8))
    weights = weights_of(labels(1, 7))
    assert weights_of.state_dict() == pytest.approx({"correct_ema": 0.2, "incorrect_ema": 7.8})
    assert weights.tolist() == pytest.approx([right] + [wrong] * 7, abs=5e-5)
    assert weights.mean().item() == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("method", ["sqrt_inverse", "inverse", "none"])
@pytest.mark.parametrize("counts", [(0, 7), (7, 0)])
def test_a_batch_of_one_class_weighs_exactly_one_whatever_came_before(method, counts):
    weights_of = ClassWeights(method=method)
    weights_of(labels(3, 5))
    assert weights_of(labels(*counts)).tolist() == [1.0] * 7


def test_method_none_weighs_one_but_keeps_counting():
    weights_of = ClassWeights(method="none")
    assert weights_of(labels(1, 3)).tolist() == [1.0] * 4
    assert weights_of.state_dict() == {"correct_ema": 1.0, "incorrect_ema": 3.0}


def test_averages_survive_a_json_checkpoint_and_continue_from_it():
    saved = ClassWeights()
    saved(labels(0, 8))
    saved(labels(1, 7))
    resumed = ClassWeights()
    resumed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert resumed(labels(6, 2)).tolist() == saved(labels(6, 2)).tolist()
    assert (
        resumed.state_dict()
        == saved.state_dict()
        == pytest.approx({"correct_ema": 1.36, "incorrect_ema": 6.64})
    )


def test_a_fresh_checkpoint_starts_from_the_first_batch_after_resume():
    resumed = ClassWeights()
    resumed.load_state_dict(json.loads(json.dumps(ClassWeights().state_dict())))
    resumed(labels(6, 2))
    assert resumed.state_dict() == {"correct_ema": 6.0, "incorrect_ema": 2.0}


def test_an_empty_batch_changes_nothing():
    weights_of = ClassWeights()
    weights_of(labels(2, 2))
    assert weights_of(labels(0, 0)).shape == (0,)
    assert weights_of.state_dict() == {"correct_ema": 2.0, "incorrect_ema": 2.0}


def test_class_weights_refuse_what_they_cannot_read():
    with pytest.raises(ValueError, match=r"method='sqrt' .*'sqrt_inverse', 'inverse', 'none'"):
        ClassWeights(method="sqrt")
    with pytest.raises(ValueError, match="decay"):
        ClassWeights(decay=1.0)
    with pytest.raises(ValueError, match=r"is_correct has shape \(2, 2\)"):
        ClassWeights()(torch.ones(2, 2))
    with pytest.raises(ValueError, match="NaN"):
        ClassWeights()(torch.tensor([1.0, math.nan]))


@pytest.mark.parametrize(
    ("judgements", "rewards"),
    [
        ([True, True, False, True], [0.25, 0.25, -0.25, 0.25]),
        ([False, False, False, False], [-0.25] * 4),
        ([True], [1.0]),
        ([False], [-1.0]),
    ],
)
def test_each_step_earns_one_kth_on_the_token_that_completes_it(judgements, rewards):
    ends = [2, 4, 5, 7][: len(judgements)]
    reward, mask = step_rewards(judgements, ends, 9)
    assert reward.dtype == torch.float32 and mask.dtype == torch.bool and reward.shape == mask.shape == (9,)
    assert reward[ends].tolist() == pytest.approx(rewards)
    assert mask.nonzero().flatten().tolist() == ends
    assert reward.sum().item() == pytest.approx(sum(rewards)) and (reward[~mask] == 0).all()


@pytest.mark.parametrize("judgements", [None, [], [True, False], [True] * 4, [True, None, True]])
def test_a_verification_without_exactly_k_judgements_rewards_no_step(judgements):
    reward, mask = step_rewards(judgements, [1, 3, 5], 6)
    assert not reward.any() and not mask.any()


def test_a_solution_without_steps_has_no_step_reward():
    reward, mask = step_rewards([], [], 4)
    assert not reward.any() and not mask.any()


def test_return_to_go_of_an_extraneous_root_turns_negative_at_the_first_wrong_step():
    reward, mask = step_rewards([True, True, True, False, False], [3, 8, 12, 15, 19], 24)
    assert to_go(reward)[mask].tolist() == pytest.approx([0.2, 0.0, -0.2, -0.4, -0.2], abs=1e-6)


def test_two_steps_completed_by_one_token_add_up_there():
    reward, mask = step_rewards([True, True, False], [2, 2, 4], 5)
    assert reward.tolist() == pytest.approx([0, 0, 2 / 3, 0, -1 / 3])
    assert mask.tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("end", [-1, 6])
def test_a_step_end_outside_the_completion_is_refused(end):
    with pytest.raises(ValueError, match=rf"step_ends holds {end}.*length=6"):
        step_rewards([True], [end], 6)


def test_verifier_reward_adds_agreement_and_format_and_format_alone_stands_out_in_a_group():
    cases = [(True, 1), (False, 1), (False, 0), (True, 1), (None, 0)]
    rewards = [verifier_reward(final, True, score) for final, score in cases]
    assert rewards == pytest.approx([1.8, 0.8, 0.0, 1.8, 0.0])
    group, mask = torch.zeros(5, dtype=torch.long), torch.ones(5, 1)
    z = outcome_advantage(torch.tensor(rewards), group, mask)[:, 0]
    assert z.tolist() == pytest.approx([1.021, -0.089, -0.977, 1.021, -0.977], abs=1e-3)
    farmed = torch.tensor([verifier_reward(False, True, score) for score in (1, 0, 0, 0, 0)])
    assert outcome_advantage(farmed, group, mask)[0, 0].item() == pytest.approx(1.789, abs=1e-3)


def test_verifier_reward_without_a_final_judgement_keeps_its_format_part():
    assert verifier_reward(None, False, 0.5) == pytest.approx(0.4)
    assert verifier_reward(False, False, 0.5) == pytest.approx(1.4)
    assert verifier_reward(False, 0.0, 1.0, correctness_weight=2.0, format_weight=0.0) == 2.0
    with pytest.raises(ValueError, match="unscorable"):
        verifier_reward(True, math.nan, 1.0)


def test_generator_reward_mixes_only_where_a_final_judgement_was_found():
    outcome = torch.tensor([1.0, 1.0, 0.0, 0.0, math.nan])
    final = [True, False, True, None, True]
    mixed = generator_reward(outcome, final, 0.75)
    assert mixed[:4].tolist() == [1.0, 0.75, 0.25, 0.0] and mixed[4].isnan()
    found = torch.tensor([True, True, True, False, True])
    as_tensor = generator_reward(outcome, torch.tensor([1, 0, 1, 1, 1]), 0.75, found=found)
    torch.testing.assert_close(as_tensor, mixed, equal_nan=True)
    torch.testing.assert_close(generator_reward(outcome, final), outcome, equal_nan=True)


def test_generator_reward_refuses_a_weight_or_a_shape_that_makes_no_sense():
    with pytest.raises(ValueError, match=r"weight=1\.5"):
        generator_reward(torch.ones(2), [True, True], 1.5)
    with pytest.raises(ValueError, match=r"final has shape \(3,\), expected \(2,\)"):
        generator_reward(torch.ones(2), [True, True, None])


ANSWERS = torch.tensor([[0.9, 0.9, 1, 1, 1, 1], [0.95] * 6]).log()
ANSWER_MASK = torch.tensor([[1, 1, 0, 0, 0, 0], [1] * 6]).bool()


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("sum_logp", [-0.2107, -0.3078]),
        ("mean_logp", [-0.1054, -0.0513]),
        ("mean_prob", [0.9, 0.95]),
        ("sum_prob", [1.8, 5.7]),
        ("prod_prob", [0.81, 0.95**6]),
    ],
)
def test_answer_reward_recipes_and_that_sum_and_mean_order_two_answers_differently(recipe, expected):
    reward = answer_reward(ANSWERS, ANSWER_MASK, recipe=recipe)
    assert reward.dtype == torch.float32
    assert reward.tolist() == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("recipe", ["sum_logp", "mean_logp", "mean_prob", "sum_prob", "prod_prob"])
def test_answer_reward_ignores_masked_places_and_gives_zero_for_an_empty_answer(recipe):
    expected = answer_reward(ANSWERS, ANSWER_MASK, recipe=recipe)
    for garbage in (math.nan, math.inf, -math.inf, 1e9):
        spoiled = ANSWERS.masked_fill(~ANSWER_MASK, garbage)
        assert answer_reward(spoiled, ANSWER_MASK, recipe=recipe).tolist() == expected.tolist()
    assert answer_reward(ANSWERS, torch.zeros_like(ANSWER_MASK), recipe=recipe).tolist() == [0.0, 0.0]


def test_answer_reward_names_what_is_wrong_and_keeps_float64():
    with pytest.raises(ValueError, match=r"recipe='mean'.*'mean_logp'"):
        answer_reward(ANSWERS, ANSWER_MASK, recipe="mean")
    with pytest.raises(ValueError, match=r"answer_mask has shape \(2, 5\), expected \(2, 6\)"):
        answer_reward(ANSWERS, ANSWER_MASK[:, :5])
    assert answer_reward(ANSWERS.double(), ANSWER_MASK).dtype == torch.float64
    assert answer_reward(ANSWERS.bfloat16(), ANSWER_MASK).dtype == torch.float32
