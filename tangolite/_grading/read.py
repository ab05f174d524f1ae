"""What an answer *is*: a number, words, a tuple, a set, an interval, an equation, a formula. The types must
agree before anything is compared, which is where string- and algebra-only graders go wrong (`\\{1,2\\}` is
not `(1,2)`, and the word `abc` is not the product a b c).

`read` is total: any text gives a `Value`. Kinds, and what `data` then holds:

    number    Fraction
    text      words, case-folded
    string    a quoted Python string
    seq       (left bracket, right bracket, entries): tuple, list, interval
    set       entries, whose order and repetition do not count; a list without brackets is one
    union     intervals
    dict      key-value pairs, each a seq
    matrix    rows of entries
    ratio     the parts of 3:2 or 12:00
    opaque    equal only to the same spelling: too large, too deep, no known shape
    equation, relation, formula   the canonical spelling, for algebra
"""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from tangolite._grading.exact import NotExact, TooBig, evaluate, nesting
from tangolite._grading.literals import Value, python_literal
from tangolite._grading.text import MAX_NESTING, closing, tidy
from tangolite._grading.units import split_unit

MAX_LENGTH = 2_000  # characters; longer answers are only equal to themselves
MAX_LITERAL = 10_000  # characters of a Python literal with strings in it, which is quick to read
MAX_ENTRIES = 200


@lru_cache(maxsize=4096)
def read(answer: str) -> Value:
    """Read an answer, LaTeX, plain or a Python literal. Never raises."""
    answer = answer.strip()
    if len(answer) > MAX_LITERAL or nesting(answer) > MAX_NESTING:
        return Value("opaque", answer, answer)
    literal = python_literal(answer)
    if literal is not None:
        return literal
    return _read(tidy(answer)) if len(answer) <= MAX_LENGTH else Value("opaque", answer, answer)


_SEPARATOR = re.compile(r"[,;]\s*⟦?\s*\b(?:and|or)\b\s*⟦?⟧?|⟦\s*(?:and|or)\s*⟧|\s\b(?:and|or)\b\s|[,;]")
_VARIABLE = (
    r"[A-Za-z]'?|[A-Z]{2,3}|\\(?!frac|sqrt|binom|pi|infty|sin|cos|tan|cot|log|ln)[a-z]+(?:\s*[A-Z]{1,3})?"
)
_HEAD = re.compile(
    rf"\s*(?P<name>(?:{_VARIABLE})(?:_\{{\w+\}})?(?:\s*\(\s*\w(?:\s*,\s*\w)*\s*\))?|\([a-z](?:\s*,\s*[a-z])*\)|"
    rf"⟦[^⟦⟧]*⟧|[A-Za-z]{{3,}}(?: [A-Za-z]+)*)\s*(?:=|\\in(?![A-Za-z]))\s*(?P<rest>[^=].*)",
    re.DOTALL,
)
_EQUALS = re.compile("=")
_RELATION = re.compile(r"\s*([<>≤≥≠])\s*")
_MATRIX = re.compile(
    r"[(\[]?\s*\\begin\{([pbB]?matrix|array)\}(?:\{[lcr|]*\})?(?P<rows>.*)\\end\{\1\}\s*[)\]]?", re.DOTALL
)
_BRACKETS = {"(": ")]", "[": ")]", "⦃": "⦄", "{": "}", "⟨": "⟩"}


def _read(text: str, depth: int = 0) -> Value:
    """Try the shapes in turn on a canonical spelling."""
    text = text.strip()
    if depth > MAX_NESTING or not text:
        return Value("opaque", text, text)
    if text[0] == "⟦" and closing(text, 0) == len(text) - 1:
        inside = text[1:-1]
        return replace(_read(tidy(inside), depth + 1), text=text)
    for shape in _SHAPES:
        value = shape(text, depth + 1)
        if value is not None:
            return value
    kind = "equation" if len(_split(text, _EQUALS)) > 1 else "formula"
    return Value(kind, _spelling(text), _spelling(text))


def _spelling(text: str) -> str:
    """Drop the blanks that mean nothing: all but those between letters or digits."""
    return re.sub(r"\s+", " ", re.sub(r"(?<![A-Za-z\d])\s+|\s+(?![A-Za-z\d])", "", text)).strip()


_OPENING = re.compile(r"[(\[{⦃⟨⟦]")


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split where the separator stands outside all brackets."""
    pieces, start, inside_until, opening = [], 0, 0, _OPENING.search(text)
    for match in separator.finditer(text):
        while opening and opening.start() < match.start():  # pass the brackets that open before it
            end = closing(text, opening.start())
            inside_until = max(inside_until, end + 1)
            opening = _OPENING.search(text, max(end, opening.start()) + 1)
        if match.start() >= inside_until:
            pieces.append(text[start : match.start()])
            start = match.end()
    return [*pieces, text[start:]]


def _matrix(text: str, depth: int) -> Value | None:
    match = _MATRIX.fullmatch(text)
    if not match or r"\begin" in match["rows"]:
        return None
    rows = [row for row in match["rows"].split("⏎") if row.strip()]
    cells = tuple(tuple(_read(cell, depth) for cell in row.split("&")) for row in rows)
    return Value("matrix", cells, _spelling(text))


def _entries(text: str, depth: int) -> tuple[Value, ...] | None:
    pieces = _split(text, _SEPARATOR)
    if len(pieces) > 1 and not pieces[-1].strip():
        pieces.pop()  # a Python 1-tuple, or a list with a trailing comma
    if len(pieces) > MAX_ENTRIES or not all(p.strip() for p in pieces):
        return None
    return tuple(_read(p, depth) for p in pieces)


def _bracketed(text: str, depth: int) -> Value | None:
    left, right = text[0], text[-1]
    if text == r"\emptyset":
        return Value("set", (), text)
    if right not in _BRACKETS.get(left, "-") or closing(text, 0) != len(text) - 1:
        return None
    inside = text[1:-1]
    if not inside.strip():
        return Value("set", (), text) if left in "⦃{" else Value("seq", (left, right, ()), text)
    if left == "⦃" and re.search(r"[|:]", inside):
        return Value("formula", _spelling(text), _spelling(text))  # {x | x > 0}
    single = len(_split(inside, re.compile("[,;]"))) == 1
    if single and (left + right == "()" or left == "{"):
        return _read(inside, depth)
    entries = _entries(inside, depth)
    if entries is None:
        return Value("opaque", text, text)
    if left in "⦃{":
        return Value("set", _flat(entries), _spelling(text))
    return Value("seq", (left, right, entries), _spelling(text))


def _flat(entries: tuple[Value, ...]) -> tuple[Value, ...]:
    """`1 ± √2` among the entries of a set stands for two of them."""
    return tuple(v for e in entries for v in (e.data if e.kind == "set" and r"\pm" in e.text else (e,)))


def _listing(text: str, depth: int) -> Value | None:
    """Several answers without brackets: `3, 5, 7`, `x=1 or x=2`, `1 ± √19`."""
    pieces = _split(text, _SEPARATOR)
    if len(pieces) > 1:
        entries = _entries(text, depth)
        if entries is None or any(e.kind == "text" and " " in e.data for e in entries):
            return None  # prose
        if all(e.kind == "seq" and _RELATION.search(e.text) for e in entries) and re.search(r"\bor\b", text):
            return Value("union", entries, _spelling(text))  # x<1 or x>5
        return Value("set", _flat(entries), _spelling(text))
    if re.search(r"\\(?:pm|mp)(?![A-Za-z])", text) and not re.search(r"[=<>≤≥]", text):
        both = (re.sub(r"\\pm(?![A-Za-z])", a, re.sub(r"\\mp(?![A-Za-z])", b, text)) for a, b in ("+-", "-+"))
        return Value("set", tuple(_read(b, depth) for b in both), _spelling(text))
    return None


def _headed(text: str, depth: int) -> Value | None:
    """`x=5`, `f(x)=2x`, `(x,y)=(1,2)`, `x \\in [0,1]`, `area = 12`: the value and the variable."""
    match = _HEAD.fullmatch(text)
    if not match or _RELATION.search(text):
        return _chain(text, depth)
    name = "" if re.match(r"⟦|[A-Za-z]{4}|[A-Za-z]+ ", match["name"]) else re.sub(r"\s", "", match["name"])
    value = _read(match["rest"], depth)
    if value.kind == "equation":
        return None
    return replace(value, variable=name, text=_spelling(text))


def _chain(text: str, depth: int) -> Value | None:
    """`5/2 = 2.5`: a number, if all parts are that number."""
    parts = _split(text, _EQUALS)
    if len(parts) < 2:
        return None
    values = [_number(p.strip(), depth) if p.strip() else None for p in parts]
    numbers = {v.data if v is not None and v.kind == "number" else None for v in values}
    return values[-1] if len(numbers) == 1 and None not in numbers else None


def _related(text: str, depth: int) -> Value | None:
    """`0 ≤ x < 1` is an interval of x; other relations are left to algebra."""
    operators = _RELATION.findall(text)
    if not operators or r"\begin" in text or "=" in text:
        return None
    sides = _RELATION.split(text)[::2]
    if len(_split(text, _RELATION)) != len(sides):
        return None  # inside brackets: a set, a sum
    if len(operators) > 2 or "≠" in operators:
        return Value("relation", _spelling(text), _spelling(text))
    if operators[0] in ">≥":  # read from small to large
        sides, operators = sides[::-1], [{">": "<", "≥": "≤"}.get(o, o) for o in reversed(operators)]
    if len(operators) == 1:
        if re.fullmatch(_VARIABLE, sides[0].strip()):
            sides, operators = [r"-\infty", *sides], ["<", *operators]
        else:
            sides, operators = [*sides, r"\infty"], [*operators, "<"]
    if any(o not in "<≤" for o in operators) or not re.fullmatch(_VARIABLE, sides[1].strip()):
        return Value("relation", _spelling(text), _spelling(text))
    ends = (_read(sides[0], depth), _read(sides[2], depth))
    left, right = "[" if operators[0] == "≤" else "(", "]" if operators[1] == "≤" else ")"
    return Value("seq", (left, right, ends), _spelling(text), variable=sides[1].strip())


def _measured(text: str, depth: int) -> Value | None:
    rest, unit = split_unit(text)
    if not unit and rest == text:
        return None
    if not rest:  # words in several places
        return Value("text", _fold(text), text)
    value = _read(rest, depth + 10)  # units do not pile up
    if unit == "percent":
        return _number(f"{rest}%", depth) or value
    if value.kind == "text" and len(value.data) > 1:
        return Value("text", _fold(text), text)
    return replace(value, unit=unit or value.unit, text=_spelling(text))


_BASE = re.compile(r"(\d+)_\{([2-9]|[12]\d|3[0-6])\}")


def _numeral(text: str, depth: int) -> Value | None:
    """A numeral in another base, which is to its digits what a unit is to a number."""
    match = _BASE.fullmatch(text.replace(" ", ""))
    if match and len(match[1]) < 200 and all(int(d) < int(match[2]) for d in match[1]):
        return Value("number", Fraction(int(match[1])), text, unit=f"base {match[2]}")
    return None


def _number(text: str, depth: int) -> Value | None:
    try:
        return Value("number", evaluate(text), _spelling(text))
    except NotExact:
        return None
    except TooBig:
        return Value("opaque", _spelling(text), _spelling(text))


def _united(text: str, depth: int) -> Value | None:
    parts = _split(text, re.compile(r"\\cup(?![A-Za-z])"))
    if len(parts) < 2 or len(parts) > MAX_ENTRIES:
        return None
    values = tuple(_read(p, depth) for p in parts)
    if all(v.kind == "seq" for v in values):
        return Value("union", values, _spelling(text))
    return None


def _ratio(text: str, depth: int) -> Value | None:
    parts = text.split(":")
    if len(parts) < 2:
        return None
    values = tuple(_number(p.strip(), depth) if p.strip() else None for p in parts)
    return None if None in values else Value("ratio", values, _spelling(text))


def _fold(text: str) -> str:
    words = re.sub(r"[⟦⟧{}\\$]", " ", text).casefold()
    return re.sub(r"\s+", " ", words).strip(" .,;:!?\"'`*")


def _words(text: str, depth: int) -> Value | None:
    """Words, which are never products of letters: two in a row are a word; beside an operator, four are."""
    bare = re.sub(r"\\(?:begin|end)\{[a-z]*\}|\\[A-Za-z]+", " ", text)
    longest = max((len(run) for run in re.findall(r"[^\W\d_]+", bare)), default=0)
    foreign = re.search(r"[^\W\d_]", bare) and not re.search(r"[^\W\d_]", bare, re.ASCII)
    operators = re.search(r"[+*/^=<>≤≥≠_|{}\\%]|^-|\s-|-\s|^\d", text)
    code = re.search(r"[A-Za-z]\d|[A-Za-z]{2}_", bare)
    lone = re.fullmatch(r"[^\W\d_]", text.strip(" .,;:!?"))
    if (
        "⟦" in text.replace("⟦deg⟧", "")
        or longest >= 4
        or code
        or foreign
        or lone
        or (longest >= 2 and not operators)
    ):
        return Value("text", _fold(text), text)
    return None


_SHAPES = (
    _matrix,
    _bracketed,
    _listing,
    _headed,
    _related,
    _measured,
    _numeral,
    _number,
    _united,
    _ratio,
    _words,
)
