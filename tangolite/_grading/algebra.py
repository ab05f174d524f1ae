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
    a, b = read(gold), read(answer)
    if a is None or b is None:
        return {"match": False, "reason": "algebra cannot read it"}
    if _cases(gold) != _cases(answer):
        return {"match": False, "reason": "same letter in both cases"}
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr):
        return _compare_expressions(a, b)
    if isinstance(a, sympy.Eq) and isinstance(b, sympy.Eq):
        if _proportional(a.lhs - a.rhs, b.lhs - b.rhs):
            return {"match": True, "reason": "equations are proportional"}
    elif _family(a) != _family(b):
        return {"match": False, "reason": "algebra: types differ"}
    said = _verified(a, b)
    if said and not (_plain_numbers(a) and _plain_numbers(b)):
        return {"match": False, "reason": "algebra: equal only after rounding"}
    return {"match": said, "reason": "math-verify"}


def _verified(a, b) -> bool:
    return bool(verify(a, b, timeout_seconds=None) or verify(b, a, timeout_seconds=None))


def _compare_expressions(a: sympy.Expr, b: sympy.Expr) -> dict:
    """Values decide where they can be computed; math-verify where they cannot (unknown functions,
    divergence)."""
    seen = _same_values(a, b)
    if seen is None:
        return {"match": _verified(a, b), "reason": "math-verify"}
    return {"match": seen, "reason": f"{'equal' if seen else 'different'} at high precision"}


def _cases(latex: str) -> frozenset[str]:
    """Letters used in upper and in lower case side by side. math-verify reads `x` for both."""
    letters = set(re.sub(r"\\[A-Za-z]+", " ", latex))
    return frozenset(c for c in letters if c.islower() and c.upper() in letters)


def _family(x) -> str:
    """Coarse type: a set, an interval or a relation may stand for each other, nothing else may."""
    if isinstance(x, (sympy.Set, Relational)) or type(x).__name__ == "And":
        return "set"
    if isinstance(x, (sympy.MatrixBase, sympy.MatrixExpr)):
        return "matrix"
    return "tuple" if isinstance(x, sympy.Tuple) else "expression"


def _plain_numbers(x) -> bool:
    """Whether all numbers in it are rationals of moderate size, so that rounding cannot have made things
    equal."""
    return all(
        n.is_Rational and abs(n.p) <= 10**6 and n.q <= 10**6
        for n in x.doit().atoms(sympy.Number)
        if n.is_finite
    )


def _value(x: sympy.Expr, point: dict) -> sympy.Expr | None:
    try:
        value = x.subs(point).evalf(DIGITS, maxn=400)
    except Exception:
        return None
    parts = value.as_real_imag()
    return value if all(p.is_number and p.is_finite for p in parts) else None


def _points(*expressions: sympy.Expr) -> list[dict]:
    """Values for the free symbols; the letter i is the imaginary unit."""
    symbols = sorted(set().union(*(x.free_symbols for x in expressions)), key=str)
    if len([s for s in symbols if s.name != "i"]) > len(POINTS[0]):
        return []
    names = [s for s in symbols if s.name != "i"]
    unit = {s: sympy.I for s in symbols if s.name == "i"}
    return [unit | {s: sympy.Rational(v) for s, v in zip(names, row, strict=False)} for row in POINTS]


def _same_values(a: sympy.Expr, b: sympy.Expr) -> bool | None:
    """Whether two expressions agree at the points to 40 of 60 digits, relatively; None if that cannot be
    computed."""
    verdicts = []
    a, b = a.doit(), b.doit()  # before numbers go in: a sum to n has no value at n = 7/5, its closed form has
    for point in _points(a, b):
        u, v = _value(a, point), _value(b, point)
        if u is not None and v is not None:
            verdicts.append(_close(u, v))
        if not a.free_symbols and not b.free_symbols:
            break
    return all(verdicts) if verdicts else None


def _close(u: sympy.Expr, v: sympy.Expr) -> bool:
    if _vanishes(u) or _vanishes(v):
        return _vanishes(u) and _vanishes(v)
    return bool(abs(u - v) <= AGREE * max(abs(u), abs(v)))


def _vanishes(u: sympy.Expr) -> bool:
    """Zero, or a sum that cancelled until no digit was left (sympy then gives the result a precision of one
    bit)."""
    return all(p == 0 or getattr(p, "_prec", DIGITS) <= 1 for p in u.as_real_imag())


def _proportional(a: sympy.Expr, b: sympy.Expr) -> bool:
    ratios = []
    a, b = a.doit(), b.doit()
    for point in _points(a, b):
        u, v = _value(a, point), _value(b, point)
        if u is None or v is None or _vanishes(u) or _vanishes(v):
            return False
        ratios.append((u / v).evalf(DIGITS))
    return len(ratios) == len(POINTS) and all(_close(ratios[0], r) for r in ratios[1:])
