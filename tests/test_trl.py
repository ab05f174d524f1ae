"""TRL's GRPOTrainer beside this package: our rewards inside it, what is equal on one batch, and what differs.

Everything of TRL's comes out of a trainer that trained a built-in model for two updates on the CPU. The
second update reuses the completions of the first, so its ratios are not 1. An update is two micro-batches;
TRL divides the loss of each by two, so their sum stands beside our loss of the whole batch.
"""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from tangolite.advantages import mix_advantages, outcome_advantage, step_advantage
from tangolite.checkpoints import save_policy
from tangolite.grading import answers_match
from tangolite.lab.trl_rewards import final_reward, format_reward, judgement_reward, outcome_reward
from tangolite.losses import aggregate, kl_penalty, policy_loss, tango_loss
from tangolite.models import load_policy
from tangolite.parsing import (
    extract_answer,
    generator_format_score,
    parse_verification,
    split_steps,
    step_end_positions,
)
from tangolite.prompts import TINY, solution_text, verification_text
from tangolite.rewards import generator_reward, step_rewards, verifier_reward
from tangolite.rollouts import Rollouts
from tangolite.sampling import sample
from tangolite.tango import TangoConfig, texts
from tangolite.tasks import ChainArithmetic, problems
from tangolite.updates import seeded

LIMIT, GROUP, TEMPERATURE, BETA = 30, 4, 1.3, 0.04  # the limit cuts off solutions of four steps only
PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

# ---- our rewards, without TRL

RIGHT, WRONG = solution_text(["1+1=2", "2+1=3", "3+4=7"], "7"), solution_text(["1+1=3"], "8")
YES, NO = verification_text(["a"] * 3, [True] * 3, True), verification_text(["a"] * 3, [True] * 3, False)


def chat(text):
    return [{"role": "assistant", "content": text}]


def thoughts_apart(text):
    thoughts, answer = text.removeprefix("<think>").split("</think>")
    blocks = [{"type": "text", "text": answer}]
    return [{"role": "assistant", "content": blocks, "reasoning_content": thoughts}]


@pytest.mark.parametrize("form", [str, chat, thoughts_apart])
def test_rewards_read_text_and_messages_alike(form):
    done, prompts = [form(RIGHT), form(WRONG), form(RIGHT)], ["?"] * 3
    assert outcome_reward(prompts, done, answer=["7.0", "7", "8"], completion_ids=[[]] * 3) == [1, 0, 0]
    scores = [generator_format_score(text) for text in (RIGHT, WRONG, RIGHT)]
    assert format_reward(prompts, done) == scores and scores[0] > scores[1] > 0
    seen = []

    def verify(solutions, prompts, question, **_):
        seen.extend([solutions, prompts, question])
        return [[YES, NO, NO], ["no judgement"], [YES, ""]]

    assert final_reward(verify)(prompts, done, question=["q"] * 3) == [1 / 3, None, 1]
    assert seen == [[RIGHT, WRONG, RIGHT], prompts, ["q"] * 3]


def test_a_tools_message_is_not_part_of_the_solution():
    talk = [*chat("<step>1+1=2</step>"), {"role": "tool", "content": r"\boxed{9}"}, *chat(r"\boxed{2}")]
    assert outcome_reward(["?"], [talk], answer=["2"]) == [1]
    assert outcome_reward(["?"], [[{"role": "assistant", "content": None}]], answer=["2"]) == [0]


def test_a_missing_gold_answer_is_none_and_a_missing_answer_is_wrong():
    done = [RIGHT, RIGHT, RIGHT, "I do not know", RIGHT]
    assert outcome_reward(["?"] * 5, done, answer=[None, math.nan, " ", "7", 7]) == [None, None, None, 0, 1]


def test_the_verifiers_reward_is_that_of_the_package():
    done, correct = [YES, NO, "", YES, YES], [True, True, False, None, math.nan]
    got = judgement_reward(["?"] * 5, done, correct=correct, n_steps=[3] * 5)
    assert got == [verifier_reward(True, True, 1.0), verifier_reward(False, True, 1.0), 0, None, None]
    lenient = judgement_reward(["?"], [YES], correct=[1.0], n_steps=[5], generator_format=[0.2])
    strict = judgement_reward(["?"], [YES], correct=[1.0], n_steps=[5])
    assert lenient[0] == pytest.approx(1.8) and strict[0] == pytest.approx(1.16)


@pytest.mark.parametrize(
    ("reward", "columns", "missing"),
    [
        (outcome_reward, {"solution": ["7"]}, "answer"),
        (judgement_reward, {"n_steps": [3]}, "correct"),
        (judgement_reward, {"correct": [True]}, "n_steps"),
    ],
)
def test_a_missing_column_is_named(reward, columns, missing):
    with pytest.raises(ValueError, match=f"column '{missing}'"):
        reward(["?"], [YES], **columns)


def test_a_column_or_verifications_of_another_length_are_refused():
    with pytest.raises(ValueError, match="shorter"):
        outcome_reward(["?"] * 2, [RIGHT] * 2, answer=["7"])
    with pytest.raises(ValueError, match="shorter"):
        final_reward(lambda **_: [[YES]])(["?"] * 2, [RIGHT] * 2)


# ---- a trainer that remembers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("trl") / "generator"
    save_policy(load_policy("tiny-generator"), path)
    return path


@pytest.fixture(scope="module")
def train(folder):
    """A function from settings of `GRPOConfig` to a trainer after two updates, with its batch and losses."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    class Recording(trl.GRPOTrainer):
        seen, change = (), staticmethod(lambda trainer, batch: None)

        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            self.rows, self.done, self.ids = inputs, completions, completion_ids_list
            self.rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            return self.rewards

        def _generate_and_score_completions(self, inputs):
            self.batch = super()._generate_and_score_completions(inputs)
            self.change(self, self.batch)
            return self.batch

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            self.scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return self.scores

        def compute_loss(self, model, inputs, *args, **kwargs):
            weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            logp, entropy, _ = self.scores
            grad, *by_weight = torch.autograd.grad(loss, [logp, *model.parameters()], retain_graph=True)
            new = {"logp": logp.detach(), "entropy": entropy.detach(), "grad": grad}
            kept = {k: v.clone() for k, v in inputs.items() if v.dim()} | new
            self.seen = (*self.seen, (loss.detach(), kept, weights, by_weight))
            return loss

    @cache
    def trained(rewards=(outcome_reward, format_reward), *, conversation=False, change=None, **settings):
        asked = [p for k in (1, 2, 3, 4) for p in problems(ChainArithmetic(steps=k), 2, f"trl/{k}")]
        rows = [
            {"prompt": TINY.generator(p.question), "question": p.question, "answer": p.answer} for p in asked
        ]
        rows[0]["answer"] = None
        tokenizer = load_policy(folder).tokenizer
        if conversation:
            tokenizer.chat_template = PLAIN_CHAT
            rows = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
        defaults = {
            "per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "num_generations": GROUP,
            "num_iterations": 2, "max_steps": 2, "max_completion_length": LIMIT, "temperature": TEMPERATURE,
            "learning_rate": 3e-4, "lr_scheduler_type": "constant", "seed": 0, "use_cpu": True, "bf16": False,
            "gradient_checkpointing": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        }  # fmt: skip
        args = trl.GRPOConfig(str(folder.parent / "out"), **(defaults | settings))
        trainer = Recording(
            str(folder), list(rewards), args, Dataset.from_list(rows), processing_class=tokenizer
        )
        trainer.change = change or trainer.change
        trainer.train()
        return trainer

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield trained
    torch.set_num_threads(threads)


def second_update(trainer):
    """Both micro-batches of the second update as one batch, TRL's loss of it, and where its rows were cut."""
    losses, parts, weights, by_weight = zip(*trainer.seen[-2:], strict=True)
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    grads = [sum(pair) for pair in zip(*by_weight, strict=True)]
    batch = SimpleNamespace(**whole, loss=sum(losses), weights=weights[0], by_weight=grads)
    batch.mask = batch.completion_mask.bool()
    assert len(batch.mask) == 32 and batch.advantages.any()
    assert (batch.logp - batch.old_per_token_logps)[batch.mask].abs().max() > 0.2  # else clipping is not seen
    return batch


def ours(batch, how, *, beta=0.0, clip_eps=0.2, advantage=None, weight=None):
    """Our loss of the batch and its gradient with respect to the log-probs."""
    logp = batch.logp.clone().requires_grad_()
    advantage = batch.advantages[:, None].expand_as(logp) if advantage is None else advantage
    policy = policy_loss(
        logp, batch.old_per_token_logps, advantage, batch.mask,
        clip_eps=clip_eps, aggregate=how, constant_length=LIMIT, sample_weight=weight,
    )  # fmt: skip
    loss = policy.loss
    if beta:
        k3 = kl_penalty(logp, batch.ref_per_token_logps)
        loss = loss + beta * aggregate(k3, batch.mask, how, constant_length=LIMIT)
    (grad,) = torch.autograd.grad(loss, logp)
    assert policy.clip_fraction > 0
    return loss.detach(), grad


def close(a, b, scale=1.0):
    return torch.allclose(a, scale * b, rtol=1e-5, atol=1e-5 * float(a.abs().max()))


def differ(a, b):
    """By more than any rounding: a hundredth of the largest entry."""
    return bool((a - b).abs().max() > 1e-2 * a.abs().max())


# ---- our rewards inside a trainer


def by_the_tiny_verifier(solutions, question, **_):
    """Two verifications of each solution."""
    verifier = load_policy("tiny-verifier")
    asked = [TINY.verifier(q, s, len(split_steps(s))) for q, s in zip(question, solutions, strict=True)]
    prompts = [TINY.encode(verifier.tokenizer, text) for text in asked]
    found = texts(verifier, sample(verifier, prompts, n=2, max_new_tokens=64, generator=seeded("verify")))
    return [found[i : i + 2] for i in range(0, len(found), 2)]


@pytest.mark.parametrize("conversation", [False, True])
def test_a_trainer_pays_our_rewards_and_leaves_out_none(train, conversation):
    rewards = (outcome_reward, format_reward, final_reward(by_the_tiny_verifier))
    trainer = train(rewards, conversation=conversation, max_steps=1)
    assert isinstance(trainer.done[0], list if conversation else str)
    decode = load_policy("tiny-generator").tokenizer.decode
    solutions = [decode(ids, skip_special_tokens=True) for ids in trainer.ids]
    golds = [row["answer"] for row in trainer.rows]
    outcome, form, final = trainer.rewards.T
    expected = [
        math.nan if gold is None else float(answers_match(extract_answer(text), gold))
        for text, gold in zip(solutions, golds, strict=True)
    ]
    torch.testing.assert_close(outcome, torch.tensor(expected), equal_nan=True)
    assert outcome.isnan().sum() == GROUP and outcome.nansum() > 0
    torch.testing.assert_close(form, torch.tensor([generator_format_score(text) for text in solutions]))
    found = by_the_tiny_verifier(solutions, [row["question"] for row in trainer.rows])
    for value, solution, verifications in zip(final, solutions, found, strict=True):
        judged = [parse_verification(text, len(split_steps(solution))).final for text in verifications]
        judged = [float(j) for j in judged if j is not None]
        assert value.isnan() if not judged else value == sum(judged) / len(judged)
    logged = trainer.state.log_history[-1]
    assert logged["rewards/outcome_reward/mean"] == pytest.approx(float(outcome.nanmean()), abs=1e-4)
    assert {"rewards/format_reward/mean", "rewards/final_judgement/mean"} <= logged.keys()


def test_a_trainer_names_the_column_that_its_data_lacks(train):
    with pytest.raises(ValueError, match="column 'correct'"):
        train((judgement_reward,))


# ---- advantages

NONE = math.nan
TABLE = torch.tensor(
    [
        [1, 0, 0, 0], [1, 1, 1, 1], [1.8, 0.2, 1, 0.2], [NONE, 1, 0, 0.5],
        [NONE, NONE, 1, 0.3], [NONE, NONE, NONE, 0.7], [NONE] * 4, [0.1, 0.1, 0.1, 0.1],
    ]
)  # fmt: skip
LONE = TABLE.isfinite().sum(1).eq(1).repeat_interleave(GROUP)  # completions of a group with one reward


def table(prompts, completions, **_):
    return [None if value.isnan() else float(value) for value in TABLE.flatten()]


def both_advantages(trainer, **ways):
    rollouts = as_rollouts(trainer.batch)
    mine = outcome_advantage(trainer.rewards.nansum(1).masked_fill(trainer.rewards.isnan().all(1), NONE),
                             rollouts.group, rollouts.mask, **ways)  # fmt: skip
    assert torch.equal(mine, mine[:, :1] * rollouts.mask)
    return trainer.batch["advantages"], mine[:, 0]


def as_rollouts(batch):
    """A batch of TRL's as our rollouts, for the order of sampling."""
    length = batch["completion_mask"].sum(1)
    return Rollouts(
        batch["prompt_ids"], batch["prompt_mask"].sum(1), batch["completion_ids"], length,
        terminated=length < LIMIT, group=torch.arange(len(length)) // GROUP,
    )  # fmt: skip


def test_advantages_centred_only_are_equal_where_a_group_has_two_rewards(train):
    theirs, mine = both_advantages(train((table,), scale_rewards="none", max_steps=1), scale=False)
    torch.testing.assert_close(theirs[~LONE], mine[~LONE], rtol=0, atol=1e-6)
    # A lone reward is its own mean in TRL; here, as in Tango's trainer, a group of one has mean 0.
    assert not theirs[LONE].any() and torch.equal(mine[LONE], TABLE.flatten()[LONE].nan_to_num())


def test_advantages_scaled_by_group_differ_by_the_epsilon_beside_the_deviation_alone(train):
    theirs, mine = both_advantages(train((table,), scale_rewards="group", max_steps=1))
    scored = [row[row.isfinite()] for row in TABLE]
    std = torch.tensor([row.std() if len(row) > 1 else 0.0 for row in scored]).repeat_interleave(GROUP)
    same = mine * (std + 1e-6) / (std + 1e-4)
    torch.testing.assert_close(theirs[~LONE], same[~LONE], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(theirs[~LONE], mine[~LONE], rtol=1e-3, atol=1e-5)
    assert not theirs[LONE].any() and mine[LONE].sum() == pytest.approx(0.7)


def test_advantages_scaled_by_batch_are_the_centred_ones_over_the_deviation_of_all_rewards(train):
    theirs, centred = both_advantages(train((table,), scale_rewards="batch", max_steps=1), scale=False)
    std = TABLE[TABLE.isfinite()].std()
    torch.testing.assert_close(theirs[~LONE], (centred / (std + 1e-4))[~LONE], rtol=1e-5, atol=1e-6)
    grouped = both_advantages(train((table,), scale_rewards="batch", max_steps=1))[1]
    assert differ(theirs, grouped)  # it has no name here; a group of small differences weighs less


def test_rloo_is_the_centred_advantage_times_n_over_n_minus_one(train):
    theirs, mine = both_advantages(train((table,), scale_rewards="none", max_steps=1), estimator="rloo")
    n = TABLE.isfinite().sum(1).repeat_interleave(GROUP)
    torch.testing.assert_close(theirs * n / (n - 1).clamp(min=1), mine, rtol=0, atol=1e-6)


def test_the_real_rewards_of_a_run_give_the_same_advantages(train):
    trainer = train(beta=BETA, use_bias_correction_kl=False)
    theirs, mine = both_advantages(trainer)
    assert theirs.any() and torch.equal(theirs == 0, mine == 0)
    torch.testing.assert_close(theirs, mine, rtol=2e-3, atol=0)  # 1e-4 beside a deviation of 0.1 or more


def outcomes(prompts, completions, **_):
    return [float(i % 3 == 0) for i in range(len(completions))]


def judgements(prompts, completions, **_):
    return [None if i % 4 == 3 else float(i % 2) for i in range(len(completions))]


def test_weights_of_two_rewards_are_our_mix_except_where_no_judgement_was_found(train):
    settings = {"reward_weights": (0.7, 0.3), "scale_rewards": "none", "max_steps": 1}
    trainer = train((outcomes, judgements), **settings)
    done = range(32)
    outcome, final = torch.tensor(outcomes(done, done)), judgements(done, done)
    mine = generator_reward(outcome, final, weight=0.7)
    rewards = torch.where(torch.tensor([f is None for f in final]), 0.7 * outcome, mine)
    assert differ(rewards, mine)
    expected = rewards.view(-1, GROUP) - rewards.view(-1, GROUP).mean(1, keepdim=True)
    torch.testing.assert_close(trainer.batch["advantages"], expected.flatten(), rtol=0, atol=1e-6)


# ---- losses that are equal


def test_log_probs_old_log_probs_and_masks_are_equal(train):
    trainer = train(beta=BETA, use_bias_correction_kl=False)
    policy, rollouts = load_policy("tiny-generator"), as_rollouts(trainer.batch)
    assert torch.equal(rollouts.mask, trainer.batch["completion_mask"].bool())
    with torch.no_grad():
        logp = policy.logp(rollouts, temperature=TEMPERATURE)
    for theirs in (trainer.batch["old_per_token_logps"], trainer.batch["ref_per_token_logps"]):
        torch.testing.assert_close(theirs[rollouts.mask], logp[rollouts.mask], rtol=1e-5, atol=5e-5)


EQUAL = [
    ("grpo", "sequence", 0.0, 0.2),
    ("grpo", "sequence", BETA, 0.1),
    ("dapo", "token", BETA, 0.2),  # TRL's default: over all tokens of an update
    ("dr_grpo", "constant", BETA, 0.2),  # the constant is max_completion_length
]


@pytest.mark.parametrize(("loss_type", "how", "beta", "clip_eps"), EQUAL)
def test_loss_and_gradient_are_equal(train, loss_type, how, beta, clip_eps):
    batch = second_update(
        train(loss_type=loss_type, beta=beta, epsilon=clip_eps, use_bias_correction_kl=False)
    )
    loss, grad = ours(batch, how, beta=beta, clip_eps=clip_eps)
    assert batch.loss.item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert close(batch.grad, grad)
    for other in {"token", "sequence", "constant"} - {how}:
        assert differ(batch.grad, ours(batch, other, beta=beta, clip_eps=clip_eps)[1])
    assert differ(batch.grad, ours(batch, how, beta=beta, clip_eps=clip_eps / 10)[1])


def test_the_gradient_of_every_weight_is_equal(train):
    batch = second_update(train(loss_type="dapo", beta=BETA, epsilon=0.2, use_bias_correction_kl=False))
    policy = load_policy("tiny-generator")
    policy.model.load_state_dict(batch.weights)
    logp = policy.logp(as_rollouts(vars(batch)), temperature=TEMPERATURE)
    loss = tango_loss(
        logp, batch.old_per_token_logps, batch.advantages[:, None].expand_as(logp), batch.mask,
        ref_logp=batch.ref_per_token_logps, kl_coef=BETA, kl_clamp=None,
    )  # fmt: skip
    mine = torch.autograd.grad(loss.loss, list(policy.model.parameters()))
    largest = max(float(g.abs().max()) for g in mine)
    for theirs, grad in zip(batch.by_weight, mine, strict=True):
        torch.testing.assert_close(theirs, grad, rtol=1e-4, atol=1e-5 * largest)


def with_steps_and_weights(trainer, batch):
    """What a subclass of the trainer can do: step advantages, and the verifier's class weights."""
    rollouts = as_rollouts(batch)
    tokenizer, width = trainer.processing_class, rollouts.completion_ids.shape[1]
    ends = [step_end_positions(rollouts.tokens(row), tokenizer) for row in range(len(rollouts))]
    pairs = [step_rewards([k % 2 == 0 for k in range(len(end))], end, width) for end in ends]
    rewards, masks = (torch.stack(column)[:, None] for column in zip(*pairs, strict=True))
    step = step_advantage(rewards, masks, rollouts.group, rollouts.mask)
    outcome = batch["advantages"][:, None] * rollouts.mask
    batch["ours"] = mix_advantages(outcome, step, 0.3)
    batch["weight"] = torch.linspace(0.5, 1.5, len(rollouts))
    batch["advantages"] = batch["ours"] * batch["weight"][:, None]


def test_step_advantages_and_sample_weights_go_through_advantages_of_every_token(train):
    batch = second_update(train(change=with_steps_and_weights, loss_type="dapo"))
    assert differ(batch.ours, batch.ours[:, :1].expand_as(batch.ours))
    loss, grad = ours(batch, "token", advantage=batch.ours, weight=batch.weight)
    assert batch.loss.item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-6) and close(batch.grad, grad)


# ---- what differs, and how


def test_a_reward_function_cannot_give_step_rewards(train):
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        train((lambda prompts, completions, **_: [[0.5, -0.5]] * len(completions),))


def test_bnpo_averages_the_token_means_of_micro_batches(train):
    batch = second_update(train(loss_type="bnpo", beta=BETA, use_bias_correction_kl=False))
    loss, grad, size = 0.0, [], 16
    for rows in (slice(0, size), slice(size, None)):
        tensors = {name: v[rows] for name, v in vars(batch).items() if torch.is_tensor(v) and v.dim()}
        part = SimpleNamespace(**tensors)
        part_loss, part_grad = ours(part, "token", beta=BETA)
        loss, grad = loss + part_loss / 2, [*grad, part_grad / 2]
    assert batch.loss.item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert close(batch.grad, torch.cat(grad))
    # The token mean of the update, ours and dapo's, weighs a micro-batch by its share of the tokens.
    share = batch.mask[:size].sum() / batch.mask.sum()
    whole = ours(batch, "token", beta=BETA)[1]
    assert abs(share - 0.5) > 0.005 and close(batch.grad[:size], whole[:size], 0.5 / float(share))


@pytest.mark.parametrize(("loss_type", "how"), [("dapo", "token"), ("grpo", "sequence")])
def test_masked_truncated_completions_still_count_in_the_sequence_mean_of_trl(train, loss_type, how):
    batch = second_update(train(loss_type=loss_type, mask_truncated_completions=True))
    kept = batch.mask.any(1).float().mean().item()
    assert 0 < kept < 1
    loss, grad = ours(batch, how)
    factor = kept if how == "sequence" else 1.0  # ours averages over the completions that are left
    assert batch.loss.item() == pytest.approx(factor * loss.item(), rel=1e-5, abs=1e-6)
    assert close(batch.grad, grad, factor)


def test_bias_correction_multiplies_k3_by_the_ratio_that_is_differentiated_too(train):
    trainer = train(loss_type="grpo", beta=BETA)  # on by default
    assert trainer.args.use_bias_correction_kl
    batch = second_update(trainer)
    logp = batch.logp.clone().requires_grad_()
    ratio = (logp - batch.old_per_token_logps).exp()
    corrected = aggregate(ratio * kl_penalty(logp, batch.ref_per_token_logps), batch.mask, "sequence")
    grad = ours(batch, "sequence")[1] + BETA * torch.autograd.grad(corrected, logp)[0]
    assert close(batch.grad, grad)
    assert differ(batch.grad - ours(batch, "sequence")[1], ours(batch, "sequence", beta=BETA)[1] - grad)


def test_the_entropy_bonus_is_a_token_mean_whatever_the_loss_type(train):
    coef = 0.5
    batch = second_update(train(loss_type="grpo", entropy_coef=coef))
    policy = ours(batch, "sequence")[0]
    halves = [aggregate(batch.entropy[rows], batch.mask[rows]) for rows in (slice(0, 16), slice(16, None))]
    assert batch.loss.item() == pytest.approx((policy - coef * sum(halves) / 2).item(), rel=1e-5)
    advantage = batch.advantages[:, None].expand_as(batch.logp)
    mine = tango_loss(
        batch.logp, batch.old_per_token_logps, advantage, batch.mask,
        entropy=batch.entropy, entropy_coef=coef, aggregate="sequence",
    )  # fmt: skip
    assert mine.entropy.item() == pytest.approx(aggregate(batch.entropy, batch.mask, "sequence").item())
    assert abs(mine.loss - batch.loss) > 1e-3


def test_gspo_is_one_ratio_for_a_completion_the_exponential_of_the_mean_log_ratio(train):
    batch = second_update(train(loss_type="grpo", importance_sampling_level="sequence", epsilon=0.02))
    logp = batch.logp.clone().requires_grad_()
    log_ratio = (logp - batch.old_per_token_logps).masked_fill(~batch.mask, 0).sum(1) / batch.mask.sum(1)
    one = log_ratio[:, None]
    loss = policy_loss(
        one, torch.zeros_like(one), batch.advantages[:, None], torch.ones_like(one), clip_eps=0.02
    ).loss
    assert batch.loss.item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    assert close(batch.grad, torch.autograd.grad(loss, logp)[0])
    assert differ(batch.grad, ours(batch, "sequence", clip_eps=0.02)[1])


DEFAULTS = {  # name in TRL: (TRL's default, what Tango's recipe asks for)
    "loss_type": ("dapo", {"token": "dapo"}[TangoConfig.aggregate]),
    "scale_rewards": ("group", "group"),
    "beta": (0.0, TangoConfig.kl_coef),
    "use_bias_correction_kl": (True, False),
    "entropy_coef": (0.0, TangoConfig.entropy_coef),
    "epsilon": (0.2, TangoConfig.clip_eps),
    "num_generations": (8, TangoConfig.group),
    "num_iterations": (1, 1),
    "learning_rate": (1e-6, TangoConfig.lr),
    "lr_scheduler_type": ("linear", "constant"),
    "temperature": (1.0, TangoConfig.temperature),
    "max_grad_norm": (1.0, TangoConfig.max_grad_norm),
    "mask_truncated_completions": (False, TangoConfig.mask_truncated),
}


def test_five_defaults_of_trl_are_not_those_of_tangos_recipe(tmp_path):
    trl = pytest.importorskip("trl")
    config = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    assert {name: getattr(config, name) for name in DEFAULTS} == {k: v[0] for k, v in DEFAULTS.items()}
    changed = {name for name, (default, wanted) in DEFAULTS.items() if default != wanted}
    assert changed == {
        "beta", "use_bias_correction_kl", "entropy_coef", "num_generations", "lr_scheduler_type"
    }  # fmt: skip
