"""A run that was killed, anywhere, goes on to the same bits; what cannot go on is refused in words."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from tangolite import checkpoints
from tangolite.cli import main

UPDATES = 12  # of the runs in conftest.py, with a checkpoint every 3

# The command line in a process that kills itself at one moment, as a power cut would: nothing is tidied up.
KILLER = """
import os, signal, sys
from pathlib import Path
from tangolite import checkpoints, cli, training

moment, number = sys.argv[1], int(sys.argv[2])
beside, target = f".writing-{number:06d}", f"update-{number:06d}"
append, rename, replace = training.append, os.rename, os.replace
save_file, save_policy, rmtree = checkpoints.save_file, checkpoints.save_policy, checkpoints.shutil.rmtree

def die():
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))

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
sys.exit(cli.main(sys.argv[3:]))
"""


def process(arguments: list[str], moment: str = "never", number: int = 0) -> subprocess.Popen:
    root = Path(checkpoints.__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLER, moment, str(number), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)


def killed_at(moment: str, number: int, arguments: list[str]) -> None:
    running = process(arguments, moment, number)
    _, err = running.communicate(timeout=500)
    assert running.returncode not in (0, 1, 2), err  # not an end of its own


def killed_after(lines: int, out: Path, arguments: list[str], rng: random.Random) -> None:
    """Killed from outside, a random moment after the metrics have so many lines."""
    running = process(arguments)
    log, end = out / "metrics.jsonl", time.monotonic() + 500
    while running.poll() is None and time.monotonic() < end:
        if log.exists() and log.read_bytes().count(b"\n") >= lines:
            time.sleep(rng.random() * 0.05)  # well under an update, so that the run cannot end meanwhile
            break
        time.sleep(0.005)
    running.kill()
    _, err = running.communicate()
    assert "Traceback" not in err, err


def assert_same_run(out: Path, whole: Path) -> None:
    """The same files with the same bytes, but for what the clock said; and nothing left behind."""
    files, expected = (
        {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        for folder in (out, whole)
    )
    assert files.keys() == expected.keys()
    assert [name for name in files if files[name] != expected[name]] in ([], ["timing.jsonl"])


# Killed


def test_tango_killed_at_every_kind_of_moment_ends_in_the_same_bits(command, whole, tmp_path) -> None:
    """Twelve updates with turns V V G G G V G G G V G G, killed ten times on the way."""
    out, rng = tmp_path / "run", random.Random(time.time_ns())
    begin, go_on = command("tango-tiny", out), ["train", "--out", str(out), "--resume"]
    killed_at("recipe", 0, begin)
    assert [p.name for p in out.iterdir()] == [".recipe.yaml.writing"]
    killed_at("line", 2, begin)  # before the first checkpoint; the folder holds no run, so nothing to resume
    assert len((out / "metrics.jsonl").read_bytes().splitlines()) == 2  # the second is torn
    killed_at("tensors", 3, go_on)  # within the first checkpoint
    assert [p.name for p in (out / "checkpoints").iterdir()] == [".writing-000003"]
    killed_at("before rename", 6, go_on)
    assert [p.name for p in checkpoints.checkpoints(out)] == ["update-000003"]
    killed_at("after rename", 6, go_on)
    killed_after(7, out, go_on, rng)
    killed_at("old", 3, go_on)  # while an old checkpoint is removed
    killed_after(10, out, go_on, rng)
    killed_at("policies", 0, go_on)  # after the last update
    assert not checkpoints.finished(out) and (out / ".policies.writing" / "generator").exists()
    assert main(go_on) == 0
    assert_same_run(out, whole["tango-tiny"])


def test_covrl_killed_at_random_moments_ends_in_the_same_bits(command, whole, tmp_path) -> None:
    out, rng = tmp_path / "run", random.Random(time.time_ns())
    killed_after(2, out, command("covrl-tiny", out), rng)
    for lines in (5, 10):
        killed_after(lines, out, command("covrl-tiny", out, options=["--resume"]), rng)
    assert main(command("covrl-tiny", out, options=["--resume"])) == 0
    assert_same_run(out, whole["covrl-tiny"])


# Resumed, without a process of its own: a folder as a kill would leave it


@pytest.fixture
def cut(whole, tmp_path):
    """A copy of a finished run, taken back to its checkpoint after update 9, with later lines in its logs."""

    def copy(recipe: str) -> Path:
        out = tmp_path / "run"
        shutil.copytree(whole[recipe], out)
        shutil.rmtree(out / "policies")
        shutil.rmtree(out / "checkpoints" / "update-000012")
        return out

    return copy


@pytest.mark.parametrize("recipe", ["tango-tiny", "covrl-tiny"])
def test_a_run_that_is_resumed_says_from_where_and_ends_in_the_same_bits(recipe, cut, whole, capsys) -> None:
    out = cut(recipe)
    assert main(["train", "--out", str(out), "--resume"]) == 0
    said = capsys.readouterr()
    assert "going on after update 9" in said.err and said.out.startswith("done: 12 updates")
    assert_same_run(out, whole[recipe])


def test_everything_that_an_update_depends_on_is_in_the_checkpoint(cut, whole) -> None:
    """Undoing any part of it changes the rest of the run, so that the tests above can fail."""
    folder = whole["tango-tiny"] / "checkpoints" / "update-000009"
    state = json.loads((folder / "state.json").read_text())
    assert (state["update"], state["next_turn"], state["data_position"]) == (9, "verifier", 9)
    counts = state["run"]["class_weights"]
    assert counts["correct_ema"] > 0 and counts["incorrect_ema"] > 0  # both classes occurred
    for player in ("generator", "verifier"):
        moments = load_file(folder / f"{player}.optimizer.safetensors")
        assert {name.split(".")[1] for name in moments} == {"step", "exp_avg", "exp_avg_sq"}
        assert {int(v) for k, v in moments.items() if k.endswith("step")} == {
            "generator": {6}, "verifier": {3}}[player]  # fmt: skip


@pytest.mark.parametrize("part", ["class_weights", "generator.optimizer", "verifier.optimizer", "generator"])
def test_a_part_of_the_state_that_is_wrong_changes_the_rest_of_the_run(part, cut, whole, tmp_path) -> None:
    out = cut("tango-tiny")
    folder = out / "checkpoints" / "update-000009"
    if part == "class_weights":
        state = json.loads((folder / "state.json").read_text())
        state["run"]["class_weights"] = {"correct_ema": 9.0, "incorrect_ema": 1.0}
        (folder / "state.json").write_text(json.dumps(state))
    else:
        tensors = load_file(folder / f"{part}.safetensors")
        save_file({k: v * 0.5 for k, v in tensors.items()}, folder / f"{part}.safetensors")
    sums = {p.name: checkpoints._digest(p) for p in folder.iterdir() if p.name != "checksums.json"}
    (folder / "checksums.json").write_text(json.dumps(sums))
    assert main(["train", "--out", str(out), "--resume"]) == 0
    ours, theirs = (
        [(f / "policies" / n / "model.safetensors").read_bytes() for n in ("generator", "verifier")]
        for f in (out, whole["tango-tiny"])
    )
    assert ours != theirs


def test_a_finished_run_is_left_as_it_is_and_said_to_be_finished(whole, tmp_path, capsys) -> None:
    out = shutil.copytree(whole["covrl-tiny"], tmp_path / "run")
    (out / "checkpoints" / ".old-x").mkdir()
    before = {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in out.rglob("*")}
    assert main(["train", "--out", str(out), "--resume"]) == 0
    assert "finished (12 updates); nothing was changed" in capsys.readouterr().err
    assert {p: (p.stat().st_mtime_ns, p.is_file() and p.read_bytes()) for p in out.rglob("*")} == before


def test_a_run_without_a_checkpoint_yet_begins_again_and_says_so(command, whole, tmp_path, capsys) -> None:
    out = tmp_path / "run"
    out.mkdir()
    shutil.copy(whole["covrl-tiny"] / "recipe.yaml", out)
    (out / "metrics.jsonl").write_text('{"update": 1, "loss": 5}\n{"upda')
    assert main(command("covrl-tiny", out, options=["--resume"])) == 0
    assert "no checkpoint yet: beginning with update 1" in capsys.readouterr().err
    assert_same_run(out, whole["covrl-tiny"])


def test_resume_on_an_empty_folder_is_a_start(command, tmp_path, whole) -> None:
    assert main(command("covrl-tiny", tmp_path / "run", options=["--resume"])) == 0
    assert_same_run(tmp_path / "run", whole["covrl-tiny"])


# Refused


def refused(arguments: list[str], capsys) -> str:
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("tangolite: ") and "Traceback" not in said.err
    return said.err


def test_another_recipe_or_another_setting_is_refused_with_each_difference(command, cut, capsys) -> None:
    out = cut("covrl-tiny")
    changed = command("covrl-tiny", out, "lr=1e-3", "task.steps=2", options=["--resume"])
    said = refused(changed, capsys)
    assert "lr: there 0.0003, asked for 0.001" in said and "'steps': 1" in said and "'steps': 2" in said
    assert said.count("\n  ") == 2  # these two and no other
    said = refused(["train", "--out", str(out), "--resume", "--set", "seed=1", "clip_eps=0.1"], capsys)
    assert "seed: there 4, asked for 1" in said and "clip_eps: there 0.3, asked for 0.1" in said
    said = refused(command("tango-tiny", out, options=["--resume"]), capsys)
    assert "method: there 'covrl', asked for 'tango'" in said and "traces: there 2, asked for None" in said


def test_the_settings_of_the_run_itself_may_be_given_again(cut, capsys) -> None:
    assert main(["train", "--out", str(cut("covrl-tiny")), "--resume", "--set", "lr=3e-4", "seed=4"]) == 0


def test_a_recipe_file_that_was_edited_by_hand_is_read_as_numbers(cut, capsys) -> None:
    out = cut("covrl-tiny")
    text = (out / "recipe.yaml").read_text()
    (out / "recipe.yaml").write_text(text.replace("lr: 0.0003", "lr: 3e-4"))
    assert main(["train", "--out", str(out), "--resume"]) == 0


def test_resume_needs_a_run_or_a_recipe(tmp_path, capsys) -> None:
    assert "holds no run" in refused(["train", "--out", str(tmp_path / "none"), "--resume"], capsys)
    (tmp_path / "recipe.yaml").write_text("")
    said = refused(["train", "--out", str(tmp_path), "--resume"], capsys)
    assert "recipe.yaml: a recipe is a mapping" in said


def test_start_weights_that_changed_on_disk_are_refused(cut, starts, tmp_path, capsys) -> None:
    """The references of the KL penalty are the starting weights: others would be another run."""
    out, moved = cut("tango-tiny"), shutil.copytree(starts, tmp_path / "starts")
    recipe = yaml.safe_load((out / "recipe.yaml").read_text())
    recipe |= {"generator": str(moved / "generator"), "verifier": str(moved / "verifier")}
    (out / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", "--out", str(shutil.copytree(out, tmp_path / "moved")), "--resume"]) == 0
    tensors = load_file(moved / "verifier" / "model.safetensors")
    name = min(tensors)
    changed = tensors | {name: tensors[name] + 1e-3}
    save_file(changed, moved / "verifier" / "model.safetensors", {"format": "pt"})
    before = (out / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    said = refused(["train", "--out", str(out), "--resume"], capsys)
    assert "the weights of the verifier changed since" in said and "generator" not in said
    assert (out / "metrics.jsonl").read_bytes() == before
    assert "the weights of the verifier changed since" in refused(["eval", "--run", str(out)], capsys)


def test_problems_that_changed_on_disk_are_refused(command, tmp_path, capsys) -> None:
    out, file = tmp_path / "run", tmp_path / "mine.jsonl"
    file.write_text('{"question": "0+1", "answer": "1"}\n{"question": "1+1", "answer": "0"}\n')
    arguments = command("covrl-tiny", out, f"task={{file: {file}}}", "updates=3")
    assert main(arguments) == 0
    shutil.rmtree(out / "policies")
    assert main([*arguments[:5], "--resume", *arguments[5:]]) == 0
    shutil.rmtree(out / "policies")
    file.write_text('{"question": "0+1", "answer": "1"}\n')
    capsys.readouterr()
    assert "the task changed since" in refused([*arguments[:5], "--resume", *arguments[5:]], capsys)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = {
    "truncated weights": lambda f: os.truncate(f / "verifier.safetensors", 500),
    "empty weights": lambda f: os.truncate(f / "generator.safetensors", 0),
    "one bit of the weights": lambda f: flip(f / "generator.safetensors"),
    "one bit of the optimizer": lambda f: flip(f / "verifier.optimizer.safetensors"),
    "missing optimizer": lambda f: (f / "generator.optimizer.safetensors").unlink(),
    "missing random state": lambda f: (f / "rng.safetensors").unlink(),
    "a changed number": lambda f: (f / "state.json").write_text(
        (f / "state.json").read_text().replace('"update": 9', '"update": 8')
    ),
    "broken state": lambda f: os.truncate(f / "state.json", 20),
    "no checksums": lambda f: (f / "checksums.json").unlink(),
    "broken checksums": lambda f: os.truncate(f / "checksums.json", 20),
    "checksums of another shape": lambda f: (f / "checksums.json").write_text("[1]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_with_its_folder_and_what_to_do(damage, cut, capsys) -> None:
    out = cut("tango-tiny")
    folder = out / "checkpoints" / "update-000009"
    DAMAGE[damage](folder)
    before = (out / "metrics.jsonl").read_bytes()
    said = refused(["train", "--out", str(out), "--resume"], capsys)
    assert str(folder) in said and "Delete this folder" in said and "it is the only one" in said
    assert (out / "metrics.jsonl").read_bytes() == before and folder.is_dir()


def test_without_the_damaged_checkpoint_the_run_goes_on_from_the_one_before(whole, tmp_path, capsys) -> None:
    out = shutil.copytree(whole["covrl-tiny"], tmp_path / "run")
    shutil.rmtree(out / "policies")
    os.truncate(out / "checkpoints" / "update-000012" / "policy.safetensors", 9)
    said = refused(["train", "--out", str(out), "--resume"], capsys)
    assert "update-000012" in said and "to go on from update-000009" in said
    shutil.rmtree(out / "checkpoints" / "update-000012")
    assert main(["train", "--out", str(out), "--resume"]) == 0
    assert "going on after update 9" in capsys.readouterr().err
    assert_same_run(out, whole["covrl-tiny"])


def test_a_checkpoint_of_a_model_of_another_shape_is_refused(cut, capsys) -> None:
    folder = cut("covrl-tiny") / "checkpoints" / "update-000009"
    for change in (lambda t: {f"x{k}": v for k, v in t.items()}, lambda t: {k: v[:1] for k, v in t.items()}):
        tensors = load_file(folder / "policy.safetensors")
        save_file({k: v.clone() for k, v in change(tensors).items()}, folder / "policy.safetensors")
        sums = {p.name: checkpoints._digest(p) for p in folder.iterdir() if p.name != "checksums.json"}
        (folder / "checksums.json").write_text(json.dumps(sums))
        assert "cannot be used" in refused(["train", "--out", str(folder.parent.parent), "--resume"], capsys)
