r"""Reading what the two players wrote: steps, answers, judgements, format scores, step ends in token ids.

Every parser is total: any string gives a result or None, nothing raises, time is linear in the length. None
means "could not be read", never "incorrect". The form of the texts is that of Tango (arXiv 2505.15034,
section 3):

    solution      <think><step>..</step> .. </think><answer>\boxed{..}</answer>
    verification  <step_verification><step>.. \boxed{CORRECT}</step> .. </step_verification>
                  <final_verification>\boxed{CORRECT}</final_verification>

Tags are read exactly, in lower case; judgement words in any case.
"""

from __future__ import annotations

import re
import string
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

_REGION_TAG = re.compile(r"</?(?:think|answer)>")
_STEP_TAG = re.compile(r"</?step>")
_STEP_CLOSE = "</step>"
_BOX = r"\\\\?(?:boxed|fbox|box)(?![A-Za-z])"  # some models double the backslash
_BOX_OR_BRACE = re.compile(rf"(?P<box>{_BOX})(?P<brace>\s*\{{)?|\\.|[{{}}]", re.DOTALL)
_BOX_OPENING = re.compile(rf"\s*{_BOX}\s*\{{")
_JUDGEMENT_BOX = re.compile(r"\\box(?:ed)?\s*\{(.*)\}", re.DOTALL)
_ANY_BOX = re.compile(r"\\box(?:ed)?\s*\{[^{}]*\}")
_TEXT_MACRO = re.compile(r"\\text\s*\{(.*)\}", re.DOTALL)
_PADDING = string.whitespace + ".$"  # what may stand around a judgement without changing it
_JUDGEMENTS = {"correct": True, "incorrect": False}
_DECODE_OPTIONS = (
    {"skip_special_tokens": False, "clean_up_tokenization_spaces": False},
    {"skip_special_tokens": False},
)
_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character


class Step(NamedTuple):
    """One step of a text: `text[start:end]`, the content between `<step>` and `</step>`."""

    start: int
    end: int
    text: str


class Verification(NamedTuple):
    """One judgement per step (True is CORRECT) and the final one; None where they could not be read."""

    judgements: list[bool] | None
    final: bool | None


class _Regions(NamedTuple):
    """Character spans of a solution: every thinking block, and every answer block that is not inside one."""

    thinking: list[tuple[int, int]]
    answers: list[tuple[int, int]]
    answer_closed: bool  # whether the last answer block has its closing tag


def split_steps(text: str) -> list[Step]:
    """Steps of a solution, in order, as character spans of their content.

    Only steps in a thinking block before the answer count; if there is no thinking block, all steps before
    `<answer>`. A thinking block that never closes ends at `<answer>`, else at the end of the text; a
    `</think>` on its own closes one that began with the text (the prompt may have ended in `<think>`).
    A step is an opening tag and a closing tag with no step tag between them. So one that never closes is no
    step, of nested ones only the innermost is, and a stray closing tag is nothing.
    """
    regions = _regions(text)
    limit = regions.answers[-1][0] - len("<answer>") if regions.answers else len(text)
    spans = [(start, end) for start, end in regions.thinking if start < limit] or [(0, limit)]
    return [step for start, end in spans for step in _step_blocks(text, start, end)]


def extract_answer(text: str) -> str | None:
    r"""Content of the last box of the answer, or None: `So \boxed{\frac{1}{2}}.` gives `\frac{1}{2}`.

    The answer is the last `<answer>` block outside the thinking block; without one, all that follows the last
    thinking block, or the last step, or (with neither) the whole text. A box is `\boxed{..}`, `\fbox{..}` or
    `\box{..}` with balanced braces; of nested boxes the outermost counts. No box, an empty one, or a last one
    that is cut off gives None, never an earlier box. Pass the completion alone, without its prompt.
    """
    regions = _regions(text)
    if regions.answers:
        start, end = regions.answers[-1]
        return _last_box(text[start:end])
    return _last_box(text[_reasoning_end(text, regions.thinking) :])


def parse_verification(text: str, n_steps: int) -> Verification:
    r"""Judgements of a verification of a solution of `n_steps` steps.

    A block's judgement is the `\boxed{CORRECT}` or `\boxed{INCORRECT}` that closes it; blanks, `$`, `\text{}`
    and full stops around it are ignored, and `\box` stands for `\boxed`. `judgements` is None unless the one
    `<step_verification>` holds exactly `n_steps` (> 0) steps, each judged: with one missing, it is open which
    step the others belong to. `final` is None unless there is exactly one `<final_verification>`, and not as
    a quotation inside the step verification.
    """
    body, final = _only_block(text, "step_verification"), _only_block(text, "final_verification")
    judgements = [_closing_judgement(step.text) for step in _step_blocks(text, *body)] if body else []
    readable = len(judgements) == n_steps > 0 and None not in judgements
    quoted = body is not None and final is not None and body[0] <= final[0] < body[1]
    verdict = None if final is None or quoted else _closing_judgement(text[final[0] : final[1]])
    return Verification(judgements if readable else None, verdict)


def read_analyses(text: str) -> list[str]:
    """What a verification says about each step, without the judgement that closes it."""
    body = text.partition("<step_verification>")[2].partition("</step_verification>")[0]
    return [_before_judgement(step.text).strip() for step in split_steps(body)]


def _before_judgement(block: str) -> str:
    shown = block.rstrip(_PADDING)
    start = shown.rfind("\\box")
    closes = start >= 0 and _ANY_BOX.fullmatch(shown, start)
    return shown[:start].rstrip(_PADDING) if closes else block


def generator_format_score(text: str) -> float:
    r"""Format of a solution, in [0, 1], by the deductions of Tango's released scorer.

    0 without a closed `<answer>`. Else 1, less 0.8 if its content is not `\boxed{..}` from end to end, less
    0.8 if there is no step or 0.4 if there are one or two; never under 0. The steps are those of
    `split_steps` and the answer is the one of `extract_answer` (the released scorer takes steps anywhere and
    the first answer).
    """
    regions = _regions(text)
    if not regions.answers or not regions.answer_closed:
        return 0.0
    start, end = regions.answers[-1]
    answer = text[start:end].strip()
    boxed = answer.startswith(r"\boxed{") and answer.endswith("}") and _last_box(answer) is not None
    n_steps = len(split_steps(text))
    score = 1.0 if boxed else 1.0 - 0.8
    score -= 0.8 if n_steps == 0 else 0.4 if n_steps < 3 else 0.0
    return max(score, 0.0)


def verifier_format_score(text: str, n_steps: int, generator_format: float = 1.0) -> float:
    """Format of a verification of `n_steps` steps, in [0, 1], by the deductions of Tango's released scorer.

    0 unless the text is one `<step_verification>`, one `<final_verification>` and otherwise blank. Else 1,
    less 0.8 without a final judgement, less 0.8 without steps or without exactly `n_steps` judged steps, less
    0.4 for text between the steps; never under 0. Judgements are those of `parse_verification`.

    Quirk kept from the released scorer: where `generator_format` (the solution's own score) is under 0.6, a
    wrong number of judgements costs nothing as long as there is a step.
    """
    body, final = _only_block(text, "step_verification"), _only_block(text, "final_verification")
    if body is None or final is None or not _holds_nothing_else(text, body, final):
        return 0.0
    judgements, verdict = parse_verification(text, n_steps)
    steps = list(_step_blocks(text, *body))
    score = 1.0 if verdict is not None else 1.0 - 0.8
    if not steps or (generator_format >= 0.6 and judgements is None):
        score -= 0.8
    if _text_between(text, steps, *body):
        score -= 0.4
    return max(score, 0.0)


def step_end_positions(token_ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Index of the token that completes each step, on the sampled ids (nothing is tokenised again).

    token_ids: (T,) ids of one completion, a list or a tensor. tokenizer: anything with `decode(ids)`.
    Returns one index per step of `split_steps(text)`, in that order, where `text` is the ids decoded with
    special tokens kept; count steps on that text everywhere else too. It is the token holding the `>` of
    `</step>`, whatever else it holds; a token that completes two steps appears twice. Ids after the end of
    sequence are read like any others: pass the completion cut to its length.
    """
    ids = token_ids.tolist() if hasattr(token_ids, "tolist") else [int(i) for i in token_ids]
    text = _decode(tokenizer, ids) if ids else ""
    ends = [step.end + len(_STEP_CLOSE) for step in split_steps(text)]
    return _token_indices(ends, text, ids, tokenizer) if ends else []


def _regions(text: str) -> _Regions:
    """One pass over the think and answer tags; see `split_steps` for how missing tags are read."""
    thinking: list[tuple[int, int]] = []
    answers: list[tuple[int, int]] = []
    last_close = text.rfind("</think>")
    inside = "think" if _opened_by_prompt(text) else ""
    start = 0
    for tag in _REGION_TAG.finditer(text):
        name = tag[0]
        # An answer named in a thinking block is only talk, unless that block never closes.
        if inside == "think" and (name == "</think>" or (name == "<answer>" and tag.start() > last_close)):
            thinking.append((start, tag.start()))
            inside = ""
        elif inside == "answer" and name == "</answer>":
            answers.append((start, tag.start()))
            inside = ""
        if name == "<answer>" and inside != "think":
            inside, start = "answer", tag.end()
        elif name == "<think>" and not inside:
            inside, start = "think", tag.end()
    if inside:
        (thinking if inside == "think" else answers).append((start, len(text)))
    return _Regions(thinking, answers, answer_closed=inside != "answer")


def _opened_by_prompt(text: str) -> bool:
    """Whether `</think>` comes before any `<think>`."""
    close = text.find("</think>")
    return close >= 0 and text.find("<think>", 0, close) < 0


def _step_blocks(text: str, start: int, end: int) -> Iterator[Step]:
    """Steps between two characters: an opening tag whose next step tag is a closing one."""
    opened = -1
    for tag in _STEP_TAG.finditer(text, start, end):
        if tag[0] != _STEP_CLOSE:
            opened = tag.end()
        elif opened >= 0:
            yield Step(opened, tag.start(), text[opened : tag.start()])
            opened = -1


def _reasoning_end(text: str, thinking: list[tuple[int, int]]) -> int:
    """Where the reasoning of a text without an answer block ends: at its end, if it stops inside a step."""
    if thinking:
        return thinking[-1][1]
    last_open, last_close = text.rfind("<step>"), text.rfind(_STEP_CLOSE)
    return len(text) if last_open > last_close else max(last_close, 0)


def _last_box(text: str) -> str | None:
    """Content of the last box, the outermost one where boxes nest; None if absent, empty or cut off."""
    open_braces: list[int | None] = []  # where the content of an open box starts, None for a plain brace
    closed: list[tuple[int, int]] = []
    latest = None  # content start of the box that began last
    for token in _BOX_OR_BRACE.finditer(text):
        if token["box"]:
            latest = token.end() if token["brace"] else None
            if token["brace"]:
                open_braces.append(latest)
        elif token[0] == "{":
            open_braces.append(None)
        elif token[0] == "}" and open_braces and (start := open_braces.pop()) is not None:
            closed.append((start, token.start()))
    if latest not in dict(closed):
        return None
    start, end = _unwrap(text, closed)
    return text[start:end].strip() or None


def _unwrap(text: str, closed: list[tuple[int, int]]) -> tuple[int, int]:
    r"""The last closed box, or the box that is all of its content: `\boxed{\boxed{5}}` is 5."""
    start, end = closed.pop()
    while closed:
        inner_start, inner_end = closed.pop()
        if not _BOX_OPENING.fullmatch(text, start, inner_start) or text[inner_end + 1 : end].strip():
            break
        start, end = inner_start, inner_end
    return start, end


def _closing_judgement(block: str) -> bool | None:
    """The judgement that ends a block, or None: the one reader for labels and for format."""
    block = block.rstrip(_PADDING)
    box = _JUDGEMENT_BOX.fullmatch(block, max(block.rfind(r"\box"), 0))
    if box is None:
        return None
    word = box[1].strip(_PADDING)
    if macro := _TEXT_MACRO.fullmatch(word):
        word = macro[1].strip(_PADDING)
    return _JUDGEMENTS.get(word.lower())


def _only_block(text: str, name: str) -> tuple[int, int] | None:
    """Span of the content of the only `<name>` block; None if it is missing, cut off or not the only one."""
    opening, closing = f"<{name}>", f"</{name}>"
    if text.count(opening) != 1 or text.count(closing) != 1:
        return None
    start, end = text.find(opening) + len(opening), text.find(closing)
    return (start, end) if start <= end else None


def _holds_nothing_else(text: str, body: tuple[int, int], final: tuple[int, int]) -> bool:
    """Whether a verification is its two blocks in order with only blanks around them."""
    before = text[: body[0] - len("<step_verification>")]
    between = text[body[1] + len("</step_verification>") : final[0] - len("<final_verification>")]
    after = text[final[1] + len("</final_verification>") :]
    return not (before + between + after).strip()


def _text_between(text: str, steps: list[Step], start: int, end: int) -> str:
    """What a block holds outside its steps, blanks stripped."""
    starts = [start, *(step.end + len(_STEP_CLOSE) for step in steps)]
    ends = [*(step.start - len("<step>") for step in steps), end]
    return "".join(text[a:b] for a, b in zip(starts, ends, strict=True)).strip()


def thinking_end(token_ids: Sequence[int], tokenizer: Any) -> int | None:
    """Index of the token that completes the first `</think>`, None where there is none (CoVRL's trace)."""
    ids = token_ids.tolist() if hasattr(token_ids, "tolist") else [int(i) for i in token_ids]
    text = _decode(tokenizer, ids) if ids else ""
    place = text.find("</think>")
    return None if place < 0 else _token_indices([place + len("</think>")], text, ids, tokenizer)[0]


def _decode(tokenizer: Any, ids: list[int]) -> str:
    """Text of ids with special tokens kept and nothing tidied up, where the tokenizer knows such options."""
    for options in _DECODE_OPTIONS:
        try:
            return tokenizer.decode(ids, **options)
        except TypeError:
            continue
    return tokenizer.decode(ids)


def _token_indices(ends: list[int], text: str, ids: list[int], tokenizer: Any) -> list[int]:
    """For each character count in `ends`, the index of the token that completes `text[:count]`."""
    chunks = _chunks(ids, tokenizer)
    # A token's text alone is never longer than its share of the whole (decoders may drop a leading space): if
    # the chunks make up the text, each is in its place. If not, the whole is one chunk.
    if "".join(chunk for _, chunk in chunks) != text:
        chunks = [(ids, text)]
    chunk_ends = list(accumulate(len(chunk) for _, chunk in chunks))
    first_token = list(accumulate((len(run) for run, _ in chunks), initial=0))
    indices = []
    for end in ends:
        i = bisect_left(chunk_ends, end)
        run, chunk = chunks[i]
        target = chunk[: len(chunk) - (chunk_ends[i] - end)]
        indices.append(first_token[i] + _completing(run, target, tokenizer))
    return indices


def _chunks(ids: list[int], tokenizer: Any) -> list[tuple[list[int], str]]:
    """Runs of ids with their texts: a token alone where it holds whole characters, else with all its like.

    A byte-level token may hold part of a character that only its neighbours complete: they are decoded
    together.
    """
    own_text = _own_texts(tokenizer)
    runs: list[tuple[list[int], str]] = []
    for i in ids:
        piece = own_text[i] if i in own_text else own_text.setdefault(i, _decode(tokenizer, [i]))
        if _REPLACEMENT in piece and runs and _REPLACEMENT in runs[-1][1]:
            runs[-1][0].append(i)
        else:
            runs.append(([i], piece))
    return [(run, _decode(tokenizer, run) if len(run) > 1 else piece) for run, piece in runs]


def _completing(run: list[int], target: str, tokenizer: Any) -> int:
    """Index of the token with which the text of `run`, which begins with `target`, first does so.

    Bisection on decoded prefixes: `target` ends in `>`, and no later byte changes the text up to an ASCII
    character.
    """

    def complete(i: int) -> bool:
        return _decode(tokenizer, run[: i + 1]).startswith(target)

    return bisect_left(range(len(run) - 1), True, key=complete)


@lru_cache(maxsize=8)
def _cache(tokenizer: Any) -> dict[int, str]:
    return {}


def _own_texts(tokenizer: Any) -> dict[int, str]:
    """Texts of the ids seen so far, each decoded alone, which is slow. A stale entry costs only time."""
    try:
        return _cache(tokenizer)
    except TypeError:  # not hashable
        return {}
