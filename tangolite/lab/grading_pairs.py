"""Pairs of answers for `grading_audit`: at random, the same answer in other clothes, near misses, and made
ones.

`Pair.same` is the truth where it is known by construction, else None.
"""

from __future__ import annotations

import random
import re
from fractions import Fraction
from typing import NamedTuple

from tangolite._grading.exact import NotExact, TooBig, evaluate
from tangolite._grading.read import read
from tangolite._grading.text import tidy


class Pair(NamedTuple):
    """A gold answer, an answer, how the pair was made, and whether they are the same (None: not known)."""

    gold: str
    answer: str
    how: str
    same: bool | None = None


def _rational(text: str) -> Fraction | None:
    value = read(text)
    if (
        value.kind != "number"
        or value.unit
        or value.variable
        or not re.fullmatch(r"[-\d.,/ \\a-z{}!]+", text)
    ):
        return None
    try:
        return evaluate(tidy(text))
    except (NotExact, TooBig):
        return None


def _decimal(value: Fraction) -> str | None:
    rest = value.denominator
    for p in (2, 5):
        while rest % p == 0:
            rest //= p
    return None if rest != 1 or value.denominator > 10**6 else f"{float(value):.12f}".rstrip("0").rstrip(".")


def _bare(text: str) -> str:
    """Without its unit or its text command."""
    return re.sub(r"\\(?:text|mbox)\{[^{}]*\}(\^\d)?|\^\\circ|\\\$", "", text).strip()


def number_clothes(value: Fraction, rng: random.Random) -> dict[str, str]:
    """Spellings of a rational number."""
    top, bottom, k = value.numerator, value.denominator, rng.randint(2, 9)
    sign, plain = "-" if top < 0 else "", f"{top}/{bottom}" if bottom > 1 else str(top)
    out = {
        "extended fraction": rf"\frac{{{top * k}}}{{{bottom * k}}}",
        "slash": f"{top}/{bottom}",
        "short fraction": rf"{sign}\dfrac{{{abs(top)}}}{{{bottom}}}",
        "assignment": f"x = {plain}",
        "unicode minus": plain.replace("-", "−"),
        "product": rf"\frac{{{top}}}{{{bottom}}}\cdot 10^{{0}}",
        "unit added": rf"{plain}\text{{ cm}}",
    }
    if bottom == 1:
        out |= {
            "leading zeros": f"{sign}00{abs(top)}",
            "decimal zero": f"{top}.0",
            "text": rf"\text{{{top}}}",
        }
        out |= {"exponent": f"{top}e0", "thousands": f"{top:,}", "thin space": f"{top:,}".replace(",", r"\,")}
    elif abs(top) > bottom:
        out["mixed number"] = rf"{sign}{abs(top) // bottom}\frac{{{abs(top) % bottom}}}{{{bottom}}}"
    if decimal := _decimal(value):
        out |= {"decimal": decimal, "percent": f"{_decimal(value * 100)}\\%"}
    return out


def formula_clothes(answer: str) -> dict[str, str]:
    """Spellings of a formula that leave its value alone."""
    out = {"wide": re.sub(r"([+\-,=])", r" \1 ", answer), "dfrac": answer.replace(r"\frac", r"\dfrac")}
    if r"\left" not in answer:
        out["sized"] = answer.replace("(", r"\left(").replace(")", r"\right)")
    if read(answer).kind == "formula" and not re.search(r"=|\\pm|\\in|text|mbox|circ", answer):
        out |= {"doubled and halved": rf"\frac{{2({answer})}}{{2}}", "plus nothing": f"0 + {answer}"}
        out |= {"parentheses": f"({answer})", "minus minus": f"-(-({answer}))"}
    return out


def other_clothes(answer: str, rng: random.Random) -> Pair:
    """The same answer, written differently."""
    value, kind, unit = _rational(answer), read(answer).kind, read(answer).unit
    out = {
        "dollars": f"${answer}$",
        "full stop": f"{answer}.",
        "fbox": rf"\fbox{{{answer}}}",
        "blanks": f" {answer} ",
    }
    if value is not None:
        out = number_clothes(value, rng)
    elif kind == "text":
        word = re.sub(r"\\text|[{}]", "", answer)
        out |= {
            "upper case": word.upper(),
            "bare word": word,
            "word and stop": f"{word}.",
            "text": rf"\text{{{word}}}",
        }
    elif kind in ("formula", "seq", "set", "union"):
        out |= formula_clothes(answer)
    if kind == "set" and r"\{" not in answer and r"\pm" not in answer:
        parts = [p.strip() for p in answer.split(",")]
        out |= {"braces": rf"\{{{answer}\}}", "other order": ", ".join(reversed(parts))}
    if kind == "seq" and re.search(r"[\[\]]|infty", answer) and r"\in " not in answer:
        left, right, (low, high) = read(answer).data
        op = {"(": "<", "[": r"\le", ")": "<", "]": r"\le"}
        out["inequality"] = f"{low.text} {op[left]} x {op[right]} {high.text}"
    if unit and not unit.startswith("base"):
        out["unit omitted"] = _bare(answer)
    how = rng.choice(sorted(out))
    return Pair(answer, out[how], f"clothes: {how}", True)


def near_miss(answer: str, rng: random.Random) -> Pair:
    """An answer that is almost, but not, the given one."""
    digits = [m.start() for m in re.finditer(r"\d", answer)]
    kind, unit, value, out = read(answer).kind, read(answer).unit, _rational(answer), {}
    if digits:
        i = rng.choice(digits)
        out["digit"] = answer[:i] + str((int(answer[i]) + rng.randint(1, 9)) % 10) + answer[i + 1 :]
        if answer != "0" and kind != "equation":
            out["sign"] = answer[1:] if answer.startswith("-") else f"-{answer}"
    if kind == "seq" and r"\in " not in answer:
        inside = re.sub(r"\\left|\\right", "", answer).strip()
        entries = [e.strip() for e in inside[1:-1].split(",")]
        out["entries swapped"] = f"{inside[0]}{','.join(reversed(entries))}{inside[-1]}"
        out["set for tuple"] = rf"\{{{','.join(entries)}\}}"
        out["brackets"] = f"[{','.join(entries)}]" if inside[0] == "(" else f"({','.join(entries)})"
    if kind == "text":
        word = re.sub(r"\\text|[{}()]", "", answer)
        out["anagram"] = word[::-1] if len(word) > 1 else chr(ord(word) + 1)
    if value:
        out |= {
            "percent sign": f"{answer}\\%",
            "tiny": rf"{answer} + 10^{{-12}}",
            "ten times": rf"10\cdot {answer}",
        }
        out["six decimals"] = f"{float(value):.6f}" if _decimal(value) is None else f"{answer} + 0.0000001"
    if match := re.fullmatch(r"(\d*) ?\\sqrt\{?(\d+)\}?", answer):
        out["six decimals"] = f"{int(match[1] or 1) * int(match[2]) ** 0.5:.6f}"
    if kind == "formula" and not re.search(r"=|\\pm|\\in|text|mbox|circ", answer):
        out |= {"tiny": rf"{answer} + 10^{{-20}}", "one more": f"{answer} + 1"}
    if unit and not unit.startswith("base"):
        out["other unit"] = _bare(answer) + r" \text{ furlongs}"
    if not out:
        out["letter"] = f"{answer} + z"
    how = rng.choice(sorted(out))
    return Pair(answer, out[how], f"near miss: {how}", False)


def made_pair(rng: random.Random) -> Pair:
    """Kinds that a file of competition answers hardly holds."""
    a, b = rng.sample(range(2, 60), 2)
    word = "".join(rng.sample("abcdefghijklmnopqrstuvwxyz", rng.randint(3, 5)))
    made = {
        "tiny fractions": (rf"\frac{{1}}{{{a}^{{50}}}}", rf"\frac{{1}}{{{a}^{{51}}}}", False),
        "factorials": (rf"\frac{{1}}{{{1000 + a}!}}", rf"\frac{{1}}{{{1000 + a + 2}!}}", False),
        "tiny coefficients": (rf"{a}^{{-30}} \pi", rf"{a}^{{-31}} \pi", False),
        "letters of a word": (word, word[1:] + word[0], False),
        "true": ("True", r"\text{true}", True),
        "true is not 1": (rng.choice(["True", "Yes"]), "1", False),
        "list and tuple": (f"[{a}, {b}]", f"({a}, {b})", False),
        "list": (f"[{a}, {b}]", f"[{a}.0, {b}]", True),
        "strings": (f"['{word}', {a}]", f'["{word}", {a}]', True),
        "strings of other case": (f"'{word}'", f"'{word.upper()}'", False),
        "dict": (f"{{'{word}': {a}, 'z': {b}}}", f"{{'z': {b}, '{word}': {a}}}", True),
        "metres and centimetres": (rf"{a}\text{{ cm}}", rf"{a}\text{{ m}}", False),
        "squares": (rf"{a}\text{{ cm}}^2", rf"{a} cm", False),
        "a pair, not thousands": (f"({a},{100 + b})", f"{a}{100 + b}", False),
        "a list, not thousands": (f"{a},{b + 40}", f"{a}{b + 40}", False),
        "half and percent": (f"{a}.5\\%", f"0.{a * 10 + 5:03d}", True),
        "trailing letter": (str(a), f"{a} {rng.choice('cdghlmst')}", False),
        "base": (f"{a % 7 + 1}{b % 8}_9", f"{a % 7 + 1}{b % 8}_{{8}}", False),
        "radicals": (rf"\sqrt{{{a + b}+2\sqrt{{{a * b}}}}}", rf"\sqrt{{{a}}}+\sqrt{{{b}}}", True),
        "conjugate": (rf"\frac{{1}}{{{a}+\sqrt{{2}}}}", rf"\frac{{{a}-\sqrt{{2}}}}{{{a * a - 2}}}", True),
        "complex": (rf"({a}+i)^2", rf"{a * a - 1}+{2 * a}i", True),
        "factors": (rf"(x+{a})(x-{b})", rf"x^2+{a}x-{b}x-{a * b}", True),
        "line": (rf"y = {a}x+{b}", rf"{a}x-y+{b}=0", True),
        "other line": (rf"y = {a}x+{b}", rf"{a}x+y+{b}=0", False),
        "half-open": (rf"[{a},{a + b})", rf"{a} \le x < {a + b}", True),
        "open": (rf"[{a},{a + b})", rf"{a} < x < {a + b}", False),
        "two rays": (rf"(-\infty,{a}) \cup ({a + b},\infty)", rf"x<{a} \text{{ or }} x>{a + b}", True),
        "clock": (f"{a}:30", f"{a}", False),
        "hostile": (f"__import__('os').getpid() + {a}", str(a), False),
        "tower": (f"{a % 4 + 6}^{{9^{{9}}}}", f"{a % 4 + 6}^{{9^{{8}}}}", False),
        "either case": (rf"X^2 + {a}x", rf"x^2 + {a}x", False),
    }
    how = rng.choice(sorted(made))
    gold, answer, same = made[how]
    return Pair(gold, answer, f"made: {how}", same)


def pairs(answers: list[str], count: int, seed: int) -> list[Pair]:
    """Of ten pairs: three at random, three in other clothes, three near misses, one made."""
    rng, out = random.Random(seed), []
    for i in range(count):
        gold, turn = rng.choice(answers), i % 10
        if turn < 3:
            out.append(Pair(gold, rng.choice(answers), "random"))
        elif turn == 9:
            out.append(made_pair(rng))
        else:
            out.append((other_clothes if turn < 6 else near_miss)(gold, rng))
    return out
