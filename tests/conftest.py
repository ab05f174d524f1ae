"""What several test files need: tiny policies that write the right format, in folders of their own."""

from __future__ import annotations

import random

import pytest
import torch

from tangolite.checkpoints import save_policy
from tangolite.models import tiny_policy
from tangolite.tasks import ChainArithmetic
from tangolite.warmstart import finish, fit, solution_example, trace_example, verification_example

TASK = "{kind: chain, modulus: 2, steps: 1, operands: [0, 1]}"  # answers are 0 or 1: chance is one in two


@pytest.fixture(scope="session")
def starts(tmp_path_factory):
    """A folder with `generator`, `verifier` and `policy`: 5k parameters, taught the format and nothing else.

    They answer, judge and reason at chance, so that every kind of reward and judgement occurs.
    """
    folder, task = tmp_path_factory.mktemp("starts"), ChainArithmetic(modulus=2, steps=1, operands=(0, 1))
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def guess(draw: random.Random):
        return lambda fact: str(draw.randrange(2))

    lessons = {
        "generator": lambda p, r: solution_example(p, task, r, guess(r)),
        "verifier": lambda p, r: verification_example(p, task, r, flip=0.5),
        "policy": lambda p, r: trace_example(p, task, r, set(task.facts()), 0.5),
    }
    for seed, (name, lesson) in enumerate(lessons.items()):
        policy = tiny_policy(seed, width=16, layers=1, heads=2)
        losses = fit(policy, lambda r, p=policy, ex=lesson: ex(p, r), updates=80, lr=3e-2, seed=seed, batch=16)
        assert losses[-1] < 0.5, f"the {name} has not learned the format"
        save_policy(policy, folder / name)
    torch.set_num_threads(before)
    return folder
