"""From what a model wrote to one canonical spelling of it: the first stage of `grading`.

Nothing is interpreted here. `tidy` only removes differences of spelling: typographic characters, LaTeX
spacing and sizing commands, `\\dfrac` and `\\frac12`, `1{,}234` and `1\\,234`, `$...$`, `\\boxed{...}`.
Meaning is read in `read`. In the canonical spelling one character stands for each thing that LaTeX writes in
several ways:

    ⦃ ⦄  braces of a set      ⟨ ⟩  angle brackets      ⟦words⟧  text, a unit, a degree sign
    * /  product, quotient    ≤ ≥ ≠  relations         %  percent                      ⏎  end of a matrix row
"""

from __future__ import annotations

import re

from tangolite._grading.characters import CHARACTERS, SUBSCRIPTS, SUPERSCRIPTS

MAX_NESTING = 30  # of brackets and of commands within commands; deeper text is not read

_FUNCTIONS = "sqrt|arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|exp"
_TEXT_MACROS = "text|mbox|hbox|textbf|textit|textrm|textnormal|textsf|mathrm|operatorname|rm"
_STYLE_MACROS = "mathbf|mathit|boldsymbol|bm|mathsf|mathnormal|bf|it|pmb|overrightarrow"
_LETTERS = tuple("deiknxyz")  # \mathrm{e} is a number, \mathrm{m} after a number a unit
_DEGREE = r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))"

_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*(?:\.(?!\d))?", ""),
        (r"(?<=\d)(?:\{,\}|,\s*\\!\s*)(?=\d{3}(?!\d))", ""),
        (r"\{,\}", ","),
        (r"\\!|\\(?:displaystyle|textstyle|limits|nolimits|strut)(?![A-Za-z])", ""),
        (r"\\[,;:> \n]|\\(?:q?quad|(?:thin|en)?space)(?![A-Za-z])|\\hspace\*?\{[^{}]*\}|[ \t\r\n\f\v]+", " "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\(?:leqslant|leqq|leq|le)(?![A-Za-z])|<=|=<", "≤"),
        (r"\\(?:geqslant|geqq|geq|ge)(?![A-Za-z])|>=", "≥"),
        (r"\\(?:neq|ne)(?![A-Za-z])|(?<![\d)}])!=", "≠"),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\*\*", "^"),
        (r"\\(?:cdot|times|ast)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "/"),
        (rf"{_DEGREE}\s*([CFK])(?![A-Za-z])", r"⟦deg \1⟧"),
        (_DEGREE, "⟦deg⟧"),
        (r"\\(?:text)?degrees?(?![A-Za-z])", "⟦deg⟧"),
        (r"\\%", "%"),
        (r"\\(?:\{|lbrace(?![A-Za-z]))", "⦃"),
        (r"\\(?:\}|rbrace(?![A-Za-z]))", "⦄"),
        (r"\\langle(?![A-Za-z])", "⟨"),
        (r"\\rangle(?![A-Za-z])", "⟩"),
        (r"\\(?:[lr]?vert|mid)(?![A-Za-z])", "|"),
        (r"\\(?:varnothing|emptyset)(?![A-Za-z])", r"\\emptyset"),
        (r"(?<![\w)}\]])\s*\+\s*\\infty", r"\\infty"),
        (rf"(?<![A-Za-z\\])({_FUNCTIONS})(?=\s*[(\d\\^]|\s+[a-zA-Z](?![A-Za-z]))", r"\\\1"),
        (r"(?<![A-Za-z\\])(?:(?i:infinity)|infty|(?<=[-+,(\[])oo)(?![A-Za-z])", r"\\infty"),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])|^(?i:pi)$", r"\\pi"),
    ]
]


def closing(s: str, start: int) -> int:
    """Index of the bracket that closes `s[start]` (any of `{ ( [ ⦃ ⟨ ⟦`), or -1. `(0, 1]` is closed."""
    depth = 0
    for i in range(start, len(s)):
        if s[i] in "{([⦃⟨⟦":
            depth += 1
        elif s[i] in "})]⦄⟩⟧":
            depth -= 1
            if depth == 0:
                return i
    return -1


def unwrap(s: str) -> str:
    """Take off what merely encloses an answer: `$...$`, `\\(...\\)`, `\\boxed{...}`, a final full stop."""
    while True:
        before = s
        s = s.strip()
        if s.endswith(".") and not s.endswith(".."):
            s = s[:-1].rstrip()
        for left, right in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            inside = s[len(left) : -len(right)]
            closed = len(s) >= len(left) + len(right) and s.startswith(left) and s.endswith(right)
            if closed and left not in inside and not inside.endswith("\\"):
                s = inside
        match = re.match(r"\\(?:boxed|fbox|framebox|box)\s*\{", s)
        if match and closing(s, match.end() - 1) == len(s) - 1:
            s = s[match.end() : -1]
        if s == before:
            return s


def _dollars(s: str) -> str:
    """Delete paired `$`, which only switch to mathematics; any other `$` is a currency sign."""
    parts = re.split(r"(?<!\\)\$", s)
    pairs = parts[1::2]
    if len(parts) % 2 and all(p and p == p.strip() for p in pairs):
        return "".join(parts)
    return r"\$".join(parts)


def _macro(s: str, names: str, rewrite) -> str:
    """Replace every `\\name{content}` by `rewrite(content)`, braces balanced, innermost text included."""
    pattern = re.compile(rf"\\(?:{names})(?![A-Za-z])\*?\s*\{{")
    position = 0
    while match := pattern.search(s, position):
        end = closing(s, match.end() - 1)
        if end < 0:
            return s
        inside = s[match.end() : end]
        s = s[: match.start()] + rewrite(inside) + s[end + 1 :]
        position = match.start()  # the content may hold another; every rewrite is shorter, so this ends
    return s


def _as_text(inside: str) -> str:
    if inside.strip() in _LETTERS or re.fullmatch(r"\s*[+-]?[\d.,]+\s*", inside):
        return inside
    return f"⟦{re.sub(r'[⟦⟧$]', '', inside)}⟧"


def _argument(s: str, i: int, depth: int, *, digits: bool) -> tuple[str, int]:
    """The argument of a command that starts at `i`, and its end: a group, a command, or one character.

    With `digits`, all digits and a sign: people who type `2^10` mean 1024.
    """
    while i < len(s) and s[i] == " ":
        i += 1
    if i >= len(s) or depth > MAX_NESTING:
        return "", i
    if s[i] == "{":
        end = closing(s, i)
        return ("", i) if end < 0 else (arguments(s[i + 1 : end], depth).strip(), end + 1)
    match = re.compile(r"-?[0-9]+(?:\.[0-9]+)?|-?[A-Za-z]" if digits else "[0-9A-Za-z]").match(s, i)
    if match:
        return match.group(), match.end()
    if s[i] == "\\" and (match := re.compile(r"\\[A-Za-z]+").match(s, i)):
        if match.group() in (r"\frac", r"\sqrt", r"\binom"):
            piece, end = _command(s, i, depth)
            return (
                ("", i) if end == match.end() else (piece, end)
            )  # failed: so does what it is the argument of
        return match.group(), match.end()
    if s[i] == "(" and digits and (end := closing(s, i)) > 0:
        return arguments(s[i + 1 : end], depth).strip(), end + 1
    return "", i


def _command(s: str, i: int, depth: int) -> tuple[str, int]:
    """Rewrite the `\\frac`, `\\sqrt`, `\\binom`, `^` or `_` at `i` with its arguments in braces."""
    match = re.compile(r"\\frac|\\binom|\\sqrt|\^|_").match(s, i)
    name, j = match.group(), match.end()
    out = name
    if name == r"\sqrt":
        while j < len(s) and s[j] == " ":
            j += 1
        if j < len(s) and s[j] == "[" and (end := closing(s, j)) > 0:
            out += s[j : end + 1]
            j = end + 1
        elif j < len(s) and s[j] == "(" and (end := closing(s, j)) > 0:
            return f"\\sqrt{{{arguments(s[j + 1 : end], depth + 1)}}}", end + 1
    for _ in range(2 if name in (r"\frac", r"\binom") else 1):
        argument, end = _argument(s, j, depth + 1, digits=name in "^_")
        if end == j or not argument:
            return s[i : match.end()], match.end()  # not the shape we know: leave it as it stands
        out, j = f"{out}{{{argument}}}", end
    return out, j


def arguments(s: str, depth: int = 0) -> str:
    """Arguments of `\\frac`, `\\binom`, `\\sqrt`, `^` and `_` in braces: `\\frac12` -> `\\frac{1}{2}`."""
    pieces, i = [], 0
    pattern = re.compile(r"\\(?:frac|binom|sqrt)(?![A-Za-z])|\^|_")
    while match := pattern.search(s, i):
        pieces.append(s[i : match.start()])
        piece, i = _command(s, match.start(), depth)
        pieces.append(piece)
    return "".join(pieces) + s[i:]


def _thousands(s: str) -> str:
    """Join digits that were set in groups of exactly three: `1,234`, `1 234`, `1.234.567`.

    A comma inside brackets separates entries (`(1,234)` is a pair), and so does one followed by a blank.
    """
    s = re.sub(r"(?<![\d.])([1-9]\d{0,2}(?: \d{3})+)(?![\d/]| \d)", lambda m: m.group().replace(" ", ""), s)
    s = re.sub(r"(?<![\d.])([1-9]\d{0,2}(?:\.\d{3}){2,})(?![\d.])", lambda m: m.group().replace(".", ""), s)
    if re.search(r"[(\[⦃⟨]|^\{", s):
        return s
    return re.sub(r"(?<![\d.,])([1-9]\d{0,2}(?:,\d{3})+)(?!\d|,\d)", lambda m: m.group().replace(",", ""), s)


def tidy(answer: str) -> str:
    """The canonical spelling of an answer (see the module's docstring). Total: any text gives a text."""
    s = unwrap(answer).translate(CHARACTERS)
    s = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+", lambda m: "^{" + "".join(SUPERSCRIPTS[c] for c in m.group()) + "}", s)
    s = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda m: "_{" + "".join(SUBSCRIPTS[c] for c in m.group()) + "}", s)
    s = _dollars(unwrap(s))
    # Two backslashes end a matrix row; elsewhere they are a command that was escaped twice.
    s = s.replace("\\\\", "⏎" if r"\begin" in s else "\\")
    s = _macro(s, _STYLE_MACROS, lambda inside: inside)
    s = re.sub(rf"\\(?:operatorname|mathrm|text)\*?\{{({_FUNCTIONS})\}}(?=\s*[\^({{\\\w])", r"\\\1 ", s)
    s = _macro(s, _TEXT_MACROS, _as_text)
    for pattern, replacement in _RULES:
        s = pattern.sub(replacement, s)
    return _thousands(arguments(unwrap(s)))


def to_latex(text: str) -> str:
    """A canonical spelling as LaTeX for math-verify.

    It would round decimals, so they become fractions; it reads 2\\frac{1}{3} as a mixed number only where
    that is the whole; and it reads (3)4 as 7.
    """
    text = _MIXED.sub(_improper, text)
    text = re.sub(r"\)(?=\d)", ")*", text)
    text = text.replace("⟦deg⟧", r"\cdot\frac{\pi}{180}").replace("%", r"\cdot\frac{1}{100}")
    text = re.sub(r"(\d*)\.(\d+)", _decimal, text)
    return re.sub("[*≤≥≠⦃⦄⟨⟩⏎]", lambda sign: _COMMANDS[sign.group()], text)


_COMMANDS = {"*": r"\cdot ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "⦃": r"\{", "⦄": r"\}"}
_COMMANDS |= {"⟨": r"\langle ", "⟩": r"\rangle ", "⏎": r"\\"}

_MIXED = re.compile(r"(?<![\d.)}A-Za-z])(\d{1,9})\\frac\{(\d{1,9})\}\{(\d{1,9})\}(?!\^)")


def _improper(match: re.Match[str]) -> str:
    whole, top, bottom = map(int, match.groups())
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}" if 0 < top < bottom else match.group()


def _decimal(match: re.Match[str]) -> str:
    digits = (match[1] + match[2]).lstrip("0") or "0"
    return rf"(\frac{{{digits}}}{{1{'0' * len(match[2])}}})"
