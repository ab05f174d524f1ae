"""Training the arms: two at a time, each once for a seed, resumable from whatever is there.

OUT/runs/seed-N/…         starting models and run folders, to go on from (not kept in the repository)
OUT/rows/ARM/seed-N.json  what a finished arm gave; where this is there, the arm is done
"""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import torch
import yaml

import tangolite
from tangolite import __version__
from tangolite.checkpoints import checkpoints, read_metrics
from tangolite.evaluate import sampled_solutions
from tangolite.lab.claims.arms import ARMS, Arm
from tangolite.lab.claims.looks import COUNT, look, met, on_balanced_mix, said_and_true, tried
from tangolite.lab.claims.score_model import ScoreModel, paid_by_scores, taught
from tangolite.lab.weights import covrl_start, make_weights, tango_start
from tangolite.losses import _bregman, _log_composite_over_prior, composite_logp
from tangolite.models import load_policy
from tangolite.settings import RunError, load_recipe, plain, with_seed
from tangolite.training import train

RECIPES = {
    "tango": "tango-tiny",
    "hard": "tango-tiny",
    "scores": "tango-tiny",
    "covrl": "covrl-tiny",
    "live": "covrl-tiny",
}
EVERY = 20  # updates of the player that an arm counts, between looks
CURVES = ("reward", "reward_prior", "reward_posterior", "kl", "length", "dead_groups", "step_balanced",
          "step_correct_rate", "final_balanced", "final_accuracy", "step_truth_posterior", "correct")  # fmt: skip


def run_arms(names: Iterable[str], seeds: int, out: Path) -> None:
    """Every arm that is not there yet, with what it needs before it; says how far it is and how long it takes."""
    jobs = plan(names, seeds, out)
    began, done, running, finished = time.monotonic(), 0, {}, set()
    print(f"{len(jobs)} trainings to do, two at a time", file=sys.stderr, flush=True)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        while jobs or running:
            for job in [job for job in jobs if not jobs[job] - finished][: 2 - len(running)]:
                del jobs[job]
                running[pool.submit(do, job, str(out))] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job = running.pop(future)
                finished.add(job)
                done, spent = done + 1, time.monotonic() - began
                left = spent / done * (len(jobs) + len(running))
                print(f"{done} done ({future.result()}), {spent:.0f} s, about {left:.0f} s left", file=sys.stderr,
                      flush=True)  # fmt: skip


Job = tuple[str, int]  # an arm, or "weights of FAMILY"; and a seed


def plan(names: Iterable[str], seeds: int, out: Path) -> dict[Job, set[Job]]:
    """What has to be done, seed by seed, and for each job the jobs that come before it."""
    jobs: dict[Job, set[Job]] = {}

    def add(name: str, seed: int, run_needed: bool) -> None:
        arm, kept = ARMS[name], is_kept(out, ARMS[name], seed)
        if (name, seed) in jobs or (kept and (not run_needed or checkpoints(run_folder(out, arm, seed)))):
            return
        before = [other for other in (arm.after, arm.meets) if other]
        for other in before:
            add(other, seed, run_needed=True)
        weights = (f"weights of {weights_of(arm)}", seed)
        jobs.setdefault(weights, set())
        jobs[name, seed] = {weights} | {(other, seed) for other in before if (other, seed) in jobs}

    for seed in range(seeds):
        for name in names:
            add(name, seed, run_needed=False)
    return jobs


def weights_of(arm: Arm) -> str:
    return "tango" if RECIPES[arm.family] == "tango-tiny" else "covrl"


def rows_file(out: Path, arm: Arm, seed: int) -> Path:
    return out / "rows" / arm.slug / f"seed-{seed}.json"


def is_kept(out: Path, arm: Arm, seed: int) -> bool:
    """Are its rows there?  RunError if they are those of an arm of this name that was another one."""
    path = rows_file(out, arm, seed)
    if not path.exists():
        return False
    if json.loads(path.read_text("utf-8")).get("changes") != arm.changes:
        raise RunError(
            f"{path} holds an arm {arm.name!r} with other settings: move it away, or choose another --out"
        )
    return True


def run_folder(out: Path, arm: Arm, seed: int) -> Path:
    return out / "runs" / f"seed-{seed}" / arm.slug


def do(job: Job, out: str) -> str:
    """One job, in a process of its own."""
    torch.set_num_threads(1)
    name, seed = job
    if name.startswith("weights of "):
        make_weights(Path(out) / "runs" / f"seed-{seed}" / "weights", seed, name.removeprefix("weights of "))
    else:
        run_arm(Path(out), ARMS[name], seed)
    return f"{name}, seed {seed}"


def run_arm(out: Path, arm: Arm, seed: int) -> None:
    """Train one arm of one seed from that seed's starting models, and write its rows."""
    config = with_seed(load_recipe(RECIPES[arm.family]), seed, **arm.changes)
    weights, folder = out / "runs" / f"seed-{seed}" / "weights", run_folder(out, arm, seed)
    run = (tango_start if weights_of(arm) == "tango" else covrl_start)(weights, config)
    if arm.family == "scores":
        found = _train_by_scores(run, weights)
    else:
        see = look
        if arm.family == "hard":
            run.verifier_task, tries = tried(run)
            see = lambda run, learned, last: on_balanced_mix(run, tries)  # noqa: E731
        _begin_after(out, arm, seed, folder, config)
        first = folder.with_suffix(".start.json")
        if not first.exists():
            first.parent.mkdir(parents=True, exist_ok=True)
            first.write_text(json.dumps(see(run, 0, False)))
        with density_not_held(arm.family == "live"):
            train(
                config,
                folder,
                resume=(folder / "recipe.yaml").exists(),
                callbacks=[_looks(arm, config, see)],
                run=run,
            )
        found = _rows(folder, arm, config, json.loads(first.read_text()))
        if arm.meets:
            generator = load_policy(run_folder(out, ARMS[arm.meets], seed) / "policies" / "generator")
            found["rows"][-1] |= _rounded([met(run, generator)])[0]
    path = rows_file(out, arm, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"arm": arm.name, "seed": seed, "changes": arm.changes, "made": made()} | found) + "\n",
        encoding="utf-8",
    )


def made() -> dict[str, str]:
    return {"date": datetime.date.today().isoformat(), "tangolite": __version__, "code": code(),
            "torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}  # fmt: skip


def code() -> str:
    """A short digest of the modules that train and evaluate: rows that differ in it may differ in their bits."""
    root = Path(tangolite.__file__).parent
    files = [
        *root.glob("*.py"),
        *root.glob("sampling/*.py"),
        *root.glob("logprob/*.py"),
        *root.glob("recipes/*.yaml"),
    ]
    text = b"".join(path.read_bytes() for path in sorted(files))
    return hashlib.sha256(text).hexdigest()[:10]


def _begin_after(out: Path, arm: Arm, seed: int, folder: Path, config) -> None:
    """Put the last checkpoint and the logs of the arm before into this arm's folder, as if they were its."""
    if arm.after is None or (folder / "recipe.yaml").exists():
        return
    before = run_folder(out, ARMS[arm.after], seed)
    last = checkpoints(before)[-1]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(last, folder / "checkpoints" / last.name)
    for log in ("metrics.jsonl", "timing.jsonl"):
        shutil.copy(before / log, folder / log)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(plain(config), sort_keys=False), encoding="utf-8")


def counted(arm: Arm, config, done: int) -> int:
    return done if arm.counts == "policy" else config.turns(arm.counts, done)


def _looks(arm: Arm, config, see: Callable = look) -> Callable:
    """Looks after every 20 updates of the player that the arm counts, and at the end.

    Every update also notes the processor seconds that it took, looks left out: they depend far less than the
    clock on what else the machine does, but not nothing (by a quarter, where memory is shared).
    """
    last = [time.process_time()]

    def callback(run, done: int, metrics: dict) -> dict:
        found = {"cpu": round(time.process_time() - last[0], 3)}
        learned = counted(arm, config, done)
        own = learned > counted(arm, config, done - 1)
        if (own and learned % EVERY == 0) or done == config.updates:
            found |= see(run, learned, done == config.updates)
        last[0] = time.process_time()
        return found

    return callback


def _rows(folder: Path, arm: Arm, config, start: dict) -> dict:
    """The looks at an arm, with the updates and processor seconds till then, and the curves of its updates."""
    metrics, spent = read_metrics(folder), 0.0
    rows = [{"update": 0, "learned": 0, "seconds": 0.0} | start]
    for row in metrics:
        spent += row["cpu"]
        scores = {k: v for k, v in row.items() if k.startswith("eval/")}
        if scores:
            learned = counted(arm, config, row["update"])
            rows.append({"update": row["update"], "learned": learned, "seconds": round(spent, 1)} | scores)
    own = [row for row in metrics if row.get("turn") in (None, arm.counts)]
    curves = {name: [round(row[name], 4) for row in own if name in row] for name in CURVES}
    return {"rows": _rounded(rows), "curves": {name: values for name, values in curves.items() if values}}


def _rounded(rows: list[dict]) -> list[dict]:
    return [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows]


def _train_by_scores(run, weights: Path) -> dict:
    """The score model is taught and frozen; then the generator learns from its scores alone."""
    policy = load_policy(weights / "tiny-verifier")
    policy.model.requires_grad_(True)
    model, began = ScoreModel(policy, run.prompts, run.config.seed), time.process_time()
    losses = taught(run, model)
    spent = time.process_time() - began
    rows, curves = [], {"correct": [], "reward": []}
    for number in range(run.config.updates + 1):
        if number % EVERY == 0:
            rows.append({"update": number, "learned": number, "seconds": round(spent, 1)} | _seen(run, model))
        if number < run.config.updates:
            began = time.process_time()
            metrics = paid_by_scores(run, model, number)
            spent += time.process_time() - began
            for name, values in curves.items():
                values.append(round(metrics[name], 4))
    return {"rows": _rounded(rows), "curves": curves | {"score_loss": [round(x, 4) for x in losses]}}


def _seen(run, model: ScoreModel) -> dict[str, float]:
    solutions = sampled_solutions(run, run.generator, COUNT, "named")
    scores = model.scores(solutions)
    judged = said_and_true(solutions, scores.tolist(), (scores > 0.5).tolist())
    return judged | look(run, 0)


@contextmanager
def density_not_held(wanted: bool):
    """Inside, CoVRL's KL is also differentiated through the density of the sampler: the mistake of claim 16."""

    def live(logp_prior, logp_posterior, from_prior, *, sampler_logp=None):
        sampler = torch.where(from_prior[:, None], logp_prior, logp_posterior)
        weight = composite_logp(logp_prior, logp_posterior) - sampler
        return weight.exp() * _bregman(_log_composite_over_prior(logp_prior, logp_posterior))

    if not wanted:
        yield
        return
    with mock.patch("tangolite.losses.covrl_kl", live):
        yield
