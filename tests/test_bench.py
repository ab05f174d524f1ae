"""The benches measure what they say: turns taken, exponents fitted, losses compared."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tangolite.lab import bench_cost, bench_peers
from tangolite.lab.bench_cost import exponent, measure, over_time, steepest
from tangolite.lab.bench_peers import _loss_difference, _said, _summary


def test_the_exponent_of_a_power_is_its_power() -> None:
    sizes = (16, 40, 80, 160)
    assert exponent(sizes, [3 * s**1.5 for s in sizes]) == pytest.approx(1.5)
    assert exponent(sizes, [7.0] * 4) == pytest.approx(0.0)
    assert steepest((1, 2, 4), (1, 2, 8)) == pytest.approx(2.0)


@pytest.mark.parametrize(("axis", "size"), [("completions", 16), ("tokens", 32), ("width", 32), ("steps", 2)])
def test_every_axis_changes_what_it_names(axis: str, size: int) -> None:
    make, sizes = bench_cost.AXES[axis]
    assert size in sizes and max(sizes) / min(sizes) == 10
    run = make(size)
    row = measure(run, size, 1)
    assert row["seconds"] > 0 and row["bytes"] > 1e5
    if axis == "tokens":
        assert row["length"] == 32
    if axis == "completions":
        assert run.config.questions * run.config.group == 16
    if axis == "width":
        assert run.generator.model.config.hidden_size == 32
    if axis == "steps":
        from tangolite.tango import solve
        from tangolite.tasks import problems
        from tangolite.updates import seeded

        _, solutions = solve(run, problems(run.task, 8, "look"), 1, seeded(0))
        assert sum(len(s.steps) == 2 for s in solutions) >= 6


def test_memory_over_time_counts_every_live_tensor() -> None:
    kept: list[torch.Tensor] = []
    real = bench_cost.generator_update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            bench_cost, "generator_update", lambda run, n: kept.append(torch.zeros(250_000)) or real(run, n)
        )
        leaking = over_time(4, every=1)
    assert leaking["second_half"]["tensor_mb"] == pytest.approx(2.0, abs=0.1)
    assert abs(over_time(4, every=1)["second_half"]["tensor_mb"]) < 0.1


def test_trls_update_and_ours_take_turns_and_their_losses_agree() -> None:
    pytest.importorskip("trl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        report = bench_peers.bench_peers(("tiny",), repeats=1)
    report = json.loads(json.dumps(report))
    found = report["sizes"]["tiny"]
    assert abs(found["loss"]) > 0.05 and found["loss_difference"] < 1e-5
    assert [row["sequences"] for row in report["sampling"]] == [128, 128]
    for side in ("ours", "trl"):
        assert (
            found[side]["seconds"] > 0
            and found[side]["peak_mb"] > 100
            and found[side]["tokens_per_second"] > 0
        )


def test_the_loss_difference_sees_another_loss() -> None:
    torch.manual_seed(0)
    logp, mask = -torch.rand(4, 6), torch.ones(4, 6, dtype=torch.long)
    inputs = {"completion_mask": mask, "advantages": torch.tensor([1.0, -1.0, 2.0, -0.5])}
    inputs |= {"old_per_token_logps": logp - torch.tensor([0.1, 0.1, 0.9, 0.9])[:, None]}
    small, large = (
        math.exp(0.1),
        math.exp(0.9),
    )  # ratios; clipping at 1.2 matters where the advantage is positive
    policy = -(1.0 * small - 1.0 * small + 2.0 * 1.2 - 0.5 * large) / 4
    assert _loss_difference(policy, logp, inputs) == pytest.approx(0.0, abs=1e-6)
    assert _loss_difference(policy + 0.1, logp, inputs) == pytest.approx(0.1, abs=1e-6)
    far = inputs | {"ref_per_token_logps": logp - 1}
    k3 = bench_peers.BETA * (math.exp(-1) - 1 + 1)  # d = ref - logp = -1 at every token
    assert _loss_difference(policy + k3, logp, far) == pytest.approx(0.0, abs=1e-6)


def test_medians_and_ranges_are_those_of_the_updates() -> None:
    rows = {"ours": [{"seconds": s, "tokens": 100} for s in (1.0, 2.0, 4.0)],
            "trl": [{"seconds": s, "tokens": 100} for s in (3.0, 4.0, 6.0)]}  # fmt: skip
    ends = {"ours": {"peak_mb": 5}, "trl": {"peak_mb": 9, "loss": 0.25, "loss_difference": 1e-7}}
    found = _summary("tiny", rows, ends)
    assert found["ours"]["seconds"] == 2.0 and found["ours"]["range"] == [1.0, 4.0]
    assert found["times_trl"] == 2.0 and found["trl"]["tokens_per_second"] == 25.0
    assert "2.00 times as many" in _said("tiny", found)
