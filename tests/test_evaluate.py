"""Evaluation: scores against enumeration and hand computation, and what an evaluation may not touch."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from tangolite import evaluate as evaluation
from tangolite.covrl import CoVRL, CoVRLConfig
from tangolite.evaluate import (
    METRICS,
    bootstrap,
    error_f1,
    evaluate,
    evaluate_verifier,
    first_error,
    held_out,
    majority,
    pass_at_k,
    processbench_f1,
)
from tangolite.models import tiny_policy
from tangolite.parsing import Verification
from tangolite.tango import Solution, Tango, TangoConfig, balanced, judgement_metrics
from tangolite.tasks import ChainArithmetic, Problem, ProblemSet, problems

# --- scores ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_right_sample(n):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-12)
    assert pass_at_k(1000, 1, 1) == pytest.approx(0.001)  # no overflow, no loss of digits


@pytest.mark.parametrize("arguments", [(4, 2, 0), (4, 2, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_cannot_be(arguments):
    with pytest.raises(ValueError, match=r"pass@k.*n=4"):
        pass_at_k(*arguments)


@pytest.mark.parametrize(
    ("answers", "chosen"),
    [
        (["7", "8", "8", "7", "8"], "8"),
        (["8", "7", "7", "8"], "8"),  # the earliest among equals
        ([None, None, None, "7"], "7"),  # no answer is no vote
        ([None, None], None),
        ([], None),
        (["", None, None], ""),
    ],
)
def test_the_majority_is_the_most_frequent_answer(answers, chosen):
    assert majority(answers) == chosen


@pytest.mark.parametrize(
    ("judgements", "index"),
    [([True, False, False], 1), ([True, True], -1), ([False], 0), ([], -1), (None, None)],
)
def test_the_first_error_is_the_first_step_judged_wrong(judgements, index):
    assert first_error(judgements) == index


def test_processbench_f1_is_the_harmonic_mean_of_both_kinds():
    labels = [0] * 10 + [-1] * 10
    predicted = [0] * 3 + [-1] * 7 + [-1] * 9 + [0]
    assert processbench_f1(predicted, labels) == pytest.approx(0.45)  # not the mean, .6
    assert processbench_f1([-1] * 20, labels) == 0.0  # always "no error"
    assert processbench_f1([1] * 20, labels) == 0.0  # both accuracies 0
    assert processbench_f1(labels, labels) == 1.0
    assert processbench_f1([None] * 20, labels) == 0.0  # unparsed is wrong, also where there is no error
    with pytest.raises(ValueError, match="zip"):
        processbench_f1([0], [0, -1])


@pytest.mark.parametrize(
    ("labels", "missing"), [([0, 2], "without an error"), ([-1, -1], "with an error"), ([], "with an error")]
)
def test_without_samples_of_one_kind_there_is_no_f1_and_a_warning_says_which(labels, missing):
    with pytest.warns(RuntimeWarning, match=f"no solution {missing}"):
        assert math.isnan(processbench_f1(labels, labels))


def test_a_verifier_that_is_right_for_the_wrong_reason_scores_one_on_outcomes_and_zero_on_steps():
    wrong = Solution(Problem("1+1+1+1", "4"), "", ["a", "b", "c"], [0, 1, 2], False, 1.0)
    fine = wrong._replace(correct=True)
    truths = [[True, False, False], [True, True, True]]
    read = [Verification([False, True, True], False), Verification([True, False, True], True)]
    found = judgement_metrics([wrong, fine], truths, [[v] for v in read])
    assert found["final_accuracy"] == 1.0 and found["final_balanced"] == 1.0
    assert [first_error(v.judgements) for v in read] == [0, 1] and [first_error(t) for t in truths] == [1, -1]
    assert error_f1(read, truths) == 0.0
    assert found["step_balanced"] == pytest.approx((2 / 4 + 0 / 2) / 2)  # near chance, or below


def test_balanced_accuracy_counts_both_classes_alike_and_silence_as_wrong():
    truth = [True] * 8 + [False] * 2
    assert balanced([True] * 10, truth) == 0.5
    assert balanced([True] * 4 + [False] * 6, truth) == pytest.approx((0.5 + 1.0) / 2)
    assert balanced([None] * 10, truth) == 0.0
    assert balanced([True, True], [True, True]) == 1.0  # only one class occurs
    assert math.isnan(balanced([], []))


def test_the_bootstrap_interval_holds_the_mean_and_is_reproducible():
    values = [0.61, 0.64, 0.58, 0.7, 0.66]
    found = bootstrap(values)
    assert found.mean == pytest.approx(sum(values) / 5)
    assert min(values) <= found.low < found.mean < found.high <= max(values)
    assert bootstrap(values) == found
    assert bootstrap(values, draws=50, seed=1) != bootstrap(values, draws=50)
    narrow = bootstrap(values, level=0.5)
    assert found.low < narrow.low < narrow.high < found.high
    assert bootstrap([0.3]) == (0.3, 0.3, 0.3)
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap([])


def test_the_bootstrap_interval_is_the_one_of_all_resamples():
    values = [0.0, 1.0, 3.0]
    means = sorted(sum(draw) / 3 for draw in itertools.product(values, repeat=3))  # 27, equally likely
    found = bootstrap(values, level=0.8)
    assert found.low == pytest.approx(means[2]) and found.high == pytest.approx(means[24])


def test_the_bootstrap_interval_covers_about_as_often_as_it_says():
    rng, covered = random.Random(0), 0
    for trial in range(200):
        found = bootstrap([rng.gauss(0, 1) for _ in range(20)], draws=400, seed=trial)
        covered += found.low <= 0 <= found.high
    assert 0.86 < covered / 200 < 0.99


# --- evaluating a run --------------------------------------------------------------------------------

TASK = {"kind": "chain", "modulus": 5, "steps": 2}


def tango_run(**changes) -> Tango:
    players = [tiny_policy(seed, width=16, layers=1, heads=2) for seed in (0, 1)]
    settings = {"task": TASK, "max_new_tokens": 12, "verifier_max_new_tokens": 12, "updates": 6}
    return Tango(TangoConfig(**settings | changes), *players)


def covrl_run(**changes) -> CoVRL:
    settings = {"task": TASK, "max_new_tokens": 12, "updates": 6}
    return CoVRL(CoVRLConfig(**settings | changes), tiny_policy(0, width=16, layers=1, heads=2))


@pytest.fixture
def taught(starts):
    """A run whose players write the right form and answer about as chance would."""
    task = {"kind": "chain", "modulus": 2, "steps": 1, "operands": [0, 1]}
    settings = {"task": task, "max_new_tokens": 20, "verifier_max_new_tokens": 20}
    tango = TangoConfig(generator=str(starts / "generator"), verifier=str(starts / "verifier"), **settings)
    settings.pop("verifier_max_new_tokens")
    return Tango(tango), CoVRL(CoVRLConfig(policy=str(starts / "policy"), **settings))


@pytest.mark.filterwarnings("ignore:no solution:RuntimeWarning")
def test_every_metric_of_an_evaluation_has_a_sentence_and_every_sentence_a_metric(taught):
    emitted = set()
    for run in taught:
        found = evaluate(run, 24)
        assert all(isinstance(v, float | int) and 0 <= v <= 1 for v in found.values() if not math.isnan(v))
        emitted |= set(found)
    assert emitted == set(METRICS)
    assert all(sentence.endswith(".") for sentence in METRICS.values())


@pytest.mark.filterwarnings("ignore:no solution:RuntimeWarning")
def test_an_evaluation_is_reproducible_and_changes_neither_weights_nor_random_state(taught):
    for run in taught:
        policies = [p.policy for p in run.players.values()] if isinstance(run, Tango) else [run.policy]
        before = [[p.detach().clone() for p in policy.model.parameters()] for policy in policies]
        state, python = torch.get_rng_state(), random.getstate()
        first = evaluate(run, 12)
        assert torch.equal(torch.get_rng_state(), state) and random.getstate() == python
        assert str(evaluate(run, 12)) == str(first)  # as text, where NaN equals NaN
        for policy, old in zip(policies, before, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(policy.model.parameters(), old, strict=True))


@pytest.mark.filterwarnings("ignore:no solution:RuntimeWarning")
def test_the_pool_stays_that_of_the_starting_generator(taught):
    run, _ = taught
    before = evaluate(run, 24)
    with torch.no_grad():
        for p in run.generator.model.parameters():
            p.mul_(0.5)
    after = evaluate(run, 24)
    pool = [key for key in METRICS if "/pool_" in key]
    assert str([before[k] for k in pool]) == str([after[k] for k in pool])
    assert before["eval/answer"] != after["eval/answer"] and before["eval/answer"] > 0


def test_greedy_answers_are_graded_one_by_one(taught):
    run, _ = taught
    asked, right = problems(run.task, 24, "held-out"), 0
    for problem in asked:
        _, [solution] = evaluation.solve(run, [problem], 1, evaluation.seeded(0), temperature=0.0)
        right += solution.correct
    assert evaluate(run, 24)["eval/answer"] == pytest.approx(right / 24) and 0 < right < 24


def test_nothing_is_sampled_twice_and_never_more_at_a_time_than_in_training(monkeypatch):
    """Greedy solutions, the present ones and the pool; of CoVRL the prior and the posterior, in chunks."""
    solved, chunks = [], []
    solve, shared = evaluation.solve, evaluation.sample_shared
    monkeypatch.setattr(evaluation, "solve", lambda *a, **more: solved.append(more) or solve(*a, **more))
    monkeypatch.setattr(
        evaluation, "sample_shared", lambda *a, **more: chunks.append(more["chunk"]) or shared(*a, **more)
    )
    with pytest.warns(RuntimeWarning, match="no solution"):
        evaluate(tango_run(step_source="verifier"), 4)
    assert len(solved) == 3
    evaluate(covrl_run(sample_batch=2), 4)
    assert chunks == [2, 2]


@pytest.mark.parametrize(
    ("problem", "written", "right"),
    [
        (Problem("q", "0.5"), "0.50", True),  # the reference is the answer: graded
        (Problem("q", "0.5"), "0.51", False),
        (Problem("q", "4", "2 4 4"), "2 4 4", True),  # it carries the reasoning: word for word
        (Problem("q", "4", "2 4 4"), "4 2 4", False),
        (Problem("q", "4", "2 4 4"), "4", False),
    ],
)
def test_a_priors_answer_is_graded_where_it_is_one_and_compared_where_it_is_more(problem, written, right):
    assert evaluation.answered(problem, f"<think>x</think><answer>{written}</answer>") is right
    assert not evaluation.answered(problem, written)  # no tags, no answer


def test_outcome_only_runs_are_evaluated_without_a_verifier():
    found = evaluate(tango_run(step_source="none"), 4)
    assert set(found) <= {"eval/answer", "eval/answer_sampled", "eval/step_truth"}


def test_a_task_without_known_steps_is_evaluated_by_its_answers_and_final_judgements():
    own = ProblemSet(tuple(problems(ChainArithmetic(modulus=5, steps=2), 4, 0)))
    run, other = tango_run(), covrl_run()
    run.task = other.task = own
    assert set(evaluate(run, 4)) <= {
        "eval/answer", "eval/answer_sampled", "eval/final_accuracy", "eval/final_balanced",
        "eval/step_parsed", "eval/pool_final_balanced",
    }  # fmt: skip
    assert set(evaluate(other, 4)) == {"eval/answer"}


def test_a_verifier_is_scored_on_the_solutions_it_is_given(monkeypatch):
    run, chain = tango_run(), ChainArithmetic(modulus=5, steps=2)
    asked = problems(chain, 6, 0)
    flawed = [["1+1=9", "9+1=0"]] * 3
    solutions = [
        Solution(p, "", steps, [0, 1], right, 1.0)
        for p, steps, right in zip(
            asked, [chain.solve(p)[0] for p in asked[:3]] + flawed, [True] * 3 + [False] * 3, strict=True
        )
    ]
    read = [Verification([True, True], True)] * 3 + [Verification([False, True], False)] * 2
    read.append(Verification(None, None))
    monkeypatch.setattr(evaluation, "verify", lambda *_: (None, read))
    found = evaluate_verifier(run, solutions)
    assert found["first_error_f1"] == pytest.approx(2 * 1.0 * (2 / 3) / (1.0 + 2 / 3))
    assert found["final_accuracy"] == pytest.approx(5 / 6) and found["step_parsed"] == pytest.approx(5 / 6)


def test_held_out_evaluates_every_so_often_and_at_the_end(monkeypatch):
    monkeypatch.setattr(evaluation, "evaluate", lambda run, count: {"eval/answer": count})
    run = covrl_run(updates=7)
    callback = held_out(3, 5)
    assert [done for done in range(1, 8) if callback(run, done, {})] == [3, 6, 7]
    assert callback(run, 3, {}) == {"eval/answer": 5}
    assert not any(held_out(0)(run, done, {}) for done in range(1, 8))
