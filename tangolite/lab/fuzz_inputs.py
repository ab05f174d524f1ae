"""Hostile inputs for `tangolite.lab.fuzz`: what is well formed, broken a little or a lot.

Random characters alone hardly ever reach the insides of a parser.  So texts, answers, records and files start
in the right form and are cut, repeated, nested and spoilt from there.  Everything depends on ``rng`` alone.
"""

from __future__ import annotations

import json
import random
from typing import Any

from tangolite.parsing import extract_answer, split_steps
from tangolite.prompts import solution_text
from tangolite.sources import SOURCES
from tangolite.tasks import ChainArithmetic
from tangolite.warmstart import written_verification

TAGS = [
    f"<{slash}{name}>"
    for name in ("think", "answer", "step", "step_verification", "final_verification")
    for slash in ("", "/")
]
BOXES = [r"\boxed{", r"\boxed{CORRECT}", r"\boxed{INCORRECT}", r"\boxed", r"\fbox{", r"\\boxed{", r"\box{",
         r"\boxed{\boxed{", r"\text{", r"\boxed{}", r"\boxed{\text{correct}}", "$", ".", "{", "}", "\\"]  # fmt: skip
ODD = ["\x00", "\ud800", "\udfff", "\u202e", "\u200f", "\u2066", "\ufeff", "\u2028", "\r\n", "\t", "\x1b[2J",
       "é", "e\u0301", "\N{MATHEMATICAL DOUBLE-STRUCK DIGIT ONE}", "\u0663", "\u00b2", "\U0001f600", "\ufffd",
       "\x85", "\xa0", "ſ", "İ", "<script>", "</pre>", "&amp;", "]]>", "<|eos|>", "<STEP>", "< step>"]  # fmt: skip
ANSWERS = [
    *("7", "-3", "0.5", "1,234", "50%", "2/3", r"\frac{2}{3}", r"\sqrt{2}", r"\frac{\sqrt{3}}{2}", r"2\pi"),
    *("(1,2)", r"\{1,2\}", "[0,1)", r"(-\infty, 3]", "x=5", "x^2+1", r"3\times10^{5}", "52_8", "True", "yes"),
    *(r"5\text{ cm}", r"\$5", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"90^\circ", "1:2", "x<3", "3!", "AB"),
    *(r"x \in \{1,2\}", r"\binom{5}{2}", r"\log_2 8", r"1\frac{1}{2}", "'a'", "1e5", r"e^{x}", r"\pm 2", "i"),
]
SPOILERS = [*"^_{}()[]$%&,;:=<>|!'\"+-*/\\.", " ", "9" * 30, "9" * 5000, "^{9^{9}}", r"\frac", r"\sqrt", "1e999",
            r"\text{", r"\left(", r"\right", r"\begin{cases}", "nan", "inf", r"\infty", "0.", "/0", "__import__('os')",
            "lambda", "0x", "1_000", *ODD[:20]]  # fmt: skip
SCALARS = [None, True, False, 0, -1, 1, 2, 10**30, 0.5, float("nan"), float("inf"), "", " ", "A", "7", "#### 7",
           "proved", "math", "integer", "\ud800", "\x00", "1e999", '{"columns": ["a"], "data": [[1]]}',
           "question?"]  # fmt: skip
ROWS = {  # fields that hold more than a text or a number
    "prompt": [{"role": "user", "content": "1+1?"}],
    "reward_model": {"ground_truth": "2"},
    "table": {"columns": ["a"], "data": [[1]]},
    **{field: ["2", "3", "4"] for field in ("options", "choices", "steps")},
    **{
        "answer_index": 0,
        "gold": [0],
        "label": 0,
        "final_answer_correct": True,
        "Picture": None,
        "id": "gsm8k-1",
    },
}
CHAIN = ChainArithmetic()


def solution(rng: random.Random) -> str:
    return solution_text(*CHAIN.flawed(CHAIN.problem(rng), rng, 0.4))


def verification(rng: random.Random) -> str:
    problem = CHAIN.problem(rng)
    steps, _ = CHAIN.flawed(problem, rng, 0.4)
    return written_verification(
        CHAIN, problem, steps, [rng.random() < 0.5 for _ in steps], rng.random() < 0.5
    )


def spoilt(text: str, rng: random.Random, pieces: list[str]) -> str:
    """A text after a few blows: cut, repeated, with pieces put in, wrapped or taken away; a few are huge."""
    for _ in range(rng.choice((0, 1, 1, 2, 3, 5, 8))):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        blow = rng.randrange(8)
        if blow == 0:
            text = text[:b] if rng.random() < 0.5 else text[a:]
        elif blow == 1:
            text = text[:a] + text[b:]
        elif blow == 2:
            text = text[:a] + text[a:b] * rng.choice((2, 3, 20)) + text[b:]
        elif blow == 3:
            text = text[:a] + rng.choice(pieces) + text[a:b] + rng.choice(pieces) + text[b:]
        elif blow == 4:
            text = text.replace(rng.choice(pieces), rng.choice(pieces), rng.choice((1, -1)))
        else:
            text = text[:a] + rng.choice(pieces) + text[a:]
    if rng.random() < 0.001:
        piece = rng.choice(pieces) + (rng.choice(pieces) if rng.random() < 0.5 else "")
        text = text[: len(text) // 2] + piece * (50_000 // len(piece)) + text[len(text) // 2 :]
    return text[:200_000]


def text(rng: random.Random) -> tuple[str, int]:
    """A completion of either player, and how many steps the solution is said to have."""
    pieces = rng.choice((TAGS, BOXES, ODD, TAGS + BOXES, TAGS + BOXES + ODD))
    return spoilt(rng.choice((solution, verification))(rng), rng, pieces), rng.randrange(-1, 6)


def answers(rng: random.Random) -> tuple[Any, Any]:
    """An answer and a gold answer; the gold may come from JSON."""
    pieces = rng.choice((SPOILERS, ANSWERS, SPOILERS + ANSWERS))
    one = spoilt(rng.choice(ANSWERS), rng, pieces)
    other = rng.choice((rng.choice(ANSWERS), spoilt(one, rng, pieces), rng.choice(SCALARS)))
    return (one, other) if rng.random() < 0.5 else (other, one)


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 3 else 4)
    if kind == 4:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 5:
        return {str(rng.choice(SCALARS)): value(rng, depth + 1) for _ in range(rng.randrange(3))}
    return rng.choice(SCALARS) if kind else text(rng)[0]


def damaged(node: Any, rng: random.Random, rate: float) -> Any:
    """JSON with some of its nodes replaced by something else, missing, or doubled."""
    if rng.random() < rate:
        return value(rng)
    if isinstance(node, dict):
        return {k: damaged(v, rng, rate) for k, v in node.items() if rng.random() > rate / 2}
    if isinstance(node, list):
        return [
            damaged(v, rng, rate)
            for v in node
            for _ in range(rng.choice((0, 2)) if rng.random() < rate else 1)
        ]
    return node


def record(rng: random.Random) -> dict[str, Any]:
    """One record as `tangolite.records` describes them."""
    solutions = []
    for _ in range(rng.randrange(1, 4)):
        whole = spoilt(solution(rng), rng, TAGS) if rng.random() < 0.5 else solution(rng)
        steps = [step.text for step in split_steps(whole)]
        said = [
            {
                "text": verification(rng),
                "judgements": [rng.random() < 0.5 for _ in steps],
                "final": rng.choice((True, False, None)),
                "analyses": ["so"] * len(steps),
                "by": rng.choice(("before", "after")),
            }
            for _ in range(rng.randrange(3))
        ]
        solutions.append({
            "kind": rng.choice(("greedy", "sample", "given")), "text": whole, "answer": extract_answer(whole),
            "status": "differ", "correct": rng.random() < 0.5, "vote": 0, "truncated": False, "steps": steps,
            "truth": [True for _ in steps], "label": -1, "tokens": list(whole), "step_ends": list(range(len(steps))),
            "verifications": said,
        })  # fmt: skip
    return {
        "index": rng.randrange(9),
        "source": "chain",
        "question": "1+1",
        "gold": "2",
        "solutions": solutions,
    }


def damaged_record(rng: random.Random) -> Any:
    """Any JSON, most often nearly a record; sometimes one written flat."""
    found = record(rng)
    if rng.random() < 0.3:
        said = [v["text"] for v in found["solutions"][0]["verifications"]]
        found = {
            "question": "1+1",
            "solution": found["solutions"][0]["text"],
            "verification": said,
            "truth": [True],
        }
    return damaged(found, rng, rng.choice((0.0, 0.02, 0.1, 0.3)))


def file(rng: random.Random) -> tuple[str, bytes]:
    """Which reader is to open a file, and what the file holds."""
    reader = rng.choice(("jsonl", "records", "processbench", *SOURCES))
    rows = [_row(reader, rng) for _ in range(rng.randrange(1, 4))]
    if reader == "records":
        rows = [{"tangolite_records": 1, "settings": {}}, *rows]
    rows = [damaged(row, rng, rng.choice((0.0, 0.05, 0.2))) for row in rows]
    end = rng.choice(("\n", "\n", "\n", "\r\n", "\n\n", "\r", "\u2028"))
    whole = end.join(json.dumps(row, ensure_ascii=rng.random() < 0.7) for row in rows) + end
    if reader not in ("jsonl", "records") and rng.random() < 0.3:
        whole = json.dumps(rows)
    return reader, _spoilt_bytes(whole.encode("utf-8", "surrogatepass"), rng)


def _row(reader: str, rng: random.Random) -> dict[str, Any]:
    if reader == "records":
        return record(rng)
    fields = ("id", "problem", "steps", "final_answer_correct", "label") if reader == "processbench" else (
        ("question", "answer") if reader == "jsonl" else SOURCES[reader].fields)  # fmt: skip
    typical = [ROWS.get(field, rng.choice(("7", "What?", "#### 7", "integer", "math"))) for field in fields]
    return dict(zip(fields, typical, strict=True))


def _spoilt_bytes(data: bytes, rng: random.Random) -> bytes:
    blow, at = rng.randrange(24), rng.randrange(len(data) + 1)
    spoilers = [b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"[" * 5000, b'{"a":' * 5000, b"9" * 5000, b"\n", b'"', b"}",
                b"\xed\xa0\x80", b"NaN", b"\\ud800", b"1e999"]  # fmt: skip
    if blow == 0:
        return data[:at]
    if blow == 1:
        return b"\xef\xbb\xbf" + data
    if blow < 2 + len(spoilers):
        return data[:at] + spoilers[blow - 2] + data[at:]
    return data
