"""A run that was stopped, anywhere, goes on to the same bits; what cannot go on is refused in words."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from conftest import assert_same_run
from safetensors.torch import load_file, save_file

from tangolite import checkpoints
from tangolite.cli import main

# A folder as a kill would leave it (kills themselves are in faults/test_kill.py)


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
