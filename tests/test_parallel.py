"""Several processes give the numbers of one: gloo on the CPU, started as a user would start them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tangolite import parallel
from tangolite.checkpoints import checkpoints, read_metrics
from tangolite.cli import main
from tangolite.models import tiny_policy
from tangolite.parallel import add_up, layers_of, my_parts, put_together, share_out
from tangolite.sampling import sample_shared

ROOT = Path(__file__).resolve().parent.parent
# Five questions two at a time and micro-batches of three: nothing divides evenly by two processes.
UNEVEN = ["questions=5", "sample_batch=2", "micro_batch=3", "updates=6", "checkpoint_every=2"]
# Two traces of one text have rewards that differ by rounding: dividing by their deviation would enlarge that.
CENTRED = {"tango-tiny": UNEVEN, "covrl-tiny": [*UNEVEN, "scale_advantage=false"]}


def launch(arguments: list[str], count: int = 2) -> str:
    """Run the command line under torchrun; returns what it said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "-m", "tangolite", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {
        f"{file.parent.name}.{name}": value
        for file in sorted(run.glob("policies/*/model.safetensors"))
        for name, value in load_file(file).items()
    }


def assert_same_run(one: Path, other: Path, tolerance: float = 1e-5) -> None:
    for a, b in zip(read_metrics(one), read_metrics(other), strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert b[name] == (value if isinstance(value, str) else pytest.approx(value, abs=tolerance)), name
    a, b = weights(one), weights(other)
    assert a and a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=tolerance, rtol=0)


@pytest.fixture(scope="module")
def alone(command, tmp_path_factory):
    """Recipe -> the run of one process."""
    folders = {}
    for recipe in ("tango-tiny", "covrl-tiny"):
        folders[recipe] = tmp_path_factory.mktemp("alone") / recipe
        assert main(command(recipe, folders[recipe], *CENTRED[recipe])) == 0
    return folders


@pytest.mark.parametrize("recipe", ["tango-tiny", "covrl-tiny"])
def test_two_processes_give_the_metrics_and_the_weights_of_one(recipe, alone, command, tmp_path) -> None:
    said = launch(command(recipe, tmp_path / "run", *CENTRED[recipe]))
    assert "2 processes work on this run" in said
    assert_same_run(alone[recipe], tmp_path / "run")


def test_weights_spread_over_two_processes_learn_the_same(alone, command, tmp_path) -> None:
    said = launch(command("tango-tiny", tmp_path / "run", *UNEVEN, "spread=true"))
    assert "2 processes work on this run" in said
    assert_same_run(alone["tango-tiny"], tmp_path / "run")


def test_a_checkpoint_of_two_processes_is_resumed_by_one(alone, command, tmp_path) -> None:
    arguments = command("tango-tiny", tmp_path / "run", *UNEVEN)
    launch(arguments)
    shutil.rmtree(tmp_path / "run" / "policies")  # as if both had been killed after update 4
    shutil.rmtree(checkpoints(tmp_path / "run")[-1])
    assert main(["train", "--out", str(tmp_path / "run"), "--resume"]) == 0
    assert_same_run(alone["tango-tiny"], tmp_path / "run")


def test_an_error_of_the_recipe_ends_all_processes(tmp_path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(AssertionError, match="is not an empty folder"):
        launch(["train", "--recipe", "tango-tiny", "--out", str(tmp_path)])


# --- without starting any --------------------------------------------------------------------------------


@pytest.fixture
def of_three(monkeypatch):
    """Be process 1 of 3."""
    monkeypatch.setattr(parallel, "processes", lambda: 3)
    monkeypatch.setattr(parallel, "rank", lambda: 1)


def test_work_is_dealt_out_in_turn(of_three) -> None:
    assert share_out(8) == [1, 4, 7] and share_out(1) == []


def test_where_weights_are_spread_all_meet_equally_often(of_three) -> None:
    policy = tiny_policy(0, width=16, layers=1, heads=2)
    parts, shares = list("abcd"), [0.1, 0.2, 0.3, 0.4]
    assert my_parts(policy, parts, shares) == [("b", 0.2)]
    policy.gate = parallel.Gate(policy.model)
    assert my_parts(policy, parts, shares) == [("b", 0.2), ("d", 0.0)]


def test_pieces_come_back_in_order_and_sums_are_of_all(monkeypatch) -> None:
    assert put_together(2, {1: "b", 0: "a"}) == ["a", "b"]
    monkeypatch.setattr(parallel, "processes", lambda: 2)
    monkeypatch.setattr(parallel, "gathered", lambda mine: [mine, {1: "b"}])
    assert put_together(2, {0: "a"}) == ["a", "b"]
    monkeypatch.setattr(parallel, "gathered", lambda mine: [mine, {"loss": 2.0, "kl": 1.0}])
    assert add_up({"loss": 0.5}) == {"loss": 2.5, "kl": 1.0}


def test_the_layers_are_the_longest_list_of_modules() -> None:
    policy = tiny_policy(0, width=16, layers=3, heads=2)
    assert layers_of(policy.model) == list(policy.model.model.layers)


@pytest.mark.parametrize("chunk", [2, 4, 8])
def test_with_a_chunk_completions_do_not_depend_on_the_number_of_processes(chunk, monkeypatch) -> None:
    """A chunk of all prompts, or of more, too: what two processes would share out is drawn here by one."""
    policy, prompts = tiny_policy(0, width=16, layers=1, heads=2), [[3, 30 + i, 22] for i in range(4)]

    def drawn() -> list[list[int]]:
        generator = torch.Generator().manual_seed(1)
        found = sample_shared(policy, prompts, n=2, chunk=chunk, max_new_tokens=6, generator=generator)
        return [found.tokens(row) for row in range(8)]

    alone = drawn()
    monkeypatch.setattr("tangolite.sampling.processes", lambda: 2)
    monkeypatch.setattr("tangolite.sampling.share_out", range)
    assert drawn() == alone


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_completions_of_a_chunk_do_not_depend_on_the_other_chunks(chunk) -> None:
    policy = tiny_policy(0, width=16, layers=1, heads=2)
    prompts = [[3, 30 + i, 22] for i in range(5)]

    def drawn(prompts):
        generator = torch.Generator().manual_seed(1)
        return sample_shared(policy, prompts, n=2, chunk=chunk, max_new_tokens=6, generator=generator)

    whole, part = drawn(prompts), drawn(prompts[: 2 * chunk])
    assert whole.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    width = part.completion_ids.shape[1]
    rows = min(4 * chunk, 10)
    if chunk < 3:
        assert torch.equal(whole.completion_ids[:rows, :width], part.completion_ids)
    assert [len(whole.tokens(row)) for row in range(10)] == whole.length.tolist()
    torch.testing.assert_close(policy.logp(whole).detach(), whole.old_logp, atol=1e-5, rtol=0)
