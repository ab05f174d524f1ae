"""The supervised warm start of the built-in models: format and skill, with room left to learn.

What is taught, in plain words.  The *base* sees clean worked chains.  From it, the *generator* is
taught by somebody who believes a wrong result for about a third of the facts and says it more often
than not: it starts RL with misconceptions to unlearn, and with the truth still within reach.  The
*verifier* is taught on verifications **with true step labels**, then weakened on verifications whose
step verdicts are turned round at random, until it judges little better than chance; it still recomputes
every step, and its final judgement still follows from its verdicts.  RL never sees a step label: what it
can do is bring back and sharpen a skill that this training gave, as RL at 7B brings out what pre-training
gave.  The *CoVRL* policy sees noisy traces under both prompts; as the prior it guesses four facts in ten.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tangolite.losses import aggregate
from tangolite.models import Policy
from tangolite.prompts import TINY, Prompts, solution_text, verification_text
from tangolite.rollouts import Rollouts, pad_left, pad_right
from tangolite.tasks import ChainArithmetic, Fact, Problem, Task, Teacher, misconceptions

Example = tuple[list[int], list[int]]  # prompt ids, completion ids with the end of sequence


def supervised_batch(policy: Policy, examples: Sequence[Example]) -> Rollouts:
    """Demonstrations in the shape of rollouts."""
    prompt_ids, prompt_length = pad_left([p for p, _ in examples], policy.pad_id)
    completion_ids, length = pad_right([c for _, c in examples], policy.pad_id)
    rows = torch.arange(len(examples))
    return Rollouts(prompt_ids, prompt_length, completion_ids, length, torch.ones_like(rows).bool(), rows)


def fit(
    policy: Policy,
    draw: Callable[[random.Random], Example],
    *,
    updates: int,
    lr: float,
    seed: int | str,
    batch: int = 64,
    warmup: int = 50,
    first: int | None = None,
    on_update: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Maximum likelihood on examples drawn one by one; AdamW, linear warm-up, cosine to a tenth.

    ``first`` stops after so many of the updates, on the schedule of them all (to check a recorded beginning).
    Returns the loss (nats per completion token) of every update.
    """
    rng, losses = random.Random(f"fit/{seed}"), []
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    policy.model.train()
    for update in range(updates if first is None else first):
        rise, fall = (update + 1) / max(warmup, 1), 0.55 + 0.45 * math.cos(math.pi * update / updates)
        optimizer.param_groups[0]["lr"] = lr * min(rise, 1.0) * fall
        rollouts = supervised_batch(policy, [draw(rng) for _ in range(batch)])
        loss = -aggregate(policy.logp(rollouts), rollouts.mask, "token")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if on_update:
            on_update(update, losses[-1])
    policy.model.eval()
    return losses


def finish(policy: Policy, text: str) -> list[int]:
    """Completion ids of a text, with the end of sequence."""
    return [*policy.encode(text), policy.eos_ids[0]]


def solution_example(
    policy: Policy,
    task: Task,
    rng: random.Random,
    teacher: Teacher | None = None,
    prompts: Prompts = TINY,
) -> Example:
    """A question and the solution of somebody with these beliefs (the truth unless told)."""
    problem = task.problem(rng)
    text = solution_text(*task.solve(problem, teacher))
    return prompts.encode(policy.tokenizer, prompts.generator(problem.question)), finish(policy, text)


def written_verification(
    task: Task, problem: Problem, steps: Sequence[str], verdicts: Sequence[bool], final: bool
) -> str:
    """A verification that recomputes every step, copies what was claimed, and gives these verdicts."""
    analyses = [f"{step};{claim}" for step, claim in task.recompute(problem, steps)]
    return verification_text(analyses, list(verdicts), final)


def verification_example(
    policy: Policy, task: Task, rng: random.Random, *, flip: float = 0.0, prompts: Prompts = TINY
) -> Example:
    """A flawed solution and its verification; each step's verdict is turned round at the rate ``flip``.

    The final judgement follows from what was judged: CORRECT when every step was judged so and the answer
    is what the last step says.  That link is what lets a reward on the final judgement reach the steps.
    """
    problem = task.problem(rng)
    steps, answer = task.flawed(problem, rng, rng.choice([0.0, 0.0, 0.1, 0.3, 0.5]))
    judged = [verdict != (rng.random() < flip) for verdict in task.step_truth(problem, steps)]
    final = all(judged) and task.follows(steps, answer)
    prompt = prompts.verifier(problem.question, solution_text(steps, answer), len(steps))
    text = written_verification(task, problem, steps, judged, final)
    return prompts.encode(policy.tokenizer, prompt), finish(policy, text)


def trace_example(policy: Policy, task: Task, rng: random.Random, guessed: set[Fact], slip: float) -> Example:
    """Half prior, half posterior: the prior guesses some facts, the posterior slips now and then."""
    problem, prior = task.problem(rng), rng.random() < 0.5

    def teacher(fact: Fact) -> str:
        wrong = fact in guessed if prior else rng.random() < slip
        return task.guess(fact, rng) if wrong else task.truth(fact)

    steps, _ = task.solve(problem, teacher)
    results = " ".join(step.partition("=")[2] for step in steps)
    body = "".join(f"<step>{step}</step>" for step in steps)
    prompt = TINY.prior(problem.question) if prior else TINY.posterior(problem.question, problem.shown)
    return policy.encode(prompt), finish(policy, f"<think>{body}</think><answer>{results}</answer>")


# --- the built-in models -----------------------------------------------------------------------------

CHAIN = ChainArithmetic(steps=8)
SHORT = ChainArithmetic(steps=(2, 3))
MIXED = ChainArithmetic(steps=(2, 3, 4, 6, 8))
COVRL_CHAIN = ChainArithmetic(modulus=5, steps=3, operators="+*", operands=(0, 4))


@dataclass(frozen=True)
class Lesson:
    """One stretch of supervised learning."""

    what: str
    updates: int
    lr: float
    draw: Callable[[Policy, random.Random], Example]
    enough: float | None = None  # the loss that shows it was learned, where that is not certain


def tango_lessons(seed: int) -> dict[str, list[Lesson]]:
    """What the base is taught, and after it (from the base) the generator and the verifier."""
    teacher = misconceptions(CHAIN, fraction=0.35, rate=0.6, seed=seed)
    return {
        # 0.1 a token (ln 2 once in seven) is the loss of a model that knows the facts and tosses a coin for
        # every operator; some initialisations stay there.
        "base": [Lesson("clean chains", 1200, 4e-3, lambda p, r: solution_example(p, MIXED, r), enough=0.01)],
        "generator": [
            Lesson("misconceptions", 200, 1e-3, lambda p, r: solution_example(p, CHAIN, r, teacher(r)))
        ],
        "verifier": [
            Lesson("true step labels", 1000, 4e-3, lambda p, r: verification_example(p, MIXED, r)),
            Lesson("shaken verdicts", 40, 5e-4, lambda p, r: verification_example(p, MIXED, r, flip=0.4)),
            Lesson("random verdicts", 60, 5e-4, lambda p, r: verification_example(p, MIXED, r, flip=0.5)),
        ],
    }


def covrl_lesson(seed: int) -> Lesson:
    """Noisy traces under both prompts; four facts in ten are guessed anew each time."""
    facts = COVRL_CHAIN.facts()
    guessed = set(random.Random(f"guessed/{seed}").sample(facts, round(0.4 * len(facts))))
    return Lesson("noisy traces", 600, 4e-3, lambda p, r: trace_example(p, COVRL_CHAIN, r, guessed, 0.12))


def teach(
    policy: Policy, lesson: Lesson, seed: int, say: Callable[[str], None] = print, first: int | None = None
) -> list[float]:
    """Run one lesson (or its first updates), with a line of progress now and then; returns its losses."""
    began = time.monotonic()

    def on_update(update: int, loss: float) -> None:
        if (update + 1) % 100 == 0 or update + 1 == lesson.updates:
            left = (time.monotonic() - began) / (update + 1) * (lesson.updates - update - 1)
            say(f"  {lesson.what}: {update + 1}/{lesson.updates}, loss {loss:.4f}, {left:.0f} s left")

    draw = partial(lesson.draw, policy)
    return fit(policy, draw, updates=lesson.updates, lr=lesson.lr, seed=f"{lesson.what}/{seed}",
               first=first, on_update=on_update)  # fmt: skip
