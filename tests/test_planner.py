"""The planner against parameters that are known and memory that was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tangolite.adapters import load_players
from tangolite.cli import main
from tangolite.lab.memory import peak_bytes
from tangolite.lab.planner import CARDS, NF4, PROMPT, SHAPES, learning_parts, plan, shape_of
from tangolite.models import count_parameters, tiny_policy
from tangolite.rollouts import Rollouts
from tangolite.settings import load_recipe

KNOWN = {  # of the published models, biases left out
    "smollm2-135m": 134_515_008,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768 - 24 * (896 + 2 * 128),
    "Qwen/Qwen2.5-7B": 7_615_616_512 - 28 * (3584 + 2 * 512),
}


@pytest.mark.parametrize("name", KNOWN)
def test_parameters_are_those_of_the_published_model(name):
    assert SHAPES[name].parameters == KNOWN[name]


def test_the_shape_of_a_built_in_model_is_read_from_its_files():
    shape, policy = shape_of("tiny-base"), tiny_policy(0)
    biases = sum(p.numel() for name, p in policy.model.named_parameters() if name.endswith("bias"))
    assert shape.parameters == count_parameters(policy.model) - biases


def test_an_unknown_shape_names_the_known_ones():
    with pytest.raises(ValueError, match=r"no-such.*config\.json.*Qwen2\.5-7B"):
        shape_of("no-such")


def tokens(rows: int, prompt: int, new: int, vocabulary: int) -> Rollouts:
    ids = torch.randint(2, vocabulary, (rows, prompt + new), generator=torch.Generator().manual_seed(0))
    one = torch.ones(rows, dtype=torch.long)
    return Rollouts(ids[:, :prompt], prompt * one, ids[:, prompt:], new * one, one > 0, one)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("adapters", [None, {"rank": 4}])
def test_activations_of_the_tiny_model_are_as_planned(adapters, checkpointing):
    """Within 30 per cent of what torch allocated for one forward and backward pass."""
    config = replace(load_recipe("tango-tiny"), adapters=adapters, checkpointing=checkpointing)
    policy = load_players({"policy": "tiny-base"}, config, seed=0)["policy"]
    part, shape = tokens(16, 40, 88, 140), shape_of("tiny-base")
    policy.head()
    measured = peak_bytes(lambda: policy.logp(part, return_entropy=True)[0].sum().backward())
    planned = sum(learning_parts(config, shape, 16 * 128, 16 * 88, cuda=False, size=4).values())
    assert planned == pytest.approx(measured, rel=0.3)


def test_parts_of_a_plan_by_hand():
    config, shape = load_recipe("tango-0.5b"), SHAPES["Qwen/Qwen2.5-0.5B-Instruct"]
    need = plan(config, shape, CARDS["RTX-4060"])
    adapter = 24 * 16 * sum(a + b for a, b in shape.matrices) * 4
    assert need.always["adapters"] == 2 * adapter and need.always["gradients and optimizer"] == 6 * adapter
    assert need.always["weights"] == shape.linear * NF4 + (shape.parameters - shape.linear) * 2
    assert need.sampling["keys and values"] == 4 * 8 * (PROMPT + 1024) * 2 * 24 * 2 * 64 * 2
    assert need.peak < 8e9


def test_whole_weights_are_divided_by_the_processes_only_when_spread():
    config, shape = load_recipe("tango-7b"), SHAPES["Qwen/Qwen2.5-7B"]
    one, eight = (plan(config, shape, CARDS["A100-80GB"], processes=n) for n in (1, 8))
    assert one.always["optimizer"] == 8 * eight.always["optimizer"] == 2 * 2 * shape.parameters * 4
    together = plan(replace(config, spread=False), shape, CARDS["A100-80GB"], processes=8)
    assert together.always == one.always


@pytest.mark.parametrize(
    ("recipe", "card", "processes"),
    [("tango-0.5b", "RTX-4060", 1), ("covrl-0.5b", "RTX-4060", 1), ("tango-7b", "A100-80GB", 32),
     ("covrl-7b", "A100-80GB", 8), ("tango-7b-lora", "A100-80GB", 1)],
)  # fmt: skip
def test_every_large_recipe_fits_where_it_says(recipe, card, processes, capsys):
    arguments = ["train", "--recipe", recipe, "--dry-run", "--card", card, "--processes", str(processes)]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "fits" in said and "does NOT" not in said and "an update takes at least" in said
    assert f"name: {recipe}" in said


def test_whole_weights_of_two_7b_models_do_not_fit_on_one_card(capsys):
    assert main(["train", "--recipe", "tango-7b", "--dry-run", "--card", "A100-80GB"]) == 0
    assert "does NOT fit" in capsys.readouterr().out


def test_an_unknown_card_names_the_known_ones(capsys):
    assert main(["train", "--recipe", "tango-7b", "--dry-run", "--card", "X1"]) == 1
    assert "A100-80GB" in capsys.readouterr().err
