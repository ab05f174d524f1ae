"""Sampling: both samplers draw from the policy itself and record the log-prob of what they drew."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM
from transformers.utils.logging import warning_once

from tangolite.models import Policy, tiny_policy, tiny_tokenizer
from tangolite.sampling import choose, sample, sample_generate
from tangolite.sampling.decoder import _Decoder

SAMPLERS = pytest.mark.parametrize("sampler", [sample, sample_generate])
PROMPTS = [[3, 30, 22, 31, 7], [3, 40], [5, 33, 22, 35, 24, 58, 7], [9]]


def seeded(seed=0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sharpened(policy: Policy, factor=8.0) -> Policy:
    """Larger weights: distributions far from uniform, so that a wrong one shows."""
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.dim() > 1:
                p.mul_(factor)
    return policy


def policy_of(vocabulary=60, eos=(1, 5, 9, 11, 17), kv_heads=4, tied=True, seed=0, **config) -> Policy:
    """A Qwen2 of two layers with several end-of-sequence ids, so that rows end at different lengths."""
    torch.manual_seed(seed)
    settings = Qwen2Config(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=kv_heads, tie_word_embeddings=tied,
        bos_token_id=None, eos_token_id=1, pad_token_id=0, **config,
    )  # fmt: skip
    model = Qwen2ForCausalLM(settings).eval()
    return sharpened(Policy(model, tiny_tokenizer(), eos, 0))


def gpt2_policy(dropout=0.0) -> Policy:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=60, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1,
        initializer_range=0.3, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return Policy(GPT2LMHeadModel(config).eval(), tiny_tokenizer(), (1, 5, 9), 0)


def assert_recorded(policy, rollouts, temperature, tolerance=1e-4):
    with torch.no_grad():
        again = policy.logp(rollouts, temperature=temperature)
    torch.testing.assert_close(rollouts.old_logp, again, atol=tolerance, rtol=0)


# --- what comes back -------------------------------------------------------------------------------------


@SAMPLERS
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0, 0.0])
def test_recorded_log_probs_are_those_of_the_tempered_policy(sampler, temperature):
    policy = policy_of()
    rollouts = sampler(policy, PROMPTS, n=12, max_new_tokens=10, temperature=temperature, generator=seeded())
    assert_recorded(policy, rollouts, temperature)
    assert not rollouts.old_logp.requires_grad and not rollouts.old_logp[~rollouts.mask].any()
    if temperature > 0:  # the batch has rows that end at once, late, and not at all
        assert len(set(rollouts.length.tolist())) > 5
        assert rollouts.terminated.any() and not rollouts.terminated.all()


@pytest.mark.parametrize("n", [1, 12])
def test_finished_rows_leave_the_batch_and_change_nothing_for_the_others(monkeypatch, n):
    """Work follows the tokens that are needed, and every row is what it would be if none ever left."""
    policy, prompts, steps = policy_of(), PROMPTS * 3, []
    step = _Decoder.step
    monkeypatch.setattr(_Decoder, "step", lambda self, token: steps.append(len(token)) or step(self, token))
    left = sample(policy, prompts, n=n, max_new_tokens=40, generator=seeded())
    needed = left.n_tokens - len(left)  # the first token of each comes from the prompt
    assert needed <= sum(steps) < 1.3 * needed and sum(steps) < 0.6 * len(left) * max(left.length)
    monkeypatch.setattr(_Decoder, "keep", lambda self, rows: pytest.fail("a row left"))
    monkeypatch.setattr("tangolite.sampling.decoder.LEAVE_AT", 2.0)
    stayed = sample(policy, prompts, n=n, max_new_tokens=40, generator=seeded())
    assert left.completion_ids.tolist() == stayed.completion_ids.tolist()
    torch.testing.assert_close(left.old_logp, stayed.old_logp, atol=1e-5, rtol=0)


@SAMPLERS
def test_rows_answer_their_prompts_in_order_and_share_a_group(sampler):
    rollouts = sampler(policy_of(), PROMPTS, n=3, max_new_tokens=4, generator=seeded())
    assert len(rollouts) == 12
    for row in range(12):
        prompt, n = PROMPTS[row // 3], int(rollouts.prompt_length[row])
        assert rollouts.prompt_ids[row, -n:].tolist() == prompt and n == len(prompt)
        assert not rollouts.prompt_ids[row, :-n].any()
    assert rollouts.group.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


@SAMPLERS
def test_a_row_ends_at_its_first_end_of_sequence_of_any_kind_or_is_cut(sampler):
    policy = policy_of()
    rollouts = sampler(policy, PROMPTS, n=16, max_new_tokens=6, generator=seeded(1))
    endings = set()
    for row in range(len(rollouts)):
        ids = rollouts.tokens(row)
        assert not set(ids[:-1]) & set(policy.eos_ids)
        assert (ids[-1] in policy.eos_ids) == bool(rollouts.terminated[row])
        assert rollouts.terminated[row] or len(ids) == 6
        assert (rollouts.completion_ids[row, len(ids) :] == policy.pad_id).all()
        endings.add(ids[-1] if rollouts.terminated[row] else None)
    assert None in endings and len(endings) > 2
    assert rollouts.completion_ids.shape[1] == int(rollouts.length.max())


@SAMPLERS
def test_an_end_of_sequence_at_the_very_limit_is_no_truncation(sampler):
    policy = policy_of(eos=tuple(range(60)))  # whatever comes first ends the row
    rollouts = sampler(policy, PROMPTS, n=2, max_new_tokens=1, generator=seeded())
    assert rollouts.terminated.all() and rollouts.length.tolist() == [1] * 8
    never = sampler(policy_of(eos=(61,)), PROMPTS, n=2, max_new_tokens=3, generator=seeded())
    assert not never.terminated.any() and never.length.tolist() == [3] * 8


@SAMPLERS
def test_padding_that_is_the_end_of_sequence_keeps_the_one_that_was_sampled(sampler):
    policy = policy_of()
    policy = Policy(policy.model, policy.tokenizer, (5, 9, 11, 17), 5)
    rollouts = sampler(policy, PROMPTS, n=12, max_new_tokens=8, generator=seeded())
    ended = [rollouts.tokens(row)[-1] for row in range(48) if rollouts.terminated[row]]
    assert 5 in ended and rollouts.n_tokens == int(rollouts.length.sum())
    assert_recorded(policy, rollouts, 1.0)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_greedy_decoding_of_both_samplers_agrees_token_by_token(kv_heads):
    policy = policy_of(kv_heads=kv_heads, eos=(1,))
    ours = sample(policy, PROMPTS, n=2, max_new_tokens=12, temperature=0.0)
    theirs = sample_generate(policy, PROMPTS, n=2, max_new_tokens=12, temperature=0.0)
    assert torch.equal(ours.completion_ids, theirs.completion_ids)
    torch.testing.assert_close(ours.old_logp, theirs.old_logp, atol=1e-4, rtol=0)
    assert len({tuple(ours.tokens(row)) for row in range(0, 8, 2)}) > 1


@SAMPLERS
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_grouped_queries_and_an_untied_head_are_read_rightly(sampler, kv_heads):
    policy = policy_of(kv_heads=kv_heads, tied=False)
    rollouts = sampler(policy, PROMPTS, n=8, max_new_tokens=8, generator=seeded())
    assert_recorded(policy, rollouts, 1.0)


# --- the distribution ------------------------------------------------------------------------------------


@SAMPLERS
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_frequencies_of_the_first_two_tokens_match_the_softmax(sampler, temperature):
    policy, n, size = sharpened(policy_of(8, eos=(9,)), 0.5), 4000, 8
    prompt = [3, 5, 2]
    drawn = sampler(policy, [prompt], n=n, max_new_tokens=2, temperature=temperature, generator=seeded(3))
    contexts = torch.tensor([[*prompt, first] for first in range(size)])
    with torch.no_grad():
        logp = torch.log_softmax(policy.model(contexts).logits.double() / temperature, -1)
    expected = n * (logp[0, 2, :, None] + logp[:, 3, :]).exp()  # (first, second)
    counted = torch.zeros(size, size, dtype=torch.float64)
    counted.index_put_(tuple(drawn.completion_ids.T), torch.ones(n, dtype=torch.float64), accumulate=True)
    seen = expected >= 5
    assert seen.sum() > 20
    chi_square = ((counted - expected)[seen].square() / expected[seen]).sum()
    degrees = int(seen.sum())
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5  # mean plus five standard deviations
    assert counted[~seen].sum() < expected[~seen].sum() + 5 * expected[~seen].sum() ** 0.5 + 5


@pytest.mark.parametrize(("draw", "token"), [(0.0, 3), (1 - 2**-24, 1), (0.5, 1)])
def test_the_ends_of_the_unit_interval_never_give_a_token_of_probability_zero(draw, token):
    never = float("-inf")
    logits = torch.tensor([[never, 2.0, never, 0.0, never, never]]).repeat(3, 1)
    chosen, logp = choose(logits, 1.0, torch.full((3, 1), draw))
    assert chosen.tolist() == [token] * 3
    torch.testing.assert_close(logp, torch.log_softmax(logits, -1)[:, token])


@SAMPLERS
def test_an_impossible_word_is_never_sampled(sampler):
    policy = policy_of(8, eos=(9,), tied=False)
    with torch.no_grad():
        policy.model.lm_head = torch.nn.Linear(32, 8)
        policy.model.lm_head.bias[[0, 4, 7]] = float("-inf")
    rollouts = sampler(policy, [[1, 2]], n=500, max_new_tokens=3, temperature=2.0, generator=seeded())
    assert set(rollouts.completion_ids.flatten().tolist()) == {1, 2, 3, 5, 6}
    assert_recorded(policy, rollouts, 2.0)


@SAMPLERS
def test_what_the_models_own_files_say_of_sampling_is_ignored(sampler):
    policy, told = policy_of(), {"top_k": 1, "repetition_penalty": 1.1, "top_p": 0.1, "temperature": 0.1}
    told |= {"min_p": 0.9, "no_repeat_ngram_size": 2, "min_new_tokens": 5, "max_length": 3, "num_beams": 2}
    told |= {"suppress_tokens": [0, 2, 3], "bad_words_ids": [[12]], "forced_eos_token_id": 1, "min_length": 9}
    plain = sampler(policy, PROMPTS, n=16, max_new_tokens=6, generator=seeded())
    policy.model.generation_config.update(**told)
    before = policy.model.generation_config.to_dict()
    rollouts = sampler(policy, PROMPTS, n=16, max_new_tokens=6, generator=seeded())
    assert torch.equal(rollouts.completion_ids, plain.completion_ids)
    assert len({tuple(rollouts.tokens(row)) for row in range(64)}) > 40
    assert_recorded(policy, rollouts, 1.0)
    assert policy.model.generation_config.to_dict() == before


@SAMPLERS
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_sampling_is_silent(sampler, temperature, recwarn):
    heard = []
    listener = logging.Handler()
    listener.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("transformers").addHandler(listener)
    warning_once.cache_clear()  # what was said in another test would not be said again
    try:
        sampler(policy_of(), PROMPTS, n=2, max_new_tokens=3, temperature=temperature, generator=seeded())
    finally:
        logging.getLogger("transformers").removeHandler(listener)
    assert heard == [] and [str(w.message) for w in recwarn] == []


# --- random state and modes ------------------------------------------------------------------------------


@SAMPLERS
def test_the_same_generator_seed_gives_the_same_rollouts_and_leaves_the_global_state_alone(sampler):
    policy, kinds = policy_of(), {"n": 4, "max_new_tokens": 6}
    before = torch.get_rng_state()
    one, same = (sampler(policy, PROMPTS, generator=seeded(5), **kinds) for _ in range(2))
    other = sampler(policy, PROMPTS, generator=seeded(6), **kinds)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.completion_ids, same.completion_ids) and torch.equal(one.old_logp, same.old_logp)
    assert one.completion_ids.tolist() != other.completion_ids.tolist()
    on = seeded(5)
    first, second = (sampler(policy, PROMPTS, generator=on, **kinds) for _ in range(2))
    assert torch.equal(first.completion_ids, one.completion_ids)
    assert second.completion_ids.tolist() != first.completion_ids.tolist()


@SAMPLERS
def test_without_a_generator_the_global_state_decides_and_moves_on(sampler):
    policy, kinds = policy_of(), {"n": 4, "max_new_tokens": 6}
    torch.manual_seed(0)
    first, second = (sampler(policy, PROMPTS, **kinds) for _ in range(2))
    torch.manual_seed(0)
    again = sampler(policy, PROMPTS, **kinds)
    assert torch.equal(first.completion_ids, again.completion_ids)
    assert first.completion_ids.tolist() != second.completion_ids.tolist()


@SAMPLERS
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("make", "name"), [(policy_of, "attention_dropout"), (gpt2_policy, "dropout")], ids=["qwen2", "gpt2"]
)
def test_the_mode_of_the_model_is_put_back_and_dropout_is_off_meanwhile(sampler, training, make, name):
    policy = make(**{name: 0.5})
    checkpointing = ("activation_checkpointing_enable", "gradient_checkpointing_enable")  # new name, old name
    getattr(policy.model, next(name for name in checkpointing if hasattr(policy.model, name)))()
    policy.model.train(training)
    rollouts = sampler(policy, PROMPTS, n=2, max_new_tokens=8, temperature=0.0)
    assert policy.model.training is training and policy.parameters()
    quiet = sample(make(), PROMPTS, n=2, max_new_tokens=8, temperature=0.0)
    assert torch.equal(rollouts.completion_ids, quiet.completion_ids)


# --- models that our decoder does not know -----------------------------------------------------------


class Adapted(torch.nn.Module):
    """A linear layer with something added, as an adapter has; its `weight` alone is not what it computes."""

    def __init__(self, inner: torch.nn.Linear) -> None:
        super().__init__()
        self.inner, self.added = inner, torch.nn.Linear(inner.in_features, inner.out_features)
        self.weight, self.bias = inner.weight, inner.bias

    def forward(self, x):
        return self.inner(x) + 3 * self.added(x)


class AdaptedLinear(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).flip(-1)


@pytest.mark.parametrize("layer", ["self_attn.q_proj", "mlp.up_proj"])
@pytest.mark.parametrize("kind", ["module", "subclass", "parametrized"])
def test_a_layer_that_was_swapped_is_really_used(layer, kind):
    policy = policy_of()
    name, part = layer.split(".")
    block = getattr(policy.model.model.layers[0], name)
    linear = getattr(block, part)
    if kind == "module":
        setattr(block, part, Adapted(linear))
    elif kind == "subclass":
        linear.__class__ = AdaptedLinear
    else:
        torch.nn.utils.parametrizations.weight_norm(linear)
    rollouts = sample(policy, PROMPTS, n=4, max_new_tokens=6, generator=seeded())
    assert_recorded(policy, rollouts, 1.0)


@pytest.mark.parametrize(
    "config",
    [{"hidden_act": "gelu"}, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}],
)
def test_a_qwen2_of_another_kind_is_sampled_from_as_it_is(config):
    policy = policy_of(**config)
    rollouts = sample(policy, PROMPTS, n=4, max_new_tokens=8, generator=seeded())
    assert_recorded(policy, rollouts, 1.0)


@SAMPLERS
def test_a_model_with_learned_positions_is_sampled_from_under_left_padding(sampler):
    policy = gpt2_policy()
    rollouts = sampler(policy, PROMPTS, n=4, max_new_tokens=8, generator=seeded())
    assert_recorded(policy, rollouts, 1.0)
    alone = sampler(policy, PROMPTS[1:2], max_new_tokens=8, temperature=0.0)
    among = sampler(policy, PROMPTS, max_new_tokens=8, temperature=0.0)
    assert alone.tokens(0) == among.tokens(1)


def test_the_built_in_model_takes_part_too():
    policy = tiny_policy(0)
    prompts = [policy.encode("<|generator|>17+5-3<|end|>"), policy.encode("<|generator|>1+2<|end|>")]
    rollouts = sample(policy, prompts, n=3, max_new_tokens=12, generator=seeded())
    assert_recorded(policy, rollouts, 1.0)


@SAMPLERS
@pytest.mark.parametrize("prompts", [[], [[1], []]])
def test_an_empty_prompt_or_list_is_refused(sampler, prompts):
    with pytest.raises(ValueError, match="at least one"):
        sampler(policy_of(), prompts, max_new_tokens=2)
