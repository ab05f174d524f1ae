"""Recipes: what is read, what is refused, and in which words."""

from __future__ import annotations

import json
from dataclasses import asdict, fields

import pytest
import yaml

from tangolite.cli import main
from tangolite.covrl import CoVRLConfig
from tangolite.settings import RunError, config_of, load_recipe, plain, recipe_names, with_seed
from tangolite.sources import SOURCES
from tangolite.tango import TangoConfig
from tangolite.tasks import ChainArithmetic, Stories, task_of

METHODS = {"tango": TangoConfig, "covrl": CoVRLConfig}


def refused(*changes: str, recipe: str = "tango-tiny") -> str:
    with pytest.raises(RunError) as caught:
        load_recipe(recipe, changes)
    return str(caught.value)


# The shipped recipes


def test_the_shipped_recipes_are_found() -> None:
    assert recipe_names() == [
        *("covrl-0.5b", "covrl-135m", "covrl-7b", "covrl-tiny"),
        *("tango-0.5b", "tango-135m", "tango-7b", "tango-7b-lora", "tango-tiny"),
    ]


@pytest.mark.parametrize("name", recipe_names())
def test_a_shipped_recipe_loads_with_the_types_of_its_dataclass(name: str) -> None:
    config, default = load_recipe(name), METHODS[load_recipe(name).method]()
    assert config.name == name
    for f in fields(config):
        value = getattr(config, f.name)
        if getattr(default, f.name) is not None:
            assert type(value) is type(getattr(default, f.name)), f.name
    if "source" in config.task:
        assert config.task["source"] in SOURCES
    else:
        assert isinstance(task_of(config.task), ChainArithmetic | Stories)


@pytest.mark.parametrize("name", ["covrl-tiny", "tango-tiny"])
def test_a_shipped_recipe_trains_its_built_in_models(name: str, tmp_path) -> None:
    sets = ["updates=2", "eval_every=0"]
    assert main(["train", "--recipe", name, "--out", str(tmp_path / "run"), "--set", *sets]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [1, 2]
    assert all(row["truncated"] < 0.2 for row in rows if "truncated" in row)  # they write the format
    assert all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize("config", [TangoConfig(), CoVRLConfig(), *map(load_recipe, recipe_names())])
def test_a_recipe_with_every_field_given_round_trips_through_yaml(config, tmp_path) -> None:
    settings = plain(config)
    assert set(settings) == {f.name for f in fields(config)}
    (tmp_path / "all.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    assert load_recipe(tmp_path / "all.yaml") == config


def test_a_recipe_that_names_its_method_alone_has_the_defaults() -> None:
    for method, kind in METHODS.items():
        assert config_of({"method": method}, "test") == kind()


def test_a_seed_and_other_changes_make_the_arm_of_a_comparison() -> None:
    arm = with_seed(load_recipe("tango-tiny"), 3, step_source="none")
    assert (arm.seed, arm.step_source) == (3, "none")
    same = asdict(arm) | {"seed": 0, "step_source": "verifier"}
    assert same == asdict(load_recipe("tango-tiny"))


# Changes


def test_changes_reach_inside_and_take_yaml_values() -> None:
    config = load_recipe("tango-tiny", ["task.steps=[2, 3]", "mask_truncated=true", "name='12: x'"])
    assert config.task["steps"] == [2, 3] and config.task["modulus"] == 31
    assert config.mask_truncated is True and config.name == "12: x"
    assert load_recipe("tango-tiny").task["steps"] == 8  # the recipe itself is as before


@pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("3E-4", 3e-4), ("1", 1.0), ("'2'", 2.0)])
def test_numbers_are_numbers_in_every_spelling(text: str, value: float) -> None:
    lr = load_recipe("tango-tiny", [f"lr={text}"]).lr
    assert lr == value and type(lr) is float


def test_a_whole_number_stays_whole_and_large_seeds_keep_every_digit() -> None:
    config = load_recipe("tango-tiny", ["updates=8.0", f"seed={2**62 + 1}"])
    assert (config.updates, config.seed) == (8, 2**62 + 1) and type(config.updates) is int
    assert load_recipe("tango-tiny", ["seed=-1"]).seed == -1


@pytest.mark.parametrize(
    "change",
    [
        *("lr=fast", "lr=true", "lr=null", "lr=.nan", "lr=.inf", "lr=-1", "lr=[1]", "updates=2.5"),
        *("updates=0", "updates=.inf", "updates=yes", "checkpoint_every=0", "questions=0", "group=-3"),
        *("max_new_tokens=0", "micro_batch=0", "temperature=0", "mask_truncated=1", "mask_truncated=no way"),
        *("name=3", "task=chain", "task=null", "verifier_task=3", "verifier_task=[1]", "estimator=ppo"),
        *("kl_kind=k4", "aggregate=mean", "alpha_schedule=step", "class_weights=sqrt", "prompts=fancy"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_with_the_name_of_its_setting(change: str) -> None:
    said = refused(change)
    assert change.partition("=")[0] in said and "must" in said, said


@pytest.mark.parametrize("change", ["reward=logp", "aggregate=mean", "alpha=2", "lr_schedule=x", "traces=0"])
def test_a_wrong_value_of_covrl_is_refused_too(change: str) -> None:
    assert change.partition("=")[0] in refused(change, recipe="covrl-tiny")


def test_an_unknown_setting_names_the_close_ones() -> None:
    assert "'verifer_lr': did you mean verifier_lr" in refused("verifer_lr=1")
    assert "'traces'" in refused("traces=4")  # a setting of the other method
    assert "tsk" in refused("tsk.steps=4") and "did you mean task" in refused("tsk.steps=4")
    far = refused("zzz=1")
    assert all(f.name in far for f in fields(TangoConfig))  # nothing is close: all are listed
    both = refused("updtes=1", "gruop=2")
    assert "updates" in both and "group" in both


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("lr", "key=value"),
        ("task={kind: chain", "cannot be read"),
        ("lr.max=3", "'lr' holds no settings"),
        ("=3", "unknown setting ''"),
        ("method=ppo", "tango, covrl"),
    ],
)  # fmt: skip
def test_a_change_that_cannot_be_read_is_refused(change: str, said: str) -> None:
    assert said in refused(change)


# A task of one's own


def test_a_file_takes_the_place_of_a_built_in_task_for_both_players() -> None:
    config = load_recipe("tango-tiny", ["task.file=mine.jsonl"])
    assert config.task == {"file": "mine.jsonl"} and config.verifier_task is None
    assert load_recipe("covrl-tiny", ["task.file=mine.jsonl"]).task == {"file": "mine.jsonl"}


def test_the_fields_of_a_file_may_be_named_in_any_order() -> None:
    for changes in (["task.file=f", "task.question=q"], ["task.question=q", "task.file=f"]):
        assert load_recipe("tango-tiny", changes).task == {"file": "f", "question": "q"}


@pytest.mark.parametrize("first", [True, False])
def test_a_verifier_keeps_the_task_that_it_is_given_beside_a_file(first: bool) -> None:
    own = "verifier_task.file=easy.jsonl"
    changes = [own, "task.file=hard.jsonl"] if first else ["task.file=hard.jsonl", own]
    config = load_recipe("tango-tiny", changes)
    assert (config.task, config.verifier_task) == ({"file": "hard.jsonl"}, {"file": "easy.jsonl"})


def test_a_file_wins_over_a_kind(tmp_path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"question": "1+1", "answer": 2}\n')
    (problem,) = task_of({"kind": "chain", "file": str(tmp_path / "mine.jsonl")}).items
    assert (problem.question, problem.answer) == ("1+1", "2")


def test_an_unknown_setting_of_a_task_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"modulus, steps, .* not stpes"):
        task_of({"kind": "chain", "stpes": 3})
    with pytest.raises(ValueError, match="colour"):
        task_of({"file": "x.jsonl", "colour": "red"})


# Files


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    assert "covrl-tiny, tango-0.5b, tango-135m" in refused(recipe="tango-huge")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "mapping"),
        (b"- 1\n- 2\n", "mapping"),
        (b"just words", "mapping"),
        (b"method: [tango", "cannot be read as YAML"),
        (b"method: tango\n\tlr: 1", "cannot be read as YAML"),
        (b"\xff\xfe\x00", "cannot be read as YAML"),
        (b"name: x", "method must be one of tango, covrl"),
        (b"method: [tango]", "method must be one of tango, covrl"),
        (b"method: tango\n3: 4", "unknown setting 3"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_recipe_is_named_with_what_is_wrong(text: bytes, said: str, tmp_path) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(text)
    assert said in refused(recipe=str(path)) and "odd.yaml" in refused(recipe=str(path))


def test_a_missing_file_and_a_folder_are_no_recipes(tmp_path) -> None:
    assert "no recipe file" in refused(recipe=str(tmp_path / "none.yaml"))
    (tmp_path / "folder.yaml").mkdir()
    assert "folder.yaml" in refused(recipe=str(tmp_path / "folder.yaml"))
