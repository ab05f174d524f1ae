"""Records as they are shown: whatever a record holds or lacks becomes one `Shown` per solution.

Nothing here trusts a record.  What is missing is read from the texts; what has the wrong type counts as
missing.  So any JSON can be looked at, and nothing raises.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tangolite.advantages import mix_advantages, outcome_advantage, step_advantage
from tangolite.parsing import (
    Step,
    Verification,
    extract_answer,
    parse_verification,
    read_analyses,
    split_steps,
)
from tangolite.rewards import step_rewards
from tangolite.rollouts import length_mask
from tangolite.tango import Solution


class Said:
    """One verification: who wrote it, and what was read from it (None: could not be read)."""

    def __init__(self, verification: Mapping, steps: int) -> None:
        self.raw, self.count = verification, steps
        self.by, self.text = _text(verification.get("by", "")), _text(verification.get("text", ""))

    @cached_property
    def _read(self) -> Verification:
        return parse_verification(self.text, self.count)

    @cached_property
    def judgements(self) -> list[bool] | None:
        given = "judgements" in self.raw
        return _flags(self.raw["judgements"], self.count) if given else self._read.judgements

    @cached_property
    def final(self) -> bool | None:
        return _flag(self.raw["final"]) if "final" in self.raw else self._read.final

    @cached_property
    def analyses(self) -> list[str]:
        given = _texts(self.raw.get("analyses"))
        return read_analyses(self.text) if given is None else given


class Shown:
    """One solution of a record, with all that is known about it; read as far as it is looked at."""

    def __init__(self, solution: Mapping, place: int, question: str, gold: str | None) -> None:
        self.raw, self.place, self.question, self.gold = solution, place, question, gold
        self.kind, self.text = _text(solution.get("kind", "given")), _text(solution.get("text", ""))
        self.correct = _flag(solution.get("correct"))

    @cached_property
    def spans(self) -> list[Step]:
        return split_steps(self.text)

    @cached_property
    def steps(self) -> list[str]:
        given = _texts(self.raw.get("steps"))
        return [span.text for span in self.spans] if given is None else given

    @cached_property
    def answer(self) -> str | None:
        answer = self.raw.get("answer", extract_answer(self.text))
        return None if answer is None else _text(answer)

    @cached_property
    def truth(self) -> list[bool] | None:
        return _flags(self.raw.get("truth"), len(self.steps))

    @cached_property
    def said(self) -> list[Said]:
        return [Said(v, len(self.steps)) for v in _mappings(self.raw.get("verifications"))]

    @cached_property
    def pieces(self) -> tuple[list[str], list[int]]:
        """Tokens, and the one that completes each step; without tokens, words and signs of the text."""
        tokens, ends = _texts(self.raw.get("tokens")), self.raw.get("step_ends")
        if tokens is not None and _are_places(ends, len(self.steps), len(tokens)):
            return tokens, list(ends)
        pieces, ends = cut(self.text, self.spans)
        return pieces, ends if len(ends) == len(self.steps) else []

    def of(self, by: str | None) -> list[Said]:
        """The verifications by one verifier; None: by all."""
        return [said for said in self.said if by is None or said.by == by]


GRADED = {None: "not graded", True: "\N{CHECK MARK} right", False: "\N{BALLOT X} wrong"}


def read_record(record: Any, place: int = 0) -> list[Shown]:
    """The solutions of a record; one written flat, with ``solution`` and ``verification``, has one."""
    record = record if isinstance(record, Mapping) else {}
    question = _text(record.get("question", record.get("problem", "")))
    gold = None if record.get("gold") is None else _text(record["gold"])
    flat = [_flat(record)] if "solution" in record else []
    return [Shown(s, place, question, gold) for s in _mappings(record.get("solutions", flat))]


def record_of(
    solution: Solution, said: Mapping[str, Sequence[str]], truth: Sequence[bool] | None = None
) -> dict:
    """A record of one solution as `tango.solve` reads it, with the verifications' texts by who wrote them."""
    texts = [{"text": text, "by": by} for by, found in said.items() for text in found]
    shown = {
        "kind": "sample",
        "text": solution.text,
        "correct": solution.correct,
        "truth": truth,
        "verifications": texts,
    }
    return {"question": solution.problem.question, "gold": solution.problem.answer, "solutions": [shown]}


def _flat(record: Mapping) -> dict:
    said = record.get("verification", [])
    said = said if isinstance(said, list | tuple) else [said]
    return {
        "text": record["solution"],
        "truth": record.get("truth", record.get("step_truth")),
        "correct": record.get("correct", record.get("answer_correct")),
        "verifications": [v if isinstance(v, Mapping) else {"text": v} for v in said],
    }


_PIECE = re.compile(r"</?\w+>|\\boxed\{|\w+|\s+|[^\w\s]", re.ASCII)


def cut(text: str, spans: Sequence[Step]) -> tuple[list[str], list[int]]:
    """Pieces of a text whose tokens are not known, and the piece that holds each step's closing tag."""
    found = [(match.end(), match[0]) for match in _PIECE.finditer(text)]
    ends, at = [], 0
    for span in spans:
        while at < len(found) - 1 and found[at][0] <= span.end:
            at += 1
        ends.append(at)
    return [piece for _, piece in found], ends


def _text(value: Any) -> str:
    return value if isinstance(value, str) else repr(value)


def _texts(value: Any) -> list[str] | None:
    return [_text(item) for item in value] if isinstance(value, list | tuple) else None


def _mappings(value: Any) -> list[Mapping]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list | tuple) else []


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _flags(value: Any, count: int) -> list[bool] | None:
    fine = isinstance(value, list | tuple) and len(value) == count > 0
    return list(value) if fine and all(isinstance(v, bool) for v in value) else None


def _are_places(value: Any, count: int, length: int) -> bool:
    fine = isinstance(value, list | tuple) and len(value) == count
    return fine and all(type(v) is int and 0 <= v < length for v in value)


# --- what a person looks for ------------------------------------------------------------------------


def wrong_final(shown: Shown) -> bool:
    """Does a final judgement differ from the graded answer?"""
    return shown.correct is not None and any(
        s.final is not None and s.final != shown.correct for s in shown.said
    )


def wrong_step(shown: Shown) -> bool:
    """Is there a step that is false, or, where nobody knows, that a verifier calls INCORRECT?"""
    if shown.truth is not None:
        return not all(shown.truth)
    return any(s.judgements is not None and not all(s.judgements) for s in shown.said)


def disagreement(shown: Shown) -> bool:
    """Does a judgement of a step differ from the truth?"""
    return shown.truth is not None and any(s.judgements not in (None, shown.truth) for s in shown.said)


def malformed(shown: Shown) -> bool:
    """Is there a verification without one judgement a step, or without a final one?"""
    return any(s.judgements is None or s.final is None for s in shown.said)


FILTERS = {
    "all": lambda shown: True,
    "final judgement wrong": wrong_final,
    "a step is wrong": wrong_step,
    "disagrees with the truth": disagreement,
    "verification malformed": malformed,
    "answer wrong": lambda shown: shown.correct is False,
}


# --- numbers on tokens ------------------------------------------------------------------------------


class Advantages(NamedTuple):
    """Advantages of one solution's pieces; ``group`` says over how many completions they were taken."""

    outcome: Tensor
    step: Tensor
    group: int

    def mixed(self, alpha: float) -> list[float]:
        return mix_advantages(self.outcome[None], self.step[None], alpha)[0].tolist()


def advantages(solutions: Sequence[Shown], which: int, by: str | None = None) -> Advantages:
    """As a generator update computes them (GRPO): over the samples of the question, or the solution alone.

    ``by`` takes one verifier's verifications; None takes all.  An unknown correctness takes no part.
    """
    me = solutions[which]
    group = [s for s in solutions if s.kind == me.kind == "sample"] or [me]
    length = torch.tensor([len(s.pieces[0]) for s in group])
    mask = length_mask(length, max(1, int(length.max())))
    said = [[v.judgements for v in s.of(by)] for s in group]
    rows = max(1, *map(len, said))
    pairs = [
        [step_rewards(j, s.pieces[1], mask.shape[1]) for j in found + [None] * (rows - len(found))]
        for s, found in zip(group, said, strict=True)
    ]
    reward, where = (torch.stack([torch.stack([pair[i] for pair in row]) for row in pairs]) for i in (0, 1))
    correct = torch.tensor([math.nan if s.correct is None else float(s.correct) for s in group])
    same = torch.zeros(len(group), dtype=torch.long)
    row = next(i for i, s in enumerate(group) if s is me)
    outcome, step = outcome_advantage(correct, same, mask), step_advantage(reward, where, same, mask)
    return Advantages(outcome[row, : length[row]], step[row, : length[row]], len(group))


# --- many records -----------------------------------------------------------------------------------


class Library:
    """Records by place, and for each filter the places of those that it lets through."""

    def __init__(self, records: Sequence[Any]) -> None:
        self.records = list(records)
        self.added: dict[int, list[Shown]] = {}
        self.places: dict[str, list[int]] = {name: [] for name in FILTERS}
        for place in range(len(self.records)):
            self._sort(place)

    def __getitem__(self, place: int) -> list[Shown]:
        return read_record(self.records[place], place) + self.added.get(place, [])

    def add(self, place: int, solution: Mapping) -> None:
        """One solution more to look at; the record itself is left as it was."""
        like = self[place][0]
        self.added.setdefault(place, []).append(Shown(solution, place, like.question, like.gold))
        self._sort(place)

    def _sort(self, place: int) -> None:
        solutions = self[place]
        for name, test in FILTERS.items():
            places = self.places[name]
            at = bisect_left(places, place)
            if (name == "all" or any(map(test, solutions))) and places[at : at + 1] != [place]:
                places.insert(at, place)


def side_by_side(records: Mapping[str, Sequence[Any]]) -> list[dict]:
    """Evaluations of the same solutions by several checkpoints as one: verifications say whose they are.

    Records meet by their index (without one, by their place), solutions by their text.
    """
    merged: dict[int, dict] = {}
    for name, rows in records.items():
        for place, row in enumerate(rows):
            mine = merged.setdefault(row.get("index", place), {**row, "solutions": {}})
            for s in _mappings(row.get("solutions")):
                there = mine["solutions"].setdefault(_text(s.get("text", "")), {**s, "verifications": []})
                there["verifications"] += [{**v, "by": name} for v in _mappings(s.get("verifications"))]
    return [{**row, "solutions": list(row["solutions"].values())} for row in merged.values()]
