"""Throws hostile inputs at everything that reads what a model or a stranger wrote.

    python -m tangolite.lab.fuzz [--count 1000000] [--seed 0] [--out FILE]
    python -m tangolite.lab.fuzz --atheris 120

Parsers, grader and inspector may raise nothing at all; readers of files may raise ValueError that names the
file.  No input may take longer than `BOUND`, nor wait for `HANG`.  Inputs depend on the seed, the target and a
number alone (see `fuzz_inputs`), so ``--only parsers:123`` does one of them again.  The exit status is 1 where
anything failed.  With ``--atheris SECONDS`` the package of that name (`pip install atheris`, Linux) looks for
new paths through parsers and inspector instead; its exit status is its own.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tangolite import grading, parsing, records, sources, tasks
from tangolite.inspector import reading, render_feedback
from tangolite.lab import fuzz_inputs

BOUND = 2.0  # seconds of this process's time for one input: others may share the machine
HANG = 120.0  # seconds after which the process ends itself and says where it stood
TIMEOUT = 1.0  # seconds of the grader's algebra, which runs in a process of its own


def try_parsers(given: tuple[str, int]) -> None:
    """Every parser on one text; spans must be those of the text, scores must lie in 0..1."""
    text, n_steps = given
    for step in parsing.split_steps(text):
        assert text[step.start : step.end] == step.text, "a span is not its text"
    answer = parsing.extract_answer(text)
    assert answer is None or (answer in text and answer.strip()), "an answer that does not stand there"
    judgements, _ = parsing.parse_verification(text, n_steps)
    assert judgements is None or len(judgements) == n_steps > 0, "not one judgement a step"
    assert all(isinstance(said, str) for said in parsing.read_analyses(text))
    for score in (parsing.generator_format_score(text), parsing.verifier_format_score(text, n_steps)):
        assert 0 <= score <= 1, "a score outside 0..1"


def try_grader(pair: tuple[Any, Any]) -> None:
    """Two answers, compared; an exception inside is caught by the grader, which then calls it an error."""
    assert grading.grade(*pair, timeout=TIMEOUT).reason != "internal error", "the comparison raised"


def try_readers(given: tuple[str, bytes], folder: Path) -> None:
    """A file, opened by one of the readers; what they refuse they name."""
    reader, data = given
    path = folder / "file.jsonl"
    path.write_bytes(data)
    try:
        if reader == "records":
            records.read_records(path)
        elif reader == "jsonl":
            tasks.read_jsonl(path)
        elif reader == "processbench":
            sources.read_processbench("gsm8k", path=path)
        else:
            sources.read_counted(reader, path=path)
    except ValueError as error:
        assert str(path) in str(error), f"refused without the name of the file: {error}"


def try_inspector(record: Any) -> None:
    """A page, every filter and the numbers on tokens, of any JSON."""
    assert render_feedback(record).isascii()
    shown = reading.read_record(record)
    for place, one in enumerate(shown):
        assert all(test(one) in (True, False) for test in reading.FILTERS.values())
        assert len(reading.advantages(shown, place).mixed(0.5)) == len(one.pieces[0])


class Target(NamedTuple):
    make: Callable[[random.Random], Any]
    use: Callable[..., None]
    share: float  # of all inputs


TARGETS = {
    "parsers": Target(fuzz_inputs.text, try_parsers, 0.85),
    "grader": Target(fuzz_inputs.answers, try_grader, 0.05),
    "readers": Target(fuzz_inputs.file, try_readers, 0.05),
    "inspector": Target(fuzz_inputs.damaged_record, try_inspector, 0.05),
}


class Outcome(NamedTuple):
    """What one target did with its inputs."""

    inputs: int
    seconds: float
    slowest: tuple[float, int]  # seconds, number of the input
    faults: list[str]


def watch() -> None:
    """From here the process has `HANG` seconds until it is watched again; then it says where it stands and ends."""
    faulthandler.dump_traceback_later(HANG, exit=True, file=sys.__stderr__)


def attack(
    name: str, count: int, seed: int, folder: Path, first: int = 0, watch: Callable[[], None] = lambda: None
) -> Outcome:
    """``count`` inputs for one target; ``watch`` is called, and a line of progress said, now and then."""
    target = TARGETS[name]
    more = (folder,) if name == "readers" else ()
    began = spoken = time.monotonic()
    slowest, faults, kinds = (0.0, first), [], Counter()
    for number in range(first, first + count):
        given = target.make(random.Random(f"{seed}/{name}/{number}"))
        begun = time.process_time()
        try:
            target.use(given, *more)
        except Exception as error:
            kinds[kind := _kind(error)] += 1
            if kinds[kind] <= 3:
                faults.append(f"{name}:{number}: {kind}, given {given!r:.300}")
        slowest = max(slowest, (seconds := time.process_time() - begun, number))
        if seconds > BOUND:
            faults.append(f"{name}:{number}: took {seconds:.1f} s, given {given!r:.300}")
        if (now := time.monotonic()) - spoken > 10:
            watch()
            spoken, done = now, number - first + 1
            left = (now - began) / done * (count - done)
            print(f"{name}: {done:,} of {count:,}, {left:.0f} s left", file=sys.stderr, flush=True)
    more_of = [f"{name}: {n} times in all: {kind}" for kind, n in kinds.items() if n > 3]
    return Outcome(count, time.monotonic() - began, slowest, faults + more_of)


def _kind(error: Exception) -> str:
    """An exception and the line of the package that raised it."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        place = f" in {file.name}:{trace.tb_lineno}" if "tangolite" in file.parts else place
        trace = trace.tb_next
    return f"{type(error).__name__}{place} ({str(error)[:120]!r})"


def report(found: dict[str, Outcome]) -> str:
    lines = [
        f"{name}: {f.inputs:,} inputs, {1000 * f.seconds / max(f.inputs, 1):.3f} ms each with their making, slowest "
        f"{1000 * f.slowest[0]:.0f} ms (--only {name}:{f.slowest[1]}), {len(f.faults)} faults"
        for name, f in found.items()
    ]
    every = [fault for f in found.values() for fault in f.faults]
    total = sum(f.inputs for f in found.values())
    return "\n".join([*lines, f"{total:,} inputs in all, {len(every)} faults", *every])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tangolite.lab.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--count", type=int, default=1_000_000, help="inputs in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the numbers as JSON")
    parser.add_argument("--only", help="one input again, e.g. parsers:123")
    parser.add_argument("--atheris", type=int, metavar="SECONDS", help="coverage-guided, for so long")
    args = parser.parse_args(arguments)
    if args.atheris:
        from tangolite.lab.fuzz_coverage import search

        search(args.atheris)
    name, _, number = (args.only or "").partition(":")
    todo = (
        {name: (1, int(number or 0))}
        if name
        else {n: (round(t.share * args.count), 0) for n, t in TARGETS.items()}
    )
    watch()
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = {
                n: attack(n, count, args.seed, Path(folder), first, watch)
                for n, (count, first) in todo.items()
            }
    finally:
        faulthandler.cancel_dump_traceback_later()
    print(report(found))
    if args.out:
        args.out.write_text(
            json.dumps({n: f._asdict() for n, f in found.items()}, indent=1), encoding="utf-8"
        )
    return int(any(f.faults for f in found.values()))


if __name__ == "__main__":
    sys.exit(main())
