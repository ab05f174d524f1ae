"""Evaluations kept as records: files that survive kills, what a record holds, scores against plain loops."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tangolite.covrl import CoVRL, CoVRLConfig
from tangolite.evaluate import bootstrap, processbench_f1
from tangolite.lab import evaluation, records
from tangolite.lab.eval_source import eval_source
from tangolite.lab.evaluation import Plan, evaluate_problems, evaluate_processbench, given_solution
from tangolite.lab.records import fill, open_records
from tangolite.lab.scores import (
    METRICS,
    balanced,
    harmonic,
    scored,
    scores,
    scores_by_source,
    share,
    sizes,
    table,
    won,
)
from tangolite.models import load_policy
from tangolite.parsing import read_analyses
from tangolite.prompts import CHAT, TINY, verification_text
from tangolite.records import read_records, read_settings
from tangolite.rollouts import Rollouts, pad_left, pad_right
from tangolite.sources import JudgedSolution
from tangolite.tango import Tango, TangoConfig, solve
from tangolite.tango import balanced as balanced_of_lists
from tangolite.tasks import ChainArithmetic, problems
from tangolite.training import Interrupted
from tangolite.updates import seeded

DATA = Path(__file__).parent / "data" / "sources"
CHAIN = ChainArithmetic(modulus=2, steps=1, operands=(0, 1))
PLAN = Plan(
    samples=4, max_new_tokens=20, verifier_max_new_tokens=20, verifier_temperature=1.0, questions=3
)  # fmt: skip


def record(index: int, **more) -> dict:
    return {"index": index, "source": "s", "question": f"q{index}", "gold": "1", "solutions": []} | more


# --- the file ----------------------------------------------------------------------------------------


def test_a_file_of_records_goes_on_under_the_same_settings(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.jsonl"
    file = open_records(path, {"seed": 0, "sizes": (1, 2)})
    file.add([record(1), record(0)])
    assert read_records(path) == [record(0), record(1)] and read_settings(path) == {
        "seed": 0,
        "sizes": [1, 2],
    }
    again = open_records(path, {"seed": 0, "sizes": (1, 2)})
    assert again.done == {0: record(0), 1: record(1)}
    again.add([record(2, question="\u2028 \ud800 <b>")])
    assert [r["index"] for r in read_records(path)] == [0, 1, 2]
    assert len(path.read_text("ascii").splitlines()) == 4


def test_a_file_made_with_other_settings_is_refused_in_words_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    open_records(path, {"temperature": 1.0, "samples": 4, "gone": 1}).add([record(0)])
    before = path.read_bytes()
    with pytest.raises(ValueError) as caught:
        open_records(path, {"temperature": 0.7, "samples": 4, "new": 2})
    said = str(caught.value)
    assert "temperature: there 1.0, asked for 0.7" in said and "samples" not in said
    assert "gone: there 1, asked for None" in said and "new: there None, asked for 2" in said
    assert path.read_bytes() == before


def test_a_last_line_that_a_kill_cut_off_anywhere_is_repaired(tmp_path: Path, capsys) -> None:
    whole = tmp_path / "whole.jsonl"
    open_records(whole, {"seed": 0}).add([record(0), record(1)])
    content = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == 10]
    for cut in range(len(content) + 1):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(content[:cut])
        if cut >= ends[0]:
            assert (
                len(read_records(path)) == sum(end <= cut for end in ends) - 1
            )  # readable before the repair
        file = open_records(path, {"seed": 0})
        assert list(file.done) == list(range(max(0, sum(end <= cut for end in ends) - 1)))
        file.add([record(i) for i in range(2) if i not in file.done])
        assert path.read_bytes() == content
        assert ("cut off and will be made again" in capsys.readouterr().err) == (
            cut > ends[0] and cut not in ends
        )


@pytest.mark.parametrize(
    "content", [b"notes of mine", b"notes\nof mine\n", b'{"question": "x", "answer": 1}\n', b"[1]\n", b"\n"]
)
def test_a_file_of_something_else_is_refused_and_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"notes\.jsonl.* no(t a)? file of records"):
        open_records(path, {"seed": 0})
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "line", [b'{"index": 0, "solu', b"5", b"{}", b'{"index": "0", "solutions": []}', b"\xff"]
)
def test_a_line_damaged_in_the_middle_is_named(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    open_records(path, {"seed": 0})
    path.write_bytes(path.read_bytes() + line + b"\n")
    open_later = lambda: open_records(path, {"seed": 0})  # noqa: E731
    for use in (open_later, lambda: read_records(path)):
        with pytest.raises(ValueError, match=r"a\.jsonl, line 2"):
            use()


def test_a_full_disk_is_one_message_and_what_was_written_stays(tmp_path: Path, monkeypatch) -> None:
    file = open_records(tmp_path / "a.jsonl", {"seed": 0})
    file.add([record(0)])

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(records.os, "fsync", full)
    with pytest.raises(
        ValueError, match=r"a\.jsonl could not be written \(No space left.*same command again"
    ):
        file.add([record(1)])
    assert 1 not in file.done and read_records(file.path)[0] == record(0)


def test_every_record_is_on_the_disk_before_the_next_block_begins(tmp_path: Path, monkeypatch) -> None:
    path, order, fsync = tmp_path / "a.jsonl", [], records.os.fsync
    file = open_records(path, {"seed": 0})
    monkeypatch.setattr(records.os, "fsync", lambda handle: order.append("sync") or fsync(handle))
    make = lambda block: order.append(list(block)) or [record(i) for i in block]  # noqa: E731
    assert fill(file, 5, 2, make) == [record(i) for i in range(5)]
    assert order == [[0, 1], "sync", [2, 3], "sync", [4], "sync"]


def test_a_block_that_was_written_in_part_is_made_whole_and_only_what_is_missing_is_written(tmp_path) -> None:
    file = open_records(tmp_path / "a.jsonl", {"seed": 0})
    file.add([record(0), record(1), record(2, kept=True)])
    asked = []
    found = fill(file, 6, 2, lambda block: asked.append(list(block)) or [record(i) for i in block])
    assert asked == [[2, 3], [4, 5]] and found[2]["kept"]
    assert len(read_records(file.path)) == 6
    assert fill(file, 4, 2, lambda block: pytest.fail("nothing is missing")) == found[:4]


def test_progress_says_how_much_is_there_and_the_time_left(tmp_path: Path, capsys) -> None:
    file = open_records(tmp_path / "a.jsonl", {"seed": 0})
    file.add([record(0)])
    fill(file, 3, 1, lambda block: [record(i) for i in block])
    assert capsys.readouterr().err.splitlines()[-1] == "3/3 problems, 0 s left"


# --- what policies write -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def players(starts):
    return load_policy(starts / "generator"), load_policy(starts / "verifier")


@pytest.fixture(scope="module")
def asked():
    return problems(CHAIN, 8, "records")


def evaluated(path: Path, asked, players, plan: Plan = PLAN, **more) -> list[dict]:
    options = {"plan": plan, "prompts": TINY, "source": "chain", "task": CHAIN} | more
    return evaluate_problems(path, asked, *players, **options)


@pytest.fixture(scope="module")
def whole(players, asked, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("records") / "whole.jsonl"
    evaluated(path, asked, players)
    return path


def test_a_record_holds_what_was_asked_written_and_judged(whole: Path, asked, players) -> None:
    found = read_records(whole)
    assert [(r["index"], r["question"], r["gold"]) for r in found] == [
        (i, p.question, p.answer) for i, p in enumerate(asked)
    ]
    solutions = [(p, s) for p, r in zip(asked, found, strict=True) for s in r["solutions"]]
    assert [s["kind"] for s in found[0]["solutions"]] == ["greedy", *["sample"] * 4]
    assert len({s["correct"] for _, s in solutions}) == 2  # else nothing would be tried below
    for problem, s in solutions:
        assert s["correct"] == (s["status"] == "match") == (s["answer"] == problem.answer)
        assert s["answer"] is None or f"\\boxed{{{s['answer']}}}" in s["text"]
        assert s["truth"] == CHAIN.step_truth(problem, s["steps"])
        assert s["label"] == next((k for k, true in enumerate(s["truth"]) if not true), -1)
        [v] = s["verifications"]
        assert v["judgements"] is None or len(v["judgements"]) == len(s["steps"]) == len(v["analyses"])
        if v["judgements"] is not None:
            assert all(text in v["text"] for text in v["analyses"])
    finals = {v["final"] for _, s in solutions for v in s["verifications"]}
    assert {True, False} <= finals


def test_the_greedy_solution_is_that_of_greedy_decoding(whole: Path, asked, players) -> None:
    settings = {"task": {"kind": "chain", "modulus": 2, "steps": 1, "operands": [0, 1]}, "max_new_tokens": 20}
    run = Tango(TangoConfig(**settings), *(replace(p) for p in players))
    _, expected = solve(run, asked, 1, seeded(0), temperature=0.0)
    greedy = [r["solutions"][0] for r in read_records(whole)]
    assert [s["text"] for s in greedy] == [s.text for s in expected]
    assert [s["correct"] for s in greedy] == [s.correct for s in expected]


def test_tokens_are_kept_where_asked_with_the_ends_of_the_steps(asked, players, tmp_path: Path) -> None:
    found = evaluated(tmp_path / "a.jsonl", asked[:3], players, replace(PLAN, tokens=True))
    for s in (s for r in found for s in r["solutions"]):
        assert "".join(s["tokens"]).removesuffix("<|eos|>") == s["text"]
        assert [s["tokens"][end] for end in s["step_ends"]] == ["</step>"] * len(s["steps"])
    assert "tokens" not in evaluated(tmp_path / "b.jsonl", asked[:1], players)[0]["solutions"][0]


@pytest.mark.parametrize("calls", [0, 2, 4, 7])
def test_an_interrupted_evaluation_goes_on_to_the_same_bytes(
    calls, whole, asked, players, tmp_path, monkeypatch
):
    path, drawn, sample = tmp_path / "a.jsonl", [], evaluation.sample

    def interrupted(*arguments, **options):
        if len(drawn) == calls:
            raise KeyboardInterrupt
        drawn.append(None)
        return sample(*arguments, **options)

    monkeypatch.setattr(evaluation, "sample", interrupted)
    with pytest.raises(Interrupted, match=rf"stopped: {calls // 3 * 3} of 8 problems are in .*a\.jsonl"):
        evaluated(path, asked, players)
    assert len(read_records(path)) == calls // 3 * 3
    monkeypatch.setattr(evaluation, "sample", lambda *a, **o: drawn.append(None) or sample(*a, **o))
    evaluated(path, asked, players)
    assert path.read_bytes() == whole.read_bytes()
    assert len(drawn) == 9 + calls % 3  # only the block in hand was lost


def test_an_evaluation_killed_within_a_line_goes_on_to_the_same_bytes(
    whole, asked, players, tmp_path
) -> None:
    content, path = whole.read_bytes(), tmp_path / "a.jsonl"
    lines = content.splitlines(keepends=True)
    path.write_bytes(
        b"".join(lines[:3]) + lines[3][:40]
    )  # two records of the first block of three, and a bit
    evaluated(path, asked, players)
    assert path.read_bytes() == content


def test_every_block_draws_its_own_numbers(players, asked, tmp_path) -> None:
    found = evaluated(tmp_path / "a.jsonl", [asked[0]] * 6, players)
    blocks = [[s["text"] for r in block for s in r["solutions"]] for block in (found[:3], found[3:])]
    assert blocks[0] != blocks[1]


def test_a_finished_file_is_only_read(whole, asked, players, monkeypatch) -> None:
    monkeypatch.setattr(evaluation, "sample", lambda *_, **__: pytest.fail("nothing is missing"))
    assert evaluated(whole, asked, players) == read_records(whole)
    assert evaluated(whole, asked[:2], players) == read_records(whole)[:2]


def test_more_problems_are_added_to_what_is_there(whole, asked, players, tmp_path) -> None:
    path = tmp_path / "a.jsonl"
    evaluated(path, asked[:3], players)
    assert evaluated(path, asked, players) == read_records(whole)  # blocks are the same, so the draws are


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"plan": replace(PLAN, seed=1)}, "seed: there 0, asked for 1"),
        ({"plan": replace(PLAN, temperature=0.5)}, "temperature"),
        ({"source": "gsm8k"}, "source: there 'chain', asked for 'gsm8k'"),
        ({"prompts": replace(TINY, verifier=lambda q, s, n: f"<|verifier|>{s}")}, "prompts"),
    ],
)
def test_other_settings_are_refused(change: dict, named: str, whole, asked, players) -> None:
    with pytest.raises(ValueError, match=f"other settings.*\n  {named}"):
        evaluated(whole, asked, players, **change)


def test_other_weights_and_other_problems_are_refused(whole, asked, players) -> None:
    generator, verifier = players
    for others in ((verifier, verifier), (generator, generator), (generator,)):
        with pytest.raises(ValueError, match="other settings"):
            evaluated(whole, asked, others)
    other = [asked[0], replace(asked[1], answer="7"), *asked[2:]]
    with pytest.raises(ValueError, match=r"whole\.jsonl holds other problems than these: record 1"):
        evaluated(whole, other, players)


def test_a_generator_alone_and_a_prior_are_evaluated_without_a_verifier(players, starts, tmp_path) -> None:
    asked = problems(CHAIN, 4, "prior")
    found = evaluated(tmp_path / "a.jsonl", asked, players[:1], Plan(max_new_tokens=20))
    assert all(s["verifications"] == [] for r in found for s in r["solutions"])
    assert set(scores(found)) == {"accuracy", "answered", "truncated", "step_truth"}
    policy, plan = load_policy(starts / "policy"), Plan(part="prior", samples=2, max_new_tokens=20)
    found = evaluated(tmp_path / "b.jsonl", asked, (policy,), plan)
    for s in (s for r in found for s in r["solutions"]):
        assert s["answer"] is None or f"<answer>{s['answer']}</answer>" in s["text"]
    assert any(s["answer"] is not None for r in found for s in r["solutions"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"part": "posterior"}, "part must be generator or prior"),
        ({"samples": -1}, "samples must be at least 0"),
        ({"questions": 0}, "questions"),
        ({"verifications": 2}, "verifier_temperature above 0"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**change)


def test_several_verifications_belong_to_their_solution(players, tmp_path, monkeypatch) -> None:
    said = [verdict(True, True, True), verdict(False, True, True), verdict(True, False, True), "unread"]
    scripted(monkeypatch, players[1], said, n=2)
    plan = replace(PLAN, verifications=2)
    given = [judged(0, -1), judged(1, 1)]
    found = evaluate_processbench(tmp_path / "a.jsonl", given, players[1], plan=plan, prompts=TINY)
    read = [[v["judgements"] for v in r["solutions"][0]["verifications"]] for r in found]
    assert read == [[[True, True, True], [False, True, True]], [[True, False, True], None]]
    assert scores(found)["first_error_f1"].mean == 0.5


def test_equal_answers_vote_together_whatever_their_spelling() -> None:
    samples = [{"answer": a} for a in ("3", None, "0.5", "\\frac{1}{2}", "3.0", "1/2", None, "x")]
    evaluation._add_votes(samples)
    assert [s["vote"] for s in samples] == [0, None, 2, 2, 0, 2, None, 7]


def test_analyses_leave_the_judgement_out() -> None:
    text = verification_text(["2+2=4;4", "said \\boxed{CORRECT} before "], [True, False], False)
    assert read_analyses(text) == ["2+2=4;4", "said \\boxed{CORRECT} before"]
    loose = text.replace("\\boxed{CORRECT}</step>", "$\\box{ CORRECT }$.</step>")
    assert read_analyses("<step>outside</step>" + loose) == ["2+2=4;4", "said \\boxed{CORRECT} before"]
    assert read_analyses("nothing") == read_analyses("") == []


# --- ProcessBench ------------------------------------------------------------------------------------


def judged(number: int, label: int, split: str = "gsm8k", n: int = 3) -> JudgedSolution:
    steps = (*(f"step {k}" for k in range(n - 1)), "so \\boxed{7}.")
    return JudgedSolution(f"{split}-{number}", split, f"q{number}?", steps, label, label == -1)


def scripted(monkeypatch, verifier, texts: list[str], n: int = 1) -> list[str]:
    """The verifier writes these texts in turn; returns the prompts that it was shown, ``n`` times each."""
    shown: list[str] = []
    wanted = n

    def sample(policy, prompts, *, n, max_new_tokens, temperature, generator):
        assert policy is verifier and n == wanted and (temperature == 0.0) == (n == 1)
        prompts = [prompt for prompt in prompts for _ in range(n)]
        ids = [[*policy.encode(texts[len(shown) + i]), policy.eos_ids[0]] for i in range(len(prompts))]
        shown.extend(policy.tokenizer.decode(p, skip_special_tokens=False) for p in prompts)
        (prompt_ids, prompt_length), (completion, length) = pad_left(prompts, 0), pad_right(ids, 0)
        ended = torch.ones(len(ids), dtype=torch.bool)
        return Rollouts(prompt_ids, prompt_length, completion, length, ended, torch.arange(len(ids)))

    monkeypatch.setattr(evaluation, "sample", sample)
    return shown


def verdict(*steps: bool) -> str:
    return verification_text(["so"] * len(steps), list(steps), all(steps))


def test_processbench_is_scored_by_the_first_step_judged_wrong_per_split(
    players, tmp_path, monkeypatch
) -> None:
    given = [judged(0, -1), judged(1, 1), judged(2, 2), judged(3, -1),
             judged(0, 0, "math"), judged(1, -1, "math")]  # fmt: skip
    said = [verdict(True, True, True), verdict(True, False, False), verdict(False, True, False), "unread",
            verdict(False, True, True), verdict(True, True, True)]  # fmt: skip
    shown = scripted(monkeypatch, players[1], said)
    path = tmp_path / "a.jsonl"
    plan = replace(PLAN, questions=4, verifier_temperature=0.0)
    found = evaluate_processbench(path, given, players[1], plan=plan, prompts=TINY)
    by_source = scores_by_source(found)
    gsm8k, math_ = by_source["processbench/gsm8k"], by_source["processbench/math"]
    assert gsm8k["error_found"].mean == 0.5 and gsm8k["error_free"].mean == 0.5
    assert gsm8k["first_error_f1"].mean == 0.5 and math_["first_error_f1"].mean == 1.0
    assert by_source["mean of the sets"]["first_error_f1"].mean == 0.75
    assert gsm8k["final_accuracy"].mean == 0.75 and gsm8k["step_parsed"].mean == 0.75
    assert "accuracy" not in gsm8k and "step_balanced" not in gsm8k
    assert found == read_records(path) and [r["id"] for r in found][3:5] == ["gsm8k-3", "math-0"]
    assert len(shown) == 6 and "so \\boxed{7}.</step></think><answer>\\boxed{7}</answer>" in shown[0]
    scripted(monkeypatch, players[1], [])
    assert evaluate_processbench(path, given, players[1], plan=plan, prompts=TINY) == found
    with pytest.raises(ValueError, match="holds other problems"):
        evaluate_processbench(path, given[1:], players[1], plan=plan, prompts=TINY)


def test_given_steps_without_a_boxed_answer_are_shown_without_an_answer() -> None:
    bare = given_solution(replace(judged(0, 1), steps=("one", "two")))
    assert bare["text"] == "<think><step>one</step><step>two</step></think>"
    assert bare["answer"] is None and bare["correct"] is False and bare["label"] == 1
    assert given_solution(judged(0, -1))["answer"] == "7"


# --- scores ------------------------------------------------------------------------------------------


def solution(kind: str, correct: bool, vote: int | None = 0, **more) -> dict:
    answer = None if vote is None else f"a{vote}"
    return {"kind": kind, "text": "", "answer": answer, "status": "match" if correct else "differ",
            "correct": correct, "vote": vote, "truncated": False, "steps": [], "truth": None, "label": None,
            "verifications": []} | more  # fmt: skip


def sampled(index: int, pattern: str, **more) -> dict:
    """`R` a right sample, `a`-`z` wrong answers, `-` none."""
    rows = [solution("sample", c == "R", None if c == "-" else pattern.index(c)) for c in pattern]
    return record(index, solutions=rows, **more)


def test_pass_at_k_and_majority_are_means_over_problems() -> None:
    found = scores([sampled(0, "RRab"), sampled(1, "aaRR"), sampled(2, "----"), sampled(3, "abRa")])
    assert list(found) == ["pass@1", "pass@2", "pass@4", "maj@2", "maj@4", "answered", "truncated"]
    assert found["pass@1"].mean == pytest.approx((2 + 2 + 0 + 1) / 16)
    assert found["pass@2"].mean == pytest.approx((5 / 6 + 5 / 6 + 0 + 1 / 2) / 4)  # 1 - C(4-c, 2) / C(4, 2)
    assert found["pass@4"].mean == pytest.approx(3 / 4)
    assert found["maj@4"].mean == pytest.approx(1 / 4)  # RRab; a comes first in aaRR; a wins abRa
    assert found["maj@2"].mean == pytest.approx(
        (1 / 2 + 1 / 2 + 0 + 1 / 2) / 4
    )  # RR ab | aa RR | -- -- | ab Ra
    assert found["answered"].mean == pytest.approx(12 / 16) and found["truncated"].mean == 0
    assert scores([sampled(0, "RaaaR")])["maj@2"].mean == 0.5  # Ra aa; the fifth is not in a whole block


def test_a_vote_is_won_by_the_most_frequent_answer_and_silence_has_none() -> None:
    def rows(p):
        return sampled(0, p)["solutions"]

    assert won(rows("aRR")) and won(rows("Rab")) and won(rows("--R")) and won(rows("---RaR"))
    assert not won(rows("aRb")) and not won(rows("--")) and not won(rows("aaR")) and not won([])


def test_sizes_double_up_to_n() -> None:
    assert [sizes(n) for n in (0, 1, 2, 5, 8)] == [[], [1], [1, 2], [1, 2, 4, 5], [1, 2, 4, 8]]


def random_records(rng: random.Random, count: int = 30) -> list[dict]:
    found = []
    for index in range(count):
        rows = []
        for _ in range(rng.randint(1, 4)):
            truth = [rng.random() < 0.7 for _ in range(3)]
            judged = None if rng.random() < 0.2 else [t == (rng.random() < 0.8) for t in truth]
            final = rng.choice([True, False, None])
            verification = {"text": "", "judgements": judged, "final": final, "analyses": []}
            label = next((k for k, t in enumerate(truth) if not t), -1)
            rows.append(
                solution("greedy", all(truth), truth=truth, label=label, verifications=[verification])
            )
        found.append(record(index, solutions=rows))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_scores_of_a_verifier_agree_with_the_plain_functions(seed: int) -> None:
    made = random_records(random.Random(seed))
    found = scores(made)
    pairs = [(s, v) for r in made for s in r["solutions"] for v in s["verifications"]]
    finals, correct = [v["final"] for _, v in pairs], [s["correct"] for s, _ in pairs]
    assert found["final_balanced"].mean == pytest.approx(balanced_of_lists(finals, correct))
    assert found["final_accuracy"].mean == pytest.approx(
        np.mean([f == c for f, c in zip(finals, correct, strict=True)])
    )
    assert found["final_parsed"].mean == pytest.approx(np.mean([f is not None for f in finals]))
    steps = [p for s, v in pairs if v["judgements"] for p in zip(v["judgements"], s["truth"], strict=True)]
    assert found["step_balanced"].mean == pytest.approx(balanced_of_lists(*zip(*steps, strict=True)))
    first = [None if v["judgements"] is None else (v["judgements"] + [False]).index(False) for _, v in pairs]
    predicted = [-1 if k == 3 else k for k in first]
    assert found["first_error_f1"].mean == pytest.approx(
        processbench_f1(predicted, [s["label"] for s, _ in pairs])
    )
    for name, (mean, low, high) in found.items():
        assert low <= mean <= high and (low < high or name in ("answered", "truncated")), name


def test_the_interval_of_a_mean_is_that_of_the_plain_bootstrap() -> None:
    rng = random.Random(0)
    values = [float(rng.random() < 0.3) for _ in range(60)]
    found, plain = scored([(v, 1) for v in values], share, draws=8000).interval(), bootstrap(values)
    assert found.mean == pytest.approx(plain.mean)
    assert found.low == pytest.approx(plain.low, abs=0.02) and found.high == pytest.approx(
        plain.high, abs=0.02
    )
    assert (
        scored([(v, 1) for v in values], share).interval()
        == scored([(v, 1) for v in values], share).interval()
    )


def test_solutions_of_one_problem_are_drawn_together() -> None:
    """Ten copies of a problem's solution say no more than one."""
    values = [1.0] * 10 + [0.0] * 10
    once = scored([(v, 1) for v in values], share).interval()
    copied = scored([(10 * v, 10) for v in values], share).interval()
    assert copied == once and once.high - once.low > 0.3


def test_statistics_of_two_kinds_where_one_is_missing_or_both_are_zero() -> None:
    assert balanced(np.array([3.0, 4, 1, 4])) == 0.5 and harmonic(np.array([3.0, 4, 1, 4])) == 0.375
    with np.errstate(invalid="ignore"):
        assert balanced(np.array([3.0, 4, 0, 0])) == balanced(np.array([0.0, 0, 3, 4])) == 0.75
        assert harmonic(np.array([0.0, 4, 0, 4])) == 0.0
        assert math.isnan(harmonic(np.array([3.0, 4, 0, 0])))
    only = [record(0, solutions=[solution("given", True, label=-1, verifications=[
        {"text": "", "judgements": [True], "final": True, "analyses": []}])])]  # fmt: skip
    found = scores(only)["first_error_f1"]
    assert all(map(math.isnan, found)) and scores(only)["error_free"].mean == 1.0


def test_timeouts_of_the_grader_are_shown_where_there_are_any() -> None:
    rows = [solution("greedy", True), solution("sample", False, status="timeout")]
    assert scores([record(0, solutions=rows)])["undecided"].mean == 0.5
    assert "undecided" not in scores([record(0, solutions=rows[:1])])


def test_every_score_has_a_sentence_and_every_sentence_a_score(whole: Path) -> None:
    found = scores(read_records(whole))
    rows = [solution("greedy", False, status="timeout")]
    assert {name.partition("@")[0] for name in {**found, **scores([record(0, solutions=rows)])}} == set(
        METRICS
    )
    lines = table(found).splitlines()
    assert len(lines) == len(found) and all(METRICS[n.partition("@")[0]] in line
                                            for n, line in zip(found, lines, strict=True))  # fmt: skip
    with pytest.raises(ValueError, match="no records"):
        scores([])


# --- a run on a data set -----------------------------------------------------------------------------


@pytest.fixture
def runs(starts):
    task = {"kind": "chain", "modulus": 2, "steps": 1, "operands": [0, 1]}
    names = {"generator": str(starts / "generator"), "verifier": str(starts / "verifier")}
    tango = TangoConfig(task=task, max_new_tokens=20, verifier_max_new_tokens=20, **names)
    return Tango(tango), CoVRL(CoVRLConfig(task=task, policy=str(starts / "policy"), max_new_tokens=20))


def test_a_run_is_evaluated_on_its_held_out_problems_and_on_a_set(runs, tmp_path, capsys) -> None:
    for number, run in enumerate(runs):
        path = tmp_path / f"{number}.jsonl"
        by_source = eval_source(run, path, limit=4, samples=2)
        assert (
            by_source.keys() == {"held-out"}
            and {"accuracy", "pass@2", "step_truth"} <= by_source["held-out"].keys()
        )
        assert ("final_balanced" in by_source["held-out"]) == isinstance(run, Tango)
        said = capsys.readouterr().out.splitlines()
        assert said[0] == "held-out, 4 problems:" and said[-1] == f"records are in {path}"
        data = {"source": "gsm8k", "path": DATA / "gsm8k.jsonl", "limit": 2}
        by_source = eval_source(run, tmp_path / f"gsm8k-{number}.jsonl", **data)
        assert by_source.keys() == {"gsm8k"} and "step_truth" not in by_source["gsm8k"]
        assert [r["gold"] for r in read_records(tmp_path / f"gsm8k-{number}.jsonl")] == ["576", "10000"]
        capsys.readouterr()


def test_an_outcome_only_run_is_not_judged(runs, tmp_path) -> None:
    runs[0].config = replace(runs[0].config, step_source="none")
    assert "final_parsed" not in eval_source(runs[0], tmp_path / "a.jsonl", limit=2)["held-out"]


def test_a_verifier_is_evaluated_on_processbench(runs, tmp_path, capsys) -> None:
    data = {"source": "processbench", "path": DATA / "processbench.jsonl"}
    by_source = eval_source(runs[0], tmp_path / "a.jsonl", split="gsm8k", **data)
    assert by_source["processbench/gsm8k"]["first_error_f1"].mean >= 0
    assert capsys.readouterr().out.startswith("processbench/gsm8k, 4 problems:\n")
    with pytest.raises(ValueError, match="say which split of processbench"):
        eval_source(runs[0], tmp_path / "b.jsonl", **data)
    with pytest.raises(ValueError, match="a CoVRL run has none"):
        eval_source(runs[1], tmp_path / "b.jsonl", split="gsm8k", **data)
    with pytest.raises(ValueError, match="name it, as in --source"):
        eval_source(runs[0], tmp_path / "b.jsonl", split="gsm8k")
    assert not (tmp_path / "b.jsonl").exists()


def test_no_model_is_asked_before_the_golds_pass_the_self_test(runs, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(evaluation, "sample", lambda *_, **__: pytest.fail("a model was asked"))
    runs[0].prompts = replace(CHAT, generator=lambda question: "Answer as <answer>...</answer>.")
    with pytest.raises(ValueError, match="3 of 3 gold answers"):
        eval_source(runs[0], tmp_path / "a.jsonl", source="gsm8k", path=DATA / "gsm8k.jsonl")
    assert not (tmp_path / "a.jsonl").exists()


def test_records_are_plain_json_without_nan(whole: Path) -> None:
    for line in whole.read_text("ascii").splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
