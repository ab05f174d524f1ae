"""`python -m tangolite eval --source NAME --records FILE`: a run's policies on a data set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tangolite.checkpoints import Run
from tangolite.evaluate import Interval
from tangolite.lab.evaluation import READ, Plan, evaluate_problems, evaluate_processbench
from tangolite.lab.scores import scores_by_source, table
from tangolite.records import Record
from tangolite.sources import SPLITS, check_golds, read_processbench, read_source
from tangolite.tango import Tango
from tangolite.tasks import problems


def eval_source(
    run: Run,
    records: str | Path,
    *,
    source: str | None = None,
    path: str | Path | None = None,
    split: str | None = None,
    limit: int | None = None,
    samples: int = 0,
    tokens: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, dict[str, Interval]]:
    """Evaluate on a data set (the run's own held-out problems unless told), keep the records, say the scores.

    Before a model is asked, every gold answer must pass the self-test.  Raises as `read_source` and
    `evaluate_problems` do.
    """
    config, tango = run.config, isinstance(run, Tango)
    judged = {"verifier_max_new_tokens": config.verifier_max_new_tokens} if tango else {}
    plan = Plan(
        part="generator" if tango else "prior", samples=samples, temperature=config.temperature or 1.0,
        max_new_tokens=config.max_new_tokens, seed=config.seed, tokens=tokens, **judged,
    )  # fmt: skip
    if source == "processbench":
        found = _processbench(run, records, plan, path, split, limit)
    else:
        found = _problems(run, records, plan, source, path, split, limit)
    by_source = scores_by_source(found)
    for name, scores in by_source.items():
        number = sum(record["source"] == name for record in found)
        say(f"{name}, {number} problems:" if number else f"{name}:")
        say(table(scores))
    say(f"records are in {records}")
    return by_source


def _problems(run: Run, records, plan: Plan, source, path, split, limit) -> list[Record]:
    if source is None and (path or split):
        raise ValueError("a path or a split is of a data set: name it, as in --source gsm8k")
    if source is None:
        asked, task = problems(run.task, limit or 256, "held-out"), run.task
    else:
        asked, task = read_source(source, path=path, split=split, limit=limit), None
        check_golds(asked, run.prompts, part=plan.part, read=READ[plan.part])
    judges = isinstance(run, Tango) and run.config.step_source == "verifier"
    policy = run.generator if isinstance(run, Tango) else run.policy
    return evaluate_problems(
        records, asked, policy, run.verifier if judges else None, plan=plan, prompts=run.prompts,
        source=source or "held-out", task=task,
    )  # fmt: skip


def _processbench(run: Run, records, plan: Plan, path, split, limit) -> list[Record]:
    if not isinstance(run, Tango):
        raise ValueError("processbench asks a verifier to judge steps, and a CoVRL run has none")
    if path is not None and split is None:
        raise ValueError(f"say which split of processbench {path} is: one of {', '.join(SPLITS)}")
    splits = SPLITS if split in (None, "all") else (split,)
    given = [one for part in splits for one in read_processbench(part, path=path, limit=limit)]
    return evaluate_processbench(records, given, run.verifier, plan=plan, prompts=run.prompts)
