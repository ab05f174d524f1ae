"""The checks of notebook 2's exercises accept the solutions and tell typical mistakes apart."""

from __future__ import annotations

import pytest
import torch

from tangolite.advantages import outcome_advantage
from tangolite.exercises import gradient
from tangolite.losses import aggregate

NAME = "02_policy_gradient"


def test_leave_one_out(solutions, told_apart):
    def sums(reward):
        return reward.sum(1, keepdim=True)

    def mean(reward):
        return reward.mean(1, keepdim=True)

    mistakes = {
        "own reward": lambda reward: reward - mean(reward),
        "this is the baseline": lambda reward: (sums(reward) - reward) / (reward.shape[1] - 1),
        "sign": lambda reward: (sums(reward) - reward) / (reward.shape[1] - 1) - reward,
        "divided by G": lambda reward: reward - (sums(reward) - reward) / reward.shape[1],
        "whole batch": lambda reward: reward - (reward.sum() - reward) / (reward.numel() - 1),
        "columns": lambda reward: reward - reward.mean(0),
        "standard deviation": lambda reward: (reward - mean(reward)) / (reward.std(1, keepdim=True) + 1e-6),
        "should give 1 first": lambda reward: reward,
        r"shape, not \(3, 1\)": lambda reward: sums(reward),
        "you return list": lambda reward: reward.tolist(),
    }
    told_apart(gradient.leave_one_out, solutions(NAME)["rloo"], mistakes)


def test_the_solution_of_leave_one_out_is_the_packages_advantage(solutions):
    reward = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
    mask, group = torch.ones(20, 1, dtype=torch.bool), torch.arange(5).repeat_interleave(4)
    package = outcome_advantage(reward.flatten(), group, mask, estimator="rloo")[:, 0]
    torch.testing.assert_close(solutions(NAME)["rloo"](reward).flatten(), package)


def test_own_share(solutions, told_apart):
    mistakes = {
        "part that is lost": lambda weight: weight.diagonal(),
        "others' weights lose nothing": lambda weight: 1 - weight.sum(1),
        "column i": lambda weight: 1 - weight.sum(0),
        "plain mean only": lambda weight: torch.full((len(weight),), 1 - 1 / len(weight)),
        "undone": lambda weight: 1 / (1 - weight.diagonal()),
        r"one for each completion; yours is \(\)": lambda weight: (1 - weight.diagonal()).mean(),
        "listing of all groups": lambda weight: weight.diagonal() - 1,
        "you return float": lambda weight: 0.5,
    }
    told_apart(gradient.own_share, solutions(NAME)["shrinkage"], mistakes)


@pytest.mark.parametrize("size", [2, 3])
def test_what_the_check_measures_is_what_group_means_and_leave_one_out_do(size):
    mean = torch.full((size, size), 1 / size, dtype=torch.float64)
    others = (1 - torch.eye(size, dtype=torch.float64)) / (size - 1)
    torch.testing.assert_close(gradient._measured(mean), torch.full_like(mean[0], 1 - 1 / size))
    torch.testing.assert_close(gradient._measured(others), torch.ones_like(mean[0]))


def test_micro_batches(solutions, told_apart):
    right = solutions(NAME)["micro_share"]

    def rows(part, whole, how):
        return len(part) / len(whole)

    def tokens(part, whole, how):
        return part.sum() / whole.sum()

    def filled(part, whole, how):
        return part.any(1).sum() / whole.any(1).sum()

    def only(name, wrong):
        return lambda part, whole, how: (wrong if how == name else right)(part, whole, how)

    mistakes = {
        "every micro-batch counts the same": lambda part, whole, how: 1 / 3,
        "must add up to 1": lambda part, whole, how: 1.0,
        "upside down": lambda part, whole, how: 1 / right(part, whole, how),
        "'token': .* you weigh by completions": filled,
        "'token': .* you weigh by rows": rows,
        "'sequence': .* you weigh by tokens": tokens,
        "'sequence': a completion without tokens": only("sequence", rows),
        "'constant': its divisor is fixed": only("constant", tokens),
        "'constant': it divides by all rows": only("constant", filled),
        "rows: you have": lambda part, whole, how: 0.5,
        "you return NoneType": lambda part, whole, how: None,
        r"a tensor of shape \(1,\)|a tensor of shape \(4,\)": lambda part, whole, how: part.sum(0),
    }
    told_apart(gradient.micro_batches, right, mistakes)


@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
def test_shares_of_the_solution_put_a_loss_together_again(solutions, how):
    make = torch.Generator().manual_seed(1)
    mask = torch.arange(7) < torch.randint(0, 8, (12, 1), generator=make)
    values = torch.rand(12, 7, generator=make)
    parts = [slice(0, 5), slice(5, 6), slice(6, 12)]
    share = solutions(NAME)["micro_share"]
    total = sum(share(mask[p], mask, how) * aggregate(values[p], mask[p], how) for p in parts)
    torch.testing.assert_close(total, aggregate(values, mask, how))
