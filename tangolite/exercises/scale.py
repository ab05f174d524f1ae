"""Checks for the exercises of notebook 12: what fits a card, gradients of processes, who works on what."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from tangolite.lab.planner import SHAPES, Shape

CASES = (("Qwen/Qwen2.5-7B", 80e9, 4352, 4), ("Qwen/Qwen2.5-0.5B-Instruct", 8e9, 1280, 2),
         ("Qwen/Qwen2.5-7B", 8e9, 4352, 2))  # fmt: skip


def completions_that_fit(answer: Callable[[Shape, float, int, int], int]) -> None:
    """How many completions can be sampled at a time beside a frozen model, with 8% of the card left free.

    Asked with a shape, the card's memory in bytes, tokens of a completion, and bytes of a number.
    """
    for name, memory, tokens, size in CASES:
        shape = SHAPES[name]
        found = answer(shape, memory, tokens, size)
        case = f"{name} in {size} bytes on {memory / 1e9:.0f} GB, {tokens} tokens: "
        assert isinstance(found, int | float), f"{case}return a number, not {type(found).__name__}"
        assert found >= 0, f"{case}{found} completions; where not even the model fits there are none"
        assert found == int(found), f"{case}{found} is not a number of completions, round down"
        weights, each = size * shape.parameters, _cache(shape, tokens) * size
        right = max(0, int((0.92 * memory - weights) // each))
        assert found != right + 1, f"{case}{found} is one too many, round down"
        if found != right:
            mistakes = _fitting_mistakes(shape, memory, weights, size, each)
            words = next((words for words, wrong in mistakes.items() if found == int(wrong)), "")
            raise AssertionError(case + (words or f"{found:.0f} is too {'many' if found > right else 'few'}"))


def _cache(shape: Shape, tokens: int) -> int:
    return tokens * 2 * shape.layers * shape.kv_heads * shape.head_size


def _fitting_mistakes(shape: Shape, memory: float, weights: int, size: int, each: int) -> dict[str, float]:
    room = 0.92 * memory - weights
    return {
        "leave 8% of the card free": (memory - weights) // each,
        "8% of the card stay free, not of what the model leaves": 0.92 * (memory - weights) // each,
        "the model sits on the card, too": 0.92 * memory // each,
        "a parameter takes `size` bytes": (0.92 * memory - weights / size) // each,
        "a number of the cache takes `size` bytes": room // (each / size),
        "there are keys and values: two vectors for a token in each layer": room // (each / 2),
        "every layer keeps keys and values of its own": room // (each / shape.layers),
        "which heads have keys? Only kv_heads of them": room // (each * shape.heads / shape.kv_heads),
    }


def combined(answer: Callable[[list[Float[Tensor, " P"]], list[int]], Float[Tensor, " P"]]) -> None:
    """The gradient of the mean over all tokens, from the processes' own means and their counts of tokens."""
    draws = torch.Generator().manual_seed(7)
    for tokens in ([4, 4], [7, 2], [3, 1, 0, 5]):
        each = torch.randn(sum(tokens), 5, generator=draws)  # the gradient of every token's loss
        own = [part.sum(0) / max(len(part), 1) for part in each.split(tokens)]
        found, right = answer([g.clone() for g in own], list(tokens)), each.mean(0)
        assert isinstance(found, Tensor), f"a gradient must come back, not {type(found).__name__}"
        assert found.shape == right.shape, (
            f"one gradient of 5 numbers must come back, not {tuple(found.shape)}"
        )
        if not torch.allclose(found, right, atol=1e-5):
            mistakes = _combining_mistakes(own, tokens, right)
            words = [words for words, wrong in mistakes.items() if torch.allclose(found, wrong, atol=1e-5)]
            off = ((found - right).norm() / right.norm()).item()
            raise AssertionError(f"{tokens} tokens: {words[0] if words else f'off by {off:.0%}'}")


def _combining_mistakes(own: list[Tensor], tokens: list[int], right: Tensor) -> dict[str, Tensor]:
    weighted = sum(n * g for n, g in zip(tokens, own, strict=True))
    inverse = [1 / max(n, 1) for n in tokens]
    upside_down = sum(x * g for x, g in zip(inverse, own, strict=True)) / sum(inverse)
    return {
        "this is the mean of the processes' means: a token counts more where there are few of them":
            sum(own) / len(own),
        "this is the sum of the processes' means": sum(own),
        "weighted by tokens, but not divided by all of them: this is the gradient of a sum": weighted,
        "divided by the number of processes: the weights add up to the number of tokens": weighted / len(own),
        "the weights are upside down: a process with more tokens must count more, and here it counts less": upside_down,
        "this is the gradient of one process alone": own[0],
        "right, and then divided by the number of processes once more": right / len(own),
    }  # fmt: skip


def work_lists(answer: Callable[[list[float], int], list[list[tuple[int, float]]]]) -> None:
    """For each process its (piece, share) pairs: dealt like cards; the last piece at 0 fills the lists up."""
    for shares, processes in (([0.1, 0.2, 0.3, 0.25, 0.15], 2), ([0.5, 0.3, 0.2], 4)):
        found, last = answer(list(shares), processes), len(shares) - 1
        case = f"{len(shares)} pieces, {processes} processes: "
        assert isinstance(found, list | tuple) and len(found) == processes, f"{case}one list for each process"
        lists = [[tuple(pair) for pair in mine] for mine in found]
        lengths = [len(mine) for mine in lists]
        assert len(set(lengths)) == 1, f"{case}lists of {lengths}: the shorter miss a meeting, and it hangs"
        assert lengths[0] == -(-len(shares) // processes), f"{case}lists of {lengths[0]}, longer than need be"
        pieces = sorted(i for mine in lists for i, share in mine if share)
        twice = sorted({i for i in pieces if pieces.count(i) > 1})
        assert not twice, f"{case}pieces {twice} count twice: what fills up has a share of 0"
        lost = sorted(set(range(len(shares))) - set(pieces))
        assert not lost, f"{case}pieces {lost} count nowhere"
        wrong = [i for mine in lists for i, share in mine if share and share != shares[i]]
        assert not wrong, f"{case}pieces {wrong} have another share than was given"
        for rank, mine in enumerate(lists):
            own = [(i, shares[i]) for i in range(rank, len(shares), processes)]
            assert [pair for pair in mine if pair[1]] == own, (
                f"{case}process {rank} counts {[i for i, share in mine if share]}, and piece i is dealt to "
                "process i modulo the number of processes, in order"
            )
            assert mine[: len(own)] == own, f"{case}process {rank}: what fills up comes last"
            others = {i for i, _ in mine[len(own) :]} - {last}
            assert not others, (
                f"{case}process {rank} fills up with {others}, not with the last of all, {last}"
            )
