"""Does an answer equal the gold answer? The outcome reward of both methods rests on this question.

Equality is mathematical, not of strings (Tango, section 3.2: rule-based outcome reward; CoVRL, evaluation), and it is
an equivalence: symmetric, and transitive except where a missing unit is forgiven. In order:

1. Both texts are read in this process (`_grading`): spelling is made uniform, types are told apart, rational numbers
   are `Fraction`s. Most pairs are decided here, in microseconds.
2. Only two formulas (roots, pi, letters) go on to math-verify, in a child process that is killed when it takes too
   long, and its verdict is checked numerically. Monstrous input (power towers, large factorials) never gets there.

What was decided where the field disagrees: 50% is 0.5 and not 50; a missing unit is forgiven, a different one is not,
nothing is converted, and the base of a numeral (52_8) counts as its unit; a decimal is the number it writes, so 0.333
is not 1/3; commas separate thousands in groups of exactly three outside brackets, entries otherwise; a list without
brackets is a set; sets, tuples and intervals are different things; words are compared without case, and quoted Python
strings with it; True is not 1, [1, 2] is not (1, 2), 1.0 is 1.
"""

from __future__ import annotations

import atexit
import re
from typing import Literal, NamedTuple

from tangolite._grading.exact import too_heavy
from tangolite._grading.read import Value, read
from tangolite._grading.text import unwrap
from tangolite._grading.worker import Worker

Status = Literal["match", "differ", "no_answer", "no_gold", "timeout"]


class Grade(NamedTuple):
    """A verdict and the branch that gave it."""

    status: Status
    reason: str


_worker = Worker()
atexit.register(_worker.close)

_INTEGER = re.compile(r"[+-]?[0-9]{1,15}")


def answers_match(answer: str | None, gold: str | None, *, timeout: float = 5.0) -> bool:
    """Whether an answer equals the gold answer (contents of a box, or bare; one `\\boxed{}` or `$` around is fine).

    Never raises, never evaluates code, and returns within `timeout` seconds of computing (plus, once, the start of the
    child process), from any thread or process. False also where nothing could be decided: see `answers_status`.
    """
    return grade(answer, gold, timeout=timeout).status == "match"


def answers_status(answer: str | None, gold: str | None, *, timeout: float = 5.0) -> Status:
    """Like `answers_match`, telling apart what is not a wrong answer: "no_gold" (nothing to compare with: leave the
    problem out of the statistics), "no_answer", and "timeout" (undecided after `timeout` seconds)."""
    return grade(answer, gold, timeout=timeout).status


def explain(answer: str | None, gold: str | None, *, timeout: float = 5.0) -> str:
    """The name of the branch that decided, for audits: "rational numbers", "types: seq and set", "math-verify", ..."""
    return grade(answer, gold, timeout=timeout).reason


def grade(answer: str | None, gold: str | None, *, timeout: float = 5.0) -> Grade:
    """Status and reason together."""
    answer, gold = _as_text(answer), _as_text(gold)
    if not gold:
        return Grade("no_gold", "empty gold answer")
    if not answer:
        return Grade("no_answer", "empty answer")
    if answer == gold:
        return Grade("match", "identical")
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(gold):
        return Grade("match" if int(answer) == int(gold) else "differ", "integers")
    try:
        match, reason = _Comparison(timeout).values(read(gold), read(answer))
    except (RecursionError, MemoryError):  # no input is known to do this; a reward function must not stop a run
        match, reason = False, "too deep"
    return Grade("timeout" if match is None else "match" if match else "differ", reason)


def worker_restarts() -> int:
    """How often the child process had to be replaced in this process, after a timeout or a death."""
    return _worker.restarts


def _as_text(answer: object) -> str:
    if answer is None:
        return ""
    try:
        text = answer if isinstance(answer, str) else str(answer)  # a gold answer may come as a number from JSON
    except Exception:
        return ""
    return unwrap(text) if text[:1] in "$\\ \n\t" or text[-1:] in ". \n\t" else text


Verdict = tuple[bool | None, str]  # None: undecided, the time was up


def _latex(value: Value) -> str:
    """A canonical spelling as LaTeX for math-verify. Decimals become fractions: it would round them."""
    text = re.sub(r"⟦deg ?⟧", r"\\cdot\\frac{\\pi}{180}", value.data if value.kind == "formula" else value.text)
    text = re.sub(r"(\d*)\.(\d+)", _fraction, text.replace("%", r"\cdot\frac{1}{100}"))
    for sign, command in (("*", r"\cdot "), ("≤", r"\le "), ("≥", r"\ge "), ("≠", r"\ne "), ("⦃", r"\{"), ("⦄", r"\}")):
        text = text.replace(sign, command)
    return text.replace("⏎", r"\\").replace("⟨", r"\langle ").replace("⟩", r"\rangle ")


def _fraction(match: re.Match[str]) -> str:
    return rf"(\frac{{{(match[1] + match[2]).lstrip('0') or '0'}}}{{1{'0' * len(match[2])}}})"


class _Comparison:
    """One comparison with its time budget, which all entries of a tuple or a set share."""

    def __init__(self, timeout: float):
        self.seconds_left = min(float(timeout), 3600.0) if timeout > 0 else 0.0

    def values(self, a: Value, b: Value) -> Verdict:
        """Compare two values of any kind; symmetric."""
        if a.kind == b.kind and a.text == b.text:
            return True, "same after normalising"
        if a.variable and b.variable and a.variable != b.variable and "equation" not in (a.kind, b.kind):
            return False, "different variables"
        if "equation" in (a.kind, b.kind) and (a.variable or b.variable or a.kind == b.kind):
            return self.algebra(a.text, b.text)
        if a.unit and b.unit and a.unit != b.unit:
            return False, "different units"
        return self.kinds(a, b)

    def kinds(self, a: Value, b: Value) -> Verdict:
        if a.kind != b.kind:
            return self.mixed(a, b)
        if a.kind == "number":
            return a.data == b.data, "rational numbers"
        if a.kind == "text":
            return a.data == b.data, "words"
        if a.kind == "string":
            return type(a.data) is type(b.data) and a.data == b.data, "Python strings"
        if a.kind == "seq":
            return self.sequences(a, b)
        if a.kind == "ratio":
            return self.entries(a.data, b.data)
        if a.kind == "matrix":
            if [len(row) for row in a.data] != [len(row) for row in b.data]:
                return False, "matrices of different shape"
            return self.entries(sum(a.data, ()), sum(b.data, ()))
        if a.kind in ("set", "union", "dict"):
            return self.unordered(a, b)
        if a.kind == "opaque":
            return False, "refused: too large or unreadable"
        return self.algebra(_latex(a), _latex(b))
