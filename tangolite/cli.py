"""The command line: doctor, train, eval, warmstart, bench, claims.  Each has `--help`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (0 done, 1 could not be done, 2 wrong usage, 130 stopped)."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    top = parser()
    arguments = top.parse_args(argv)
    if arguments.command is run_train and arguments.out is None and not arguments.dry_run:
        top.error("train needs --out FOLDER for the run, or --dry-run to see what it takes")
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("tangolite: stopped", file=sys.stderr)
        return 130


def _run(arguments: argparse.Namespace) -> int:
    """The command, with what its user can put right said in words instead of a traceback."""
    if arguments.command is run_doctor:  # stands on the standard library alone
        return run_doctor(arguments)
    from tangolite.settings import RunError
    from tangolite.training import Interrupted

    try:
        return arguments.command(arguments) or 0
    except (RunError, ValueError) as error:
        print(f"tangolite: {error}", file=sys.stderr)
        return 130 if isinstance(error, Interrupted) else 1
    except OSError as error:
        named = error.filename is not None and error.strerror is not None
        print(f"tangolite: {f'{error.filename}: {error.strerror}' if named else error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """Every command and option."""
    top = argparse.ArgumentParser(
        prog="python -m tangolite", description="RL Tango and CoVRL, on what you have."
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what this machine can run, and what is missing")
    doctor.set_defaults(command=run_doctor)

    train = commands.add_parser("train", help="train a recipe")
    train.add_argument(
        "--recipe", help="a name (tango-tiny, covrl-tiny, …) or a YAML file; not needed to resume"
    )
    train.add_argument("--out", help="folder of the run")
    train.add_argument("--dry-run", action="store_true", help="only say what the recipe needs")
    train.add_argument(
        "--card", help="with --dry-run: the GPU to plan for (T4, RTX-4060, A100-80GB, H100, H200)"
    )
    train.add_argument("--processes", type=positive, default=1, help="with --dry-run: GPUs of the run")
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    _set_and_threads(train)
    train.set_defaults(command=run_train)

    evaluate = commands.add_parser("eval", help="evaluate a run's last checkpoint, or the start of a recipe")
    evaluate.add_argument("--run", help="folder of a run")
    evaluate.add_argument("--recipe", help="a recipe, to evaluate the policies it starts from")
    evaluate.add_argument("--count", type=positive, default=256, help="held-out problems (%(default)s)")
    evaluate.add_argument(
        "--records", help="evaluate into this JSONL file, resumable, with answers and verdicts"
    )
    evaluate.add_argument("--source", help="with --records: a data set (gsm8k, math500, processbench, …)")
    evaluate.add_argument("--path", help="with --source: a local copy of it")
    evaluate.add_argument("--split", help="with --source: another split than the papers'")
    evaluate.add_argument("--limit", type=positive, help="with --records: problems at most")
    evaluate.add_argument(
        "--samples", type=int, default=0, help="with --records: samples beside the greedy one"
    )
    evaluate.add_argument(
        "--tokens", action="store_true", help="with --records: keep the text of every token"
    )
    _set_and_threads(evaluate)
    evaluate.set_defaults(command=run_eval)

    warmstart = commands.add_parser("warmstart", help="make the built-in models from nothing (minutes)")
    warmstart.add_argument("--out", required=True, help="folder that gets one sub-folder a model")
    warmstart.add_argument("--seed", type=int, default=0)
    warmstart.add_argument("--only", choices=("tango", "covrl"), help="one of the two families")
    warmstart.set_defaults(command=run_warmstart)

    bench = commands.add_parser("bench", help="measure speed on this machine")
    bench.add_argument("what", choices=("sampling", "logprob", "peers", "cost"))
    bench.add_argument("--out", help="also write the numbers as JSON (logprob: and a figure beside it)")
    bench.add_argument(
        "--size", action="append", type=size, metavar="N,D,V,DTYPE", help="logprob: rows, width, vocabulary "
        "and type, e.g. 1024,896,151936,float32; may be repeated (real heads unless given)",
    )  # fmt: skip
    bench.add_argument(
        "--limit",
        type=float,
        default=60.0,
        help="logprob: leave out ways that take longer (seconds, %(default)s)",
    )
    bench.add_argument("--threads", type=positive, help="logprob: CPU threads of torch (all unless given)")
    bench.set_defaults(command=run_bench)

    claims = commands.add_parser("claims", help="the papers' claims at small scale, over seeds")
    claims.add_argument(
        "name", nargs="?", help="a claim by name or number, or tango or covrl; everything if left out"
    )  # fmt: skip
    claims.add_argument("--seeds", type=positive, default=5)
    claims.add_argument("--out", required=True)
    claims.set_defaults(command=run_claims)
    return top


def _set_and_threads(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set", nargs="+", default=[], action="extend", metavar="KEY=VALUE", help="change settings of the "
        "recipe, e.g. lr=1e-4 task.steps=4; task.file=FILE.jsonl puts your own problems in the task's place",
    )  # fmt: skip
    command.add_argument(
        "--threads", type=positive, default=1, help="CPU threads of torch; 1 is fastest for tiny models"
    )


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if (number := int(text)) < 1:
        raise ValueError(text)
    return number


def size(text: str) -> tuple[int, int, int, str]:
    """N,D,V,DTYPE for argparse."""
    n, d, v, dtype = text.split(",")
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(text)
    return positive(n), positive(d), positive(v), dtype


def run_doctor(arguments: argparse.Namespace) -> int:
    from tangolite.doctor import doctor

    return doctor()


def run_train(arguments: argparse.Namespace) -> int:
    import torch

    from tangolite.evaluate import held_out
    from tangolite.parallel import join_team, rank
    from tangolite.settings import RunError, load_recipe, recipe_of_run
    from tangolite.training import train

    torch.set_num_threads(arguments.threads)
    if arguments.dry_run:
        return run_dry(arguments)
    join_team()
    if arguments.recipe is None and not arguments.resume:
        raise RunError("give --recipe NAME to start a run, or --resume to go on with the one in --out")
    if arguments.recipe is not None:
        config = load_recipe(arguments.recipe, arguments.set)
    else:
        config = recipe_of_run(arguments.out, arguments.set)
    train(config, arguments.out, resume=arguments.resume, callbacks=[held_out(config.eval_every)])
    if rank() == 0:
        print(f"done: {config.updates} updates; metrics, checkpoints and policies are in {arguments.out}")
    return 0


def run_dry(arguments: argparse.Namespace) -> int:
    import torch

    from tangolite.lab.planner import CARDS, dry_run
    from tangolite.settings import RunError, load_recipe

    card = arguments.card or ("laptop" if not torch.cuda.is_available() else "A100-80GB")
    if card not in CARDS:
        raise RunError(f"--card {card} is not known: {', '.join(CARDS)}")
    if arguments.recipe is None:
        raise RunError("--dry-run needs --recipe NAME")
    print(dry_run(load_recipe(arguments.recipe, arguments.set), card, arguments.processes))
    return 0


def run_eval(arguments: argparse.Namespace) -> int:
    import torch

    from tangolite.checkpoints import checkpoints, load_checkpoint
    from tangolite.evaluate import METRICS, evaluate
    from tangolite.settings import RunError, load_recipe, recipe_of_run
    from tangolite.training import start

    torch.set_num_threads(arguments.threads)
    if (arguments.run is None) == (arguments.recipe is None):
        raise RunError("give either --run FOLDER or --recipe NAME")
    if arguments.run and arguments.set:
        raise RunError("--set changes a recipe, so it goes with --recipe; a run has its own settings")
    config = recipe_of_run(arguments.run) if arguments.run else load_recipe(arguments.recipe, arguments.set)
    found = checkpoints(arguments.run) if arguments.run else []
    if arguments.run and not found:
        raise RunError(f"{arguments.run} has no checkpoint yet")
    run = start(config)
    done = load_checkpoint(found[-1], run) if found else 0
    beside = [o for o in ("source", "path", "split", "limit", "samples", "tokens") if getattr(arguments, o)]
    if arguments.records:
        from tangolite.lab.eval_source import eval_source

        eval_source(run, arguments.records, **{o: getattr(arguments, o) for o in beside})
        return 0
    if beside:
        raise RunError(f"--{' and --'.join(beside)} need --records FILE, where the answers are kept")
    print(f"after update {done}, {arguments.count} held-out problems:")
    for name, value in evaluate(run, arguments.count).items():
        print(f"{name:28s} {value:6.3f}  {METRICS.get(name, '')}")
    return 0


def run_warmstart(arguments: argparse.Namespace) -> int:
    import torch

    from tangolite.lab.weights import make_weights

    torch.set_num_threads(1)
    return make_weights(arguments.out, arguments.seed, arguments.only)


def run_bench(arguments: argparse.Namespace) -> int:
    if arguments.what == "logprob":
        return run_bench_logprob(arguments)
    from tangolite.lab.bench import bench_sampling
    from tangolite.lab.bench_cost import bench_cost
    from tangolite.lab.bench_peers import bench_peers

    report = {"sampling": bench_sampling, "peers": bench_peers, "cost": bench_cost}[arguments.what]()
    if arguments.out:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    return 0


def run_bench_logprob(arguments: argparse.Namespace) -> int:
    import torch

    from tangolite.lab.bench_logprob import bench_logprob, write

    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    report = bench_logprob(arguments.size, limit=arguments.limit)
    if arguments.out:
        write(report, arguments.out)
    return 0


def run_claims(arguments: argparse.Namespace) -> int:
    from tangolite.lab.claims import run_claims as run

    return run(arguments.name, arguments.seeds, arguments.out)
