"""The papers' claims at small scale: arms over seeds, each seed with a warm start of its own.

`python -m tangolite claims [tango|covrl] --seeds 3 --out DIR` makes the starting models of every seed,
runs every arm (two at a time), and writes `results.csv`, `results.json` and a table.  Stopped runs go on
where they were when the same command is given again.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

from tangolite.checkpoints import read_metrics
from tangolite.evaluate import bootstrap, evaluate
from tangolite.lab.weights import covrl_start, make_weights, tango_start
from tangolite.settings import load_recipe, with_seed
from tangolite.training import train

WARMUP, GENERATOR = 60, 60  # verifier warm-up updates; generator updates of every arm of Tango


class Arm(NamedTuple):
    """One way of training: a name, what it is, and what differs from the recipe."""

    name: str
    what: str
    changes: dict


TANGO = (
    Arm("outcome only", "GRPO on the answer alone",
        {"verifier_updates": "never", "step_source": "none", "updates": GENERATOR}),
    Arm("outcome only, gated", "the same, paid only where the steps work through the question's operations",
        {"verifier_updates": "never", "step_source": "none", "updates": GENERATOR, "gate": True}),
    Arm("frozen weak", "step rewards of the untrained verifier",
        {"verifier_updates": "never", "updates": GENERATOR}),
    Arm("frozen warmed", "step rewards of a verifier trained by RL, then frozen",
        {"verifier_updates": "warmup", "verifier_warmup": WARMUP, "updates": WARMUP + GENERATOR}),
    Arm("tango", "both learn, three updates to one",
        {"verifier_updates": "always", "verifier_warmup": WARMUP, "updates": WARMUP + GENERATOR * 4 // 3}),
    Arm("gold steps", "true step labels in the verifier's place (a yardstick)",
        {"verifier_updates": "never", "step_source": "truth", "updates": GENERATOR}),
)  # fmt: skip

COVRL = (
    Arm("prior only", "the answer's likelihood as reward, no posterior", {"alpha": 1.0}),
    Arm("covrl", "the paper's objective, the sampler's density detached", {}),
    Arm("exact KL", "the same objective, the KL summed over the vocabulary in place of the estimate",
        {"kl_estimator": "exact"}),
    Arm("KL balanced", "a named deviation: as exact KL, but the KL does not move the posterior",
        {"kl_gradient": "prior", "kl_estimator": "exact"}),
    Arm("KL balanced, prob", "the same with the answer's probability as reward and as weight of the NLL",
        {"kl_gradient": "prior", "kl_estimator": "exact", "reward": "prod_prob", "nll_weighted": True}),
)  # fmt: skip

FAMILIES = {"tango": ("tango-tiny", TANGO, tango_start), "covrl": ("covrl-tiny", COVRL, covrl_start)}
EVERY = 20  # updates of the generator (of the policy) between evaluations


def run_claims(name: str | None, seeds: int, out: str | Path) -> int:
    """Everything, two processes at a time; a seed's arms begin when its starting models are made."""
    out, began, done = Path(out), time.monotonic(), 0
    families = [name] if name else list(FAMILIES)
    total = seeds * sum(1 + len(FAMILIES[family][1]) for family in families)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        starts = {pool.submit(_start, str(out), f, s): (f, s) for s in range(seeds) for f in families}
        waiting = set(starts)
        while waiting:
            finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for job in finished:
                said, done, passed = job.result(), done + 1, time.monotonic() - began
                print(f"{done}/{total} {said}, {passed:.0f} s so far", file=sys.stderr, flush=True)
                if job in starts:
                    family, seed = starts[job]
                    arms = range(len(FAMILIES[family][1]))
                    waiting |= {pool.submit(run_arm, str(out), family, seed, index) for index in arms}
    for family in families:
        write_results(out, family, seeds)
    return 0


def _start(out: str, family: str, seed: int) -> str:
    torch.set_num_threads(1)
    make_weights(Path(out) / f"seed-{seed}" / "weights", seed, family)
    return f"start of {family}, seed {seed}"


def run_arm(out: str, family: str, seed: int, index: int) -> str:
    """Train one arm of one seed, evaluating at equal numbers of generator (policy) updates."""
    torch.set_num_threads(1)
    recipe, arms, begin = FAMILIES[family]
    arm = arms[index]
    folder = Path(out) / f"seed-{seed}" / f"{family}-{arm.name.replace(' ', '-').replace(',', '')}"
    config = with_seed(load_recipe(recipe), seed, **arm.changes)
    run = begin(Path(out) / f"seed-{seed}" / "weights", config)
    if not (folder / "start.json").exists():
        start = evaluate(run)
        folder.parent.mkdir(parents=True, exist_ok=True)
    else:
        start = json.loads((folder / "start.json").read_text())
    resume = (folder / "recipe.yaml").exists()
    train(config, folder, resume=resume, callbacks=[_evaluation(config)], run=run)
    (folder / "start.json").write_text(json.dumps(start))
    return f"{arm.name}, seed {seed}"


def _evaluation(config):
    """Evaluate after every 20 updates of the player that the claim is about, and after the warm-up."""

    def callback(run, done: int, metrics: dict) -> dict | None:
        learned = config.turns("generator", done) if config.method == "tango" else done
        own = config.method == "covrl" or config.turn(done - 1) == "generator"
        warmed = config.method == "tango" and learned == 0 and config.turn(done) == "generator"
        last = done == config.updates
        if (own and learned % EVERY == 0) or warmed or last:
            return {"learned": learned} | evaluate(run)
        return None

    return callback


# --- results -----------------------------------------------------------------------------------------


def collect(out: Path, family: str, seeds: int) -> list[dict]:
    """One row for every evaluation of every arm and seed; `learned` counts generator (policy) updates."""
    rows = []
    for seed in range(seeds):
        for arm in FAMILIES[family][1]:
            folder = out / f"seed-{seed}" / f"{family}-{arm.name.replace(' ', '-').replace(',', '')}"
            head = {"family": family, "arm": arm.name, "seed": seed}
            start = json.loads((folder / "start.json").read_text())
            rows.append(head | {"update": 0, "learned": 0, "seconds": 0.0} | start)
            spent, seconds = 0.0, {}
            for line in (folder / "timing.jsonl").read_text().splitlines():
                spent += json.loads(line)["seconds"]
                seconds[json.loads(line)["update"]] = round(spent, 1)
            for row in read_metrics(folder):
                if "learned" in row:
                    kept = {k: v for k, v in row.items() if k.startswith("eval/")}
                    at = {"update": row["update"], "learned": row["learned"]}
                    rows.append(head | at | {"seconds": seconds[row["update"]]} | kept)
    return rows


def write_results(out: Path, family: str, seeds: int) -> None:
    """`<family>.csv`, `<family>.json` (means and intervals) and the table on the screen."""
    rows = collect(out, family, seeds)
    names = list(dict.fromkeys(key for row in rows for key in row))
    with open(out / f"{family}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows({k: round(v, 4) if isinstance(v, float) else v for k, v in r.items()} for r in rows)
    summary = summarise(rows)
    (out / f"{family}.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(table(summary, family))


def summarise(rows: list[dict]) -> list[dict]:
    """Mean and bootstrap interval over seeds, for every arm and number of updates."""
    last = {}
    for row in rows:  # of several rows at one count (Tango ends on a verifier update) the last one stands
        last[row["arm"], row["learned"], row["seed"], row["update"] > 0] = row
    cells: dict[tuple, list[dict]] = {}
    for (arm, learned, _, begun), row in last.items():
        cells.setdefault((arm, learned, begun), []).append(row)
    return [
        {"arm": arm, "learned": learned, "trained": begun, "scores": _scores(found)}
        for (arm, learned, begun), found in cells.items()
    ]


def _scores(rows: list[dict]) -> dict[str, dict]:
    scores = {}
    for name in (k for k in rows[0] if k.startswith("eval/") or k == "seconds"):
        values = [row[name] for row in rows if name in row and row[name] == row[name]]
        if values:
            ends = {k: round(v, 4) for k, v in bootstrap(values)._asdict().items()}
            scores[name] = ends | {"seeds": [round(v, 4) for v in values]}
    return scores


COLUMNS = {
    "tango": ["eval/answer", "eval/answer_sampled", "eval/step_truth", "eval/step_balanced",
              "eval/final_balanced", "eval/first_error_f1", "eval/pool_step_balanced", "seconds"],
    "covrl": ["eval/answer", "eval/step_truth", "eval/step_truth_posterior", "seconds"],
}  # fmt: skip


def table(summary: list[dict], family: str) -> str:
    """The summary as a Markdown table: means over seeds."""
    columns = COLUMNS[family]
    head = ["arm", "updates", *(c.removeprefix("eval/").replace("_", " ") for c in columns)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for cell in summary:
        scores = [cell["scores"].get(c) for c in columns]
        shown = ["" if s is None else f"{s['mean']:.0f}" if c == "seconds" else f"{s['mean']:.3f}"
                 for c, s in zip(columns, scores, strict=True)]  # fmt: skip
        name = cell["arm"] + ("" if cell["trained"] else " (start)")
        lines.append(f"| {name} | {cell['learned']} | " + " | ".join(shown) + " |")
    return "\n".join(lines)
