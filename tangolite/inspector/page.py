"""HTML of what a verifier said: no script, nothing from the network, every text escaped.

Colours come from the front end's theme where there is one (JupyterLab, VS Code), and from the reader's choice
of light or dark elsewhere.  Nothing is said by colour alone: verdicts are words with a mark, tokens carry
their number.  Where a page strips styles, as GitHub does, a table with all the words remains.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any

from tangolite.inspector.reading import GRADED, Said, Shown, read_record
from tangolite.rewards import step_rewards

LIMIT = 20_000  # characters of one text that the widget shows; a saved page has all
TOKENS = 4_000

STYLE = """<style>
.tl{--ink:var(--jp-content-font-color1,var(--vscode-editor-foreground,#1b1b1b));
--paper:var(--jp-layout-color0,var(--vscode-editor-background,#fff));
--soft:var(--jp-layout-color2,var(--vscode-editorWidget-background,#f0f0f0));
--line:var(--jp-border-color1,var(--vscode-panel-border,#999));
color:var(--ink);background:var(--paper);font:14px/1.45 system-ui,sans-serif;padding:2px 6px;max-width:1100px}
@media (prefers-color-scheme:dark){.tl-page .tl{--ink:#eee;--paper:#161616;--soft:#2b2b2b;--line:#888}
body.tl-page{background:#161616}}
.tl h3{font-size:1.05em;margin:.7em 0 .25em}.tl p{margin:.25em 0;white-space:normal;overflow-wrap:anywhere}
.widget-html-content:has(>.tl){min-width:0}
.tl .tl-wide{overflow-x:auto}
.tl table{border-collapse:collapse;margin:.3em 0;color:var(--ink);font-size:13px}
.tl caption{text-align:left;padding:.2em 0;color:var(--ink);white-space:nowrap}
.tl table th,.tl table td{border:1px solid var(--line);padding:3px 6px;vertical-align:top}
.tl table th,.tl table td{white-space:normal;text-align:left!important}.tl td bdi{display:inline-block;min-width:5em}
.tl th{background:var(--soft)}.tl table td.tl-num{text-align:right!important;white-space:nowrap}
.tl bdi,.tl pre{unicode-bidi:isolate;overflow-wrap:anywhere}
.tl pre{white-space:pre-wrap;background:var(--soft);color:var(--ink);padding:6px;margin:.2em 0;
max-height:22em;
overflow:auto;font-size:12px}
.tl .tl-v{white-space:nowrap;padding:0 4px;border:1.5px solid var(--ink);border-radius:3px}
.tl .tl-bad{border-style:dashed;font-weight:700}.tl .tl-none{border-color:transparent;font-style:italic}
.tl .tl-differs{font-weight:700;text-decoration:underline}
.tl .tl-t{display:inline-block;margin:1px;padding:0 3px;border-bottom:2px solid #444;text-align:center;
font:12px/1.3 ui-monospace,monospace;white-space:pre;max-width:100%;overflow:hidden}
.tl .tl-t.tl-neg{border-bottom-style:dashed}.tl .tl-t small{display:block;font-size:10px}
.tl summary{cursor:pointer}
@media print{.tl details>*{display:block}.tl pre{max-height:none}}
</style>"""


# --- words -----------------------------------------------------------------------------------------


_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def literal(text: str, limit: int | None = None) -> str:
    """`visible` text, escaped for HTML and in ASCII, so that no encoding can spoil it."""
    return escape(visible(text, limit)).encode("ascii", "xmlcharrefreplace").decode()


def visible(text: str, limit: int | None = None) -> str:
    """Text in which what cannot be seen, or would reorder its surroundings, stands as its number."""
    cut = "" if limit is None or len(text) <= limit else f" … and {len(text) - limit:,} characters more"
    return _UNSEEN.sub(lambda m: f"[U+{ord(m[0]):04X}]", text[:limit]) + cut


def verdict(judged: bool | None) -> str:
    if judged is None:
        return '<span class="tl-v tl-none">? not read</span>'
    kind, words = ("tl-v", "&#10003; CORRECT") if judged else ("tl-v tl-bad", "&#10007; INCORRECT")
    return f'<span class="{kind}">{words}</span>'


def _truth(true: bool | None) -> str:
    return "unknown" if true is None else "&#10003; true" if true else "&#10007; false"


def _agreement(judged: bool | None, true: bool | None) -> str:
    if true is None or judged is None:
        return ""
    return "agrees" if judged == true else '<span class="tl-differs">DISAGREES</span>'


def votes(values: Sequence[bool | None]) -> str:
    """How many say what, and what the majority says; a tie decides nothing."""
    count = Counter(values)
    tie = count[True] == count[False] > 0
    won = "a tie" if tie else verdict(count[True] > count[False] if count[True] + count[False] else None)
    unread = f", {count[None]} not read" if count[None] else ""
    return f"{won} {count[True]} : {count[False]}{unread}"


def _cell(text: str, limit: int | None) -> str:
    return f"<td><bdi>{literal(text, limit)}</bdi></td>"


# --- one solution -----------------------------------------------------------------------------------


def head(shown: Shown, limit: int | None = None) -> str:
    """Question, gold answer, and what became of the solution."""
    graded = literal(GRADED[shown.correct])
    gold = "" if shown.gold is None else f"<p><b>Gold answer:</b> <bdi>{literal(shown.gold, limit)}</bdi></p>"
    answer = "none could be read" if shown.answer is None else f"<bdi>{literal(shown.answer, limit)}</bdi>"
    first = next((k for k, true in enumerate(shown.truth or [], 1) if not true), None)
    error = "" if shown.truth is None else f"; first false step: {first or 'none'}"
    return (
        f"<p><b>Question:</b> <bdi>{literal(shown.question, limit)}</bdi></p>{gold}"
        f"<p><b>Answer</b> ({literal(shown.kind, 40)} solution): {answer}, {graded}{error}</p>"
    )


def steps_table(shown: Shown, said: Sequence[Said], limit: int | None = None) -> str:
    """One row a step: its text, the truth, and for each verification its verdict, analysis and reward."""
    names = [literal(v.by or "verifier", 40) for v in said]
    heads = "".join(
        f'<th scope="col">{n} says</th><th scope="col">{n}: analysis</th><th scope="col">reward</th>'
        for n in names
    )
    rewards = [
        step_rewards(v.judgements, range(len(shown.steps)), len(shown.steps))[0].tolist() for v in said
    ]
    rows = "".join(_row(shown, said, rewards, k, limit) for k in range(len(shown.steps)))
    rows = rows or f'<tr><td colspan="{3 + 3 * len(said)}">no steps could be read</td></tr>'
    finals = "".join(f"<td>{_said(v.final, shown.correct)}</td><td></td><td></td>" for v in said)
    return (
        '<div class="tl-wide"><table><caption>Each step, what is true, and what was said of it</caption>'
        f'<thead><tr><th scope="col">step</th><th scope="col">text</th><th scope="col">truth</th>{heads}</tr></thead>'
        f'<tbody>{rows}<tr><th scope="row">final</th><td>the whole solution</td>'
        f"<td>{literal(GRADED[shown.correct])}</td>{finals}</tr></tbody></table></div>"
    )


def _row(
    shown: Shown, said: Sequence[Said], rewards: Sequence[list[float]], k: int, limit: int | None
) -> str:
    true = None if shown.truth is None else shown.truth[k]
    cells = [f'<th scope="row">{k + 1}</th>{_cell(shown.steps[k], limit)}<td>{_truth(true)}</td>']
    for v, reward in zip(said, rewards, strict=True):
        judged = None if v.judgements is None else v.judgements[k]
        analysis = v.analyses[k] if k < len(v.analyses) else ""
        earned = "none" if judged is None else f"{reward[k]:+.3g}"
        cells.append(
            f'<td>{_said(judged, true)}</td>{_cell(analysis, limit)}<td class="tl-num">{earned}</td>'
        )
    return f"<tr>{''.join(cells)}</tr>"


def _said(judged: bool | None, true: bool | None) -> str:
    return f"{verdict(judged)} {_agreement(judged, true)}".rstrip()


def votes_table(shown: Shown, said: Sequence[Said]) -> str:
    """What several verifications say together: of every step, and in the end."""
    read = [v.judgements or [None] * len(shown.steps) for v in said]
    rows = "".join(
        f'<tr><th scope="row">{k + 1}</th><td>{votes([j[k] for j in read])}</td></tr>'
        for k in range(len(shown.steps))
    )
    final = votes([v.final for v in said])
    return (
        f'<div class="tl-wide"><table><caption>Votes of {len(said)} verifications{_whose(said[0])} '
        f"(CORRECT : INCORRECT)</caption>"
        f'<thead><tr><th scope="col">step</th><th scope="col">vote</th></tr></thead><tbody>{rows}'
        f'<tr><th scope="row">final</th><td>{final}</td></tr></tbody></table></div>'
    )


def tokens(pieces: Sequence[str], values: Sequence[float], title: str) -> str:
    """Pieces in reading order, each with its number; dashed below where it is negative."""
    largest = max(map(abs, values), default=0.0) or 1.0
    spans = "".join(_token(p, v, v / largest) for p, v in zip(pieces[:TOKENS], values, strict=False))
    more = f"<p>… and {len(pieces) - TOKENS:,} tokens more</p>" if len(pieces) > TOKENS else ""
    return f"<h3>{title}</h3><div>{spans}</div>{more}"


def _token(piece: str, value: float, share: float) -> str:
    """Blue for more than average, vermillion for less, fading to white at 0; black or white on it."""
    full = (0, 114, 178) if share > 0 else (213, 94, 0)
    red, green, blue = (round(255 + (c - 255) * abs(share)) for c in full)
    ink = "#000" if _luminance(red, green, blue) > 0.179 else "#fff"  # where both contrast alike
    shown = literal(piece.replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"), 200)
    style = f"background:#{red:02x}{green:02x}{blue:02x};color:{ink}"
    number = f"{value:+.2f}"
    number = "0" if float(number) == 0 else number
    kind = "tl-t tl-neg" if number.startswith("-") else "tl-t"
    return f'<span class="{kind}" style="{style}">{shown}<small>{number}</small></span>'


def texts(shown: Shown, said: Sequence[Said], limit: int | None = None) -> str:
    """What both wrote, word for word."""
    parts = [("The solution as written", shown.text)]
    parts += [(f"The verification as written ({v.by or 'verifier'})", v.text) for v in said]
    return "".join(
        f"<details><summary>{literal(name, 80)}</summary><pre>{literal(text, limit)}</pre></details>"
        for name, text in parts
    )


def _luminance(*channels: int) -> float:
    """Relative luminance of an sRGB colour (WCAG 2), its powers taken as 2.2."""
    return sum(
        weight * (c / 255) ** 2.2 for weight, c in zip((0.2126, 0.7152, 0.0722), channels, strict=True)
    )


# --- pages ------------------------------------------------------------------------------------------


def render_feedback(record: Any) -> str:
    """A record as static HTML: steps with verdicts, analyses, rewards and truth, and all texts.

    ``record`` is one of those in `tangolite.records`; or, by hand, a dict with ``question``, ``solution``
    (the text), ``verification`` (a text, or a list of them) and, if known, ``gold``, ``correct`` and
    ``truth`` (one bool a step).  The HTML is ASCII, without scripts or addresses, and every text in it is
    escaped.  Anything that is not a record gives a page that says so; nothing is raised.
    """
    solutions = read_record(record)
    body = "".join(_solution(shown, number, len(solutions)) for number, shown in enumerate(solutions, 1))
    return f'{STYLE}<div class="tl" role="region" aria-label="feedback of a verifier">{body or EMPTY}</div>'


EMPTY = "<p>No solution could be read from this record.</p>"


def _solution(shown: Shown, number: int, count: int) -> str:
    title = f"<h3>Solution {number} of {count}</h3>" if count > 1 else ""
    by_each = [shown.of(by) for by in dict.fromkeys(v.by for v in shown.said)]
    table = steps_table(shown, [found[0] for found in by_each])
    several = "".join(votes_table(shown, found) for found in by_each if len(found) > 1)
    others = "".join(
        f"<details><summary>Verification {i} of {len(found)}{_whose(v)}</summary>{steps_table(shown, [v])}</details>"
        for found in by_each
        for i, v in enumerate(found[1:], 2)
    )
    return title + head(shown) + table + several + others + texts(shown, shown.said)


def _whose(said: Said) -> str:
    return f" by {literal(said.by, 40)}" if said.by else ""


def page(title: str, body: str) -> str:
    """A whole document around pieces that `render_feedback` made."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="generator" content="tangolite">'
        f'<meta name="viewport" content="width=device-width"><title>{literal(title, 200)}</title></head>'
        f'<body class="tl-page">{body}</body></html>\n'
    )
