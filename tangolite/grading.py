"""Does an answer equal the gold answer? The outcome reward of Tango (arXiv 2505.15034) and the evaluation of both
methods rest on this question.

Equality is mathematical, not of strings, and it is an equivalence: symmetric, and transitive except where a missing
unit is forgiven. In order:

1. Both texts are read in this process (`_grading`): spelling is made uniform, types are told apart, rational
   numbers are `Fraction`s. Most pairs are decided here, in microseconds.
2. Only formulas (roots, pi, letters) go on to math-verify, in a child process that is killed when it takes too
   long, and its verdict is checked numerically. Monstrous input (power towers, large factorials) never gets there.

What was decided where the field disagrees:

- 50% is 0.5 and not 50. A decimal is the number it writes, so 0.333 is not 1/3.
- A missing unit is forgiven, a different one is not, nothing is converted. The base of a numeral (52_8) counts as
  its unit.
- Commas separate thousands in groups of exactly three outside brackets, and entries otherwise.
- A list without brackets is a set. Sets, tuples (also intervals) and lists are different things.
- Words are compared without case and are never products of letters; quoted Python strings are compared as they are.
- True is not 1, [1, 2] is not (1, 2), 1.0 is 1.
"""

from __future__ import annotations

import atexit
import logging
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


logger = logging.getLogger(__name__)
_worker = Worker()
atexit.register(_worker.close)

_INTEGER = re.compile(r"[+-]?[0-9]{1,15}")


def answers_match(answer: str | None, gold: str | None, *, timeout: float = 5.0) -> bool:
    """Whether an answer equals the gold answer (contents of a box, or bare; one `\\boxed{}` or `$` around is
    fine).

    Never raises, never evaluates code, and returns within `timeout` seconds of computing (plus, once, the
    start of the child process), from any thread or process. False also where nothing could be decided: see
    `answers_status`."""
    return grade(answer, gold, timeout=timeout).status == "match"


def answers_status(answer: str | None, gold: str | None, *, timeout: float = 5.0) -> Status:
    """Like `answers_match`, telling apart what is not a wrong answer: "no_gold" (nothing to compare with:
    leave the problem out of the statistics), "no_answer", and "timeout" (undecided after `timeout`
    seconds)."""
    return grade(answer, gold, timeout=timeout).status


def explain(answer: str | None, gold: str | None, *, timeout: float = 5.0) -> str:
    """The name of the branch that decided, for audits: "rational numbers", "types: seq and set",
    "math-verify", ..."""
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
    except (
        RecursionError,
        MemoryError,
    ):  # no input is known to do this; a reward function must not stop a run
        match, reason = False, "too deep"
    return Grade("timeout" if match is None else "match" if match else "differ", reason)


def worker_restarts() -> int:
    """How often the child process had to be replaced in this process, after a timeout or a death."""
    return _worker.restarts


def _as_text(answer: object) -> str:
    if answer is None:
        return ""
    try:
        text = (
            answer if isinstance(answer, str) else str(answer)
        )  # a gold answer may come as a number from JSON
    except Exception:
        return ""
    return unwrap(text) if text[:1] in "$\\ \n\t" or text[-1:] in ". \n\t" else text


Verdict = tuple[bool | None, str]  # None: undecided, the time was up

_known: dict[tuple[str, str], Verdict] = {}  # what algebra said: groups of completions repeat their answers
_MAX_KNOWN = 4096
_SETS = re.compile(r"\\(?:mathbb|setminus|cup|cap|infty|backslash)(?![A-Za-z])|[⦃⦄]")

_NOT_FORMULA = re.compile(
    r"\d\s*_|[$⟦⟧]|\\boxed|\\fbox"
)  # a base inside a formula would be ignored by math-verify


def _latex(text: str) -> str:
    """A canonical spelling as LaTeX for math-verify. Decimals become fractions, because it would round
    them."""
    text = re.sub(r"⟦deg⟧", r"\\cdot\\frac{\\pi}{180}", text.replace("%", r"\cdot\frac{1}{100}"))
    text = re.sub(r"(\d*)\.(\d+)", _decimal, text)
    for sign, command in (
        ("*", r"\cdot "),
        ("≤", r"\le "),
        ("≥", r"\ge "),
        ("≠", r"\ne "),
        ("⦃", r"\{"),
        ("⦄", r"\}"),
    ):
        text = text.replace(sign, command)
    return text.replace("⏎", r"\\").replace("⟨", r"\langle ").replace("⟩", r"\rangle ")


def _decimal(match: re.Match[str]) -> str:
    return rf"(\frac{{{(match[1] + match[2]).lstrip('0') or '0'}}}{{1{'0' * len(match[2])}}})"


def _formula(value: Value) -> str:
    """The canonical spelling of a value without its unit and its variable."""
    if value.kind == "number":
        top, bottom = value.data.numerator, value.data.denominator
        return rf"\frac{{{top}}}{{{bottom}}}" if max(abs(top), bottom) < 10**200 else "!!"
    return value.data if value.kind == "formula" else value.text


class _Comparison:
    """One comparison of two values, with a budget of seconds that all entries of a tuple or a set share."""

    def __init__(self, timeout: float):
        self.seconds_left = min(float(timeout), 3600.0) if timeout > 0 else 0.0

    def values(self, a: Value, b: Value) -> Verdict:
        """Compare two values of any kind. Symmetric."""
        if a.kind == b.kind and a.text == b.text:
            return True, "same after normalising"
        named = bool(a.variable) + bool(b.variable)
        if "equation" in (a.kind, b.kind) and (named or a.kind == b.kind):
            return self.algebra(a.text, b.text)
        if named == 2 and a.variable != b.variable:
            return (
                self.algebra(a.text, b.text)
                if a.kind == b.kind == "formula"
                else (False, "different variables")
            )
        if a.unit and b.unit and a.unit != b.unit:
            return False, "different units"
        return self.same_kind(a, b) if a.kind == b.kind else self.mixed(a, b)

    def same_kind(self, a: Value, b: Value) -> Verdict:
        match a.kind:
            case "number":
                return a.data == b.data, "percent" if ("%" in a.text) != (
                    "%" in b.text
                ) else "rational numbers"
            case "text" | "string":
                same = type(a.data) is type(b.data) and a.data == b.data
                return same, "words" if a.kind == "text" else "Python strings"
            case "seq":
                if a.data[:2] != b.data[:2]:
                    return False, "types: different brackets"
                return self.entries(a.data[2], b.data[2])
            case "ratio":
                return self.entries(a.data, b.data)
            case "matrix":
                if [len(row) for row in a.data] != [len(row) for row in b.data]:
                    return False, "matrices of different shape"
                return self.entries(sum(a.data, ()), sum(b.data, ()))
            case "set" | "union" | "dict":
                return self.unordered(a.data, b.data)
            case "opaque":
                return False, "refused: too large or unreadable"
        return self.algebra(_formula(a), _formula(b))

    def mixed(self, a: Value, b: Value) -> Verdict:
        """Two kinds: equal only if one is a set of one thing, or algebra may see through the difference."""
        for one, other in ((a, b), (b, a)):
            if one.kind == "set" and len(one.data) == 1:
                return self.values(one.data[0], other)
        kinds = {a.kind, b.kind}
        formula = next((v.data for v in (a, b) if v.kind == "formula"), "")
        letter = "text" in kinds and all(len(v.data) == 1 for v in (a, b) if v.kind == "text")
        if (
            kinds == {"number", "formula"}
            or (kinds == {"text", "formula"} and letter)
            or (kinds == {"matrix", "formula"} and r"\begin" in formula)
            or ("relation" in kinds and kinds <= {"relation", "seq", "union"})
            or (kinds <= {"formula", "seq", "union", "relation", "set"} and _SETS.search(formula))
        ):
            return self.algebra(_formula(a), _formula(b))
        if "opaque" in kinds:
            return False, "refused: too large or unreadable"
        return False, f"types: {min(kinds)} and {max(kinds)}"

    def entries(self, xs: tuple[Value, ...], ys: tuple[Value, ...]) -> Verdict:
        """Entries compared in order."""
        if len(xs) != len(ys):
            return False, "different numbers of entries"
        result: Verdict = (True, "entries agree")
        for x, y in zip(xs, ys, strict=True):
            verdict = self.values(x, y)
            if verdict[0] is False:
                return False, f"an entry differs: {verdict[1]}"
            if verdict[0] is None:
                result = verdict
        return result

    def unordered(self, xs: tuple[Value, ...], ys: tuple[Value, ...]) -> Verdict:
        """Every member of one equals a member of the other, and the other way round."""
        result: Verdict = (True, "members agree")
        for these, those in ((xs, ys), (ys, xs)):
            spellings = {(v.kind, v.text) for v in those}
            for v in these:
                if (v.kind, v.text) in spellings:
                    continue
                verdicts = [True if found else found for found in self._search(v, those)]
                if verdicts[-1:] == [True]:
                    continue
                if None not in verdicts:
                    return False, "a member is missing"
                result = (None, "timeout")
        return result

    def _search(self, v: Value, those: tuple[Value, ...]):
        for other in those:
            found = self.values(v, other)[0]
            yield found
            if found:
                return

    def algebra(self, a: str, b: str) -> Verdict:
        """Ask math-verify about two canonical spellings, in the child process."""
        for text in (a, b):
            if too_heavy(text):
                return False, "refused: too heavy to evaluate"
            if _NOT_FORMULA.search(text.replace("⟦deg⟧", "")) or text.count("{") != text.count("}"):
                return False, "refused: not a formula"
        pair = (a, b) if a < b else (b, a)  # math-verify is not symmetric; we are
        if (known := _known.get(pair)) is not None:
            return known
        request = {"gold": _latex(pair[0]), "answer": _latex(pair[1])}
        if self.seconds_left <= 0:
            return None, "timeout"
        reply, seconds = _worker.ask(request, self.seconds_left)
        self.seconds_left -= seconds
        if reply is None:
            return None, "timeout" if seconds else "no child process"
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        verdict = _known[pair] = (bool(reply["match"]), str(reply["reason"]))
        return verdict
