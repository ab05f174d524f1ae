"""Typographic characters and what they stand for in the canonical spelling of `text`."""

from __future__ import annotations

SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n", strict=True))
SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_FRACTIONS = "½ 1/2 ⅓ 1/3 ⅔ 2/3 ¼ 1/4 ¾ 3/4 ⅕ 1/5 ⅖ 2/5 ⅗ 3/5 ⅘ 4/5"
_FRACTIONS += " ⅙ 1/6 ⅚ 5/6 ⅐ 1/7 ⅛ 1/8 ⅜ 3/8 ⅝ 5/8 ⅞ 7/8"
_COMMANDS = (
    "α alpha β beta γ gamma δ delta ε epsilon ζ zeta η eta θ theta κ kappa λ lambda μ mu ν nu ξ xi π pi "
    "ρ rho σ sigma τ tau φ phi χ chi ψ psi ω omega Δ Delta Σ Sigma Φ Phi Ω Omega ∞ infty √ sqrt ∪ cup "
    "∩ cap ∈ in ± pm ∓ mp ∅ emptyset"
)
_SIGNS = "× * · * ⋅ * ∙ * ÷ / ∕ / ⁄ / ⩽ ≤ ⩾ ≥ ′ ' ’ ' ‘ ' “ \" ” \" € ⟦eur⟧ £ ⟦gbp⟧ ° ^\\circ º ^\\circ"


def _pairs(table: str) -> list[tuple[str, str]]:
    words = table.split()
    return list(zip(words[::2], words[1::2], strict=True))


CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63", "-"),
        **dict.fromkeys(
            "\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000~", " "
        ),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff⟦⟧⦃⦄⏎", ""),  # invisible, or with a meaning of ours
        **{chr(0xFF01 + i): chr(0x21 + i) for i in range(94)},  # full-width forms of ASCII
        **{c: "\\frac{{{}}}{{{}}}".format(*fraction.split("/")) for c, fraction in _pairs(_FRACTIONS)},
        **{c: f"\\{name} " for c, name in _pairs(_COMMANDS)},
        **{c: sign + " " * sign.startswith("^") for c, sign in _pairs(_SIGNS)},
    }
)
