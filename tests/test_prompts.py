"""Prompts: they ask for what the parsers read, reach chat models through their template, and never disagree
with the grader."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tangolite.grading import answers_match
from tangolite.models import tiny_policy
from tangolite.parsing import (
    Verification,
    extract_answer,
    generator_format_score,
    parse_verification,
    split_steps,
    verifier_format_score,
)
from tangolite.prompts import CHAT, TINY, judgement, solution_text, verification_text
from tangolite.tasks import ChainArithmetic, LastLetters, problems

BRACES = "What is {x} in \\boxed{y}, {question}?"  # a question is data, not a template
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}:{{ message['content'] }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


def character_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """One token per character, so that what a prompt became can be read back exactly."""
    letters = [chr(i) for i in range(32, 127)] + ["\n"]
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(["?!", *letters])}, unk_token="?!"))
    core.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="?!", chat_template=template)


def readable(tokenizer, ids: list[int]) -> str:
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def test_the_generators_prompt_asks_for_the_tags_that_are_parsed():
    prompt = CHAT.generator(BRACES)
    for piece in ("<think>", "</think>", "<step>", "</step>", "<answer>\\boxed{...}</answer>", BRACES):
        assert piece in prompt


def test_the_verifiers_prompt_asks_for_every_judgement_and_shows_the_solution():
    solution = solution_text(["1+1=2", "{2}+1=3"], "3")
    prompt = CHAT.verifier(BRACES, solution, 2)
    for piece in (
        "<step_verification>", "</step_verification>", "<final_verification>", "</final_verification>",
        judgement(True) + "</step>", judgement(False) + "</step>", "2 steps", BRACES, solution,
        f"<final_verification>{judgement(True)}</final_verification>",
        f"<final_verification>{judgement(False)}</final_verification>",
    ):  # fmt: skip
        assert piece in prompt


def test_only_the_posterior_is_shown_the_reference():
    prior, posterior = CHAT.prior(BRACES), CHAT.posterior(BRACES, "forty-two")
    for prompt in (prior, posterior):
        for piece in ("<think>", "</think>", "<answer>...</answer>", BRACES):
            assert piece in prompt
    assert "forty-two" in posterior and "forty-two" not in prior


@pytest.mark.parametrize("prompts", [CHAT, TINY])
def test_no_placeholder_is_left_over(prompts):
    made = [
        prompts.generator("Q"), prompts.verifier("Q", "S", 3),
        prompts.prior("Q"), prompts.posterior("Q", "R"),
    ]  # fmt: skip
    for text in made:
        assert not any(f"{{{name}}}" in text for name in ("question", "solution", "n_steps", "reference"))
        assert "{{" not in text and "}}" not in text
    assert len(set(made)) == 4


def test_a_chat_prompt_goes_through_the_template_once_as_one_user_message():
    tokenizer = character_tokenizer(TEMPLATE)
    ids = CHAT.encode(tokenizer, CHAT.generator("1+1?"))
    assert isinstance(ids, list) and all(isinstance(i, int) for i in ids)
    expected = f"<|im_start|>user:{CHAT.generator('1+1?')}<|im_end|><|im_start|>assistant:"
    assert readable(tokenizer, ids) == expected


def test_a_model_without_a_template_reads_the_plain_text():
    tokenizer = character_tokenizer(None)
    assert readable(tokenizer, CHAT.encode(tokenizer, "Hello 1+1")) == "Hello 1+1"


def test_a_tiny_prompt_is_the_bare_question_between_role_tokens():
    tokenizer = tiny_policy().tokenizer
    ids = TINY.encode(tokenizer, TINY.verifier("1+1", "<think></think>", 0))
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<|verifier|>", "1", "+", "1", "<|end|>", "<think>", "</think>", "<|end|>",
    ]  # fmt: skip
    template = character_tokenizer(TEMPLATE)
    assert "im_start" not in readable(template, TINY.encode(template, "1+1"))


@pytest.mark.parametrize("task", [ChainArithmetic(), LastLetters()], ids=["chain", "letters"])
def test_the_gold_put_through_the_answer_format_is_graded_right_and_another_answer_wrong(task):
    asked = problems(task, 20, "self-test")
    for problem, other in zip(asked, asked[1:] + asked[:1], strict=True):
        steps, answer = task.solve(problem)
        text = solution_text(steps, answer)
        assert answers_match(extract_answer(text), problem.answer)
        assert answers_match(extract_answer(text), other.answer) == (answer == other.answer)
        assert [step.text for step in split_steps(text)] == steps


@pytest.mark.parametrize("gold", ["42", "1,234", "\\frac{1}{2}", "True", "-3.5", "B", "(1, 2)"])
def test_golds_of_other_data_sets_survive_the_answer_format(gold):
    text = solution_text(["a", "b", "c"], gold)
    assert extract_answer(text) == gold
    assert answers_match(extract_answer(text), gold) and not answers_match(extract_answer(text), "77")
    assert generator_format_score(text) == 1.0


@pytest.mark.parametrize("verdicts", [[True], [False, True, True], [True, True, False, False]])
@pytest.mark.parametrize("final", [True, False])
def test_a_written_verification_is_read_back_as_it_was_meant(verdicts, final):
    text = verification_text([f"step {k}" for k in range(len(verdicts))], verdicts, final)
    assert parse_verification(text, len(verdicts)) == Verification(verdicts, final)
    assert verifier_format_score(text, len(verdicts)) == 1.0


def test_a_verification_needs_one_analysis_per_verdict():
    with pytest.raises(ValueError, match="zip"):
        verification_text(["a"], [True, False], True)
