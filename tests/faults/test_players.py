"""Players that write garbage, nothing or without end: training goes on, and the metrics say what happened."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tangolite import tango
from tangolite.models import Policy, tiny_policy
from tangolite.prompts import solution_text
from tangolite.rollouts import Rollouts, pad_left, pad_right
from tangolite.tango import Tango, TangoConfig
from tangolite.tasks import ChainArithmetic, Problem
from tangolite.warmstart import written_verification

LIMIT = 64
CHAIN = ChainArithmetic(modulus=5, steps=(1, 2, 3))
SMALL = TangoConfig(
    task={"kind": "chain", "modulus": 5, "steps": [1, 2, 3]}, questions=3, group=4, updates=8, verifier_warmup=2,
    max_new_tokens=LIMIT, verifier_max_new_tokens=LIMIT, lr=1e-2, verifier_lr=1e-2, alpha=0.5,
)  # fmt: skip
Writer = Callable[
    [Policy, str, random.Random], list[int]
]  # policy, prompt, randomness -> all that it would write


def as_usual(policy: Policy, prompt: str, rng: random.Random) -> list[int]:
    """Solutions with mistakes, verifications with arbitrary verdicts."""
    question, solution = prompt.partition("|>")[2].split("<|end|>")[:2]
    if prompt.startswith("<|generator|>"):
        text = solution_text(*CHAIN.flawed(Problem(question, ""), rng, 0.4))
    else:
        steps = [piece.split("</step>")[0] for piece in solution.split("<step>")[1:]]
        verdicts = [rng.random() < 0.5 for _ in steps]
        text = written_verification(CHAIN, Problem(question, ""), steps, verdicts, rng.random() < 0.5)
    return [*policy.encode(text), policy.eos_ids[0]]


def of_text(make: Callable[[random.Random], str]) -> Writer:
    return lambda policy, prompt, rng: [*policy.encode(make(rng)), policy.eos_ids[0]]


def garbage(policy: Policy, prompt: str, rng: random.Random) -> list[int]:
    """Any tokens, roles and padding among them."""
    size = policy.model.config.vocab_size
    return [rng.choice([i for i in range(size) if i not in policy.eos_ids]) for _ in range(20)] + [
        policy.eos_ids[0]
    ]


def nothing(policy: Policy, prompt: str, rng: random.Random) -> list[int]:
    return [policy.eos_ids[0]]


def endless(policy: Policy, prompt: str, rng: random.Random) -> list[int]:
    return policy.encode("<step_verification><step>") + policy.encode("1+1=2;") * LIMIT


@pytest.fixture
def start(monkeypatch):
    """A run whose players write as told, under the same length limits as any."""

    def begin(generator: Writer = as_usual, verifier: Writer = as_usual, **changes) -> Tango:
        def sample(policy, prompts, *, n, max_new_tokens, temperature, generator: torch.Generator, chunk=0):
            rng = random.Random(int(torch.randint(2**31, (), generator=generator)))
            rows = [list(prompt) for prompt in prompts for _ in range(n)]
            whole = [writers[policy.decode(row)[:7]](policy, policy.decode(row), rng) for row in rows]
            prompt_ids, prompt_length = pad_left(rows, policy.pad_id)
            ids, length = pad_right([row[:max_new_tokens] for row in whole], policy.pad_id)
            ended = torch.tensor([len(row) <= max_new_tokens for row in whole])
            group = torch.arange(len(prompts)).repeat_interleave(n)
            rollouts = Rollouts(prompt_ids, prompt_length, ids, length, ended, group)
            with torch.no_grad():
                return rollouts.with_(old_logp=policy.logp(rollouts, temperature=temperature))

        writers = {"<|gener": generator, "<|verif": verifier}
        monkeypatch.setattr(tango, "sample_shared", sample)
        players = (tiny_policy(seed, width=16, layers=1, heads=2) for seed in (0, 1))
        return Tango(replace(SMALL, **changes), *players)

    return begin


def trained(run: Tango, numbers=(0, 2, 3, 6)) -> dict[str, dict]:
    """Updates of both players; every number finite, every weight too.  The last metrics of each turn."""
    last = {}
    for number in numbers:
        metrics = run.update(number)
        assert all(math.isfinite(v) for k, v in metrics.items() if k != "turn"), metrics
        last[metrics["turn"]] = metrics
    for player in run.players.values():
        assert all(p.isfinite().all() for p in player.policy.parameters())
    assert set(last) == {"generator", "verifier"}
    return last


def test_as_usual_most_is_read_so_that_the_tests_below_can_fail(start) -> None:
    last = trained(start())
    assert last["generator"]["step_parsed"] == last["verifier"]["step_parsed"] == 1.0
    assert last["generator"]["format"] > 0.5 and last["generator"]["truncated"] == 0
    assert last["verifier"]["reward"] > 0.8 and last["verifier"]["truncated"] == 0


@pytest.mark.parametrize(
    ("verifier", "length", "truncated"), [(garbage, 21, 0), (nothing, 1, 0), (endless, LIMIT, 1)]
)
def test_a_verifier_that_says_nothing_readable_gives_no_reward_and_no_step_signal(
    start, verifier, length, truncated
) -> None:
    run = start(verifier=verifier)
    last = trained(run)
    for metrics in last.values():
        assert metrics["step_parsed"] == 0.0 and metrics["final_accuracy"] == 0.0
        assert "step_correct_rate" not in metrics and "step_balanced" not in metrics
    found = last["verifier"]
    assert (found["reward"], found["length"], found["truncated"]) == (0.0, length, truncated)
    assert last["generator"]["format"] > 0.5  # of the generator nothing is different
    assert found["policy"] == 0.0  # rewards that are all equal teach nothing


@pytest.mark.parametrize("verifier", [garbage, nothing, endless])
def test_the_generator_then_learns_from_the_outcome_alone(start, verifier, monkeypatch) -> None:
    seen, real = [], tango.learn
    monkeypatch.setattr(tango, "learn", lambda run, who, r, done: seen.append(r) or real(run, who, r, done))
    start(verifier=verifier).update(2)
    [rollouts] = seen
    outcome = tango.outcome_advantage(rollouts.reward, rollouts.group, rollouts.mask)
    assert not rollouts.step_mask.any() and outcome.any()
    torch.testing.assert_close(rollouts.advantage, 0.5 * outcome)


def test_a_verifier_that_never_agrees_with_itself_in_number_is_not_cut_to_fit(start) -> None:
    """One judgement too many or too few: which step they belong to is open, so there is no step reward."""
    verdict = r"<step>so \boxed{CORRECT}</step>"
    text = (
        r"<step_verification>%s</step_verification><final_verification>\boxed{CORRECT}</final_verification>"
    )
    last = trained(start(verifier=of_text(lambda rng: text % (verdict * rng.choice((0, 4, 5, 9))))))
    assert last["generator"]["step_parsed"] == 0.0 and last["generator"]["final_accuracy"] > 0


def test_a_generator_without_steps_is_not_judged_by_step(start) -> None:
    last = trained(
        start(
            generator=of_text(lambda rng: rf"<think>1+1</think><answer>\boxed{{{rng.randrange(5)}}}</answer>")
        )
    )
    found = last["generator"]
    assert found["steps"] == 0.0 and found["step_parsed"] == 0.0 and "step_truth" not in found
    assert found["format"] == pytest.approx(0.2)  # an answer in its box, no step


def test_a_generator_that_writes_nothing_has_no_reward_and_only_dead_groups(start) -> None:
    found = trained(start(generator=nothing))["generator"]
    assert (found["reward"], found["format"], found["steps"], found["length"]) == (0.0, 0.0, 0.0, 1.0)
    assert found["dead_groups"] == 1.0


def test_five_hundred_steps_are_five_hundred_steps(start) -> None:
    many = of_text(lambda rng: solution_text(["1"] * 500, str(rng.randrange(5))))
    run = start(
        many,
        verifier=as_usual_briefly,
        questions=1,
        group=2,
        max_new_tokens=2048,
        verifier_max_new_tokens=2048,
    )
    last = trained(run, (0, 2))
    assert last["generator"]["steps"] == 500.0 and last["generator"]["truncated"] == 0.0
    assert last["generator"]["step_parsed"] == last["verifier"]["step_parsed"] == 1.0
    cut = trained(start(many, verifier=as_usual_briefly, questions=1, group=2), (0, 2))["generator"]
    assert cut["truncated"] == 1.0 and cut["length"] == LIMIT and 0 < cut["steps"] < 500


def as_usual_briefly(policy: Policy, prompt: str, rng: random.Random) -> list[int]:
    steps = rf"<step>\boxed{{{rng.choice(('CORRECT', 'INCORRECT'))}}}</step>" * prompt.count("<step>")
    text = rf"<step_verification>{steps}</step_verification><final_verification>\boxed{{CORRECT}}</final_verification>"
    return [*policy.encode(text), policy.eos_ids[0]]


@pytest.mark.parametrize(
    ("body", "steps"),
    [
        ("<step><step>1+1=2</step></step>", 1),  # only the innermost
        ("<step>1<step>2<step>3</step></step>4</step>", 1),
        ("<step>1+1=2</step></think><think><step>2+2=4</step>", 2),
        ("<think><step>1+1=2</step></think>", 1),
        ("<answer><step>1</step></answer><step>2</step>", 2),  # an answer named in a thought is only talk
        ("</step><step></step></step><step>", 1),
        ("<step><answer>\\boxed{1}</answer></step>", 1),
    ],
)
def test_tags_inside_tags_are_read_one_way_by_all(start, body: str, steps: int) -> None:
    """The number of steps, their ends on the tokens and their rewards agree, whatever was nested."""
    text = rf"<think>{body}</think><answer>\boxed{{1}}</answer>"
    run = start(generator=of_text(lambda rng: text), verifier=of_judged(steps))
    last = trained(run)
    assert last["generator"]["steps"] == steps
    assert last["generator"]["step_parsed"] == last["verifier"]["step_parsed"] == 1.0


def of_judged(count: int) -> Writer:
    said = r"<step>\boxed{CORRECT}</step>" * count
    text = rf"<step_verification>{said}</step_verification><final_verification>\boxed{{CORRECT}}</final_verification>"
    return of_text(lambda rng: text)
