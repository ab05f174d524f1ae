"""What several test files need: tiny policies that write the right format, and whole runs from them."""

from __future__ import annotations

import json
import os
from functools import cache, partial
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # before the kernels are imported: they then run, slowly, on the CPU
    os.environ["TRITON_INTERPRET"] = "1"

from tangolite.checkpoints import save_policy
from tangolite.cli import main
from tangolite.models import tiny_policy
from tangolite.tasks import ChainArithmetic
from tangolite.warmstart import fit, solution_example, trace_example, verification_example

UPDATES, EVERY = 12, 3
SEED = 4  # so that the last verifier update, the tenth, has right and wrong solutions to weigh
COMMON = [
    "task={kind: chain, modulus: 2, steps: 1, operands: [0, 1]}",  # answers are 0 or 1: chance is one in two
    *("questions=4", "max_new_tokens=20", "eval_every=0", f"seed={SEED}"),
    *(f"updates={UPDATES}", f"checkpoint_every={EVERY}"),
]


@pytest.fixture(scope="session")
def starts(tmp_path_factory):
    """A folder with `generator`, `verifier` and `policy`: 5k parameters, taught the format and little else.

    They answer, judge and reason about as chance would, so that every kind of reward occurs.
    """
    folder, task = tmp_path_factory.mktemp("starts"), ChainArithmetic(modulus=2, steps=1, operands=(0, 1))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    lessons = {
        "generator": lambda p, r: solution_example(p, task, r, lambda fact: str(r.randrange(2))),
        "verifier": lambda p, r: verification_example(p, task, r, flip=0.5),
        "policy": lambda p, r: trace_example(p, task, r, set(task.facts()), 0.5),
    }
    for seed, (name, lesson) in enumerate(lessons.items()):
        policy = tiny_policy(seed, width=16, layers=1, heads=2)
        draw = partial(lesson, policy)
        losses = fit(policy, draw, updates=80, lr=3e-2, seed=seed, batch=16)
        assert losses[-1] < 1.0, f"the {name} has not learned the format"
        save_policy(policy, folder / name)
    torch.set_num_threads(before)
    return folder


@pytest.fixture(scope="session")
def changes(starts):
    """Recipe -> what makes a run of it out of a few seconds: four verifier and eight generator updates."""
    players = [f"generator={starts / 'generator'}", f"verifier={starts / 'verifier'}", "verifier_task=null"]
    return {
        "tango-tiny": [*COMMON, *players, "group=2", "verifier_max_new_tokens=20", "verifier_warmup=2"],
        "covrl-tiny": [*COMMON, f"policy={starts / 'policy'}", "traces=2"],
    }


@pytest.fixture(scope="session")
def command(changes):
    """Arguments of `train` for a recipe, a folder, and further changes or options."""

    def arguments(recipe: str, out, *more: str, options=()) -> list[str]:
        sets = [*changes[recipe], *more]
        return ["train", "--recipe", recipe, "--out", str(out), *options, "--set", *sets]

    return arguments


@pytest.fixture(scope="session")
def whole(command, tmp_path_factory):
    """Recipe -> the folder of an uninterrupted, finished run.  To be read, not to be changed."""
    folders = {}
    for recipe in ("tango-tiny", "covrl-tiny"):
        folders[recipe] = tmp_path_factory.mktemp("whole") / recipe
        assert main(command(recipe, folders[recipe])) == 0
    return folders


def assert_same_run(out: Path, whole: Path) -> None:
    """The same files with the same bytes, but for what the clock said; and nothing left behind."""
    files, expected = (
        {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        for folder in (out, whole)
    )
    assert files.keys() == expected.keys()
    assert [name for name in files if files[name] != expected[name]] in ([], ["timing.jsonl"])


@pytest.fixture(scope="session")
def solutions():
    """Name of a notebook ("01_tokens") -> what the code cells of its solutions define."""

    @cache
    def defined(notebook: str) -> dict:
        path = Path(__file__).parent.parent / "notebooks" / "solutions" / f"{notebook}.ipynb"
        cells = [c for c in json.loads(path.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
        names = {"__name__": "solutions"}
        for cell in cells:
            lines = [line for line in "".join(cell["source"]).split("\n") if not line.startswith("%")]
            exec(compile("\n".join(lines), path.name, "exec"), names)
        return names

    return defined


@pytest.fixture(scope="session")
def told_apart():
    """Checks a check: it accepts the solution and says something else, as expected, about each mistake."""

    def test(check, solution, mistakes: dict) -> None:
        assert len(mistakes) >= 3, "a check is tried on three typical mistakes or more"
        check(solution)
        said = {}
        for words, mistake in mistakes.items():
            with pytest.raises(AssertionError, match=words) as found:
                check(mistake)
            said[str(found.value)] = words
        assert len(said) == len(mistakes), f"two mistakes are told the same: {list(said)}"

    return test
