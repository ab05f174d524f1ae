"""The supervised warm start of the built-in models: format and skill, with room left to learn.

What is taught, in plain words.  The *generator* sees clean worked chains, then chains of a teacher who
believes a wrong result for four facts in ten; so it starts RL with misconceptions to unlearn.  The
*verifier* starts from the clean base and sees verifications with true step labels; it is then weakened
on verifications whose verdicts are random, so that it can judge only a little better than chance.  RL
never sees a step label: what it can do is bring back and sharpen a skill that this training gave, as
RL at 7B brings out what pre-training gave.  The *CoVRL* policy sees noisy traces under both prompts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch

from tangolite.losses import aggregate
from tangolite.models import Policy
from tangolite.prompts import TINY, Prompts, judgement, solution_text, verification_text
from tangolite.rollouts import Rollouts, pad_left, pad_right
from tangolite.tasks import Problem, Task, Teacher

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
    on_update: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Maximum likelihood on examples drawn one by one; AdamW, linear warm-up, cosine to a tenth.

    Returns the loss (nats per completion token) of every update.
    """
    rng, losses = random.Random(f"fit/{seed}"), []
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.0)
    policy.model.train()
    for update in range(updates):
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
    policy: Policy, task: Task, rng: random.Random, teacher: Teacher | None = None, prompts: Prompts = TINY
) -> Example:
    """A question and the solution of somebody with these beliefs (the truth unless told)."""
    problem = task.problem(rng)
    steps, answer = task.solve(problem, teacher)
    prompt = prompts.encode(policy.tokenizer, prompts.generator(problem.question))
    return prompt, finish(policy, solution_text(steps, answer))


def written_verification(
    task: Task, problem: Problem, steps: Sequence[str], answer: str, verdicts: Sequence[bool], final: bool
) -> str:
    """A verification that recomputes every step, copies what was claimed, and gives these verdicts."""
    checked = task.recompute(problem, steps)
    analyses = [f"{step};{claim}" for step, claim in checked]
    return verification_text(analyses, list(verdicts), final)


def verification_example(
    policy: Policy, task: Task, rng: random.Random, *, noise: float = 0.0, prompts: Prompts = TINY
) -> Example:
    """A flawed solution and its verification; each verdict is drawn at random at the rate ``noise``."""
    problem = task.problem(rng)
    rate = rng.choice([0.0, 0.0, 0.1, 0.3, 0.5])
    steps, answer = task.flawed(problem, rng, rate)
    verdicts = task.step_truth(problem, steps)
    final = answer == problem.answer
    shaken = [rng.random() < 0.5 if rng.random() < noise else v for v in [*verdicts, final]]
    text = written_verification(task, problem, steps, answer, shaken[:-1], shaken[-1])
    prompt = prompts.verifier(problem.question, solution_text(steps, answer), len(steps))
    return prompts.encode(policy.tokenizer, prompt), finish(policy, text)
