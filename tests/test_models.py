"""Models and policies: the log-prob is the model's own, however a prompt is padded."""

from __future__ import annotations

import random

import peft
import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from tangolite.checkpoints import save_policy
from tangolite.models import (
    TAGS,
    Policy,
    count_parameters,
    load_policy,
    sampling_mode,
    tiny_model,
    tiny_policy,
    tiny_tokenizer,
    token_table,
    trainable_copy,
)
from tangolite.prompts import TINY, solution_text, verification_text
from tangolite.rollouts import Rollouts, pad_left, pad_right

TOKENIZER = tiny_tokenizer()
PROMPTS = [[3, 30, 22, 31, 7], [3, 40], [5, 33, 22, 35, 24, 60, 7]]
COMPLETIONS = [[8, 10, 33, 11, 9, 1], [10, 45, 46], [8, 1]]


def gpt2_policy(seed=0, dropout=0.0) -> Policy:
    """A model whose positions are learned: a wrong position is a wrong log-prob (rotations hide it)."""
    config = GPT2Config(
        vocab_size=len(TOKENIZER), n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1,
        eos_token_id=1, pad_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(seed)
    return Policy.of(GPT2LMHeadModel(config).eval(), TOKENIZER)


def sharp_policy(seed=0) -> Policy:
    """A tiny model with larger weights, so that its distributions are far from uniform."""
    policy = tiny_policy(seed, width=32, layers=2)
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.dim() > 1:
                p.mul_(10)
    return policy


def batch(prompts=PROMPTS, completions=COMPLETIONS, extra=0) -> Rollouts:
    """Rollouts with ``extra`` more columns of padding on both sides than they need."""
    prompt_ids, prompt_length = pad_left([*prompts, [0] * (max(map(len, prompts)) + extra)], 0)
    completion_ids, length = pad_right([*completions, [0] * (max(map(len, completions)) + extra)], 0)
    n = len(prompts)
    rows = torch.arange(n)
    return Rollouts(prompt_ids[:n], prompt_length[:n], completion_ids[:n], length[:n], rows >= 0, rows)


def naive(policy: Policy, prompt, completion, temperature):
    """(log-probs, entropies) of one completion: no padding, the model's own logits, float64."""
    with torch.no_grad():
        logits = policy.model(torch.tensor([prompt + completion])).logits[0].double()
    logp = torch.log_softmax(logits[len(prompt) - 1 : -1] / (temperature or 1.0), -1)
    return logp[range(len(completion)), completion], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("make", [sharp_policy, gpt2_policy])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0, 0.0])
@pytest.mark.parametrize("extra", [0, 3])
def test_logp_and_entropy_are_those_of_the_models_own_logits_without_padding(make, temperature, extra):
    policy, rollouts = make(), batch(extra=extra)
    with torch.no_grad():
        logp, entropy = policy.logp(rollouts, temperature=temperature, return_entropy=True)
        alone = policy.logp(rollouts, temperature=temperature)
    assert torch.equal(logp, alone) and logp.dtype == torch.float32
    for row, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        expected, uncertainty = naive(policy, prompt, completion, temperature)
        n = len(completion)
        torch.testing.assert_close(logp[row, :n].double(), expected, atol=1e-4, rtol=0)
        torch.testing.assert_close(entropy[row, :n].double(), uncertainty, atol=1e-4, rtol=0)
        assert not logp[row, n:].any() and not entropy[row, n:].any()


def test_a_toy_with_learned_positions_would_notice_positions_that_count_padding():
    policy, rollouts = gpt2_policy(), batch()
    ids = torch.cat([rollouts.prompt_ids, rollouts.completion_ids], 1)
    seen = torch.arange(ids.shape[1]) >= (rollouts.prompt_ids.shape[1] - rollouts.prompt_length)[:, None]
    position = torch.arange(ids.shape[1]).expand(ids.shape)
    with torch.no_grad():
        logits = policy.model(input_ids=ids, attention_mask=seen.long(), position_ids=position).logits
        right = policy.logp(rollouts)
    first = rollouts.prompt_ids.shape[1] - 1
    wrong = torch.log_softmax(logits[:, first:-1], -1).gather(-1, rollouts.completion_ids[..., None])[..., 0]
    assert (wrong - right)[1, 0].abs() > 0.1  # row 1 has the most padding


@pytest.mark.parametrize("make", [sharp_policy, gpt2_policy])
def test_a_batch_equals_its_rows_one_by_one(make):
    policy, rollouts = make(), batch()
    with torch.no_grad():
        whole = policy.logp(rollouts)
        for row, part in enumerate(rollouts.micro_batches(1)):
            n = part.n_tokens
            torch.testing.assert_close(policy.logp(part)[0], whole[row, :n], atol=1e-5, rtol=0)


def test_all_logp_holds_logp_at_the_sampled_tokens():
    policy, rollouts = sharp_policy(), batch()
    with torch.no_grad():
        every, logp = policy.all_logp(rollouts, temperature=0.5), policy.logp(rollouts, temperature=0.5)
    chosen = every.gather(-1, rollouts.completion_ids[..., None])[..., 0]
    torch.testing.assert_close(chosen * rollouts.mask, logp, atol=1e-5, rtol=0)
    torch.testing.assert_close(every.exp().sum(-1), torch.ones_like(logp))


SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": None,
}  # fmt: skip
FAMILIES = {
    "Qwen2": {},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 5.0},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 8.0},  # divides
    "HyperCLOVAX": {"logits_scaling": 0.125},  # multiplies
    "FalconH1": {"lm_head_multiplier": 0.5, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
    "Phi": {},  # a bias
}


@pytest.fixture(params=FAMILIES)
def family(request) -> Policy:
    """A tiny model of another library class, with large logits so that a softcap or a scale would show."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(**(SIZES | FAMILIES[request.param]))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.get_output_embeddings().parameters():
            parameter.normal_(std=2.0)
    return Policy.of(model, TOKENIZER)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 0.0])
def test_any_causal_lm_gives_its_own_log_probs(family, temperature):
    """Libraries name what scales and caps their logits each in their own way; the numbers must be theirs."""
    ids = torch.randint(2, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    length = torch.tensor([6, 6])
    rollouts = Rollouts(ids[:, :3], length // 2, ids[:, 3:], length, length > 0, length)
    logits = family.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[:, 2:-1]
    expected = torch.log_softmax(logits.double() / (temperature or 1.0), -1)
    chosen = expected.gather(-1, ids[:, 3:, None])[..., 0]
    logp = family.logp(rollouts, temperature=temperature)
    torch.testing.assert_close(logp.double(), chosen, atol=1e-4, rtol=0)
    if temperature:
        every = family.all_logp(rollouts, temperature=temperature)
        torch.testing.assert_close(every.double(), expected, atol=1e-4, rtol=0)


def test_logits_that_the_head_alone_does_not_make_are_refused():
    policy = sharp_policy()
    policy.model.register_forward_hook(lambda module, given, out: setattr(out, "logits", out.logits**3))
    with pytest.raises(ValueError, match=r"Qwen2ForCausalLM are not its head"):
        policy.logp(batch())


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings", "ignore:.*gradient_checkpointing")
def test_adapters_count_inside_the_model_and_are_refused_on_its_head():
    policy = sharp_policy()
    plain = policy.logp(batch())
    settings = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = Policy.of(peft.get_peft_model(policy.model, settings), TOKENIZER)
    assert not torch.allclose(adapted.logp(batch()), plain)
    with adapted.model.disable_adapter():
        torch.testing.assert_close(adapted.logp(batch()), plain)
    settings = peft.LoraConfig(target_modules=["lm_head"])
    on_head = Policy.of(peft.get_peft_model(sharp_policy().model, settings), TOKENIZER)
    with pytest.raises(ValueError, match=r"\(lm_head\) out of adapters"):
        on_head.logp(batch())


def test_a_tied_weight_gets_the_gradient_of_both_of_its_places():
    policy, rollouts = sharp_policy(), batch(PROMPTS[:1], COMPLETIONS[:1])
    weight = policy.model.get_input_embeddings().weight
    assert policy.model.get_output_embeddings().weight is weight
    policy.logp(rollouts).sum().backward()
    tied, weight.grad = weight.grad, None
    logits = policy.model(torch.tensor([PROMPTS[0] + COMPLETIONS[0]])).logits[0, len(PROMPTS[0]) - 1 : -1]
    logits.log_softmax(-1)[range(len(COMPLETIONS[0])), COMPLETIONS[0]].sum().backward()
    torch.testing.assert_close(tied, weight.grad, atol=1e-4, rtol=1e-4)


def test_gradients_flow_into_every_parameter_and_padding_adds_none():
    gradients = []
    for extra in (0, 4):
        policy, rollouts = sharp_policy(), batch(extra=extra)
        (policy.logp(rollouts) * rollouts.mask).sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.parameters())
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-4)


# --- the built-in model and its tokenizer ------------------------------------------------------------


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_random_state_alone():
    before = torch.get_rng_state()
    one, same, other = tiny_model(3), tiny_model(3), tiny_model(4)
    assert torch.equal(torch.get_rng_state(), before)
    pairs = list(zip(one.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)
    assert 100_000 < count_parameters(one) < 200_000


def test_tags_values_and_letters_are_one_token_each_and_different():
    pieces = [*TAGS, *map(str, range(100)), *"+-*=;., ", *"abcxyz", "<|generator|>", "<|eos|>"]
    ids = [TOKENIZER.encode(piece, add_special_tokens=False) for piece in pieces]
    assert all(len(i) == 1 for i in ids)
    assert len({i for [i] in ids} - {TOKENIZER.unk_token_id}) == len(pieces)


def test_text_comes_back_as_it_was():
    policy, rng = tiny_policy(0, width=32, layers=1), random.Random(0)
    pieces = [*TAGS, *map(str, range(100)), *"+-*=?:;,. ", *"abcdefghijklmnopqrstuvwxyz", "<|end|>"]
    for _ in range(100):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 30)))
        ids = policy.encode(text)
        assert policy.decode([*ids, policy.eos_ids[0], policy.pad_id, policy.pad_id]) == text
        assert "".join(token_table(policy, ids)) == text
    steps = ["17+5=22", "22-3=19"]
    for text in (
        TINY.generator("17+5-3"), solution_text(steps, "19"), verification_text(steps, [True, False], True),
    ):  # fmt: skip
        assert policy.decode(policy.encode(text)) == text
        assert TOKENIZER.unk_token_id not in policy.encode(text)


@pytest.mark.parametrize(
    ("text", "tokens"), [("123", ["12", "3"]), ("07", ["0", "7"]), ("1001", ["10", "0", "1"])]
)
def test_a_number_of_several_digits_is_cut_the_same_way_every_time(text, tokens):
    assert TOKENIZER.convert_ids_to_tokens(TOKENIZER.encode(text, add_special_tokens=False)) == tokens


def test_decoding_keeps_end_of_sequence_in_the_middle_and_drops_it_at_the_end():
    policy = tiny_policy(0, width=32, layers=1)
    assert policy.decode([*policy.encode("a"), 1, *policy.encode("b"), 1, 0]) == "a<|eos|>b"
    assert policy.decode([]) == "" and policy.decode([1]) == ""


@pytest.mark.parametrize("make", [sharp_policy, gpt2_policy])
def test_a_saved_policy_loads_with_the_same_ids_and_the_same_logits(make, tmp_path):
    policy = make()
    policy.model.generation_config.eos_token_id = [1, 7]
    policy = Policy.of(policy.model, policy.tokenizer)
    save_policy(policy, tmp_path / "saved")
    loaded = load_policy(tmp_path / "saved")
    text = TINY.generator("17+5-3*99") + solution_text(["17+5=22", "tree=e"], "19 efg") + "<|unk|>é"
    assert loaded.encode(text) == policy.encode(text)
    assert loaded.decode(loaded.encode(text)) == policy.decode(policy.encode(text))
    assert loaded.eos_ids == policy.eos_ids == (1, 7) and loaded.pad_id == policy.pad_id == 0
    assert not loaded.model.training and loaded.parameters()
    with torch.no_grad():
        assert torch.equal(loaded.logp(batch()), policy.logp(batch()))


def test_a_name_that_is_no_model_says_so(tmp_path):
    with pytest.raises(OSError):
        load_policy(tmp_path)


# --- policies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "found"), [(1, (1,)), ([1, 7], (1, 7)), (0, (0,)), (None, (1,))])
def test_end_of_sequence_ids_come_from_the_models_own_files(given, found):
    model = tiny_model(0, width=32, layers=1)
    model.generation_config.eos_token_id = given
    assert Policy.of(model, TOKENIZER).eos_ids == found


def test_a_tokenizer_without_padding_pads_with_end_of_sequence():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    assert Policy.of(tiny_model(0, width=32, layers=1), tokenizer).pad_id == 1


def test_a_frozen_policy_has_nothing_to_train():
    with pytest.raises(ValueError, match="no trainable parameters"):
        tiny_policy(0, width=32, layers=1).frozen_copy().parameters()


@pytest.mark.parametrize("copied", [Policy.frozen_copy, trainable_copy])
def test_a_copy_does_not_follow_the_original(copied):
    policy, rollouts = sharp_policy(), batch()
    other = copied(policy)
    with torch.no_grad():
        before = other.logp(rollouts)
        assert torch.equal(before, policy.logp(rollouts))
        for p in policy.parameters():
            p.add_(0.1)
        assert torch.equal(other.logp(rollouts), before)
        assert not torch.allclose(policy.logp(rollouts), before)
    assert len(list(other.model.parameters())) == len(policy.parameters())
    assert all(p.requires_grad for p in policy.parameters())


def test_sampling_mode_silences_dropout_and_puts_the_mode_back_even_after_an_error():
    policy = gpt2_policy(dropout=0.5)
    for mode in (True, False):
        policy.model.train(mode)
        with pytest.raises(RuntimeError), sampling_mode(policy.model):
            one, two = policy.logp(batch()), policy.logp(batch())
            assert torch.equal(one, two) and not one.requires_grad
            raise RuntimeError
        assert policy.model.training is mode
