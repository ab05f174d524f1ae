"""What the claims ask beyond the core's evaluation: other tasks, named errors, scores, estimators' variance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from tangolite.covrl import CoVRL, sample_traces
from tangolite.evaluate import evaluate, first_error
from tangolite.losses import composite_logp, covrl_kl, exact_composite_kl, kl_penalty
from tangolite.tango import Solution, Tango, judgement_metrics, solve, verify
from tangolite.tasks import ChainArithmetic, LastLetters, Problem, problems
from tangolite.updates import seeded

COUNT = 256
LONGER = {"eval/answer_longer": ChainArithmetic(steps=12), "eval/answer_letters": LastLetters()}


def look(run: Tango | CoVRL, learned: int) -> dict[str, float]:
    """The core's evaluation and, every sixty updates, what costs more."""
    found = evaluate(run)
    if isinstance(run, CoVRL):
        return found | estimator_variance(run)
    if learned % 60 == 0:
        found |= other_tasks(run)
    if run.config.step_source == "verifier":
        found |= named_errors(run)
    return found


def other_tasks(run: Tango) -> dict[str, float]:
    """Greedy answers on chains of 12, longer than any the generator saw, and on last letters."""
    scores = {}
    for name, task in LONGER.items():
        wide = replace(run.config, max_new_tokens=160)
        there = _Elsewhere(run, wide, task)
        _, greedy = solve(there, problems(task, COUNT, "elsewhere"), 1, seeded("elsewhere"), temperature=0.0)
        scores[name] = sum(s.correct for s in greedy) / COUNT
    return scores


class _Elsewhere:
    """A run's generator and prompts under another task and limit."""

    def __init__(self, run: Tango, config, task) -> None:
        self.generator, self.prompts, self.config, self.task = run.generator, run.prompts, config, task


def named_errors(run: Tango) -> dict[str, float]:
    """Of wrong solutions that the verifier rejects: how often is the first error that it names the true one?

    On what the generator writes now.  Beside it how often the final judgement says CORRECT, which is what a
    verifier that pays by itself would pay.
    """
    _, solutions = solve(run, problems(run.task, COUNT, "named"), 1, seeded("named"))
    _, read = verify(run, solutions, 1, seeded("named", "verify"))
    kinds = [kind_of(v.judgements, v.final, run.task.step_truth(s.problem, s.steps))
             for s, v in zip(solutions, read, strict=True) if not s.correct]  # fmt: skip
    rejected = [kind for kind in kinds if kind in ("true error", "another step", "no step")]
    found = {f"eval/named_{name.replace(' ', '_')}": kinds.count(name) / max(len(kinds), 1) for name in KINDS}
    if rejected:
        found["eval/named_exact"] = rejected.count("true error") / len(rejected)
    found["eval/says_correct"] = sum(v.final is True for v in read) / COUNT
    return found | {"eval/is_correct": sum(s.correct for s in solutions) / COUNT}


KINDS = ("true error", "another step", "no step", "accepted")


def kind_of(judgements: Sequence[bool] | None, final: bool | None, truth: Sequence[bool]) -> str:
    """How a wrong solution was judged: rejected for its first error, for another step, for none, or accepted."""
    if final is not False:
        return "accepted"
    named = first_error(judgements)
    if named in (None, -1):
        return "no step"
    return "true error" if named == first_error(truth) else "another step"


def scored(solutions: Sequence[Solution], scores: Tensor) -> dict[str, float]:
    """A score model on solutions: its mean score beside the share that is right, and accuracy at one half."""
    right = torch.tensor([s.correct for s in solutions])
    said = scores > 0.5
    classes = [said[right == label] == label for label in (True, False) if (right == label).any()]
    return {
        "eval/says_correct": float(scores.mean()), "eval/is_correct": float(right.float().mean()),
        "eval/final_balanced": sum(float(c.float().mean()) for c in classes) / len(classes),
    }  # fmt: skip


def estimator_variance(run: CoVRL, questions: int = 32) -> dict[str, float]:
    """Per token, mean over positions: variance of ours, k1 and k3 as estimates of KL(p' || p), and that KL.

    Ours is sampled as in training, from the template of its trace; k1 and k3 from p' itself, as is usual.  All
    are summed over the vocabulary at the same prefixes, so nothing here is itself an estimate.
    """
    asked = [p for p in problems(run.task, questions, "variance") for _ in range(2)]
    config = replace(run.config, alpha=0.5)
    traces, _ = sample_traces(run.policy, run.prompts, asked, config, seeded("variance"))
    with torch.no_grad():
        log_p, log_q = run.policy.all_logp(traces.prior), run.policy.all_logp(traces.posterior)
    mask = traces.prior.mask
    return variances(log_p[mask], log_q[mask]) | {"eval/length": float(mask.sum(1).float().mean())}


def variances(p: Float[Tensor, "N V"], q: Float[Tensor, "N V"]) -> dict[str, float]:
    """The mean over N prefixes of each estimator's variance, from all log-probs of prior and posterior there."""
    kl, mixed = exact_composite_kl(p, q), composite_logp(p, q)
    prior = torch.ones(len(p), dtype=torch.bool)
    sources = {
        "ours_prior": (p, covrl_kl(p, q, prior)), "ours_posterior": (q, covrl_kl(p, q, ~prior)),
        "k1": (mixed, kl_penalty(mixed, p, kind="k1")), "k3": (mixed, kl_penalty(mixed, p, kind="k3")),
    }  # fmt: skip
    found = {"eval/kl_exact": float(kl.mean())}
    for name, (log_pi, value) in sources.items():
        second = (log_pi.exp() * value.square()).sum(-1) - kl.square()
        found[f"eval/variance_{name}"] = float(second.clamp(min=0).mean())
    return found


# --- hard questions (claim 2) --------------------------------------------------------------------------

SHORT = ChainArithmetic(steps=2)


@dataclass(frozen=True)
class HardQuestions:
    """Chains of two that the starting generator failed at four times in a row: about one try in eight ends right."""

    asked: tuple[Problem, ...]

    def problem(self, rng: random.Random) -> Problem:
        return rng.choice(self.asked)

    def step_truth(self, problem: Problem, steps: Sequence[str]) -> list[bool]:
        return SHORT.step_truth(problem, steps)


def tried(run: Tango, count: int = 400, times: int = 4) -> tuple[HardQuestions, list[Solution]]:
    """The hard questions of a generator, and its first try at every question."""
    asked = problems(SHORT, count, "tried")
    _, tries = solve(run, asked, times, seeded("tries"))
    failed = [
        q for i, q in enumerate(asked) if not any(s.correct for s in tries[i * times : (i + 1) * times])
    ]
    return HardQuestions(tuple(failed)), tries[::times]


def on_balanced_mix(run: Tango, tries: Sequence[Solution], each: int = 96) -> dict[str, float]:
    """How the verifier judges as many right as wrong solutions of ordinary chains of two."""
    kinds = [[s for s in tries if s.correct is kind] for kind in (True, False)]
    size = min(each, *map(len, kinds))
    mix = kinds[0][:size] + kinds[1][:size]
    _, read = verify(run, mix, 1, seeded("mix"))
    truths = [SHORT.step_truth(s.problem, s.steps) for s in mix]
    found = judgement_metrics(mix, truths, [[v] for v in read])
    return {
        f"eval/mix_{name}": found[name] for name in ("final_balanced", "step_balanced", "step_correct_rate")
    }
