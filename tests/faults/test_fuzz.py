"""Whatever a model or a stranger wrote: parsers, grader and inspector raise nothing, readers name the file.

The same inputs by the million: `python -m tangolite.lab.fuzz`.
"""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tangolite import grading, parsing, records, sources, tasks
from tangolite.lab import fuzz, fuzz_inputs

COUNTS = {"parsers": 3000, "grader": 300, "readers": 600, "inspector": 200}
READERS = {
    "jsonl": tasks.read_jsonl,
    "records": records.read_records,
    "processbench": lambda path: sources.read_processbench("gsm8k", path=path),
    **{name: lambda path, name=name: sources.read_counted(name, path=path) for name in sources.SOURCES},
}


@pytest.mark.parametrize("target", COUNTS)
def test_hostile_inputs_raise_nothing_and_take_no_time(target, tmp_path) -> None:
    """Another seed than the long runs have, always the same one: a red test can be repeated."""
    outcome = fuzz.attack(target, COUNTS[target], 12345, tmp_path)
    assert outcome.inputs == COUNTS[target] and outcome.faults == []


PIECES = st.sampled_from(fuzz_inputs.TAGS + fuzz_inputs.BOXES + fuzz_inputs.ODD)
TEXTS = st.lists(PIECES | st.text(st.characters(exclude_categories=()), max_size=4), max_size=30).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(-2, 10**6))
def test_any_pieces_in_any_order_are_read_by_every_parser(text, n_steps) -> None:
    fuzz.try_parsers((text, n_steps))


@settings(max_examples=100, deadline=None)
@given(TEXTS, TEXTS)
def test_any_verification_of_any_solution_gives_a_page(solution, verification) -> None:
    fuzz.try_inspector({"solution": solution, "verification": [verification, verification]})


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(sorted(READERS)),
    st.lists(JSON, min_size=1, max_size=3),
    st.binary(max_size=12),
    st.data(),
)
def test_a_file_of_any_json_and_bytes_is_read_or_refused_by_its_name(
    tmp_path, reader, rows, junk, data
) -> None:
    lines = "\n".join(json.dumps(row) for row in rows).encode()
    at = data.draw(st.integers(0, len(lines)))
    fuzz.try_readers((reader, lines[:at] + junk + lines[at:]), tmp_path)


HOSTILE_FILES = {
    "brackets in thousands": b'{"question": ' + b"[" * 100_000,
    "objects in thousands": b'{"a":' * 100_000,
    "a list of brackets": b"[" * 100_000,
    "a number of thousands of digits": b'{"question": "1", "answer": ' + b"9" * 5000 + b"}\n",
    "a line cut off": b'{"question": "1+1", "answ',
    "a mark in the middle": b'{"question": "1", "answer": 1}\xef\xbb\xbf{}\n',
    "no text": b"\x00\x01\xff\xfe" * 100,
    "nothing": b"",
    "blanks": b"\r\n\r\n \t\r\n",
}


@pytest.mark.parametrize("kind", HOSTILE_FILES)
@pytest.mark.parametrize("reader", ["jsonl", "records", "processbench", "gsm8k", "eurus2"])
def test_a_file_that_no_reader_can_use_is_refused_with_its_name(reader, kind, tmp_path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(HOSTILE_FILES[kind])
    with pytest.raises(ValueError, match=r"file\.jsonl"):
        READERS[reader](path)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\n\ufeff"])
def test_marks_and_line_ends_of_other_systems_are_read(end, tmp_path) -> None:
    path, row = tmp_path / "mine.jsonl", '{"question": "1+1", "answer": "2"}'
    path.write_bytes(("\ufeff" + row + end + row + "\r\n").encode())
    assert [p.answer for p in tasks.read_jsonl(path)] == ["2", "2"]


# --- the tool itself


def test_an_input_depends_on_seed_target_and_number_alone() -> None:
    for name, target in fuzz.TARGETS.items():
        one, again, other = (repr(target.make(random.Random(f"{seed}/{name}/7"))) for seed in (0, 0, 1))
        assert one == again != other


def test_inputs_are_neither_all_readable_nor_all_broken() -> None:
    made = [fuzz_inputs.text(random.Random(n)) for n in range(400)]
    steps = [len(parsing.split_steps(text)) for text, _ in made]
    answers = [parsing.extract_answer(text) for text, _ in made]
    assert 0 in steps and max(steps) > 10 and 40 < answers.count(None) < 360
    pairs = [fuzz_inputs.answers(random.Random(n)) for n in range(100)]
    assert {grading.answers_status(*pair, timeout=1) for pair in pairs} >= {"match", "differ", "no_answer"}


@pytest.mark.parametrize(
    ("target", "place", "broken"),
    [
        ("parsers", "extract_answer", lambda text: {}[text] if "\x00" in text else None),
        ("parsers", "split_steps", lambda text: [parsing.Step(0, 1, "no such text")]),
        ("grader", "read", lambda text: 1 / 0),
        ("readers", "read_jsonl", lambda path: [][0]),
    ],
)
def test_a_fault_is_reported_with_its_input_and_ends_with_code_1(
    target, place, broken, monkeypatch, tmp_path, capsys
) -> None:
    module = {"parsers": parsing, "grader": grading, "readers": tasks}[target]
    monkeypatch.setattr(module, place, broken)
    assert fuzz.main(["--count", "600", "--out", str(tmp_path / "found.json")]) == 1
    said = capsys.readouterr().out
    assert f"{target}:" in said and "given " in said
    found = json.loads((tmp_path / "found.json").read_text())
    assert found[target]["faults"] and not any(found[name]["faults"] for name in found if name != target)


def test_one_input_can_be_given_again(capsys) -> None:
    assert fuzz.main(["--only", "parsers:123"]) == 0
    assert capsys.readouterr().out.startswith("parsers: 1 inputs") and fuzz.TARGETS["parsers"].share < 1


def test_an_input_that_takes_too_long_is_a_fault(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(fuzz, "BOUND", -1.0)
    assert "took 0.0 s" in fuzz.attack("inspector", 1, 0, tmp_path).faults[0]


def test_the_coverage_guided_search_runs_or_says_which_package_is_missing() -> None:
    if importlib.util.find_spec("atheris") is None:
        with pytest.raises(SystemExit, match="pip install atheris"):
            fuzz.main(["--atheris", "1"])
        return
    root = Path(fuzz.__file__).parents[2]
    command = [sys.executable, "-m", "tangolite.lab.fuzz", "--atheris", "2"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "stat::number_of_executed_units" in done.stderr, done.stderr[-2000:]
