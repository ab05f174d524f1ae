"""`Value`, the result of reading an answer, and the reading of Python literals."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Value:
    """One answer, read. `text` is its canonical spelling, `unit` and `variable` (`x=5`) may be empty."""

    kind: str
    data: object
    text: str
    unit: str = ""
    variable: str = ""


_ESCAPES = r"""\\[\\'"abfnrtvxuU0-3\n]"""
_STRING = re.compile(rf"""[bB]?(?:'(?:[^'\\\n]|{_ESCAPES})*'|"(?:[^"\\\n]|{_ESCAPES})*")""")
_AROUND_STRINGS = re.compile(r"(?:[\s\[\](){},:.+\-\d]|(?<=[\d.])[eEjJ]|True|False|None|set\(\))*")


def python_literal(answer: str) -> Value | None:
    """A literal with strings or a dict in it. The text is parsed, never run, and only if it is made of
    nothing but strings, numbers, brackets, True, False and None; other literals read the same way as
    mathematics does.
    """
    if not re.match(r"[bB]?['\"]|[\[({]", answer) or not re.search(r"['\"]|\{[^{}]*:|\{\}", answer):
        return None
    if not _AROUND_STRINGS.fullmatch(_STRING.sub("", answer)):
        return None
    try:
        return _from_python(ast.literal_eval(answer), answer)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _from_python(thing: object, text: str = "") -> Value:
    text = text or repr(thing)
    if isinstance(thing, bool) or thing is None:
        return Value("text", text.casefold(), text)
    if isinstance(thing, int):
        return Value("number", Fraction(thing), text)
    if isinstance(thing, float) and math.isfinite(thing):
        return Value("number", Fraction(repr(thing)), text)  # the decimal written, not its binary neighbour
    if isinstance(thing, (tuple, list)):
        left, right = "()" if isinstance(thing, tuple) else "[]"
        return Value("seq", (left, right, tuple(_from_python(t) for t in thing)), text)
    if isinstance(thing, (set, frozenset)):
        return Value("set", tuple(_from_python(t) for t in thing), text)
    if isinstance(thing, dict):
        pairs = tuple(("", "", (_from_python(k), _from_python(v))) for k, v in thing.items())
        return Value("dict", tuple(Value("seq", pair, repr(pair)) for pair in pairs), text)
    return Value("string" if isinstance(thing, (str, bytes)) else "opaque", thing, repr(thing))
