"""Rollouts over HTTP: what is asked of a vLLM server, what is made of its answers, and what of its failures.

The server here is a small one on this machine that speaks as vLLM 0.32 does and samples with our own sampler.
`test_vllm_server.py` asks a real one.
"""

from __future__ import annotations

import _thread
import json
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tangolite.adapters import attach
from tangolite.models import Policy, tiny_policy
from tangolite.sampling import sample
from tangolite.sampling.vllm import ServerError, VllmSampler, server_command

PROMPTS = [[3, 30, 22, 31, 7], [3, 40], [5, 33, 22, 35, 24, 58, 7], [9], [9]]
EOS = (1, 5, 9, 11, 17, 20, 30)
FORGOTTEN = "default"


def seeded(seed=0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def policy_of(seed=0) -> Policy:
    """A tied model whose distributions are far from uniform, so that wrong weights show."""
    policy = replace(tiny_policy(seed, width=16, layers=1, heads=2), eos_ids=EOS)
    return changed(policy, lambda p: p.mul_(8.0) if p.dim() > 1 else p)


def changed(policy: Policy, change) -> Policy:
    with torch.no_grad():
        for p in policy.parameters():
            change(p)
    return policy


class Fake:
    """What vLLM keeps: a base, adapters by name, a version of the weights.  ``odd`` goes wrong next."""

    def __init__(self) -> None:
        base = policy_of()
        self.whole = policy_of()
        self.slot = attach(base, ["slot"])["slot"]
        self.adapters: dict[str, str] = {}
        self.version, self.cache_cleared = FORGOTTEN, True
        self.asked: list[dict] = []
        self.paths: list[str] = []
        self.odd: list = []  # one for each completion request to come: None, or what happens to it
        self.lock, self.over = threading.Lock(), threading.Event()

    def restart(self) -> None:
        self.adapters.clear()
        self.version, self.whole = FORGOTTEN, policy_of()

    def get(self, path: str) -> tuple[int, object]:
        if path == "/v1/models":
            return 200, {"data": [{"id": name} for name in ("base", *self.adapters)]}
        return 200, {"weight_version": self.version}

    def post(self, path: str, body: dict) -> tuple[int, object]:
        return getattr(self, path.rsplit("/", 1)[1])(body)

    def load_lora_adapter(self, body):
        name, path = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters or body.get("load_inplace"):
            return 400, {"error": {"message": f"{name} has already been loaded"}}
        if not (path / "adapter_config.json").is_file():
            return 404, {"error": {"message": "No adapter found"}}
        self.adapters[name] = load_file(path / "adapter_model.safetensors")
        return 200, "Success"

    def unload_lora_adapter(self, body):
        found = self.adapters.pop(body["lora_name"], None)
        return (404, {"error": {"message": "cannot be found"}}) if found is None else (200, "Success")

    def collective_rpc(self, body):
        assert body["method"] == "reload_weights"
        state = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
        assert "lm_head.weight" in state
        self.whole.model.load_state_dict(state)
        self.cache_cleared = False
        return 200, {"results": [None]}

    def reset_prefix_cache(self, body):
        self.cache_cleared = True
        return 200, {"success": True}

    def update_weight_version(self, body):
        self.version = body["new_version"]
        return 200, {"success": True}

    def completions(self, body):
        if body["model"] not in ("base", *self.adapters):
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if body["temperature"] == 0 and body["n"] > 1:
            return 400, {"error": {"message": "n must be 1 when using greedy sampling"}}
        with self.lock:
            return 200, {"choices": list(self.choices(body))}

    def choices(self, body):
        from peft.utils import set_peft_model_state_dict

        policy = self.whole
        if body["model"] in self.adapters:
            policy = self.slot
            set_peft_model_state_dict(policy.model, self.adapters[body["model"]], "slot")
        policy = replace(policy, eos_ids=tuple(body["stop_token_ids"]))
        rollouts = sample(
            policy, [body["prompt"]], n=body["n"], max_new_tokens=body["max_tokens"],
            temperature=body["temperature"], generator=seeded(body["seed"]),
        )  # fmt: skip
        for row in range(len(rollouts)):
            length = int(rollouts.length[row])
            yield {
                "index": row, "token_ids": rollouts.tokens(row), "prompt_token_ids": body["prompt"],
                "logprobs": {"token_logprobs": rollouts.old_logp[row, :length].tolist()},
                "finish_reason": "stop" if rollouts.terminated[row] else "length", "text": "not to be read",
            }  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    fake: Fake

    def do_GET(self):
        self.fake.paths.append(self.path)
        self.reply(*self.fake.get(self.path))

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        text = self.rfile.read(length)
        if len(text) < length:  # the sampler hung up
            return None
        body = json.loads(text)
        self.fake.paths.append(self.path)
        if not self.path.endswith("/completions"):
            return self.reply(*self.fake.post(self.path, body))
        with self.fake.lock:
            self.fake.asked.append(body)
            odd = self.fake.odd.pop(0) if self.fake.odd else None
        if odd == "hang":
            self.fake.over.wait(20)
        elif odd == "drop":
            self.close_connection = True
        elif odd == "half":
            self.reply(*self.fake.post(self.path, body), cut=True)
        elif isinstance(odd, int):
            self.reply(odd, {"error": {"message": "the engine is dead"}})
        else:
            status, answer = self.fake.post(self.path, body)
            if callable(odd):
                odd(answer["choices"])
            self.reply(status, answer)

    def reply(self, status: int, answer, cut=False) -> None:
        data = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)

    def log_message(self, *_) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exception(), OSError):  # the sampler hung up
            super().handle_error(request, client_address)


@contextmanager
def serving(fake: Fake):
    server = Server(("127.0.0.1", 0), type("H", (Handler,), {"fake": fake}))
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        fake.over.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def fake():
    return Fake()


@pytest.fixture
def url(fake):
    with serving(fake) as url:
        yield url


@pytest.fixture
def whole(url, tmp_path) -> Policy:
    """A whole model, the one that the server begins with."""
    return replace(policy_of(), sampler=VllmSampler(url, "base", folder=tmp_path, retries=2))


@pytest.fixture
def players(url, tmp_path) -> dict[str, Policy]:
    """Two adapters of one base, neither of them zero."""
    both = attach(policy_of(), ["generator", "verifier"], seed=1)
    for name, policy in both.items():
        changed(policy, lambda p: p.add_(torch.randn(p.shape, generator=seeded(p.numel())) * 0.3))
        both[name] = replace(policy, sampler=VllmSampler(url, name, folder=tmp_path, retries=2))
    return both


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The waits between attempts, which then take no time."""
    found: list[float] = []
    monkeypatch.setattr("tangolite.sampling.vllm.time.sleep", found.append)
    return found


def draw(policy: Policy, seed=0, n=3, **changes):
    return sample(policy, PROMPTS, **{"n": n, "max_new_tokens": 12, "generator": seeded(seed)} | changes)


# --- what is asked, and what is made of it ---------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_rollouts_are_laid_out_as_those_of_our_own_sampler(whole, temperature):
    rollouts = draw(whole, temperature=temperature)
    assert len(rollouts) == 15 and rollouts.group.tolist() == [i for i in range(5) for _ in range(3)]
    for row, prompt in enumerate(p for p in PROMPTS for _ in range(3)):
        assert rollouts.prompt_ids[row].tolist() == [whole.pad_id] * (7 - len(prompt)) + prompt
        ids, ended = rollouts.tokens(row), bool(rollouts.terminated[row])
        assert (ids[-1] in EOS) == ended and not set(ids[:-1]) & set(EOS) and (ended or len(ids) == 12)
    assert rollouts.terminated.any() and not rollouts.terminated.all()
    assert (rollouts.completion_ids[~rollouts.mask] == whole.pad_id).all()
    with torch.no_grad():
        again = whole.logp(rollouts, temperature=temperature)
    torch.testing.assert_close(rollouts.old_logp, again, atol=1e-5, rtol=0)
    assert not rollouts.old_logp.requires_grad and not rollouts.old_logp[~rollouts.mask].any()
    assert 0 < whole.sampler.gap < 1e-4


def test_greedy_completions_are_those_of_our_own_sampler(whole):
    there, here = draw(whole, temperature=0), draw(replace(whole, sampler=None), temperature=0)
    assert torch.equal(there.completion_ids, here.completion_ids)
    torch.testing.assert_close(there.old_logp, here.old_logp)


def test_a_request_is_ids_alone_and_leaves_nothing_to_the_server_s_defaults(whole, fake):
    draw(whole, temperature=0.7)
    body = min(fake.asked, key=lambda body: PROMPTS.index(body["prompt"]))
    assert body.pop("seed") >= 0
    assert body == {
        "model": "base", "prompt": PROMPTS[0], "n": 3, "max_tokens": 12, "min_tokens": 0, "temperature": 0.7,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "stop": [], "stop_token_ids": list(EOS), "ignore_eos": True, "logprobs": 0,
        "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip


def test_the_same_generator_asks_the_same_and_equal_prompts_draw_apart(whole, fake):
    def seeds(seed):
        fake.asked.clear()
        draw(whole, seed)
        return sorted((body["prompt"], body["seed"]) for body in fake.asked)

    first = seeds(0)
    assert seeds(0) == first != seeds(1)
    assert len({seed for _, seed in first}) == len(PROMPTS)  # the last two prompts are equal
    generator = seeded(0)
    one, two = (sample(whole, PROMPTS, max_new_tokens=12, generator=generator) for _ in range(2))
    assert one.completion_ids.tolist() != two.completion_ids.tolist()


def test_old_log_probs_are_the_trainer_s_and_the_gap_says_how_far_the_server_s_were(whole, fake):
    def shifted(choices):
        for choice in choices:
            choice["logprobs"]["token_logprobs"] = [x - 0.25 for x in choice["logprobs"]["token_logprobs"]]

    fake.odd = [shifted] * len(PROMPTS)
    rollouts = draw(whole)
    with torch.no_grad():
        torch.testing.assert_close(rollouts.old_logp, whole.logp(rollouts), atol=1e-5, rtol=0)
    assert whole.sampler.gap == pytest.approx(0.25, abs=1e-3)
    whole.sampler.max_gap, fake.odd = 0.2, [shifted] * len(PROMPTS)
    with pytest.raises(ServerError, match=r"does not serve these weights.*'base' are 0\.25 nats"):
        draw(whole)


def test_a_gap_that_is_no_number_is_refused(whole, fake):
    def broken(choices):
        choices[0]["logprobs"]["token_logprobs"][0] = float("nan")

    fake.odd = [broken]
    with pytest.raises(ServerError, match="does not serve these weights"):
        draw(whole)


def test_prompts_must_be_there(whole):
    for prompts in ([], [[3], []]):
        with pytest.raises(ValueError, match="at least one"):
            sample(whole, prompts, max_new_tokens=3)


# --- publishing ------------------------------------------------------------------------------------------


def test_an_adapter_is_served_as_it_was_published(players, fake, tmp_path):
    from peft import PeftModel

    for policy in players.values():
        policy.sampler.publish(policy)
    batches = {name: draw(policy) for name, policy in players.items()}
    assert all(policy.sampler.gap < 1e-4 for policy in players.values())
    assert batches["generator"].completion_ids.tolist() != batches["verifier"].completion_ids.tolist()
    assert {body["model"].split("-")[0] for body in fake.asked} == {"generator", "verifier"}
    folder, base = next((tmp_path / "verifier").iterdir()), policy_of()
    plain = PeftModel.from_pretrained(base.model, folder).eval()
    with torch.no_grad():
        expected = replace(base, model=plain).logp(batches["verifier"])
    torch.testing.assert_close(batches["verifier"].old_logp, expected, atol=1e-5, rtol=0)


def test_an_update_without_publishing_is_refused_and_publishing_heals_it(players, fake, tmp_path):
    generator = players["generator"]
    generator.sampler.publish(generator)
    before, named = list((tmp_path / "generator").iterdir()), set(fake.adapters)
    changed(generator, lambda p: p.add_(torch.randn(p.shape, generator=seeded(7))))
    with pytest.raises(ServerError, match="Publish after every update"):
        draw(generator)
    generator.sampler.publish(generator)
    draw(generator)
    assert generator.sampler.gap < 1e-4
    after = list((tmp_path / "generator").iterdir())
    assert len(before) == len(after) == 1 and before != after  # the old files are gone,
    assert len(fake.adapters) == 1 and not named & set(fake.adapters)  # and so is the old name


def test_a_whole_model_is_published_with_its_tied_output_layer(whole, fake, tmp_path):
    changed(whole, lambda p: p.mul_(1.5))
    with pytest.raises(ServerError, match="does not serve these weights"):
        draw(whole)
    for _ in range(2):
        changed(whole, lambda p: p.mul_(1.1))
        whole.sampler.publish(whole)
        draw(whole)
        assert whole.sampler.gap < 1e-4 and fake.cache_cleared
    assert [path.name for path in (tmp_path / "weights").iterdir()] == [fake.version]


def test_a_server_that_was_restarted_gets_the_weights_again(players, whole, fake):
    changed(whole, lambda p: p.mul_(1.5))
    for policy in (players["verifier"], whole):
        policy.sampler.publish(policy)
        fake.restart()
        draw(policy)
        assert policy.sampler.gap < 1e-4
        loads = sum("load_lora" in path or "collective" in path for path in fake.paths)
        draw(policy)
        assert sum("load_lora" in path or "collective" in path for path in fake.paths) == loads  # not twice


def test_a_publish_that_the_server_refuses_says_why(players, tmp_path, monkeypatch):
    generator = players["generator"]
    monkeypatch.setattr(
        "tangolite.sampling.vllm.save_adapter", lambda policy, folder: folder.mkdir(parents=True)
    )
    with pytest.raises(ServerError, match=r"refused /v1/load_lora_adapter.*No adapter found"):
        generator.sampler.publish(generator)


# --- failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "odd", [500, 503, "drop", "half", lambda choices: choices[0].update(finish_reason="abort")]
)
def test_what_fails_once_is_asked_again_with_the_same_result(whole, fake, waits, capsys, odd):
    expected = draw(whole)
    fake.asked.clear()
    fake.odd = [None, odd]
    rollouts = draw(whole)
    assert torch.equal(rollouts.completion_ids, expected.completion_ids)
    assert torch.equal(rollouts.old_logp, expected.old_logp)
    assert waits == [1] and len(capsys.readouterr().err.splitlines()) == 1
    asked = [(tuple(body["prompt"]), body["seed"]) for body in fake.asked]
    assert len(set(asked)) == len(PROMPTS) < len(asked)


def test_an_answer_that_does_not_come_in_time_is_asked_for_again(whole, fake, waits, capsys):
    whole.sampler.server.timeout, fake.odd = 0.5, ["hang"]
    assert len(draw(whole)) == 15
    assert waits == [1] and "timed out" in capsys.readouterr().err


def test_a_server_that_stays_away_is_an_error_with_what_to_do(whole, fake, waits, capsys):
    fake.odd = [503] * 100
    with pytest.raises(ServerError) as caught:
        draw(whole)
    assert waits == [1, 2] and len(capsys.readouterr().err.splitlines()) == 2
    port = whole.sampler.server.url.rsplit(":")[-1]
    for words in ("503", "the engine is dead", "vllm.entrypoints", f"--port {port}", "--resume"):
        assert words in str(caught.value)


def test_no_server_is_an_error_that_the_command_line_puts_in_words(waits, tmp_path):
    with serving(Fake()) as url:
        pass
    policy = replace(policy_of(), sampler=VllmSampler(url, "base", folder=tmp_path, retries=3))
    with pytest.raises(OSError, match="ConnectionRefusedError") as caught:
        draw(policy)
    assert waits == [1, 2, 4]
    assert isinstance(caught.value, ServerError) and caught.value.filename is None


def test_a_request_that_the_server_refuses_is_not_repeated(whole, fake, waits):
    whole.sampler.model = "nobody"
    with pytest.raises(ServerError, match="The model `nobody` does not exist"):
        draw(whole)
    assert waits == [] and len(fake.asked) <= len(PROMPTS)


def drop(key):
    return lambda choices: choices[0].pop(key)


ODD_ANSWERS = {
    "no token ids": drop("token_ids"),
    "token ids that are null": lambda choices: choices[0].update(token_ids=None),
    "no log-probs": drop("logprobs"),
    "a log-prob too few": lambda choices: choices[0]["logprobs"]["token_logprobs"].pop(),
    "a log-prob that is null": lambda choices: choices[0]["logprobs"].update(token_logprobs=[None]),
    "a completion too few": lambda choices: choices.pop(),
    "a completion too many": lambda choices: choices.append(choices[0]),
    "another prompt": lambda choices: choices[0].update(prompt_token_ids=[3]),
    "no tokens": lambda choices: choices[0].update(token_ids=[], logprobs={"token_logprobs": []}),
    "an end in the middle": lambda choices: choices[0].update(
        token_ids=[2, EOS[0], EOS[0]], logprobs={"token_logprobs": [0.0] * 3}
    ),
    "cut short of the limit": lambda choices: choices[0].update(
        token_ids=[2, 2], logprobs={"token_logprobs": [0.0] * 2}, finish_reason="length"
    ),
    "more than the limit": lambda choices: choices[0].update(
        token_ids=[2] * 13, logprobs={"token_logprobs": [0.0] * 13}, finish_reason="length"
    ),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD_ANSWERS.values(), ids=ODD_ANSWERS)
def test_an_answer_that_is_not_what_was_asked_for_is_an_error(whole, fake, waits, odd):
    fake.odd = [odd]
    with pytest.raises(ServerError, match="vLLM"):
        draw(whole)
    assert waits == []


def test_ctrl_c_ends_a_batch_at_once_and_hangs_up_on_the_server(whole, fake):
    fake.odd = ["hang"] * len(PROMPTS)
    threading.Timer(0.5, _thread.interrupt_main).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        draw(whole)
    assert time.monotonic() - began < 5
    assert not whole.sampler.server.open
    assert len(draw(whole)) == 15  # and the sampler is as good as before


def test_one_refused_request_does_not_wait_for_the_others(whole, fake):
    fake.odd = ["hang", "hang", 400, "hang", "hang"]
    began = time.monotonic()
    with pytest.raises(ServerError, match="refused"):
        draw(whole)
    assert time.monotonic() - began < 5


# --- the server's command line ---------------------------------------------------------------------------


def test_the_command_has_what_the_sampler_relies_on():
    command = server_command("some/model", 8123, adapters=2, rank=12, python="py")
    text = " ".join(command)
    assert command[:3] == ["env", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1", "py"]
    flags = ["--model some/model", "--port 8123", "--host 127.0.0.1", "--enable-lora", "--max-loras 2"]
    flags += ["--max-lora-rank 16", "--generation-config vllm", "--logprobs-mode processed_logprobs"]
    for flag in flags:
        assert flag in text
    whole = " ".join(server_command("some/model", adapters=0))
    assert "VLLM_SERVER_DEV_MODE=1" in whole and "lora" not in whole.lower()
