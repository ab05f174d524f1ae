"""A real vLLM server: it samples from the weights that were published, and the trainer knows when not.

Set TANGOLITE_VLLM to the `python` (or `vllm`) of an environment with vLLM, which runs on Linux only; a CPU
will do.  The server takes a minute to start.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tangolite.adapters import attach
from tangolite.checkpoints import read_metrics, save_policy
from tangolite.cli import main
from tangolite.models import load_policy, tiny_policy
from tangolite.sampling import sample
from tangolite.sampling.vllm import ServerError, VllmSampler, completions, request_of, server_command

VLLM = os.environ.get("TANGOLITE_VLLM")
pytestmark = pytest.mark.skipif(not VLLM, reason="TANGOLITE_VLLM does not name the python of a vLLM")

PROMPTS = [[3, 30, 22, 31, 7], [3, 40], [5, 33, 22, 35, 24, 58, 7], [9], [9]]
EOS = (5, 9, 11, 17, 20, 30)  # without 1, which the model's own files give
NEAR = 1e-3  # nats: server and trainer both compute in float32


def seeded(seed=0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def noisy(policy, seed, scale=0.3):
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(torch.randn(p.shape, generator=seeded(seed)) * scale)
    return policy


def save_base(folder: Path) -> None:
    """Heads of 32 (vLLM takes no smaller ones on a CPU), and a generation config that must not count."""
    policy = tiny_policy(0, width=64, heads=2, layers=2)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.mul_(5.0 if p.dim() > 1 else 1.0)
    save_policy(policy, folder)
    odd = {"eos_token_id": 1, "do_sample": True, "top_k": 1, "temperature": 0.01, "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(odd), encoding="utf-8")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The server's address, its process, its log and the folder of its base."""
    folder = tmp_path_factory.mktemp("vllm")
    save_base(folder / "base")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python = str(VLLM if Path(VLLM).name.startswith("python") else Path(VLLM).with_name("python"))
    command = server_command(folder / "base", port, rank=8, dtype="float32", python=python)
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [*command, "--enforce-eager"], stdout=log, stderr=log, cwd=folder, start_new_session=True,
            env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | small | quiet,
        )  # fmt: skip
    found = SimpleNamespace(
        url=f"http://127.0.0.1:{port}", process=process, folder=folder, log=folder / "log",
        base=str(folder / "base"),
    )  # fmt: skip
    try:
        wait_for(found)
        yield found
    finally:
        kill(process)


def wait_for(server, seconds=300) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and server.process.poll() is None:
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail(f"the server did not start:\n{tail(server)}")


def tail(server) -> str:
    return server.log.read_text(encoding="utf-8", errors="replace")[-6000:]


def kill(process) -> None:
    """The server and the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


@pytest.fixture(autouse=True)
def log(server):
    """What the server said, shown for a test that fails."""
    yield
    print(tail(server))


@pytest.fixture(scope="module")
def players(server):
    """Two adapters of the served base, neither of them zero, both published."""
    base = replace(load_policy(server.base), eos_ids=EOS)
    found = attach(base, ["generator", "verifier"], rank=4)
    for seed, (name, policy) in enumerate(found.items()):
        found[name] = noisy(replace(policy, sampler=sampler(server, name)), seed)
        found[name].sampler.publish(found[name])
    return found


def sampler(server, name, **options) -> VllmSampler:
    return VllmSampler(server.url, name, folder=server.folder / "published", **{"retries": 2} | options)


def draw(policy, prompts=PROMPTS, **options):
    return sample(policy, prompts, **{"n": 4, "max_new_tokens": 16, "generator": seeded()} | options)


# --- the distribution ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
@pytest.mark.parametrize("name", ["generator", "verifier"])
def test_the_server_s_log_probs_are_the_trainer_s(players, name, temperature):
    policy = players[name]
    rollouts = draw(policy, temperature=temperature)
    assert policy.sampler.gap < NEAR
    with torch.no_grad():
        torch.testing.assert_close(rollouts.old_logp, policy.logp(rollouts, temperature=temperature))


def test_every_log_prob_of_an_answer_is_near(players):
    policy = players["generator"]
    request = request_of(policy, PROMPTS[0], 8, 16, 1.0) | {"seed": 3, "model": policy.sampler.served}
    rows = completions(policy.sampler.server.call("/v1/completions", request), request)
    local = attach(replace(load_policy(policy.name), eos_ids=EOS), ["generator"], rank=4)["generator"]
    noisy(local, 0)
    for row in rows:
        ids = torch.tensor([PROMPTS[0] + row.ids])
        with torch.no_grad():
            logp = local.model(ids).logits[0, len(PROMPTS[0]) - 1 : -1].log_softmax(-1)
        ours = logp.gather(1, torch.tensor(row.ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(row.logp), ours, atol=NEAR, rtol=0)


def test_tokens_are_drawn_from_the_trainer_s_distribution(players):
    policy, prompts = players["generator"], [[3, k, 22, 31, 7] for k in range(30, 46)]
    rollouts = draw(policy, prompts, n=64, max_new_tokens=1)
    with torch.no_grad():
        logp, entropy = policy.logp(rollouts, return_entropy=True)
    surplus = logp[:, 0] + entropy[:, 0]  # mean 0 if the tokens are drawn from p itself
    assert abs(surplus.mean()) < 4 * surplus.std() / len(surplus) ** 0.5
    assert len(rollouts.completion_ids.unique()) > 30


def test_the_two_adapters_are_told_apart(players, server):
    drawn = {name: draw(policy, temperature=0).completion_ids.tolist() for name, policy in players.items()}
    assert drawn["generator"] != drawn["verifier"]
    crossed = replace(players["generator"], sampler=players["verifier"].sampler)
    with pytest.raises(ServerError, match="does not serve these weights"):
        draw(crossed)


@pytest.mark.parametrize("name", ["generator", "verifier"])
def test_greedy_tokens_are_those_of_our_own_sampler(players, name):
    policy = players[name]
    there, here = draw(policy, temperature=0), draw(replace(policy, sampler=None), temperature=0)
    assert torch.equal(there.completion_ids, here.completion_ids) and torch.equal(there.length, here.length)


def test_only_the_policy_s_own_ids_end_a_completion(players):
    rollouts = draw(players["generator"], n=40, max_new_tokens=24)
    rows = [rollouts.tokens(row) for row in range(len(rollouts))]
    for ids, ended in zip(rows, rollouts.terminated.tolist(), strict=True):
        assert not set(ids[:-1]) & set(EOS) and (ids[-1] in EOS) == ended and (ended or len(ids) == 24)
    assert 0 < sum(rollouts.terminated) < len(rows)
    assert any(1 in ids[:-1] for ids in rows)


def test_the_same_generator_draws_the_same_and_equal_prompts_draw_apart(players):
    one, again, other = (draw(players["verifier"], generator=seeded(s)) for s in (5, 5, 6))
    assert torch.equal(one.completion_ids, again.completion_ids)
    assert one.completion_ids.tolist() != other.completion_ids.tolist()
    assert not torch.equal(one.completion_ids[12:16], one.completion_ids[16:20])


# --- publishing ------------------------------------------------------------------------------------------


def test_after_an_update_the_server_is_refused_until_it_is_published(players, server):
    policy, prompts = players["verifier"], [[3, 30, 22, 31, 7] * 12]  # long enough for the cache of prompts
    draw(policy, prompts)
    before = policy.sampler.served
    for seed in (8, 9):
        noisy(policy, seed)
        with pytest.raises(ServerError, match="does not serve these weights"):
            draw(policy, prompts)
        policy.sampler.publish(policy)
        draw(policy, prompts)
        assert policy.sampler.gap < NEAR
    draw(players["generator"])
    assert players["generator"].sampler.gap < NEAR  # the other one is as it was
    named = [model["id"] for model in policy.sampler.server.call("/v1/models")["data"]]
    assert policy.sampler.served in named and before not in named
    assert len(list((server.folder / "published" / "verifier").iterdir())) == 1


def test_a_tango_run_samples_at_the_server(server, tmp_path):
    """An update of each player: rollouts from the server, learned from here, published to it again."""
    sets = [
        *(
            f"generator={server.base}",
            f"verifier={server.base}",
            "adapters={rank: 4}",
            f"server={server.url}",
        ),
        *(f"server_folder={tmp_path / 'served'}", "questions=2", "max_new_tokens=16", "updates=2"),
        "adapters={rank: 4}",
        *("verifier_max_new_tokens=16", "verifier_warmup=1", "verifier_task=null", "eval_every=0", "lr=0.01"),
    ]
    out = tmp_path / "run"
    assert main(["train", "--recipe", "tango-tiny", "--out", str(out), "--set", *sets]) == 0
    rows = read_metrics(out)
    assert [row["turn"] for row in rows] == ["verifier", "generator"]
    assert all(0 <= row["server_gap"] < 2e-2 and row["grad_norm"] > 0 for row in rows)
    assert (out / "policies" / "generator" / "adapter_model.safetensors").is_file()


def test_a_whole_model_is_replaced_and_put_back(server):
    policy = replace(load_policy(server.base), eos_ids=EOS, sampler=sampler(server, server.base))
    draw(policy)
    assert policy.sampler.gap < NEAR
    first = replace(load_policy(server.base), sampler=policy.sampler)
    noisy(policy, 1, scale=0.1)
    with pytest.raises(ServerError, match="does not serve these weights"):
        draw(policy)
    policy.sampler.publish(policy)
    draw(policy)
    assert policy.sampler.gap < NEAR
    policy.sampler.publish(first)
    draw(first)
    assert policy.sampler.gap < NEAR


# --- failures --------------------------------------------------------------------------------------------


def test_what_the_server_refuses_is_shown_in_its_own_words(players, server):
    policy = players["generator"]
    with pytest.raises(ServerError, match="max_model_len=1024"):
        draw(policy, max_new_tokens=5000)
    stranger = replace(policy, sampler=sampler(server, "nobody"))
    with pytest.raises(ServerError, match="The model `nobody` does not exist"):
        draw(stranger)


def test_a_server_that_dies_in_mid_batch_is_an_error(players, server, capsys):  # the last test: it is gone
    policy = replace(players["generator"], eos_ids=(0,))
    policy.sampler.server.retries = 1
    threading.Timer(1.0, kill, (server.process,)).start()
    with pytest.raises(ServerError, match=r"Start the server as .*vllm.* --resume"):
        draw(policy, n=64, max_new_tokens=900)
    assert len(capsys.readouterr().err.splitlines()) == 1
