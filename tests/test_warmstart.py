"""The warm start: demonstrations say what they are meant to say, and fitting them lowers the loss."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from tangolite.models import tiny_policy
from tangolite.parsing import extract_answer, generator_format_score, parse_verification, split_steps
from tangolite.rollouts import Rollouts
from tangolite.tasks import ChainArithmetic, LastLetters, Problem, misconceptions
from tangolite.warmstart import (
    COVRL_CHAIN,
    covrl_lesson,
    fit,
    solution_example,
    supervised_batch,
    tango_lessons,
    teach,
    trace_example,
    verification_example,
    written_verification,
)

POLICY = tiny_policy(0, width=16, layers=1, heads=2)
CHAIN = ChainArithmetic(modulus=5, steps=(2, 3))
TASKS = pytest.mark.parametrize(
    "task", [CHAIN, ChainArithmetic(), COVRL_CHAIN, LastLetters(steps=(1, 4))], ids=str
)


def read(example) -> tuple[str, str]:
    """The two texts of an example; the completion has to end with the end of sequence, once."""
    prompt, completion = example
    assert completion[-1] == POLICY.eos_ids[0] and POLICY.eos_ids[0] not in completion[:-1]
    assert POLICY.tokenizer.unk_token_id not in prompt + completion
    return POLICY.tokenizer.decode(prompt), POLICY.decode(completion)


def asked(prompt: str, role: str) -> list[str]:
    """The parts of a prompt of this role."""
    assert prompt.startswith(f"<|{role}|>") and prompt.endswith("<|end|>")
    return prompt.removeprefix(f"<|{role}|>").removesuffix("<|end|>").split("<|end|>")


# --- batches and fitting -----------------------------------------------------------------------------


def test_a_batch_of_demonstrations_masks_prompts_and_padding_and_keeps_the_end_of_sequence():
    batch = supervised_batch(POLICY, [([5, 6, 7], [8, 1]), ([9], [8, 8, 8, 1])])
    assert isinstance(batch, Rollouts)
    assert batch.prompt_ids.tolist() == [[5, 6, 7], [0, 0, 9]] and batch.prompt_length.tolist() == [3, 1]
    assert batch.completion_ids.tolist() == [[8, 1, 0, 0], [8, 8, 8, 1]]
    assert batch.mask.int().tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.terminated.all() and batch.group.tolist() == [0, 1] and batch.advantage is None


def taught(updates=30, seed=0, **options):
    policy = tiny_policy(0, width=16, layers=1, heads=2)
    draw = partial(solution_example, policy, CHAIN)
    losses = fit(policy, draw, updates=updates, lr=2e-2, seed=seed, batch=8, warmup=5, **options)
    return policy, losses


def test_fitting_lowers_the_loss_and_leaves_the_model_ready_to_sample():
    policy, losses = taught()
    assert len(losses) == 30 and losses[0] > 4 and losses[-1] < 0.7 * losses[0]
    assert not policy.model.training


def test_the_first_loss_is_the_mean_of_minus_log_p_over_completion_tokens():
    policy = tiny_policy(0, width=16, layers=1, heads=2)
    rng, total, tokens = random.Random("fit/3"), 0.0, 0
    for _ in range(8):
        prompt, completion = solution_example(policy, CHAIN, rng)
        with torch.no_grad():
            logits = policy.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        total -= torch.log_softmax(logits, -1)[range(len(completion)), completion].sum().item()
        tokens += len(completion)
    assert taught(updates=1, seed=3)[1] == pytest.approx([total / tokens], rel=1e-5)


def test_fitting_is_reproducible_and_its_beginning_does_not_depend_on_where_it_stops():
    calls = []
    (one, losses), (two, again) = taught(12), taught(12, on_update=lambda *seen: calls.append(seen))
    assert losses == again and calls == list(enumerate(losses))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert taught(12, first=4)[1] == losses[:4]
    assert taught(12, seed=1)[1] != losses


# --- examples ----------------------------------------------------------------------------------------


@TASKS
def test_a_demonstrated_solution_is_well_formed_and_right(task):
    rng = random.Random(0)
    for _ in range(20):
        prompt, text = read(solution_example(POLICY, task, rng))
        [question] = asked(prompt, "generator")
        problem = Problem(question, "")
        steps = [step.text for step in split_steps(text)]
        assert task.step_truth(problem, steps) == [True] * len(steps) and len(steps) in task.lengths
        assert extract_answer(text) == task.solve(problem)[1]
        assert generator_format_score(text) == (1.0 if len(steps) > 2 else 0.6)


def test_a_solution_with_misconceptions_repeats_them_and_its_answer_follows():
    rng, task = random.Random(0), ChainArithmetic()
    teacher = misconceptions(task, fraction=0.5, rate=1.0, seed=0)
    truths = []
    for _ in range(40):
        prompt, text = read(solution_example(POLICY, task, rng, teacher(rng)))
        steps = [step.text for step in split_steps(text)]
        truths += task.step_truth(Problem(*asked(prompt, "generator"), ""), steps)
        assert task.follows(steps, extract_answer(text))
    assert 0.4 < sum(truths) / len(truths) < 0.6


def shown(task, rng, flip):
    """(problem, steps, answer, verification) of an example that the verifier is taught on."""
    prompt, text = read(verification_example(POLICY, task, rng, flip=flip))
    question, solution = asked(prompt, "verifier")
    steps = [step.text for step in split_steps(solution)]
    return Problem(question, ""), steps, extract_answer(solution), parse_verification(text, len(steps))


@TASKS
@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_a_demonstrated_verification_parses_into_the_verdicts_that_were_meant(task, flip):
    rng, verdicts, finals = random.Random(0), [], []
    for _ in range(60):
        problem, steps, answer, found = shown(task, rng, flip)
        truth = task.step_truth(problem, steps)
        assert found.judgements == [verdict != bool(flip) for verdict in truth]
        assert found.final is (all(found.judgements) and task.follows(steps, answer))
        verdicts += truth
        finals.append(found.final)
    assert 0.3 < sum(verdicts) / len(verdicts) < 1
    assert not all(finals) and (any(finals) or flip)  # with every verdict turned round, hardly ever


def test_shaken_verdicts_are_wrong_at_the_rate_of_the_shaking_and_the_final_still_follows_from_them():
    rng, wrong = random.Random(0), []
    for _ in range(200):
        problem, steps, answer, found = shown(CHAIN, rng, 0.4)
        wrong += [a != b for a, b in zip(found.judgements, CHAIN.step_truth(problem, steps), strict=True)]
        assert found.final is (all(found.judgements) and CHAIN.follows(steps, answer))
    assert abs(sum(wrong) / len(wrong) - 0.4) < 0.07  # 500 draws: a standard deviation of 0.022


def test_an_answer_that_does_not_follow_from_true_steps_is_called_incorrect():
    steps = ["1+2=3", "3+4=2"]
    assert CHAIN.step_truth(Problem("1+2+4", "2"), steps) == [True, True]
    rng, slips = random.Random(0), 0
    for _ in range(1500):
        _, steps, answer, found = shown(CHAIN, rng, 0.0)
        if all(found.judgements) and not CHAIN.follows(steps, answer):
            slips += 1
            assert found.final is False
    assert slips > 2


def test_an_analysis_recomputes_the_step_and_copies_the_claim():
    problem, steps = Problem("1+2-4", "4"), ["1+2=4", "4-4=0"]
    text = written_verification(CHAIN, problem, steps, [False, True], False)
    blocks = [step.text for step in split_steps(text)]
    assert blocks == ["1+2=3;4\\boxed{INCORRECT}", "4-4=0;0\\boxed{CORRECT}"]


def traces(guessed, slip, count=200):
    """(is it the prior's, problem, steps, text) of examples for CoVRL."""
    rng = random.Random(0)
    for _ in range(count):
        prompt, text = read(trace_example(POLICY, COVRL_CHAIN, rng, guessed, slip))
        prior = prompt.startswith("<|prior|>")
        question, *reference = asked(prompt, "prior" if prior else "posterior")
        _, answer = COVRL_CHAIN.solve(Problem(question, ""))
        results = " ".join(result for _, result in COVRL_CHAIN._walk(question, COVRL_CHAIN.truth))
        assert reference == ([] if prior else [results]) and results.endswith(answer)
        yield prior, Problem(question, answer, results), [step.text for step in split_steps(text)], text


def test_a_trace_thinks_in_steps_and_answers_with_its_results_under_both_prompts():
    kinds = []
    for prior, problem, steps, text in traces(set(), 0.0):
        kinds.append(prior)
        body = "".join(f"<step>{step}</step>" for step in steps)
        assert text == f"<think>{body}</think><answer>{problem.shown}</answer>"  # no guess, no slip: all true
        assert all(COVRL_CHAIN.step_truth(problem, steps))
    assert 0.35 < sum(kinds) / len(kinds) < 0.65


def test_the_prior_guesses_the_facts_it_does_not_know_and_the_posterior_slips():
    facts = COVRL_CHAIN.facts()
    guessed, right = set(facts[::2]), {True: [], False: []}
    known = []
    for prior, problem, steps, text in traces(guessed, 0.3):
        truth = COVRL_CHAIN.step_truth(problem, steps)
        right[prior] += truth
        assert text.endswith(f"<answer>{' '.join(step.partition('=')[2] for step in steps)}</answer>")
        for step, true in zip(steps, truth, strict=True):
            operator = "*" if "*" in step else "+"
            left, _, rest = step.partition(operator)
            if prior and (int(left), operator, int(rest.partition("=")[0])) not in guessed:
                known.append(true)
    assert all(known) and len(known) > 50
    assert 0.5 < sum(right[True]) / len(right[True]) < 0.75  # half are guessed, one guess in five is right
    assert 0.65 < sum(right[False]) / len(right[False]) < 0.87  # 0.3 slip, one slip in five is right


# --- lessons -----------------------------------------------------------------------------------------


def test_every_lesson_of_the_built_in_models_draws_examples_that_depend_on_its_seed_alone():
    for seed in (0, 1):
        courses = tango_lessons(seed)
        assert list(courses) == ["base", "generator", "verifier"]
        for lesson in [lesson for course in courses.values() for lesson in course] + [covrl_lesson(seed)]:
            first, again = (lesson.draw(POLICY, random.Random(5)) for _ in range(2))
            read(first)
            assert first == again and lesson.updates > 0 and lesson.lr > 0


def test_teaching_runs_the_lesson_and_tells_how_far_it_is():
    [lesson, *_] = tango_lessons(0)["base"]
    said, policy = [], tiny_policy(0, width=16, layers=1, heads=2)
    short = lesson.__class__("a few", 2, 1e-2, lambda p, r: solution_example(p, CHAIN, r))
    losses = teach(policy, short, 0, said.append)
    assert len(losses) == 2 and len(said) == 1 and "a few: 2/2" in said[0]
