"""The evidence: arms that differ as they say, rows that become means, a README that shows them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tangolite.lab.claims import FAMILIES, GENERATOR, WARMUP, summarise, table
from tangolite.lab.readme import write_into
from tangolite.settings import load_recipe, with_seed

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "figures" / "claims"


def config_of(family: str, name: str):
    recipe, arms, _ = FAMILIES[family]
    return with_seed(load_recipe(recipe), 0, **next(arm.changes for arm in arms if arm.name == name))


@pytest.mark.parametrize("name", [arm.name for arm in FAMILIES["tango"][1]])
def test_every_arm_of_tango_has_the_same_number_of_generator_updates(name: str) -> None:
    config = config_of("tango", name)
    assert config.turns("generator", config.updates) == GENERATOR


def test_only_tango_goes_on_training_its_verifier_after_the_warm_up() -> None:
    turns = {arm.name: config_of("tango", arm.name) for arm in FAMILIES["tango"][1]}
    trained = {name: config.turns("verifier", config.updates) for name, config in turns.items()}
    assert trained == {
        "outcome only": 0,
        "outcome only, gated": 0,
        "frozen weak": 0,
        "frozen warmed": WARMUP,
        "tango": WARMUP + GENERATOR // 3,
        "gold steps": 0,
    }


def row(arm: str, seed: int, learned: int, update: int, **scores: float) -> dict:
    return {
        "family": "tango",
        "arm": arm,
        "seed": seed,
        "update": update,
        "learned": learned,
        "seconds": 1.0,
    } | {f"eval/{name}": value for name, value in scores.items()}


def test_a_summary_is_the_mean_over_seeds_of_the_last_row_at_each_count() -> None:
    rows = [
        row("a", 0, 0, 0, answer=0.1),
        row("a", 1, 0, 0, answer=0.3),
        row("a", 0, 20, 20, answer=0.5),
        row("a", 0, 20, 21, answer=0.6),
        row("a", 1, 20, 21, answer=0.8),
    ]
    start, end = summarise(rows)
    assert (start["learned"], start["trained"], start["scores"]["eval/answer"]["mean"]) == (0, False, 0.2)
    assert end["scores"]["eval/answer"]["seeds"] == [0.6, 0.8]
    assert end["scores"]["eval/answer"]["low"] <= 0.7 <= end["scores"]["eval/answer"]["high"]


def test_the_warmed_verifier_is_not_taken_for_the_start() -> None:
    cells = summarise([row("a", 0, 0, 0, answer=0.1), row("a", 0, 0, 40, answer=0.2)])
    assert [cell["trained"] for cell in cells] == [False, True]


def test_a_table_has_a_cell_for_every_column_and_a_blank_where_nothing_was_measured() -> None:
    lines = table(summarise([row("a", 0, 20, 20, answer=0.5)]), "tango").splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "0.500" in lines[2] and "|  |" in lines[2]


def test_a_file_without_a_place_for_the_tables_is_left_alone(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="no place for the table"):
        write_into(readme, RESULTS.parent)
    assert readme.read_text() == "no marks"


def test_the_readme_shows_the_committed_results(tmp_path: Path) -> None:
    copy = tmp_path / "README.md"
    copy.write_text((ROOT / "README.md").read_text("utf-8"), "utf-8")
    write_into(copy, RESULTS.parent)
    assert copy.read_text("utf-8") == (ROOT / "README.md").read_text("utf-8")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_committed_summary_is_that_of_the_committed_rows(family: str) -> None:
    with open(RESULTS / f"{family}.csv", newline="", encoding="utf-8") as file:
        rows = [_numbers(line) for line in csv.DictReader(file)]
    kept = json.loads((RESULTS / f"{family}.json").read_text("utf-8"))
    assert {r["seed"] for r in rows} >= {0, 1, 2}
    for made, committed in zip(summarise(rows), kept, strict=True):
        assert (made["arm"], made["learned"]) == (committed["arm"], committed["learned"])
        for name, score in committed["scores"].items():
            assert made["scores"][name]["mean"] == pytest.approx(score["mean"], abs=2e-4), name


def _numbers(line: dict) -> dict:
    words = {"family", "arm"}
    return {
        k: v if k in words else int(v) if k in ("seed", "update", "learned") else float(v)
        for k, v in line.items()
        if v != ""
    }
