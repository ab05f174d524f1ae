"""The evidence: arms that differ as they say, tests that read a verdict from numbers, a README that shows them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tangolite.lab import claims
from tangolite.lab.claims import arms_for, looks, pictures, results, run, score_model
from tangolite.lab.claims.arms import ARMS, COVRL, GENERATOR, LONG, TANGO, WARMUP, Arm
from tangolite.lab.claims.entries import (
    CLAIMS,
    FAILS,
    HOLDS,
    MUTE,
    OPEN,
    Claim,
    Results,
    larger,
    near,
    shown,
    verdict,
)
from tangolite.lab.claims.run import EVERY, counted, density_not_held, plan, rows_file
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
    path.write_text(json.dumps({"changes": ARMS["tango"].changes}))
    assert plan(["tango"], 1, tmp_path) == {}
    assert ("warm-up", 0) in plan(["frozen warmed"], 1, tmp_path)  # its run is needed, not only its rows
    assert plan(["frozen generator"], 1, tmp_path)["frozen generator", 0] > {("tango", 0), ("warm-up", 0)}


def test_rows_of_an_arm_that_was_another_one_are_not_taken_for_its_own(tmp_path) -> None:
    path = rows_file(tmp_path, ARMS["tango"], 0)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"changes": ARMS["tango"].changes | {"alpha": 0.3}}))
    with pytest.raises(RunError, match="an arm 'tango' with other settings: move it away"):
        plan(["tango"], 1, tmp_path)


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


def test_what_is_paid_is_held_against_what_is_right() -> None:
    class Fake:
        def __init__(self, correct: bool) -> None:
            self.correct = correct

    solutions = [Fake(True), Fake(False), Fake(False), Fake(False)]
    found = looks.said_and_true(solutions, [0.9, 0.8, 0.1, 0.2], [True, True, None, False])
    assert found["eval/is_correct"] == 0.25 and found["eval/says_correct"] == pytest.approx(0.5)
    assert found["eval/judged_balanced"] == pytest.approx((1 + 1 / 3) / 2)  # what was not read is not right


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
    for template, source in (("prior", p), ("posterior", q)):
        k1 = [m / pi * math.log(x) for m, pi, x in zip(mean, source, u, strict=True)]
        values[f"weighted_k1_{template}"] = source, k1
        k3 = [m / pi * (1 / x - 1 + math.log(x)) for m, pi, x in zip(mean, source, u, strict=True)]
        assert k3 == pytest.approx(values[f"ours_{template}"][1])  # ours is k3 with importance weights
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


def test_a_verdict_is_read_from_the_whole_interval_of_at_least_three_seeds() -> None:
    assert verdict([0.1, 0.2, 0.3, 0.2, 0.2]) == HOLDS and verdict([-0.1, -0.2, -0.3, -0.2, -0.2]) == FAILS
    assert verdict([0.3, -0.1, 0.2]) == OPEN and verdict([5.0, 5.0]) == OPEN
    assert verdict([0.0, 0.0, 0.0]) == FAILS  # no difference is no gain
    assert verdict([0.2, 0.2, 0.2], above=0.3) == FAILS and verdict([0.2, 0.2, 0.2], above=0.1) == HOLDS
    with pytest.raises(ValueError, match="missing or undefined"):
        verdict([0.1, math.nan, 0.2])


@pytest.mark.parametrize("n", range(3, 11))
def test_the_interval_of_a_verdict_is_students(n: int) -> None:
    """With n values of mean 1 and deviation 1, the interval's lower end is 1 - t / sqrt(n)."""
    quantile = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}[n]
    half = math.sqrt((n - 1) / (2 * (n // 2)))
    values = [1 + half] * (n // 2) + [1 - half] * (n // 2) + [1.0] * (n % 2)
    low = 1 - quantile / math.sqrt(n)
    assert verdict(values, above=low - 1e-3) == HOLDS and verdict(values, above=low + 1e-3) == OPEN


def test_arms_are_compared_seed_by_seed() -> None:
    t = Results([file("a", s, [(0, 0.1), (20, 0.5 + s / 10), (40, 0.9), (60, 1.0)]) for s in range(4)]
                + [file("b", s, [(20, 0.4 + s / 10 + s / 50)]) for s in (0, 2, 3)])  # fmt: skip
    measure = larger("a - b", t.at("a", "answer", 20), t.at("b", "answer", 20))
    assert measure.seeds == pytest.approx([0.1, 0.06, 0.04]) and measure.verdict == OPEN
    assert measure.levels == pytest.approx((2 / 3, 0.6))
    assert t.start("a", "answer") == dict.fromkeys(range(4), 0.1)
    assert t.mean("a", "answer")[1] == pytest.approx((0.6 + 0.9 + 1.0) / 3) and t.mean("b", "answer") == {}


def test_near_wants_the_whole_interval_within_the_margin() -> None:
    def compared(*values: float) -> str | None:
        return near("", dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0), 0.05).verdict

    assert compared(0.01, -0.01, 0.0, 0.01) == HOLDS
    assert compared(0.2, 0.21, 0.2) == compared(-0.2, -0.21, -0.2) == FAILS
    assert compared(0.0, 0.3, 0.1) == OPEN


def test_where_neither_leaves_the_floor_nobody_can_say() -> None:
    low, high = {0: 0.03, 1: 0.02, 2: 0.05}, {0: 0.5, 1: 0.6, 2: 0.5}
    assert larger("", low, dict.fromkeys(range(3), 0.0), floor=0.1).verdict == MUTE
    assert larger("", high, low, floor=0.1).verdict == HOLDS


def test_equal_compute_takes_the_last_look_that_cost_no_more() -> None:
    slow = {"update": 60, "learned": 60, "seconds": 45.0, "eval/answer": 0.9}
    t = Results([file("long", 0, [(0, 0.1), (20, 0.3), (40, 0.5), (60, 0.7)]),
                 file("tango", 0, []) | {"rows": [slow]}])  # fmt: skip
    assert t.within("long", "answer", "tango", 60) == {0: 0.5}
    assert t.reach("long", "answer", {0: 0.5}) == {0: 40}
    assert t.reach("long", "answer", {0: 0.8}) == {0: float("inf")}


def test_the_worst_measure_decides_and_context_takes_no_part() -> None:
    claim, zero = Claim("0", "x", "", "", (), lambda t: []), dict.fromkeys(range(3), 0.0)
    good, bad = larger("", dict.fromkeys(range(3), 1.0), zero), larger("", {0: 0.0, 1: 1.0, 2: -0.5}, zero)
    assert (good.verdict, bad.verdict) == (HOLDS, OPEN)
    assert claim.verdict([good, shown("", {0: -5.0})]) == HOLDS and claim.verdict([good, bad]) == OPEN
    assert claim.verdict([good, good._replace(verdict=MUTE)]) == MUTE


@pytest.fixture(scope="module")
def seen() -> dict[str, tuple[set[str], set[str]]]:
    """What a look really measures, by family and turn: (always, every sixty updates and at the end)."""
    from tangolite.training import start

    def names(make) -> tuple[set[str], set[str]]:
        return set(make(20)), set(make(60))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(looks, "COUNT", 32)
        patch.setattr(run, "COUNT", 32)
        patch.setattr(looks, "evaluate", lambda run, real=looks.evaluate: real(run, 32))
        judged = start(with_seed(load_recipe("tango-tiny"), 0))
        alone = start(with_seed(load_recipe("tango-tiny"), 0, verifier_updates="never", step_source="none"))
        covrl = start(with_seed(load_recipe("covrl-tiny"), 0))
        found = {
            "verifier": names(lambda n: looks.look(judged, n)), "none": names(lambda n: looks.look(alone, n)),
            "covrl": names(lambda n: looks.look(covrl, n)),
            "scores": names(lambda n: run._seen(alone, ScoreModel(alone.verifier, alone.prompts, 0))),
            "met": names(lambda n: looks.met(judged, judged.generator)),
        }  # fmt: skip
        judged.verifier_task, tries = looks.tried(judged, count=24, times=2)
        return found | {"hard": names(lambda n: looks.on_balanced_mix(judged, tries))}


def everything(seen, seeds: int = 3) -> list[dict]:
    """Rows of every arm: the looks that its schedule gives, with the metrics that such looks measure."""
    curves = {
        name: [0.1 * (i + 1) for i in range(60)] for name in ("reward_prior", "reward_posterior", "length")
    }
    files = []
    for place, arm in enumerate(ARMS.values()):
        config = config_of(arm.name)
        kind = {"live": "covrl", "tango": getattr(config, "step_source", "")}.get(arm.family, arm.family)
        often, seldom = seen["none" if kind == "truth" else kind]
        rows = []
        for update in range(config.updates + 1):
            learned, last = counted(arm, config, update), update == config.updates
            warming = arm.after and update <= WARMUP
            of = ARMS[arm.after] if warming else arm
            own = counted(of, config, update)
            grew = update == 0 or own > counted(of, config, update - 1)
            if not (grew and own % EVERY == 0) and not last:
                continue
            names = seldom if own % 60 == 0 or last else often
            if last and arm.meets:
                names = names | seen["met"][0]
            row = {"update": update, "learned": learned, "seconds": float(update)}
            rows.append(row | dict.fromkeys(names, (update + place + 1) / 600))
        files += [{"arm": arm.name, "seed": seed, "made": {"date": "2026-01-01"}, "curves": curves,
                   "rows": [{k: v + seed / 50 if k.startswith("eval/") else v for k, v in row.items()} for row in rows]}
                  for seed in range(seeds)]  # fmt: skip
    return files


def test_every_claim_finds_every_look_that_it_reads_in_every_seed(seen) -> None:
    for claim in CLAIMS:
        for measure in claim.test(Results(everything(seen))):
            assert len(measure.seeds) == 3, (claim.name, measure.what)


def test_every_claim_is_judged_and_written_when_its_arms_are_there(seen, tmp_path, capsys) -> None:
    files = everything(seen)
    for found in files:
        path = rows_file(tmp_path, ARMS[found["arm"]], found["seed"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))
    results.write_results(tmp_path)
    report = json.loads((tmp_path / "claims.json").read_text())
    assert [c["number"] for c in report["claims"]] == [c.number for c in CLAIMS]
    assert all(c["verdict"] in (HOLDS, FAILS, OPEN, MUTE) for c in report["claims"])
    assert "--seeds 3 " in report["command"]
    assert {p.stem for p in tmp_path.glob("*.png")} == set(pictures.PICTURES)
    tango = [f for f in files if f["arm"] in [arm.name for arm in TANGO]]
    assert (tmp_path / "tango.csv").read_text().count("\n") == 1 + sum(len(f["rows"]) for f in tango)
    told = (tmp_path / "README.md").read_text()
    assert all(f"## {c.number}. {c.question}: " in told for c in CLAIMS)
    assert all(f"| {arm.name} | {arm.what} |" in told for arm in ARMS.values())
    counted_, _, *lines = results.table(report).splitlines()
    assert sum(int(part.split(" × ")[0]) for part in counted_.split(", ")) == len(CLAIMS)
    assert {line.count("|") for line in lines} == {6} and len(lines) == 2 + len(CLAIMS)
    assert "\n".join(lines) in capsys.readouterr().out


def test_a_claim_whose_arms_are_missing_is_left_out(seen) -> None:
    files = [found for found in everything(seen) if found["arm"] not in ("gold steps", "prior only")]
    names = {c["name"] for c in results.judged(Results(files))}
    assert "prior-only" not in names and "steps-improve" in names


def test_numbers_are_short_and_never_minus_zero() -> None:
    assert results.number(-0.001) == "0.00" and results.number(-0.001, True) == "+0.00"
    assert results.number(243.7) == "244" and results.number(0.126, True) == "+0.13"
    measure = {"mean": 0.19, "low": 0.1, "high": 0.3, "levels": [0.95, 0.76]}
    assert results.short(measure) == "0.95 against 0.76 (+0.19 [+0.10, +0.30])"


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


@pytest.mark.filterwarnings("ignore:no solution:RuntimeWarning")
def test_a_verifier_is_shown_the_generator_of_the_arm_that_it_meets(tmp_path, monkeypatch) -> None:
    """Trained for real, one update each; the last look is a whole one, whatever its number."""
    from tangolite.checkpoints import checksum
    from tangolite.models import load_policy
    from tangolite.training import start

    small = {"questions": 2, "group": 2, "updates": 1}
    alone = {"verifier_updates": "never", "step_source": "none"}
    other = Arm("other", "", "tango", small | alone)
    arm = Arm("meeting", "", "tango", small | {"verifier_warmup": 1}, counts="verifier", meets="other")
    shown, real, evaluate = [], looks.sampled_solutions, looks.evaluate
    monkeypatch.setattr(run, "tango_start", lambda weights, config: start(config))
    monkeypatch.setattr(run, "ARMS", ARMS | {"other": other, "meeting": arm})
    monkeypatch.setattr(looks, "COUNT", 8)
    monkeypatch.setattr(looks, "evaluate", lambda run: evaluate(run, 8))
    monkeypatch.setattr(
        looks, "sampled_solutions", lambda r, p, *a: shown.append(checksum(p)) or real(r, p, *a)
    )
    run.run_arm(tmp_path, other, 0)
    shown.clear()
    run.run_arm(tmp_path, arm, 0)
    trained = load_policy(run.run_folder(tmp_path, other, 0) / "policies" / "generator")
    assert shown[-1] == checksum(trained) and checksum(trained) not in shown[:-1]
    rows = json.loads(rows_file(tmp_path, arm, 0).read_text())["rows"]
    assert {"eval/met_step_balanced", "eval/answer_six", "eval/pool_named_accepted"} <= rows[-1].keys()
    assert rows[-1]["learned"] == 1 and "eval/met_step_balanced" not in rows[0]


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
    wanted = {(arm.name, seed) for arm in ARMS.values() for seed in range(5)}
    assert {(f["arm"], f["seed"]) for f in files} == wanted
    assert all(
        run.is_kept(committed, ARMS[name], seed) for name, seed in wanted
    )  # and of the arms as they are
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
    assert seen == [("recipes", 2, "x")]
