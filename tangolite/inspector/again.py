"""Verify a solution again, a few tokens at a time, so that it shows how far it is and can be stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tangolite.models import Policy
from tangolite.prompts import CHAT, TINY, Prompts
from tangolite.sampling import sample

CHUNK = 16  # tokens between two looks at the stop button


def prompts_for(policy: Policy) -> Prompts:
    """A chat model is asked in words; the built-in tiny ones in their few tokens."""
    return CHAT if getattr(policy.tokenizer, "chat_template", None) else TINY


def verifications(
    policy: Policy,
    question: str,
    solution: str,
    n_steps: int,
    *,
    n: int = 1,
    temperature: float = 1.0,
    most: int = 512,
    seed: int = 0,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[list[str], int]]:
    """Yields (texts so far, tokens made of each at most) until all ``n`` have ended or have ``most`` tokens.

    The tokens are those of the policy's own distribution at this temperature (0: the likeliest).  Asked
    ``stopped`` every few tokens; after a yes nothing more comes.
    """
    prompts, random = prompts_for(policy), torch.Generator().manual_seed(seed)
    asked = prompts.encode(policy.tokenizer, prompts.verifier(question, solution, n_steps))
    written: list[list[int]] = [[] for _ in range(n)]
    open_rows, made = list(range(n)), 0
    while open_rows and made < most and not stopped():
        size = min(CHUNK, most - made)
        more = sample(policy, [asked + written[row] for row in open_rows], max_new_tokens=size,
                      temperature=temperature, generator=random)  # fmt: skip
        for place, row in enumerate(open_rows):
            written[row] += more.tokens(place)
        open_rows = [row for place, row in enumerate(open_rows) if not more.terminated[place]]
        made += size
        yield [policy.decode(ids) for ids in written], made
