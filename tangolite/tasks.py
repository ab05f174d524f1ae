"""Problems: two built-in tasks whose every step is known to code, and a reader for your own.

The truth of a step is used to *measure* and, in the warm start, to teach; reinforcement learning never
sees it.  A step is true when it does what the question asks at that place and follows from the steps
before it; so a right computation on an earlier wrong result is a true step, and the first error of a
solution is its first step that is not true.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

Fact = tuple  # what one step has to know, e.g. (17, "+", 5) or ("tree",)
Teacher = Callable[[Fact], str]  # what somebody believes the result of a fact to be


@dataclass(frozen=True)
class Problem:
    """A question, its gold answer, and what a CoVRL posterior is shown (the answer, unless told)."""

    question: str
    answer: str
    reference: str | None = None

    @property
    def shown(self) -> str:
        return self.answer if self.reference is None else self.reference


@dataclass(frozen=True)
class ChainArithmetic:
    """`17+5-3` is worked from left to right, every result taken modulo ``modulus``.

    A step writes `17+5=22`.  ``steps`` is the number of operations K, or a tuple to draw K from.
    """

    modulus: int = 31
    steps: int | tuple[int, ...] = 8
    operators: str = "+-"
    operands: tuple[int, int] = (1, 9)
    first: tuple[int, int] | None = None  # all residues unless told

    def __post_init__(self) -> None:
        if not 2 <= self.modulus <= 100:
            raise ValueError(f"modulus must lie in 2..100 (one token per value), got {self.modulus}")
        if not set(self.operators) <= set("+-*") or not self.operators:
            raise ValueError(f"operators must be some of + - *, got {self.operators!r}")
        if min(self.lengths, default=0) < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.steps,) if isinstance(self.steps, int) else tuple(self.steps)

    def problem(self, rng: random.Random) -> Problem:
        low, high = self.first or (0, self.modulus - 1)
        question = str(rng.randint(low, high))
        for _ in range(rng.choice(self.lengths)):
            question += rng.choice(self.operators) + str(rng.randint(*self.operands))
        results = [result for _, result in self._walk(question, self.truth)]
        return Problem(question, results[-1], " ".join(results))

    def truth(self, fact: Fact) -> str:
        left, operator, right = fact
        value = {"+": left + right, "-": left - right, "*": left * right}[operator]
        return str(value % self.modulus)

    def facts(self) -> list[Fact]:
        low, high = self.operands
        values, operands = range(self.modulus), range(low, high + 1)
        return [(a, op, b) for a in values for op in self.operators for b in operands]

    def believe(self, fact: Fact, rng: random.Random) -> str:
        """Some wrong result for a fact, for misconceptions and for worked errors."""
        shift = rng.randrange(1, self.modulus)
        return str((int(self.truth(fact)) + shift) % self.modulus)

    def guess(self, fact: Fact, rng: random.Random) -> str:
        """Any result at all."""
        return str(rng.randrange(self.modulus))

    def _walk(self, question: str, teacher: Teacher) -> list[tuple[str, str]]:
        first, *operations = re.findall(r"[+*-]?\d+", question)
        value, walked = first, []
        for operation in operations:
            result = teacher((int(value), operation[0], int(operation[1:])))
            walked.append((f"{value}{operation}", result))
            value = result
        return walked

    def solve(self, problem: Problem, teacher: Teacher | None = None) -> tuple[list[str], str]:
        """(steps, answer) as somebody with these beliefs writes them; the truth unless told."""
        walked = self._walk(problem.question, teacher or self.truth)
        return [f"{left}={result}" for left, result in walked], walked[-1][1]

    def flawed(self, problem: Problem, rng: random.Random, rate: float) -> tuple[list[str], str]:
        """(steps, answer) with each step wrong at this rate: mostly a wrong result, at times a step
        that starts from another value or works with another operand than the question says."""
        first, *operations = re.findall(r"[+*-]?\d+", problem.question)
        value, steps = int(first), []
        for operation in operations:
            left, operator, right = value, operation[0], int(operation[1:])
            kind = rng.random() if rng.random() < rate else 1.0
            if kind < 0.12:
                left = rng.choice([v for v in range(self.modulus) if v != value])
            elif kind < 0.24 and self.operands[0] < self.operands[1]:
                right = rng.choice([v for v in range(self.operands[0], self.operands[1] + 1) if v != right])
            fact = (left, operator, right)
            result = self.believe(fact, rng) if 0.24 <= kind < 1.0 else self.truth(fact)
            steps.append(f"{left}{operator}{right}={result}")
            value = int(result)
        slip = rng.random() < rate / 8
        return steps, str((value + rng.randrange(1, self.modulus)) % self.modulus if slip else value)

    def follows(self, steps: Sequence[str], answer: str) -> bool:
        """Is the answer what the steps say it is?"""
        return bool(steps) and steps[-1].partition("=")[2] == answer

    def recompute(self, problem: Problem, steps: Sequence[str]) -> list[tuple[str, str]]:
        """What each step should be, given the question and what was claimed before: (step, claim)."""
        first, *operations = re.findall(r"[+*-]?\d+", problem.question)
        value, checked = first, []
        for text, operation in zip(steps, operations, strict=False):
            claim = re.fullmatch(r"\s*\d+[+*-]\d+=(\d{1,9})\s*", text)  # int() refuses endless numbers
            result = self.truth((int(value), operation[0], int(operation[1:])))
            checked.append((f"{value}{operation}={result}", claim[1] if claim else ""))
            value = str(int(claim[1]) % self.modulus) if claim else result
        return checked

    def restates(self, problem: Problem, steps: Sequence[str]) -> bool:
        """Does every step work on the question's own operation, from the value claimed before it?

        A matter of form: whether the results are right is not looked at.
        """
        checked = self.recompute(problem, steps)
        asked = len(re.findall(r"[+*-]?\d+", problem.question)) - 1
        lefts = [step.partition("=")[0] for step, _ in checked]
        return len(steps) == asked and [step.strip().partition("=")[0] for step in steps] == lefts

    def step_truth(self, problem: Problem, steps: Sequence[str]) -> list[bool]:
        """Is each step what the question asks there, and right?  Surplus steps are wrong."""
        checked = [step for step, _ in self.recompute(problem, steps)]
        right = [text.strip() == step for text, step in zip(steps, checked, strict=False)]
        return right + [False] * (len(steps) - len(right))


WORDS = tuple(
    "tree river stone cloud bread light horse night plant sugar dance music sleep green paper glass "
    "chair table mouse train smile dream beach ocean fruit lemon apple grape peach melon tiger zebra "
    "rabbit wolf crab fish bird leaf wind snow rain fire king map cup drum".split()
)


@dataclass(frozen=True)
class LastLetters:
    """`tree wolf map` asks for the last letters, joined: `efp`.  A step writes `tree=e`."""

    steps: int | tuple[int, ...] = 3
    words: tuple[str, ...] = WORDS

    def __post_init__(self) -> None:
        if min(self.lengths, default=0) < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.steps,) if isinstance(self.steps, int) else tuple(self.steps)

    def problem(self, rng: random.Random) -> Problem:
        words = [rng.choice(self.words) for _ in range(rng.choice(self.lengths))]
        letters = [word[-1] for word in words]
        return Problem(" ".join(words), "".join(letters), " ".join(letters))

    def truth(self, fact: Fact) -> str:
        return fact[0][-1]

    def facts(self) -> list[Fact]:
        return [(word,) for word in self.words]

    def believe(self, fact: Fact, rng: random.Random) -> str:
        return rng.choice([c for c in "abcdefghijklmnopqrstuvwxyz" if c != self.truth(fact)])

    def guess(self, fact: Fact, rng: random.Random) -> str:
        return rng.choice("abcdefghijklmnopqrstuvwxyz")

    def solve(self, problem: Problem, teacher: Teacher | None = None) -> tuple[list[str], str]:
        letters = [(word, (teacher or self.truth)((word,))) for word in problem.question.split()]
        return [f"{word}={letter}" for word, letter in letters], "".join(letter for _, letter in letters)

    def flawed(self, problem: Problem, rng: random.Random, rate: float) -> tuple[list[str], str]:
        wrong = lambda fact: self.believe(fact, rng) if rng.random() < rate else self.truth(fact)  # noqa: E731
        return self.solve(problem, wrong)

    def follows(self, steps: Sequence[str], answer: str) -> bool:
        return "".join(step.partition("=")[2] for step in steps) == answer

    def recompute(self, problem: Problem, steps: Sequence[str]) -> list[tuple[str, str]]:
        pairs = zip(problem.question.split(), steps, strict=False)
        return [(f"{word}={word[-1]}", text.partition("=")[2].strip()) for word, text in pairs]

    def restates(self, problem: Problem, steps: Sequence[str]) -> bool:
        return [step.strip().partition("=")[0] for step in steps] == problem.question.split()

    def step_truth(self, problem: Problem, steps: Sequence[str]) -> list[bool]:
        checked = [step for step, _ in self.recompute(problem, steps)]
        right = [text.strip() == step for text, step in zip(steps, checked, strict=False)]
        return right + [False] * (len(steps) - len(right))


GAINS = ("buys {} more", "finds {} more", "gets {} more from a friend")
LOSSES = ("gives {} away", "loses {}", "sells {}")
NAMES, THINGS = ("Mia", "Tom", "Ada", "Sam"), ("apples", "stamps", "marbles", "books", "shells")


@dataclass(frozen=True)
class Stories:
    """Word problems as in a grade-school set, for models that read English: a chain of plus and minus, told.

    A step writes `12+5=17`, as in `ChainArithmetic`, and its truth is known in the same way.
    """

    steps: int | tuple[int, ...] = 3

    @property
    def chain(self) -> ChainArithmetic:
        return ChainArithmetic(modulus=100, steps=self.steps, operands=(2, 9), first=(20, 60))

    def problem(self, rng: random.Random) -> Problem:
        plain, name, thing = self.chain.problem(rng), rng.choice(NAMES), rng.choice(THINGS)
        if max(map(int, plain.shown.split())) > 90:  # the chain has come round to 99 from below
            return self.problem(rng)
        first, *operations = re.findall(r"[+-]?\d+", plain.question)
        told = [rng.choice(GAINS if op[0] == "+" else LOSSES).format(op[1:]) for op in operations]
        told = [f"Then {name} {what}." for what in told]
        question = f"{name} has {first} {thing}. {' '.join(told)} How many {thing} does {name} have now?"
        return Problem(question, plain.answer, plain.shown)

    def plain(self, problem: Problem) -> Problem:
        """The chain that a story tells."""
        told = re.findall(r"Then \w+ (\w+) (\d+)", problem.question)
        signs = [("-" if what in ("gives", "loses", "sells") else "+") + number for what, number in told]
        return replace(problem, question=re.search(r"\d+", problem.question)[0] + "".join(signs))

    def truth(self, fact: Fact) -> str:
        return self.chain.truth(fact)

    def solve(self, problem: Problem, teacher: Teacher | None = None) -> tuple[list[str], str]:
        return self.chain.solve(self.plain(problem), teacher)

    def flawed(self, problem: Problem, rng: random.Random, rate: float) -> tuple[list[str], str]:
        return self.chain.flawed(self.plain(problem), rng, rate)

    def follows(self, steps: Sequence[str], answer: str) -> bool:
        return self.chain.follows(steps, answer)

    def recompute(self, problem: Problem, steps: Sequence[str]) -> list[tuple[str, str]]:
        return self.chain.recompute(self.plain(problem), steps)

    def restates(self, problem: Problem, steps: Sequence[str]) -> bool:
        return self.chain.restates(self.plain(problem), steps)

    def step_truth(self, problem: Problem, steps: Sequence[str]) -> list[bool]:
        return self.chain.step_truth(self.plain(problem), [re.sub(r"\s+", "", step) for step in steps])


@dataclass(frozen=True)
class ProblemSet:
    """Problems of your own, drawn with replacement; the truth of their steps is not known."""

    items: tuple[Problem, ...]

    def problem(self, rng: random.Random) -> Problem:
        return rng.choice(self.items)

    def restates(self, problem: Problem, steps: Sequence[str]) -> bool:
        return True

    def step_truth(self, problem: Problem, steps: Sequence[str]) -> None:
        return None


Task = ChainArithmetic | LastLetters | Stories | ProblemSet


def task_of(settings: dict) -> Task:
    """A task from the settings of a recipe: ``kind: chain | letters | stories``, or ``file: x.jsonl``."""
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    if "file" in settings:
        settings.pop("kind", None)  # a file stands in the place of any built-in task
        if unknown := sorted(set(settings) - {"file", "question", "answer"}):
            raise ValueError(f"task.file takes question and answer beside it, not {', '.join(unknown)}")
        return ProblemSet(tuple(read_jsonl(settings.pop("file"), **settings)))
    kind = settings.pop("kind", None)
    kinds = {"chain": ChainArithmetic, "letters": LastLetters, "stories": Stories}
    if kind not in kinds:
        raise ValueError(f"task.kind must be one of {', '.join(kinds)} (or give task.file), got {kind!r}")
    known = [f.name for f in fields(kinds[kind])]
    if unknown := sorted(set(settings) - set(known)):
        raise ValueError(f"a task of kind {kind} has {', '.join(known)}, not {', '.join(unknown)}")
    try:
        return kinds[kind](**settings)
    except TypeError as error:
        raise ValueError(f"task of kind {kind} with {settings}: {error}") from None


def problems(task: Task, count: int, seed: int | str) -> list[Problem]:
    """``count`` problems; the same seed always gives the same ones (an update's is "SEED/PLAYER/UPDATE")."""
    rng = random.Random(f"{seed}")
    return [task.problem(rng) for _ in range(count)]


def misconceptions(
    task: Task, *, fraction: float, rate: float, seed: int | str
) -> Callable[[random.Random], Teacher]:
    """A teacher who has one fixed wrong result for a ``fraction`` of the facts, and gives it at this rate.

    At a rate under 1 the truth is still said now and then: a model taught so can find it again by sampling.
    """
    rng = random.Random(f"misconceptions/{seed}")
    facts = task.facts()
    wrong = {fact: task.believe(fact, rng) for fact in rng.sample(facts, round(fraction * len(facts)))}

    def teacher(draw: random.Random) -> Teacher:
        return lambda fact: wrong[fact] if fact in wrong and draw.random() < rate else task.truth(fact)

    return teacher


def read_jsonl(path: str | Path, *, question: str = "question", answer: str = "answer") -> list[Problem]:
    """Problems from a JSONL file of your own, one object a line.

    A gold answer written as in GSM8K (reasoning, then `#### 42`) is cut to what follows the mark.
    Raises ValueError naming file, line and field for a line that cannot be used.
    """
    found = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                found.append(_read_line(line, f"{path}, line {number}", question, answer))
    if not found:
        raise ValueError(f"{path}: no problems in this file; it needs one JSON object a line")
    return found


def _read_line(line: bytes, where: str, question: str, answer: str) -> Problem:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 ({error.reason})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets in thousands
        raise ValueError(f"{where}: JSON that cannot be read ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected a JSON object with the fields {question!r} and {answer!r}")
    for field in (question, answer):
        if field not in row:
            raise ValueError(f"{where}: field {field!r} is missing; the line has {sorted(row)}")
        if not isinstance(row[field], str | int | float) or not str(row[field]).strip():
            raise ValueError(f"{where}: field {field!r} must be text or a number, got {row[field]!r}")
    _, mark, gold = str(row[answer]).rpartition("####")
    if mark and re.fullmatch(r"\s*[-$]*\d{1,3}(,\d{3})+(\.\d+)?\s*", gold):
        gold = gold.replace(",", "")
    if not gold.strip():
        raise ValueError(f"{where}: field {answer!r} has nothing after its ####, got {row[answer]!r}")
    return Problem(str(row[question]).strip(), gold.strip())
