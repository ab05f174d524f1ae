"""The checks of notebook 0's exercises accept the solutions and name the mistakes that are usually made."""

from __future__ import annotations

import re

from tangolite.exercises import start


def boxes(text: str) -> list[list[str]]:
    """The words in the boxes of every step."""
    steps = re.findall(r"<step>(.*?)</step>", text)
    return [re.findall(r"\\boxed\{(\w+)\}", step) for step in steps]


def enough(verdicts: list, n_steps: int) -> list | None:
    return verdicts if len(verdicts) == n_steps and None not in verdicts else None


def padded(text: str, n_steps: int) -> list[bool] | None:
    found = [words[-1] == "CORRECT" for words in boxes(text) if words]
    return [*found, *[False] * (n_steps - len(found))]


def last_box(text: str, n_steps: int) -> list[bool] | None:
    found = [bool(words) and words[-1] == "CORRECT" for words in boxes(text)]
    return enough(found, n_steps)


def of_no_step(text: str, n_steps: int) -> list[bool] | None:
    return last_box(text, n_steps) if boxes(text) else []


def every_box(text: str, n_steps: int) -> list[bool]:
    return [word == "CORRECT" for words in boxes(text) for word in words]


def with_the_final_one(text: str, n_steps: int) -> list[bool]:
    found = re.findall(r"\\boxed\{(\w+)\}</(?:step|final_verification)>", text)
    return [word == "CORRECT" for word in found]


def test_reading_verdicts(solutions, told_apart) -> None:
    told_apart(
        start.verdicts_of,
        solutions("00_start_here")["verdicts_of"],
        {
            "holds the word CORRECT": lambda t, n: enough(["CORRECT" in w[-1] for w in boxes(t)], n),
            "on the way": lambda t, n: enough([w[0] == "CORRECT" for w in boxes(t)], n),
            "turned round": lambda t, n: enough([w[-1] != "CORRECT" for w in boxes(t)], n),
            "only the last box counts": every_box,
            "final judgement": with_the_final_one,
            "read none": lambda t, n: None,
            "None is not False": padded,
            "say nothing for certain": lambda t, n: [w[-1] == "CORRECT" for w in boxes(t) if w],
            "closes without a verdict": last_box,
        },
    )


def paid(judgements, ends, length, *, right=1.0, wrong=-1.0, late=0, share=True) -> list[float]:
    numbers = [0.0] * length
    for verdict, end in zip(judgements or [], ends, strict=False):
        numbers[end + late] = (right if verdict else wrong) / (len(ends) if share else 1)
    return numbers


def whole_steps(judgements, ends, length) -> list[float]:
    begins = [0, *(end + 1 for end in ends)]
    numbers = [0.0] * length
    for verdict, begin, end in zip(judgements or [], begins, ends, strict=False):
        numbers[begin : end + 1] = [0.5 if verdict else -0.5] * (end + 1 - begin)
    return numbers


def test_rewards_on_tokens(solutions, told_apart) -> None:
    told_apart(
        start.rewards_on_tokens,
        solutions("00_start_here")["rewards_on_tokens"],
        {
            "one token late": lambda j, e, n: paid(j, e, n, late=1),
            "one token early": lambda j, e, n: paid(j, e, n, late=-1),
            "1/K, not 1": lambda j, e, n: paid(j, e, n, share=False),
            "only earns nothing": lambda j, e, n: paid(j, e, n, wrong=0.0),
            "more than two tokens": whole_steps,
            "9 numbers": lambda j, e, n: paid(j, e, n)[: e[-1] + 1],
            "unread": lambda j, e, n: paid([False] * len(e) if j is None else j, e, n),
            "one verdict for two steps": paid,
        },
    )
