"""The checks of notebook 04: they accept its solutions, and name what typical mistakes have in common."""

from __future__ import annotations

import math
import re

import pytest
import torch

from tangolite.exercises import generator
from tangolite.grading import answers_match
from tangolite.parsing import extract_answer


@pytest.fixture(scope="module")
def solved(solutions):
    return solutions("04_generator")


def first_box(text, gold):
    if not gold or not gold.strip():
        return math.nan
    answer = re.search(r"<answer>.*?\\boxed\{([^}]*)\}", text)
    return float(answers_match(answer and answer[1], gold))


def any_box(text, gold):
    if not gold or not gold.strip():
        return math.nan
    boxes = re.findall(r"\\boxed\{([^}]*)\}", text)
    return float(any(answers_match(box, gold) for box in boxes))


def last_complete_box(text, gold):
    if not gold or not gold.strip():
        return math.nan
    boxes = re.findall(r"\\boxed\{([^}]*)\}", text)
    return float(bool(boxes) and answers_match(boxes[-1], gold))


def test_the_reward_check_tells_mistakes_apart(solved, told_apart) -> None:
    def read(text, gold):
        return float(answers_match(extract_answer(text), gold))

    def named(gold):
        return gold is None or not gold.strip()

    told_apart(generator.reward_of, solved["reward_of"], {
        "not as strings": lambda t, g: math.nan if named(g) else float(extract_answer(t) == g.strip()),
        "the last one counts; the first was": first_box,
        "inside the thinking": any_box,
        "do not fall back": last_complete_box,
        r"\(None\) nothing can be graded": read,
        "of blanks is none": lambda t, g: math.nan if g is None else read(t, g),
        "no gold answer comes first": lambda t, g:
            0.0 if extract_answer(t) is None else math.nan if named(g) else read(t, g),
        "stopped with AttributeError": lambda t, g: float(extract_answer(t).strip() == g) or read(t, g),
        "expected a number": lambda t, g: str(read(t, g)),
    })  # fmt: skip


def grpo(reward, *, eps=1e-6, correction=1):
    return (reward - reward.mean()) / (reward.std(correction=correction) + eps)


def by_group(standardise):
    def answer(reward, group):
        advantage = torch.zeros_like(reward)
        for number in group.unique():
            advantage[group == number] = standardise(reward[group == number])
        return advantage

    return answer


def rounded_away(standardise):
    """The same, with equal rewards given 0 and NaN as it comes."""
    return by_group(lambda r: torch.zeros_like(r) if bool((r == r[0]).all()) else standardise(r))


def test_the_group_check_tells_mistakes_apart(solved, told_apart) -> None:
    zero = rounded_away(grpo)
    told_apart(generator.group_advantage, solved["group_advantage"], {
        "divides by G": by_group(lambda r: grpo(r, correction=0)),
        "not divided": by_group(lambda r: r - r.mean()),
        "whole batch": lambda r, g: grpo(r),
        "consecutive pieces": lambda r, g: torch.cat([grpo(part) for part in r.split(4 if len(r) == 8 and
                                                      len(set(g.tolist())) > 1 else len(r))]),
        "0/0": by_group(lambda r: grpo(r, eps=0.0)),
        "rounded in float32": by_group(grpo),
        "whole group NaN": zero,
        "counted as 0": lambda r, g: zero(r.nan_to_num(), g),
        "the answer is a list": lambda r, g: zero(r, g).tolist(),
        r"shape \(8, 1\)": lambda r, g: zero(r, g)[:, None],
    })  # fmt: skip


def test_the_pass_check_tells_mistakes_apart(solved, told_apart) -> None:
    def factorials(n, correct, k):
        wrong = n - correct
        ways = math.factorial(wrong) // math.factorial(wrong - k)
        return 1 - ways * math.factorial(n - k) / math.factorial(n)

    told_apart(generator.pass_at_k, solved["pass_at_k"], {
        "none of the k is right": lambda n, c, k: math.comb(n - c, k) / math.comb(n, k),
        "all k are right": lambda n, c, k: math.comb(c, k) / math.comb(n, k),
        "with replacement": lambda n, c, k: 1 - (1 - c / n) ** k,
        "whatever k is": lambda n, c, k: c / n,
        "fewer than k wrong": factorials,
        "not a number": lambda n, c, k: None,
        "list the subsets": lambda n, c, k: 1 - math.comb(n - c, k - 1) / math.comb(n, k - 1),
    })  # fmt: skip


def test_the_solutions_agree_with_the_package(solved) -> None:
    from tangolite.advantages import outcome_advantage
    from tangolite.evaluate import pass_at_k

    assert all(solved["pass_at_k"](9, c, k) == pass_at_k(9, c, k) for c in range(10) for k in range(1, 10))
    draws = torch.Generator().manual_seed(3)
    reward = torch.randint(2, (60,), generator=draws).float()
    reward[::7], group = torch.nan, torch.randint(6, (60,), generator=draws)
    package = outcome_advantage(reward, group, torch.ones(60, 1, dtype=torch.bool))[:, 0]
    assert torch.allclose(solved["group_advantage"](reward, group), package, atol=1e-5)
