"""What the four parts are asked: generator, verifier, prior and posterior.

A real chat model gets the instructions below as one user message.  The built-in tiny models know a few
dozen words, so theirs are the bare question between role tokens; everything after the prompt (tags,
boxes, parsers, rewards) is the same for both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

GENERATOR = """Solve the problem step by step. Put your reasoning inside <think> and </think>, every single \
step inside its own <step> and </step>, and then give only the final answer as \
<answer>\\boxed{{...}}</answer>.

Problem: {question}"""

VERIFIER = """Below are a problem and a proposed \
solution made of {n_steps} steps. Check every step on its own: \
does it follow from the problem and the steps before it, and is it right? Work it out yourself before you \
judge.
Write <step_verification>, then for each of the {n_steps} steps, in order, \
<step>your analysis \\boxed{{CORRECT}}</step> or <step>your analysis \\boxed{{INCORRECT}}</step>, then \
</step_verification>. Last, judge the final answer: <final_verification>\\boxed{{CORRECT}}\
</final_verification> or <final_verification>\\boxed{{INCORRECT}}</final_verification>.

Problem: {question}

Solution:
{solution}"""

PRIOR = """Think about the question inside <think> and </think>, then give only the answer as \
<answer>...</answer>.

Question: {question}"""

POSTERIOR = """You are given a question and its reference answer. Write, inside <think> and </think>, \
the reasoning that leads from the question to this answer, as if you had not been told it, then give the \
answer as <answer>...</answer>.

Question: {question}

Reference answer: {reference}"""


@dataclass(frozen=True)
class Prompts:
    """Four functions from texts to a prompt's text, and how that text becomes token ids."""

    generator: Callable[[str], str]
    verifier: Callable[[str, str, int], str]  # question, solution, number of steps
    prior: Callable[[str], str]
    posterior: Callable[[str, str], str]  # question, reference
    chat: bool

    def encode(self, tokenizer, text: str) -> list[int]:
        """Token ids of a prompt: through the chat template where the model has one."""
        if not self.chat or tokenizer.chat_template is None:
            return tokenizer.encode(text, add_special_tokens=self.chat)
        message = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])


CHAT = Prompts(
    generator=lambda question: GENERATOR.format(question=question),
    verifier=lambda question, solution, n_steps: VERIFIER.format(
        question=question, solution=solution, n_steps=n_steps
    ),
    prior=lambda question: PRIOR.format(question=question),
    posterior=lambda question, reference: POSTERIOR.format(question=question, reference=reference),
    chat=True,
)

TINY = Prompts(
    generator=lambda question: f"<|generator|>{question}<|end|>",
    verifier=lambda question, solution, n_steps: f"<|verifier|>{question}<|end|>{solution}<|end|>",
    prior=lambda question: f"<|prior|>{question}<|end|>",
    posterior=lambda question, reference: f"<|posterior|>{question}<|end|>{reference}<|end|>",
    chat=False,
)


def solution_text(steps: list[str], answer: str) -> str:
    """A generator's completion in the tags of Tango (Sec. 3)."""
    return f"<think>{''.join(f'<step>{s}</step>' for s in steps)}</think><answer>\\boxed{{{answer}}}</answer>"


def verification_text(analyses: list[str], verdicts: list[bool], final: bool) -> str:
    """A verifier's completion: one analysis and judgement per step, then the final judgement."""
    judged = "".join(
        f"<step>{text}{judgement(verdict)}</step>" for text, verdict in zip(analyses, verdicts, strict=True)
    )
    return (
        f"<step_verification>{judged}</step_verification>"
        f"<final_verification>{judgement(final)}</final_verification>"
    )


def judgement(verdict: bool) -> str:
    return "\\boxed{CORRECT}" if verdict else "\\boxed{INCORRECT}"
