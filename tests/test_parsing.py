r"""Texts to steps, answers, judgements and format scores."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tangolite.parsing import (
    extract_answer,
    generator_format_score,
    parse_verification,
    split_steps,
    verifier_format_score,
)

GOLDEN = json.loads((Path(__file__).parent / "golden" / "format_reward.json").read_text(encoding="utf-8"))
FRAGMENTS = [
    *("<think>", "</think>", "<step>", "</step>", "<answer>", "</answer>", "<step_verification>"),
    *(
        "</step_verification>",
        "<final_verification>",
        "</final_verification>",
        r"\boxed{",
        r"\fbox{",
        r"\box",
    ),
    *(
        r"\boxed{CORRECT}",
        r"\boxed{INCORRECT}",
        "{",
        "}",
        "\\",
        " ",
        "\n",
        "$",
        ".",
        "\0",
        "\ud800",
        "é",
        "5",
    ),
]
texts = st.lists(st.sampled_from(FRAGMENTS) | st.text(st.characters(), max_size=3), max_size=25).map("".join)


def contents(text: str) -> list[str]:
    return [step.text for step in split_steps(text)]


C = r"\boxed{CORRECT}"


def verification(*blocks: str, final: str = r"\boxed{CORRECT}") -> str:
    steps = "\n".join(f"<step>{block}</step>" for block in blocks)
    steps = f"<step_verification>\n{steps}\n</step_verification>"
    return f"{steps}\n<final_verification>{final}</final_verification>"


# Steps


def test_steps_are_character_spans_of_their_content():
    text = "<think>\n<step>x = 2</step>\n<step> so 4 </step>\n</think>\n<answer>\\boxed{4}</answer>"
    steps = split_steps(text)
    assert [(s.start, s.end) for s in steps] == [(14, 19), (33, 39)]
    assert [s.text for s in steps] == ["x = 2", " so 4 "] == [text[s.start : s.end] for s in steps]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"<think><step>a</step></think><answer>\boxed{1}</answer><step>b</step>", ["a"]),
        (r"<step>0</step><think><step>a</step></think><step>b</step><answer>\boxed{1}</answer>", ["a"]),
        (r"<think><step>a</step></think><answer>1</answer><think><step>b</step></think>", ["a"]),
        (r"<step>a</step><answer>\boxed{1}</answer><step>b</step>", ["a"]),
        ("<think><step>a</step></think><think><step>b</step></think>", ["a", "b"]),
    ],
)
def test_steps_outside_the_thinking_block_or_after_the_answer_do_not_count(text, expected):
    assert contents(text) == expected


def test_without_a_thinking_block_all_steps_before_the_answer_count():
    assert contents("<step>a</step> and <step>b</step><answer>x</answer>") == ["a", "b"]
    assert contents("<step>a</step>") == ["a"]


def test_a_thinking_block_that_never_closes_ends_at_the_answer_or_at_the_end():
    assert contents("<step>0</step><think><step>a</step><answer>1</answer><step>b</step>") == ["a"]
    assert contents("<step>0</step><think><step>a</step> cut") == ["a"]


def test_a_thinking_block_opened_by_the_prompt_begins_with_the_text():
    text = r"<step>a \boxed{3}</step></think><answer>\boxed{4}</answer><step>b</step>"
    assert (contents(text), extract_answer(text)) == (["a \\boxed{3}"], "4")
    assert contents("<step>a</step></think><step>b</step><answer>4</answer>") == ["a"]
    assert extract_answer(r"a \boxed{3}</think>") is None
    assert extract_answer(r"say <answer>\boxed{3}</answer></think>") is None


def test_a_second_opening_tag_changes_nothing():
    assert contents("<think><step>a</step><think><step>b</step></think><step>c</step>") == ["a", "b"]
    assert extract_answer(r"<answer>\boxed{4}<think></answer> or \boxed{3}") == "4"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think><step>never closed</think>", []),
        ("<think><step>crosses</think></step>", []),
        ("<think></step>stray<step>a</step></step></think>", ["a"]),
        ("<think><step>never closed <step>a</step></think>", ["a"]),
        ("<think><step>outer <step>a</step> outer</step></think>", ["a"]),
        ("<think><STEP>a</STEP>< step>b</ step></think>", []),
        ("<think><step></step></think>", [""]),
    ],
)
def test_malformed_steps_never_count(text, expected):
    assert contents(text) == expected


# Answers


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"So \boxed{\frac{2}{3+\sqrt{5}}}.", r"\frac{2}{3+\sqrt{5}}"),
        (r"\boxed{12} … I dropped a carry, so \boxed{15}", "15"),
        (r"\fbox{\frac{7}{4}}", r"\frac{7}{4}"),
        (r"\box{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"\\boxed{\\frac{1}{2}}", r"\\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ x \right.} and }", r"\left\{ x \right."),
        (r"in {1, 2 we find \boxed{7}", "7"),
        (r"\boxed{ 7" + "\n}", "7"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{2 + \fbox{7}}", r"2 + \fbox{7}"),
        (r"\boxed{3} then \boxed{2 \fbox{7}}", r"2 \fbox{7}"),
        (r"an open \boxed{ before \boxed{7}", "7"),
        (r"\boxedness \boxed{7} \boxes", "7"),
    ],
)
def test_the_answer_is_the_whole_content_of_the_last_box(text, answer):
    assert extract_answer(text) == answer
    assert extract_answer(f"<think>{text}</think><answer>{text}</answer>") == answer


@pytest.mark.parametrize(
    "text",
    [
        r"try \boxed{8}. Rechecking, the result is \boxed{9",
        r"try \boxed{8}. Rechecking, the result is \boxed{\frac{9}{2}",
        r"try \boxed{8}. Rechecking, the result is \boxed",
        r"<answer>\boxed{8</answer>}",
        r"\boxed{8} \boxed{}",
        r"\boxed{ }",
        "Final Answer: **73**",
        "I think 7 is it",
        r"<answer>\boxed{}</answer> 7",
        r"<answer>7</answer> \boxed{7}",
        "boxed{7}",
        "",
    ],
)
def test_no_box_an_empty_box_or_a_last_box_cut_off_is_no_answer(text):
    assert extract_answer(text) is None


@pytest.mark.parametrize("cut", range(len(r"\frac{9}{2}") + 1))
def test_a_last_box_cut_anywhere_never_falls_back_to_an_earlier_one(cut):
    text = r"<think></think>\boxed{8} or \boxed{"
    assert extract_answer(text + r"\frac{9}{2}"[:cut]) is None
    assert extract_answer(text + r"\frac{9}{2}}") == r"\frac{9}{2}"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"<think><step>maybe \boxed{3}</step></think><answer>\boxed{4}</answer>", "4"),
        (r"<think>I shall write <answer>\boxed{3}</answer></think><answer>\boxed{4}</answer>", "4"),
        (r"<think>I shall write <answer>\boxed{3}</answer></think>", None),
        (r"<think>a \boxed{3}</think>", None),
        (r"<think>a</think> \boxed{4} <think>or \boxed{3}</think>", None),
        (r"<think>cut off at \boxed{3}", None),
        (r"<step>maybe \boxed{3}</step>", None),
        (r"<step>cut off at \boxed{3}", None),
        (r"<think>\boxed{3}</think> so \boxed{4}", "4"),
        (r"<step>maybe \boxed{3}</step> so \boxed{4}", "4"),
        (r"<think>\boxed{3}<answer>\boxed{4}</answer>", "4"),
        (r"<answer>\boxed{4}</answer> or rather \boxed{3}", "4"),
        (r"<answer>\boxed{4}</answer> <think>or <answer>\boxed{3}</answer></think>", "4"),
        (r"<answer>\boxed{3}</answer> wait <answer>\boxed{4}</answer>", "4"),
        (r"<answer>\boxed{3}</answer> wait <answer>\boxed{4", None),
        (r"<think>a</think><answer>\boxed{4}", "4"),
    ],
)
def test_only_the_answer_region_is_read(text, answer):
    assert extract_answer(text) == answer


balanced = st.recursive(
    st.text("ab1 +,", max_size=4), lambda inner: st.tuples(inner, inner).map("{0[0]}{{{0[1]}}}".format)
)


@given(balanced, balanced)
def test_any_balanced_content_comes_back_from_its_box(content, around):
    assert extract_answer(f"{around}\\boxed{{{content}}}{around}") == (content.strip() or None)


# Judgements


def test_incorrect_is_not_read_as_correct():
    text = verification(r"\boxed{INCORRECT}", r"\boxed{CORRECT}", final=r"\boxed{INCORRECT}")
    assert parse_verification(text, 2) == ([False, True], False)


@pytest.mark.parametrize("reply", ["", "all fine", r"\boxed{CORRECT}", "<final_verification>", "CORRECT"])
def test_an_empty_or_unknown_reply_is_none_and_never_a_pass(reply):
    assert parse_verification(reply, 1) == (None, None)


@pytest.mark.parametrize("word", ["", "NOT CORRECT", "CORRECT?", "MAYBE", "CORRECTINCORRECT", r"\textbf{NO}"])
def test_another_word_in_the_box_is_no_judgement(word):
    text = verification(rf"\boxed{{{word}}}", final=rf"\boxed{{{word}}}")
    assert parse_verification(text, 1) == (None, None)


def test_the_judgement_is_the_one_that_closes_the_block():
    block = r"Looks CORRECT, \boxed{CORRECT}? No: 3·4=12, not 14. \boxed{INCORRECT}"
    assert parse_verification(verification(block, final=block), 1) == ([False], False)


def test_a_judgement_followed_by_text_is_none_and_blocks_are_never_merged():
    text = verification(r"\boxed{CORRECT} because it is fine", r"x \boxed{INCORRECT}")
    assert [parse_verification(text, n).judgements for n in (1, 2)] == [None, None]
    assert parse_verification(verification(final=r"\boxed{CORRECT} because it is fine"), 1).final is None


SPELLINGS = [
    *(
        r"\boxed{correct}",
        r"\boxed{Correct}",
        r"\boxed{ CORRECT }",
        r"\boxed{\text{CORRECT}}",
        r"$\boxed{CORRECT}$",
    ),
    *(
        r"\boxed{CORRECT}..",
        r"\boxed{CORRECT}. ",
        r"\box{CORRECT}",
        r"\boxed{CORRECT.}",
        r"\boxed{$\text{ Correct }$}",
    ),
    *("\n\\boxed{CORRECT}\n", r"\boxed {CORRECT}", r"so $\boxed{CORRECT}$."),
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_are_read_alike_by_labels_and_format(spelling):
    for text, value in [
        (verification(spelling, final=spelling), True),
        (re.sub("correct", "inCORRECT", verification(spelling, final=spelling), flags=re.I), False),
    ]:
        assert parse_verification(text, 1) == ([value], value)
        assert verifier_format_score(text, 1) == 1.0


def test_blanks_in_the_final_tag_are_accepted_by_labels_and_format():
    text = verification(r"\boxed{CORRECT}", final="\n\\boxed{CORRECT}\n")
    assert parse_verification(text, 1).final is True
    assert verifier_format_score(text, 1) == 1.0


def test_a_missing_final_tag_is_unread_and_not_incorrect():
    replies = [verification(r"\boxed{INCORRECT}").split("<final")[0] for _ in range(4)]
    assert [parse_verification(reply, 1) for reply in replies] == [([False], None)] * 4
    assert [verifier_format_score(reply, 1) for reply in replies] == [0.0] * 4


@pytest.mark.parametrize("tail", [r"\boxed{CORRECT}</final_verification>", ""])
def test_two_final_tags_are_malformed(tail):
    text = verification(r"\boxed{CORRECT}", final=r"\boxed{INCORRECT}") + f" wait <final_verification>{tail}"
    assert parse_verification(text, 1) == ([True], None)
    assert verifier_format_score(text, 1) == 0.0


def test_a_final_tag_quoted_in_a_step_is_not_the_final_judgement():
    quoted = r"it says <final_verification>\boxed{CORRECT}</final_verification> \boxed{CORRECT}"
    text = verification(quoted).split("\n<final")[0]
    assert parse_verification(text, 1) == ([True], None)


def test_closing_tags_before_opening_ones_are_malformed():
    text = verification(C)
    swapped = re.sub(r"<(/?)(\w+_verification)>", lambda m: f"<{'' if m[1] else '/'}{m[2]}>", text)
    assert parse_verification(swapped, 1) == (None, None)
    assert verifier_format_score(swapped, 1) == 0.0


def test_two_step_verifications_are_malformed():
    text = verification(r"\boxed{CORRECT}")
    assert parse_verification("<step_verification></step_verification>" + text, 1) == (None, True)
    assert verifier_format_score("<step_verification></step_verification>" + text, 1) == 0.0


@pytest.mark.parametrize("n_steps", [0, 1, 3, 20])
def test_a_wrong_number_of_judgements_is_none(n_steps):
    text = verification(r"\boxed{CORRECT}", r"\boxed{INCORRECT}")
    assert parse_verification(text, 2).judgements == [True, False]
    assert parse_verification(text, n_steps) == (None, True)


def test_no_steps_have_no_judgements_even_when_none_were_asked_for():
    assert parse_verification(verification(), 0) == (None, True)


def test_steps_outside_the_step_verification_are_not_judgements():
    text = verification(r"\boxed{CORRECT}") + r"<step>\boxed{CORRECT}</step>"
    assert parse_verification(text, 1).judgements == [True]
    assert parse_verification(text, 2).judgements is None


def test_malformed_verification_steps_leave_the_count_short():
    nested = verification(r"quoting <step>x</step> \boxed{CORRECT}")
    unclosed = verification(r"\boxed{CORRECT}", r"\boxed{CORRECT}").replace("</step>", "", 1)
    assert parse_verification(nested, 1).judgements is None
    assert parse_verification(unclosed, 2).judgements is None


# Format scores


@pytest.mark.parametrize("case", GOLDEN["generator"])
def test_generator_format_agrees_with_the_released_scorer(case):
    assert generator_format_score(case["text"]) == pytest.approx(case["score"], abs=1e-12)


@pytest.mark.parametrize("case", GOLDEN["verifier"])
def test_verifier_format_agrees_with_the_released_scorer(case):
    score = verifier_format_score(case["text"], case["generator_steps"], case["generator_format"])
    assert score == pytest.approx(case["score"], abs=1e-12)


@pytest.mark.parametrize(
    ("n_steps", "answer", "score"),
    [
        (3, r"<answer>\boxed{5}</answer>", 1.0),
        (2, r"<answer>\boxed{5}</answer>", 0.6),
        (0, r"<answer>\boxed{5}</answer>", 0.2),
        (3, r"<answer>so \boxed{5}</answer>", 0.2),
        (3, r"<answer>\boxed{5}.</answer>", 0.2),
        (3, r"<answer>\boxed{}</answer>", 0.2),
        (3, r"<answer>\boxed{5 \{1}</answer>", 1.0),
        (3, r"<answer>\boxed{\frac{5}{2}</answer>", 0.2),
        (3, r"<answer>\fbox{5}</answer>", 0.2),
        (2, r"<answer>5</answer>", 0.0),
        (3, r"<answer>\boxed{5}", 0.0),
        (3, r"\boxed{5}", 0.0),
    ],
)
def test_generator_format_deductions(n_steps, answer, score):
    text = "<think>" + "<step>a</step>" * n_steps + "</think>" + answer
    assert generator_format_score(text) == pytest.approx(score, abs=1e-12)


def test_steps_outside_the_thinking_block_do_not_buy_format():
    text = r"<think><step>a</step></think><answer>\boxed{1}</answer><step>b</step><step>c</step>"
    assert generator_format_score(text) == pytest.approx(0.6)


def test_an_answer_named_in_the_thinking_block_does_not_buy_format():
    assert generator_format_score(r"<think><step>a</step><answer>\boxed{1}</answer></think>") == 0.0


@pytest.mark.parametrize(
    ("text", "n_steps", "score"),
    [
        (verification(C, C), 3, 0.2),
        (verification(C, "CORRECT"), 2, 0.2),
        (verification(C, "CORRECT"), 1, 0.2),
        (verification(C, C, final="CORRECT"), 2, 0.2),
        (verification(C, C, final="CORRECT"), 3, 0.0),
        (verification(C, C).replace("</step>\n", "</step> and "), 2, 0.6),
        (verification(C, C).replace("</step>\n", "</step></step>"), 2, 0.6),
        ("  \n" + verification(C, C) + "\n", 2, 1.0),
        ("Here: " + verification(C, C), 2, 0.0),
        (verification(C, C).replace("\n<final", " so <final"), 2, 0.0),
        (verification(C, C).replace("</step_verification>", ""), 2, 0.0),
        (verification(), 0, 0.2),
    ],
)
def test_verifier_format_deductions(text, n_steps, score):
    assert verifier_format_score(text, n_steps) == pytest.approx(score, abs=1e-12)


def test_final_before_the_steps_is_malformed():
    text = "<final_verification>\\boxed{CORRECT}</final_verification><step_verification></step_verification>"
    assert verifier_format_score(text, 0, 0.0) == 0.0


@pytest.mark.parametrize(
    ("generator_format", "score"), [(0.0, 1.0), (0.59, 1.0), (1.0 - 0.4, 0.2), (1.0, 0.2)]
)
def test_a_wrong_count_costs_nothing_under_a_badly_formed_solution(generator_format, score):
    text = verification(C, C)
    assert verifier_format_score(text, 3, generator_format) == pytest.approx(score)


# Totality


@settings(max_examples=300, deadline=None)
@given(texts, st.integers(-1, 4), st.floats(0, 1))
def test_any_text_gives_a_result(text, n_steps, generator_format):
    end = 0
    for step in split_steps(text):
        assert text[step.start : step.end] == step.text and "<step>" not in step.text
        assert text[: step.start].endswith("<step>") and text[step.end :].startswith("</step>")
        assert end <= step.start <= step.end
        end = step.end
    answer = extract_answer(text)
    assert answer is None or (answer.strip() == answer != "" and answer in text)
    judgements, final = parse_verification(text, n_steps)
    assert judgements is None or len(judgements) == n_steps
    assert final in (True, False, None)
    assert 0 <= generator_format_score(text) <= 1
    assert 0 <= verifier_format_score(text, n_steps, generator_format) <= 1


@settings(max_examples=300, deadline=None)
@given(texts)
def test_full_format_means_that_everything_can_be_read(text):
    solution = f"<think>{text}</think><answer>{text}</answer>"
    if generator_format_score(solution) == 1.0:
        assert extract_answer(solution) is not None and len(split_steps(solution)) >= 3
    reply = verification(text, final=text)
    if verifier_format_score(reply, 1) == 1.0:
        assert None not in parse_verification(reply, 1)


@given(st.lists(st.sampled_from(["<step>", "</step>", "a"]), max_size=12).map("".join))
def test_the_number_of_steps_and_their_ends_are_those_of_the_shortest_match(text):
    naive = [match.end() for match in re.finditer(r"<step>.*?</step>", text, re.DOTALL)]
    assert [step.end + len("</step>") for step in split_steps(text)] == naive


MB = 10**6
HOSTILE = {
    "opening tags": "<step>" * (MB // 6),
    "closing tags": "</step>" * (MB // 7),
    "steps": "<step></step>" * (MB // 13),
    "thinking": "<think>" * (MB // 7),
    "thinking and answers": "<think><answer>" * (MB // 15),
    "answers": "<answer></answer>" * (MB // 17),
    "open boxes": "\\boxed{" * (MB // 7),
    "nested boxes": "\\boxed{" * (MB // 8) + "}" * (MB // 8),
    "boxes without braces": "\\boxed    " * (MB // 10),
    "a box and blanks": "\\boxed" + " " * MB,
    "backslashes": "\\" * MB,
    "braces": "{" * MB,
    "angle brackets": "<" * MB,
    "surrogates and NULs": "\0\ud800" * (MB // 2),
    "full stops": verification("\\boxed{CORRECT}" + ". " * (MB // 2) + "x"),
    "many judgements": verification(*[C] * (MB // 29)),
    "nested macros": verification("\\boxed{" + "\\text{" * (MB // 7) + "}" * (MB // 7) + "}"),
    "blank judgement": verification(final="\\boxed{" + " " * MB + "}"),
    "final tags": "<final_verification></final_verification>" * (MB // 41),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_megabyte_takes_linear_time(text):
    start = time.process_time()
    split_steps(text), extract_answer(text), generator_format_score(text)
    parse_verification(text, 3), verifier_format_score(text, 3)
    assert time.process_time() - start < 2.0


def test_a_megabyte_of_judgements_is_read_in_full():
    assert parse_verification(HOSTILE["many judgements"], MB // 29).judgements == [True] * (MB // 29)
