"""The checks of notebook 07 accept its solutions and tell typical mistakes apart."""

from __future__ import annotations

from functools import partial

from tangolite.exercises import tango as checks

NAME = "07_tango"


def turn(
    update, *, updates, warmup, ratio, alpha0, alpha_min, first="generator", shift=0, wait=True, mistake=""
):
    """The solution with switches, each of which is a typical mistake."""

    def whose(n):
        if wait and n < warmup:
            return "verifier"
        place = (n - (warmup if wait else 0)) % (ratio + 1)
        if first == "verifier":
            return "verifier" if place == 0 else "generator"
        return "generator" if place < ratio else "verifier"

    if whose(update) == "verifier":
        return "verifier", alpha0 if mistake == "alpha" else None
    own, total = (sum(whose(n) == "generator" for n in range(m)) for m in (update, updates))
    done = {"both": update / updates, "share": own / updates, "next": (own + 1) / total}.get(
        mistake, own / total
    )
    if mistake == "linear":
        return "generator", alpha0 + (alpha_min - alpha0) * done
    return "generator", None if mistake == "none" else alpha0 * (alpha_min / alpha0) ** done


def test_turn_and_alpha(solutions, told_apart) -> None:
    checks.turn_and_alpha(turn)
    told_apart(checks.turn_and_alpha, solutions(NAME)["turn_and_alpha"], {
        "the warm-up is the verifier's alone": partial(turn, wait=False),
        "each round begins with 3": partial(turn, first="verifier"),
        "alpha is None, not 0.5": partial(turn, mistake="alpha"),
        "so give its alpha": partial(turn, mistake="none"),
        "not over those of both players": partial(turn, mistake="both"),
        "it has 60, not 140": partial(turn, mistake="share"),
        "count the updates it has": partial(turn, mistake="next"),
        "not by the same amount": partial(turn, mistake="linear"),
        "return a pair": lambda update, **plan: "generator",
        "comes one of the verifier": lambda update, **plan: (
            turn(update, **plan) if turn(update, **plan)[1] or update < plan["warmup"] else ("generator", 0.1)
        ),
    })  # fmt: skip


def lead(rows, arm, rival, *, compare=None, number=int, keep_first=False, level=False, everywhere=False):
    """The solution with switches, each of which is a typical mistake."""
    last = {}
    for row in rows:
        if row["eval/answer"]:
            place = (number(row["learned"]), row["arm"], row["seed"])
            if not (keep_first and place in last):
                last[place] = float(row["eval/answer"])
    for moment in sorted({place[0] for place in last}):
        mine = {s: v for (m, a, s), v in last.items() if (m, a) == (moment, arm)}
        other = {s: v for (m, a, s), v in last.items() if (m, a) == (moment, rival)}
        if not everywhere and not (mine and other):
            continue
        if compare:
            ahead = compare(mine, other)
        else:
            lowest, highest = min(mine.values(), default=1), max(other.values(), default=0)
            ahead = lowest >= highest if level else lowest > highest
        if ahead:
            return moment
    return None


def mean(values) -> float:
    return sum(values) / len(values)


def test_first_clear_lead(solutions, told_apart) -> None:
    checks.first_clear_lead(lead)
    told_apart(checks.first_clear_lead, solutions(NAME)["first_clear_lead"], {
        "a better mean": partial(lead, compare=lambda a, b: mean(a.values()) > mean(b.values())),
        "all seeds with all seeds": partial(lead, compare=lambda a, b: all(a[s] > b[s] for s in a)),
        "turn them into numbers": partial(lead, number=str),
        "'100' comes before '20'": lambda rows, a, b: (v := lead(rows, a, b, number=str)) and int(v),
        "the last stands": partial(lead, keep_first=True),
        "not to beat": partial(lead, level=True),
        "cannot be compared": partial(lead, everywhere=True),
    })  # fmt: skip
