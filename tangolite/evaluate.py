"""What a trained policy can do: answers, steps, judgements, and how sure the numbers are."""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tangolite.covrl import CoVRL, written_answer
from tangolite.grading import answers_match
from tangolite.models import Policy
from tangolite.parsing import Verification, split_steps
from tangolite.sampling import sample_shared
from tangolite.tango import Solution, Tango, judgement_metrics, solve, verify
from tangolite.tasks import Problem, Task, problems
from tangolite.updates import seeded

# --- scores, from plain lists ------------------------------------------------------------------------


class Interval(NamedTuple):
    """A mean and the ends of its bootstrap interval."""

    mean: float
    low: float
    high: float


def bootstrap(
    values: Sequence[float], *, level: float = 0.95, draws: int = 10_000, seed: int = 0
) -> Interval:
    """Mean over seeds with a percentile-bootstrap interval.  Raises ValueError without values."""
    if not values:
        raise ValueError("bootstrap needs at least one value")
    rng, n = random.Random(seed), len(values)
    means = sorted(sum(rng.choices(values, k=n)) / n for _ in range(draws))
    tail = (1 - level) / 2
    return Interval(sum(values) / n, means[int(tail * draws)], means[int((1 - tail) * draws) - 1])


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased chance that at least one of k out of n samples is right: 1 - C(n-c, k) / C(n, k)."""
    if not 0 < k <= n or not 0 <= correct <= n:
        raise ValueError(
            f"pass@k needs 0 < k <= n and 0 <= correct <= n, got n={n}, correct={correct}, k={k}"
        )
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(answers: Sequence[str | None]) -> str | None:
    """The most frequent answer, the earliest among equals; samples without an answer do not vote."""
    votes = Counter(answer for answer in answers if answer is not None)
    return max(votes, key=votes.get) if votes else None


def first_error(judgements: Sequence[bool] | None) -> int | None:
    """Index of the first step judged wrong, -1 if none is; None where nothing was parsed."""
    if judgements is None:
        return None
    return next((k for k, right in enumerate(judgements) if not right), -1)


def processbench_f1(predicted: Sequence[int | None], label: Sequence[int]) -> float:
    """Harmonic mean of the accuracies on solutions with an error and without (ProcessBench).

    A label is the index of the first wrong step, or -1; an unparsed prediction (None) is wrong.  0 when
    both accuracies are 0; NaN, with a warning, when one of the two kinds does not occur.
    """
    pairs = list(zip(predicted, label, strict=True))
    kinds = [[p == t for p, t in pairs if t != -1], [p == t for p, t in pairs if t == -1]]
    if not all(kinds):
        missing = "with an error" if not kinds[0] else "without an error"
        warnings.warn(f"no solution {missing}: ProcessBench F1 is undefined", RuntimeWarning, stacklevel=2)
        return float("nan")
    error, correct = (sum(kind) / len(kind) for kind in kinds)
    return 2 * error * correct / (error + correct) if error + correct else 0.0


# --- held-out evaluation of a run --------------------------------------------------------------------

METRICS = {
    "eval/answer": "Held-out problems answered rightly, decoding greedily (by CoVRL's prior: the whole "
    "reference).",
    "eval/step_truth": "Share of true steps in these greedy solutions.",
    "eval/answer_sampled": "Held-out problems answered rightly at the training temperature.",
    "eval/step_balanced": "Balanced accuracy of the verifier's step judgements (sampled) on the "
    "generator's samples.",
    "eval/final_balanced": "Balanced accuracy of its final judgements on the same solutions.",
    "eval/final_accuracy": "Plain accuracy of its final judgements on the same solutions.",
    "eval/step_parsed": "Share of these verifications with one judgement per step.",
    "eval/step_correct_rate": "Share of steps that it calls CORRECT.",
    "eval/first_error_f1": "ProcessBench F1 of the first error it names.",
    "eval/pool_step_balanced": "As eval/step_balanced, on a fixed pool: the starting generator's solutions.",
    "eval/pool_final_balanced": "As eval/final_balanced, on the fixed pool.",
    "eval/pool_first_error_f1": "As eval/first_error_f1, on the fixed pool.",
    "eval/step_truth_posterior": "Share of true steps when the policy is shown the reference, greedy.",
}


def held_out(every: int, count: int = 256) -> Callable:
    """A callback of `training.train` that evaluates after every ``every`` updates and at the end."""

    def callback(run: Tango | CoVRL, done: int, metrics: dict) -> dict | None:
        if every and (done % every == 0 or done == run.config.updates):
            return evaluate(run, count)
        return None

    return callback


def evaluate(run: Tango | CoVRL, count: int = 256, seed: int | str = "held-out") -> dict[str, float]:
    """All that can be said of a run on ``count`` held-out problems (see `METRICS`)."""
    return evaluate_tango(run, count, seed) if isinstance(run, Tango) else evaluate_covrl(run, count, seed)


def evaluate_tango(run: Tango, count: int, seed: int | str) -> dict[str, float]:
    """The generator greedily; the verifier on what the generator writes now, and on a fixed pool."""
    _, greedy = solve(run, problems(run.task, count, seed), 1, seeded(seed, "greedy"), temperature=0.0)
    now = sampled_solutions(run, run.generator, count, seed)
    found = {"eval/answer": _mean([s.correct for s in greedy])}
    found["eval/answer_sampled"] = _mean([s.correct for s in now])
    if (truth := step_truth(run.task, greedy)) is not None:
        found["eval/step_truth"] = truth
    if run.config.step_source == "verifier":
        found |= {f"eval/{k}": v for k, v in evaluate_verifier(run, now).items()}
        pool = sampled_solutions(run, run.players["generator"].reference, count, seed)
        scores = evaluate_verifier(run, pool)
        kept = ("step_balanced", "final_balanced", "first_error_f1")
        found |= {f"eval/pool_{k}": scores[k] for k in kept if k in scores}
    return found


def evaluate_verifier(run: Tango, solutions: Sequence[Solution]) -> dict[str, float]:
    """Verifications of these solutions, sampled as RL samples them, against the outcome and the truth."""
    _, read = verify(run, solutions, 1, seeded("verifications"))
    truths = [run.task.step_truth(s.problem, s.steps) for s in solutions]
    found = judgement_metrics(solutions, truths, [[v] for v in read])
    return found | ({"first_error_f1": error_f1(read, truths)} if None not in truths else {})


def error_f1(read: Sequence[Verification], truths: Sequence[Sequence[bool]]) -> float:
    return processbench_f1([first_error(v.judgements) for v in read], [first_error(t) for t in truths])


def evaluate_covrl(run: CoVRL, count: int, seed: int | str) -> dict[str, float]:
    """The prior greedily on questions alone, and the posterior with the reference shown."""
    asked, policy, found = problems(run.task, count, seed), run.policy, {}
    shown = {
        "": [run.prompts.prior(p.question) for p in asked],
        "_posterior": [run.prompts.posterior(p.question, p.shown) for p in asked],
    }
    for name, prompts in shown.items():
        ids = [run.prompts.encode(policy.tokenizer, text) for text in prompts]
        rollouts = sample_shared(
            policy, ids, chunk=run.config.sample_batch, max_new_tokens=run.config.max_new_tokens,
            temperature=0.0, generator=seeded(seed),
        )  # fmt: skip
        texts = [policy.decode(rollouts.tokens(row)) for row in range(count)]
        known = [
            run.task.step_truth(p, [s.text for s in split_steps(t)])
            for p, t in zip(asked, texts, strict=True)
        ]
        flat = [step for truth in known if truth is not None for step in truth]
        if flat:
            found[f"eval/step_truth{name}"] = _mean(flat)
        if not name:
            found["eval/answer"] = _mean([answered(p, t) for p, t in zip(asked, texts, strict=True)])
    return found


def answered(problem: Problem, text: str) -> bool:
    """Does the prior's text give the reference?  Graded where that is an answer; word for word where it is more."""
    written = written_answer(text) or ""
    return written == problem.shown or (
        problem.shown == problem.answer and answers_match(written, problem.answer)
    )


def step_truth(task: Task, solutions: Sequence[Solution]) -> float | None:
    truths = [task.step_truth(s.problem, s.steps) for s in solutions]
    flat = [step for truth in truths if truth is not None for step in truth]
    return _mean(flat) if flat else None


def sampled_solutions(run: Tango, policy: Policy, count: int, seed: int | str) -> list[Solution]:
    """Solutions of held-out problems by some policy, at the training temperature."""
    return solve(run, problems(run.task, count, seed), 1, seeded(seed, "sampled"), policy=policy)[1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
