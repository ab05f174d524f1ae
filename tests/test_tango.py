"""Tango: whose turn it is, what each update may change, and what may not matter to it.

An untrained policy writes no steps, so most tests let a scripted player write in its place: completions of
the right form with random mistakes, some of them cut off, with the policy's own log-probs.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tangolite import tango
from tangolite.models import Policy, tiny_model, tiny_policy, tiny_tokenizer
from tangolite.parsing import Verification, generator_format_score, verifier_format_score
from tangolite.prompts import solution_text
from tangolite.rewards import ClassWeights, verifier_reward
from tangolite.rollouts import Rollouts, pad_left, pad_right
from tangolite.tango import METRICS, Tango, TangoConfig
from tangolite.tasks import ChainArithmetic, Problem, ProblemSet
from tangolite.updates import NonFiniteError
from tangolite.warmstart import written_verification

CHAIN = ChainArithmetic(modulus=5, steps=(1, 2, 3))
SMALL = TangoConfig(
    task={"kind": "chain", "modulus": 5, "steps": [1, 2, 3]}, questions=3, group=4, updates=8,
    verifier_warmup=2, max_new_tokens=24, verifier_max_new_tokens=40, lr=0.5, verifier_lr=0.5, alpha=0.5,
    max_grad_norm=1e9,
)  # fmt: skip


def small_policy(seed=0) -> Policy:
    return tiny_policy(seed, width=16, layers=1, heads=2)


def start(**changes) -> Tango:
    """A run with plain gradient steps: Adam's first step has one size, whatever the gradient."""
    run = Tango(replace(SMALL, **changes), small_policy(0), small_policy(1))
    for player in run.players.values():
        player.optimizer = torch.optim.SGD(player.policy.parameters(), lr=0.5)
    return run


def weights(policy: Policy) -> list[torch.Tensor]:
    return [p.detach().clone() for p in policy.model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def written(prompt: str, rng: random.Random) -> str:
    """What the scripted player answers: solutions with mistakes, verifications with arbitrary verdicts."""
    _, _, rest = prompt.partition("|>")
    question, solution = rest.split("<|end|>")[:2]
    problem = Problem(question, "")
    if prompt.startswith("<|generator|>"):
        return solution_text(*CHAIN.flawed(problem, rng, 0.4))
    steps = [piece.split("</step>")[0] for piece in solution.split("<step>")[1:]]
    verdicts = [rng.random() < 0.5 for _ in steps]
    if rng.random() < 0.2:
        return "<step_verification></step_verification>"  # says nothing
    return written_verification(CHAIN, problem, steps, verdicts, rng.random() < 0.5)


def scripted_sample(policy, prompts, *, n, max_new_tokens, temperature, generator, chunk=0) -> Rollouts:
    rng = random.Random(int(torch.randint(2**31, (), generator=generator)))
    rows = [prompt for prompt in prompts for _ in range(n)]
    texts = [written(policy.decode(list(prompt)), rng) for prompt in rows]
    full = [[*policy.encode(text), policy.eos_ids[0]] for text in texts]
    cut = [ids[:5] if rng.random() < 0.15 else ids for ids in full]
    prompt_ids, prompt_length = pad_left(rows, policy.pad_id)
    ids, length = pad_right(cut, policy.pad_id)
    ended = torch.tensor([a == b for a, b in zip(full, cut, strict=True)])
    group = torch.arange(len(prompts)).repeat_interleave(n)
    rollouts = Rollouts(prompt_ids, prompt_length, ids, length, ended, group)
    with torch.no_grad():
        return rollouts.with_(old_logp=policy.logp(rollouts, temperature=temperature))


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(tango, "sample_shared", scripted_sample)


@pytest.fixture
def learned(monkeypatch):
    """The rollouts that every call of `learn` got, in order."""
    seen, real = [], tango.learn
    monkeypatch.setattr(
        tango,
        "learn",
        lambda run, who, rollouts, done: seen.append(rollouts) or real(run, who, rollouts, done),
    )
    return seen


# --- the schedule ----------------------------------------------------------------------------------------


def test_the_papers_schedule_is_forty_verifier_updates_then_three_to_one():
    config = TangoConfig()
    turns = [config.turn(update) for update in range(config.updates)]
    assert turns[:40] == ["verifier"] * 40
    assert turns[40:48] == ["generator", "generator", "generator", "verifier"] * 2
    assert (turns.count("generator"), turns.count("verifier")) == (300, 140)
    assert (config.turns("generator", 44), config.turns("verifier", 44)) == (3, 41)


def test_a_verifier_trained_in_the_warm_up_alone_or_never():
    warm = TangoConfig(verifier_updates="warmup", verifier_warmup=2)
    assert [warm.turn(u) for u in range(5)] == ["verifier"] * 2 + ["generator"] * 3
    never = TangoConfig(verifier_updates="never")
    assert {never.turn(u) for u in range(60)} == {"generator"}
    one_to_one = replace(warm, verifier_updates="always", generator_per_verifier=1)
    assert [one_to_one.turn(u) for u in range(2, 6)] == ["generator", "verifier"] * 2


def test_alpha_decays_over_the_generators_own_updates(scripted):
    run = start(questions=1, group=2, updates=440, verifier_warmup=40, alpha=0.1)
    assert run.update(44)["alpha"] == pytest.approx(0.1 * 100 ** (-3 / 300))
    assert run.update(44)["alpha"] == pytest.approx(0.0955, abs=5e-5)
    assert run.update(40)["alpha"] == pytest.approx(0.1)
    assert start(questions=1, group=2, alpha_schedule="none").update(7)["alpha"] == 0.5


def test_rloo_of_one_completion_and_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"rloo.*group >= 2"):
        TangoConfig(estimator="rloo", group=1)
    for name in ("verifier_updates", "step_source", "prompts", "estimator", "aggregate", "kl_kind"):
        with pytest.raises(ValueError, match=f"{name} must be one of"):
            TangoConfig(**{name: "sometimes"})


# --- what an update changes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "who", "other"), [(2, "generator", "verifier"), (0, "verifier", "generator")]
)
def test_an_update_changes_its_own_player_and_nothing_else_bit_for_bit(scripted, number, who, other):
    run = start()
    before = {name: weights(player.policy) for name, player in run.players.items()}
    references = {name: weights(player.reference) for name, player in run.players.items()}
    assert run.update(number)["turn"] == who
    assert same(weights(run.players[other].policy), before[other])
    assert not same(weights(run.players[who].policy), before[who])
    for name, player in run.players.items():
        assert same(weights(player.reference), references[name])


def test_an_update_depends_on_seed_number_and_weights_alone(scripted):
    torch.manual_seed(1)
    one = start()
    one.update(2), one.update(5)
    torch.manual_seed(2)
    two, other = start(), start(seed=1)
    two.update(2)
    torch.rand(7), random.random()
    two.update(5)
    other.update(2)
    assert same(weights(one.generator), weights(two.generator))
    assert same(weights(one.verifier), weights(two.verifier))
    assert not same(weights(one.generator), weights(other.generator))


@pytest.mark.parametrize("numbers", [(2, 3), (0, 1), (0, 2, 1, 5)])
def test_the_truth_of_steps_never_reaches_a_weight(scripted, monkeypatch, numbers):
    honest, lied_to = start(), start()
    seen = [honest.update(number) for number in numbers]
    rng = random.Random(0)
    monkeypatch.setattr(
        ChainArithmetic, "step_truth", lambda self, p, steps: [rng.random() < 0.5 for _ in steps]
    )
    told = [lied_to.update(number) for number in numbers]
    for name in honest.players:
        assert same(weights(honest.players[name].policy), weights(lied_to.players[name].policy))
    assert any(a != b for a, b in zip(seen, told, strict=True))  # the metrics did notice


def test_gold_step_labels_do_reach_the_weights_where_they_are_asked_for(scripted, monkeypatch):
    honest, lied_to = start(step_source="truth"), start(step_source="truth")
    honest.update(2)
    monkeypatch.setattr(ChainArithmetic, "step_truth", lambda self, problem, steps: [False for _ in steps])
    lied_to.update(2)
    assert not same(weights(honest.generator), weights(lied_to.generator))
    honest.task = ProblemSet((Problem("1+1", "2"),))
    with pytest.raises(ValueError, match="step_source: truth needs a task"):
        honest.update(2)


def test_outcome_only_has_no_step_reward_and_asks_no_verifier(scripted, learned, monkeypatch):
    monkeypatch.setattr(tango, "verify", None)  # would raise if called
    metrics = start(step_source="none").update(2)
    assert metrics["alpha"] == 0.0 and "final_accuracy" not in metrics
    [rollouts] = learned
    assert rollouts.step_reward is None and rollouts.step_mask is None
    scores = tango.outcome_advantage(rollouts.reward, rollouts.group, rollouts.mask)
    assert torch.equal(rollouts.advantage, scores)


# --- rewards -----------------------------------------------------------------------------------------


def test_the_generators_reward_is_its_answer_and_its_steps_are_paid_on_their_last_tokens(scripted, learned):
    run = start(verifications=2)
    run.update(2)
    [rollouts] = learned
    policy, n, width = run.generator, 12, rollouts.completion_ids.shape[1]
    assert rollouts.step_reward.shape == rollouts.step_mask.shape == (n, 2, width)
    tag, paid = policy.encode("</step>")[0], 0
    for row in range(n):
        ids = rollouts.tokens(row)
        ends = [i for i, token in enumerate(ids) if token == tag]
        for mask, reward in zip(rollouts.step_mask[row], rollouts.step_reward[row], strict=True):
            where = mask.nonzero()[:, 0].tolist()
            assert where in ([], ends)
            assert reward[~mask].abs().sum() == 0
            assert reward[mask].abs().tolist() == pytest.approx([1 / len(ends)] * len(where) if ends else [])
            paid += len(where)
        text, asked = policy.decode(ids), policy.decode(rollouts.prompt_ids[row].tolist())
        question = asked.rpartition("<|generator|>")[2].removesuffix("<|end|>")
        results = [result for _, result in CHAIN._walk(question, CHAIN.truth)]
        assert bool(rollouts.reward[row]) == text.endswith(f"\\boxed{{{results[-1]}}}</answer>")
    assert paid > 10 and 0 < rollouts.reward.mean() < 1
    assert rollouts.step_reward.sum(-1).unique().numel() > 2


def solution(correct: bool, ends: list[int], steps=None) -> tango.Solution:
    steps = steps or [""] * len(ends)
    return tango.Solution(Problem("1+1", "2"), "", steps, ends, correct, 1.0)


def test_step_rewards_by_hand_for_two_verifications_of_two_solutions():
    ids, six, zero = torch.ones(2, 6, dtype=torch.long), torch.tensor([6, 6]), torch.tensor([0, 0])
    rollouts = Rollouts(ids, six, ids, six, zero == 0, zero)
    solutions = [solution(True, [1, 4]), solution(False, [3])]
    found = [
        [Verification([True, False], True), Verification(None, None)],
        [Verification([False], False), Verification([True], None)],
    ]
    filled = tango.with_step_rewards(rollouts, solutions, found)
    assert filled.step_reward.tolist() == [
        [[0, 0.5, 0, 0, -0.5, 0], [0] * 6],
        [[0, 0, 0, -1, 0, 0], [0, 0, 0, 1, 0, 0]],
    ]
    assert filled.step_mask.int().tolist() == [
        [[0, 1, 0, 0, 1, 0], [0] * 6],
        [[0, 0, 0, 1, 0, 0], [0, 0, 0, 1, 0, 0]],
    ]


def test_the_final_judgement_is_mixed_in_only_where_it_was_found():
    solutions = [solution(True, [1]), solution(False, [1]), solution(True, [1])]
    found = [
        [Verification(None, False), Verification(None, True)],
        [Verification(None, True), Verification(None, None)],
        [Verification(None, None)],
    ]
    run = start(final_weight=0.75)
    assert tango.outcome_rewards(run, solutions, found).tolist() == [0.875, 0.25, 1.0]
    assert tango.outcome_rewards(start(), solutions, found).tolist() == [1.0, 0.0, 1.0]


def test_only_the_completion_is_graded_and_steps_and_their_ends_agree():
    policy = small_policy()
    text = "<think><step>1+1=2</step><step>2+3=0</step></think><answer>\\boxed{0}</answer>"
    ids = policy.encode(text)
    read = tango.read_solution(policy, ids, Problem("1+1+3", "0"))
    assert read.correct and read.steps == ["1+1=2", "2+3=0"] and read.text == text
    assert [ids[end] for end in read.ends] == policy.encode("</step>") * 2
    assert not tango.read_solution(policy, ids, Problem("1+1+3", "2")).correct
    for silent in ("0", "<think><step>\\boxed{0}</step></think><answer>0</answer>"):
        assert not tango.read_solution(policy, policy.encode(silent), Problem("\\boxed{0}", "0")).correct


def test_the_verifier_is_paid_for_its_final_judgement_and_weighted_by_class(scripted, learned):
    run = start(class_weights="inverse")
    weigh = ClassWeights(method="inverse")
    for number in (0, 1):
        run.update(number)
        rollouts = learned[-1]
        correct = []
        for row in range(12):
            asked = run.verifier.decode(rollouts.prompt_ids[row].tolist()).rpartition("<|verifier|>")[2]
            question, claim = asked.split("<|end|>")[:2]
            answer = [result for _, result in CHAIN._walk(question, CHAIN.truth)][-1]
            correct.append(claim.endswith(f"<answer>\\boxed{{{answer}}}</answer>"))
            said = run.verifier.decode(rollouts.tokens(row))
            final = {"\\boxed{CORRECT}": True, "\\boxed{INCORRECT}": False}.get(
                said.partition("<final_verification>")[2].partition("</final_verification>")[0]
            )
            form = verifier_format_score(said, claim.count("<step>"), generator_format_score(claim))
            assert rollouts.reward[row].item() == pytest.approx(verifier_reward(final, correct[-1], form))
        assert rollouts.group.tolist() == [0] * 4 + [1] * 4 + [2] * 4
        assert len(set(correct)) == 2
        assert torch.equal(rollouts.sample_weight, weigh(torch.tensor(correct)))
        assert rollouts.step_reward is None
    again = start()
    again.load_state_dict(run.state_dict())
    assert again.class_weights.state_dict() == weigh.state_dict()


def test_the_verifier_learns_on_a_task_of_its_own(scripted, learned):
    run = start(verifier_task={"kind": "chain", "modulus": 5, "steps": 1})
    run.update(0), run.update(2)
    operations = [
        {
            sum(map(run.generator.decode(ids.tolist()).split("<|end|>")[0].count, "+-"))
            for ids in rollouts.prompt_ids
        }
        for rollouts in learned
    ]
    assert operations[0] == {1} and max(operations[1]) > 1


# --- the optimizer step ------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "reinforce++"])
@pytest.mark.parametrize("aggregate", ["token", "sequence", "constant"])
def test_the_size_of_micro_batches_does_not_matter(scripted, estimator, aggregate):
    runs = [
        start(estimator=estimator, aggregate=aggregate, micro_batch=size, mask_truncated=True)
        for size in (4, 5, 128)
    ]
    begin = [weights(runs[0].generator), weights(runs[0].verifier)]
    found = [[run.update(2), run.update(0)] for run in runs]
    for run, metrics in zip(runs[1:], found[1:], strict=True):
        for name in ("generator", "verifier"):
            for a, b in zip(
                weights(run.players[name].policy), weights(runs[0].players[name].policy), strict=True
            ):
                torch.testing.assert_close(a, b, atol=1e-5, rtol=0)
        for one, other in zip(metrics, found[0], strict=True):
            for key in ("loss", "policy", "kl", "entropy", "grad_norm"):
                assert one[key] == pytest.approx(other[key], abs=2e-5, rel=1e-4)
    for start_weights, name in zip(begin, ("generator", "verifier"), strict=True):
        moved = max(
            (a - b).abs().max()
            for a, b in zip(weights(runs[0].players[name].policy), start_weights, strict=True)
        )
        assert moved > 1e-3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_before_any_update_the_ratio_is_one_even_for_a_model_with_dropout(temperature):
    def dropping(seed):
        model = tiny_model(seed, width=16, layers=1, heads=2)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
        return Policy.of(model.train(), tiny_tokenizer())

    run = Tango(replace(SMALL, temperature=temperature, micro_batch=3), dropping(0), dropping(1))
    for number in (2, 0):
        metrics = run.update(number)
        assert metrics["clip_fraction"] == 0 and abs(metrics["approx_kl"]) < 1e-9
        assert abs(metrics["kl"]) < 1e-9


def batch_of(run: Tango, **changes) -> Rollouts:
    rollouts, solutions = tango.solve(run, tango.problems(run.task, 3, 0), 4, tango.seeded(0))
    reward = torch.tensor([float(s.correct) for s in solutions])
    return tango.with_advantage(rollouts.with_(reward=reward, **changes), run.config, 0.0)


@pytest.mark.parametrize("aggregate", ["token", "sequence"])
def test_masked_truncated_completions_count_in_the_baseline_and_nowhere_else(scripted, aggregate):
    ended = torch.arange(12) % 3 > 0
    run, other = (
        start(mask_truncated=True, aggregate=aggregate, entropy_coef=0.1, kl_coef=0.1) for _ in range(2)
    )
    whole = batch_of(run, terminated=ended)
    free = batch_of(start(), terminated=ended)
    assert torch.equal(whole.advantage, free.advantage) and free.advantage[~ended].any()
    one = tango.learn(run, "generator", whole, 0)
    two = tango.learn(other, "generator", whole.rows(ended), 0)
    assert one["loss"] == pytest.approx(two["loss"], abs=1e-6)
    for a, b in zip(weights(run.generator), weights(other.generator), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_the_weight_of_a_sample_multiplies_its_policy_term(scripted):
    moves = []
    for weight in (torch.ones(12), 2 * torch.ones(12), torch.zeros(12)):
        run = start(kl_coef=0.0, entropy_coef=0.0)
        before = weights(run.generator)
        tango.learn(run, "generator", batch_of(run, sample_weight=weight), 0)
        moves.append([a - b for a, b in zip(weights(run.generator), before, strict=True)])
    for one, two, none in zip(*moves, strict=True):
        torch.testing.assert_close(two, 2 * one, atol=1e-6, rtol=1e-3)
        assert not none.any()
    assert max(move.abs().max() for move in moves[0]) > 1e-3


def test_truncated_completions_are_trained_on_by_default(scripted):
    run, other = start(), start()
    free = batch_of(run, terminated=torch.zeros(12, dtype=torch.bool))
    assert tango.learn(run, "generator", free, 0) == tango.learn(
        other, "generator", free.with_(terminated=torch.ones(12, dtype=torch.bool)), 0
    )
    assert same(weights(run.generator), weights(other.generator))


def test_with_every_completion_masked_nothing_is_learned_and_nothing_is_nan(scripted):
    run = start(mask_truncated=True, micro_batch=5)
    before = weights(run.generator)
    metrics = tango.learn(run, "generator", batch_of(run, terminated=torch.zeros(12, dtype=torch.bool)), 0)
    assert metrics["loss"] == metrics["grad_norm"] == 0.0 and same(weights(run.generator), before)


@pytest.mark.parametrize("how", ["weight", "gradient"])
@pytest.mark.parametrize(("number", "who"), [(2, "generator"), (0, "verifier")])
def test_a_loss_that_is_not_finite_is_reported_before_any_weight_changes(scripted, how, number, who):
    run = Tango(SMALL, small_policy(0), small_policy(1))
    norm = run.players[who].policy.model.model.norm.weight
    if how == "weight":
        with torch.no_grad():
            norm[0] = float("nan")
    else:
        norm.register_hook(lambda gradient: gradient * float("inf"))
    before = weights(run.players[who].policy)
    said = {"weight": "weight model.norm.weight is not", "gradient": "gradient of model.norm.weight is not"}[
        how
    ]
    with pytest.raises(NonFiniteError, match=said) as caught:
        run.update(number)
    for a, b in zip(weights(run.players[who].policy), before, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0, equal_nan=True)
    assert len(caught.value.batch[who]) == 12 and not run.players[who].optimizer.state


# --- metrics -----------------------------------------------------------------------------------------


def test_every_metric_has_a_sentence_and_every_sentence_a_metric(scripted):
    emitted = set()
    for source in ("verifier", "truth", "none"):
        run = start(step_source=source)
        for number in (0, 2):
            metrics = run.update(number)
            assert all(isinstance(v, float | int) and v == v for k, v in metrics.items() if k != "turn")
            emitted |= set(metrics)
    assert emitted == set(METRICS) - {"server_gap"}  # see test_vllm_server.py
    assert all(sentence.endswith(".") for sentence in METRICS.values())


def test_metrics_of_a_batch_by_hand(scripted):
    run = start()
    rollouts, solutions = tango.solve(run, tango.problems(run.task, 3, 0), 4, tango.seeded(0))
    rollouts = rollouts.with_(reward=torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]))
    truths = [[True, False]] + [None] * 10 + [[True]]
    found = tango.solution_metrics(rollouts, solutions, truths)
    assert found["reward"] == pytest.approx(5 / 12) and found["dead_groups"] == pytest.approx(2 / 3)
    assert found["step_truth"] == pytest.approx(2 / 3)
    assert found["truncated"] == pytest.approx(1 - rollouts.terminated.float().mean().item())
    assert "step_truth" not in tango.solution_metrics(rollouts, solutions, [None] * 12)


def test_a_missing_judgement_is_a_wrong_one_in_the_metrics():
    solutions = [solution(c, [1]) for c in (True, False, False, False)]
    truths = [[True], [False], [True], [False]]
    nothing = [[Verification(None, None)]] * 4
    found = tango.judgement_metrics(solutions, truths, nothing)
    assert found == {"final_accuracy": 0.0, "final_balanced": 0.0, "step_parsed": 0.0}
    said = [
        [Verification([True], True)],
        [Verification([True], False)],
        [Verification([False], True)],
        nothing[0],
    ]
    found = tango.judgement_metrics(solutions, truths, said)
    assert found["final_accuracy"] == 0.5 and found["final_balanced"] == pytest.approx((1 + 1 / 3) / 2)
    assert found["step_parsed"] == 0.75 and found["step_balanced"] == 0.25
    assert found["step_correct_rate"] == pytest.approx(2 / 3)


def test_the_gate_pays_a_right_answer_only_after_steps_that_work_through_the_question():
    run = start(gate=True)
    problem = Problem("1+1+3", "0")
    lucky = tango.Solution(problem, "", ["4+1=0", "0+0=0"], [], True, 1.0)
    honest = tango.Solution(problem, "", ["1+1=2", "2+3=0"], [], True, 1.0)
    assert tango.outcome_rewards(run, [lucky, honest], [[], []]).tolist() == [0.0, 1.0]
    free = start(gate=False)
    assert tango.outcome_rewards(free, [lucky, honest], [[], []]).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"alpha": 1.5}, r"alpha must lie in \[0, 1\], got 1.5"),
        ({"final_weight": -0.1}, r"final_weight must lie in \[0, 1\], got -0.1"),
        ({"alpha_min": 0.0}, "alpha_min must not be negative, nor 0 with alpha_schedule exp, got 0.0"),
        ({"alpha_min": -1.0, "alpha_schedule": "linear"}, "alpha_min must not be negative"),
    ],
)
def test_weights_out_of_range_are_refused_before_anything_is_loaded(changes, said) -> None:
    with pytest.raises(ValueError, match=said):
        TangoConfig(**changes)


def test_a_linear_alpha_may_end_at_zero() -> None:
    assert TangoConfig(alpha_min=0.0, alpha_schedule="linear").alpha_min == 0.0
