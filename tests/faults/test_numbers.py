"""NaN and infinity, planted in every number of an update: caught in that update, named, the batch kept."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from conftest import assert_same_run
from safetensors.torch import load_file

from tangolite import checkpoints, covrl, tango
from tangolite.checkpoints import checksum, read_metrics
from tangolite.models import Policy
from tangolite.settings import RunError, load_recipe
from tangolite.training import start, train

UPDATE = 5  # in whose middle the number is planted; the third of Tango's generator
PARAMETER = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture
def plant(changes, tmp_path, monkeypatch):
    """Runs a recipe in which ``spoil(run, armed)`` planted something: (words, batch, what was the same).

    ``armed()`` is True in the update in question.  The caller gets the message of the error and the batch.
    """

    def run_with(recipe: str, spoil, callback=None, update: int = UPDATE):
        config, state = load_recipe(recipe, changes[recipe]), {"done": 0}
        run, out = start(config), tmp_path / "run"

        def remember(run, done, metrics):
            state["done"] = done
            state["weights"] = {n: checksum(policy) for n, (policy, _) in checkpoints.learners(run).items()}

        spoil(run, lambda: state["done"] == update - 1)
        with pytest.raises(RunError, match=f"^update {update}: ") as caught:
            train(config, out, run=run, callbacks=[remember, *([callback] if callback else [])])
        now = {n: checksum(policy) for n, (policy, _) in checkpoints.learners(run).items()}
        assert [row["update"] for row in read_metrics(out)] == list(range(1, update))
        last = (update - 1) // 3 * 3
        names = [path.name for path in checkpoints.checkpoints(out)]
        assert names == ([f"update-{last:06d}"] if last else [])
        file = out / f"nonfinite-update-{update:06d}.safetensors"
        batch = load_file(file) if file.exists() else {}
        assert (str(file) in str(caught.value)) == bool(batch)
        monkeypatch.undo()
        return str(caught.value), batch, now == state["weights"], out

    return run_with


def goes_on(recipe, changes, out, whole) -> None:
    """Without the cause the run goes on from its checkpoint to the bits of an undisturbed one."""
    train(load_recipe(recipe, changes[recipe]), out, resume=True)
    for file in out.glob("nonfinite-*"):
        file.unlink()
    assert_same_run(out, whole[recipe])


def spoilt(tensor: torch.Tensor, value: float) -> torch.Tensor:
    """A copy with one number of the second rollout replaced."""
    copied = tensor.clone()
    copied[(1, *[0] * (tensor.dim() - 1))] = value
    return copied


def in_field(field: str, value: float):
    """A spoiler of what the learning step is given."""
    return lambda rollouts: rollouts.with_(**{field: spoilt(getattr(rollouts, field), value)})


@pytest.mark.parametrize(
    ("field", "name", "value"),
    [
        ("reward", "reward", math.nan),  # which alone would count as unscorable, and be left out silently
        ("reward", "reward", math.inf),
        ("old_logp", "old log-prob", math.nan),
        ("old_logp", "old log-prob", -math.inf),
        ("advantage", "advantage", math.inf),
        ("step_reward", "step reward", math.nan),
    ],
)
def test_a_number_in_tangos_batch_is_named(field, name, value, plant, monkeypatch, changes, whole) -> None:
    function = {"reward": "with_advantage", "step_reward": "with_advantage"}.get(field, "learn")
    real, change = getattr(tango, function), in_field(field, value)

    def spoil(run, armed):
        def instead(*arguments, **kwargs):
            given = [change(a) if armed() and isinstance(a, tango.Rollouts) else a for a in arguments]
            return real(*given, **kwargs)

        monkeypatch.setattr(tango, function, instead)

    said, batch, same, out = plant("tango-tiny", spoil)
    assert f"the {name} of rollout 1 is {value}" in said and "in the batch of the generator" in said
    assert same and not batch[f"generator.{field}"][1].isfinite().all()
    assert "The weights were not changed" in said
    goes_on("tango-tiny", changes, out, whole)


def test_a_reward_in_covrls_batch_is_named(plant, monkeypatch, changes, whole) -> None:
    real = covrl.reward_of

    def spoil(run, armed):
        monkeypatch.setattr(
            covrl, "reward_of", lambda *a: spoilt(real(*a), math.nan) if armed() else real(*a)
        )

    said, batch, same, out = plant("covrl-tiny", spoil)
    assert "the reward of rollout 1 is nan (in the batch of the prior)" in said
    assert same and batch["prior.reward"].isnan().tolist() == [False, True] + [False] * 6
    goes_on("covrl-tiny", changes, out, whole)


@pytest.mark.parametrize(
    ("recipe", "call", "name"),
    [
        ("tango-tiny", 1, "log-prob"),
        ("covrl-tiny", 1, "log-prob under the prior"),
        ("covrl-tiny", 2, "log-prob under the posterior"),
        ("covrl-tiny", 3, "log-prob of the answer"),
    ],
)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_log_prob_of_the_training_forward_is_named(
    recipe, call, name, value, plant, monkeypatch, changes, whole
) -> None:
    """-inf is no NaN in the loss: a ratio of exp(-inf) is 0."""
    real, calls = Policy.logp, []

    def spoil(run, armed):
        def logp(self, *arguments, **kwargs):
            found = real(self, *arguments, **kwargs)
            if not (armed() and torch.is_grad_enabled()):
                return found
            calls.append(1)
            if len(calls) != call:
                return found
            return (spoilt(found[0], value), found[1]) if isinstance(found, tuple) else spoilt(found, value)

        monkeypatch.setattr(Policy, "logp", logp)

    said, batch, same, out = plant(recipe, spoil)
    assert f"update 5: the {name} of rollout 1 is {value}" in said and same and batch
    goes_on(recipe, changes, out, whole)


@pytest.mark.parametrize(("recipe", "who"), [("tango-tiny", "generator"), ("covrl-tiny", "policy")])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_is_named_with_its_parameter(recipe, who, value, plant, changes, whole) -> None:
    def spoil(run, armed):
        p = checkpoints.learners(run)[who][0].named_parameters()[PARAMETER]
        p.register_hook(lambda gradient: spoilt(gradient, value) if armed() else gradient)

    said, batch, same, out = plant(recipe, spoil)
    assert f"update 5: the gradient of {PARAMETER} is not finite" in said and same and batch
    goes_on(recipe, changes, out, whole)


@pytest.mark.parametrize(("recipe", "who"), [("tango-tiny", "generator"), ("covrl-tiny", "policy")])
def test_a_weight_that_the_optimizer_spoils_is_named_and_reaches_no_checkpoint(
    recipe, who, plant, changes, whole
) -> None:
    def spoil(run, armed):
        policy, optimizer = checkpoints.learners(run)[who]
        optimizer.register_step_post_hook(lambda *_: armed() and write(policy, math.inf))

    said, batch, _, out = plant(recipe, spoil, update=6 if who == "policy" else 5)
    assert f"after the step the weight {PARAMETER} is not finite" in said and batch
    assert "This update is dropped" in said and "The weights were not changed" not in said
    goes_on(recipe, changes, out, whole)


def write(policy: Policy, value: float) -> None:
    with torch.no_grad():
        policy.named_parameters()[PARAMETER][0, 0] = value


@pytest.mark.parametrize("who", ["generator", "verifier"])
def test_a_weight_that_anything_else_spoils_is_named_and_reaches_no_checkpoint(
    who, plant, changes, whole
) -> None:
    """Here after update 3, whose checkpoint is due, and in either player, whoever's turn it was."""

    def spoiling(run, done, metrics):
        if done == 3:
            write(run.players[who].policy, math.nan)

    said, batch, _, out = plant("tango-tiny", lambda run, armed: None, spoiling, update=3)
    assert f"the {who}'s weight {PARAMETER} is not finite" in said and not batch
    goes_on("tango-tiny", changes, out, whole)


def test_a_weight_that_was_spoilt_from_the_start_is_named(changes, tmp_path) -> None:
    config = load_recipe("covrl-tiny", changes["covrl-tiny"])
    run = start(config)
    write(run.policy, math.nan)
    with pytest.raises(RunError, match=f"update 1: the weight {PARAMETER} is not finite.*The batch is in"):
        train(config, tmp_path / "run", run=run)


def test_padding_may_hold_anything(changes) -> None:
    run = start(replace(load_recipe("tango-tiny", changes["tango-tiny"]), updates=1))
    rollouts, _ = tango.solve(run, tango.problems(run.task, 3, 0), 2, tango.seeded(0))
    rollouts = rollouts.with_(length=torch.arange(1, 7), reward=torch.zeros(6))
    empty = rollouts.with_(old_logp=rollouts.old_logp.masked_fill(~rollouts.mask, math.nan))
    assert empty.not_finite() is None and not empty.old_logp.isfinite().all()
    step = torch.zeros(6, 2, rollouts.mask.shape[1])
    step[4, 1, 2] = math.nan
    assert empty.with_(step_reward=step).not_finite() == "the step reward of rollout 4 is nan"
