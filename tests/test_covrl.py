"""CoVRL: one trace seen under two prompts, a reward that is the answer's likelihood, and the three terms.

A scripted sampler writes traces of every kind (well formed, cut off, without an end, doubled), since an
untrained policy writes none.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tangolite import covrl
from tangolite.covrl import METRICS, CoVRL, CoVRLConfig, Traces, answer_tokens, sample_traces, written_answer
from tangolite.models import Policy, tiny_model, tiny_policy
from tangolite.prompts import TINY
from tangolite.rollouts import Rollouts, pad_left, pad_right
from tangolite.tasks import ChainArithmetic, Problem, problems
from tangolite.updates import NonFiniteError, seeded

CHAIN = ChainArithmetic(modulus=5, steps=(2, 3), operators="+*", operands=(0, 4))
SMALL = CoVRLConfig(
    task={"kind": "chain", "modulus": 5, "steps": [2, 3], "operators": "+*", "operands": [0, 4]},
    questions=3, traces=6, updates=8, max_new_tokens=40, lr=0.5, lr_warmup=0, lr_schedule="constant",
    max_grad_norm=1e9,
)  # fmt: skip


def small_policy(seed=0) -> Policy:
    policy = tiny_policy(seed, width=16, layers=1, heads=2)
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.dim() > 1:
                p.mul_(10)  # so that prior and posterior differ
    return policy


def start(policy: Policy | None = None, **changes) -> CoVRL:
    """A run with plain gradient steps: Adam's first step has one size, whatever the gradient."""
    run = CoVRL(replace(SMALL, **changes), policy or small_policy())
    run.optimizer = torch.optim.SGD(run.policy.parameters(), lr=0.5)
    return run


def weights(run: CoVRL) -> list[torch.Tensor]:
    return [p.detach().clone() for p in run.policy.model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def written(question: str, rng: random.Random) -> tuple[str, bool]:
    """(what is written for a question, whether it is cut at the length limit)."""
    steps, _ = CHAIN.solve(Problem(question, ""), lambda fact: CHAIN.guess(fact, rng))
    body = "".join(f"<step>{step}</step>" for step in steps)
    answer = " ".join(step.partition("=")[2] for step in steps)
    kind = rng.random()
    if kind < 0.15:
        return f"<think>{body[: len(body) // 2]}", True
    if kind < 0.25:
        return f"<think>{body}", False  # ends without closing its thinking
    if kind < 0.35:
        return f"x<think>{body}</think><answer>{answer}</answer>", False  # begins with something else
    if kind < 0.45:
        return f"<think>{body}</think><answer>{answer}", True  # cut, but after the trace
    return f"<think>{body}</think><answer>{answer}</answer>", False


def scripted_sample(policy, prompts, *, max_new_tokens, temperature, generator, chunk=0) -> Rollouts:
    rng = random.Random(int(torch.randint(2**31, (), generator=generator)))
    questions = [policy.decode(list(p)).partition("|>")[2].partition("<|end|>")[0] for p in prompts]
    texts = [written(question, rng) for question in questions]
    rows = [policy.encode(text) + ([] if cut else [policy.eos_ids[0]]) for text, cut in texts]
    prompt_ids, prompt_length = pad_left(prompts, policy.pad_id)
    ids, length = pad_right(rows, policy.pad_id)
    ended = torch.tensor([not cut for _, cut in texts])
    rollouts = Rollouts(prompt_ids, prompt_length, ids, length, ended, torch.arange(len(ids)))
    with torch.no_grad():
        return rollouts.with_(old_logp=policy.logp(rollouts, temperature=temperature))


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(covrl, "sample_shared", scripted_sample)


@pytest.fixture
def learned(monkeypatch):
    """The traces that every call of `learn` got, in order."""
    seen, real = [], covrl.learn
    monkeypatch.setattr(covrl, "learn", lambda run, traces, n: seen.append(traces) or real(run, traces, n))
    return seen


def token_logp(policy: Policy, prompt, completion, temperature=1.0) -> torch.Tensor:
    """Log-probs of a completion: no padding, the model's own logits."""
    logits = policy.model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1)[range(len(completion)), list(completion)]


def prompt_of(rollouts: Rollouts, row: int) -> list[int]:
    return rollouts.prompt_ids[
        row, rollouts.prompt_ids.shape[1] - int(rollouts.prompt_length[row]) :
    ].tolist()


# --- traces ----------------------------------------------------------------------------------------------


def drawn(policy: Policy, count=60, **changes) -> tuple[Traces, list[str], list[Problem]]:
    asked = problems(CHAIN, count, 0)
    traces, texts = sample_traces(policy, TINY, asked, replace(SMALL, **changes), seeded(0))
    return traces, texts, asked


def test_a_trace_ends_with_its_thinking_and_is_seen_under_both_prompts(scripted):
    policy = small_policy()
    traces, texts, asked = drawn(policy)
    for row, (text, problem) in enumerate(zip(texts, asked, strict=True)):
        trace = policy.decode(traces.prior.tokens(row))
        assert trace == (text.partition("</think>")[0] + "</think>" if "</think>" in text else text)
        assert traces.posterior.tokens(row) == traces.prior.tokens(row)
        assert prompt_of(traces.prior, row) == policy.encode(TINY.prior(problem.question))
        shown = TINY.posterior(problem.question, problem.reference)
        assert prompt_of(traces.posterior, row) == policy.encode(shown)
        assert traces.valid[row] == (text.startswith("<think>") and "</think>" in text)
    assert torch.equal(traces.prior.mask, traces.posterior.mask)
    assert not traces.valid.all() and traces.valid.any()


def test_only_traces_cut_before_the_end_of_their_thinking_are_truncated(scripted):
    policy = small_policy()
    traces, texts, _ = drawn(policy)
    unended = torch.tensor(["</think>" not in text for text in texts])
    cut = ~traces.prior.terminated
    assert torch.equal(traces.truncated, unended & cut)
    assert (unended & ~cut).any() and (~unended & cut).any() and traces.truncated.any()


def test_the_reference_is_scored_after_the_prior_and_the_trace(scripted):
    policy = small_policy()
    traces, _, asked = drawn(policy)
    for row, problem in enumerate(asked):
        before = prompt_of(traces.prior, row) + traces.prior.tokens(row) + policy.encode("<answer>")
        assert prompt_of(traces.answer, row) == before
        assert policy.decode(traces.answer.tokens(row)) == problem.reference
        own = traces.answer_mask[row]
        assert own.sum() == traces.answer.length[row] and own[: int(own.sum())].all()


def test_a_trace_comes_from_the_prior_with_probability_alpha(scripted):
    policy = small_policy()
    for alpha in (0.0, 0.25, 1.0):
        traces, _, _ = drawn(policy, 400, alpha=alpha)
        share = traces.from_prior.float().mean().item()
        assert abs(share - alpha) <= 4 * math.sqrt(alpha * (1 - alpha) / 400)


def test_each_template_really_samples_its_own_traces(monkeypatch):
    asked_of = []

    def recording(policy, prompts, **settings):
        asked_of.extend(list(p) for p in prompts)
        return scripted_sample(policy, prompts, **settings)

    monkeypatch.setattr(covrl, "sample_shared", recording)
    traces, _, _ = drawn(small_policy())
    for row, prompt in enumerate(asked_of):
        assert prompt == prompt_of(traces.prior if traces.from_prior[row] else traces.posterior, row)


def test_micro_batches_keep_what_belongs_together(scripted):
    traces, _, _ = drawn(small_policy())
    parts = traces.with_(advantage=traces.prior.mask.float()).micro_batches(7)
    assert sum(map(len, parts)) == len(traces) == 60
    row = 0
    for part in parts:
        assert part.answer_mask.shape == part.answer.completion_ids.shape
        for i in range(len(part)):
            assert part.prior.tokens(i) == traces.prior.tokens(row) == part.posterior.tokens(i)
            assert part.answer.tokens(i) == traces.answer.tokens(row)
            assert part.answer_mask[i].sum() == traces.answer_mask[row].sum()
            for name in ("from_prior", "valid", "truncated"):
                assert getattr(part, name)[i] == getattr(traces, name)[row]
            row += 1


def byte_level() -> PreTrainedTokenizerFast:
    """Merges run across tags, blanks and digits, as those of a large model can."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    core.train_from_iterator(["<answer>2 4 4</answer>", "ss\n</think>\n"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")


@pytest.mark.parametrize("reference", ["2 4 4", "2", "é√", "no", " 2 ", "244 2 4 4 4"])
def test_the_answers_tokens_are_those_of_the_joint_tokenisation(reference):
    tokenizer = byte_level()
    policy = Policy(tiny_model(0, width=16, layers=1, heads=2, vocab_size=300), tokenizer, (0,), 0)
    opening, answer = answer_tokens(policy, reference)
    joint = policy.encode(f"<answer>{reference}</answer>")
    assert joint[: len(opening) + len(answer)] == opening + answer
    assert "<answer>".startswith(tokenizer.decode(opening))  # none of the reference is in the prompt
    covered = tokenizer.decode(opening + answer)
    assert covered.startswith(f"<answer>{reference}")
    rest = joint[len(opening) + len(answer) :]
    assert tokenizer.decode(joint) == covered + tokenizer.decode(rest) and reference not in tokenizer.decode(
        rest
    )


def test_a_token_across_the_boundary_belongs_to_the_answer():
    policy = Policy(tiny_model(0, width=16, layers=1, heads=2, vocab_size=300), byte_level(), (0,), 0)
    opening, answer = answer_tokens(policy, "2 4 4")
    pieces = [policy.tokenizer.decode([i]) for i in opening + answer]
    assert any(">" in piece and "2" in piece for piece in pieces)  # such a token exists here
    assert "2" not in policy.tokenizer.decode(opening)


def test_with_merged_tokens_a_trace_ends_with_the_token_that_completes_its_closing_tag(monkeypatch):
    policy = Policy(tiny_model(0, width=16, layers=1, heads=2, vocab_size=300), byte_level(), (0,), 0)
    monkeypatch.setitem(globals(), "written", lambda *_: ("<think>pass\n</think>\n<answer>2</answer>", False))
    monkeypatch.setattr(covrl, "sample_shared", scripted_sample)
    traces, texts, _ = drawn(policy, 4)
    last = policy.tokenizer.decode(traces.prior.tokens(0)[-1:])
    assert last.endswith("</think>\n") and policy.decode(traces.prior.tokens(0)[:-1]).find("</think>") < 0
    assert traces.valid.all() and texts[0].startswith(policy.decode(traces.prior.tokens(0)))


# --- reward and advantage ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "by_hand"),
    [
        ("mean_logp", lambda logp: logp.mean()),
        ("sum_logp", lambda logp: logp.sum()),
        ("mean_prob", lambda logp: logp.exp().mean()),
        ("prod_prob", lambda logp: logp.sum().exp()),
    ],
)
def test_the_reward_is_the_likelihood_of_the_reference_by_hand(scripted, recipe, by_hand):
    policy = small_policy()
    traces, _, asked = drawn(policy, 12)
    reward = covrl.reward_of(policy, traces, recipe)
    with torch.no_grad():
        for row, problem in enumerate(asked):
            before = prompt_of(traces.prior, row) + traces.prior.tokens(row) + policy.encode("<answer>")
            expected = by_hand(token_logp(policy, before, policy.encode(problem.reference)))
            assert reward[row].item() == pytest.approx(expected.item(), abs=1e-5, rel=1e-4)
    assert not reward.requires_grad and reward.std() > 0


def test_a_reward_is_measured_without_dropout_and_leaves_the_mode_alone(scripted):
    policy = small_policy()
    traces, _, _ = drawn(policy, 6)
    quiet = covrl.reward_of(policy, traces, "mean_logp")
    for layer in policy.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    policy.model.train()
    assert torch.equal(covrl.reward_of(policy, traces, "mean_logp"), quiet) and policy.model.training


@pytest.mark.parametrize("scale", [True, False])
def test_advantages_are_relative_to_the_questions_own_traces(scripted, learned, monkeypatch, scale):
    rewards = torch.randn(18, generator=seeded(1))
    monkeypatch.setattr(covrl, "reward_of", lambda *_: rewards)
    start(scale_advantage=scale).update(0)
    [traces] = learned
    for question, group in enumerate(rewards.view(3, 6)):
        expected = (group - group.mean()) / (group.std() + 1e-6 if scale else 1.0)
        for i in range(6):
            row = question * 6 + i
            got = traces.prior.advantage[row, : int(traces.prior.length[row])]
            torch.testing.assert_close(got, expected[i].expand(len(got)))
    prompts = [prompt_of(traces.prior, row) for row in range(18)]
    assert all(prompts[row] == prompts[row // 6 * 6] for row in range(18))


# --- the update --------------------------------------------------------------------------------------


def by_hand(policy: Policy, traces: Traces, config: CoVRLConfig) -> torch.Tensor:
    """The objective of the first step, trace by trace and token by token, in the papers' naive forms."""
    total, tokens = 0.0, int(traces.prior.length.sum())
    for row in range(len(traces)):
        ids, advantage = traces.prior.tokens(row), traces.prior.advantage[row, 0]
        log_p = token_logp(policy, prompt_of(traces.prior, row), ids, config.temperature)
        log_q = token_logp(policy, prompt_of(traces.posterior, row), ids, config.temperature)
        p, q = log_p.exp(), log_q.exp()
        composite = (p + q) / 2
        total = total - (advantage * composite / composite.detach()).sum()
        sampler = (p if traces.from_prior[row] else q).detach()
        if not traces.truncated[row]:
            total = total + config.kl_coef * (
                (composite * (composite / p).log() - composite + p) / sampler
            ).sum()  # fmt: skip
        if traces.from_prior[row] and traces.valid[row] and advantage > 0:
            answer = token_logp(policy, prompt_of(traces.answer, row), traces.answer.tokens(row))
            weight = answer.sum().exp().detach() if config.nll_weighted else 1.0
            total = total - config.nll_coef * weight * answer.sum()
    return total / tokens


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.7}, {"nll_weighted": True}, {"kl_coef": 0.1, "nll_coef": 3.0}]
)
def test_one_update_follows_the_gradient_of_the_objective_written_out_by_hand(scripted, learned, changes):
    run, other = start(micro_batch=5, **changes), start(**changes)
    before = weights(run)
    metrics = run.update(0)
    [traces] = learned
    loss = by_hand(other.policy, traces, other.config)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), abs=1e-5)
    for old, new, p in zip(before, weights(run), other.policy.model.parameters(), strict=True):
        torch.testing.assert_close(new, old - 0.5 * p.grad, atol=2e-5, rtol=1e-4)
    assert metrics["nll"] > 0 and metrics["kl"] > 0


@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kl_estimator": "exact", "kl_gradient": "prior"},
        {"alpha": 0.25, "nll_weighted": True},
        {"alpha": 1.0},
    ],
)
def test_the_size_of_micro_batches_does_not_matter(scripted, aggregate, changes):
    runs = [start(aggregate=aggregate, micro_batch=size, **changes) for size in (4, 5, 128)]
    before = weights(runs[0])
    found = [run.update(0) for run in runs]
    for run, metrics in zip(runs[1:], found[1:], strict=True):
        for a, b in zip(weights(run), weights(runs[0]), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
        for key in ("loss", "policy", "kl", "nll", "grad_norm"):
            assert metrics[key] == pytest.approx(found[0][key], abs=2e-5, rel=1e-4)
    assert max((a - b).abs().max() for a, b in zip(weights(runs[0]), before, strict=True)) > 1e-3


def test_prior_only_asks_no_posterior_and_has_no_kl(scripted, learned):
    run, other = start(alpha=1.0), start(alpha=1.0, kl_coef=50.0, kl_estimator="exact")
    metrics = run.update(0)
    other.update(0)
    [traces, _] = learned
    assert traces.from_prior.all() and metrics["kl"] == 0
    assert not {"reward_posterior", "step_truth_posterior"} & set(metrics)
    assert same(weights(run), weights(other))


def test_prior_only_does_not_depend_on_what_the_posterior_is_shown(scripted):
    run, misled = start(alpha=1.0), start(alpha=1.0)
    misled.prompts = replace(TINY, posterior=lambda question, reference: TINY.posterior("1+1", "0 0"))
    both = start(), start()
    both[1].prompts = misled.prompts
    for one in (run, misled, *both):
        one.update(1)
    assert same(weights(run), weights(misled)) and not same(weights(both[0]), weights(both[1]))


def test_posterior_only_teaches_no_answer(scripted):
    metrics = start(alpha=0.0).update(0)
    assert metrics["nll"] == 0 and metrics["kl"] > 0 and "reward_prior" not in metrics


def test_the_exact_kl_is_the_sum_over_the_vocabulary_and_balancing_stops_its_gradient(scripted, learned):
    run = start(kl_estimator="exact")
    metrics = run.update(0)
    [traces] = learned
    policy, total = small_policy(), 0.0
    with torch.no_grad():
        for row in range(len(traces)):
            if traces.truncated[row]:
                continue
            ids, logp = traces.prior.tokens(row), []
            for view in (traces.prior, traces.posterior):
                prompt = prompt_of(view, row)
                logits = policy.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].double()
                logp.append(torch.log_softmax(logits, -1))
            composite = (logp[0].exp() + logp[1].exp()) / 2
            total += (composite * (composite.log() - logp[0])).sum().item()
    assert metrics["kl"] == pytest.approx(total / int(traces.prior.length.sum()), rel=1e-4)
    balanced = start(kl_estimator="exact", kl_gradient="prior")
    assert balanced.update(0)["kl"] == pytest.approx(metrics["kl"], rel=1e-6)
    assert not same(weights(run), weights(balanced))


def test_a_trace_cut_in_its_thinking_adds_no_kl(scripted, learned):
    run = start(kl_estimator="exact")
    run.update(0)
    [traces] = learned
    everything = replace(traces, truncated=torch.ones_like(traces.truncated))
    assert covrl.learn(start(), everything, 0)["kl"] == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_before_any_update_the_ratio_is_one_even_for_a_model_with_dropout(temperature):
    policy = small_policy()
    for layer in policy.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    policy.model.train()
    metrics = start(policy, temperature=temperature, micro_batch=4).update(0)
    assert metrics["clip_fraction"] == 0 and abs(metrics["approx_kl"]) < 1e-9


def test_an_update_depends_on_seed_number_and_weights_alone(scripted):
    torch.manual_seed(1)
    one, two, other = start(), start(), start(seed=1)
    first = [one.update(0), one.update(1)]
    torch.manual_seed(2)
    assert [two.update(0), two.update(1)] == first
    other.update(0), other.update(1)
    assert same(weights(one), weights(two)) and not same(weights(one), weights(other))
    assert one.state_dict() == {}


def test_the_learning_rate_rises_and_then_follows_the_cosine_or_stays(scripted):
    changes = {"lr": 0.1, "lr_warmup": 2, "updates": 6, "questions": 1, "traces": 2}
    rates = [start(lr_schedule="cosine", **changes).update(n)["lr"] for n in range(6)]
    cosine = [0.05 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    assert rates == pytest.approx([0.05, 0.1, *cosine])
    assert [start(**changes).update(n)["lr"] for n in (0, 1, 5)] == pytest.approx([0.05, 0.1, 0.1])


def test_a_loss_that_is_not_finite_is_reported_before_any_weight_changes(scripted):
    run = CoVRL(SMALL, small_policy())
    with torch.no_grad():
        run.policy.model.model.norm.weight[0] = float("nan")
    before = weights(run)
    with pytest.raises(NonFiniteError, match=r"the weight model\.norm\.weight is not finite") as caught:
        run.update(0)
    for a, b in zip(weights(run), before, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0, equal_nan=True)
    assert set(caught.value.batch) == {"prior", "posterior", "answer"} and not run.optimizer.state


# --- metrics and settings ----------------------------------------------------------------------------


def test_every_metric_has_a_sentence_and_every_sentence_a_metric(scripted):
    emitted = set()
    for changes in ({}, {"kl_estimator": "exact"}, {"alpha": 1.0}, {"alpha": 0.0}):
        metrics = start(**changes).update(0)
        assert all(isinstance(v, float) and math.isfinite(v) for v in metrics.values())
        emitted |= set(metrics)
    assert emitted == set(METRICS) - {"server_gap"}  # see test_vllm_server.py
    assert all(sentence.endswith(".") for sentence in METRICS.values())


def test_metrics_of_prior_and_posterior_are_kept_apart(scripted, learned):
    run = start(questions=10)
    metrics = run.update(0)
    [traces] = learned
    reward = covrl.reward_of(small_policy(), traces, "mean_logp")
    assert metrics["reward"] == pytest.approx(reward.mean().item(), rel=1e-5)
    assert metrics["reward_prior"] == pytest.approx(reward[traces.from_prior].mean().item(), rel=1e-5)
    assert metrics["reward_posterior"] == pytest.approx(reward[~traces.from_prior].mean().item(), rel=1e-5)
    assert metrics["valid"] == pytest.approx(traces.valid.float().mean().item())
    assert metrics["truncated"] == pytest.approx(traces.truncated.float().mean().item())
    assert 0 < metrics["step_truth_prior"] < 1 and 0 <= metrics["answer_prior"] < 1


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think></think><answer> 2 4 </answer>", "2 4"),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>2", None),
        ("2</answer>", None),
        ("", None),
        ("<answer></answer>", ""),
    ],
)
def test_the_written_answer_is_what_stands_between_the_last_tags(text, answer):
    assert written_answer(text) == answer


@pytest.mark.parametrize(
    "changes",
    [{"alpha": 1.5}, {"alpha": -0.1}, {"kl_gradient": "posterior"}, {"kl_estimator": "k3"}, {"reward": "sum"},
     {"lr_schedule": "linear"}, {"aggregate": "mean"}, {"prompts": "fancy"}],
)  # fmt: skip
def test_settings_without_meaning_are_refused_by_name(changes):
    [name] = changes
    with pytest.raises(ValueError, match=f"{name} must"):
        CoVRLConfig(**changes)
