"""The checks of notebook 05: they accept its solutions, and name what typical mistakes have in common."""

from __future__ import annotations

import re

import pytest
import torch

from tangolite.exercises import verifier
from tangolite.rewards import ClassWeights


@pytest.fixture(scope="module")
def solved(solutions):
    return solutions("05_verifier")


def picked(right, wrong, is_correct):
    return torch.where(is_correct, torch.tensor(float(right)), torch.tensor(float(wrong)))


def root(count: float) -> float:
    return max(count, 1e-30) ** -0.5


def mean_one(weights):
    return weights / weights.mean()


def test_the_weights_check_tells_mistakes_apart(solved, told_apart) -> None:
    def masked(right, wrong, c):
        with_zero = torch.tensor([right, wrong]) ** -0.5  # infinite for a count of 0
        return mean_one(c * with_zero[0] + ~c * with_zero[1])

    def by_batch(right, wrong, c):
        return mean_one(picked(root(float(c.sum())), root(float((~c).sum())), c))

    def over_classes(right, wrong, c):
        return picked(root(right), root(wrong), c) * 2 / (root(right) + root(wrong))

    told_apart(verifier.weights_of, solved["weights_of"], {
        "not scaled": lambda r, w, c: picked(root(r), root(w), c),
        "grow with the count": lambda r, w, c: mean_one(picked(root(w), root(r), c)),
        "this is 1/count": lambda r, w, c: mean_one(picked(root(r) ** 2, root(w) ** 2, c)),
        "the square root is missing": lambda r, w, c: picked(root(r) ** 2, root(w) ** 2, c),
        "their sum is 1": lambda r, w, c: mean_one(picked(root(r), root(w), c)) / len(c),
        "the \\*samples'\\* weights do not": over_classes,
        "those of this batch": by_batch,
        "divides by zero": lambda r, w, c: mean_one(picked(r**-0.5, w**-0.5, c)),
        "0 times infinity": masked,
        "got list": lambda r, w, c: mean_one(picked(root(r), root(w), c)).tolist(),
        "the shape is": lambda r, w, c: torch.tensor([root(r), root(w)]),
    })  # fmt: skip


def test_the_solution_weighs_as_the_package_does(solved) -> None:
    batches = torch.rand(6, 16, generator=torch.Generator().manual_seed(0)) < 0.2
    weights = ClassWeights()
    for batch in batches:
        wanted = weights(batch)
        found = solved["weights_of"](weights.correct_ema, weights.incorrect_ema, batch)
        torch.testing.assert_close(found, wanted)


def test_the_vote_check_tells_mistakes_apart(solved, told_apart) -> None:
    def most(finals):
        counts = sorted(((finals.count(v), str(v), v) for v in (True, False, None)), reverse=True)
        return None if counts[0][0] == counts[1][0] else counts[0][2]

    def share(finals):
        read = [final for final in finals if final is not None]
        mean = sum(read) / len(read)
        return None if mean == 0.5 else mean > 0.5

    def in_place(finals):
        while None in finals:
            finals.remove(None)
        return solved["vote_of"](finals)

    told_apart(verifier.vote_of, solved["vote_of"], {
        "a tie is no verdict": lambda f: sum(v is True for v in f) >= sum(v is False for v in f),
        "one CORRECT against nothing": lambda f: None if f.count(True) * 2 == len(f)
            else f.count(True) > len(f) / 2,
        "two of three say INCORRECT": lambda f: True in f,
        "expected True, False or None": lambda f: 2 * sum(v is True for v in f) - len(f),
        "it stopped with ZeroDivisionError": share,
        "is changed": in_place,
        r"\[True, None, None, None\] it gave None": most,
    })  # fmt: skip


def test_the_parser_check_tells_mistakes_apart(solved, told_apart) -> None:
    def numbered(text):
        return [(m[1], line) for line in text.split("\n") if (m := re.match(r"\s*([0-9]+)\.", line))]

    def in_order(text, n):
        return n > 0 and [k for k, _ in numbered(text)] == [str(k + 1) for k in range(n)]

    def read(text, n, verdict, form=in_order):
        if not form(text, n):
            return None
        found = [verdict(line) for _, line in numbered(text)]
        return None if None in found else found

    def word(line, split=str.rpartition):
        tail = split(line, "->")[2] if "->" in line else ""
        return {"pass": True, "fail": False}.get(tail.strip(" .\t\r").lower())

    def exact(line):
        return {"PASS": True, "FAIL": False}.get(line.rpartition("-> ")[2])

    def by_digits(text, n):
        starts = [line.partition(".")[0] for line in text.split("\n")]
        found = [int(start) for start in starts if start.isdigit() and len(start) < 1000]
        return solved["read_lines"](text, n) if found else None

    def by_int(text, n):
        numbers = [int(k) for k, _ in numbered(text)]
        return read(text, n, word, lambda *_: n > 0 and numbers == list(range(1, n + 1)))

    def cut(text, n):
        found = [word(line) for _, line in numbered(text)]
        return None if n < 1 or None in found or len(found) < n else found[:n]

    def sorted_lines(text, n):
        return read("\n".join(sorted(text.split("\n"))), n, word)

    def uncounted(text, n):
        return read(text, n, word, lambda text, n: n > 0 and len(numbered(text)) == n)

    told_apart(verifier.read_lines, solved["read_lines"], {
        "any case": lambda t, n: read(t, n, exact),
        "the analysis may say PASS": lambda t, n: read(t, n, lambda line: "pass" in line.lower()),
        "the analysis may hold others": lambda t, n: read(t, n, lambda line: word(line, str.partition)),
        "three lines for two steps": cut,
        "here are two lines 1": uncounted,
        "out of order": sorted_lines,
        "neither FAIL nor": lambda t, n: read(t, n, lambda line: bool(word(line))),
        "PASS must close the line": lambda t, n: read(t, n, lambda line:
            True if line.rpartition("->")[2].strip().lower().startswith("pass") else word(line)),
        "not an empty list": lambda t, n: [] if n == 0 else solved["read_lines"](t, n),
        "5000 digits": by_int,
        "a superscript": by_digits,
        "for random pieces": lambda t, n: [False] * n if "\t-" in t else solved["read_lines"](t, n),
        "it stopped with IndexError": lambda t, n: ([word(line) for _, line in numbered(t)][n - 1]
            and None) or solved["read_lines"](t, n),
    })  # fmt: skip


@pytest.mark.parametrize("name", ["weights_of", "vote_of", "read_lines"])
def test_a_stub_is_still_the_readers_turn(name, capsys) -> None:
    from tangolite.exercises import attempt

    def stub(*_):
        raise NotImplementedError("your turn")

    attempt(getattr(verifier, name), stub)
    assert "your turn" in capsys.readouterr().out
