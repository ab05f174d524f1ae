"""Does an answer equal the gold answer? The outcome reward of Tango (arXiv 2505.15034), and every evaluation.

Equality is mathematical, not of strings, and it is an equivalence: symmetric, and transitive except where a
missing unit is forgiven. In order:

1. Both texts are read in this process (`_grading`): spelling is made uniform, types are told apart, rational
   numbers are `Fraction`s. Most pairs are decided here, in microseconds.
2. Only formulas (roots, pi, letters) go on to math-verify, in a child process that is killed when it takes
   too long, and its verdict is checked numerically. Power towers and large factorials never get there.

What was decided where the field disagrees:

- 50% is 0.5 and not 50. A decimal is the number it writes, so 0.333 is not 1/3.
- A missing unit is forgiven, a different one is not, nothing is converted. The base of a numeral (52_8)
  counts as its unit.
- Commas separate thousands in groups of exactly three outside brackets, and entries otherwise.
- A list without brackets is a set. Sets, tuples (also intervals) and lists are different things.
- Words are compared without case and are never products of letters; quoted Python strings must be the same.
- True is not 1, [1, 2] is not (1, 2), 1.0 is 1.
"""

from __future__ import annotations

import atexit
import logging
import re
from typing import Literal, NamedTuple

from tangolite._grading.compare import Ask, Comparison, Verdict
from tangolite._grading.read import read
from tangolite._grading.text import to_latex, unwrap
from tangolite._grading.worker import Worker

Status = Literal["match", "differ", "no_answer", "no_gold", "timeout"]

logger = logging.getLogger(__name__)

_INTEGER = re.compile(r"[+-]?[0-9]{1,15}")
_MAX_KNOWN = 4096
_known: dict[tuple[str, str], Verdict] = {}  # what algebra said: groups of completions repeat their answers
_worker = Worker()
atexit.register(_worker.close)


class Grade(NamedTuple):
    """A verdict and the branch that gave it."""

    status: Status
    reason: str


def answers_match(answer: str | None, gold: str | None, *, timeout: float = 5.0) -> bool:
    """Whether an answer equals the gold answer, both the contents of a box or bare (one `\\boxed{}` is fine).

    Never raises, never evaluates code, gives up after `timeout` seconds of algebra (the first call that needs
    any also waits for the child process), and works in any thread or process. False also where nothing could
    be decided: see `answers_status`.
    """
    return grade(answer, gold, timeout=timeout).status == "match"


def answers_status(answer: str | None, gold: str | None, *, timeout: float = 5.0) -> Status:
    """Like `answers_match`, telling apart what is not a wrong answer.

    "no_gold": nothing to compare with, leave the problem out of the statistics. "no_answer": None or blank.
    "timeout": undecided after `timeout` seconds, or because the child process cannot run.
    """
    return grade(answer, gold, timeout=timeout).status


def explain(answer: str | None, gold: str | None, *, timeout: float = 5.0) -> str:
    """The name of the branch that decided: "rational numbers", "types: seq and set", "math-verify", ..."""
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
    comparison = Comparison(_ask_within(timeout))
    try:
        match, reason = comparison.values(read(gold), read(answer))
    except Exception:  # no input is known to do this, and a reward must not stop a run that takes days
        logger.exception("The comparison of two answers failed; they count as different.")
        match, reason = False, "internal error"
    return Grade("timeout" if match is None else "match" if match else "differ", reason)


def worker_restarts() -> int:
    """How often this process had to replace its child process, after a timeout or a death."""
    return _worker.restarts


def _as_text(answer: object) -> str:
    """The text of an answer (a gold answer may come as a number from JSON), without what encloses it."""
    if answer is None:
        return ""
    try:
        text = answer if isinstance(answer, str) else str(answer)
    except Exception:
        return ""
    return unwrap(text) if text[:1] in "$\\ \n\t" or text[-1:] in ". \n\t" else text


def _ask_within(timeout: float) -> Ask:
    """A function that asks algebra about two spellings, with one budget of seconds for all its calls."""
    left = min(float(timeout), 3600.0) if timeout > 0 else 0.0

    def ask(a: str, b: str) -> Verdict:
        nonlocal left
        pair = (a, b) if a < b else (b, a)  # math-verify is not symmetric; we are
        if (known := _known.get(pair)) is not None:
            return known
        if left <= 0:
            return None, "timeout"
        reply, seconds = _worker.ask({"gold": to_latex(pair[0]), "answer": to_latex(pair[1])}, left)
        left -= seconds
        if reply is None:
            return None, "timeout" if seconds else "no child process"
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        verdict = _known[pair] = (bool(reply["match"]), str(reply["reason"]))
        return verdict

    return ask
