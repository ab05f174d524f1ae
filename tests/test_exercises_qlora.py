"""The checks of notebook 11: the solutions pass, and typical mistakes are told apart."""

from __future__ import annotations

import copy
import os
from dataclasses import replace

import pytest
import torch

from tangolite.exercises import qlora as check
from tangolite.models import BASE

os.environ["KINETO_LOG_LEVEL"] = "99"


def in_place(W, A, B, scaling):
    W += scaling * B @ A
    return W


def test_adapters_merged_wrongly_are_told_apart(solutions, told_apart):
    mistakes = {
        "the correction is missing": lambda W, A, B, scaling: W.clone(),
        "W is missing": lambda W, A, B, scaling: scaling * B @ A,
        "the scaling is missing": lambda W, A, B, scaling: W + B @ A,
        "not to W": lambda W, A, B, scaling: scaling * (W + B @ A),
        "rather than added": lambda W, A, B, scaling: W - scaling * B @ A,
        "counts twice": lambda W, A, B, scaling: W + (scaling * B) @ (scaling * A),
        "transposed": lambda W, A, B, scaling: (W + scaling * B @ A).T,
        r"must be \(6, 4\)": lambda W, A, B, scaling: scaling * A.T @ A,
        "itself was changed": in_place,
        "not W and the correction": lambda W, A, B, scaling: W + scaling * (B @ A).abs(),
        "must be a tensor": lambda W, A, B, scaling: None,
    }
    told_apart(check.merged, solutions("11_qlora")["merged"], mistakes)


def rounded(scales, mean=0.0, levels=127, back=True):
    unit = (scales - mean).abs().amax() / levels
    found = ((scales - mean) / unit).round() * unit
    return found + mean if back else found


def test_scales_rounded_wrongly_are_told_apart(solutions, told_apart):
    mistakes = {
        "half of the levels": rounded,  # as given
        "lost their mean": lambda scales: rounded(scales, scales.mean(), back=False),
        "levels come back": lambda scales: (scales / scales.amax() * 255).round(),
        "nothing is rounded": lambda scales: scales,
        "coarser than as given": lambda scales: rounded(scales, scales.mean(), levels=7),
        "8 bits count 256": lambda scales: rounded(scales, levels=1000),
        "not evenly spaced": lambda scales: rounded(scales.log(), scales.log().mean()).exp(),
        "256 scales": lambda scales: scales.view(16, 16),
    }
    told_apart(check.rounded_scales, solutions("11_qlora")["rounded_scales"], mistakes)


def test_levels_from_smallest_to_largest_are_a_solution_too():
    def from_the_smallest(scales):
        unit = (scales.amax() - scales.amin()) / 255
        return ((scales - scales.amin()) / unit).round() * unit + scales.amin()

    check.rounded_scales(from_the_smallest)
    check.rounded_scales(lambda scales: rounded(scales, levels=255))  # no sign, all eight bits for the size


def without_a_copy(policy):
    start = [p.detach() for p in policy.parameters()]  # the same memory as the parameters
    return lambda rollouts: with_numbers(policy, start, rollouts)


def left_behind(policy):
    start = [p.detach().clone() for p in policy.parameters()]
    return lambda rollouts: with_numbers(policy, start, rollouts, back=False)


def with_gradient(policy):
    start = [p.detach().clone() for p in policy.parameters()]
    return lambda rollouts: with_numbers(policy, start, rollouts, grad=True)


def with_numbers(policy, numbers, rollouts, back=True, grad=False):
    now = [p.detach().clone() for p in policy.parameters()]
    for p, x in zip(policy.parameters(), numbers, strict=True):
        p.data.copy_(x)
    with torch.set_grad_enabled(grad):
        found = policy.logp(rollouts)
    for p, x in zip(policy.parameters(), now, strict=True):
        p.data.copy_(x if back else p)
    return found


def test_references_that_are_none_are_told_apart(solutions, told_apart):
    mistakes = {
        "bare base": lambda policy: replace(policy, adapter=BASE, frozen=True).logp,  # as given
        "moved when the policy learned": lambda policy: policy.logp,
        "undid": left_behind,
        "carry a gradient": with_gradient,
        "further adapter": lambda policy: policy.frozen_copy().logp,
        "is it copied": lambda policy: replace(policy, model=copy.deepcopy(policy.model), frozen=True).logp,
        "a function of rollouts": lambda policy: None,
    }
    told_apart(check.start_of, solutions("11_qlora")["start_of"], mistakes)


def test_numbers_kept_without_a_copy_are_told_to_move():
    with pytest.raises(AssertionError, match="keep copies of numbers"):
        check.start_of(without_a_copy)
