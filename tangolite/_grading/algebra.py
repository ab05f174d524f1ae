"""What the worker process does with two formulas: math-verify reads and compares them, and its verdict is
checked.

math-verify compares numbers by rounding to absolute decimals, so two small numbers are equal to it, and it
drops units, bases and types on the way. Units, types and rational numbers never get here (`grading` deals
with them). What remains are formulas: both are evaluated at a few points to 60 digits, and where that can be
done it decides. All else (relations, sets, unknown functions) is math-verify's verdict, refused where
rounding could have made it.

Only math-verify's LaTeX grammar reads the text. Its other reader, for plain expressions, goes through sympy's
`parse_expr`, which evaluates Python, and is left out.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.relational import Relational

logging.disable(logging.CRITICAL)  # math-verify warns that its timeouts are off; that is the point

DIGITS = 60
AGREE = sympy.Float(10) ** -40  # relative
POINTS = (  # both signs, so that |x| and x differ; small denominators, or sympy factors for minutes
    ("7/5", "-13/11", "17/7", "-19/23", "31/13", "-37/29"),
    ("-12/7", "23/19", "-11/13", "29/17", "-8/31", "41/23"),
    ("25/11", "14/13", "-27/17", "-43/19", "9/29", "-16/37"),
)
_CONFIG = LatexExtractionConfig(
    normalization_config=NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="last"
    )
)


@lru_cache(maxsize=512)
def read(latex: str):
    """The sympy object that math-verify's LaTeX grammar makes of a formula, or None."""
    found = parse(rf"\boxed{{{latex}}}", [_CONFIG], fallback_mode="no_fallback", parsing_timeout=None)
    return found[0] if found else None


def compare(gold: str, answer: str) -> dict:
    """`{"match": bool, "reason": str}` for two formulas in LaTeX."""
    if _cases(gold) != _cases(answer):
        return {"match": False, "reason": "same letter in both cases"}
    a, b = map(read, _one_case(gold, answer))
    if a is None or b is None:
        return {"match": False, "reason": "algebra cannot read it"}
    if _family(a) != _family(b):
        return {"match": False, "reason": "algebra: types differ"}
    if isinstance(a, sympy.Eq) and isinstance(b, sympy.Eq):
        if _proportional(a, b):
            return {"match": True, "reason": "equations are proportional"}
    elif isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        seen = _same_values(a, b)
        if seen is not None:
            return {"match": seen, "reason": f"{'equal' if seen else 'different'} at high precision"}
    said = bool(verify(a, b, timeout_seconds=None) or verify(b, a, timeout_seconds=None))
    if said and not (_plain_numbers(a) and _plain_numbers(b)):
        return {"match": False, "reason": "algebra: equal only after rounding"}
    return {"match": said, "reason": "math-verify"}


def _cases(latex: str) -> frozenset[str]:
    """Letters used in upper and in lower case side by side. math-verify reads `x` for both."""
    letters = set(re.sub(r"\\[A-Za-z]+", " ", latex))
    return frozenset(c for c in letters if c.islower() and c.upper() in letters)


def _one_case(*formulas: str) -> list[str]:
    """Where X and x are two variables, give X a letter of its own."""
    unused = [c for c in "zyxwvutsrqponmlkjhgfcba" if not any(c in f.lower() for f in formulas)]
    new = dict(zip((c.upper() for c in sorted(_cases(formulas[0]))), unused, strict=False))
    return [re.sub(r"\\[A-Za-z]+|[A-Z]", lambda m: new.get(m.group(), m.group()), f) for f in formulas]


def _family(x) -> str:
    """Coarse type: a set, an interval or a relation may stand for each other, nothing else may."""
    if isinstance(x, (sympy.Set, Relational)) or type(x).__name__ == "And":
        return "set"
    if isinstance(x, (sympy.MatrixBase, sympy.MatrixExpr)):
        return "matrix"
    return "tuple" if isinstance(x, sympy.Tuple) else "expression"


def _plain_numbers(x) -> bool:
    """Whether all its numbers are rationals of moderate size: no rounding can have made things equal."""
    numbers = [n for n in _done(x).atoms(sympy.Number) if n.is_finite]
    return all(n.is_Rational and abs(n.p) <= 10**6 and n.q <= 10**6 for n in numbers)


def _done(x):
    """With sums, limits and integrals carried out, if sympy can."""
    try:
        return x.doit()
    except Exception:
        return x


def _value(x: sympy.Expr, point: dict) -> sympy.Expr | None:
    try:
        value = x.subs(point).evalf(DIGITS, maxn=400)
        parts = value.as_real_imag()
    except Exception:
        return None
    return value if all(p.is_number and p.is_finite for p in parts) else None


def _points(*expressions: sympy.Expr) -> list[dict]:
    """Values for the free symbols, by their names; the letter i is the imaginary unit."""
    symbols = set().union(*(x.free_symbols for x in expressions))
    names = sorted({s.name for s in symbols} - {"i"})
    if len(names) > len(POINTS[0]):
        return []
    rows = [dict(zip(names, map(sympy.Rational, row), strict=False)) | {"i": sympy.I} for row in POINTS]
    return [{s: row[s.name] for s in symbols} for row in (rows if names else rows[:1])]


def _same_values(a: sympy.Expr, b: sympy.Expr) -> bool | None:
    """Whether two expressions agree at the points to 40 of 60 digits; None if neither can be computed."""
    a, b = _done(a), _done(b)  # before numbers go in: a sum to n has no value at n = 7/5, its closed form has
    values = ((_value(a, point), _value(b, point)) for point in _points(a, b))
    verdicts = [_close(u, v) for u, v in values if u is not None and v is not None]
    return all(verdicts) if verdicts else None


def _close(u: sympy.Expr, v: sympy.Expr) -> bool:
    if _vanishes(u) or _vanishes(v):
        return _vanishes(u) and _vanishes(v)
    return bool(abs(u - v) <= AGREE * max(abs(u), abs(v)))


def _vanishes(u: sympy.Expr) -> bool:
    """Zero, or a sum that cancelled until no digit was left, which sympy marks by a precision of one bit."""
    return all(p == 0 or getattr(p, "_prec", DIGITS) <= 1 for p in u.as_real_imag())


def _proportional(a: sympy.Eq, b: sympy.Eq) -> bool:
    """Whether one equation is a constant multiple of the other."""
    if not all(isinstance(side, sympy.Expr) for side in (*a.args, *b.args)):
        return False  # x = {2, -2}
    a, b = _done(a.lhs - a.rhs), _done(b.lhs - b.rhs)
    values = [(_value(a, point), _value(b, point)) for point in _points(a, b)]
    if len(values) < len(POINTS) or any(w is None or _vanishes(w) for pair in values for w in pair):
        return False
    ratios = [(u / v).evalf(DIGITS) for u, v in values]
    return all(_close(ratios[0], r) for r in ratios[1:])
