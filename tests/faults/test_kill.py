"""A run that is killed, at whatever moment, goes on to the same bits and never holds half a checkpoint.

The runs are in processes of their own, which die as by `kill -9`: nothing is tidied up.  Where the system has
a fork server, the packages are imported once and every process begins at once.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import assert_same_run

from tangolite import checkpoints, cli, training
from tangolite.cli import main

KILLS = 20
OPERATIONS = {"tango-tiny": 220, "covrl-tiny": 185}  # on files, in a whole run; a little more than there are
BUILT = ["pytest", "tangolite.cli", "tangolite.warmstart", "transformers.models.auto.modeling_auto",
         "transformers.models.qwen2.modeling_qwen2"]  # fmt: skip


def context():
    """How processes begin: from a server that has imported everything, or each on its own."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(BUILT)
    return found


def attempt(
    arguments: list[str], said: Path, moment: tuple = ("never", 0), seconds: float | None = None
) -> int:
    """Give a command to a process; its exit code.  It dies at a ``moment``, or is killed after ``seconds``.

    What it printed is in ``said``.
    """
    heard, says = context().Pipe(duplex=False)
    process = context().Process(target=_run, args=(arguments, str(said), moment, says))
    process.start()
    assert heard.poll(300), "the process did not begin"
    if seconds is not None:
        time.sleep(seconds)
        process.kill()
    process.join(300)
    return process.exitcode


def _run(arguments: list[str], said: str, moment: tuple, says) -> None:
    sys.stdout = sys.stderr = open(said, "w", encoding="utf-8")  # noqa: SIM115
    kind, number = moment
    if kind == "operation":
        die_at_operation(number)
    elif kind == "limit":
        limit_files(number)
    elif kind != "never":
        die_when(kind, number)
    says.send("begins")
    code = cli.main(arguments)
    sys.stderr.flush()
    sys.exit(code)


def limit_files(size: int) -> None:
    """No file grows beyond so many bytes: the write that would is cut short, as on a full disk."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def die() -> None:
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


# --- at a number of a file operation -------------------------------------------------------------------


def die_at_operation(number: int) -> None:
    """Before a file is opened, renamed, made or removed; or after one was written, then with its end cut off."""
    left, rng = number, random.Random(number)

    def step(written: Path | None = None, start: int = 0) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            if written is not None:
                os.truncate(written, rng.randrange(start, written.stat().st_size + 1))
            die()

    def hook(event: str, arguments: tuple) -> None:
        name = str(arguments[0]) if arguments else ""
        opened = event == "open" and any(
            part in name for part in (".jsonl", ".yaml", "checkpoints", "policies")
        )
        if opened or event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"):
            step()

    def after(write, adds: bool = False):
        def writes(path, *rest, **kwargs):
            start = Path(path).stat().st_size if adds and Path(path).exists() else 0
            found = write(path, *rest, **kwargs)
            step(Path(path), start)
            return found

        return writes

    save_file = checkpoints.save_file
    checkpoints.save_file = lambda tensors, path: after(lambda p: save_file(tensors, p))(path)
    training.append = after(training.append, adds=True)
    Path.write_text = after(Path.write_text)
    sys.addaudithook(hook)


# --- at a moment that has a name -----------------------------------------------------------------------


def die_when(moment: str, number: int) -> None:
    beside, target = f".writing-{number:06d}", f"update-{number:06d}"
    append, rename, replace = training.append, os.rename, os.replace
    save_file, save_policy, rmtree = checkpoints.save_file, checkpoints.save_policy, checkpoints.shutil.rmtree

    def killing_append(path, row):
        append(path, row)
        if moment == "line" and path.name == "metrics.jsonl" and row["update"] == number:
            os.truncate(path, path.stat().st_size - 9)
            die()

    def killing_save_file(tensors, path):
        save_file(tensors, path)
        if moment == "tensors" and path.parent.name == beside and "optimizer" in path.name:
            os.truncate(path, 100)
            die()

    def killing_rename(source, to):
        if moment == "before rename" and Path(to).name == target:
            die()
        rename(source, to)
        if moment == "after rename" and Path(to).name == target:
            die()

    def killing_replace(source, to):
        if moment == "recipe" and Path(to).name == "recipe.yaml":
            os.truncate(source, 50)
            die()
        replace(source, to)

    def killing_rmtree(path, **kwargs):
        if moment == "old" and Path(path).name == f".old-{target}" and Path(path).exists():
            os.unlink(Path(path) / "state.json")
            die()
        rmtree(path, **kwargs)

    def killing_save_policy(*arguments):
        save_policy(*arguments)
        if moment == "policies":
            die()

    training.append, os.rename, os.replace = killing_append, killing_rename, killing_replace
    checkpoints.save_file, checkpoints.save_policy = killing_save_file, killing_save_policy
    checkpoints.shutil.rmtree = killing_rmtree


# --- the tests ------------------------------------------------------------------------------------------


def assert_whole_checkpoints(out: Path) -> None:
    """Every checkpoint under its own name holds all its files, each with the bits that it was written with."""
    for folder in checkpoints.checkpoints(out):
        sums = json.loads((folder / "checksums.json").read_text(encoding="utf-8"))
        assert {path.name for path in folder.iterdir()} == {*sums, "checksums.json"}, folder
        assert all(checkpoints._digest(folder / name) == value for name, value in sums.items()), folder


@pytest.mark.parametrize("recipe", ["tango-tiny", "covrl-tiny"])
def test_twenty_kills_at_random_moments_change_no_bit(recipe, command, whole, tmp_path) -> None:
    """Every second one at a file operation, half written or not yet done; the others whenever it happens.

    A run that reaches its end between two kills is compared with the one that was never killed; then another
    one begins.
    """
    rng, kills, said = random.Random(f"moments of {recipe}"), 0, tmp_path / "said.txt"
    lines = (whole[recipe] / "timing.jsonl").read_text().splitlines()
    seconds = sum(json.loads(line)["seconds"] for line in lines)
    out, runs = tmp_path / "run-0", 0
    for number in range(4 * KILLS):
        moment = ("operation", rng.randrange(1, OPERATIONS[recipe])) if number % 2 else ("never", 0)
        after = None if number % 2 else rng.random() * 1.5 * seconds
        ended = attempt(command(recipe, out, options=["--resume"]), said, moment, after)
        assert ended not in (1, 2), said.read_text(encoding="utf-8")
        assert_whole_checkpoints(out)
        if ended == 0:
            assert_same_run(out, whole[recipe])
            runs += 1
            out = tmp_path / f"run-{runs}"
        elif (kills := kills + 1) == KILLS:
            break
    assert kills == KILLS
    assert main(command(recipe, out, options=["--resume"])) == 0
    assert_same_run(out, whole[recipe])


def test_a_kill_at_every_kind_of_moment_changes_no_bit(command, whole, tmp_path) -> None:
    """Twelve updates with turns V V G G G V G G G V G G, killed eight times on the way."""
    out, said = tmp_path / "run", tmp_path / "said.txt"
    begin, go_on = command("tango-tiny", out), ["train", "--out", str(out), "--resume"]

    def killed_at(moment: str, number: int, arguments: list[str]) -> None:
        assert attempt(arguments, said, (moment, number)) not in (0, 1, 2), said.read_text(encoding="utf-8")

    killed_at("recipe", 0, begin)
    assert [p.name for p in out.iterdir()] == [".recipe.yaml.writing"]
    killed_at("line", 2, begin)  # before the first checkpoint; the folder holds no run, so nothing to resume
    assert len((out / "metrics.jsonl").read_bytes().splitlines()) == 2  # the second is torn
    killed_at("tensors", 3, go_on)  # within the first checkpoint
    assert [p.name for p in (out / "checkpoints").iterdir()] == [".writing-000003"]
    killed_at("before rename", 6, go_on)
    assert [p.name for p in checkpoints.checkpoints(out)] == ["update-000003"]
    killed_at("after rename", 6, go_on)
    killed_at("line", 8, go_on)
    killed_at("old", 3, go_on)  # while an old checkpoint is removed
    killed_at("policies", 0, go_on)  # after the last update
    assert not checkpoints.finished(out) and (out / ".policies.writing" / "generator").exists()
    assert main(go_on) == 0
    assert_same_run(out, whole["tango-tiny"])
