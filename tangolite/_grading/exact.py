"""Exact arithmetic on answers, with limits, and the guard that keeps monstrous ones away from algebra.

`evaluate` reads a canonical spelling (`text.tidy`) made of numbers, `+ - * / ^ ! %`, `\\frac`, `\\binom`,
brackets and mixed numbers, and nothing else. Its values are `Fraction`s: 1/3**50 and 1/3**51 differ, whatever
the number of decimals that a float would keep.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

from tangolite._grading.text import MAX_NESTING

MAX_DIGITS = 10_000  # of any number on the way: 7^(7^7) alone has 695 975
MAX_BITS = int(MAX_DIGITS * math.log2(10))
MAX_EXPONENT = 10_000
MAX_FACTORIAL = 3_248  # the largest n with fewer than 10^4 digits in n!
MAX_LITERAL = 4_000  # digits that are typed; Python itself refuses to read more than 4300
MAX_FORMULA = 500  # characters of a formula that is handed to algebra
MAX_TOWER = 3  # e^{e^{e^{x}}} is refused


class TooBig(Exception):
    """A number on the way would have more than `MAX_DIGITS` digits."""


class NotExact(Exception):
    """The text is not a rational number written with the operations known here."""


_NUMBER = re.compile(
    r"(?P<whole>\d*)(?:\.(?P<part>\d*)(?:\\overline\{(?P<period>\d+)\})?)?(?:[eE](?P<power>[+-]?\d+))?"
)
_MIXED = re.compile(r"\s*\\frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}(?!\s*\^)")
_MIXED_SLASH = re.compile(r"\s*([+-]?)\s*(\d+) +(\d+)\s*/\s*(\d+)\s*")


def _integer(digits: str) -> int:
    digits = digits.lstrip("0") or "0"
    if len(digits) > MAX_LITERAL:
        raise TooBig
    return int(digits)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise NotExact  # a root: algebra decides
    if base == 0 and exponent <= 0:
        raise NotExact
    if abs(base) == 1:
        return base ** int(exponent % 2)
    if base and abs(exponent) > MAX_BITS / math.log2(max(abs(base.numerator), base.denominator)):
        raise TooBig
    return base ** int(exponent)


def _factorial(n: Fraction) -> Fraction:
    if n.denominator != 1 or n < 0:
        raise NotExact
    if n > MAX_FACTORIAL:
        raise TooBig
    return Fraction(math.factorial(int(n)))


class _Reader:
    """Recursive descent over one text; `bits` counts the size of all results, so the work is bounded too."""

    def __init__(self, text: str):
        self.text, self.at, self.bits = text, 0, 0

    def peek(self) -> str:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1
        return self.text[self.at : self.at + 1]

    def take(self, expected: str) -> None:
        if self.peek() != expected:
            raise NotExact
        self.at += 1

    def kept(self, value: Fraction) -> Fraction:
        bits = max(value.numerator.bit_length(), value.denominator.bit_length())
        self.bits += bits
        if bits > MAX_BITS or self.bits > 20 * MAX_BITS:
            raise TooBig
        return value

    def sum(self) -> Fraction:
        total = self.product()
        while (sign := self.peek()) and sign in "+-":
            self.at += 1
            term = self.product()
            total = self.kept(total + term if sign == "+" else total - term)
        return total

    def product(self) -> Fraction:
        result = self.signed()
        while operator := self.peek():
            if operator in "*/":
                self.at += 1
                factor = self.signed()
            elif (
                operator in "({"
                or (operator.isdigit() and self.text[self.at - 1] in ")}")
                or self.text.startswith((r"\frac", r"\binom"), self.at)
            ):
                factor = self.powered()
            else:
                break
            if operator == "/" and factor == 0:
                raise NotExact
            result = self.kept(result / factor if operator == "/" else result * factor)
        return result

    def signed(self) -> Fraction:
        negative = False
        while (sign := self.peek()) and sign in "+-":
            negative ^= sign == "-"
            self.at += 1
        value = self.powered()
        return -value if negative else value

    def powered(self) -> Fraction:
        value = self.atom()
        if self.peek() == "^":
            self.take("^")
            value = self.kept(_power(value, self.group("{", "}")))
            if self.peek() == "^":
                raise NotExact  # a^b^c is not LaTeX
        while (mark := self.peek()) and mark in "!%":
            self.at += 1
            if mark == "!" and self.peek() == "!":
                raise NotExact  # a double factorial
            value = self.kept(_factorial(value) if mark == "!" else value / 100)
        return value

    def group(self, left: str, right: str) -> Fraction:
        self.take(left)
        value = self.sum()
        self.take(right)
        return value

    def atom(self) -> Fraction:
        first = self.peek()
        if (first.isdigit() and first.isascii()) or first == ".":
            return self.number()
        if first in ("(", "{", "["):
            return self.group(first, {"(": ")", "{": "}", "[": "]"}[first])
        if self.text.startswith(r"\frac", self.at):
            self.at += len(r"\frac")
            numerator, denominator = self.group("{", "}"), self.group("{", "}")
            if denominator == 0:
                raise NotExact
            return self.kept(numerator / denominator)
        if self.text.startswith(r"\binom", self.at):
            self.at += len(r"\binom")
            n, k = self.group("{", "}"), self.group("{", "}")
            return self.kept(_factorial(n) / (_factorial(k) * _factorial(n - k)))
        raise NotExact

    def number(self) -> Fraction:
        match = _NUMBER.match(self.text, self.at)
        self.at = match.end()
        if not match["whole"] and not match["part"] and not match["period"]:
            raise NotExact
        part = match["part"] or ""
        value = Fraction(_integer((match["whole"] or "") + part), 10 ** len(part))
        if match["period"]:
            value += Fraction(_integer(match["period"]), (10 ** len(match["period"]) - 1) * 10 ** len(part))
        if match["power"]:
            if len(match["power"]) > 6:
                raise TooBig
            value *= _power(Fraction(10), Fraction(int(match["power"])))
        mixed = _MIXED.match(self.text, self.at)
        if mixed and match.group().isdigit() and 0 < _integer(mixed[1]) < _integer(mixed[2]):
            self.at = mixed.end()  # 2\frac{1}{3} is 7/3; 2\frac{7}{3} is a product
            value += Fraction(_integer(mixed[1]), _integer(mixed[2]))
        return self.kept(value)


def evaluate(text: str) -> Fraction:
    """The rational number that a canonical spelling writes.

    Raises `NotExact` if it writes none, and `TooBig` rather than compute with more than 10^4 digits.
    """
    if nesting(text) > MAX_NESTING:
        raise NotExact
    if match := _MIXED_SLASH.fullmatch(text):  # "2 1/3"
        whole, top, bottom = (_integer(d) for d in match.group(2, 3, 4))
        if 0 < top < bottom:
            return (whole + Fraction(top, bottom)) * (-1 if match[1] == "-" else 1)
        raise NotExact
    reader = _Reader(text)
    value = reader.sum()
    if reader.peek():
        raise NotExact
    return value


def nesting(text: str) -> int:
    """How deep the brackets of a text go."""
    depth = deepest = 0
    for character in text:
        if character in "([{⦃⟨⟦":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}⦄⟩⟧":
            depth = max(0, depth - 1)
    return deepest


def too_heavy(formula: str) -> bool:
    """Whether a formula must not be given to computer algebra, which would evaluate it for hours.

    A first sieve, meant to be quick; what slips through is stopped by the clock of the worker process.
    """
    if len(formula) > MAX_FORMULA or nesting(formula) > MAX_NESTING or _tower(formula) >= MAX_TOWER:
        return True
    if re.search(r"\d{200}|!\s*!|\^(?!\{)|\^\{[^{}]*\}\s*\^", formula):
        return True
    powers = (_braced(formula, m.end() - 1)[0] for m in re.finditer(r"\^\{", formula))
    factorials = (_operand_before(formula, m.start()) for m in re.finditer("!", formula))
    binomials = (_braced(formula, m.end() - 1)[0] for m in re.finditer(r"\\binom\{", formula))
    return (
        any(_beyond(p, MAX_EXPONENT) for p in powers)
        or any(_beyond(f, MAX_FACTORIAL) for f in factorials)
        or any(_beyond(b, MAX_FACTORIAL) for b in binomials)
    )


def _tower(text: str) -> int:
    """How many powers stand on one another: 0 for `x`, 2 for `e^{x^{2}}`."""
    opened: list[bool] = []  # of every brace that is open: is it a power's?
    highest = 0
    for i, character in enumerate(text):
        if character == "{":
            opened.append(text[i - 1 : i] == "^")
            highest = max(highest, sum(opened))
        elif character == "}" and opened:
            opened.pop()
    return highest


def _braced(text: str, start: int) -> tuple[str, int]:
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start + 1 : i], i + 1
    return text[start + 1 :], len(text)


def _operand_before(text: str, end: int) -> str:
    match = re.search(r"\d+\s*$", text[:end])
    if match:
        return match.group()
    depth = 0
    for i in range(end - 1, -1, -1):
        depth += (text[i] in ")}") - (text[i] in "({")
        if depth == 0:
            return text[i:end]
    return text[:end]


def _beyond(text: str, limit: int) -> bool:
    try:
        return abs(evaluate(text)) > limit
    except TooBig:
        return True
    except NotExact:
        return bool(re.search(r"\d{6}", text))
