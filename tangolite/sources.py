"""The data sets of both papers, from a local file or from the hub, as problems with a gold answer.

Where they are and what becomes of a row stands in `_sources.schemas`: a choice is answered with its letter,
a truth value with True or False.  `self_test` asks, before any model is asked, whether every gold answer
would count as right if it were written in the form that the prompt names.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tangolite._sources.rows import Located, file_rows, hub_rows
from tangolite._sources.schemas import SOURCES, Source, text
from tangolite.grading import answers_match
from tangolite.parsing import extract_answer
from tangolite.prompts import Prompts
from tangolite.tasks import Problem, ProblemSet, Task, task_of

logger = logging.getLogger(__name__)


class Reading(NamedTuple):
    """The problems of a set, and how many of its rows were left out for which reason."""

    problems: list[Problem]
    left_out: Counter[str]


def read_source(
    name: str, *, path: str | Path | None = None, split: str | None = None, limit: int | None = None
) -> list[Problem]:
    """The first ``limit`` problems of a data set (`SOURCES`), all unless told.

    ``path`` is a local copy in the set's own fields: JSONL, JSON, or Parquet where pyarrow is installed.
    Without one the set comes from the hub, which needs the `datasets` package.  Rows that give no problem are
    left out and counted in the log.  Raises OSError for a file that is not there, and ValueError that names
    set, file, line and field for what cannot be used.
    """
    problems, left_out = read_counted(name, path=path, split=split, limit=limit)
    if left_out:
        logger.warning("%s: %d problems; left out were %s", name, len(problems), _counts(left_out))
    return problems


def read_counted(
    name: str, *, path: str | Path | None = None, split: str | None = None, limit: int | None = None
) -> Reading:
    """As `read_source`, with the number of rows left out for each reason."""
    if name not in SOURCES:
        close = get_close_matches(name, SOURCES)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(SOURCES)}"
        raise ValueError(f"unknown data set {name!r}: {hint}")
    source = SOURCES[name]
    if path is not None and split is not None:
        raise ValueError(f"{path} holds one split of {name}: leave out split, or read the hub without a path")
    _check_limit(limit)
    found: list[Problem] = []
    left_out: Counter[str] = Counter()
    for row in _rows(source, path, split or source.split):
        problem = _converted(row, source.fields, lambda row: _boxable(source.read(row)))
        if isinstance(problem, str):
            left_out[problem] += 1
            continue
        found.append(problem)
        if len(found) == limit:
            break
    if not found:
        raise ValueError(f"{path or source.id}: no problems for {name}; left out were {_counts(left_out)}")
    return Reading(found, left_out)


def _check_limit(limit: object) -> None:
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit must be a whole number of at least 1, got {limit!r}")


def _rows(source: Source, path: str | Path | None, split: str) -> Iterator[Located]:
    if path is not None:
        return file_rows(path)
    return hub_rows(source.id, split, config=source.config, file=source.file, revision=source.revision)


def _converted(located: Located, fields: Sequence[str], read: Callable[[dict], Any]) -> Any:
    """What a reader makes of a row; what is wrong with it is said with the place where the row stands."""
    where, row = located
    if missing := [field for field in fields if field not in row]:
        raise ValueError(f"{where}: field {missing[0]!r} is missing; the row has {', '.join(sorted(row))}")
    try:
        return read(row)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None
    except (LookupError, OverflowError, AttributeError) as error:  # an object for a list, a number like 1e999
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{where}: a field holds something of another kind ({reason})") from None


def _boxable(read: Problem | str) -> Problem | str:
    """The problem, unless nobody could answer it: the box of Python's `'}'` closes too early."""
    if isinstance(read, str):
        return read
    whole = (read.answer, extract_answer(read.answer))  # the second where the gold answer is boxed itself
    boxed = extract_answer(f"\\boxed{{{read.answer}}}")
    return read if boxed in whole else "answer that cannot stand in a box (its braces do not match)"


def _counts(left_out: Counter[str]) -> str:
    return "; ".join(f"{count} × {reason}" for reason, count in left_out.most_common()) or "none"


# --- ProcessBench ------------------------------------------------------------------------------------

SPLITS = ("gsm8k", "math", "olympiadbench", "omnimath")
_FIELDS = ("id", "problem", "steps", "final_answer_correct", "label")


@dataclass(frozen=True)
class JudgedSolution:
    """A solution that somebody wrote, and its first wrong step as people found it (-1: there is none)."""

    id: str
    split: str
    question: str
    steps: tuple[str, ...]
    label: int
    final_answer_correct: bool


def read_processbench(
    split: str, *, path: str | Path | None = None, limit: int | None = None, revision: str | None = None
) -> list[JudgedSolution]:
    """The first ``limit`` solutions of a split of ProcessBench (arXiv 2412.06559), from a file or the hub.

    Labels of a published split were corrected once: for numbers to compare, pin a ``revision`` (a commit of
    the hub's repository).  Raises as `read_source` does.
    """
    if split not in SPLITS:
        raise ValueError(f"processbench has the splits {', '.join(SPLITS)}, not {split!r}")
    _check_limit(limit)
    hub = "Qwen/ProcessBench"
    rows = hub_rows(hub, split, revision=revision) if path is None else file_rows(path)
    return [_converted(row, _FIELDS, lambda row: _judged(row, split)) for row in islice(rows, limit)]


def _judged(row: dict[str, Any], split: str) -> JudgedSolution:
    steps, label, right = row["steps"], row["label"], row["final_answer_correct"]
    of = str(row["id"]).rpartition("-")[0]
    if of in SPLITS and of != split:
        raise ValueError(f"the solution {row['id']} is of the split {of}, not of {split}")
    if not isinstance(steps, list | tuple) or not steps or not all(isinstance(step, str) for step in steps):
        raise ValueError(f"field 'steps' must be a list of texts, got {steps!r:.60}")
    if isinstance(label, bool) or not isinstance(label, int) or not -1 <= label < len(steps):
        raise ValueError(f"field 'label' must be -1 or the index of one of {len(steps)} steps, got {label!r}")
    if not isinstance(right, bool):
        raise ValueError(f"field 'final_answer_correct' must be true or false, got {right!r:.60}")
    return JudgedSolution(str(row["id"]), split, text(row, "problem"), tuple(steps), label, right)


# --- before any model is asked -----------------------------------------------------------------------

_THOUGHT = "<think><step>so</step></think>"
_FORMS = {"generator": "<answer>\\boxed{...}</answer>", "prior": "<answer>...</answer>"}


def self_test(
    problems: Sequence[Problem],
    prompts: Prompts,
    *,
    part: str = "generator",
    read: Callable[[str], str | None] = extract_answer,
) -> list[str]:
    """What would be counted as wrong although the gold answer was written: empty when all is well.

    The answer is written as the prompt of this part (generator or prior) asks, read by ``read`` and compared
    with itself by `answers_match`.  So it finds a prompt that asks for a form which the parser does not
    read, and gold answers that no answer can equal.
    """
    asked = re.search(r"<answer>.*?</answer>", getattr(prompts, part)(""), re.DOTALL)
    form = asked[0] if asked else _FORMS[part]  # the prompts of the tiny models name none
    failures = []
    for number, problem in enumerate(problems, 1):
        answer = read(_THOUGHT + form.replace("...", problem.answer))
        if not answers_match(answer, problem.answer):
            failures.append(f"problem {number}: {problem.answer!r:.60} is read back as {answer!r:.60}")
    return failures


def check_golds(
    problems: Sequence[Problem],
    prompts: Prompts,
    *,
    part: str = "generator",
    read: Callable[[str], str | None] = extract_answer,
) -> None:
    """Raises ValueError, naming the first few, where `self_test` finds anything."""
    if failures := self_test(problems, prompts, part=part, read=read):
        raise ValueError(
            f"{len(failures)} of {len(problems)} gold answers would not be counted as right if a perfect "
            f"{part} wrote them: {'; '.join(failures[:3])}. Mend or leave out these problems, or the prompt"
        )


def task_from(
    settings: dict,
    prompts: Prompts,
    *,
    part: str = "generator",
    read: Callable[[str], str | None] = extract_answer,
) -> Task:
    """A task from the settings of a recipe: as `tasks.task_of`, or `source: NAME` for one of `SOURCES`.

    Beside `source` stand `path`, `split` and `limit`, as in `read_source`.  Problems that were read, from a
    source or a file, pass `check_golds` first.
    """
    if "source" not in settings:
        task = task_of(settings)
    elif unknown := sorted(set(settings) - {"source", "path", "split", "limit", "kind"}):
        raise ValueError(f"task.source takes path, split and limit beside it, not {', '.join(unknown)}")
    else:
        options = {key: settings.get(key) for key in ("path", "split", "limit")}
        task = ProblemSet(tuple(read_source(settings["source"], **options)))
    if isinstance(task, ProblemSet):
        check_golds(task.items, prompts, part=part, read=read)
    return task
