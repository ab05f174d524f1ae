"""The shipped weights are what `python -m tangolite warmstart` makes.

Making all of them takes about ten minutes, so three things stand for the whole: each file has the
checksum that the command wrote down, each lesson begins with the losses that it wrote down (a change of
task, text, model or schedule changes these), and the shortest lesson is taught again in full.
"""

from __future__ import annotations

import json

import pytest
import torch

from tangolite.checkpoints import checksum
from tangolite.evaluate import evaluate
from tangolite.lab.weights import FIRST, covrl_start, tango_start
from tangolite.models import WEIGHTS, load_policy, tiny_policy, trainable_copy
from tangolite.settings import load_recipe
from tangolite.warmstart import covrl_lesson, tango_lessons, teach

NAMES = ("tiny-base", "tiny-generator", "tiny-verifier", "tiny-covrl")
LESSONS = {
    **{f"tiny-{name}": course for name, course in tango_lessons(0).items()},
    "tiny-covrl": [covrl_lesson(0)],
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def manifest(name: str) -> dict:
    return json.loads((WEIGHTS / name / "manifest.json").read_text())


def quiet(line: str) -> None:
    pass


def flat(policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


def test_every_model_of_the_recipes_is_shipped_and_no_other() -> None:
    assert sorted(path.name for path in WEIGHTS.iterdir() if path.is_dir()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_the_one_that_the_command_wrote(name: str) -> None:
    assert checksum(load_policy(name)) == manifest(name)["sha256"]
    assert sorted(path.suffix for path in (WEIGHTS / name).iterdir() if path.suffix != ".json") == [
        ".safetensors"
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_manifest_tells_the_lessons_that_the_code_teaches(name: str) -> None:
    told = [(lesson["what"], lesson["updates"], lesson["lr"]) for lesson in manifest(name)["lessons"]]
    assert told == [(lesson.what, lesson.updates, lesson.lr) for lesson in LESSONS[name]]


@pytest.mark.parametrize("name", NAMES)
def test_the_first_lesson_begins_as_it_did(name: str) -> None:
    start = (
        tiny_policy(0) if name in ("tiny-base", "tiny-covrl") else trainable_copy(load_policy("tiny-base"))
    )
    losses = teach(start, LESSONS[name][0], 0, quiet, first=FIRST)
    assert losses == pytest.approx(manifest(name)["lessons"][0]["first_losses"], abs=2e-3)


def test_the_generator_taught_again_is_the_generator_shipped() -> None:
    base, shipped = load_policy("tiny-base"), load_policy("tiny-generator")
    again = trainable_copy(base)
    teach(again, LESSONS["tiny-generator"][0], 0, quiet)
    # 0 on the processor that made it; elsewhere rounding drifts, but another lesson would end about as far
    # away as the base is.
    distance = (flat(again) - flat(shipped)).norm() / (flat(shipped) - flat(base)).norm()
    assert distance < 0.2


def test_the_tango_players_have_the_skill_that_was_written_down() -> None:
    found = evaluate(tango_start(WEIGHTS, load_recipe("tango-tiny")))
    for name, value in manifest("tiny-verifier")["skill"].items():
        assert found[name] == pytest.approx(value, abs=0.08 if "f1" in name else 0.04), name


def test_the_covrl_policy_has_the_skill_that_was_written_down() -> None:
    found = evaluate(covrl_start(WEIGHTS, load_recipe("covrl-tiny")))
    for name, value in manifest("tiny-covrl")["skill"].items():
        assert found[name] == pytest.approx(value, abs=0.04), name


def test_there_is_room_to_learn() -> None:
    """A third of the chains at most, and a verifier whose final judgement is no better than chance."""
    skill = manifest("tiny-verifier")["skill"]
    assert 0.05 < skill["eval/answer_sampled"] < 0.3
    assert 0.4 < skill["eval/final_balanced"] < 0.6
    assert manifest("tiny-covrl")["skill"]["eval/answer"] < 0.5
