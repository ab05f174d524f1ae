"""The claims: for each its question, what the paper reports, the arms that answer it, the test and the verdict.

A test compares arms seed by seed (each seed has its own starting models, shared by its arms) and gives the mean
difference.  Shown with it is a 95% bootstrap interval over seeds; five seeds make that too narrow (it covers about
83%), so the verdict is read from Student's interval, by `verdict`, never typed.  Twenty-odd verdicts at 95% are not
corrected for their number: one in forty that holds may hold by luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import log10
from statistics import fmean, median, stdev
from typing import NamedTuple

from tangolite.evaluate import Interval, bootstrap

HOLDS, FAILS, OPEN, MUTE = "holds", "does not hold here", "undecided", "cannot be tested here"
# Quantiles of Student's distribution for 95%, by degrees of freedom
T_95 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


class Measure(NamedTuple):
    """One number with its interval, what it is, its value of every seed, and what it says of the claim.

    ``levels`` are the means of the two that were compared.
    """

    what: str
    interval: Interval
    seeds: list[float]
    verdict: str | None = None  # None: shown for context, takes no part
    levels: tuple[float, float] | None = None


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
        return next(v for v in (FAILS, OPEN, MUTE, HOLDS) if v in found)


LOOKS, END = (20, 40, 60), 60  # generator (policy) updates at which arms are compared


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

    def mean(self, arm: str, metric: str, moments: Sequence[int] = LOOKS) -> dict[int, float]:
        """By seed: the mean over several looks, which a ceiling at the last of them does not hide."""
        found = [self.at(arm, metric, moment) for moment in moments]
        return {seed: fmean(f[seed] for f in found) for seed in found[0] if all(seed in f for f in found)}

    def curve(self, arm: str, metric: str) -> dict[int, list[float]]:
        return {seed: c[metric] for seed, c in self.curves.get(arm, {}).items() if metric in c}


# --- tests -----------------------------------------------------------------------------------------


def verdict(values: Sequence[float], above: float = 0.0) -> str:
    """Holds if all of Student's 95% interval lies above, does not if all lies at or below, undecided between.

    Undecided, too, with fewer than three seeds.  Raises ValueError for a value that is not a number.
    """
    if not all(map(math.isfinite, values)):
        raise ValueError(f"no verdict from {values}: a metric is missing or undefined")
    if len(values) < 3:
        return OPEN
    reach = T_95.get(len(values) - 1, 2.262) * stdev(values) / math.sqrt(len(values))
    low, high = fmean(values) - reach, fmean(values) + reach
    return HOLDS if low > above else FAILS if high <= above else OPEN


def larger(
    what: str,
    first: dict[int, float],
    second: dict[int, float],
    above: float = 0.0,
    floor: float | None = None,
) -> Measure:
    """Is the first larger than the second, seed by seed?  Where neither ever leaves the floor, nobody can say."""
    seeds = sorted(first.keys() & second.keys())
    values = [first[s] - second[s] for s in seeds]
    levels = tuple(fmean(f[s] for s in seeds) for f in (first, second))
    mute = floor is not None and all(max(first[s], second[s]) <= floor for s in seeds)
    return Measure(what, bootstrap(values), values, MUTE if mute else verdict(values, above), levels)


def near(what: str, first: dict[int, float], second: dict[int, float], margin: float) -> Measure:
    """Do the two differ by no more than the margin?  The whole of Student's interval has to lie within it."""
    measure = larger(what, first, second)
    sides = verdict(measure.seeds, -margin), verdict([-v for v in measure.seeds], -margin)
    return measure._replace(verdict=next(v for v in (FAILS, OPEN, HOLDS) if v in sides))


def shown(what: str, found: dict[int, float]) -> Measure:
    """A number for context."""
    values = [found[seed] for seed in sorted(found)]
    return Measure(what, bootstrap(values), values)


def gap(what: str, first: dict[int, float], second: dict[int, float]) -> Measure:
    """A difference for context."""
    return larger(what, first, second)._replace(verdict=None)


def _minus(first: dict[int, float], second: dict[int, float]) -> dict[int, float]:
    return {seed: first[seed] - second[seed] for seed in first.keys() & second.keys()}


def _change(curves: dict[int, list[float]], window: int = 10) -> Measure:
    """Mean of the last updates less that of the first."""
    ends = (
        {s: fmean(c[-window:]) for s, c in curves.items()},
        {s: fmean(c[:window]) for s, c in curves.items()},
    )
    return larger("last ten updates - first ten", *ends)


OVER = "answers, mean of the looks after 20, 40 and 60 updates"


def steps_improve(t: Results) -> list[Measure]:
    return [
        larger("step judgements of the fixed pool, balanced: after Tango - before",
               t.at("tango", "pool_step_balanced", END), t.start("tango", "pool_step_balanced")),
        larger("F1 of the first error on it: after - before",
               t.at("tango", "pool_first_error_f1", END), t.start("tango", "pool_first_error_f1")),
    ]  # fmt: skip


def collapse(t: Results) -> list[Measure]:
    plain = "no class weights"
    found = t.at(plain, "mix_final_balanced", 40)
    return [
        larger("final judgements on a balanced mix: 0.55 (chance is 0.5) - without weights",
               dict.fromkeys(found, 0.55), found),
        shown("share of the mix called CORRECT in the end", t.at(plain, "mix_says_correct", 40)),
        shown("share of right solutions among those it learned on", t.start(plain, "hard_right")),
    ]  # fmt: skip


def class_weights(t: Results) -> list[Measure]:
    plain, paper, inverse = (t.at(arm, "mix_final_balanced", 40)
                             for arm in ("no class weights", "weights 1/sqrt(count)", "weights 1/count"))  # fmt: skip
    return [
        larger("final judgements on a balanced mix: the paper's 1/sqrt(count) - no weights", paper, plain),
        gap("1/count - no weights", inverse, plain),
    ]


def frozen_verifier(t: Results) -> list[Measure]:
    tango, frozen = t.mean("tango", "answer"), t.mean("frozen warmed", "answer")
    return [
        larger(f"{OVER}: Tango - frozen warmed verifier", tango, frozen),
        gap("after 60", t.at("tango", "answer", END), t.at("frozen warmed", "answer", END)),
        gap("Tango - frozen untrained verifier", tango, t.mean("frozen weak", "answer")),
    ]


def keeping_up(t: Results) -> list[Measure]:
    return [
        larger("step judgements on what the generator writes after 60 updates, balanced: Tango - frozen warmed",
               t.at("tango", "step_balanced", END), t.at("frozen warmed", "step_balanced", END)),
    ]  # fmt: skip


def frozen_generator(t: Results) -> list[Measure]:
    return [
        larger("step judgements on Tango's trained generator, balanced, after 80 verifier updates: Tango - frozen "
               "generator", t.at("tango", "step_balanced", END), t.at("frozen generator", "met_step_balanced", 80)),
        gap("F1 of the first error there", t.at("tango", "first_error_f1", END),
            t.at("frozen generator", "met_first_error_f1", 80)),
        gap("F1 of the first error on the pool, which the frozen generator wrote",
            t.at("tango", "pool_first_error_f1", END), t.at("frozen generator", "pool_first_error_f1", 80)),
    ]  # fmt: skip


def outcome_updates(t: Results) -> list[Measure]:
    tango = t.mean("tango", "answer")
    needed = t.reach("outcome only", "answer", t.at("tango", "answer", 20))
    never = sum(map(math.isinf, needed.values()))
    capped = sorted(min(value, 260.0) for value in needed.values())
    return [
        larger(f"{OVER}: Tango - outcome only", tango, t.mean("outcome only", "answer")),
        gap("Tango - outcome only with the gate", tango, t.mean("outcome only, gated", "answer")),
        Measure(f"updates until outcome only answers as well as Tango after 20: median and range, in steps of 20; "
                f"{never} of {len(capped)} not within 240", Interval(median(capped), capped[0], capped[-1]), capped),
    ]  # fmt: skip


def outcome_compute(t: Results) -> list[Measure]:
    tango = t.at("tango", "answer", END)
    return [
        larger("answers at equal processor seconds: Tango after 60 updates - outcome only by then",
               tango, t.within("outcome only", "answer", "tango", END)),
        gap("Tango after 60 - outcome only after 240", tango, t.at("outcome only", "answer", 240)),
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
        larger(f"answers under {name.upper()}, mean of the looks after 20, 40 and 60 updates: Tango - outcome only",
               t.mean(f"tango{end}", "answer"), t.mean(f"outcome only{end}", "answer"))
        for name, end in (("grpo", ""), ("rloo", ", rloo"), ("reinforce++", ", reinforce++"))
    ]  # fmt: skip


def decayed_alpha(t: Results) -> list[Measure]:
    tango, decayed = t.mean("tango", "answer"), t.mean("alpha 0.1 decayed", "answer")
    return [
        larger(f"{OVER}: alpha decayed from 0.5 - held at 0.5", tango, t.mean("alpha 0.5 fixed", "answer")),
        larger(f"{OVER}: alpha decayed from 0.1 - held at 0.1", decayed, t.mean("alpha 0.1 fixed", "answer")),
        gap("decayed from 0.5 - decayed from 0.1 (the paper's)", tango, decayed),
        gap("decayed from 0.1 - alpha zero (outcome only)", decayed, t.mean("outcome only", "answer")),
    ]


def hacking(t: Results) -> list[Measure]:
    def grown(arm: str) -> dict[int, float]:
        over = {n: _minus(t.at(arm, "says_correct", n), t.at(arm, "is_correct", n)) for n in (0, END)}
        return _minus(over[END], over[0])

    return [
        larger("what is paid beyond what is right, growth over 60 updates: scores - verdicts",
               grown("paid by scores"), grown("paid by verdicts")),
        *(gap(f"{arm}: paid, after 60 updates - before", t.at(arm, "says_correct", END), t.at(arm, "says_correct", 0))
          for arm in ("paid by scores", "paid by verdicts")),
        *(gap(f"{arm}: right, after 60 updates - before", t.at(arm, "is_correct", END), t.at(arm, "is_correct", 0))
          for arm in ("paid by scores", "paid by verdicts")),
    ]  # fmt: skip


def judges(t: Results) -> list[Measure]:
    return [
        larger("whole solutions judged rightly, balanced, before the generator learns: verdicts - scores",
               t.at("paid by verdicts", "judged_balanced", 0), t.start("paid by scores", "judged_balanced")),
    ]  # fmt: skip


def wrong_reason(t: Results) -> list[Measure]:
    return [
        larger("first named error is the true one, of the pool's rejected wrong solutions: after Tango - before",
               t.at("tango", "pool_named_exact", END), t.start("tango", "pool_named_exact")),
        shown("rejected, but for another step", t.at("tango", "pool_named_another_step", END)),
        shown("rejected without naming a step", t.at("tango", "pool_named_no_step", END)),
        shown("wrong solutions accepted", t.at("tango", "pool_named_accepted", END)),
        shown("on what the generator then writes, first named error is the true one",
              t.at("tango", "named_exact", END)),
    ]  # fmt: skip


def elsewhere(metric: str, where: str, chance: float, t: Results) -> list[Measure]:
    """Answers on problems that the arms were not trained on."""
    pair = t.at("tango", metric, END), t.at("outcome only", metric, END)
    return [
        larger(
            f"answers on {where}, after 60 updates on chains of 8: Tango - outcome only", *pair, floor=chance
        )
    ]


other_length = partial(elsewhere, "answer_six", "chains of 6", 0.1)
longer = partial(elsewhere, "answer_twelve", "chains of 12", 0.1)
letters = partial(elsewhere, "answer_letters", "last letters", 0.1)


def posterior_leads(t: Results) -> list[Measure]:
    prior, posterior = t.curve("covrl", "reward_prior"), t.curve("covrl", "reward_posterior")
    smallest = {s: min(fmean(posterior[s][i : i + 10]) - fmean(prior[s][i : i + 10])
                       for i in range(0, len(prior[s]), 10)) for s in prior}  # fmt: skip
    return [
        larger(
            "posterior's reward beyond the prior's, smallest of the ten-update means: it - 0",
            smallest,
            dict.fromkeys(prior, 0.0),
        ),
        _change(prior)._replace(what="prior's reward: last ten updates - first ten"),
    ]


def _covrl_arms(t: Results, others: Sequence[str]) -> list[Measure]:
    return [larger(f"{OVER}: CoVRL - {o}", t.mean("covrl", "answer"), t.mean(o, "answer")) for o in others]


def sampling_alpha(t: Results) -> list[Measure]:
    return _covrl_arms(t, ["sampling alpha 0.1", "sampling alpha 0.9"])


def prior_only(t: Results) -> list[Measure]:
    ours = t.at("covrl", "answer", END)
    return [
        *_covrl_arms(t, ["prior only"]),
        larger("answers at equal processor seconds: CoVRL after 60 updates - prior only by then",
               ours, t.within("prior only", "answer", "covrl", END)),
        gap("after 120 updates of each", t.at("covrl", "answer", 120), t.at("prior only", "answer", 120)),
    ]  # fmt: skip


def kl_coefficient(t: Results) -> list[Measure]:
    low = "KL coefficient 0.1"
    return [
        *_covrl_arms(t, [low]),
        larger("the KL itself after 60 updates, nats per token: coefficient 0.1 - 1",
               t.at(low, "kl_exact", END), t.at("covrl", "kl_exact", END)),
        shown("posterior's true steps, coefficient 0.1", t.at(low, "step_truth_posterior", END)),
    ]  # fmt: skip


MARGIN = 0.05


def nll_coefficient(t: Results) -> list[Measure]:
    pair = t.at("NLL coefficient 0.1", "answer", END), t.at("covrl", "answer", END)
    return [
        larger("answers after 60 updates: coefficient 0.1 - 1; no more than 0.05 lost?", *pair, above=-MARGIN)
    ]


def recipes(t: Results) -> list[Measure]:
    ours = t.at("covrl", "answer", END)
    return [
        near("answers after 60 updates: mean of probs - mean of log-probs; within 0.05?",
             t.at("mean of probs", "answer", END), ours, MARGIN),
        gap("sum of log-probs - mean (the same advantages where all answers have five tokens, up to rounding)",
            t.at("sum of log-probs", "answer", END), ours),
        gap("sum of probs - mean of probs (likewise)",
            t.at("sum of probs", "answer", END), t.at("mean of probs", "answer", END)),
    ]  # fmt: skip


def length(t: Results) -> list[Measure]:
    change = _change(t.curve("covrl", "length"))._replace(
        what="tokens of a trace: last ten updates - first ten"
    )
    fixed = all(
        abs(value) < 0.5 for value in change.seeds
    )  # three steps of a fixed form leave no room to grow
    return [change._replace(verdict=MUTE) if fixed else change]


def variance(t: Results) -> list[Measure]:
    def size(name: str) -> dict[int, float]:
        parts = [t.at("covrl", f"variance_{name}_{template}", END) for template in ("prior", "posterior")]
        return {seed: log10((parts[0][seed] + parts[1][seed]) / 2) for seed in parts[0]}

    drawn = "log10 of the variance after 60 updates, traces drawn as in training"
    rival = larger(f"{drawn}: weighted k1 - ours", size("weighted_k1"), size("ours"))
    parts = ("ours_prior", "ours_posterior", "k1", "k3")
    return [rival, *(shown(f"variance of {part.replace('_', ', ')} traces" if "_" in part else
                             f"variance of {part}, drawn from p' itself", t.at("covrl", f"variance_{part}", END))
                       for part in parts)]  # fmt: skip


def held_constant(t: Results) -> list[Measure]:
    exact = t.mean("exact KL", "answer")
    return [
        *_covrl_arms(t, ["density not held"]),
        gap("exact KL - its estimate", exact, t.mean("covrl", "answer")),
        gap("KL balanced - exact KL", t.mean("KL balanced", "answer"), exact),
        shown("posterior's true steps, KL balanced", t.at("KL balanced", "step_truth_posterior", END)),
    ]


CLAIMS = (
    Claim("1", "steps-improve", "A verifier's step judgements improve though only its final judgement is rewarded",
          "argued from its results on ProcessBench", ("tango",), steps_improve),
    Claim("2a", "collapse", "Without class weights the verifier collapses to one class", "yes",
          ("no class weights",), collapse),
    Claim("2b", "class-weights", "The paper's class weights prevent that", "yes",
          ("no class weights", "weights 1/sqrt(count)", "weights 1/count"), class_weights),
    Claim("3a", "frozen-verifier", "A generator learns more beside a learning verifier than beside a frozen one",
          "yes (ablation)", ("tango", "frozen warmed", "frozen weak"), frozen_verifier),
    Claim("3b", "keeping-up", "The learning verifier judges the trained generator better than the frozen one",
          "not reported", ("tango", "frozen warmed"), keeping_up),
    Claim("3c", "frozen-generator", "A verifier learns more beside a learning generator than beside a frozen one",
          "yes (ablation)", ("tango", "frozen generator"), frozen_generator),
    Claim("3d", "outcome-updates", "Tango beats outcome-only GRPO at equal generator updates",
          "+24.6% (five maths), +6.1% (four others), relative; 60 updates do what 200 do",
          ("tango", "outcome only", "outcome only, gated"), outcome_updates),
    Claim("3e", "outcome-compute", "Tango beats outcome-only GRPO at equal compute", "not reported",
          ("tango", "outcome only"), outcome_compute),
    Claim("4", "estimators", "Tango beats outcome-only under GRPO, RLOO and REINFORCE++", "yes, under all three",
          ("tango", "outcome only", "tango, rloo", "outcome only, rloo", "tango, reinforce++",
           "outcome only, reinforce++"), estimators),
    Claim("5", "alpha", "A decaying alpha is better than one that is held",
          "not compared; decays from 0.1 (GRPO, RLOO) or 0.5",
          ("tango", "alpha 0.5 fixed", "alpha 0.1 fixed", "alpha 0.1 decayed", "outcome only"), decayed_alpha),
    Claim("6a", "hacking", "A score model is hacked more than written verdicts are", "argued",
          ("paid by scores", "paid by verdicts"), hacking),
    Claim("6b", "judges", "Written verdicts judge whole solutions better than a score model", "argued",
          ("paid by scores", "paid by verdicts"), judges),
    Claim("7", "wrong-reason", "The first error that the verifier names is more often the true one than before",
          "not reported", ("tango",), wrong_reason),
    Claim("8a", "other-length", "Tango's lead carries over to chains of another length",
          "+6.1% out of domain, relative", ("tango", "outcome only"), other_length),
    Claim("8b", "longer", "Tango's lead carries over to longer chains than any it saw",
          "+6.1% out of domain, relative", ("tango", "outcome only"), longer),
    Claim("8c", "letters", "Tango's lead carries over to the other built-in task",
          "+6.1% out of domain, relative", ("tango", "outcome only"), letters),
    Claim("9", "posterior-leads", "The posterior earns more than the prior throughout, and the prior's reward rises",
          "yes (training curves)", ("covrl",), posterior_leads),
    Claim("10a", "sampling-alpha", "Sampling at alpha 0.5 is better than at 0.1 and 0.9", "yes",
          ("covrl", "sampling alpha 0.1", "sampling alpha 0.9"), sampling_alpha),
    Claim("10b", "prior-only", "CoVRL beats sampling from the prior alone", "50.2 against 47.9 of the best baseline",
          ("covrl", "prior only"), prior_only),
    Claim("11", "kl-coefficient", "A KL coefficient of 0.1 hurts, and the KL grows", "hurts badly",
          ("covrl", "KL coefficient 0.1"), kl_coefficient),
    Claim("12", "nll-coefficient", "An NLL coefficient of 0.1 hurts little", "hurts little",
          ("covrl", "NLL coefficient 0.1"), nll_coefficient),
    Claim("13", "recipes", "The reward recipes end alike", "within about a point",
          ("covrl", "sum of log-probs", "mean of probs", "sum of probs"), recipes),
    Claim("14", "length", "Traces get longer", "yes", ("covrl",), length),
    Claim("15", "variance", "The KL estimate (k3 with importance weights) varies less than k1 with the same weights",
          "chosen for low variance", ("covrl",), variance),
    Claim("16", "held-constant", "The sampler's density must be held constant in the KL", "not discussed",
          ("covrl", "density not held", "exact KL", "KL balanced"), held_constant),
)  # fmt: skip
