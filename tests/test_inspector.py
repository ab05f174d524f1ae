"""What the inspector shows of a record: the right numbers, every text literally, any JSON without error."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
import time
from html.parser import HTMLParser
from importlib.resources import files
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tangolite.advantages import mix_advantages, outcome_advantage, step_advantage
from tangolite.inspector import page as document
from tangolite.inspector import record_of, render_feedback
from tangolite.inspector.again import verifications
from tangolite.inspector.page import literal, tokens, verdict, visible, votes
from tangolite.inspector.reading import FILTERS, Library, Shown, advantages, read_record, side_by_side
from tangolite.models import load_policy
from tangolite.prompts import TINY, solution_text, verification_text
from tangolite.rewards import step_rewards
from tangolite.tasks import ChainArithmetic, Problem

WORKED = json.loads((files("tangolite.lab") / "worked_example.json").read_text("utf-8"))
NASTY = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202edesrever\u202c \ud800 \x00 &amp; \"'"


class Page(HTMLParser):
    """Tags, attributes and visible text of some HTML; fails on tags that are not closed in order."""

    EMPTY = ("meta", "br", "img", "input")

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.text, self.tables = [], [], [], "", []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.EMPTY:
            self.open.append(tag)
        if tag == "tr":
            self.tables.append([])
        if tag in ("td", "th"):
            self.tables[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.text += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1] += data


def record(*solutions: dict, **more) -> dict:
    return {"index": 0, "question": "1+2", "gold": "3", "solutions": list(solutions), **more}


def solved(steps=("1+2=3",), answer="3", *, judged=None, final=True, **more) -> dict:
    said = (
        []
        if judged is None
        else [{"text": verification_text([f"see {k}" for k in range(len(steps))], judged, final)}]
    )
    return {
        "text": solution_text(list(steps), answer),
        "correct": answer == "3",
        "verifications": said,
        **more,
    }


# --- the page --------------------------------------------------------------------------------------


def test_the_worked_example_shows_each_step_with_verdict_analysis_reward_and_truth():
    found = Page(render_feedback(WORKED))
    rows = [row for row in found.tables if row and row[0] in "12345"]
    assert [row[2] for row in rows] == ["\u2713 true"] * 3 + ["\u2717 false"] * 2
    assert [row[3] for row in rows] == ["\u2713 CORRECT agrees"] * 3 + ["\u2717 INCORRECT agrees"] * 2
    assert [row[5] for row in rows] == ["+0.2", "+0.2", "+0.2", "-0.2", "-0.2"]
    assert rows[3][4].startswith("Step 4: at x = 1 the denominator") and "boxed" not in rows[3][4]
    assert "first false step: 4" in found.text and "Gold answer: 7" in found.text


def test_the_page_is_self_contained_and_readable_without_styles():
    html = render_feedback(WORKED)
    found = Page(html)
    assert html.isascii() and not {"script", "iframe", "object", "link", "img"} & set(found.tags)
    assert not any(name.startswith("on") or name in ("src", "href") for name, _ in found.attributes)
    assert "http" not in html and "url(" not in html
    assert {"table", "caption", "thead"} <= set(found.tags) and ("scope", "row") in found.attributes
    whole = document("a <title>", html)
    assert whole.startswith("<!DOCTYPE html>") and Page(whole).text.lstrip().startswith("a <title>")


def test_a_hostile_text_is_shown_literally_wherever_it_stands():
    hostile = {
        "question": NASTY, "gold": NASTY,
        "solutions": [{
            "kind": NASTY, "text": f"<think><step>{NASTY}</step></think>{NASTY}", "answer": NASTY,
            "steps": [NASTY],
            "truth": [False], "tokens": [NASTY], "step_ends": [0], "correct": False,
            "verifications": [
                {"text": NASTY, "judgements": [True], "final": True, "analyses": [NASTY], "by": NASTY},
            ],
        }],
    }  # fmt: skip
    html = render_feedback(hostile)
    found = Page(html)
    assert not {"script", "img"} & set(found.tags) and html.isascii()
    assert found.text.count("<script>alert(1)</script><img src=x onerror=alert(2)>[U+202E]desrever") >= 5
    assert "[U+D800] [U+0000] &amp; \"'" in found.text and "\u202e" not in found.text


def test_a_megabyte_is_shown_whole_and_quickly():
    long = "x<" * 500_000
    began = time.perf_counter()
    html = render_feedback(record(solved((long,), judged=[True])))
    assert time.perf_counter() - began < 3 and html.count("x&lt;x&lt;") > 200_000


@pytest.mark.parametrize(
    "bad", [None, 7, "text", [], {}, {"solutions": 3}, {"solutions": [4]}, {"solutions": "ab"}]
)
def test_what_is_no_record_is_said_to_be_none(bad):
    assert "No solution could be read" in Page(render_feedback(bad)).text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["kind", "text", "answer", "correct", "steps", "truth", "tokens", "step_ends", "verifications"]
SAID = st.dictionaries(st.sampled_from(["by", "text", "judgements", "final", "analyses"]), JSON, max_size=5)
SOLUTIONS = st.dictionaries(st.sampled_from(KEYS), JSON | st.lists(SAID, max_size=2), max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(["question", "gold", "solution", "verification"]), JSON, max_size=3),
       st.lists(SOLUTIONS, max_size=3))  # fmt: skip
def test_any_json_gives_a_page_and_numbers(outer, solutions):
    hostile = {**outer, "solutions": solutions} if solutions else outer
    assert Page(render_feedback(hostile)).tags[0] == "style"
    read = read_record(hostile)
    for i, shown in enumerate(read):
        assert len(advantages(read, i).mixed(0.5)) == len(shown.pieces[0])
        assert isinstance([test(shown) for test in FILTERS.values()], list)
    side_by_side({"a": [hostile], "b": [hostile]})


def test_invisible_characters_show_their_number_and_a_cut_says_how_much():
    assert visible("a\u200bb\tc\n") == "a[U+200B]b\tc\n"
    assert literal("<é\ud83d>") == "&lt;&#233;[U+D83D]&gt;"
    assert visible("abcdef", 4) == "abcd … and 2 characters more"


def test_every_verdict_is_a_word_with_a_mark_and_a_tie_decides_nothing():
    assert [Page(verdict(v)).text for v in (True, False, None)] == [
        "\u2713 CORRECT",
        "\u2717 INCORRECT",
        "? not read",
    ]
    assert Page(votes([True, True, False, None])).text == "\u2713 CORRECT 2 : 1, 1 not read"
    assert Page(votes([True, False])).text == "a tie 1 : 1"
    assert Page(votes([None])).text == "? not read 0 : 0, 1 not read"


def test_tokens_carry_their_number_and_negative_ones_a_dashed_line():
    html = tokens(["<step>", "a\n", "b"], [0.5, -0.25, -0.001], "title")
    assert re.findall(r"<small>(.*?)</small>", html) == ["+0.50", "-0.25", "0"]
    assert html.count("tl-neg") == 1 and "&lt;step&gt;" in html


def test_ink_on_every_token_has_enough_contrast():
    def light(c: str) -> float:
        parts = [int(c[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        return sum(
            w * (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4)
            for w, p in zip((0.2126, 0.7152, 0.0722), parts, strict=True)
        )

    html = tokens(["x"] * 201, [i / 100 for i in range(-100, 101)], "all")
    for back, ink in re.findall(r"background:#(\w{6});color:#(\w{3})", html):
        pair = sorted((light(back), light(ink * 2)))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, (back, ink)


def test_verifiers_stand_side_by_side_and_each_has_votes_of_its_own():
    said = [{"text": verification_text(["x"], [judged], judged), "by": by}
            for by, judged in (("weak", False), ("weak", False), ("weak", True), ("strong", True))]  # fmt: skip
    text = Page(render_feedback(record(solved() | {"verifications": said}))).text
    assert "weak says" in text and "strong says" in text
    assert "Votes of 3 verifications by weak" in text and "by strong" not in text
    assert text.count("1 : 2") == 2 and "Verification 3 of 3 by weak" in text


# --- what is read ------------------------------------------------------------------------------------


def test_what_a_record_leaves_out_is_read_from_its_texts():
    (shown,) = read_record(record(solved(("1+1=2", "2+1=3"), judged=[True, False], final=False)))
    assert shown.steps == ["1+1=2", "2+1=3"] and shown.answer == "3" and shown.truth is None
    (said,) = shown.said
    assert said.judgements == [True, False] and said.final is False and said.analyses == ["see 0", "see 1"]


def test_without_tokens_a_text_is_cut_so_that_each_step_ends_at_its_closing_tag():
    (shown,) = read_record(record(solved(("1+1=2", "2+1=3"))))
    pieces, ends = shown.pieces
    assert "".join(pieces) == shown.text and [pieces[end] for end in ends] == ["</step>", "</step>"]
    assert pieces[: ends[0]].count("<step>") == 1


def test_filters_find_what_they_are_named_for():
    fine = solved(judged=[True], final=True, truth=[True])
    said_wrong = solved(judged=[True], final=False, truth=[True])
    false_step = solved(("1+2=4",), "4", judged=[False], final=False, truth=[False])
    disagrees = solved(("1+2=4",), "4", judged=[True], final=True, truth=[False])
    broken = solved(truth=[True]) | {"verifications": [{"text": "nothing to read"}]}
    library = Library([record(s) for s in (fine, said_wrong, false_step, disagrees, broken)])
    assert library.places == {
        "all": [0, 1, 2, 3, 4], "final judgement wrong": [1, 3], "a step is wrong": [2, 3],
        "disagrees with the truth": [3], "verification malformed": [4], "answer wrong": [2, 3],
    }  # fmt: skip
    library.add(0, disagrees)
    assert library.places["disagrees with the truth"] == [0, 3] and len(library[0]) == 2


def test_advantages_are_those_of_a_generator_update():
    rows = [solved(("1+2=3",), "3", judged=[True], kind="sample"),
            solved(("1+1=2", "2+1=4"), "4", judged=[True, False], kind="sample")]  # fmt: skip
    read = read_record(record(solved(judged=[True], kind="greedy"), *rows))
    found = advantages(read, 2)
    assert found.group == 2 and advantages(read, 0).group == 1  # the greedy solution is not of the group
    length = [len(s.pieces[0]) for s in read[1:]]
    mask = torch.arange(max(length))[None] < torch.tensor(length)[:, None]
    pairs = [step_rewards(s.said[0].judgements, s.pieces[1], max(length)) for s in read[1:]]
    reward, where = (torch.stack(part)[:, None] for part in zip(*pairs, strict=True))
    same = torch.zeros(2, dtype=torch.long)
    outcome, step = (
        outcome_advantage(torch.tensor([1.0, 0.0]), same, mask),
        step_advantage(reward, where, same, mask),
    )
    assert found.mixed(0.3) == pytest.approx(mix_advantages(outcome, step, 0.3)[1, : length[1]].tolist())


def test_solutions_that_others_gave_are_no_group():
    given = read_record(record(solved(judged=[True], kind="given"), solved(judged=[False], kind="given")))
    assert [advantages(given, i).group for i in range(2)] == [1, 1]


def test_a_solution_that_was_never_verified_or_graded_has_no_advantage():
    shown = read_record(record({"text": solution_text(["1+2=3"], "3")}))
    found = advantages(shown, 0)
    assert found.group == 1 and not any(found.mixed(0.5))


def test_a_solution_of_a_run_becomes_a_record():
    from tangolite.tango import Solution

    text = solution_text(["1+2=3"], "3")
    solution = Solution(Problem("1+2", "3"), text, ["1+2=3"], [3], True, 1.0)
    found = record_of(
        solution, {"before": [verification_text(["1+2=3"], [False], False)], "after": []}, [True]
    )
    (shown,) = read_record(found)
    assert (shown.question, shown.gold, shown.correct, shown.truth) == ("1+2", "3", True, [True])
    assert [(v.by, v.judgements, v.final) for v in shown.said] == [("before", [False], False)]
    assert FILTERS["disagrees with the truth"](shown) and FILTERS["final judgement wrong"](shown)


def test_checkpoints_meet_at_the_same_solution():
    def said(judged):
        return {"text": "", "judgements": [judged], "final": judged}

    one, other = solved() | {"verifications": [said(True)]}, solved() | {"verifications": [said(False)]}
    (row,) = side_by_side({"before": [record(one)], "after": [record(other, solved(("9",)))]})
    assert [v["by"] for v in row["solutions"][0]["verifications"]] == ["before", "after"]
    assert len(row["solutions"]) == 2


# --- verified again ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def verifier():
    torch.set_num_threads(1)
    return load_policy("tiny-verifier")


CHAIN = ChainArithmetic(modulus=31, steps=3)


@pytest.fixture(scope="module")
def chains():
    draw, rows = random.Random(3), []
    for index in range(4):
        problem = CHAIN.problem(draw)
        steps, answer = CHAIN.flawed(problem, draw, 0.4)
        truth = CHAIN.step_truth(problem, steps)
        said = [{"text": verification_text(["x"] * 3, [True, False, True], final), "by": by}
                for by, final in (("before", True), ("after", False))]  # fmt: skip
        solution = {"kind": "given", "text": solution_text(steps, answer), "truth": truth,
                    "correct": answer == problem.answer, "verifications": said}  # fmt: skip
        rows.append(
            {"index": index, "question": problem.question, "gold": problem.answer, "solutions": [solution]}
        )
    return rows


def test_chunks_give_the_greedy_verification_that_one_call_gives(verifier):
    from tangolite.sampling import sample

    text = solution_text(["1+2=3", "3+4=7", "7-1=6"], "6")
    prompt = verifier.encode(TINY.verifier("1+2+4-1", text, 3))
    whole = verifier.decode(sample(verifier, [prompt], max_new_tokens=80, temperature=0).tokens(0))
    *_, (written, made) = verifications(verifier, "1+2+4-1", text, 3, n=2, temperature=0, most=80)
    assert written == [whole, whole] and made <= 80


def test_it_stops_when_asked_and_never_makes_more_than_asked_for(verifier):
    text, calls = solution_text(["1+2=3"], "3"), iter([False, True])
    found = list(verifications(verifier, "1+2", text, 1, stopped=lambda: next(calls)))
    assert len(found) == 1
    *_, (_, made) = verifications(verifier, "1+2", text, 1, most=5)
    assert made == 5


# --- the widget --------------------------------------------------------------------------------------


@pytest.fixture
def inspector(chains, verifier):
    pytest.importorskip("ipywidgets")
    from tangolite.inspector import VerifierInspector

    return VerifierInspector(chains, policy=verifier, task=CHAIN)


def test_it_is_a_box_of_stock_widgets(inspector):
    import ipywidgets

    assert isinstance(inspector, ipywidgets.VBox)
    stack = [inspector]
    while stack:
        widget = stack.pop()
        stack += getattr(widget, "children", ())
        assert type(widget).__module__.startswith("ipywidgets.") or widget is inspector


def test_two_checkpoints_stand_beside_each_other(inspector):
    shown = Page(inspector.view.value).text
    assert "before says" in shown and "after says" in shown and "before: analysis" in shown


def test_moving_stays_inside_and_a_filter_without_matches_says_so(inspector, chains):
    inspector.back.click()
    assert inspector.record.value == 1
    for _ in range(9):
        inspector.forward.click()
    assert inspector.record.value == 4
    assert chains[3]["question"] in Page(inspector.view.value).text
    inspector.which.value = "verification malformed"
    assert "No record is like that" in inspector.view.value and inspector.forward.disabled
    inspector.which.value = "all"
    assert chains[0]["question"] in Page(inspector.view.value).text and not inspector.forward.disabled


def test_alpha_recomputes_the_mix_at_once(inspector):
    inspector.alpha.value = 0.0
    only_outcome = inspector.strip.value
    inspector.more.click()
    assert inspector.alpha.value == 0.05 and "alpha 0.05" in inspector.strip.value
    inspector.less.click()
    inspector.less.click()
    assert inspector.strip.value == only_outcome
    inspector.colours.value = "step advantage"
    assert "alpha" not in Page(inspector.strip.value).text
    inspector.colours.value = "no colours"
    assert inspector.strip.value == ""


def test_an_edited_solution_is_verified_again_and_its_steps_judged_by_the_task(inspector, chains):
    problem_steps, answer = CHAIN.solve(CHAIN.problem(random.Random(3)))
    inspector.edit.value = solution_text(problem_steps, answer)
    inspector.samples.value = 2
    inspector.verify_again()
    inspector.busy.join(60)
    assert len(inspector.solutions) == 2 and inspector.shown.kind == "edited"
    assert inspector.shown.truth == [True] * 3 and inspector.shown.correct is True
    assert len(inspector.shown.said) == 2 and "2 verifications" in inspector.status.value
    assert len(chains[0]["solutions"]) == 1  # the records are left alone
    assert inspector.stop.disabled and not inspector.verify.disabled


def test_a_text_without_a_step_is_refused_in_words(inspector):
    inspector.edit.value = "no steps here"
    inspector.verify_again()
    assert inspector.busy is None and "between &lt;step&gt; and &lt;/step&gt;" in inspector.status.value


def test_stop_keeps_nothing(inspector):
    go = threading.Event()

    def slowly(*args, stopped, **more):
        go.set()
        while not stopped():
            time.sleep(0.01)
        yield ["half"], 1

    with mock.patch("tangolite.inspector.widget.verifications", slowly):
        inspector.verify_again()
        assert go.wait(10) and not inspector.stop.disabled
        inspector.stop.click()
        inspector.busy.join(10)
    assert len(inspector.solutions) == 1 and "nothing was kept" in inspector.status.value


def test_a_failure_while_verifying_is_shown_and_the_button_comes_back(inspector):
    with mock.patch("tangolite.inspector.widget.verifications", side_effect=RuntimeError("out of <memory>")):
        inspector.verify_again()
        inspector.busy.join(10)
    assert "RuntimeError: out of &lt;memory&gt;" in inspector.status.value and not inspector.verify.disabled


def test_a_file_is_opened_and_a_bad_one_leaves_what_was_shown(inspector, tmp_path, chains):
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    head = json.dumps({"tangolite_records": 1, "settings": {}})
    good.write_text(head + "\n" + json.dumps(chains[2]) + "\n")
    bad.write_text("hello\n")
    inspector.path.value = str(bad)
    inspector.opener.click()
    assert "Not opened" in inspector.status.value and len(inspector.library.records) == 4
    inspector.open_file(str(tmp_path / "gone.jsonl"))
    assert "Not opened" in inspector.status.value
    inspector.open_file(str(good))
    assert len(inspector.library.records) == 1 and chains[2]["question"] in Page(inspector.view.value).text


def test_a_page_is_saved_but_never_over_something_else(inspector, tmp_path, chains):
    target = tmp_path / "page.html"
    for _ in range(2):
        inspector.save_page(str(target))
        assert "Saved" in inspector.status.value
    assert chains[0]["question"] in Page(target.read_text("utf-8")).text
    other = tmp_path / "thesis.html"
    other.write_text("<p>mine</p>")
    inspector.save_page(str(other))
    assert "Not saved" in inspector.status.value and other.read_text() == "<p>mine</p>"
    inspector.save_page(str(tmp_path / "no" / "folder.html"))
    assert "Not saved" in inspector.status.value


def test_ten_thousand_records_are_browsed_without_lag(chains, verifier):
    pytest.importorskip("ipywidgets")
    from tangolite.inspector import VerifierInspector

    inspector = VerifierInspector([{**chains[i % 4], "index": i} for i in range(10_000)], policy=verifier)
    slow = []
    for act in (
        lambda: setattr(inspector.which, "value", "disagrees with the truth"),
        lambda: setattr(inspector.which, "value", "all"),
        lambda: setattr(inspector.record, "value", 9_999),
        inspector.back.click,
        inspector.more.click,
    ):
        times = []
        for _ in range(3):
            began = time.perf_counter()
            act()
            times.append(time.perf_counter() - began)
        slow.append(min(times))
    assert max(slow) < 0.1, slow


def test_hostile_records_go_through_every_control(verifier):
    pytest.importorskip("ipywidgets")
    from tangolite.inspector import VerifierInspector

    said = {"text": NASTY, "by": NASTY, "judgements": [True], "final": None}
    rows = [record(solved((NASTY,), kind=NASTY) | {"verifications": [said, said]}), record(), {"nothing": 1}]
    inspector = VerifierInspector(rows, policy=verifier)
    for _ in range(3):
        inspector.forward.click()
    for name in FILTERS:
        inspector.which.value = name
    state = json.dumps(
        [w.get_state() for w in (inspector.edit, inspector.solution, inspector.said)], default=str
    )
    assert "\\ud800" not in state  # a front end is sent UTF-8
    assert "script" not in Page(inspector.view.value).tags


def test_no_record_and_a_missing_widget_library_are_said_in_words(tmp_path):
    pytest.importorskip("ipywidgets")
    from tangolite.inspector import VerifierInspector

    with pytest.raises(ValueError, match="no record to look at"):
        VerifierInspector([])
    code = (
        "import sys; sys.modules['ipywidgets'] = None\n"
        "from tangolite.inspector import render_feedback\nrender_feedback({})\n"
        "try:\n    from tangolite.inspector import VerifierInspector\n"
        "except ImportError as error:\n    print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "tangolite[notebooks]" in said.stdout, said


def test_shown_is_lazy_enough_not_to_read_what_is_not_looked_at():
    with mock.patch("tangolite.inspector.reading.split_steps", side_effect=AssertionError):
        shown = Shown({"text": "x" * 10, "steps": ["a"], "truth": [True]}, 0, "q", None)
        assert shown.truth == [True]
