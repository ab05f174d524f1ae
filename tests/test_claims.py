"""The evidence: arms that differ as they say, tests that read a verdict from numbers, a README that shows them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tangolite.evaluate import Interval
from tangolite.lab import claims
from tangolite.lab.claims import arms_for, entries, looks, results, run, score_model
from tangolite.lab.claims.arms import ARMS, COVRL, GENERATOR, LONG, TANGO, WARMUP, Arm
from tangolite.lab.claims.entries import (
    CLAIMS,
    FAILS,
    HOLDS,
    OPEN,
    Claim,
    Results,
    larger,
    near,
    shown,
    verdict,
)
from tangolite.lab.claims.run import counted, density_not_held, plan, rows_file
from tangolite.lab.claims.score_model import ScoreModel
from tangolite.losses import covrl_kl
from tangolite.settings import RunError, load_recipe, with_seed
from tangolite.tango import TangoConfig
from tangolite.tasks import problems
from tangolite.updates import seeded

ROOT = Path(__file__).resolve().parent.parent


def config_of(name: str):
    arm = ARMS[name]
    return with_seed(load_recipe(run.RECIPES[arm.family]), 0, **arm.changes)


# --- arms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arm", ARMS.values(), ids=lambda arm: arm.slug)
def test_every_arm_trains_the_player_that_it_counts_as_long_as_the_others(arm: Arm) -> None:
    config = config_of(arm.name)
    expected = {"generator": {GENERATOR, LONG}, "verifier": {WARMUP, 40, 80}, "policy": {60, 120}}[arm.counts]
    assert counted(arm, config, config.updates) in expected
    if arm.after:
        before = config_of(arm.after)
        same = [before.turn(n) == config.turn(n) == "verifier" for n in range(before.updates)]
        assert before.updates == WARMUP and all(same)
        keys = ("estimator", "class_weights", "verifier_lr", "verifier_kl_coef", "verifier_task", "seed")
        assert all(getattr(before, key) == getattr(config, key) for key in keys)


def test_slugs_name_one_arm_each() -> None:
    assert len({arm.slug for arm in ARMS.values()}) == len(ARMS) == len(TANGO) + len(COVRL)


def test_every_claim_names_arms_that_there_are_and_has_a_number_of_its_own() -> None:
    for claim in CLAIMS:
        assert set(claim.arms) <= ARMS.keys(), claim.name
    assert len({c.number for c in CLAIMS}) == len({c.name for c in CLAIMS}) == len(CLAIMS)
    assert {int("".join(ch for ch in c.number if ch.isdigit())) for c in CLAIMS} == set(range(1, 17))


def test_a_claim_is_asked_for_by_name_or_number_and_an_unknown_one_is_said() -> None:
    assert arms_for("steps-improve") == arms_for("1") == ["tango"]
    assert arms_for("covrl") == [arm.name for arm in COVRL] and arms_for(None) == list(ARMS)
    with pytest.raises(RunError, match=r"no claim 'steps'.*steps-improve"):
        arms_for("steps")


def test_the_plan_puts_weights_and_the_warm_up_first_and_leaves_out_what_is_there(tmp_path) -> None:
    jobs = plan(["tango", "covrl"], 2, tmp_path)
    assert jobs["tango", 1] == {("weights of tango", 1), ("warm-up", 1)}
    assert jobs["covrl", 0] == {("weights of covrl", 0)} and len(jobs) == 10
    path = rows_file(tmp_path, ARMS["tango"], 0)
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    left = plan(["tango"], 1, tmp_path)
    assert left == {}
    assert ("warm-up", 0) in plan(["frozen warmed"], 1, tmp_path)  # its run is needed, not only its rows


# --- looks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("judgements", "final", "kind"),
    [
        ([True, False, True], False, "true error"),
        ([False, False, True], False, "another step"),
        ([True, True, True], False, "no step"),
        (None, False, "no step"),
        ([True, False, True], True, "accepted"),
        ([True, False, True], None, "accepted"),
    ],
)
def test_a_wrong_solution_can_be_judged_in_four_ways(judgements, final, kind) -> None:
    assert looks.kind_of(judgements, final, [True, False, True]) == kind


def test_hard_questions_are_those_that_were_never_solved() -> None:
    run = looks.Tango(load_recipe("tango-tiny"), *map(looks_policy, ("tiny-generator", "tiny-verifier")))
    hard, tries = looks.tried(run, count=24, times=2)
    assert 0 < len(hard.asked) < 24 and len(tries) == 24
    assert not any(s.correct for s in tries if s.problem in hard.asked)
    found = looks.on_balanced_mix(run, tries)
    assert 0 <= found["eval/mix_final_balanced"] <= 1 and set(found) > {"eval/mix_step_balanced"}


def looks_policy(name: str):
    from tangolite.models import load_policy

    policy = load_policy(name)
    policy.model.requires_grad_(True)
    return policy


def test_scores_are_held_against_what_is_right() -> None:
    class Fake:
        def __init__(self, correct: bool) -> None:
            self.correct = correct

    found = looks.scored(
        [Fake(True), Fake(False), Fake(False), Fake(False)], torch.tensor([0.9, 0.8, 0.1, 0.2])
    )
    assert found["eval/is_correct"] == 0.25 and found["eval/says_correct"] == pytest.approx(0.5)
    assert found["eval/final_balanced"] == pytest.approx((1 + 2 / 3) / 2)


def test_variances_are_those_of_a_worked_case() -> None:
    """A vocabulary of two, by hand: p = (0.01, 0.99), q = (0.98, 0.02)."""
    p, q = (0.01, 0.99), (0.98, 0.02)
    mean = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
    kl = sum(m * math.log(m / a) for m, a in zip(mean, p, strict=True))
    u, s = ([m / pi for m, pi in zip(mean, source, strict=True)] for source in (p, q))
    values = {
        "ours_prior": (p, [x * math.log(x) - x + 1 for x in u]),
        "ours_posterior": (q, [y * math.log(x) + y - 1 for x, y in zip(u, s, strict=True)]),
        "k1": (mean, [math.log(x) for x in u]),
        "k3": (mean, [1 / x - 1 + math.log(x) for x in u]),
    }
    found = looks.variances(torch.tensor([p]).log(), torch.tensor([q]).log())
    assert found["eval/kl_exact"] == pytest.approx(kl, rel=1e-4)
    for name, (chance, k) in values.items():
        assert sum(c * x for c, x in zip(chance, k, strict=True)) == pytest.approx(kl), (
            name
        )  # each is unbiased
        spread = sum(c * (x - kl) ** 2 for c, x in zip(chance, k, strict=True))
        assert found[f"eval/variance_{name}"] == pytest.approx(spread, rel=1e-3), name


@pytest.fixture(scope="module")
def small_run():
    config = replace(load_recipe("tango-tiny"), questions=4, group=4, updates=2, step_source="none")
    return looks.Tango(config, *map(looks_policy, ("tiny-generator", "tiny-verifier")))


def test_a_score_does_not_depend_on_what_stands_beside_it_in_the_batch(small_run) -> None:
    _, short = looks.solve(small_run, problems(looks.SHORT, 3, "a"), 1, seeded("a"))
    _, long = looks.solve(small_run, problems(small_run.task, 3, "b"), 1, seeded("b"))
    model = ScoreModel(looks_policy("tiny-verifier"), small_run.prompts, 0)
    alone = torch.cat([model.scores([s]) for s in (*short, *long)])
    assert torch.allclose(model.scores([*short, *long]), alone, atol=1e-5) and alone.std() > 0


def test_a_score_model_learns_outcomes_and_then_pays_by_nothing_else(small_run, monkeypatch) -> None:
    model = ScoreModel(looks_policy("tiny-verifier"), small_run.prompts, 0)
    _, seen = looks.solve(
        small_run, problems(small_run.task, 4, "0/generator/0"), 4, seeded(0, "solutions", 0)
    )
    losses = score_model.taught(small_run, model, updates=12, lr=3e-3)
    assert sum(losses[-3:]) < sum(losses[:3])
    paid = score_model.paid_by_scores(small_run, model, 0)
    assert paid["reward"] == pytest.approx(float(model.scores(seen).mean()), abs=1e-5)
    assert paid["correct"] == sum(s.correct for s in seen) / 16


def test_the_mistake_of_claim_16_has_the_right_value_and_another_gradient() -> None:
    from tangolite import losses

    torch.manual_seed(0)
    p, q = (torch.randn(2, 3).log_softmax(-1).requires_grad_() for _ in range(2))
    first = torch.tensor([True, False])
    right = covrl_kl(p, q, first)
    with density_not_held(True):
        wrong = losses.covrl_kl(p, q, first, sampler_logp=None)
    assert losses.covrl_kl is covrl_kl and torch.allclose(right, wrong, atol=1e-6)
    grads = [torch.autograd.grad(k.sum(), p)[0] for k in (right, wrong)]
    assert not torch.allclose(*grads, atol=1e-3)


# --- tests and verdicts --------------------------------------------------------------------------------


def file(arm: str, seed: int, rows: list[tuple[int, float]], curves: dict | None = None) -> dict:
    looks = [{"update": n, "learned": n, "seconds": float(n), "eval/answer": a} for n, a in rows]
    return {"arm": arm, "seed": seed, "rows": looks, "curves": curves or {}, "made": {}}


def test_a_verdict_is_read_from_the_whole_interval() -> None:
    assert verdict(Interval(0.2, 0.1, 0.3)) == HOLDS
    assert verdict(Interval(-0.2, -0.3, -0.1)) == FAILS
    assert verdict(Interval(0.0, -0.1, 0.1)) == OPEN
    assert verdict(Interval(0.1, -0.1, 0.3)) == verdict(Interval(-0.1, -0.3, 0.1)) == OPEN
    assert verdict(Interval(0.0, 0.0, 0.0)) == FAILS  # no difference is no gain


def test_arms_are_compared_seed_by_seed() -> None:
    t = Results([file("a", s, [(0, 0.1), (20, 0.5 + s / 10)]) for s in range(3)]
                + [file("b", s, [(20, 0.4 + s / 10)]) for s in (0, 2)])  # fmt: skip
    measure = larger("a - b", t.at("a", "answer", 20), t.at("b", "answer", 20))
    assert measure.seeds == pytest.approx([0.1, 0.1]) and measure.verdict == HOLDS
    assert t.start("a", "answer") == {0: 0.1, 1: 0.1, 2: 0.1}


def test_near_wants_the_whole_interval_within_the_margin() -> None:
    pairs = {0: 0.50, 1: 0.52}, {0: 0.49, 1: 0.53}
    assert near("", *pairs, 0.05).verdict == HOLDS
    assert near("", {0: 0.7, 1: 0.8}, {0: 0.5, 1: 0.5}, 0.05).verdict == FAILS
    assert near("", {0: 0.5, 1: 0.8}, {0: 0.5, 1: 0.5}, 0.05).verdict == OPEN


def test_equal_compute_takes_the_last_look_that_cost_no_more() -> None:
    slow = {"update": 60, "learned": 60, "seconds": 45.0, "eval/answer": 0.9}
    t = Results(
        [
            file("long", 0, [(0, 0.1), (20, 0.3), (40, 0.5), (60, 0.7)]),
            file("tango", 0, []) | {"rows": [slow]},
        ]
    )
    assert t.within("long", "answer", "tango", 60) == {0: 0.5}
    assert t.reach("long", "answer", {0: 0.5}) == {0: 40} and t.reach("long", "answer", {0: 0.8}) == {
        0: float("inf")
    }


def test_the_worst_measure_decides_and_context_takes_no_part() -> None:
    claim = Claim("0", "x", "", "", (), lambda t: [])
    good, bad = larger("", {0: 1.0, 1: 1.0}, {0: 0.0, 1: 0.0}), larger("", {0: 0.0, 1: 1.0}, {0: 0.5, 1: 0.5})
    assert (good.verdict, bad.verdict) == (HOLDS, OPEN)
    assert claim.verdict([good, shown("", {0: -5.0})]) == HOLDS and claim.verdict([good, bad]) == OPEN


def everything(seeds: int = 2) -> list[dict]:
    """Rows of every arm, with every metric that a claim reads."""
    names = {"answer", "pool_step_balanced", "pool_first_error_f1", "pool_final_balanced", "step_correct_rate",
             "step_balanced", "says_correct", "is_correct", "final_balanced", "named_exact", "named_another_step",
             "named_no_step", "named_accepted", "mix_final_balanced",
             "mix_step_correct_rate", "answer_longer", "answer_letters", "step_truth_posterior",
             "variance_ours_prior", "variance_ours_posterior", "variance_k1", "variance_k3"}  # fmt: skip
    curves = {
        name: [0.1 * (i + 1) for i in range(60)]
        for name in ("reward_prior", "reward_posterior", "kl", "length")
    }
    counts = (0, 20, 40, 60, 80, 120, 240)
    return [
        {"arm": arm, "seed": seed, "made": {"date": "2026-01-01"}, "curves": curves,
         "rows": [{"update": n, "learned": n, "seconds": float(n)} | {f"eval/{k}": (n + seed + 1) / 300 for k in names}
                  for n in counts]}
        for arm in ARMS for seed in range(seeds)
    ]  # fmt: skip


def test_every_claim_is_judged_and_written_when_its_arms_are_there(tmp_path, capsys) -> None:
    for found in everything():
        path = rows_file(tmp_path, ARMS[found["arm"]], found["seed"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
    results.write_results(tmp_path)
    report = json.loads((tmp_path / "claims.json").read_text())
    assert [c["number"] for c in report["claims"]] == [c.number for c in CLAIMS]
    assert all(c["verdict"] in (HOLDS, FAILS, OPEN) for c in report["claims"])
    assert {p.stem for p in tmp_path.glob("*.png")} == set(results.FIGURES)
    assert (tmp_path / "tango.csv").read_text().count("\n") == 1 + len(TANGO) * 2 * 7
    lines = results.table(report).splitlines()
    assert {line.count("|") for line in lines} == {
        6
    } and lines == capsys.readouterr().out.strip().splitlines()


def test_a_claim_whose_arms_are_missing_is_left_out() -> None:
    files = [found for found in everything() if found["arm"] != "gold steps" and found["arm"] != "prior only"]
    names = {c["name"] for c in results.judged(Results(files))}
    assert "prior-only" not in names and "steps-improve" in names


def test_going_on_after_the_warm_up_gives_what_one_run_would_have_given(tmp_path, starts, changes) -> None:
    """The same bits: metrics and weights of an arm that began in another's folder, and of one run in one go."""
    from tangolite.checkpoints import checksum, read_metrics
    from tangolite.settings import load_recipe
    from tangolite.training import start, train

    config = load_recipe("tango-tiny", changes["tango-tiny"])
    short = replace(config, updates=2, checkpoint_every=2)  # its warm-up alone
    whole = train(config, tmp_path / "whole", run=start(config))
    train(short, tmp_path / "runs" / "seed-0" / "before", run=start(short))
    arm = Arm("after", "", "tango", {}, after="before")
    folder = run.run_folder(tmp_path, arm, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(run.ARMS, "before", Arm("before", "", "tango", {}, counts="verifier"))
        run._begin_after(tmp_path, arm, 0, folder, config)
    other = train(config, folder, resume=True, run=start(config))
    assert isinstance(config, TangoConfig) and checksum(other.generator) == checksum(whole.generator)
    assert checksum(other.verifier) == checksum(whole.verifier)
    assert read_metrics(folder) == read_metrics(tmp_path / "whole")


# --- what is committed -----------------------------------------------------------------------------------


def test_the_readme_says_whether_the_claims_have_been_run() -> None:
    """Until the five-seed run is committed the README has to say so; after it, its table has to stand there."""
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    there = (ROOT / "figures" / "claims" / "claims.json").exists()
    assert ("that run is not committed" in readme) != there
    assert ("<!-- claims -->" in readme) == there


def test_the_committed_results_are_those_of_the_committed_rows(tmp_path) -> None:
    committed = ROOT / "figures" / "claims"
    files = results.read_rows(committed)
    if not (committed / "claims.json").exists():
        return  # a run that has not come to its end: its rows are kept to go on from
    assert files, "judged claims without the rows that they came from"
    report = json.loads((committed / "claims.json").read_text("utf-8"))
    assert json.loads(json.dumps(results.judged(Results(files)))) == report["claims"]
    for family, arms in (("tango", TANGO), ("covrl", COVRL)):
        names = [arm.name for arm in arms]
        results.write_csv(tmp_path / "x.csv", [f for f in files if f["arm"] in names], names)
        assert (tmp_path / "x.csv").read_text("utf-8") == (committed / f"{family}.csv").read_text("utf-8")


def test_the_readme_shows_the_committed_results(tmp_path) -> None:
    from tangolite.lab.readme import write_into

    copy = tmp_path / "README.md"
    copy.write_text((ROOT / "README.md").read_text("utf-8"), "utf-8")
    write_into(copy, ROOT / "figures")
    assert copy.read_text("utf-8") == (ROOT / "README.md").read_text("utf-8")


def test_the_command_hands_on_what_it_was_given(monkeypatch, capsys) -> None:
    from tangolite.cli import main

    seen = []
    monkeypatch.setattr(claims, "run_claims", lambda *given: seen.append(given) or 0)
    assert main(["claims", "recipes", "--seeds", "2", "--out", "x"]) == 0
    assert seen == [("recipes", 2, "x")] and entries.END == 60
