"""The checks of notebook 12: the solutions pass, and typical mistakes are told apart."""

from __future__ import annotations

import math

import pytest

from tangolite.exercises import scale as check


def fit(
    shape, memory, tokens, size, *, share=0.92, heads=None, layers=None, kinds=2, weight=None, number=None
):
    free = share * memory - shape.parameters * (size if weight is None else weight)
    one = kinds * (layers or shape.layers) * (heads or shape.kv_heads) * shape.head_size
    return max(0, int(free // (tokens * one * (number or size))))


def test_counts_of_completions_are_told_apart(solutions, told_apart):
    mistakes = {
        "leave 8% of the card free": lambda *a: fit(*a, share=1),
        "not of what the model leaves": lambda s, m, *a: fit(
            s, 0.92 * (m - s.parameters * a[-1]), *a, share=1, weight=0
        ),
        "the model sits on the card": lambda *a: fit(*a, weight=0),
        "a parameter takes": lambda *a: fit(*a, weight=1),
        "a number of the cache takes": lambda *a: fit(*a, number=1),
        "keys and values": lambda *a: fit(*a, kinds=1),
        "every layer": lambda *a: fit(*a, layers=1),
        "which heads": lambda s, *a: fit(s, *a, heads=s.heads),
        "is not a number of completions": lambda *a: fit(*a) + 0.5,
        "one too many": lambda *a: fit(*a) + 1,
        "too few": lambda *a: fit(*a) // 2,
        "return a number": lambda *a: None,
    }
    told_apart(check.completions_that_fit, solutions("12_scale_up")["completions_that_fit"], mistakes)


def test_where_the_model_does_not_fit_there_are_none(solutions):
    solved = solutions("12_scale_up")["completions_that_fit"]

    def negative(shape, memory, tokens, size):
        return solved(shape, memory, tokens, size) or -50

    with pytest.raises(AssertionError, match="there are none"):
        check.completions_that_fit(negative)


def weighted(gradients, weights):
    return sum(w * g for w, g in zip(weights, gradients, strict=True))


def test_gradients_put_together_wrongly_are_told_apart(solutions, told_apart):
    right = solutions("12_scale_up")["combined"]
    mistakes = {
        "mean of the processes' means": lambda g, n: sum(g) / len(g),  # as given
        "sum of the processes' means": lambda g, n: sum(g),
        "gradient of a sum": weighted,
        "divided by the number of processes: the weights": lambda g, n: weighted(g, n) / len(g),
        "upside down": lambda g, n: weighted(g, [1 / x for x in n]) / sum(1 / x for x in n),
        "one process alone": lambda g, n: g[0],
        "once more": lambda g, n: right(g, n) / len(g),
        r"\[4, 4\] tokens: off by": lambda g, n: g[0] * g[1],
        "5 numbers": lambda g, n: right(g, n).sum(),
        "not list": lambda g, n: list(g),
    }
    told_apart(check.combined, right, mistakes)


def test_a_process_without_tokens_counts_for_nothing():
    def skipping_none(gradients, tokens):
        return weighted(gradients, [max(n, 1) for n in tokens]) / sum(max(n, 1) for n in tokens)

    with pytest.raises(AssertionError, match=r"\[3, 1, 0, 5\] tokens: off by"):
        check.combined(skipping_none)


def lists(shares, processes, *, fill=0.0, piece=None, blocks=False, extra=0):
    most = -(-len(shares) // processes)
    found = []
    for rank in range(processes):
        mine = range(most * rank, min(most * (rank + 1), len(shares))) if blocks else range(
            rank, len(shares), processes
        )  # fmt: skip
        own = [(i, shares[i]) for i in mine]
        last = len(shares) - 1 if piece is None else piece
        found.append(own + [(last, fill)] * (most + extra - len(own)))
    return found


def test_lists_of_work_are_told_apart(solutions, told_apart):
    mistakes = {
        "it hangs": lambda s, n: [mine[: len(range(r, len(s), n))] for r, mine in enumerate(lists(s, n))],
        "count twice": lambda s, n: lists(s, n, fill=s[-1]),
        "modulo the number": lambda s, n: lists(s, n, blocks=True),
        "fills up with": lambda s, n: lists(s, n, piece=0),
        "longer than need be": lambda s, n: lists(s, n, extra=1),
        "another share": lambda s, n: [[(i, 1.0 if x else 0.0) for i, x in mine] for mine in lists(s, n)],
        "count nowhere": lambda s, n: [[(i, x if i else 0.0) for i, x in mine] for mine in lists(s, n)],
        "comes last": lambda s, n: [sorted(mine, key=lambda pair: pair[1] > 0) for mine in lists(s, n)],
        "one list for each": lambda s, n: lists(s, n)[0],
    }
    told_apart(check.work_lists, solutions("12_scale_up")["work_lists"], mistakes)


def test_the_solution_is_the_share_that_one_process_alone_has(solutions):
    assert solutions("12_scale_up")["work_lists"]([0.25, 0.75], 1) == [[(0, 0.25), (1, 0.75)]]
    assert math.isclose(sum(x for mine in lists([0.5, 0.3, 0.2], 4) for _, x in mine), 1)
