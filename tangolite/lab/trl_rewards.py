"""Tango's rewards in the shape that TRL's `GRPOTrainer(reward_funcs=[...])` calls; TRL is not imported here.

A reward function gets lists with one entry per completion, the columns of the data set among them, and
returns one number per completion. None means "cannot be scored", which is not "wrong". TRL leaves a
completion out only where *every* reward function says None; otherwise it adds up the others, so a question
without a gold answer still competes by its format alone if `format_reward` is there, too.

Left out: step rewards. They are one number per step, and a reward function has one per completion. A subclass
of the trainer can put our advantages, shape (B, T), in the place of TRL's: `tests/test_trl.py` shows it, and
what else is equal or different. TRL trains one policy per trainer; for Tango take two and alternate by hand,
the generator on `outcome_reward`, the verifier on `judgement_reward`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tangolite.grading import answers_status
from tangolite.parsing import (
    extract_answer,
    generator_format_score,
    parse_verification,
    split_steps,
    verifier_format_score,
)
from tangolite.rewards import verifier_reward

Completion = str | Sequence[Mapping[str, Any]]  # text, or chat messages
Rewards = list[float | None]
Verify = Callable[..., Sequence[Sequence[str]]]


def outcome_reward(prompts: Sequence, completions: Sequence[Completion], **columns: Any) -> Rewards:
    """1 if the extracted answer equals the gold answer as mathematics, else 0 (Tango, outcome reward).

    Needs the column `answer`, the gold answer; None where that is None, NaN or blank. An answer that is
    missing, or that algebra cannot decide in time, earns 0, as in `tangolite.tango`. Raises ValueError
    without the column, or if its length is not that of `completions`.
    """
    golds = _column("answer", "the gold answer", columns)
    return [_outcome(_text(done), gold) for done, gold in zip(completions, golds, strict=True)]


def format_reward(prompts: Sequence, completions: Sequence[Completion], **columns: Any) -> Rewards:
    """Format score of a solution, in [0, 1]; needs no column, never None. Tango weighs it with 0 in RL."""
    return [generator_format_score(_text(done)) for done in completions]


def final_reward(verify: Verify) -> Callable[..., Rewards]:
    """A reward function: the share of a solution's verifications whose final judgement is CORRECT.

    `verify(solutions=..., prompts=..., **columns)` is given the texts of the solutions and all that TRL hands
    over, and returns for each solution the texts of its R verifications. Those without a final judgement do
    not count; None where there is no other. So TRL's `reward_weights=[w, 1 - w]` for outcome and final
    judgement pays `w * outcome` there, while `tangolite.rewards.generator_reward` pays the whole outcome.
    Columns: those that `verify` reads. Raises ValueError unless `verify` returns one entry per solution.
    """

    def final_judgement(prompts: Sequence, completions: Sequence[Completion], **columns: Any) -> Rewards:
        solutions = [_text(done) for done in completions]
        verifications = verify(solutions=solutions, prompts=prompts, **columns)
        return [_agreement(s, found) for s, found in zip(solutions, verifications, strict=True)]

    return final_judgement


def judgement_reward(prompts: Sequence, completions: Sequence[Completion], **columns: Any) -> Rewards:
    """Tango's reward of the verifier, whose completions are verifications: `[final is right] + 0.8 * format`.

    Needs the columns `correct`, whether the verified solution is right (its outcome reward; None where that
    is None or NaN), and `n_steps`, the number of its steps. An optional column `generator_format`, the
    solution's own format score, changes the demands (see `verifier_format_score`). Raises ValueError without
    one of the two columns, or for lengths that differ.
    """
    correct = _column("correct", "whether the verified solution is right", columns)
    n_steps = _column("n_steps", "the number of its steps", columns)
    formats = columns.get("generator_format", [1.0] * len(completions))
    rows = zip(completions, correct, n_steps, formats, strict=True)
    return [None if _missing(truth) else _judged(_text(done), truth, k, f) for done, truth, k, f in rows]


def _outcome(solution: str, gold: Any) -> float | None:
    status = "no_gold" if _missing(gold) else answers_status(extract_answer(solution), gold)
    return None if status == "no_gold" else float(status == "match")


def _agreement(solution: str, verifications: Sequence[str]) -> float | None:
    n_steps = len(split_steps(solution))
    finals = [parse_verification(text, n_steps).final for text in verifications]
    found = [final for final in finals if final is not None]
    return sum(found) / len(found) if found else None


def _judged(verification: str, correct: float, n_steps: int, generator_format: float) -> float:
    final = parse_verification(verification, n_steps).final
    return verifier_reward(final, correct, verifier_format_score(verification, n_steps, generator_format))


def _missing(value: Any) -> bool:
    """None, or the NaN that tables put in its place."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _column(name: str, meaning: str, columns: Mapping[str, Any]) -> Sequence:
    if columns.get(name) is None:
        raise ValueError(f"this reward needs a column {name!r} ({meaning}), got {sorted(columns)}")
    return columns[name]


def _text(completion: Completion) -> str:
    """What the model wrote: the text, or the texts of the assistant's messages."""
    if isinstance(completion, str):
        return completion
    return "".join(_message_text(m) for m in completion if m.get("role", "assistant") == "assistant")


def _message_text(message: Mapping[str, Any]) -> str:
    """Text of a message; thoughts that a chat template's parser cut out go back into their tags."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(block.get("text") or "" for block in content)
    thoughts = message.get("reasoning_content") or message.get("thinking")
    return f"<think>{thoughts}</think>{content}" if thoughts else content
