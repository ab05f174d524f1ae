"""The checks of notebook 10's exercises: each accepts its solution and tells typical mistakes apart."""

from __future__ import annotations

import math

import pytest
import torch

from tangolite.exercises import covrl
from tangolite.losses import composite_logp, hybrid_logp


@pytest.fixture
def solved(solutions):
    return solutions("10_covrl")


# ---- the recipes of the reward


def fill(x, mask):
    return x.masked_fill(~mask, 0.0)


def test_reward(solved, told_apart):
    solution = solved["reward"]

    def masked_late(logp, mask, recipe):
        token = logp.exp() if recipe.endswith("prob") else logp
        total = (token * mask).sum(1)
        return total / mask.sum(1) if recipe.startswith("mean") else total

    def unmasked_exp(logp, mask, recipe):
        token = fill(logp, mask)
        token = token.exp() if recipe.endswith("prob") else token
        return token.sum(1) / (mask.sum(1) if recipe.startswith("mean") else 1)

    def by_width(logp, mask, recipe):
        token = solution(logp, mask, recipe)
        return token * mask.sum(1) / mask.shape[1] if recipe.startswith("mean") else token

    def geometric(logp, mask, recipe):
        return solution(logp, mask, recipe.replace("prob", "logp")).exp()

    def log_after(logp, mask, recipe):
        found = solution(logp, mask, recipe.replace("logp", "prob"))
        return found.log() if recipe.endswith("logp") else found

    told_apart(
        covrl.reward,
        solution,
        {
            "one reward a trace": lambda logp, mask, recipe: fill(logp, mask),
            "-inf there": masked_late,
            "masked places became exp": unmasked_exp,
            "divided by the width A": by_width,
            "geometric mean": lambda *given: geometric(*given) if "prob" in given[2] else solution(*given),
            "log of the mean probability": log_after,
            "product of the probabilities": lambda logp, mask, recipe: (
                fill(logp, mask).sum(1).exp() if "prob" in recipe else solution(logp, mask, recipe)
            ),
            "tokens outside the mask": lambda logp, mask, recipe: solution(
                logp, torch.ones_like(mask), recipe
            ),
            "sum_logp: this is the recipe mean_logp": lambda logp, mask, recipe: solution(
                logp, mask, recipe.replace("sum", "mean")
            ),
            "and should be": lambda logp, mask, recipe: -solution(logp, mask, recipe),
        },
    )


# ---- the token ratio


def ratio(new, old):
    """exp(new(p, q, alpha) - old(old_p, old_q, alpha)), the old part detached."""
    return lambda p, q, old_p, old_q, a: (new(p, q, a) - old(old_p, old_q, a).detach()).exp()


def composite(p, q, alpha):
    return composite_logp(p, q)


def literally(p, q, old_p, old_q, alpha):
    new, old = (p.exp() + q.exp()) / 2, alpha * old_p.exp() + (1 - alpha) * old_q.exp()
    return new / old.detach()


def test_token_ratio(solved, told_apart):
    solution = solved["token_ratio"]
    told_apart(
        covrl.token_ratio,
        solution,
        {
            "One ratio a token": lambda *given: solution(*given).prod(1),
            "log of the ratio": lambda *given: solution(*given).log(),
            "upside down": lambda *given: 1 / solution(*given),
            "knows alpha": ratio(composite, composite),
            r"share of the \*prior\*": ratio(composite, lambda p, q, a: hybrid_logp(q, p, a)),
            "numerator is the new hybrid": lambda p, q, old_p, old_q, a: (
                solution(p, q, old_p, old_q, a)
                if a == 0.5
                else ratio(hybrid_logp, hybrid_logp)(p, q, old_p, old_q, a)
            ),
            "numerator is the prior alone": ratio(lambda p, q, a: p, hybrid_logp),
            "old prior alone": ratio(composite, lambda p, q, a: p),
            "factor 1/2": ratio(lambda p, q, a: torch.logaddexp(p, q), hybrid_logp),
            "multiplies up ratios along": lambda *given: solution(*given).cumprod(1),
            "stay in log space": literally,
            "Detach them": lambda p, q, old_p, old_q, a: (
                composite_logp(p, q) - hybrid_logp(old_p, old_q, a)
            ).exp(),
            "No gradient reaches": lambda *given: solution(*given).detach(),
            "one of the new": lambda p, q, *old: solution(p, q.detach(), *old),
        },
    )


# ---- a collapse in a table

TRUTH = covrl.TRUTH


def first_below(values, threshold, window=5, shift=0):
    for place in range(window - 1, len(values)):
        if sum(values[place - window + 1 : place + 1]) / window < threshold:
            return place + shift
    return None


def reader(key=TRUTH, window=5, share=0.8, start=None, shift=0, missing=None):
    """A way to read the table; `missing` None passes over what is missing, by numbering what is left."""

    def answer(rows):
        values = [row.get(key, missing) for row in rows]
        values = [value for value in values if value is not None]
        if len(values) < 5:
            return None
        first = sum(values[:5]) / 5 if start is None else start(values)
        return first_below(values, share * first, window, shift)

    return answer


def test_collapse(solved, told_apart):
    solution = solved["first_collapse"]

    def falls(rows, key, sign):
        values = [sign * row[key] for row in rows if key in row]
        return None if len(values) < 10 or values[-1] >= values[0] else solution(rows)

    def only(runs_like, found):
        """The solution, except for tables that begin like the run named."""
        table = covrl.runs()[runs_like]
        return lambda rows: found if rows == table else solution(rows)

    def impatient(rows):
        if len(rows) < 5:
            return 0
        return solution(rows)

    told_apart(
        covrl.collapse,
        solution,
        {
            "look at step_truth_posterior": lambda rows: falls(rows, "reward_prior", 1),
            "not True or False": lambda rows: solution(rows) is not None,
            "A single update is noise": reader(window=1),
            "not 0.8 itself": reader(start=lambda values: 1.0),
            "not the first alone": reader(start=lambda values: values[0]),
            r"0.8 \*times\*": reader(share=1.0, start=lambda values: sum(values[:5]) / 5 - 0.2),
            "One too late": reader(shift=1),
            "where the window begins": reader(shift=-4),
            "the last update": lambda rows: None if solution(rows) is None else len(rows) - 1,
            "should say 16": lambda rows: 3,
            "Run C has not": only("C", 17),
            "Run D has not": only("D", 30),
            "starts at 0.6": lambda rows: solution(rows) if rows[0].get(TRUTH, 1) > 0.7 else 4,
            "fewer than five": impatient,
            "KeyError": lambda rows: solution(rows) if len([row[TRUTH] for row in rows]) else None,
            "keeps its number": reader(),
            "a missing one is not 0": reader(missing=0.0),
        },
    )


def test_only_run_b_of_the_made_up_runs_collapses(solved):
    found = {name: solved["first_collapse"](rows) for name, rows in covrl.runs().items()}
    assert found == {"A": None, "B": 16, "C": None, "D": None}


def test_the_reward_does_not_give_the_collapse_away():
    rise = {name: rows[-1]["reward_prior"] - rows[0]["reward_prior"] for name, rows in covrl.runs().items()}
    assert max(rise, key=rise.get) == "B" and not any(map(math.isnan, rise.values()))
