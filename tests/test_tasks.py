"""Tasks: the truth of steps against brute force, what beginners believe, and files of one's own."""

from __future__ import annotations

import json
import random

import pytest

from tangolite.tasks import (
    WORDS,
    ChainArithmetic,
    LastLetters,
    Problem,
    ProblemSet,
    misconceptions,
    problems,
    read_jsonl,
    task_of,
)

CHAINS = [
    ChainArithmetic(),
    ChainArithmetic(modulus=2, steps=1),
    ChainArithmetic(modulus=5, steps=3, operators="+*", operands=(0, 4)),
    ChainArithmetic(modulus=100, steps=(2, 5, 12), operators="+-*", operands=(1, 25)),
    ChainArithmetic(modulus=31, steps=4, first=(7, 7)),
]
LETTERS = [LastLetters(), LastLetters(steps=(1, 6)), LastLetters(steps=2, words=("ab", "cd"))]
TASKS = pytest.mark.parametrize("task", CHAINS + LETTERS, ids=str)


def evaluated(expression: str, modulus: int) -> str:
    """Left to right, everything modulo: by Python's own arithmetic, one operation at a time."""
    tokens = expression.replace("+", " + ").replace("-", " - ").replace("*", " * ").split()
    value = int(tokens[0])
    for operator, operand in zip(tokens[1::2], tokens[2::2], strict=True):
        value = eval(f"{value} {operator} {operand}") % modulus
    return str(value)


def operations(question: str) -> list[str]:
    spaced = question.replace("+", " +").replace("-", " -").replace("*", " *")
    return spaced.split()[1:]


@pytest.mark.parametrize("task", CHAINS, ids=str)
def test_the_answer_of_a_chain_is_its_value_modulo_and_the_reference_its_running_results(task):
    for problem in problems(task, 50, 0):
        assert problem.answer == evaluated(problem.question, task.modulus)
        done = operations(problem.question)
        assert len(done) in task.lengths
        first = problem.question[: len(problem.question) - len("".join(done))]
        prefixes = [first + "".join(done[: k + 1]) for k in range(len(done))]
        assert problem.reference.split() == [evaluated(p, task.modulus) for p in prefixes]
        low, high = task.first or (0, task.modulus - 1)
        assert low <= int(first) <= high
        assert all(task.operands[0] <= int(op[1:]) <= task.operands[1] for op in done)


@pytest.mark.parametrize("task", LETTERS, ids=str)
def test_the_answer_of_last_letters_joins_the_last_letters(task):
    for problem in problems(task, 30, 0):
        assert problem.answer == "".join(word[-1] for word in problem.question.split())
        assert problem.reference.split() == list(problem.answer)
        assert len(problem.answer) in task.lengths


@TASKS
def test_a_worked_solution_is_true_at_every_step_and_its_answer_follows(task):
    for problem in problems(task, 20, 1):
        steps, answer = task.solve(problem)
        assert answer == problem.answer and task.follows(steps, answer)
        assert task.step_truth(problem, steps) == [True] * len(steps)
        assert [f"{left}" for left, _ in task.recompute(problem, steps)] == steps


def brute_force(problem: Problem, steps: list[str], modulus: int) -> list[bool]:
    """A step is true when it is the question's next operation on the value claimed last, done rightly."""
    done = operations(problem.question)
    value, truth = problem.question[: len(problem.question) - len("".join(done))], []
    for k, step in enumerate(steps):
        if k >= len(done):
            truth.append(False)
            continue
        right = f"{value}{done[k]}={evaluated(value + done[k], modulus)}"
        truth.append(step == right)
        value = str(int(step.split("=")[1]) % modulus)
    return truth


@pytest.mark.parametrize("task", CHAINS, ids=str)
@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_the_truth_of_flawed_steps_equals_brute_force(task, rate):
    rng, seen = random.Random(f"{task}{rate}"), []
    for problem in problems(task, 60, 2):
        steps, _ = task.flawed(problem, rng, rate)
        truth = task.step_truth(problem, steps)
        assert truth == brute_force(problem, steps, task.modulus)
        seen += truth
    assert (False in seen) == (rate > 0) and (True in seen) == (rate < 1)


def test_a_right_computation_on_an_earlier_wrong_result_is_a_true_step():
    chain, problem = ChainArithmetic(), Problem("17+5-3*2", "7")
    truth = lambda *steps: chain.step_truth(problem, list(steps))  # noqa: E731
    assert truth("17+5=22", "22-3=19", "19*2=7") == [True, True, True]
    assert truth("17+5=23", "23-3=20", "20*2=9") == [False, True, True]
    assert truth("17+5=22", "21-3=18", "18*2=5") == [True, False, True]  # starts from another value
    assert truth("17+5=22", "22-4=18", "18*2=5") == [True, False, True]  # works with another operand
    assert truth("17+5=22", "22-3=19") == [True, True]  # missing steps have no truth
    assert truth("17+5=22", "22-3=19", "19*2=7", "7+1=8") == [True, True, True, False]  # surplus


@pytest.mark.parametrize(
    "garbled", ["", "22", "=22", "17+5=", "17+5=22=22", "so 17+5=22", "17 + 5 = 22", "×"]
)
def test_a_garbled_step_is_false_and_the_next_one_is_measured_from_the_right_value(garbled):
    chain, problem = ChainArithmetic(), Problem("17+5-3", "19")
    assert chain.step_truth(problem, [garbled, "22-3=19"]) == [False, True]
    assert chain.recompute(problem, [garbled])[0] == ("17+5=22", "")


def test_any_text_has_a_truth_even_a_number_too_long_for_int():
    chain, problem = ChainArithmetic(), Problem("17+5-3", "19")
    assert chain.step_truth(problem, ["17+5=" + "9" * 5000, "22-3=19"]) == [False, True]
    assert chain.step_truth(problem, ["17+5=53", "22-3=19"]) == [
        False,
        True,
    ]  # 53 is 22, but not as a residue
    assert chain.step_truth(problem, [" 17+5=22 ", "22-3=19\n"]) == [True, True]  # blanks around are no error
    letters = LastLetters()
    assert letters.step_truth(Problem("tree wolf", "ef"), ["wolf=f", "=", "wolf=f"]) == [False, False, False]
    assert letters.step_truth(Problem("tree wolf", "ef"), ["tree=e", "wolf=o"]) == [True, False]


def test_the_answer_follows_only_if_it_is_what_the_steps_end_in():
    chain, letters = ChainArithmetic(), LastLetters()
    assert chain.follows(["17+5=22", "22-3=19"], "19") and not chain.follows(["17+5=22", "22-3=19"], "22")
    assert not chain.follows([], "") and not chain.follows(["x"], "x")
    assert letters.follows(["tree=e", "wolf=f"], "ef") and not letters.follows(["tree=e"], "ef")


@TASKS
def test_the_same_seed_gives_the_same_problems_and_another_seed_others(task):
    assert problems(task, 20, "train/3") == problems(task, 20, "train/3")
    assert problems(task, 20, 3) == problems(task, 20, "3")
    assert problems(task, 20, "train/3") != problems(task, 20, "train/4")


@TASKS
def test_a_misconception_is_one_fixed_wrong_result(task):
    chosen = misconceptions(task, fraction=0.5, rate=1.0, seed=7)
    first, again = chosen(random.Random(0)), chosen(random.Random(1))
    facts = task.facts()
    wrong = [fact for fact in facts if first(fact) != task.truth(fact)]
    assert len(wrong) == round(0.5 * len(facts))
    assert [first(f) for f in facts] == [again(f) for f in facts]
    same = misconceptions(task, fraction=0.5, rate=1.0, seed=7)(random.Random(2))
    assert [same(f) for f in facts] == [first(f) for f in facts]


def test_a_misconception_is_said_at_the_given_rate_and_truth_otherwise():
    task = ChainArithmetic()
    teacher = misconceptions(task, fraction=0.35, rate=0.6, seed=0)(random.Random(0))
    always = misconceptions(task, fraction=0.35, rate=1.0, seed=0)(random.Random(0))
    believed = {f: always(f) for f in task.facts() if always(f) != task.truth(f)}
    asked = list(believed) * 20
    results = [(teacher(fact), believed[fact], task.truth(fact)) for fact in asked]
    assert all(s in (wrong, right) for s, wrong, right in results)
    share = sum(s == wrong for s, wrong, _ in results) / len(results)
    assert abs(share - 0.6) < 0.03  # 3,900 draws: a standard deviation of 0.008
    other = misconceptions(task, fraction=0.35, rate=1.0, seed=1)(random.Random(0))
    assert any(other(f) != always(f) for f in task.facts())


@TASKS
def test_a_belief_is_never_the_truth_and_facts_cover_what_problems_ask(task):
    rng, facts = random.Random(0), set(task.facts())
    asked = []
    for problem in problems(task, 20, 5):
        task.solve(problem, lambda fact: asked.append(fact) or task.truth(fact))
    assert asked and set(asked) <= facts
    assert all(task.believe(fact, rng) != task.truth(fact) for fact in asked for _ in range(5))


def test_the_built_in_words_are_distinct_and_end_in_many_letters():
    assert len(set(WORDS)) == len(WORDS)
    assert len({word[-1] for word in WORDS}) > 10


# --- settings and files ------------------------------------------------------------------------------


def test_task_of_reads_the_settings_of_a_recipe():
    assert task_of({"kind": "chain", "modulus": 5, "operands": [0, 4]}) == ChainArithmetic(
        modulus=5, operands=(0, 4)
    )
    assert task_of({"kind": "letters", "steps": [2, 3]}).lengths == (2, 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "task.kind must be one of chain, letters"),
        ({"kind": "sums"}, "'sums'"),
        ({"kind": "chain", "modulos": 5}, "chain.*modulos"),
        ({"kind": "chain", "modulus": 101}, r"2\.\.100.*101"),
        ({"kind": "chain", "modulus": 1}, r"2\.\.100"),
        ({"kind": "chain", "operators": "+/"}, r"operators.*'\+/'"),
        ({"kind": "chain", "operators": ""}, "operators"),
        ({"kind": "chain", "steps": 0}, "steps must be at least 1"),
        ({"kind": "letters", "steps": []}, "steps must be at least 1"),
        ({"file": "problems.jsonl", "steps": 3}, "steps"),
    ],
)
def test_task_of_names_what_is_wrong(settings, message):
    before = dict(settings)
    with pytest.raises(ValueError, match=message):
        task_of(settings)
    assert settings == before


def written(tmp_path, *lines: str | dict, encoding="utf-8"):
    path = tmp_path / "problems.jsonl"
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding=encoding)
    return path


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("First 3 apples, then 4.\n#### 7", "7"),
        ("#### 1,234", "1234"),
        ("so #### -12,345,678.5 ", "-12345678.5"),
        ("#### $1,000", "$1000"),
        ("a #### b #### 5", "5"),
        ("#### (1, 2)", "(1, 2)"),
        ("#### 12,34", "12,34"),  # a list of two, not a number
        ("1,234", "1,234"),
        (" \\frac{1}{2}\n", "\\frac{1}{2}"),
        (1234, "1234"),
        (0, "0"),
        (0.5, "0.5"),
    ],
)
def test_the_gold_answer_is_what_follows_the_mark_or_all_of_it(tmp_path, answer, gold):
    [problem] = read_jsonl(written(tmp_path, {"question": " How many? ", "answer": answer}))
    assert problem == Problem("How many?", gold) and problem.shown == gold


def test_other_field_names_blank_lines_and_a_byte_order_mark_are_fine(tmp_path):
    path = written(tmp_path, {"q": "é?", "a": "1", "more": []}, "", {"q": "2?", "a": 2}, encoding="utf-8-sig")
    assert read_jsonl(path, question="q", answer="a") == [Problem("é?", "1"), Problem("2?", "2")]
    task = task_of({"file": str(path), "question": "q", "answer": "a"})
    assert isinstance(task, ProblemSet)
    assert {p.question for p in problems(task, 50, 0)} == {"é?", "2?"}
    assert task.step_truth(task.items[0], ["x"]) is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "x", "answer": ', "line 2: not valid JSON"),
        ("[1, 2]", "line 2: expected a JSON object"),
        ('{"question": "x"}', "line 2: field 'answer' is missing.*question"),
        ('{"answer": "x"}', "line 2: field 'question' is missing"),
        ('{"question": ["x"], "answer": "1"}', "line 2: field 'question' must be text"),
        ('{"question": "x", "answer": null}', "line 2: field 'answer' must be text.*None"),
        ('{"question": "x", "answer": "  "}', "line 2: field 'answer'"),
        ('{"question": "x", "answer": "because #### "}', "line 2: field 'answer' has nothing after"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_with_file_line_and_field(tmp_path, line, message):
    path = written(tmp_path, {"question": "x", "answer": "1"}, line)
    with pytest.raises(ValueError, match=message) as caught:
        read_jsonl(path)
    assert str(path) in str(caught.value)


def test_bytes_that_are_not_text_are_named_with_file_and_line(tmp_path):
    path = written(tmp_path, {"question": "x", "answer": "1"})
    path.write_bytes(path.read_bytes() + b'{"question": "\xff", "answer": "1"}\n')
    with pytest.raises(ValueError, match="line 2: not UTF-8"):
        read_jsonl(path)


def test_a_file_without_problems_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"problems\.jsonl: no problems"):
        read_jsonl(written(tmp_path, "", "  "))


# The gate: a matter of form, not of truth


def test_steps_restate_the_question_whatever_their_results() -> None:
    task, problem = ChainArithmetic(modulus=31, steps=2), Problem("17+5-3", "19")
    assert task.restates(problem, ["17+5=22", "22-3=19"])
    assert task.restates(problem, ["17+5=9", "9-3=6"])  # wrong, and in form
    assert not task.restates(problem, ["17-5=12", "12-3=9"])  # another operator
    assert not task.restates(problem, ["17+5=22", "21-3=18"])  # another value than was claimed
    assert not task.restates(problem, ["17+5=22"])
    assert not task.restates(problem, ["17+5=22", "22-3=19", "19+0=19"])
    assert not task.restates(problem, [])


def test_last_letters_restates_by_its_words() -> None:
    task, problem = LastLetters(steps=2), Problem("tree map", "ep")
    assert task.restates(problem, ["tree=e", "map=x"])
    assert not task.restates(problem, ["tree=e", "cup=p"])
