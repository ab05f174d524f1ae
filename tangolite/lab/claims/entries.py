"""The claims: for each its question, what the paper reports, the arms that answer it, the test and the verdict.

A test compares arms seed by seed (each seed has its own starting models, shared by its arms) and gives the mean
difference with a 95% bootstrap interval over seeds.  The verdict is read from the interval by `verdict`, never typed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import log10
from statistics import fmean
from typing import NamedTuple

from tangolite.evaluate import Interval, bootstrap

HOLDS, FAILS, OPEN = "holds", "does not hold here", "undecided"


class Measure(NamedTuple):
    """One number with its interval, what it is, its value of every seed, and what it says of the claim."""

    what: str
    interval: Interval
    seeds: list[float]
    verdict: str | None = None  # None: shown for context, takes no part


@dataclass(frozen=True)
class Claim:
    """One claim.  ``test`` gets the results and gives measures; the claim's verdict is the worst of theirs."""

    number: str
    name: str
    question: str
    paper: str
    arms: tuple[str, ...]
    test: Callable[[Results], list[Measure]] = field(repr=False)

    def verdict(self, measures: Sequence[Measure]) -> str:
        found = [m.verdict for m in measures if m.verdict is not None]
        return next(v for v in (FAILS, OPEN, HOLDS) if v in found)


class Results:
    """Rows of every arm and seed that is there: `rows[arm][seed]`, and `curves` alike."""

    def __init__(self, files: Sequence[dict]) -> None:
        self.rows: dict[str, dict[int, list[dict]]] = {}
        self.curves: dict[str, dict[int, dict[str, list[float]]]] = {}
        for found in sorted(files, key=lambda f: f["seed"]):
            self.rows.setdefault(found["arm"], {})[found["seed"]] = found["rows"]
            self.curves.setdefault(found["arm"], {})[found["seed"]] = found["curves"]

    def at(self, arm: str, metric: str, learned: int) -> dict[int, float]:
        """By seed: the metric at this count of the player's updates (of several looks there, the last)."""
        found = {}
        for seed, rows in self.rows.get(arm, {}).items():
            values = [
                row[f"eval/{metric}"] for row in rows if row["learned"] == learned and f"eval/{metric}" in row
            ]
            if values:
                found[seed] = values[-1]
        return found

    def start(self, arm: str, metric: str) -> dict[int, float]:
        """By seed: the metric before any update."""
        return {seed: rows[0][f"eval/{metric}"] for seed, rows in self.rows.get(arm, {}).items()}

    def within(self, arm: str, metric: str, other: str, learned: int) -> dict[int, float]:
        """By seed: the metric at the arm's last look that cost no more than ``other`` had by then."""
        found = {}
        for seed, rows in self.rows.get(arm, {}).items():
            limit = [
                row["seconds"] for row in self.rows.get(other, {}).get(seed, []) if row["learned"] == learned
            ]
            values = [row[f"eval/{metric}"] for row in rows if limit and row["seconds"] <= limit[-1]]
            if values:
                found[seed] = values[-1]
        return found

    def reach(self, arm: str, metric: str, level: dict[int, float]) -> dict[int, float]:
        """By seed: the first count at which the metric is at least the level; infinite if never."""
        return {
            seed: min(
                (r["learned"] for r in rows if r.get(f"eval/{metric}", -1) >= level[seed]),
                default=float("inf"),
            )
            for seed, rows in self.rows.get(arm, {}).items()
            if seed in level
        }

    def curve(self, arm: str, metric: str) -> dict[int, list[float]]:
        return {seed: c[metric] for seed, c in self.curves.get(arm, {}).items() if metric in c}


# --- tests -----------------------------------------------------------------------------------------


def verdict(interval: Interval, above: float = 0.0) -> str:
    """Holds if the whole interval lies above, does not if it lies at or below, undecided between."""
    return HOLDS if interval.low > above else FAILS if interval.high <= above else OPEN


def larger(what: str, first: dict[int, float], second: dict[int, float], above: float = 0.0) -> Measure:
    """Is the first larger than the second, seed by seed?"""
    values = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
    interval = bootstrap(values)
    return Measure(what, interval, values, verdict(interval, above))


def near(what: str, first: dict[int, float], second: dict[int, float], margin: float) -> Measure:
    """Do the two differ by no more than the margin?  The whole interval has to lie within it."""
    values = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
    interval = bootstrap(values)
    inside = -margin <= interval.low and interval.high <= margin
    outside = interval.low > margin or interval.high < -margin
    return Measure(what, interval, values, HOLDS if inside else FAILS if outside else OPEN)


def shown(what: str, found: dict[int, float]) -> Measure:
    """A number for context."""
    values = [found[seed] for seed in sorted(found)]
    return Measure(what, bootstrap(values), values)


def _change(curves: dict[int, list[float]], window: int = 10) -> dict[int, float]:
    return {seed: fmean(c[-window:]) - fmean(c[:window]) for seed, c in curves.items()}


END = 60  # generator (policy) updates at which arms are compared


def steps_improve(t: Results) -> list[Measure]:
    return [
        larger("step judgements of the fixed pool, balanced: after Tango - before",
               t.at("tango", "pool_step_balanced", END), t.start("tango", "pool_step_balanced")),
        larger("F1 of the first error on it: after - before",
               t.at("tango", "pool_first_error_f1", END), t.start("tango", "pool_first_error_f1")),
    ]  # fmt: skip


def collapse(t: Results) -> list[Measure]:
    plain, paper, inverse = (
        t.at(arm, "mix_final_balanced", 40)
        for arm in ("no class weights", "weights 1/sqrt(count)", "weights 1/count")
    )
    return [
        larger("final judgements on a balanced mix: 1/count - no weights", inverse, plain),
        shown("1/sqrt(count), the paper's, - no weights", _minus(paper, plain)),
        shown("balanced accuracy without weights", plain),
        shown(
            "share of steps called CORRECT without weights",
            t.at("no class weights", "mix_step_correct_rate", 40),
        ),
    ]


def frozen_verifier(t: Results) -> list[Measure]:
    return [
        larger("answers after 60 updates: Tango - frozen warmed verifier",
               t.at("tango", "answer", END), t.at("frozen warmed", "answer", END)),
        shown("the same after 20 updates", _minus(t.at("tango", "answer", 20), t.at("frozen warmed", "answer", 20))),
        shown("against a frozen untrained verifier",
              _minus(t.at("tango", "answer", END), t.at("frozen weak", "answer", END))),
        shown("step judgements on the generator as it is: Tango - frozen warmed",
              _minus(t.at("tango", "step_balanced", END), t.at("frozen warmed", "step_balanced", END))),
    ]  # fmt: skip


def _minus(first: dict[int, float], second: dict[int, float]) -> dict[int, float]:
    return {seed: first[seed] - second[seed] for seed in first.keys() & second.keys()}


def frozen_generator(t: Results) -> list[Measure]:
    return [
        larger("F1 of the first error on the fixed pool after 80 verifier updates: Tango - frozen generator",
               t.at("tango", "pool_first_error_f1", END), t.at("frozen generator", "pool_first_error_f1", 80)),
    ]  # fmt: skip


def outcome_updates(t: Results) -> list[Measure]:
    level = t.at("tango", "answer", 20)
    needed = t.reach("outcome only", "answer", level)
    capped = {seed: min(value, 241.0) for seed, value in needed.items()}
    return [
        larger("answers after 60 generator updates: Tango - outcome only",
               t.at("tango", "answer", END), t.at("outcome only", "answer", END)),
        shown("against outcome only with the gate",
              _minus(t.at("tango", "answer", END), t.at("outcome only, gated", "answer", END))),
        shown("updates of outcome only to reach Tango's answers after 20 (241: never)", capped),
    ]  # fmt: skip


def outcome_compute(t: Results) -> list[Measure]:
    return [
        larger("answers at equal processor seconds: Tango after 60 updates - outcome only by then",
               t.at("tango", "answer", END), t.within("outcome only", "answer", "tango", END)),
        shown("Tango after 60 - outcome only after 240",
              _minus(t.at("tango", "answer", END), t.at("outcome only", "answer", 240))),
        shown("processor seconds of Tango's 60 updates, warm-up included", _seconds(t, "tango", END)),
        shown("processor seconds of outcome only's 240", _seconds(t, "outcome only", 240)),
    ]  # fmt: skip


def _seconds(t: Results, arm: str, learned: int) -> dict[int, float]:
    rows = t.rows.get(arm, {})
    return {
        seed: [r["seconds"] for r in found if r["learned"] == learned][-1] for seed, found in rows.items()
    }


def estimators(t: Results) -> list[Measure]:
    return [
        larger(f"answers after 60 updates with {name.upper()}: Tango - outcome only",
               t.at(f"tango{end}", "answer", END), t.at(f"outcome only{end}", "answer", END))
        for name, end in (("grpo", ""), ("rloo", ", rloo"), ("reinforce++", ", reinforce++"))
    ]  # fmt: skip


def decayed_alpha(t: Results) -> list[Measure]:
    tango = t.at("tango", "answer", END)
    return [
        larger("answers: alpha decayed from 0.5 - held at 0.5", tango, t.at("alpha 0.5 fixed", "answer", END)),
        larger("answers: alpha decayed from 0.1 - held at 0.1",
               t.at("alpha 0.1 decayed", "answer", END), t.at("alpha 0.1 fixed", "answer", END)),
        shown("decayed from 0.5 - decayed from 0.1 (the paper's)",
              _minus(tango, t.at("alpha 0.1 decayed", "answer", END))),
        shown("decayed from 0.1 - alpha zero (outcome only)",
              _minus(t.at("alpha 0.1 decayed", "answer", END), t.at("outcome only", "answer", END))),
    ]  # fmt: skip


def hacking(t: Results) -> list[Measure]:
    gap = {arm: _minus(t.at(arm, "says_correct", END), t.at(arm, "is_correct", END))
           for arm in ("paid by scores", "paid by verdicts")}  # fmt: skip
    return [
        larger("what it is paid - what is right, after 60 updates: scores - verdicts",
               gap["paid by scores"], gap["paid by verdicts"]),
        shown("paid by scores: score - right", gap["paid by scores"]),
        shown("paid by verdicts: said CORRECT - right", gap["paid by verdicts"]),
        shown("answers, paid by scores", t.at("paid by scores", "answer", END)),
        shown("answers, paid by verdicts", t.at("paid by verdicts", "answer", END)),
    ]  # fmt: skip


def judges(t: Results) -> list[Measure]:
    return [
        larger("whole solutions judged rightly, balanced, before the generator learns: verdicts - scores",
               t.at("paid by verdicts", "final_balanced", 0), t.start("paid by scores", "final_balanced")),
        shown("the score model", t.start("paid by scores", "final_balanced")),
    ]  # fmt: skip


def wrong_reason(t: Results) -> list[Measure]:
    return [
        larger("of rejected wrong solutions, first named error is the true one: after Tango - before",
               t.at("tango", "named_exact", END), t.start("tango", "named_exact")),
        shown("after Tango", t.at("tango", "named_exact", END)),
        shown("rejected, but for another step", t.at("tango", "named_another_step", END)),
        shown("rejected without naming a step", t.at("tango", "named_no_step", END)),
        shown("wrong solutions accepted", t.at("tango", "named_accepted", END)),
    ]  # fmt: skip


def elsewhere(metric: str, where: str, t: Results) -> list[Measure]:
    """Answers on problems that the arms were not trained on."""
    tango = t.at("tango", metric, END)
    return [
        larger(f"answers {where}: Tango - outcome only", tango, t.at("outcome only", metric, END)),
        shown(f"Tango {where}", tango),
    ]


longer = partial(elsewhere, "answer_longer", "on chains of 12, after 60 updates on chains of 8")
letters = partial(elsewhere, "answer_letters", "on last letters")


def posterior_leads(t: Results) -> list[Measure]:
    prior, posterior = t.curve("covrl", "reward_prior"), t.curve("covrl", "reward_posterior")
    smallest = {s: min(fmean(posterior[s][i : i + 10]) - fmean(prior[s][i : i + 10])
                       for i in range(0, len(prior[s]), 10)) for s in prior}  # fmt: skip
    zero = dict.fromkeys(prior, 0.0)
    return [
        larger("posterior's reward - prior's, the smallest of ten-update means", smallest, zero),
        larger("prior's reward: last ten updates - first ten", _change(prior), zero),
    ]


def _covrl_arms(t: Results, others: Sequence[str]) -> list[Measure]:
    ours = t.at("covrl", "answer", END)
    return [
        larger(f"answers after {END} updates: CoVRL - {other}", ours, t.at(other, "answer", END))
        for other in others
    ]


def sampling_alpha(t: Results) -> list[Measure]:
    return _covrl_arms(t, ["sampling alpha 0.1", "sampling alpha 0.9"])


def prior_only(t: Results) -> list[Measure]:
    return [
        *_covrl_arms(t, ["prior only"]),
        larger("at equal processor seconds: CoVRL after 60 updates - prior only by then",
               t.at("covrl", "answer", END), t.within("prior only", "answer", "covrl", END)),
        shown("after 120 updates of each", _minus(t.at("covrl", "answer", 120), t.at("prior only", "answer", 120))),
    ]  # fmt: skip


def kl_coefficient(t: Results) -> list[Measure]:
    low = "KL coefficient 0.1"
    return [
        *_covrl_arms(t, [low]),
        larger("KL, last ten updates: coefficient 0.1 - 1", _last(t, low, "kl"), _last(t, "covrl", "kl")),
        shown("posterior's true steps, coefficient 0.1", t.at(low, "step_truth_posterior", END)),
    ]


def _last(t: Results, arm: str, metric: str) -> dict[int, float]:
    return {seed: fmean(curve[END - 10 : END]) for seed, curve in t.curve(arm, metric).items()}


def nll_coefficient(t: Results) -> list[Measure]:
    low = "NLL coefficient 0.1"
    return [near("answers after 60 updates: coefficient 0.1 - 1, within 0.05",
                 t.at(low, "answer", END), t.at("covrl", "answer", END), 0.05)]  # fmt: skip


def recipes(t: Results) -> list[Measure]:
    ours = t.at("covrl", "answer", END)
    return [near(f"answers after 60 updates: {arm} - mean log-prob, within 0.05", t.at(arm, "answer", END), ours, 0.05)
            for arm in ("sum of log-probs", "mean of probs", "sum of probs")]  # fmt: skip


def length(t: Results) -> list[Measure]:
    curves = t.curve("covrl", "length")
    return [
        larger("tokens of a trace: last ten updates - first ten", _change(curves), dict.fromkeys(curves, 0.0))
    ]


def variance(t: Results) -> list[Measure]:
    parts = [t.at("covrl", f"variance_ours_{part}", END) for part in ("prior", "posterior")]
    ours = {seed: log10((parts[0][seed] + parts[1][seed]) / 2) for seed in parts[0]}
    rivals = {name: t.at("covrl", f"variance_{name}", END) for name in ("k1", "k3")}
    return [
        *(larger(f"log10 of variance after {END} updates: {name} - ours (mean over the two templates)",
                 {seed: log10(value) for seed, value in found.items()}, ours) for name, found in rivals.items()),
        *(shown(f"ours, {part} traces", found) for part, found in zip(("prior", "posterior"), parts, strict=True)),
        *(shown(name, found) for name, found in rivals.items()),
    ]  # fmt: skip


def held_constant(t: Results) -> list[Measure]:
    return [
        *_covrl_arms(t, ["density not held"]),
        shown(
            "exact KL - its estimate", _minus(t.at("exact KL", "answer", END), t.at("covrl", "answer", END))
        ),
        shown(
            "KL balanced - exact KL",
            _minus(t.at("KL balanced", "answer", END), t.at("exact KL", "answer", END)),
        ),
        shown("posterior's true steps, KL balanced", t.at("KL balanced", "step_truth_posterior", END)),
    ]


CLAIMS = (
    Claim("1", "steps-improve", "Do step judgements improve though only the final one is rewarded?",
          "its verifier is the best of 7B and 8B on ProcessBench", ("tango",), steps_improve),
    Claim("2", "collapse", "Does the verifier collapse without class weights?",
          "collapses to one class", ("no class weights", "weights 1/sqrt(count)", "weights 1/count"), collapse),
    Claim("3a", "frozen-verifier", "Does co-evolving beat a frozen verifier?", "yes (ablation)",
          ("tango", "frozen warmed", "frozen weak"), frozen_verifier),
    Claim("3b", "frozen-generator", "Does co-evolving beat a frozen generator, for the verifier?",
          "yes (ablation)", ("tango", "frozen generator"), frozen_generator),
    Claim("3c", "outcome-updates", "Does it beat outcome-only GRPO at equal generator updates?",
          "+24.6% (five maths), +6.1% (four others), relative; 60 updates against 200",
          ("tango", "outcome only", "outcome only, gated"), outcome_updates),
    Claim("3d", "outcome-compute", "And at equal compute?", "not reported", ("tango", "outcome only"), outcome_compute),
    Claim("4", "estimators", "Does it for GRPO, RLOO and REINFORCE++?", "yes, for all three",
          ("tango", "outcome only", "tango, rloo", "outcome only, rloo", "tango, reinforce++",
           "outcome only, reinforce++"), estimators),
    Claim("5", "alpha", "Is a decaying alpha better than one that is held?",
          "alpha decays from 0.1 (GRPO, RLOO) or 0.5",
          ("tango", "alpha 0.5 fixed", "alpha 0.1 fixed", "alpha 0.1 decayed", "outcome only"), decayed_alpha),
    Claim("6a", "hacking", "Is a score model hacked more than written verdicts?",
          "discriminative verifiers are prone to reward hacking", ("paid by scores", "paid by verdicts"), hacking),
    Claim("6b", "judges", "Do written verdicts judge whole solutions better than a score model?",
          "argued, not measured at equal data", ("paid by scores", "paid by verdicts"), judges),
    Claim("7", "wrong-reason", "Is the first error that the verifier names the true one more often than before?",
          "not reported", ("tango",), wrong_reason),
    Claim("8a", "longer", "Does the gain carry over to longer chains?", "gains out of domain: +6.1%, relative",
          ("tango", "outcome only"), longer),
    Claim("8b", "letters", "And to the other built-in task?", "gains out of domain: +6.1%, relative",
          ("tango", "outcome only"), letters),
    Claim("9", "posterior-leads", "Does the posterior earn more than the prior throughout, and does the prior rise?",
          "yes (training curves)", ("covrl",), posterior_leads),
    Claim("10a", "sampling-alpha", "Is sampling at alpha 0.5 better than 0.1 and 0.9?", "yes",
          ("covrl", "sampling alpha 0.1", "sampling alpha 0.9"), sampling_alpha),
    Claim("10b", "prior-only", "Does CoVRL beat sampling from the prior alone?",
          "50.2 against 47.9 of the best baseline",
          ("covrl", "prior only"), prior_only),
    Claim("11", "kl-coefficient", "Does a KL coefficient of 0.1 hurt, and the KL grow?", "hurts badly",
          ("covrl", "KL coefficient 0.1"), kl_coefficient),
    Claim("12", "nll-coefficient", "Does an NLL coefficient of 0.1 hurt little?", "hurts little",
          ("covrl", "NLL coefficient 0.1"), nll_coefficient),
    Claim("13", "recipes", "Do the four reward recipes end alike?", "within about a point",
          ("covrl", "sum of log-probs", "mean of probs", "sum of probs"), recipes),
    Claim("14", "length", "Do traces get longer?", "yes", ("covrl",), length),
    Claim("15", "variance", "Does the estimate vary less than k1 and k3?", "chosen for low variance",
          ("covrl",), variance),
    Claim("16", "held-constant", "Must the sampler's density be held constant in the KL?", "not discussed",
          ("covrl", "density not held", "exact KL", "KL balanced"), held_constant),
)  # fmt: skip
