"""Comparing two values that `read` has read: types first, then entries, and algebra only for formulas."""

from __future__ import annotations

import re
from collections.abc import Callable

from tangolite._grading.exact import too_heavy
from tangolite._grading.literals import Value

Verdict = tuple[bool | None, str]  # and the branch that decided; None: undecided, the time was up
Ask = Callable[[str, str], Verdict]  # what algebra says about two canonical spellings

MAX_STEPS = 50_000  # pairs of values that are looked at: sets of sets of sets multiply
_SET_SIGNS = re.compile(r"\\(?:mathbb|setminus|cup|cap|infty|backslash)(?![A-Za-z])|[⦃⦄]")
_NOT_FORMULA = re.compile(r"\d\s*_|[$⟦⟧]|\\boxed|\\fbox")  # math-verify would ignore a base inside a formula


class Comparison:
    """One comparison of two values; `ask` brings in algebra. Symmetric if `ask` is."""

    def __init__(self, ask: Ask):
        self.ask = ask
        self.steps = 0
        self.expired = False

    def values(self, a: Value, b: Value) -> Verdict:
        """Compare two values of any kind."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            return False, "refused: too many entries"
        if a.kind == b.kind and a.text == b.text:
            return True, "same after normalising"
        named = bool(a.variable) + bool(b.variable)
        if "equation" in (a.kind, b.kind) and (named or a.kind == b.kind):
            return self.algebra(a.text, b.text)
        if named == 2 and a.variable != b.variable:
            if {a.kind, b.kind} <= {"formula", "text"}:
                return self.algebra(a.text, b.text)  # y = 2x and x = y/2
            return False, "different variables"
        if a.unit and b.unit and a.unit != b.unit:
            return False, "different units"
        return self.same_kind(a, b) if a.kind == b.kind else self.mixed(a, b)

    def same_kind(self, a: Value, b: Value) -> Verdict:
        match a.kind:
            case "number":
                percent = ("%" in a.text) != ("%" in b.text)
                return a.data == b.data, "percent" if percent else "rational numbers"
            case "text":
                return a.data == b.data, "words"
            case "string":
                return type(a.data) is type(b.data) and a.data == b.data, "Python strings"
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
        if _algebra_may_tell(a, b):
            return self.algebra(_formula(a), _formula(b))
        kinds = {a.kind, b.kind}
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
                found = (v.kind, v.text) in spellings or self.member(v, those)
                if found is False:
                    return False, "a member is missing"
                if found is None:
                    result = (None, "timeout")
        return result

    def member(self, v: Value, those: tuple[Value, ...]) -> bool | None:
        """Whether a value is among others; None if it is not, as far as the time allowed to see."""
        undecided = False
        for other in those:
            match = self.values(v, other)[0]
            if match:
                return True
            undecided |= match is None
        return None if undecided else False

    def algebra(self, a: str, b: str) -> Verdict:
        """Ask about two canonical spellings, unless one of them is no formula or a monstrous one."""
        if self.expired:
            return None, "timeout"
        for text in (a, b):
            if too_heavy(text):
                return False, "refused: too heavy to evaluate"
            if _NOT_FORMULA.search(text.replace("⟦deg⟧", "")) or text.count("{") != text.count("}"):
                return False, "refused: not a formula"
        verdict = self.ask(a, b)
        self.expired = verdict[0] is None
        return verdict


def _formula(value: Value) -> str:
    """The canonical spelling of a value without its unit and its variable."""
    if value.kind == "number":
        top, bottom = value.data.numerator, value.data.denominator
        return rf"\frac{{{top}}}{{{bottom}}}" if max(abs(top), bottom) < 10**200 else "!!"  # "!!" is refused
    return value.data if value.kind == "formula" else value.text


def _algebra_may_tell(a: Value, b: Value) -> bool:
    """Kinds that differ by what was written, not by what is meant: 2 and a formula for 2, a letter, a set."""
    kinds = {a.kind, b.kind}
    formula = next((v.data for v in (a, b) if v.kind == "formula"), "")
    if "text" in kinds:
        return bool(formula) and all(len(v.data) == 1 for v in (a, b) if v.kind == "text")
    if "matrix" in kinds:
        return r"\begin" in formula
    if kinds == {"number", "formula"} or ("relation" in kinds and kinds <= {"relation", "seq", "union"}):
        return True
    return kinds <= {"formula", "seq", "union", "relation", "set"} and bool(_SET_SIGNS.search(formula))
