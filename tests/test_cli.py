"""The command line: what it prints, where, and which words stand in the place of a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tangolite
from tangolite import cli, evaluate
from tangolite.cli import main

ROOT = Path(tangolite.__file__).parent.parent
COMMANDS = ("doctor", "train", "eval", "warmstart", "bench", "claims")


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)


def refused(arguments: list[str], capsys) -> str:
    assert main(arguments) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("tangolite: ") and "Traceback" not in said.err
    return said.err


# What is printed, and where


def test_train_prints_one_line_and_shows_progress_on_the_other_stream(command, whole, tmp_path) -> None:
    """A real process, with the options spread over two --set."""
    out = tmp_path / "run"
    arguments = command("tango-tiny", out, "updates=8")
    done = python("-m", "tangolite", *arguments, "--set", "checkpoint_every=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"done: 8 updates; metrics, checkpoints and policies are in {out}\n"
    assert re.fullmatch(r"update 8/8, [\d.]+ s each, 0 s left, reward [\d.]+.*\n", done.stderr), done.stderr
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == list(range(1, 9))
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["update-000006", "update-000008"]
    first = (whole["tango-tiny"] / "metrics.jsonl").read_text().splitlines()[0]
    assert rows[0] == json.loads(first)  # no alpha in a verifier's update: the length of the run is not in it


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and f"python -m tangolite {command}" in said


def test_help_lists_the_commands(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and all(re.search(rf"^ +{name}\s+\w", said, re.M) for name in COMMANDS)


@pytest.mark.parametrize(
    "wrong",
    [
        *([], ["dance"], ["train"], ["train", "--out"], ["train", "--out", "x", "--threads", "0"]),
        *(["eval", "--count", "0"], ["eval", "--count", "many"], ["bench"], ["claims", "tango"]),
    ],
)  # fmt: skip
def test_wrong_usage_has_an_exit_code_of_its_own(wrong: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as end:
        main(wrong)
    assert end.value.code == 2 and "usage" in capsys.readouterr().err


def test_eval_prints_every_metric_of_a_run_with_its_sentence(whole, capsys) -> None:
    assert main(["eval", "--run", str(whole["tango-tiny"]), "--count", "24"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "after update 12, 24 held-out problems:"
    shown = {line.split()[0]: line for line in lines[1:]}
    assert {"eval/answer", "eval/step_balanced", "eval/pool_first_error_f1"} <= set(shown)
    for name, line in shown.items():
        assert re.fullmatch(rf"{name} +([\d.]+|nan)  {re.escape(evaluate.METRICS[name])}", line)


def test_eval_of_a_recipe_is_eval_of_its_start(changes, starts, capsys) -> None:
    arguments = ["eval", "--recipe", "covrl-tiny", "--count", "16", "--set", *changes["covrl-tiny"]]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert first.startswith("after update 0, 16 held-out") and "eval/step_truth_posterior" in first
    assert main(arguments) == 0
    assert capsys.readouterr().out == first  # the same problems again


def test_every_evaluation_has_a_sentence_and_every_sentence_an_evaluation(whole) -> None:
    from tangolite.checkpoints import checkpoints, load_checkpoint
    from tangolite.settings import recipe_of_run
    from tangolite.training import start

    names = set()
    for folder in whole.values():
        run = start(recipe_of_run(folder))
        load_checkpoint(checkpoints(folder)[-1], run)
        names |= set(evaluate.evaluate(run, 64))
    assert names == set(evaluate.METRICS)


def test_eval_wants_a_run_or_a_recipe_and_the_run_a_checkpoint(tmp_path, whole, capsys) -> None:
    assert "either --run" in refused(["eval"], capsys)
    assert "either --run" in refused(["eval", "--run", "x", "--recipe", "tango-tiny"], capsys)
    assert "holds no run" in refused(["eval", "--run", str(tmp_path)], capsys)
    assert "--set" in refused(["eval", "--run", str(whole["covrl-tiny"]), "--set", "seed=1"], capsys)
    (tmp_path / "recipe.yaml").write_bytes((whole["covrl-tiny"] / "recipe.yaml").read_bytes())
    assert "no checkpoint yet" in refused(["eval", "--run", str(tmp_path)], capsys)


# Words in the place of a traceback


def train(out: Path, *sets: str, recipe: str = "tango-tiny") -> list[str]:
    return ["train", "--recipe", recipe, "--out", str(out), *(["--set", *sets] if sets else [])]


def test_train_wants_a_recipe(tmp_path, capsys) -> None:
    assert "--recipe NAME" in refused(["train", "--out", str(tmp_path / "run")], capsys)


def test_an_unknown_recipe_lists_the_known_ones(tmp_path, capsys) -> None:
    assert "covrl-tiny, tango-0.5b, tango-135m" in refused(
        train(tmp_path / "run", recipe="tango-large"), capsys
    )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("updtes=3", "did you mean updates"),
        ("lr=fast", "lr must be a number, got 'fast'"),
        ("updates=1.5", "updates must be a whole number"),
        ("task.kind=sudoku", "task.kind must be one of chain, letters"),
        ("task.stpes=3", "stpes"),
        ("task.modulus=1000", "modulus must lie in 2..100"),
        ("task.steps=many", "steps"),
        ("estimator=ppo", "estimator must be one of grpo, rloo, reinforce++"),
        ("group", "key=value"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named(change: str, said: str, tmp_path, capsys) -> None:
    assert said in refused(train(tmp_path / "run", change), capsys)
    assert not (tmp_path / "run").exists()  # so that the next try may use the folder


@pytest.mark.parametrize("name", ["tiny-generatr", "runs/none/policies/generator", "", "./none", "a b"])
def test_an_unknown_model_is_named_with_the_built_in_ones_at_once(name: str, tmp_path, capsys) -> None:
    said = refused(train(tmp_path / "run", f"generator={name!r}"), capsys)
    assert repr(name) in said and "Built in are" in said and "config.json" in said and said.count("\n") == 1


def test_the_built_in_names_are_the_shipped_folders() -> None:
    from tangolite.models import built_in

    assert built_in() == ["tiny-base", "tiny-covrl", "tiny-generator", "tiny-verifier"]


BROKEN = {
    "nothing in it": {},
    "no weights": {"config.json": '{"model_type": "qwen2"}'},
    "config that is no JSON": {"config.json": "{"},
    "unknown kind of model": {"config.json": '{"model_type": "abacus"}'},
    "weights that are none": {"config.json": '{"model_type": "qwen2"}', "model.safetensors": "weights"},
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_folder_without_a_model_is_named(kind: str, tmp_path, capsys) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name, text in BROKEN[kind].items():
        (folder / name).write_text(text)
    said = refused(train(tmp_path / "run", f"generator={folder}"), capsys)
    assert str(folder) in said and "Built in are" in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_missing_data_file_is_named(command, tmp_path, capsys) -> None:
    said = refused(command("tango-tiny", tmp_path / "run", "task={file: none.jsonl}"), capsys)
    assert said == "tangolite: none.jsonl: No such file or directory\n"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": "0+1", "answer": ', "line 2: not valid JSON"),
        ('{"question": "0+1"}', "line 2: field 'answer' is missing"),
        ('{"question": ["0+1"], "answer": 1}', "line 2: field 'question' must be text"),
        ('["0+1", 1]', "line 2: expected a JSON object"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("recipe", ["tango-tiny", "covrl-tiny"])
def test_a_broken_line_of_a_data_file_is_named(recipe, line, said, changes, tmp_path, capsys) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"question": "0+1", "answer": 1}\n' + line + "\n")
    built_in = [change for change in changes[recipe] if not change.startswith("task=")]
    heard = refused(train(tmp_path / "run", *built_in, f"task.file={file}", recipe=recipe), capsys)
    assert str(file) in heard and said in heard


def test_a_data_file_of_ones_own_trains_both_players(changes, tmp_path) -> None:
    file, rest = tmp_path / "mine.jsonl", [c for c in changes["tango-tiny"] if "task=" not in c]
    file.write_text('{"q": "0+1", "a": 1}\n{"q": "1+1", "a": 0}\n')
    sets = [*rest, f"task.file={file}", "task.question=q", "task.answer=a", "updates=4"]
    assert main(train(tmp_path / "run", *sets)) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {row["turn"] for row in rows} == {"generator", "verifier"}
    assert not any("step_truth" in row for row in rows)  # nobody knows the truth of these steps


def test_a_loss_that_is_not_finite_ends_with_code_1_and_its_batch(command, tmp_path, capsys) -> None:
    said = refused(command("covrl-tiny", tmp_path / "run", "lr=1e30", "lr_warmup=0"), capsys)
    (batch,) = (tmp_path / "run").glob("nonfinite-update-*.safetensors")
    assert str(batch) in said and "lower learning rate" in said and "weights were not changed" in said


def test_a_full_disk_ends_with_code_1_in_words(command, tmp_path, monkeypatch, capsys) -> None:
    from tangolite import checkpoints

    def full(tensors, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full)
    said = refused(command("covrl-tiny", tmp_path / "run"), capsys)
    assert "No space left on device" in said and "make room" in said


def test_an_interrupt_ends_with_the_code_of_interrupts(command, tmp_path, monkeypatch, capsys) -> None:
    from tangolite.covrl import CoVRL

    def stop(run, number):
        raise KeyboardInterrupt

    monkeypatch.setattr(CoVRL, "update", stop)
    assert main(command("covrl-tiny", tmp_path / "run")) == 130
    assert "--resume" in capsys.readouterr().err
    monkeypatch.setattr(cli, "run_doctor", stop)
    monkeypatch.setattr(cli, "_run", lambda arguments: stop(None, 0))
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "tangolite: stopped\n"


def test_doctor_runs_where_torch_is_missing(tmp_path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    done = python("-m", "tangolite", "doctor", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "torch cannot be imported" in done.stdout
