"""The same seed gives the same bits; how a batch is cut for memory's sake changes nothing that matters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import assert_same_run
from safetensors.torch import load_file

from tangolite.checkpoints import read_metrics
from tangolite.cli import main

RECIPES = ("tango-tiny", "covrl-tiny")


@pytest.fixture
def only_deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_seed_gives_the_same_bits_of_metrics_and_weights(recipe, command, whole, tmp_path) -> None:
    torch.manual_seed(1234)  # whatever state the process is in
    assert main(command(recipe, tmp_path / "run")) == 0
    assert_same_run(tmp_path / "run", whole[recipe])


@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_knows_of_nothing_on_a_cpu_that_is_not_deterministic(
    recipe, command, whole, tmp_path, only_deterministic_algorithms
) -> None:
    """It raises where it does; and with what it takes instead the bits stay the same."""
    assert main(command(recipe, tmp_path / "run")) == 0
    assert_same_run(tmp_path / "run", whole[recipe])


@pytest.mark.parametrize("recipe", RECIPES)
def test_another_seed_gives_other_numbers(recipe, command, whole, tmp_path) -> None:
    assert main(command(recipe, tmp_path / "run", "seed=5")) == 0
    assert read_metrics(tmp_path / "run") != read_metrics(whole[recipe])


def trained(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted((folder / "policies").glob("*/model.safetensors"))
    return {f"{f.parent.name}.{name}": value for f in files for name, value in load_file(f).items()}


def apart(one: Path, other: Path, updates: int | None = None) -> tuple[float, float]:
    """Largest difference of a metric, relative where the metric is over 1, and of a weight in the end."""
    farthest = 0.0
    for ours, theirs in zip(read_metrics(one)[:updates], read_metrics(other)[:updates], strict=True):
        assert ours.keys() == theirs.keys() and ours.get("turn") == theirs.get("turn")
        pairs = [(value, theirs[name]) for name, value in ours.items() if isinstance(value, float)]
        farthest = max([farthest, *(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)])
    weights = trained(other)
    return farthest, max(float((p - weights[name]).abs().max()) for name, p in trained(one).items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_micro_batches_of_any_size_give_the_same_run_to_1e_5(recipe, command, tmp_path) -> None:
    """Every metric of twelve updates and every weight in the end, from batches of eight rollouts.

    CoVRL without the division by a group's deviation, for which see below.
    """
    more = ["scale_advantage=false"] if recipe == "covrl-tiny" else []
    for size in (128, 7, 1):
        assert main(command(recipe, tmp_path / f"{size}", f"micro_batch={size}", *more)) == 0
    for size in (7, 1):
        metrics, weights = apart(tmp_path / f"{size}", tmp_path / "128")
        print(f"{recipe}, micro_batch {size}: metrics {metrics:.1e}, weights {weights:.1e} apart")
        assert metrics < 1e-5 and weights < 1e-5


def test_a_group_of_all_but_equal_likelihoods_magnifies_rounding(command, whole, tmp_path) -> None:
    """CoVRL's rewards are log-probs, and a policy that knows nothing gives two traces nearly the same one.

    Two rewards that are, say, 2e-5 apart are divided by their deviation plus 1e-6, so a rounding of 5e-7 becomes
    0.01 of an advantage.  That is the estimator and not the micro-batches: before such a group
    comes they agree as above.
    """
    out = tmp_path / "run"
    assert main(command("covrl-tiny", out, "micro_batch=7")) == 0
    assert apart(out, whole["covrl-tiny"], 2)[0] < 1e-5
    metrics, weights = apart(out, whole["covrl-tiny"])
    print(f"covrl-tiny with the division, micro_batch 7: metrics {metrics:.1e}, weights {weights:.1e} apart")
    assert metrics < 0.1 and weights < 1e-3
