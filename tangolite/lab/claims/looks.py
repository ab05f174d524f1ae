"""What the claims ask beyond the core's evaluation: other tasks, named errors, scores, estimators' variance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from tangolite.covrl import CoVRL, sample_traces
from tangolite.evaluate import evaluate, evaluate_verifier, first_error, sampled_solutions
from tangolite.losses import composite_logp, covrl_kl, exact_composite_kl, kl_penalty
from tangolite.models import Policy
from tangolite.tango import Solution, Tango, balanced, judgement_metrics, solve, verify
from tangolite.tasks import ChainArithmetic, LastLetters, Problem, problems
from tangolite.updates import seeded

COUNT = 256
OTHERS = {
    "eval/answer_six": ChainArithmetic(steps=6),  # seen in the warm start, never in RL
    "eval/answer_twelve": ChainArithmetic(steps=12),  # longer than anything it saw
    "eval/answer_letters": LastLetters(),
}


def look(run: Tango | CoVRL, learned: int, last: bool = False) -> dict[str, float]:
    """The core's evaluation and, every sixty updates and at the end, what costs more."""
    found = evaluate(run)
    if isinstance(run, CoVRL):
        return found | estimator_variance(run)
    if learned % 60 == 0 or last:
        found |= other_tasks(run)
        if run.config.step_source == "verifier":
            found |= named_errors(run)
    return found


def other_tasks(run: Tango) -> dict[str, float]:
    """Greedy answers on tasks that RL did not train on."""
    scores = {}
    for name, task in OTHERS.items():
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

    On what the generator writes now, and on the fixed pool (what it wrote at the start).  Beside it how often the
    final judgement on the present solutions says CORRECT, which is what a verifier that pays by itself would pay.
    """
    found = {}
    writers = {"named": run.generator, "pool_named": run.players["generator"].reference}
    for name, writer in writers.items():
        solutions = sampled_solutions(run, writer, COUNT, "named")
        _, read = verify(run, solutions, 1, seeded("named", "verify"))
        kinds = [kind_of(v.judgements, v.final, run.task.step_truth(s.problem, s.steps))
                 for s, v in zip(solutions, read, strict=True) if not s.correct]  # fmt: skip
        rejected = [kind for kind in kinds if kind != "accepted"]
        found |= {f"eval/{name}_{k.replace(' ', '_')}": kinds.count(k) / max(len(kinds), 1) for k in KINDS}
        if rejected:
            found[f"eval/{name}_exact"] = rejected.count("true error") / len(rejected)
        if writer is run.generator:
            said = [v.final for v in read]
            found |= said_and_true(solutions, [float(final is True) for final in said], said)
    return found


def said_and_true(
    solutions: Sequence[Solution], paid: Sequence[float], said: Sequence[bool | None]
) -> dict[str, float]:
    """What a judge of whole solutions would pay, beside the share that is right, and how well it judges."""
    right = [s.correct for s in solutions]
    return {
        "eval/says_correct": sum(paid) / len(paid), "eval/is_correct": sum(right) / len(right),
        "eval/judged_balanced": balanced(said, right),
    }  # fmt: skip


def met(run: Tango, generator: Policy) -> dict[str, float]:
    """How the verifier judges the steps of another generator, at held-out problems."""
    found = evaluate_verifier(run, sampled_solutions(run, generator, COUNT, "held-out"))
    return {f"eval/met_{name}": found[name] for name in ("step_balanced", "first_error_f1")}


KINDS = ("true error", "another step", "no step", "accepted")


def kind_of(judgements: Sequence[bool] | None, final: bool | None, truth: Sequence[bool]) -> str:
    """How a wrong solution was judged: rejected for its first error, for another step, for none, or accepted."""
    if final is not False:
        return "accepted"
    named = first_error(judgements)
    if named in (None, -1):
        return "no step"
    return "true error" if named == first_error(truth) else "another step"


def estimator_variance(run: CoVRL, questions: int = 32) -> dict[str, float]:
    """Per token, mean over positions: variance of ours, k1 and k3 as estimates of KL(p' || p), and that KL.

    Ours is sampled as in training, from the template of its trace, and so is its rival `weighted_k1`, which the
    importance weights p'/p and p'/q make unbiased there.  (k3 with these weights *is* ours.)  `k1` and `k3` are
    drawn from p' itself, which whole traces of one template never are.  All are summed over the vocabulary at
    the same prefixes, so nothing here is itself an estimate.
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
    sources = {"ours_prior": (p, covrl_kl(p, q, prior)), "ours_posterior": (q, covrl_kl(p, q, ~prior))}
    sources |= {kind: (mixed, kl_penalty(mixed, p, kind=kind)) for kind in ("k1", "k3")}
    for template, log_pi in (("prior", p), ("posterior", q)):
        sources[f"weighted_k1_{template}"] = (log_pi, (mixed - log_pi).exp() * (mixed - p))
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
    """How the verifier judges as many right as wrong solutions of chains of two; and how many hard ones end right."""
    kinds = [[s for s in tries if s.correct is kind] for kind in (True, False)]
    size = min(each, *map(len, kinds))
    mix = kinds[0][:size] + kinds[1][:size]
    _, read = verify(run, mix, 1, seeded("mix"))
    truths = [SHORT.step_truth(s.problem, s.steps) for s in mix]
    found = judgement_metrics(mix, truths, [[v] for v in read])
    wanted = ("final_balanced", "step_balanced", "step_correct_rate")
    said = sum(v.final is True for v in read) / len(read)
    _, hard = solve(run, problems(run.verifier_task, COUNT, "hard"), 1, seeded("hard"))
    shares = {"eval/mix_says_correct": said, "eval/hard_right": sum(s.correct for s in hard) / COUNT}
    return {f"eval/mix_{name}": found[name] for name in wanted} | shares
