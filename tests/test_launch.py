"""The files for `accelerate launch`: what it reads from them is what they are named for."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig

from tangolite.settings import RECIPES, load_recipe

FILES = sorted((RECIPES / "launch").glob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "machines", "processes"), [("1-gpu", 1, 1), ("8-gpus", 1, 8), ("4-nodes", 4, 32)]
)
def test_accelerate_reads_who_takes_part(name: str, machines: int, processes: int) -> None:
    read = ClusterConfig.from_yaml_file(str(RECIPES / "launch" / f"{name}.yaml"))
    assert (read.num_machines, read.num_processes) == (machines, processes)
    assert not read.use_cpu and str(read.mixed_precision) == "no"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_command_in_its_first_line_names_this_file_and_a_recipe(file: Path) -> None:
    first = file.read_text("utf-8").splitlines()[0]
    assert f"recipes/launch/{file.name}" in first
    recipe = load_recipe(first.split("--recipe ")[1].split()[0])
    alone = yaml.safe_load(file.read_text("utf-8"))["num_processes"] == 1
    assert recipe.spread is not alone
