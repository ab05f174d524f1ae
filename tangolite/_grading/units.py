"""Units of answers: finding one at the end of an answer, and one spelling for each. Nothing is converted."""

from __future__ import annotations

import re

_ALIASES = """
mm millimeter millimetre | cm centimeter centimetre | dm decimeter decimetre | m meter metre
km kilometer kilometre | in inch inche | ft foot feet | yd yard | mi mile | mg milligram | g gram gm
kg kilogram kilo | lb pound lbs | oz ounce | s sec second | min minute | h hr hour | day | week wk | month
yr year | ms millisecond | ml milliliter millilitre | l liter litre | gal gallon | cc | mph | kmh kph
deg degree | rad radian | c celsius | f fahrenheit | dollar usd $ buck | cent | eur euro | gbp
rs rupee inr | hz hertz | n newton | j joule | w watt | kw kilowatt | v volt | pa pascal | mol mole | k kelvin
am | pm | percent percentage pct
"""
CANONICAL = {w: g.split()[0] for g in _ALIASES.replace("\n", "|").split("|") if g.strip() for w in g.split()}
_GENERIC = {"unit", "units"}  # "16 square units" says nothing that "16" does not
_MODIFIERS = {"square", "sq", "squared", "cubic", "cu", "cubed", "per"}

_TEXT_UNIT = re.compile(r"(?P<rest>.*?)\s*(?P<unit>(?:⟦[^⟦⟧]*⟧\s*(?:\^\{-?\d\})?\s*/?\s*)+)", re.DOTALL)
_BARE_UNIT = re.compile(
    r"(?P<rest>.*(?:\d\.?|[)}%!]|\\pi))\s*(?P<unit>[A-Za-z]+\.?(?:[ /*]+[A-Za-z]+\.?|\^\{-?\d\})*)", re.DOTALL
)
_CURRENCY = re.compile(r"(?P<sign>-?)\s*(?P<unit>\\\$|⟦eur⟧|⟦gbp⟧)\s*(?P<rest>[-\d.\\].*)", re.DOTALL)


def _singular(word: str) -> str:
    for ending, stem in (("ies", "y"), ("ches", "ch"), ("shes", "sh"), ("xes", "x"), ("sses", "ss")):
        if word.endswith(ending) and len(word) > 4:
            return word[: -len(ending)] + stem
    return word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word


def canonical_unit(words: str) -> str:
    """One spelling of a unit: `square inches` and `sq. in.` are `in^2`, `meters per second` is `m/s`."""
    out, power, last = [], "", ""
    words = re.sub("[⟦⟧]", " ", words.casefold())
    for token in re.findall(r"[^\W\d_]+|\$|\^\{?-?\d\}?|/", words):
        if token in ("square", "sq", "cubic", "cu"):
            power = "^2" if token.startswith("sq") else "^3"
        elif token in ("squared", "cubed") or token[0] == "^":
            exponent = {"squared": "2", "cubed": "3"}.get(token) or token.strip("^{}")
            out.append("" if exponent == "1" else f"^{exponent}")
        elif token in ("/", "per"):
            out.append("/")
        elif token not in _GENERIC:
            separator = "" if not out or last in ("/", "per") else " "
            word = CANONICAL.get(token) or CANONICAL.get(_singular(token)) or _singular(token)
            out.append(separator + word + power)
            power = ""
        last = token
    unit = "".join(out)
    return "" if unit.startswith("^") else unit


def _is_bare_unit(words: str) -> bool:
    """Without `\\text` letters are a unit only if they cannot be variables: `3 cm`, `5 apples`, not `3x`."""
    tokens = re.findall(r"[A-Za-z]+", words)
    known = [t for t in tokens if CANONICAL.get(t.casefold()) or CANONICAL.get(_singular(t.casefold()))]
    if not any(len(t) > 1 for t in tokens):
        return re.fullmatch(r"m ?/ ?s(?:\^\{2\})?", words) is not None
    return any(len(t) >= 4 for t in tokens) or all(t in known or t in _MODIFIERS for t in tokens)


def split_unit(text: str) -> tuple[str, str]:
    """`15⟦ cm⟧^{2}` -> (`15`, `cm^2`); (`text`, ``) where no unit is found."""
    if match := _CURRENCY.fullmatch(text):
        return match["sign"] + match["rest"], canonical_unit(match["unit"].lstrip("\\"))
    if match := re.fullmatch(r"(.*\d)\s*\\\$", text, re.DOTALL):
        return match[1], "dollar"
    if (match := _TEXT_UNIT.fullmatch(text)) and re.search(r"[\d\\]|^[A-Za-z]$", match["rest"]):
        unit = canonical_unit(match["unit"])
        if unit == "deg" and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", match["rest"]):
            return text, ""  # the argument of a function, not a unit of the whole
        return ("", "") if "⟦" in match["rest"] else (match["rest"], unit)
    match = _BARE_UNIT.fullmatch(text)
    if match and re.search(r"\d", match["rest"]) and _is_bare_unit(match["unit"]):
        return match["rest"], canonical_unit(match["unit"])
    return text, ""
