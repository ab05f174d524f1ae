"""The papers' data sets: the oddities of each on files of our own, the hub, the self-test of golds."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from tangolite import sources
from tangolite.covrl import written_answer
from tangolite.grading import answers_match
from tangolite.prompts import CHAT, TINY
from tangolite.sources import SOURCES, check_golds, read_processbench, read_source, self_test, task_from
from tangolite.tasks import ChainArithmetic, Problem, ProblemSet

DATA = Path(__file__).parent / "data" / "sources"


def file_of(name: str) -> Path:
    return DATA / f"{name.removesuffix('-covrl').replace('-', '_')}.jsonl"


def rows_of(name: str) -> list[dict]:
    return [json.loads(line) for line in file_of(name).read_text("utf-8").splitlines()]


def written(tmp_path: Path, rows: list, name: str = "mine.jsonl") -> Path:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


ANSWERS = {
    "eurus2": ["84", "\\frac{1}{3}", "42"],
    "math500": ["10", "(-3,3)", "\\frac{\\sqrt{5}}{2}", "\\begin{pmatrix} 1 \\\\ 2 \\\\ 3 \\end{pmatrix}"],
    "aime2024": ["6", "49", "0"],  # 049, 000
    "aime2025": ["992", "27", "81"],
    "amc2023": ["78", "27", "3.5"],  # "78.0", 27.0
    "olympiadbench": ["4,-4", "$(1,1)$, $(-1,-1)$", "$180 \\text{ km/h}$", "$2n$"],
    "boardgameqa": ["True", "False", "Uncertain"],
    "cruxeval": ["['ba', 'd c']", "{0: 0, 1: 1, 2: 4}", "False", "None"],
    "strategyqa": ["False", "True", "True"],
    "tablebench": ["2,000", "Unter", "60%"],
    "gsm8k": ["576", "10000", "-4"],
    "webinstruct": ["20 m", "5%", "$2x$", "True"],
    "webinstruct-covrl": ["20 m", "5%", "True"],
    "gpqa": ["B", "C", "B"],
    "mmlu-pro": ["D", "A", "J"],
    "theoremqa": ["True", "[1, 2]", "1.5", "(b)"],
    "minerva": ["120", "3e6", "\\frac{F}{m}", "8.64 \\times 10^4"],
    "sat-math": ["C", "B"],
}
LEFT_OUT = {
    "eurus2": {"not mathematics": 1, "no gold answer": 1},
    "cruxeval": {"answer that cannot stand in a box (its braces do not match)": 1},
    "tablebench": {"asks for a chart": 1},
    "webinstruct": {"answer of type string": 1},
    "webinstruct-covrl": {"answer of type string": 1, "mathematics": 1},
    "theoremqa": {"asks about a picture": 1},
    "sat-math": {"not one right option": 1},
}
NAMES = pytest.mark.parametrize("name", SOURCES)


@NAMES
def test_every_set_gives_its_golds_and_counts_what_it_leaves_out(name: str) -> None:
    problems, left_out = sources.read_counted(name, path=file_of(name))
    assert [p.answer for p in problems] == ANSWERS[name]
    assert dict(left_out) == LEFT_OUT.get(name, {})
    assert all(p.question == p.question.strip() != "" and p.shown == p.answer for p in problems)


@NAMES
@pytest.mark.parametrize("prompts", [CHAT, TINY], ids=["chat", "tiny"])
def test_every_gold_scores_one_in_the_form_of_the_prompt(name: str, prompts) -> None:
    problems = read_source(name, path=file_of(name))
    assert self_test(problems, prompts) == []
    assert self_test(problems, prompts, part="prior", read=written_answer) == []


def question(name: str, row: int = 0) -> str:
    return read_source(name, path=file_of(name))[row].question


def test_questions_ask_for_the_form_of_their_answer() -> None:
    assert question("eurus2") == "A gardener plants 7 rows of 12 tulips. How many tulips are there?"
    assert question("eurus2", 2).startswith("Does the word answer: \\boxed{} change a thing?")
    assert question("boardgameqa").endswith("Uncertain if neither.")
    assert "What does f(['ab', 'c d']) return?" in question("cruxeval")
    assert question("strategyqa").endswith("oven? Answer True or False.")
    assert question("tablebench").splitlines()[:2] == ["town | people | since", "Ober | 1200 | 1311"]
    assert question("tablebench", 1).splitlines()[2] == "Unter | 800 | 1290"  # the table came as text
    assert question("theoremqa").endswith("Answer True or False.")
    assert "Answer True" not in question("theoremqa", 1)
    assert question("sat-math").splitlines() == [
        *("If $3x = 12$, what is $x$?", "A. 2", "B. 3", "C. 4", "D. 5"), "Answer with the letter alone.",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["gpqa", "mmlu-pro", "sat-math"])
def test_the_letter_of_a_choice_stands_before_the_right_option(name: str) -> None:
    right = {"gpqa": ["the boojum", "two", "14"], "mmlu-pro": ["27", "Fern", "Pressure of the air"],
             "sat-math": ["4", "$y = 2x + 1$"]}[name]  # fmt: skip
    problems = read_source(name, path=file_of(name))
    for problem, option in zip(problems, right, strict=True):
        assert f"{problem.answer}. {option}" in problem.question.splitlines()


def test_the_order_of_gpqa_options_is_no_matter_of_chance_nor_of_the_row(tmp_path: Path) -> None:
    rows = rows_of("gpqa")
    again = read_source("gpqa", path=written(tmp_path, rows[::-1]))
    assert again[::-1] == read_source("gpqa", path=file_of("gpqa"))


def test_a_gold_that_is_missing_or_blank_is_left_out_in_every_set_with_plain_answers(tmp_path: Path) -> None:
    rows = rows_of("minerva")
    rows[0]["answer"], rows[1]["answer"], rows[2]["answer"] = None, "  ", float("nan")
    problems, left_out = sources.read_counted("minerva", path=written(tmp_path, rows))
    assert len(problems) == 1 and left_out == {"no gold answer": 3}


def test_what_was_left_out_is_logged_once_and_a_whole_set_says_nothing(caplog) -> None:
    read_source("eurus2", path=file_of("eurus2"))
    assert [r.getMessage() for r in caplog.records] == [
        "eurus2: 3 problems; left out were 1 × not mathematics; 1 × no gold answer"
    ]
    caplog.clear()
    read_source("gsm8k", path=file_of("gsm8k"))
    assert caplog.records == []


# --- files -------------------------------------------------------------------------------------------


def test_a_list_of_objects_is_read_under_either_suffix_and_with_a_byte_order_mark(tmp_path: Path) -> None:
    expected = read_source("strategyqa", path=file_of("strategyqa"))
    for name, encoding in (("a.json", "utf-8"), ("a.jsonl", "utf-8-sig")):
        path = tmp_path / name
        path.write_text("\n " + json.dumps(rows_of("strategyqa"), indent=2), encoding=encoding)
        assert read_source("strategyqa", path=path) == expected
    lines = tmp_path / "lines.json"  # hubs name JSONL .json, too
    lines.write_bytes(b"\xef\xbb\xbf\n" + file_of("strategyqa").read_bytes())
    assert read_source("strategyqa", path=str(lines)) == expected


@pytest.mark.parametrize("limit", [1, 2, 3, 99])
def test_a_limit_counts_problems_and_reads_no_further(limit: int, tmp_path: Path) -> None:
    path = written(tmp_path, rows_of("eurus2")[:3])
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"never read')
    if limit < 3:
        assert len(read_source("eurus2", path=path, limit=limit)) == limit
    else:
        with pytest.raises(ValueError, match="line 4"):
            read_source("eurus2", path=path, limit=limit)


@pytest.mark.parametrize(("name", "field"), [(n, f) for n, s in SOURCES.items() for f in s.fields])
def test_a_missing_field_is_named_with_file_and_line(name: str, field: str, tmp_path: Path) -> None:
    rows = rows_of(name)
    del rows[1][field]
    path = written(tmp_path, rows)
    with pytest.raises(ValueError) as caught:
        read_source(name, path=path)
    assert str(caught.value).startswith(f"{path}, line 2: field {field!r} is missing; the row has ")


WRONG = [
    ("gsm8k", {"answer": "576"}, "no ####"),
    ("gsm8k", {"question": None}, "'question' must be text, got None"),
    ("math500", {"problem": " "}, "'problem' must be text"),
    ("math500", {"answer": ["10"]}, "gold answer must be text, a number"),
    ("boardgameqa", {"label": "true"}, "'label' must be one of proved, disproved, unknown, got 'true'"),
    ("eurus2", {"prompt": "How many?"}, "prompt needs a turn of the user"),
    ("eurus2", {"prompt": []}, "prompt needs a turn of the user"),
    ("eurus2", {"reward_model": {}}, "reward_model a ground_truth"),
    ("tablebench", {"table": "{"}, "'table' must hold columns and data"),
    ("tablebench", {"table": {"columns": []}}, "'table' must hold columns and data"),
    ("mmlu-pro", {"answer": "A"}, "answer 'A' and answer_index 3 disagree"),
    ("mmlu-pro", {"answer_index": 10}, "right option is number 10 of 10"),
    ("sat-math", {"gold": [-1]}, "right option is number -1 of 4"),
    ("gpqa", {"Incorrect Answer 2": None}, "'Incorrect Answer 2' must be text"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG)
def test_a_field_that_holds_something_else_is_named_with_file_and_line(
    name, change, message, tmp_path
) -> None:
    rows = rows_of(name)
    rows[0] |= change
    path = written(tmp_path, rows)
    with pytest.raises(ValueError) as caught:
        read_source(name, path=path)
    assert f"{path}, line 1: " in str(caught.value) and message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n\n", "the file is empty"),
        (b'{"question": "x", "answer": "#### 1"}\n{"question": "y", "ans', "line 2: not valid JSON.*cut off"),
        (b'[{"question": "x", "answer": "#### 1"},\n{"question": "y"', r"not valid JSON.*line 2.*cut off"),
        (b'{"question": "x", "answer": "#### 1"}\n"y"\n', "line 2: expected an object"),
        (b"[1, 2]", "row 1: expected an object"),
        (b'{"question": "\xff"}\n', "line 1: not UTF-8"),
        (b"question,answer\nx,1\n", "line 1: not valid JSON.*one object a line, or one list"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_what_to_do(content: bytes, message: str, tmp_path) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_source("gsm8k", path=path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_an_os_error_that_names_it(tmp_path: Path) -> None:
    for name in ("none.jsonl", "none.parquet"):
        with pytest.raises((OSError, ValueError), match=name):
            read_source("gsm8k", path=tmp_path / name)


def fake_parquet(monkeypatch, error: str | None = None) -> None:
    """A pyarrow whose files are JSON: only the calls are tried, as the package need not be installed."""
    pyarrow, parquet = ModuleType("pyarrow"), ModuleType("pyarrow.parquet")
    pyarrow.ArrowException, pyarrow.parquet = type("ArrowException", (Exception,), {}), parquet

    class Batch(list):
        to_pylist = list.copy

    class ParquetFile:
        def __init__(self, file) -> None:
            self.rows = [json.loads(line) for line in file.read().splitlines()]

        def iter_batches(self, size: int):
            yield Batch(self.rows[:2])
            if error:
                raise pyarrow.ArrowException(error)
            yield Batch(self.rows[2:])

    parquet.ParquetFile = ParquetFile
    monkeypatch.setitem(sys.modules, "pyarrow", pyarrow)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", parquet)


def test_parquet_is_read_where_pyarrow_is_installed(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "gsm8k.parquet"
    path.write_bytes(file_of("gsm8k").read_bytes())
    fake_parquet(monkeypatch)
    assert read_source("gsm8k", path=path) == read_source("gsm8k", path=file_of("gsm8k"))
    fake_parquet(monkeypatch, "Unexpected end\nof stream")
    with pytest.raises(ValueError, match=r"after row 2 \(Unexpected end of stream\).*cut off"):
        read_source("gsm8k", path=path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="pip install pyarrow"):
        read_source("gsm8k", path=path)


def test_a_file_without_one_usable_row_says_why(tmp_path: Path) -> None:
    path = written(tmp_path, [rows_of("eurus2")[1]] * 3)
    with pytest.raises(ValueError, match=r"mine\.jsonl: no problems for eurus2; left out were 3 × not math"):
        read_source("eurus2", path=path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "gsm9k"}, "unknown data set 'gsm9k': did you mean gsm8k"),
        ({"name": "sudoku"}, "unknown data set 'sudoku': known are eurus2, math500"),
        ({"name": "gsm8k", "path": "x.jsonl", "split": "train"}, "leave out split"),
        ({"name": "gsm8k", "path": "x.jsonl", "limit": 0}, "limit must be a whole number of at least 1"),
        ({"name": "gsm8k", "path": "x.jsonl", "limit": "many"}, "limit must be a whole number"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_read(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_source(**arguments)


# --- the hub, through a package of our own in the place of `datasets` --------------------------------


@pytest.fixture
def hub(monkeypatch):
    """What was asked of the hub; `hub.rows` is what it answers, `hub.error` what it raises."""
    package = ModuleType("datasets")
    package.asked, package.rows, package.error = [], [], None

    def load_dataset(name, config=None, **options):
        package.asked.append((name, config, options))
        if package.error:
            raise package.error
        return package.rows

    package.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", package)
    return package


@NAMES
def test_the_hub_is_asked_for_name_config_split_and_file(name: str, hub) -> None:
    hub.rows = rows_of(name)
    assert read_source(name) == read_source(name, path=file_of(name))
    source = SOURCES[name]
    [(asked, config, options)] = hub.asked
    assert (asked, config) == (source.id, source.config) and asked.count("/") == 1
    assert options["split"] == source.split and options["revision"] is None
    assert options.get("data_files") == (source.file and {source.split: source.file})
    read_source(name, split="validation", limit=1)
    assert hub.asked[1][2]["split"] == "validation"


def test_a_row_of_the_hub_is_named_by_set_split_and_number(hub) -> None:
    hub.rows = [*rows_of("gsm8k"), {"question": "x"}]
    with pytest.raises(ValueError, match=r"^openai/gsm8k, test, row 4: field 'answer' is missing"):
        read_source("gsm8k")


REFUSALS = [
    ConnectionError("Couldn't reach\nthe hub"),
    FileNotFoundError("gated"),
    ValueError("Unknown split 'tset'"),
    OSError(28, "No space left"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_hub_that_does_not_answer_becomes_one_message_with_the_reason_and_what_to_do(error, hub) -> None:
    hub.error = error
    with pytest.raises(ValueError) as caught:
        read_source("gpqa")
    said = str(caught.value)
    assert said.startswith("Idavidrein/gpqa, train, cannot be read from the hub") and "\n" not in said
    assert " ".join(str(error).split()) in said and type(error).__name__ in said
    assert "give the path of a local copy" in said and caught.value.__cause__ is error


def test_without_the_package_the_message_says_how_to_get_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"openai/gsm8k.*pip install datasets.*local copy"):
        read_source("gsm8k")


# --- ProcessBench ------------------------------------------------------------------------------------


def test_processbench_rows_become_judged_solutions(hub) -> None:
    found = read_processbench("gsm8k", path=file_of("processbench"))
    assert [s.label for s in found] == [-1, 1, 0, -1]
    assert [s.final_answer_correct for s in found] == [True, False, True, True]
    assert found[1].steps[1] == "He loses 2, so 5 - 2 = 4." and found[1].id == "gsm8k-1"
    assert read_processbench("gsm8k", path=file_of("processbench"), limit=2) == found[:2]
    hub.rows = rows_of("processbench")
    assert read_processbench("gsm8k", revision="abc") == found
    assert hub.asked == [("Qwen/ProcessBench", None, {"split": "gsm8k", "revision": "abc"})]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": 2}, "'label' must be -1 or the index of one of 2 steps, got 2"),
        ({"label": -2}, "'label'"),
        ({"label": True}, "'label'"),
        ({"label": None}, "'label'"),
        ({"steps": []}, "'steps' must be a list of texts"),
        ({"steps": "one"}, "'steps' must be a list of texts"),
        ({"steps": ["one", None]}, "'steps' must be a list of texts"),
        ({"problem": ""}, "'problem' must be text"),
        ({"final_answer_correct": None}, "'final_answer_correct' must be true or false"),
        ({"id": "math-0"}, "of the split math, not of gsm8k"),
    ],
)
def test_a_row_of_processbench_that_cannot_be_scored_is_named(change: dict, message: str, tmp_path) -> None:
    rows = rows_of("processbench")
    rows[0] |= change
    with pytest.raises(ValueError, match=f"line 1: .*{message}"):
        read_processbench("gsm8k", path=written(tmp_path, rows))
    del rows[0]["label"]
    with pytest.raises(ValueError, match="line 1: field 'label' is missing"):
        read_processbench("gsm8k", path=written(tmp_path, rows))
    with pytest.raises(ValueError, match="splits gsm8k, math, olympiadbench, omnimath, not 'test'"):
        read_processbench("test", path=file_of("processbench"))


# --- the self-test -----------------------------------------------------------------------------------


def test_a_prompt_that_asks_for_another_form_than_is_read_fails_the_self_test() -> None:
    problems = read_source("gsm8k", path=file_of("gsm8k"))
    unboxed = replace(CHAT, generator=lambda question: f"Answer as <answer>...</answer>. {question}")
    assert len(self_test(problems, unboxed)) == len(problems)
    with pytest.raises(
        ValueError, match=r"3 of 3 gold answers .* a perfect generator .*'576' is read back as None"
    ):
        check_golds(problems, unboxed)
    assert len(self_test(problems, CHAT, part="prior")) == len(
        problems
    )  # its form has no box: read it otherwise
    check_golds(problems, CHAT)


def test_golds_that_no_answer_can_equal_fail_the_self_test_by_number() -> None:
    golds = ["7", "'}'", "", "{", "\\boxed{5}", "{1: {2: 3}}"]
    failures = self_test([Problem("?", gold) for gold in golds], CHAT)
    assert [f.partition(":")[0] for f in failures] == ["problem 2", "problem 3", "problem 4"]


def test_the_form_is_taken_from_the_prompt_itself() -> None:
    other = replace(CHAT, generator=lambda question: "Write <answer>so \\boxed{...} it is</answer>.")
    assert self_test([Problem("?", "7")], other) == []
    wrong = replace(CHAT, generator=lambda question: "Write <answer>\\boxed{...}, not \\boxed{x}</answer>.")
    assert self_test([Problem("?", "7")], wrong) == ["problem 1: '7' is read back as 'x'"]


def test_the_self_test_compares_by_the_grader(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(sources, "answers_match", lambda a, b: asked.append((a, b)) or answers_match(a, b))
    assert self_test([Problem("?", " 7 ")], TINY) == [] and asked == [("7", " 7 ")]


# --- a task of a recipe ------------------------------------------------------------------------------


def test_a_recipe_names_a_source_as_its_task() -> None:
    settings = {"source": "gsm8k", "path": str(file_of("gsm8k")), "limit": 2}
    task = task_from(settings, TINY)
    assert isinstance(task, ProblemSet) and [p.answer for p in task.items] == ["576", "10000"]
    assert settings.keys() == {"source", "path", "limit"}  # as it was
    assert task_from(settings | {"kind": "chain", "split": None}, TINY) == task
    assert task_from({"kind": "chain", "modulus": 5}, TINY) == ChainArithmetic(modulus=5)
    prior = task_from(settings, CHAT, part="prior", read=written_answer)
    assert prior == task


def test_a_task_with_golds_that_cannot_be_answered_does_not_start(tmp_path: Path) -> None:
    path = written(tmp_path, [{"question": "?", "answer": "'}'"}])
    with pytest.raises(ValueError, match="1 of 1 gold answers"):
        task_from({"file": str(path)}, TINY)
    with pytest.raises(ValueError, match=r"task\.source takes path, split and limit beside it, not steps"):
        task_from({"source": "gsm8k", "steps": 3}, TINY)
    with pytest.raises(ValueError, match="unknown data set"):
        task_from({"source": "gsm9k"}, TINY)
    with pytest.raises(ValueError, match=r"task\.kind must be one of"):
        task_from({"kind": "sums"}, TINY)
