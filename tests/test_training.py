"""The loop: what a run writes, how it stops, and what it says when something is in the way."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import sys
import threading

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from tangolite import checkpoints, covrl, evaluate, tango, training
from tangolite.checkpoints import append, checksum, load_checkpoint, read_metrics
from tangolite.cli import main
from tangolite.models import load_policy
from tangolite.settings import RunError, load_recipe, recipe_of_run, with_seed
from tangolite.training import Interrupted, Progress, start, train
from tangolite.updates import NonFiniteError, adamw, optimise, seeded, set_lr

UPDATES = 12  # of the runs in conftest.py
RECIPES = ("tango-tiny", "covrl-tiny")
SENTENCES = {
    "tango-tiny": tango.METRICS | evaluate.METRICS,
    "covrl-tiny": covrl.METRICS | evaluate.METRICS,
}


@pytest.fixture
def config(changes):
    """Recipe -> its settings for a short run."""
    return lambda recipe, *more: load_recipe(recipe, [*changes[recipe], *more])


def files_of(folder) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def stopper(at: int, how):
    """A callback that does something after update ``at``."""

    def callback(run, done, metrics):
        return how() if done == at else None

    return callback


# What a run writes


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_leaves_its_recipe_its_metrics_its_last_checkpoints_and_its_policies(recipe, whole) -> None:
    out = whole[recipe]
    assert [row["update"] for row in read_metrics(out)] == list(range(1, UPDATES + 1))
    assert sorted(p.name for p in out.iterdir()) == [
        *("checkpoints", "metrics.jsonl", "policies", "recipe.yaml", "timing.jsonl")
    ]
    assert [p.name for p in sorted((out / "checkpoints").iterdir())] == ["update-000009", "update-000012"]
    assert recipe_of_run(out).updates == UPDATES


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_policies_of_a_run_open_as_they_stood_in_its_last_checkpoint(recipe, whole) -> None:
    run = start(recipe_of_run(whole[recipe]))
    began = {name: checksum(policy) for name, (policy, _) in checkpoints.learners(run).items()}
    assert load_checkpoint(checkpoints.checkpoints(whole[recipe])[-1], run) == UPDATES
    for name, (policy, _) in checkpoints.learners(run).items():
        trained = load_policy(whole[recipe] / "policies" / name)
        assert checksum(trained) == checksum(policy) != began[name]
        assert trained.decode(trained.encode("<think>1+1=0")) == "<think>1+1=0"
        assert trained.eos_ids == policy.eos_ids


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_metric_has_a_sentence_and_none_comes_from_the_clock(recipe, config, tmp_path) -> None:
    settings = config(recipe, "updates=4", "checkpoint_every=4", "eval_every=4", "questions=6")
    train(settings, tmp_path / "run", callbacks=[evaluate.held_out(4, count=16)])
    rows = read_metrics(tmp_path / "run")
    names = {name for row in rows for name in row} - {"update"}
    assert names <= set(SENTENCES[recipe]), names - set(SENTENCES[recipe])
    assert all(re.match(r"[A-Z`-].{10,}\.$", SENTENCES[recipe][name]) for name in names)
    assert any(name.startswith("eval/") for name in rows[-1]) and "eval/answer" not in rows[0]
    assert not any(re.search("time|second|clock|date", name) for name in names)


def test_every_sentence_belongs_to_a_metric(whole, config, tmp_path) -> None:
    """Together with the test above: METRICS and what is emitted are the same names."""
    for recipe, method in (("tango-tiny", tango), ("covrl-tiny", covrl)):
        names = {name for row in read_metrics(whole[recipe]) for name in row}
        assert set(method.METRICS) - {"server_gap"} <= names, set(method.METRICS) - names


def test_a_recipe_gives_the_same_metrics_again_and_another_seed_others(whole, config, tmp_path) -> None:
    for seed in (4, 1):
        settings = with_seed(config("covrl-tiny"), seed)
        train(settings, tmp_path / str(seed))
    again, other = (read_metrics(tmp_path / seed) for seed in "41")
    assert again == read_metrics(whole["covrl-tiny"]) != other


def test_what_the_clock_said_stands_in_a_file_of_its_own(whole) -> None:
    rows = [json.loads(line) for line in (whole["tango-tiny"] / "timing.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == list(range(1, UPDATES + 1))
    assert all(set(row) == {"update", "seconds"} and row["seconds"] >= 0 for row in rows)


def test_a_metric_without_a_value_is_left_out_since_json_has_no_nan(tmp_path) -> None:
    append(tmp_path / "metrics.jsonl", {"update": 1, "a": math.nan, "b": 2.0, "c": -math.inf, "turn": "x"})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"update": 1, "b": 2.0, "turn": "x"}\n'


def test_a_line_that_is_still_being_written_is_not_read(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"update": 1}\n{"update": 2, "los')
    assert read_metrics(tmp_path) == [{"update": 1}]


def test_a_callback_sees_every_update_and_adds_to_the_metrics(config, tmp_path) -> None:
    seen = []

    def callback(run, done, metrics):
        seen.append((done, type(run).__name__, "loss" in metrics))
        return {"doubled": 2 * done} if done == 2 else None

    run = train(config("covrl-tiny", "updates=3"), tmp_path / "run", callbacks=iter([callback]))
    assert seen == [(done, "CoVRL", True) for done in (1, 2, 3)]
    assert [row.get("doubled") for row in read_metrics(tmp_path / "run")] == [None, 4, None]
    assert run.config.updates == 3


# Folders


def test_a_folder_with_a_run_is_refused_without_resume(whole, config) -> None:
    before = files_of(whole["covrl-tiny"])
    with pytest.raises(RunError, match="a finished run; add --resume"):
        train(config("covrl-tiny"), whole["covrl-tiny"])
    assert files_of(whole["covrl-tiny"]) == before


def test_an_unfinished_run_is_refused_without_resume_too(config, tmp_path) -> None:
    with pytest.raises(ZeroDivisionError):
        train(config("covrl-tiny"), tmp_path / "run", callbacks=[stopper(1, lambda: 1 / 0)])
    with pytest.raises(RunError, match="an unfinished run; add --resume"):
        train(config("covrl-tiny"), tmp_path / "run")


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_with_something_else_is_refused_and_left_alone(config, tmp_path, resume: bool) -> None:
    (tmp_path / "thesis.tex").write_text("all my work")
    with pytest.raises(RunError, match="choose another --out"):
        train(config("covrl-tiny"), tmp_path, resume=resume)
    with pytest.raises(RunError, match="choose another --out"):
        train(config("covrl-tiny"), tmp_path / "thesis.tex", resume=resume)
    assert files_of(tmp_path) == {"thesis.tex": b"all my work"}


def test_a_run_that_cannot_start_leaves_no_folder(config, tmp_path) -> None:
    for change in (f"policy={tmp_path / 'none'}", "task.file=none.jsonl", "task.kind=sudoku"):
        with pytest.raises((OSError, ValueError)):
            train(config("covrl-tiny", change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_of_another_recipe_is_not_trained_under_this_one(config, tmp_path) -> None:
    run = start(config("covrl-tiny"))
    with pytest.raises(RunError, match="another recipe"):
        train(config("covrl-tiny", "updates=2"), tmp_path / "run", run=run)


# A loss that is not finite


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_loss_that_is_not_finite_stops_the_run(recipe, config, tmp_path, monkeypatch) -> None:
    method = {"tango-tiny": tango, "covrl-tiny": covrl}[recipe]
    loss = {"tango-tiny": "tango_loss", "covrl-tiny": "covrl_loss"}[recipe]
    real, calls, kept = getattr(method, loss), [], {}

    def poisoned(*args, **kwargs):
        calls.append(1)
        found = real(*args, **kwargs)
        return found._replace(loss=found.loss * math.nan) if len(calls) == 5 else found

    def remember(run, done, metrics):
        kept.update({name: checksum(policy) for name, (policy, _) in checkpoints.learners(run).items()})

    monkeypatch.setattr(method, loss, poisoned)
    run, out = start(config(recipe)), tmp_path / "run"
    with pytest.raises(RunError, match=r"update 5: the loss is nan.*weights were not changed.*lr=") as caught:
        train(config(recipe), out, run=run, callbacks=[remember])
    assert {name: checksum(p) for name, (p, _) in checkpoints.learners(run).items()} == kept
    assert [row["update"] for row in read_metrics(out)] == [1, 2, 3, 4]
    assert [p.name for p in checkpoints.checkpoints(out)] == ["update-000003"]
    batch = load_file(out / "nonfinite-update-000005.safetensors")
    assert str(out / "nonfinite-update-000005.safetensors") in str(caught.value)
    name = {"tango-tiny": "generator", "covrl-tiny": "prior"}[recipe]
    assert batch[f"{name}.completion_ids"].shape[0] == batch[f"{name}.advantage"].shape[0] == 8
    monkeypatch.setattr(method, loss, real)  # the cause is gone: the run goes on from its checkpoint
    train(config(recipe), out, resume=True)
    assert [row["update"] for row in read_metrics(out)] == list(range(1, UPDATES + 1))


class Loss(tuple):
    """The least that `optimise` asks of a loss."""

    loss = property(lambda self: self[0])

    def _asdict(self) -> dict:
        return {"loss": self[0]}


def weighted(policy, factor):
    """A loss whose gradient is ``factor`` for every weight."""
    return lambda part: Loss([sum(p.sum() for p in policy.parameters()) * factor * part])


@pytest.mark.parametrize("factor", [math.nan, math.inf, -math.inf])
def test_weights_stay_as_they_are_when_a_loss_is_not_finite(starts, factor: float) -> None:
    policy = load_policy(starts / "policy")
    optimizer, before = adamw(policy, 0.1), checksum(policy)
    with pytest.raises(NonFiniteError, match="the loss is") as caught:
        loss = weighted(policy, factor)
        optimise(policy, optimizer, [1.0, 1.0], [0.5, 0.5], loss, max_grad_norm=1.0, batch={})
    assert checksum(policy) == before and not optimizer.state and caught.value.batch == {}


def test_weights_stay_as_they_are_when_the_gradient_alone_is_not_finite(starts) -> None:
    policy = load_policy(starts / "policy")
    optimizer, before = adamw(policy, 0.1), checksum(policy)
    root = lambda part: Loss([sum((p * 0).sum() for p in policy.parameters()).sqrt()])  # noqa: E731
    with pytest.raises(NonFiniteError, match=r"the gradient of .* is not finite"):
        optimise(policy, optimizer, [1.0], [1.0], root, max_grad_norm=1.0, batch={})
    assert checksum(policy) == before


def test_micro_batches_add_up_to_the_gradient_of_the_whole(starts) -> None:
    trained = []
    for parts, shares in (([4.0], [1.0]), ([2.0, 5.0], [1 / 3, 2 / 3])):  # 4 = 2/3 + 10/3
        policy = load_policy(starts / "policy")
        found = optimise(policy, torch.optim.SGD(policy.parameters(), 0.1), parts, shares,
                         weighted(policy, 1e-3), max_grad_norm=1e9, batch={})  # fmt: skip
        assert found["grad_norm"] == pytest.approx(4e-3 * sum(p.numel() for p in policy.parameters()) ** 0.5)
        trained.append(torch.cat([p.detach().flatten() for p in policy.parameters()]))
    torch.testing.assert_close(*trained)


def test_the_gradient_is_clipped_to_its_norm(starts) -> None:
    policy = load_policy(starts / "policy")
    before = torch.cat([p.detach().flatten().clone() for p in policy.parameters()])
    found = optimise(policy, torch.optim.SGD(policy.parameters(), 1.0), [1.0], [1.0], weighted(policy, 10.0),
                     max_grad_norm=0.5, batch={})  # fmt: skip
    after = torch.cat([p.detach().flatten() for p in policy.parameters()])
    assert found["grad_norm"] > 0.5  # as it was before clipping
    assert (after - before).norm() == pytest.approx(0.5, rel=1e-3)


def test_the_learning_rate_rises_stays_and_may_fall_along_a_cosine(starts) -> None:
    optimizer = adamw(load_policy(starts / "policy"), 1.0)

    def lr(done: int, **kwargs) -> float:
        set_lr(optimizer, 2.0, done, **kwargs)
        return optimizer.param_groups[0]["lr"]

    assert [lr(done, warmup=4) for done in range(6)] == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    assert [lr(done, warmup=0) for done in range(2)] == [2.0, 2.0]
    cosine = [lr(done, warmup=2, total=10) for done in range(11)]
    expected = [2 * (0.5 + 0.5 * math.cos(math.pi * k / 8)) for k in range(9)]
    assert cosine == pytest.approx([1.0, 2.0, *expected])
    assert lr(3, warmup=5, total=5) == pytest.approx(1.6)  # all warm-up: no division by zero


def test_a_seed_depends_on_all_its_parts() -> None:
    def draw(*parts):
        return torch.rand(3, generator=seeded(*parts)).tolist()

    assert draw(0, "traces", 1) == draw(0, "traces", 1)
    different = [(0, "a", 1), (0, "a", 2), (0, "b", 1), (1, "a", 1), (0, 1)]
    assert len({tuple(draw(*parts)) for parts in different}) == 5


# Disks


class Refusing:
    """`open` for a folder that takes no more, or is read-only."""

    def __init__(self, error: Exception, word: str) -> None:
        self.error, self.word, self.real = error, word, open

    def __call__(self, path, mode="r", *args, **kwargs):
        if self.word in str(path) and mode != "rb" and mode != "r":
            raise self.error
        return self.real(path, mode, *args, **kwargs)


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("error", [FULL, PermissionError(13, "Permission denied")])
def test_a_log_that_cannot_be_written_is_said_in_words(config, tmp_path, monkeypatch, error) -> None:
    monkeypatch.setattr("builtins.open", Refusing(error, "metrics.jsonl"))
    with pytest.raises(RunError, match=rf"metrics\.jsonl could not be written .*{error.strerror}.*make room"):
        train(config("covrl-tiny"), tmp_path / "run")


@pytest.mark.parametrize("error", [FULL, SafetensorError("I/O error: disk full")])
def test_a_checkpoint_that_finds_no_room_leaves_the_one_before_and_no_rubbish(
    config, whole, tmp_path, monkeypatch, error
) -> None:
    real, out = checkpoints.save_file, tmp_path / "run"

    def save_file(tensors, path):
        if "000006" in str(path) and "optimizer" in str(path):
            raise error
        real(tensors, path)

    monkeypatch.setattr(checkpoints, "save_file", save_file)
    with pytest.raises(RunError, match=r"update-000006 could not be written .*(No space|full).*--resume"):
        train(config("covrl-tiny"), out)
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["update-000003"]
    monkeypatch.setattr(checkpoints, "save_file", real)
    train(config("covrl-tiny"), out, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == (whole["covrl-tiny"] / "metrics.jsonl").read_bytes()


def test_a_folder_that_cannot_be_made_is_said_in_words(config, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="could not be written"):
        train(config("covrl-tiny"), tmp_path / "file" / "run")


# Interrupts


def test_an_interrupt_lets_the_update_end_saves_and_says_how_to_go_on(
    config, whole, tmp_path, capsys
) -> None:
    out, before = tmp_path / "run", signal.getsignal(signal.SIGINT)
    press = stopper(4, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted, match=r"after update 4; go on from update-000004 with: .*--resume"):
        train(config("tango-tiny"), out, callbacks=[press])
    assert signal.getsignal(signal.SIGINT) is before
    assert "interrupt again to stop at once" in capsys.readouterr().err
    assert [row["update"] for row in read_metrics(out)] == [1, 2, 3, 4]
    train(config("tango-tiny"), out, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == (whole["tango-tiny"] / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("how", ["twice", "raised"])
def test_a_second_interrupt_stops_at_once_and_the_run_goes_on_from_its_last_checkpoint(
    how, config, whole, tmp_path
) -> None:
    def press():
        if how == "raised":
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    out = tmp_path / "run"
    with pytest.raises(Interrupted, match=r"go on from update-000003 with: .*--resume"):
        train(config("covrl-tiny"), out, callbacks=[stopper(5, press)])
    train(config("covrl-tiny"), out, resume=True)
    assert (out / "metrics.jsonl").read_bytes() == (whole["covrl-tiny"] / "metrics.jsonl").read_bytes()


def test_an_interrupt_before_any_checkpoint_says_so(config, tmp_path) -> None:
    def press():
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="from the start"):
        train(config("covrl-tiny"), tmp_path / "run", callbacks=[stopper(1, press)])


def test_an_interrupt_in_the_last_update_finishes_the_run(config, tmp_path) -> None:
    press = stopper(2, lambda: signal.raise_signal(signal.SIGINT))
    train(config("covrl-tiny", "updates=2"), tmp_path / "run", callbacks=[press])
    assert checkpoints.finished(tmp_path / "run")


def test_a_run_trains_in_any_thread(config, whole, tmp_path) -> None:
    thread = threading.Thread(target=train, args=(config("covrl-tiny"), tmp_path / "run"))
    thread.start()
    thread.join()
    assert read_metrics(tmp_path / "run") == read_metrics(whole["covrl-tiny"])


# Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_with_rate_and_time_left(monkeypatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with Progress(4, 1) as progress:
        for done in (2, 3):
            progress.bar.last_print_t -= 1  # as if a second had passed: the bar is drawn again
            progress.tick(done, {"reward": 0.25, "loss": 1.0})
    last = screen.getvalue().split("\r")[-1] or screen.getvalue().split("\r")[-2]
    assert "3/4" in last and "reward 0.250" in last and "loss" not in last
    assert re.search(r"\[\d\d:\d\d<\d\d:\d\d, +[\d.]+(update/s|s/update)", last), last


def test_elsewhere_a_line_now_and_then_says_rate_and_time_left(monkeypatch, capsys) -> None:
    seconds = iter([0.0, 4.0, 8.0, 12.0, 16.0, 20.0])
    monkeypatch.setattr(training.time, "monotonic", lambda: next(seconds))
    with Progress(7, 2) as progress:
        took = [progress.tick(done, {"reward": 0.5}) for done in (3, 4, 5, 6, 7)]
    assert took == [4.0] * 5
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [
        "update 5/7, 4.00 s each, 8 s left, reward 0.500",
        "update 7/7, 4.00 s each, 0 s left, reward 0.500",
    ]


def test_a_temporary_name_is_never_taken_for_a_checkpoint(tmp_path) -> None:
    for name in (".writing-000003", ".old-update-000001", "update-000002", "update-000010"):
        os.makedirs(tmp_path / "checkpoints" / name)
    assert [p.name for p in checkpoints.checkpoints(tmp_path)] == ["update-000002", "update-000010"]


def test_out_of_memory_says_what_to_make_smaller_and_the_run_goes_on(tmp_path, monkeypatch, command, capsys):
    def full(run, number):
        raise torch.OutOfMemoryError("tried to allocate 3 GiB\nand so on")

    monkeypatch.setattr("tangolite.tango.Tango.update", full)
    assert main(command("tango-tiny", tmp_path / "run", "updates=2")) == 1
    said = capsys.readouterr().err
    assert "out of memory (tried to allocate 3 GiB)" in said and "micro_batch=1" in said
    monkeypatch.undo()
    assert main(["train", "--out", str(tmp_path / "run"), "--resume"]) == 0
