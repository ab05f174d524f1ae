"""Evaluation on data sets: what policies write and how a verifier judges it, kept as records one can open.

`evaluate_problems` has a generator (or a CoVRL prior) answer problems, greedily and by sampling, and a
verifier judge every solution; `evaluate_processbench` has a verifier judge steps that others wrote.  Both
write one record a problem (see `tangolite.records`) and go on where they were stopped: a block of
problems draws its random numbers from the seed and its place alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tangolite.checkpoints import checksum
from tangolite.covrl import written_answer
from tangolite.evaluate import first_error
from tangolite.grading import answers_match, answers_status
from tangolite.lab.records import check_same, fill, open_records
from tangolite.models import Policy, token_table
from tangolite.parsing import (
    extract_answer,
    parse_verification,
    read_analyses,
    split_steps,
    step_end_positions,
)
from tangolite.prompts import Prompts, solution_text
from tangolite.records import Record
from tangolite.sampling import sample
from tangolite.sources import JudgedSolution
from tangolite.tasks import Problem, Task
from tangolite.updates import seeded

READ = {"generator": extract_answer, "prior": written_answer}


@dataclass(frozen=True)
class Plan:
    """What is sampled.  All of it decides the records, so a file goes on under the same plan alone."""

    part: str = "generator"  # generator | prior
    samples: int = 0  # of a problem, beside the greedy solution
    temperature: float = 1.0
    max_new_tokens: int = 2048
    verifications: int = 1  # of a solution
    verifier_temperature: float = 0.0
    verifier_max_new_tokens: int = 4096
    questions: int = 8  # a block: asked together, and written to the disk together
    seed: int = 0
    tokens: bool = False  # also keep every token's text

    def __post_init__(self) -> None:
        if self.part not in READ:
            raise ValueError(f"part must be generator or prior, got {self.part!r}")
        if self.samples < 0 or self.verifications < 1 or self.questions < 1:
            raise ValueError("samples must be at least 0, verifications and questions at least 1")
        if self.verifications > 1 and self.verifier_temperature == 0:
            raise ValueError("several verifications of a solution need a verifier_temperature above 0")


def evaluate_problems(
    path: str | Path,
    asked: Sequence[Problem],
    policy: Policy,
    verifier: Policy | None = None,
    *,
    plan: Plan,
    prompts: Prompts,
    source: str,
    task: Task | None = None,
) -> list[Record]:
    """Records of all problems, in ``path``; those that are there already stay as they are.

    With a ``task`` that knows its steps, the truth of the steps is noted.  Raises ValueError for a file that
    belongs to other settings or problems, and Interrupted at Ctrl-C: what was written stays.
    """
    settings = {"source": source, "policy": checksum(policy), "verifier": verifier and checksum(verifier)}
    file = open_records(path, settings | {"prompts": _digest(prompts, plan.part)} | asdict(plan))
    golds = [_gold(problem, plan) for problem in asked]
    check_same(file, [(p.question, gold) for p, gold in zip(asked, golds, strict=True)])

    def make(block: range) -> list[Record]:
        problems = [asked[i] for i in block]
        written = solutions_of(policy, prompts, problems, plan, block.start)
        for problem, solutions in zip(problems, written, strict=True):
            _add_truth(task, problem, solutions)
        if verifier is not None:
            questions = [
                p.question for p, solutions in zip(problems, written, strict=True) for _ in solutions
            ]
            _verify(verifier, prompts, questions, [s for row in written for s in row], plan, block.start)
        return [
            {"index": i, "source": source, "question": asked[i].question, "gold": golds[i], "solutions": row}
            for i, row in zip(block, written, strict=True)
        ]

    return fill(file, len(asked), plan.questions, make)


def evaluate_processbench(
    path: str | Path, given: Sequence[JudgedSolution], verifier: Policy, *, plan: Plan, prompts: Prompts
) -> list[Record]:
    """The verifier on steps that others wrote (ProcessBench, arXiv 2412.06559): one record a solution.

    Its prompt shows the steps as a generator's solution, with the answer that the last step boxes.  Score the
    records with `scores_by_source`.  Raises as `evaluate_problems` does.
    """
    settings = {"source": "processbench", "verifier": checksum(verifier)}
    file = open_records(path, settings | {"prompts": _digest(prompts, plan.part)} | asdict(plan))
    check_same(file, [(g.question, None) for g in given])

    def make(block: range) -> list[Record]:
        solutions = [given_solution(given[i]) for i in block]
        _verify(verifier, prompts, [given[i].question for i in block], solutions, plan, block.start)
        return [
            {"index": i, "id": given[i].id, "source": f"processbench/{given[i].split}",
             "question": given[i].question, "gold": None, "solutions": [solution]}
            for i, solution in zip(block, solutions, strict=True)
        ]  # fmt: skip

    return fill(file, len(given), plan.questions, make)


# --- solutions and verifications ---------------------------------------------------------------------


def solutions_of(
    policy: Policy, prompts: Prompts, asked: Sequence[Problem], plan: Plan, place: int
) -> list[list[dict]]:
    """The greedy solution of each problem, then its samples."""
    ids = [prompts.encode(policy.tokenizer, getattr(prompts, plan.part)(p.question)) for p in asked]
    found: list[list[dict]] = [[] for _ in asked]
    for kind, n, temperature in (("greedy", 1, 0.0), ("sample", plan.samples, plan.temperature)):
        if not n:
            continue
        rollouts = sample(policy, ids, n=n, max_new_tokens=plan.max_new_tokens, temperature=temperature,
                          generator=seeded(plan.seed, kind, place))  # fmt: skip
        for row in range(len(rollouts)):
            solution = _solution(kind, policy, rollouts.tokens(row), asked[row // n], plan)
            found[row // n].append(solution | {"truncated": not bool(rollouts.terminated[row])})
    for solutions in found:
        _add_votes([s for s in solutions if s["kind"] == "sample"])
    return found


def _solution(kind: str, policy: Policy, ids: list[int], problem: Problem, plan: Plan) -> dict:
    text = policy.decode(ids)
    answer = READ[plan.part](text)
    status = answers_status(answer, _gold(problem, plan))
    solution = {
        "kind": kind, "text": text, "answer": answer, "status": status, "correct": status == "match",
        "steps": [step.text for step in split_steps(text)], "truth": None, "label": None, "verifications": [],
    }  # fmt: skip
    if plan.tokens:
        ends = step_end_positions(ids, policy.tokenizer)
        solution |= {"tokens": token_table(policy, ids), "step_ends": ends}
    return solution


def _gold(problem: Problem, plan: Plan) -> str:
    """What the answer is compared with: a prior is asked for what the posterior is shown."""
    return problem.shown if plan.part == "prior" else problem.answer


def _add_votes(samples: list[dict]) -> None:
    """Equal answers get one number, so that they vote together whatever their spelling."""
    firsts: list[tuple[int, str]] = []
    for number, sample_ in enumerate(samples):
        answer = sample_["answer"]
        equal = (n for n, first in firsts if answer is not None and answers_match(answer, first))
        sample_["vote"] = next(equal, None if answer is None else number)
        if sample_["vote"] == number:
            firsts.append((number, answer))


def _add_truth(task: Task | None, problem: Problem, solutions: list[dict]) -> None:
    for solution in solutions:
        if task is not None and (truth := task.step_truth(problem, solution["steps"])) is not None:
            solution |= {"truth": truth, "label": first_error(truth)}


def given_solution(given: JudgedSolution) -> dict:
    answer = extract_answer(given.steps[-1])
    text = solution_text(list(given.steps), answer or "")
    return {
        "kind": "given", "text": text if answer else text.partition("<answer>")[0], "answer": answer,
        "correct": given.final_answer_correct, "steps": list(given.steps), "truth": None,
        "label": given.label, "verifications": [],
    }  # fmt: skip


def _verify(
    verifier: Policy, prompts: Prompts, questions: list[str], solutions: list[dict], plan: Plan, place: int
) -> None:
    """Adds its verifications to every solution."""
    asked = [
        prompts.verifier(q, s["text"], len(s["steps"])) for q, s in zip(questions, solutions, strict=True)
    ]
    ids = [prompts.encode(verifier.tokenizer, text) for text in asked]
    rollouts = sample(verifier, ids, n=plan.verifications, max_new_tokens=plan.verifier_max_new_tokens,
                      temperature=plan.verifier_temperature,
                      generator=seeded(plan.seed, "verifications", place))  # fmt: skip
    for row in range(len(rollouts)):
        solution, text = solutions[row // plan.verifications], verifier.decode(rollouts.tokens(row))
        judgements, final = parse_verification(text, len(solution["steps"]))
        said = {"text": text, "judgements": judgements, "final": final, "analyses": read_analyses(text)}
        solution["verifications"].append(said)


def _digest(prompts: Prompts, part: str) -> str:
    words = getattr(prompts, part)("?") + prompts.verifier("?", "!", 1)
    return hashlib.sha256(words.encode()).hexdigest()
