"""Exercises of notebook 0: reading verdicts out of a verification, and putting them on tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

BODY = (
    r"<step_verification>"
    r"<step>17+5=22, as claimed \boxed{CORRECT}</step>"
    r"<step>at first it looks \boxed{CORRECT}, but 22-3=19 \boxed{INCORRECT}</step>"
    r"<step>19+4=23 \boxed{CORRECT}</step>"
    r"<step>23+9=3, but 23+9=1 \boxed{INCORRECT}</step>"
    r"</step_verification>"
)
FINAL = r"<final_verification>\boxed{INCORRECT}</final_verification>"
TRUE = [True, False, True, False]


def verdicts_of(answer: Callable[[str, int], list[bool] | None]) -> None:
    r"""``answer(verification, n_steps)``: one bool a step, True for CORRECT; None unless every step has one.

    A step stands between ``<step>`` and ``</step>``; its verdict is the last ``\boxed{...}`` in it.
    """
    found = answer(BODY + FINAL, len(TRUE))
    assert found is not None, "there are four steps, each with its verdict, and you read none"
    assert list(found[:-1]) != TRUE, (
        "the final judgement is counted as a step: it stands outside <step> and </step>"
    )
    assert len(found) == len(TRUE), (
        f"four steps, but {len(found)} verdicts: of a step only the last box counts"
    )
    assert not all(found), "every step is CORRECT for you: the word INCORRECT holds the word CORRECT as well"
    assert found != [not true for true in TRUE], "the verdicts are turned round: True stands for CORRECT"
    assert found[1] is False, (
        "step 2 mentions CORRECT on the way and closes with INCORRECT: the box that closes a step counts"
    )
    assert found == TRUE, f"read {found}, but the verdicts are {TRUE}"
    _incomplete(answer)


def _incomplete(answer: Callable[[str, int], list[bool] | None]) -> None:
    """A verdict too few, and no verdicts at all."""
    few = answer(BODY + FINAL, 5)
    assert few != [*TRUE, False], "nobody judged the fifth step, and you call it INCORRECT: None is not False"
    assert few is None, f"four verdicts for five steps say nothing for certain: None is wanted, not {few}"
    silent = answer(BODY.replace(r"19+4=23 \boxed{CORRECT}", "19+4=23"), len(TRUE))
    assert silent is None, f"step 3 closes without a verdict, so there is none for the step: {silent}"
    assert answer("I would rather not say.", 3) is None, "a text without steps has no verdicts"


def rewards_on_tokens(answer: Callable[[list[bool] | None, Sequence[int], int], list[float]]) -> None:
    """``answer(judgements, ends, length)``: a number for each of ``length`` tokens.

    +1/K on the last token of a step judged correct, -1/K of one judged incorrect, 0 elsewhere; all 0 where
    the judgements could not be read (None) or are not one for each of the K steps.
    """
    found = [float(x) for x in answer([True, False], [2, 6], 9)]
    assert len(found) == 9, f"9 tokens need 9 numbers, not {len(found)}"
    assert _places(found) != [3, 7], "one token late: `ends` holds the last token of each step itself"
    assert _places(found) != [1, 5], "one token early: `ends` holds the last token of each step itself"
    spread = len(_places(found)) > 2
    assert not spread, "more than two tokens carry a reward: only the last token of a step does"
    assert found[2:7:4] != [1.0, -1.0], "a step earns 1/K, not 1: else long solutions collect more"
    assert found[2:7:4] != [0.5, 0.0], "a step judged incorrect costs 1/K; yours only earns nothing"
    assert found == [0, 0, 0.5, 0, 0, 0, -0.5, 0, 0], f"+1/2 at token 2 and -1/2 at token 6, not {found}"
    unread = [float(x) for x in answer(None, [2, 6], 9)]
    assert not any(unread), f"an unread verification earns nothing at all, but you pay {sum(unread):+.1f}"
    short = [float(x) for x in answer([True], [2, 6], 9)]
    assert not any(short), "one verdict for two steps: nobody knows whose it is, so it must not be paid"


def _places(numbers: Sequence[float]) -> list[int]:
    return [place for place, number in enumerate(numbers) if number]
