"""A grader's child process that hangs, dies or babbles in the middle of a run: replaced, counted, gone on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tangolite import grading, tango
from tangolite._grading.worker import Worker
from tangolite.grading import answers_match, worker_restarts
from tangolite.settings import load_recipe
from tangolite.tasks import Problem
from tangolite.training import start

SERVER = """
import json, os, sys, time
print(json.dumps({{"ready": True}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if "17" in asked["gold"] + asked["answer"]:
        {fault}
    print(json.dumps({{"match": True, "reason": "yes"}}), flush=True)
"""
FAULTS = {
    "hangs": ("time.sleep(1000)", 1),
    "dies": ("os._exit(3)", 2),  # and is asked once more, since it may have died of something else
    "dies in the middle of a reply": ("print('{', end='', flush=True); os._exit(0)", 2),
    "writes no JSON": ("print('Traceback', flush=True); continue", 2),
}


@pytest.fixture
def run(changes):
    config = load_recipe("tango-tiny", changes["tango-tiny"])
    return start(replace(config, questions=2, group=2, updates=4))


@pytest.mark.parametrize("fault", FAULTS)
def test_an_update_goes_on_with_another_worker(fault, run, tmp_path, monkeypatch) -> None:
    """Four solutions of an update need algebra; the second of them makes every worker fail."""
    code, restarts = FAULTS[fault]
    script = tmp_path / "server.py"
    script.write_text(SERVER.format(fault=code), encoding="utf-8")
    worker, answers = Worker(str(script)), iter([r"\sqrt{11}", r"\sqrt{17}", r"\sqrt{12}", r"\sqrt{13}"])
    monkeypatch.setattr(grading, "_worker", worker)
    monkeypatch.setattr(grading, "_known", {})
    monkeypatch.setattr(tango, "extract_answer", lambda text: next(answers))
    monkeypatch.setattr(
        tango, "answers_match", partial(answers_match, timeout=0.5 if fault == "hangs" else 60)
    )
    monkeypatch.setattr(tango, "problems", lambda *_: [Problem("0+1", r"x+\sqrt{2}")] * 2)
    metrics = run.update(2)
    assert metrics["turn"] == "generator" and metrics["reward"] == 0.75
    assert worker_restarts() == worker.restarts == restarts
    assert answers_match(r"\sqrt{14}", r"x+\sqrt{2}", timeout=60)  # the next worker answers
    assert worker.restarts == restarts
    worker.close()
