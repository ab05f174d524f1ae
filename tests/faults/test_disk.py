"""Disks that are full or read-only, and files that vanish or are damaged: said in words, nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import assert_same_run
from safetensors.torch import load_file
from test_kill import assert_whole_checkpoints, attempt

from tangolite import checkpoints
from tangolite.cli import main
from tangolite.models import load_policy

FULL = (errno.ENOSPC, "No space left on device")
READ_ONLY = (errno.EROFS, "Read-only file system")


def refused(arguments: list[str], capsys) -> str:
    """What is said by a command that ends with code 1, without a traceback."""
    assert main(arguments) == 1
    said = capsys.readouterr()
    last = said.err.splitlines()[-1]  # after the lines of progress
    assert said.out == "" and last.startswith("tangolite: ") and "Traceback" not in said.err
    return last


@pytest.fixture
def refuse(monkeypatch):
    """From now on whatever would write a path that holds a word fails as the system would make it fail."""

    def begin(word: str, error: tuple[int, str]) -> None:
        def refusing(real, place: int = 0):
            def instead(*arguments, **kwargs):
                path = str(arguments[place])
                reads = len(arguments) > 1 and arguments[1] in ("r", "rb")
                if word in Path(path).as_posix() and not reads:
                    raise OSError(*error, path)
                return real(*arguments, **kwargs)

            return instead

        monkeypatch.setattr("builtins.open", refusing(open))
        monkeypatch.setattr(Path, "write_text", refusing(Path.write_text))
        monkeypatch.setattr(os, "mkdir", refusing(os.mkdir))
        monkeypatch.setattr(os, "rename", refusing(os.rename, 1))
        monkeypatch.setattr(os, "replace", refusing(os.replace, 1))
        monkeypatch.setattr(checkpoints, "save_file", refusing(checkpoints.save_file, 1))

    return begin


PLACES = {  # where the disk refuses -> the checkpoint that is there then
    "run/.recipe.yaml": None,
    "timing.jsonl": None,
    "checkpoints": None,
    ".writing-000006": "update-000003",
    ".writing-000006/policy.safetensors": "update-000003",
    ".writing-000006/state.json": "update-000003",
    ".writing-000009/checksums.json": "update-000006",
    "checkpoints/update-000009": "update-000006",
    ".old-update-000003": "update-000009",
    "policies": "update-000012",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_disk_that_refuses_anything_leaves_the_last_good_state(
    place, refuse, command, whole, tmp_path, monkeypatch, capsys
) -> None:
    out, last = tmp_path / "run", PLACES[place]
    error = READ_ONLY if len(place) % 2 else FULL
    refuse(place, error)
    said = refused(command("covrl-tiny", out), capsys)
    assert "could not be written" in said and error[1] in said and "--resume" in said
    assert_whole_checkpoints(out)
    found = checkpoints.checkpoints(out)
    assert (found[-1].name if found else None) == last
    monkeypatch.undo()
    assert main(command("covrl-tiny", out, options=["--resume"])) == 0
    assert_same_run(out, whole["covrl-tiny"])


@pytest.mark.skipif(os.name != "posix", reason="this system has no limit on the size of files")
def test_a_file_that_the_system_cuts_in_its_middle_is_not_taken_for_a_checkpoint(
    command, whole, tmp_path
) -> None:
    """A real short write, by a limit between the sizes of the logs and those of the weights."""
    out, said = tmp_path / "run", tmp_path / "said.txt"
    assert attempt(command("covrl-tiny", out), said, ("limit", 12_000)) == 1
    assert "could not be written" in said.read_text() and "Traceback" not in said.read_text()
    assert checkpoints.checkpoints(out) == []
    assert main(command("covrl-tiny", out, options=["--resume"])) == 0
    assert_same_run(out, whole["covrl-tiny"])


@pytest.fixture
def cut(whole, tmp_path) -> Path:
    """A CoVRL run whose last checkpoint is after update 9, as an interruption would leave it."""
    out = shutil.copytree(whole["covrl-tiny"], tmp_path / "run")
    shutil.rmtree(out / "policies")
    shutil.rmtree(out / "checkpoints" / "update-000012")
    return out


def test_a_data_file_that_vanished_is_named_and_nothing_is_lost(command, tmp_path, capsys) -> None:
    out, file, away = tmp_path / "run", tmp_path / "mine.jsonl", tmp_path / "away.jsonl"
    file.write_text('{"question": "0+1", "answer": "1"}\n{"question": "1+1", "answer": "0"}\n')
    begin = command("covrl-tiny", out, f"task={{file: {file.as_posix()}}}", "updates=3")
    assert main(begin) == 0
    shutil.rmtree(out / "policies")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    file.rename(away)
    capsys.readouterr()
    said = refused(["train", "--out", str(out), "--resume"], capsys)
    assert str(file) in said and "No such file" in said
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    away.rename(file)
    assert main(["train", "--out", str(out), "--resume"]) == 0
    assert checkpoints.finished(out)


def test_a_data_file_that_vanishes_during_a_run_is_not_missed(command, tmp_path, monkeypatch) -> None:
    """It is read once: a run that has begun has its problems."""
    out, file = tmp_path / "run", tmp_path / "mine.jsonl"
    file.write_text('{"question": "0+1", "answer": "1"}\n')
    real = checkpoints.CoVRL.update
    monkeypatch.setattr(
        checkpoints.CoVRL, "update", lambda run, n: file.unlink(missing_ok=True) or real(run, n)
    )
    assert main(command("covrl-tiny", out, f"task={{file: {file.as_posix()}}}", "updates=3")) == 0
    assert checkpoints.finished(out) and not file.exists()


def damage_weights(kind: str, file: Path) -> None:
    data = file.read_bytes()
    if kind == "vanished":
        file.unlink()
    else:
        bad = {"empty": b"", "truncated": data[: len(data) // 2], "no safetensors": b"\x80\x04" + data[2:],
               "a header too long": b"\xff" * 8 + data[8:]}  # fmt: skip
        file.write_bytes(bad[kind])


WEIGHTS = ("vanished", "empty", "truncated", "no safetensors", "a header too long")


@pytest.mark.parametrize("kind", WEIGHTS)
def test_damaged_weights_to_start_from_are_named_and_leave_no_folder(
    kind, starts, command, tmp_path, capsys
) -> None:
    model = shutil.copytree(starts / "policy", tmp_path / "model")
    damage_weights(kind, model / "model.safetensors")
    said = refused(command("covrl-tiny", tmp_path / "run", f"policy={model.as_posix()}"), capsys)
    assert str(model.as_posix()) in said and not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", WEIGHTS)
def test_damaged_weights_of_a_checkpoint_are_refused_and_the_one_before_is_kept(
    kind, cut, whole, capsys
) -> None:
    shutil.copytree(cut / "checkpoints" / "update-000009", cut / "checkpoints" / "update-000008")
    folder = cut / "checkpoints" / "update-000009"
    damage_weights(kind, folder / "policy.safetensors")
    said = refused(["train", "--out", str(cut), "--resume"], capsys)
    assert str(folder) in said and "Delete this folder" in said and "from update-000008" in said
    shutil.rmtree(folder)
    assert main(["train", "--out", str(cut), "--resume"]) == 0
    ours, theirs = (f / "policies" / "policy" / "model.safetensors" for f in (cut, whole["covrl-tiny"]))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("text", ["", "{", "method: covrl\nlr: [", "\x00", "- 1\n"])
def test_a_damaged_recipe_of_a_run_is_named(text, cut, capsys) -> None:
    (cut / "recipe.yaml").write_text(text)
    before = (cut / "metrics.jsonl").read_bytes()
    assert "recipe.yaml" in refused(["train", "--out", str(cut), "--resume"], capsys)
    assert (cut / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("log", ["metrics.jsonl", "timing.jsonl"])
@pytest.mark.parametrize("damage", ["vanished", "torn", "garbage", "no UTF-8"])
def test_a_damaged_log_is_named_or_made_again_but_never_a_traceback(log, damage, cut, whole, capsys) -> None:
    file = cut / log
    lines = file.read_bytes().splitlines(keepends=True)
    if damage == "vanished":
        file.unlink()
    else:
        middle = {"torn": b"", "garbage": b"not json\n", "no UTF-8": b"\xff\xfe\n"}[damage]
        end = lines[10][:-9] if damage == "torn" else lines[10]
        file.write_bytes(b"".join([*lines[:4], *([middle] if middle else lines[4:5]), *lines[5:10], end]))
    code = main(["train", "--out", str(cut), "--resume"])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    if damage in ("vanished", "torn"):
        assert code == 0 and json.loads(file.read_text().splitlines()[-1])["update"] == 12
        if (log, damage) == ("metrics.jsonl", "torn"):
            assert (
                file.read_bytes() == (whole["covrl-tiny"] / log).read_bytes()
            )  # nothing lost, nothing twice
    else:
        assert code == 1 and f"{file} was damaged" in said and "move it away" in said
        file.rename(cut.parent / "away")
        assert main(["train", "--out", str(cut), "--resume"]) == 0 and checkpoints.finished(cut)


def test_the_policies_of_a_run_are_all_there_or_none(whole, tmp_path) -> None:
    for recipe in ("tango-tiny", "covrl-tiny"):
        for folder in (whole[recipe] / "policies").iterdir():
            assert load_policy(folder) and load_file(folder / "model.safetensors")
