"""The bench of log-probs: what it counts and leaves out, and the GPU script before a GPU is there."""

from __future__ import annotations

import json

import pytest
import torch

from tangolite.cli import main
from tangolite.lab import bench_logprob as bench
from tangolite.lab import gpu_check, roofline
from tangolite.lab.logprob_peers import MODES, Peer, peers, plain
from tangolite.lab.memory import peak_bytes

SMALL = (40, 16, 300, "float32")


@pytest.fixture(scope="module")
def report():
    return bench.bench_logprob([SMALL], repeats=1, device="cpu")


def test_every_way_is_measured_in_every_mode_that_it_has(report):
    measured = {(row["mode"], row["way"]) for row in report["rows"] if "seconds" in row}
    for peer in peers("cpu", torch.float32):
        for mode in MODES:
            assert ((mode, peer.name) in measured) == (mode != MODES[-1] or peer.entropy is not None)


def test_every_way_gives_the_same_log_probs_and_gradients(report):
    for row in report["rows"]:
        assert row["logp_error"] < 1e-5
        assert row.get("grad_error", 0) < 1e-5
        assert ("grad_error" in row) == (row["mode"] in MODES[1:3])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_plain_way_and_ours_agree_with_the_exact_one_that_it_is_judged_by(dtype):
    inputs = bench.draw(*SMALL[:3], dtype, "cpu")
    rows = torch.arange(0, 40, 7)
    logp, grad = bench.exact(inputs, rows)
    logits = inputs.hidden.double() @ inputs.weight.double().T
    expected = torch.log_softmax(logits, -1)[torch.arange(40), inputs.target]
    torch.testing.assert_close(logp, expected[rows])
    p = logits.softmax(-1)
    dz = inputs.grad.double()[:, None] * (torch.nn.functional.one_hot(inputs.target, 300) - p)
    torch.testing.assert_close(grad, (dz @ inputs.weight.double())[rows])


def test_half_of_the_targets_are_likely_and_half_are_drawn_from_all():
    inputs = bench.draw(400, 16, 300, "float32", "cpu")
    logp = plain(inputs.hidden, inputs.weight, inputs.target)
    likely, drawn = logp[::2].exp().mean(), logp[1::2].exp().mean()
    assert likely > 0.3 > 0.05 > drawn


def test_extra_memory_is_what_was_held_beyond_inputs_and_gradients():
    inputs = bench.draw(*SMALL, "cpu")
    held = Peer("holds 1000 floats", lambda h, w, t: h.new_zeros(1000)[:1] + h.sum(), (2, 2, 2), True)
    assert 4000 <= bench.extra_memory(held, inputs, "no grad") < 4100
    assert peak_bytes(lambda: torch.empty(500) is torch.empty(250)) == 3000
    assert peak_bytes(lambda: [torch.empty(500).sum(), torch.empty(250)][0]) < 2100  # one after the other


def test_a_way_that_would_take_too_long_is_left_out_with_the_reason():
    slow = Peer("slow", lambda h, w, t: sum(h.exp() for _ in range(3000)).sum(-1), (2, 6, 8), False)
    inputs = bench.draw(4096, 16, 300, "float32", "cpu")
    row = bench.measure(slow, inputs, "no grad", None, torch.arange(2), 1, limit=0.5)
    assert list(row) == ["skipped"] and "s, judging by 32 rows" in row["skipped"]
    assert "not measured: about" in bench.line(row | {"mode": "no grad", "way": "slow"})


def test_a_way_that_fails_is_left_out_with_the_reason():
    def broken(hidden, weight, target):
        raise RuntimeError("no such card\nand much more")

    row = bench.measure(
        Peer("x", broken, (2, 6, 8), False), bench.draw(*SMALL, "cpu"), "full", None, torch.arange(2), 1, 60
    )
    assert row == {"skipped": "RuntimeError: no such card"}


def test_stopping_keeps_what_has_been_measured(monkeypatch, capsys):
    calls = []

    def measure(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return {"skipped": "in a hurry"}

    monkeypatch.setattr(bench, "measure", measure)
    assert len(bench.bench_logprob([SMALL], device="cpu")["rows"]) == 2
    assert "stopped" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("products", "keeps", "mode", "flops", "traffic"),
    [
        # N=2, D=3, V=5, 4-byte numbers: N V D = 30, N V = 10, a weight of 60 bytes
        (2, False, "no grad", 60, 60),
        (6, False, "frozen head", 180, 3 * 60 + 2 * 10 * 4),
        (8, False, "full", 240, 4 * 60 + 60 + 2 * 10 * 4),
        (2, True, "no grad", 60, 60 + 10 * 12),
        (6, True, "full", 180, 3 * 60 + 60 + 10 * (12 + 12 + 8)),
    ],
)
def test_the_cost_model_counts_by_hand(products, keeps, mode, flops, traffic):
    ceilings = roofline.Ceilings(flops=10.0, bandwidth=1e9)
    made = roofline.cost(2, 3, 5, products=products, keeps_logits=keeps, mode=mode, size=4, ceilings=ceilings)
    assert made == (flops, traffic, flops / 10)
    slow_memory = roofline.Ceilings(flops=1e9, bandwidth=10.0)
    made = roofline.cost(
        2, 3, 5, products=products, keeps_logits=keeps, mode=mode, size=4, ceilings=slow_memory
    )
    assert made.seconds == traffic / 10


def test_ceilings_are_measured_and_plausible():
    ceilings = roofline.measure_ceilings("cpu", torch.float32)
    assert 1e9 < ceilings.flops < 1e14 and 1e8 < ceilings.bandwidth < 1e13


def test_the_command_writes_a_table_json_and_a_figure(tmp_path, capsys):
    file = tmp_path / "made" / "logprob.json"
    arguments = ["bench", "logprob", "--size", "33,16,300,float32", "--out", str(file), "--threads", "1"]
    assert main(arguments) == 0
    rows = json.loads(file.read_text("utf-8"))["rows"]
    printed = capsys.readouterr().out
    assert all(row["way"] in printed for row in rows) and "limit ms" in printed
    assert {"seconds", "extra_bytes", "logp_error", "flops", "bytes", "limit_seconds"} <= set(rows[0])
    assert file.with_suffix(".png").stat().st_size > 5000


@pytest.mark.parametrize("size", ["1,2,3", "0,2,3,float32", "1,2,3,float64", "a,2,3,float32"])
def test_a_size_that_is_none_is_refused(size, capsys):
    with pytest.raises(SystemExit) as error:
        main(["bench", "logprob", "--size", size])
    assert error.value.code == 2 and "--size" in capsys.readouterr().err


# --- the GPU script, rehearsed ---------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, on what a tile holds beyond the last row
def test_the_gpu_script_runs_from_end_to_end(tmp_path, capsys):
    pytest.importorskip("triton")
    file = tmp_path / "gpu.json"
    assert gpu_check.main(["--rehearse", "--out", str(file)]) == 0
    report = json.loads(file.read_text("utf-8"))
    assert [row["ok"] for row in report["correct"]] == [True, True]
    assert {"ours, triton", "plain logits"} <= {row["way"] for row in report["bench"]}
    assert len(report["products"]) == len(report["dead_rows"]) == 2 and report["versions"]["triton"]
    assert "rehearsal" in capsys.readouterr().out


def test_the_exact_gradients_of_the_gpu_script_are_those_of_autograd():
    inputs = bench.draw(20, 8, 30, "float32", "cpu")
    hidden, weight = (x.double().requires_grad_() for x in inputs[:2])
    logp = (hidden @ weight.T).log_softmax(-1)
    chosen, entropy = logp.gather(-1, inputs.target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
    (chosen * inputs.grad + entropy * inputs.grad.flip(0)).sum().backward()
    for made, expected in zip(
        gpu_check.exact(inputs), (chosen, entropy, hidden.grad, weight.grad), strict=True
    ):
        torch.testing.assert_close(made, expected)


def test_the_aims_are_judged_by_the_numbers():
    def row(way, mode, seconds, extra=1e6, d=896):
        return {
            "n": 100,
            "d": d,
            "v": 1000,
            "mode": mode,
            "way": way,
            "seconds": seconds,
            "extra_bytes": extra,
        }

    modes = ("no grad", "frozen head", "full")
    bench_rows = [row("ours, triton", m, 1.0, 1e4) for m in modes] + [row("plain", m, 1.5) for m in modes]
    bench_rows += [row("ours, triton", m, 1.0, 1e5, 3584) for m in modes] + [
        row("plain", m, 0.9, 0, 3584) for m in modes
    ]
    correct = [{"size": 1, "errors": {}, "ok": True}]
    found = gpu_check.aims({"correct": correct, "bench": bench_rows})
    reached = {aim["aim"]: aim["reached"] for aim in found}
    assert [reached[a] for a in reached if "D=896" in a] == [True, True, True]
    assert [reached[a] for a in reached if "D=3584" in a] == [False, False, False, False]


def test_without_a_gpu_the_script_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main([]) == 1
    assert "no CUDA card" in capsys.readouterr().out
