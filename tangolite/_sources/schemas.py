"""One row of each of the papers' data sets as a problem, and where the sets are.

A reader gets a row whose fields are all there.  It gives a problem, or a text that says why the row is left
out, and raises ValueError for a field that holds something else than the set's own pages say.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tangolite.tasks import Problem

Row = dict[str, Any]
Reader = Callable[[Row], Problem | str]  # a problem, or why this row is left out

# --- one row of each set -----------------------------------------------------------------------------


def text(row: Row, field: str) -> str:
    if not isinstance(row[field], str) or not row[field].strip():
        raise ValueError(f"field {field!r} must be text, got {row[field]!r:.60}")
    return row[field].strip()


def _problem(question: str, gold: object) -> Problem | str:
    if gold is None or gold != gold or not str(gold).strip():
        return "no gold answer"
    if not isinstance(gold, str | int | float):
        raise ValueError(f"the gold answer must be text, a number or a truth value, got {gold!r:.60}")
    return Problem(question, str(gold).strip())


def _choice(question: str, options: Sequence[str], right: int) -> Problem:
    """Options A, B, … below the question; the gold answer is a letter."""
    if not 0 <= right < len(options) <= 26:
        raise ValueError(f"the right option is number {right} of {len(options)}")
    lines = [f"{chr(65 + i)}. {str(option).strip()}" for i, option in enumerate(options)]
    return Problem("\n".join([question, *lines, "Answer with the letter alone."]), chr(65 + right))


def plain(question: str, answer: str, ask: str = "") -> Reader:
    """Two fields as they stand; ``ask`` says which form the answer has."""
    return lambda row: _problem(text(row, question) + ask, row[answer])


def whole_number(question: str, answer: str) -> Reader:
    """A contest's answer, which may be written 042 or 42.0: 42."""

    def read(row: Row) -> Problem | str:
        number = re.fullmatch(r"\s*0*(\d+)(?:\.0+)?\s*", str(row[answer]))
        return _problem(text(row, question), number[1] if number else row[answer])

    return read


def eurus(row: Row) -> Problem | str:
    """Mathematics alone, without the answer format that the set asks for: ours is another."""
    if row["ability"] != "math":
        return "not mathematics"
    try:
        question = text([turn for turn in row["prompt"] if turn["role"] == "user"][-1], "content")
        gold = row["reward_model"]["ground_truth"]
    except (TypeError, KeyError, IndexError):
        raise ValueError("prompt needs a turn of the user, and reward_model a ground_truth") from None
    return _problem(re.sub(r"\s*Present the answer in LaTe[xX] format:.*\Z", "", question), gold)


def gsm8k(row: Row) -> Problem | str:
    _, mark, gold = text(row, "answer").rpartition("####")
    if not mark:
        raise ValueError("field 'answer' has no #### before its result")
    return _problem(text(row, "question"), gold.replace(",", ""))


def olympiad(row: Row) -> Problem | str:
    """Several answers may come as a list; a problem with more than one asks for all of them."""
    gold = row["answer"]
    return _problem(text(row, "question"), ", ".join(map(str, gold)) if isinstance(gold, list) else gold)


def boardgame(row: Row) -> Problem | str:
    words = {"proved": "True", "disproved": "False", "unknown": "Uncertain"}
    if row["label"] not in words:
        raise ValueError(f"field 'label' must be one of {', '.join(words)}, got {row['label']!r:.60}")
    ask = "\nAnswer True if this is proved, False if it is disproved, Uncertain if neither."
    return _problem(text(row, "example") + ask, words[row["label"]])


def cruxeval(row: Row) -> Problem | str:
    """What a function returns, as a Python literal.  (The set's own check runs code, so 1 is True there.)"""
    ask = f"What does f({row['input']}) return? Answer with a Python literal alone."
    return _problem(f"{text(row, 'code')}\n\n{ask}", row["output"])


def tablebench(row: Row) -> Problem | str:
    if row.get("qtype") == "Visualization":
        return "asks for a chart"
    try:
        table = json.loads(row["table"]) if isinstance(row["table"], str) else row["table"]
        cells = [table["columns"], *table["data"]]
        lines = [" | ".join(str(cell) for cell in line) for line in cells]
    except (TypeError, KeyError, json.JSONDecodeError):
        raise ValueError("field 'table' must hold columns and data") from None
    return _problem("\n".join([*lines, "", text(row, "question")]), row["answer"])


def webinstruct(row: Row, *, mathematics: bool = True) -> Problem | str:
    """Answers of a short type; CoVRL trains on what is not mathematics (Sec. 4)."""
    kind = str(row["answer_type"]).strip().lower()
    short = {"float", "integer", "fraction", "percentage", "boolean", "multiple choice", "expression"}
    if kind not in short:
        return f"answer of type {kind}"
    if not mathematics and str(row["category"]).strip().lower() == "mathematics":
        return "mathematics"
    return _problem(text(row, "question"), row["answer"])


def gpqa(row: Row) -> Problem | str:
    """The four options in an order that the question alone decides, so that it is the same everywhere."""
    fields = ["Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3))]
    options, question = [text(row, field) for field in fields], text(row, "Question")
    order = random.Random(question).sample(range(4), 4)
    return _choice(question, [options[i] for i in order], order.index(0))


def mmlu_pro(row: Row) -> Problem | str:
    problem = _choice(text(row, "question"), list(row["options"]), int(row["answer_index"]))
    if problem.answer != row["answer"]:
        raise ValueError(f"answer {row['answer']!r} and answer_index {row['answer_index']} disagree")
    return problem


def theoremqa(row: Row) -> Problem | str:
    if row["Picture"]:
        return "asks about a picture"
    ask = " Answer True or False." if row["Answer_type"] == "bool" else ""
    gold = row["Answer"]
    return _problem(text(row, "Question") + ask, str(gold) if isinstance(gold, list) else gold)


def sat_math(row: Row) -> Problem | str:
    """The query ends in words that would begin a completion; the options stand below it instead."""
    if len(row["gold"]) != 1:
        return "not one right option"
    question = re.sub(r"\AQ:\s*|\s*(?:Answer Choices|A: Among).*\Z", "", text(row, "query"), flags=re.DOTALL)
    options = [re.sub(r"\A\s*\([A-Z]\)\s*", "", str(option)) for option in row["choices"]]
    return _choice(question, options, int(row["gold"][0]))


# --- where they are ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A data set: its name on the hub, the fields a row must have, and what becomes of a row."""

    id: str
    split: str
    fields: tuple[str, ...]
    read: Reader
    config: str | None = None
    file: str | None = None  # the one file to read, where the hub's repository holds others
    revision: str | None = None  # a commit of the hub's repository; None: the newest


_WEB = ("question", "answer", "answer_type", "category")
_GPQA = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_TRUTH = " Answer True or False."

SOURCES = {
    # Tango, training and evaluation
    "eurus2": Source("PRIME-RL/Eurus-2-RL-Data", "train", ("prompt", "ability", "reward_model"), eurus),
    "math500": Source("HuggingFaceH4/MATH-500", "test", ("problem", "answer"), plain("problem", "answer")),
    "aime2024": Source(
        "Maxwell-Jia/AIME_2024", "train", ("Problem", "Answer"), whole_number("Problem", "Answer")
    ),
    "aime2025": Source(
        "yentinglin/aime_2025", "train", ("problem", "answer"), whole_number("problem", "answer")
    ),
    "amc2023": Source("math-ai/amc23", "test", ("question", "answer"), whole_number("question", "answer")),
    "olympiadbench": Source("knoveleng/OlympiadBench", "train", ("question", "answer"), olympiad),
    "boardgameqa": Source("tasksource/Boardgame-QA", "test", ("example", "label"), boardgame),
    "cruxeval": Source("cruxeval-org/cruxeval", "test", ("code", "input", "output"), cruxeval),
    "strategyqa": Source("voidful/StrategyQA", "train", ("question", "answer"),
                         plain("question", "answer", _TRUTH), file="strategyqa_train.json"),
    "tablebench": Source("Multilingual-Multimodal-NLP/TableBench", "test", ("table", "question", "answer"),
                         tablebench, file="TableBench.jsonl"),
    "gsm8k": Source("openai/gsm8k", "test", ("question", "answer"), gsm8k, config="main"),
    # CoVRL, training and evaluation
    "webinstruct": Source("TIGER-Lab/WebInstruct-verified", "train", _WEB, webinstruct),
    "webinstruct-covrl": Source("TIGER-Lab/WebInstruct-verified", "train", _WEB,
                                lambda row: webinstruct(row, mathematics=False)),
    "gpqa": Source("Idavidrein/gpqa", "train", _GPQA, gpqa, config="gpqa_diamond"),
    "mmlu-pro": Source("TIGER-Lab/MMLU-Pro", "test", ("question", "options", "answer", "answer_index"),
                       mmlu_pro),
    "theoremqa": Source("TIGER-Lab/TheoremQA", "test", ("Question", "Answer", "Answer_type", "Picture"),
                        theoremqa),
    "minerva": Source("math-ai/minervamath", "test", ("question", "answer"), plain("question", "answer")),
    "sat-math": Source("dmayhem93/agieval-sat-math", "test", ("query", "choices", "gold"), sat_math),
}  # fmt: skip
