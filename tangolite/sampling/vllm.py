"""Rollouts from a running vLLM server, over its HTTP interface (written against vLLM 0.32).

Prompts go out and completions come back as token ids, and every sampling field is sent, so that nothing of
the model's own generation config counts.  The server computes with other kernels and often in another
precision, so the log-probs that training needs are made again by the trainer; how far the server's were
from them is kept as `gap`.

Each prompt is a request of its own, many at a time: a request has one seed, and vLLM would give every prompt
in it the same random numbers, so that equal prompts would get equal completions.

Weights go through a folder that trainer and server both see, adapters and whole models alike.  Left out:
vLLM's own weight transfer (NCCL, CUDA IPC), which needs vllm inside the trainer and GPUs on both sides.
"""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from torch.nn.utils.rnn import pad_sequence

from tangolite.adapters import save_adapter
from tangolite.models import Policy
from tangolite.rollouts import Rollouts, pad_right
from tangolite.sampling import _padded, _rollouts, logp_of

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank takes
PARALLEL = 64  # requests in flight


class ServerError(ConnectionError):
    """The server is not there, refuses, or gives something else than it was asked for."""


class _Unanswered(Exception):
    """What another attempt may mend: no connection, no answer in time, an error of the server's own."""


class Completion(NamedTuple):
    """Sampled ids, and the server's log-probs of them."""

    ids: list[int]
    logp: list[float]


def server_command(
    model: str | Path,
    port: int = 8000,
    *,
    adapters: int = 2,
    rank: int = 64,
    dtype: str = "bfloat16",
    python: str = "python",
) -> list[str]:
    """The command line of a server for `VllmSampler`, heard on this machine alone (vLLM runs on Linux).

    ``adapters`` is how many adapters of ``model`` play, of at most ``rank``.  0 is for one whole model whose
    weights are replaced, by an interface that vLLM opens for development only.
    """
    mode = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" if adapters else "VLLM_SERVER_DEV_MODE=1"
    fitting = next((r for r in RANKS if r >= rank), rank)
    lora = ("--enable-lora", "--max-loras", str(adapters), "--max-lora-rank", str(fitting))
    return [
        *("env", mode, python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", dtype, "--enable-prefix-caching"),
        *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
        *(lora if adapters else ()),
    ]


class VllmSampler:
    """A policy's `sampler`: ``policy.sampler = VllmSampler(url, model, folder=...)``.

    ``model`` is the server's name for the base or the whole model, or the name that an adapter's versions
    begin with there; ``folder`` must have the same path on the server's side.  Call `publish` before the
    first batch and after every update.

    ``timeout`` (seconds) is for one answer.  What fails is sent again up to ``retries`` times, after 1, 2,
    4, … seconds.  ``gap`` is the mean distance in nats between the server's and the trainer's log-probs of
    the last batch's tokens; above ``max_gap`` the batch is refused.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        folder: str | Path,
        timeout: float = 600.0,
        retries: int = 5,
        max_gap: float = 0.5,
    ) -> None:
        self.model, self.folder, self.base = model, Path(folder).resolve(), "MODEL"
        self.max_gap, self.gap = max_gap, float("nan")
        self.server = _Server(url.rstrip("/"), timeout, retries, self._advice)
        self.adapter: str | None = None
        self.published: Path | None = None

    @property
    def served(self) -> str:
        """The name that requests ask for: every version of an adapter has its own."""
        return f"{self.model}-{self.published.name}" if self.adapter and self.published else self.model

    def __call__(
        self,
        policy: Policy,
        prompts: Sequence[Sequence[int]],
        *,
        n: int = 1,
        max_new_tokens: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Rollouts:
        """As `sample`.  Raises ServerError, and gives no part of the batch, where the server fails."""
        ids, length = _padded(policy, prompts)
        copies = n if temperature == 0 else 1  # greedy ones are all the same, and vLLM refuses n > 1 there
        seeds = torch.randint(2**62, (len(prompts),), generator=generator).tolist()
        asked = [
            request_of(policy, prompt, n // copies, max_new_tokens, temperature) | {"seed": seed}
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        rows = [row for found in self._complete(asked) for row in found * copies]
        tokens, _ = pad_right([row.ids for row in rows], policy.pad_id)
        theirs = pad_sequence([torch.tensor(row.logp) for row in rows], batch_first=True)
        rollouts = _rollouts(policy, ids, length, n, tokens)
        ours = logp_of(policy, rollouts, temperature)
        self.gap = float((ours - theirs)[rollouts.mask].abs().mean())
        if not self.gap <= self.max_gap:
            raise ServerError(
                f"the server does not serve these weights: its log-probs of {self.served!r} are "
                f"{self.gap:.3g} nats a token from the trainer's (allowed: {self.max_gap:g}). Publish after "
                f"every update. {self._advice()}"
            )
        return rollouts.with_(old_logp=ours)

    def publish(self, policy: Policy) -> None:
        """Have the server sample from the policy's weights as they are now; ServerError if it does not.

        They are written to ``folder/<adapter>/<number>`` (``weights`` for a whole model), and what was
        published before is removed.
        """
        before = self.served if self.published else None
        home = self.folder / (policy.adapter or "weights")
        self.base, self.adapter = policy.name or self.base, policy.adapter
        self.published = home / str(time.time_ns())
        (save_adapter if self.adapter else save_weights)(policy, self.published)
        self.server.retried(self._load)
        if self.adapter and before:
            with suppress(ServerError, _Unanswered):  # a server that was restarted does not know it
                self.server.call("/v1/unload_lora_adapter", {"lora_name": before})
        for old in home.iterdir():
            if old != self.published:
                shutil.rmtree(old, ignore_errors=True)

    def _load(self) -> None:
        """Have the server read what was published last, unless it did: it may have been restarted since."""
        if self.published is None:
            return
        call, folder, version = self.server.call, str(self.published), self.published.name
        if self.adapter:  # under a new name: with load_inplace vLLM reads the files again at every step
            if self.served not in [model["id"] for model in call("/v1/models")["data"]]:
                call("/v1/load_lora_adapter", {"lora_name": self.served, "lora_path": folder})
        elif call("/weight_info")["weight_version"] != version:
            call("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
            if not call("/reset_prefix_cache", {})["success"]:
                raise _Unanswered("it still works on prompts under the old weights")
            call("/update_weight_version", {"new_version": version})

    def _complete(self, asked: list[dict]) -> list[list[Completion]]:
        """All answers, in order; another attempt asks for those that are missing, with the same seeds."""
        answers: dict[int, list[Completion]] = {}

        def one(index: int) -> None:
            request = asked[index] | {"model": self.served}
            answers[index] = completions(self.server.call("/v1/completions", request), request)

        def attempt() -> None:
            self._load()
            self.server.at_once(one, [i for i in range(len(asked)) if i not in answers])

        self.server.retried(attempt)
        return [answers[i] for i in range(len(asked))]

    def _advice(self) -> str:
        port = urlsplit(self.server.url).port or 8000
        command = shlex.join(server_command(self.base, port, adapters=2 if self.adapter else 0))
        return f"Nothing of this batch was used. Start the server as `{command}`, then go on with --resume"


def request_of(policy: Policy, prompt: Sequence[int], n: int, limit: int, temperature: float) -> dict:
    """One prompt's request: the tempered distribution itself, ended by the policy's own ids alone."""
    return {
        "prompt": list(prompt), "n": n, "max_tokens": limit, "min_tokens": 0,
        "temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "stop": [], "stop_token_ids": list(policy.eos_ids), "ignore_eos": True,
        "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip


def completions(answer: Any, request: dict) -> list[Completion]:
    """What an answer holds; ServerError unless it is exactly what was asked for."""
    n, limit, stops = request["n"], request["max_tokens"], request["stop_token_ids"]
    try:
        choices = list(answer["choices"])
        found = [Completion(c["token_ids"], [*map(float, c["logprobs"]["token_logprobs"])]) for c in choices]
        fits = [len(row.ids) == len(row.logp) for row in found]
        same = [c["prompt_token_ids"] == request["prompt"] for c in choices]
        ends = {c["finish_reason"] for c in choices}
    except (KeyError, TypeError) as error:
        raise ServerError(
            f"vLLM's answer lacks what 0.32 gives, token ids and log-probs: {error!r}"
        ) from error
    if len(found) != n or not all(fits + same):
        raise ServerError(f"vLLM was asked for {n} completions of a prompt and gave {len(found)} others")
    if not ends <= {"stop", "length"}:
        raise _Unanswered(f"a completion ended as {ends}")
    for row in found:
        if ([i + 1 for i, token in enumerate(row.ids) if token in stops] or [limit]) != [len(row.ids)]:
            raise ServerError(
                f"vLLM ended a completion after {len(row.ids)} tokens, neither at one of the ids that were "
                f"given nor at {limit}: it heeds other stops, or its --max-model-len is below "
                f"{len(request['prompt']) + limit}"
            )
    return found


def save_weights(policy: Policy, folder: Path) -> None:
    """A whole model, with the output layer written out even where it is tied to the embedding: from the
    embedding alone vLLM 0.32 on a CPU would keep the old output layer."""
    state = {name: value.detach().cpu().clone() for name, value in policy.model.state_dict().items()}
    policy.model.save_pretrained(folder, state_dict=state)


class _Server:
    """HTTP with patience: calls, many at once, all again after a failure, all dropped when the user stops."""

    def __init__(self, url: str, timeout: float, retries: int, advice: Callable[[], str]) -> None:
        self.url, self.timeout, self.retries, self.advice = url, timeout, retries, advice
        self.open: set[socket.socket] = set()
        self.stopped = False

    def retried(self, attempt: Callable[[], None]) -> None:
        """An attempt and up to ``retries`` more, each told in a line on stderr."""
        for number in range(self.retries + 1):
            try:
                return attempt()
            except _Unanswered as error:
                if number == self.retries:
                    raise ServerError(f"vLLM at {self.url} failed: {error}. {self.advice()}") from error
                print(f"tangolite: vLLM at {self.url}: {error}; again in {2**number} s", file=sys.stderr)
                time.sleep(2**number)

    def at_once(self, one: Callable[[int], None], indices: list[int]) -> None:
        """Call ``one`` for every index, in threads.  The first failure, or Ctrl-C, hangs up on the others:
        the server then stops working on them."""
        try:
            with ThreadPoolExecutor(PARALLEL) as pool:
                waiting = {pool.submit(one, index) for index in indices}
                try:
                    while waiting:  # waking up now and then, or Windows does not hear Ctrl-C
                        done, waiting = wait(waiting, timeout=0.5, return_when=FIRST_EXCEPTION)
                        for future in done:
                            future.result()
                except BaseException:
                    pool.shutdown(wait=False, cancel_futures=True)
                    self._hang_up()
                    raise
        finally:
            self.stopped = False

    def _hang_up(self) -> None:
        self.stopped = True
        for line in list(self.open):
            with suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def call(self, path: str, body: dict | None = None) -> Any:
        """POST the body, or GET without one; JSON is read.  Raises _Unanswered, or ServerError for a 4xx."""
        try:
            status, text = self._exchange(path, body)
            answer = json.loads(text) if status == 200 and text.startswith(("{", "[")) else text
        except (OSError, HTTPException, ValueError) as error:
            raise _Unanswered(f"{type(error).__name__}: {error}") from error
        words = " ".join(text.split())[:500]
        if status >= 500:
            raise _Unanswered(f"{status} {words}")
        if status >= 400:
            raise ServerError(f"vLLM at {self.url} refused {path}: {words} {self.advice()}")
        return answer

    def _exchange(self, path: str, body: dict | None) -> tuple[int, str]:
        parts, kind = urlsplit(self.url), {"https": HTTPSConnection}
        connect = kind.get(parts.scheme, HTTPConnection)
        with closing(connect(parts.hostname, parts.port, timeout=min(self.timeout, 10))) as connection:
            connection.connect()
            line = connection.sock
            line.settimeout(self.timeout)
            self.open.add(line)
            try:
                if self.stopped:
                    raise ConnectionAbortedError("stopped")
                data = None if body is None else json.dumps(body)
                headers = {"Content-Type": "application/json"}
                connection.request("GET" if data is None else "POST", parts.path + path, data, headers)
                response = connection.getresponse()
                return response.status, response.read().decode()
            finally:
                self.open.discard(line)
