"""Checks for the exercises of the notebooks: each says what is wrong with an answer, not only that it is.

A notebook has one module here, and an exercise one function in it that takes the reader's answer and asserts:

    from tangolite.exercises import attempt, tokens

    attempt(tokens.mask_from_lengths, my_mask)

The solutions are in `notebooks/solutions/`; the tests run every check on its solution and on mistakes.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def attempt(check: Callable[..., None], *answer: Any) -> None:
    """Run ``check`` on an answer and print in one line how it went: your turn, not yet (and why), solved.

    Nothing is raised, so that a notebook runs from top to bottom with its exercises open.  A stub says that
    it is still one by raising NotImplementedError.
    """
    name = check.__name__.replace("_", " ")
    try:
        check(*answer)
    except NotImplementedError:
        print(f"{name}: your turn")
    except AssertionError as fault:
        print(f"{name}: not yet. {fault}")
    except Exception as error:
        print(f"{name}: not yet. {_stopped(error)}")
    else:
        print(f"{name}: solved")


def _stopped(error: Exception) -> str:
    """What stopped an answer, and in which of the reader's lines: the last one that is not ours."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "tangolite" not in f.filename]
    place = f" in line {frames[-1].lineno} of the cell ({frames[-1].line})" if frames else ""
    return f"It stopped{place} with {type(error).__name__}: {error}"


def name_mistake(
    found: Tensor, right: Tensor, mistakes: Mapping[str, Tensor], otherwise: str, *, atol: float = 1e-4
) -> None:
    """Nothing if ``found`` is right; else fails with the words of the first mistake that gives it, or others.

    ``mistakes`` maps words to what an answer would be that makes this mistake.
    """

    def same(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and torch.allclose(
            a.detach().double(), b.detach().double(), rtol=1e-4, atol=atol
        )

    if not same(found, right):
        raise AssertionError(
            next((words for words, wrong in mistakes.items() if same(found, wrong)), otherwise)
        )
