"""Checks for the exercises of notebook 07, RL Tango."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from tangolite.advantages import alpha_at
from tangolite.tango import TangoConfig

Row = Mapping[str, str]

PLANS = (
    {
        "updates": 140,
        "warmup": 60,
        "ratio": 3,
        "alpha0": 0.5,
        "alpha_min": 0.01,
    },  # the recipe of the notebook
    {"updates": 440, "warmup": 40, "ratio": 3, "alpha0": 0.1, "alpha_min": 0.001},  # the paper's
    {"updates": 12, "warmup": 0, "ratio": 1, "alpha0": 0.5, "alpha_min": 0.1},
)


def turn_and_alpha(answer: Callable[..., tuple[str, float | None]]) -> None:
    """Whose update number ``update`` (from 0) is, and the weight alpha of the step advantage in it.

    ``answer(update, *, updates, warmup, ratio, alpha0, alpha_min)`` returns ("verifier", None) or
    ("generator", alpha).  The first ``warmup`` updates are the verifier's; then ``ratio`` of the generator
    alternate with one of the verifier.  alpha falls exponentially over the generator's own updates: alpha0 at
    its first, and alpha_min would be reached after the last of them.
    """
    for plan in PLANS:
        for update in range(plan["updates"]):
            _one_update(answer, update, plan)


def _config(plan: Mapping[str, float]) -> TangoConfig:
    return TangoConfig(
        updates=plan["updates"], verifier_warmup=plan["warmup"], generator_per_verifier=plan["ratio"]
    )


def _one_update(
    answer: Callable[..., tuple[str, float | None]], update: int, plan: Mapping[str, float]
) -> None:
    found = answer(update, **plan)
    assert isinstance(found, tuple) and len(found) == 2, 'return a pair such as ("generator", 0.5)'
    config, (who, alpha) = _config(plan), found
    where = f"update {update} of {plan['updates']} (warm-up {plan['warmup']}, {plan['ratio']} : 1)"
    if who != config.turn(update):
        raise AssertionError(f"{where}: {_wrong_turn(update, plan)}, and you say {who!r}")
    if who == "verifier":
        assert alpha is None, (
            f"{where}: a verifier update has no step advantage, so alpha is None, not {alpha}"
        )
        return
    assert alpha is not None, f"{where}: it is the generator's update, so give its alpha"
    done, own = config.turns("generator", update), config.turns("generator", plan["updates"])
    right = _alpha(done, own, plan)
    if not math.isclose(alpha, right, rel_tol=1e-6):
        raise AssertionError(f"{where}: {_wrong_alpha(alpha, right, update, done, own, plan)}")


def _alpha(done: float, total: float, plan: Mapping[str, float]) -> float:
    return alpha_at(done, total, alpha0=plan["alpha0"], alpha_min=plan["alpha_min"])


def _wrong_turn(update: int, plan: Mapping[str, float]) -> str:
    if update < plan["warmup"]:
        return "the warm-up is the verifier's alone"
    place = (update - plan["warmup"]) % (plan["ratio"] + 1)
    if place < plan["ratio"]:
        return f"after the warm-up each round begins with {plan['ratio']} of the generator"
    return f"after {plan['ratio']} of the generator comes one of the verifier, counted from the warm-up's end"


def _wrong_alpha(
    found: float, right: float, update: int, done: int, own: int, plan: Mapping[str, float]
) -> str:
    updates, warmup = plan["updates"], plan["warmup"]
    mistakes = {
        "alpha decays over the generator's own updates, not over those of both players": (
            _alpha(update, updates, plan), _alpha(update - warmup, updates - warmup, plan),
        ),
        f"the decay ends with the generator's last update; it has {own}, not {updates}": (
            _alpha(done, updates, plan),
        ),
        "the generator's first update has alpha0: count the updates it has *behind* it": (
            _alpha(done + 1, own, plan),
        ),
        "alpha falls exponentially: by the same factor each time, not by the same amount": (
            alpha_at(done, own, alpha0=plan["alpha0"], alpha_min=plan["alpha_min"], schedule="linear"),
        ),
    }  # fmt: skip
    for words, values in mistakes.items():
        if any(math.isclose(found, value, rel_tol=1e-6) for value in values):
            return words
    return f"expected alpha {right:.4f}, got {found:.4f}"


def first_clear_lead(answer: Callable[[list[Row], str, str], int | None]) -> None:
    """The first number of generator updates at which every seed of one arm beats every seed of another.

    ``answer(rows, arm, rival)``: rows are those of `figures/claims/tango.csv`, a dict of texts each, of which
    "arm", "seed", "learned" and "eval/answer" matter.  Of several evaluations of a seed at one ``learned``
    the last stands.  Returns ``learned`` as an int, or None if there is no such moment.
    """
    for words, rows, right in _tables():
        found = answer(rows, "A", "B")
        assert found is None or isinstance(found, int), (
            f"return an int or None, not {found!r}: the table holds texts, so turn them into numbers"
        )
        assert found == right, f"{words} (expected {right}, got {found})"


def _rows(cells: str) -> list[Row]:
    """Rows from `A0@20=.5`: arm A, seed 0, after 20 updates of the generator, answers .5."""
    names = ("arm", "seed", "learned", "eval/answer")
    split = [(c[0], *c[1:].replace("=", "@").split("@")) for c in cells.split()]
    return [dict(zip(names, row, strict=True)) | {"eval/step_truth": ""} for row in split]


def _tables() -> Sequence[tuple[str, list[Row], int | None]]:
    start = "A0@0=.2 A1@0=.2 B0@0=.2 B1@0=.2 "
    return (
        ("to be level is not to beat: at 0 all seeds are equal", _rows(start), None),
        ("every seed of A has to lie above every seed of B; a better mean is not enough",
         _rows(start + "A0@20=.9 A1@20=.4 B0@20=.3 B1@20=.5 A0@40=.9 A1@40=.6 B0@40=.3 B1@40=.5"), 40),
        ("compare all seeds with all seeds: that A's seed 1 beats B's seed 1 says nothing of B's seed 0",
         _rows(start + "A0@20=.9 A1@20=.5 B0@20=.6 B1@20=.4 A0@40=.9 A1@40=.7 B0@40=.6 B1@40=.4"), 40),
        ("numbers are texts in the table: as texts, '100' comes before '20', so the order goes wrong",
         _rows(start + "A0@100=.9 A1@100=.8 B0@100=.3 B1@100=.3 A0@20=.9 A1@20=.8 B0@20=.3 B1@20=.3"), 20),
        ("of several evaluations of a seed at one `learned` the last stands",
         _rows(start + "A0@20=.9 A1@20=.9 B0@20=.3 B1@20=.3 A1@20=.2 A0@40=.9 A1@40=.8 B0@40=.3 B1@40=.3"),
         40),
        ("a moment at which one arm was not evaluated cannot be compared",
         _rows(start + "A0@20=.9 A1@20=.9 A0@40=.9 A1@40=.9 B0@40=.3 B1@40=.4"), 40),
        ("cells may be empty (that evaluation was not made): leave them out",
         _rows(start + "A0@10= A1@10= B0@10= B1@10= A0@20=.9 A1@20=.9 B0@20=.3 B1@20=.3"), 20),
    )  # fmt: skip
