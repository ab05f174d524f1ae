"""What a recipe needs before it is run: memory by part, and seconds an update, from shapes and a card.

    python -m tangolite train --recipe tango-7b --dry-run --card A100-80GB

Memory is counted in the two phases of an update, sampling and learning, and the larger one is the peak.  The
counts are checked against measured peaks in the tests; the times are what arithmetic and memory traffic allow
at the efficiencies named below, so a real run is slower, never faster.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tangolite.logprob.autograd import SLICES
from tangolite.models import WEIGHTS

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
NF4 = (
    0.5 + 1 / 64 + 4 / 64 / 256
)  # bytes a weight: 4 bits, an 8-bit scale per 64, a float32 scale per 256 of those
PROMPT = 256  # tokens assumed before a completion, unless told


@dataclass(frozen=True)
class Shape:
    """A decoder of the Llama and Qwen2 family."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_size: int
    inner: int
    vocabulary: int
    tied: bool

    @property
    def linear(self) -> int:
        """Weights in the linear layers of all blocks: what is quantised, and what adapters attach to."""
        return self.layers * sum(a * b for a, b in self.matrices)

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(in, out) of every linear layer of one block."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = [(self.width, queries), (self.width, keys), (self.width, keys), (queries, self.width)]
        return [*attention, (self.width, self.inner), (self.width, self.inner), (self.inner, self.width)]

    @property
    def tables(self) -> int:
        """Weights outside: embedding and output layer."""
        return self.vocabulary * self.width * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.linear + self.tables + self.width * (2 * self.layers + 1)

    def adapter(self, rank: int) -> int:
        return self.layers * sum(rank * (a + b) for a, b in self.matrices)

    @property
    def kept(self) -> int:
        """Numbers per token that one block keeps for its backward pass."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        return 6 * self.width + 4 * queries + 4 * keys + 4 * self.inner


SHAPES = {
    "smollm2-135m": Shape(30, 576, 9, 3, 64, 1536, 49_152, True),
    "Qwen/Qwen2.5-0.5B-Instruct": Shape(24, 896, 14, 2, 64, 4864, 151_936, True),
    "Qwen/Qwen2.5-7B": Shape(28, 3584, 28, 4, 128, 18_944, 152_064, False),
    "Qwen/Qwen2.5-Math-7B": Shape(28, 3584, 28, 4, 128, 18_944, 152_064, False),
}


class Card(NamedTuple):
    """Peak operations a second in 16 bits, bytes a second and bytes of memory, by the maker's sheet."""

    flops: float
    bandwidth: float
    memory: float


CARDS = {
    "T4": Card(65e12, 0.32e12, 15e9),
    "RTX-4060": Card(60e12, 0.27e12, 8e9),
    "A100-80GB": Card(312e12, 2.0e12, 80e9),
    "H100": Card(800e12, 3.3e12, 80e9),
    "H200": Card(800e12, 4.3e12, 141e9),
    "laptop": Card(0.15e12, 15e9, 8e9),  # two CPU cores, float32
}
LEARNING, READING = 0.4, 0.6  # shares of those peaks that are assumed to be reached


class Need(NamedTuple):
    """Bytes of one process by part, in each phase of an update, and seconds an update."""

    always: dict[str, float]
    sampling: dict[str, float]
    learning: dict[str, float]
    seconds: dict[str, float]

    @property
    def peak(self) -> float:
        return sum(self.always.values()) + max(sum(self.sampling.values()), sum(self.learning.values()))


def shape_of(name: str) -> Shape:
    """By name, from a model's folder, or of a built-in model; ValueError for what is not known here."""
    if name in SHAPES:
        return SHAPES[name]
    file = next((f for f in (Path(name), WEIGHTS / name) if (f / "config.json").is_file()), None)
    if file is None:
        known = ", ".join(SHAPES)
        raise ValueError(
            f"the shape of {name!r} is not known: a folder with config.json is read, or one of {known}"
        )
    c = json.loads((file / "config.json").read_text(encoding="utf-8"))
    heads = c["num_attention_heads"]
    return Shape(
        c["num_hidden_layers"], c["hidden_size"], heads, c.get("num_key_value_heads", heads),
        c.get("head_dim") or c["hidden_size"] // heads, c["intermediate_size"], c["vocab_size"],
        c.get("tie_word_embeddings", False),
    )  # fmt: skip


def plan(
    config, shape: Shape, card: Card, *, processes: int = 1, prompt: int = PROMPT, cuda: bool = True
) -> Need:
    """The need of one process; with ``config.spread`` weights and optimizer are divided by the processes."""
    size, tango = SIZES[config.dtype], config.method == "tango"
    players = 2 if tango else 1
    new = max(config.max_new_tokens, config.verifier_max_new_tokens) if tango else config.max_new_tokens
    rows = config.questions * (config.group if tango else config.traces)
    always = _weights(config, shape, players, size, processes if config.spread else 1)
    at_once = min(config.sample_batch or config.questions, config.questions) * (rows // config.questions)
    cache = at_once * (prompt + new) * 2 * shape.layers * shape.kv_heads * shape.head_size * size
    sampling = {"keys and values": cache / (1 if config.sample_batch else processes)}
    if config.quantize == "nf4" and not cuda:
        sampling["widened weights"] = shape.linear * size
    if config.spread:
        sampling["weights brought together"] = shape.parameters * (2 if cuda else size)
    batch = min(config.micro_batch, rows)
    size = 2 if config.spread and cuda else size  # see `parallel.spread`
    learning = learning_parts(config, shape, batch * (prompt + new), batch * new, cuda, size)
    return Need(always, sampling, learning, _seconds(config, shape, card, rows, prompt, new, processes, size))


def _weights(config, shape: Shape, players: int, size: int, share: int) -> dict[str, float]:
    if config.adapters is None:
        one = shape.parameters
        return {
            "weights": players * one * size / share,
            "references": (players if config.method == "tango" else 0) * one * size / share,
            "gradients": one * size / share * players,
            "optimizer": players * 2 * one * size / share,
        }
    adapter = shape.adapter(config.adapters.get("rank", 16)) * 4
    base = (
        shape.linear * (NF4 if config.quantize == "nf4" else size) + (shape.parameters - shape.linear) * size
    )
    return {"weights": base, "adapters": players * adapter, "gradients and optimizer": players * 3 * adapter}


def learning_parts(config, shape: Shape, tokens: int, new: int, cuda: bool, size: int) -> dict[str, float]:
    """Of a forward and backward pass over a micro-batch of ``tokens``, of which ``new`` have a log-prob."""
    one_block, logprob = tokens * shape.kept * size, _logprob(shape, new, cuda, size)
    if config.checkpointing:  # the log-probs' backward is over when the first block is computed again
        inputs = tokens * shape.layers * shape.width * size
        return {"inputs of blocks": inputs, "one block, or log-probs": max(one_block, logprob)}
    return {"activations": shape.layers * one_block, "log-probs": logprob}


def _logprob(shape: Shape, tokens: int, cuda: bool, size: int) -> float:
    """A slice of the logits and the gradients of rows, or the logits where they are small (`logprob`)."""
    if not cuda and tokens * shape.vocabulary <= 2**22:
        return 5 * 4 * tokens * shape.vocabulary
    slices = SLICES["cuda" if cuda else "cpu"]
    return tokens * (shape.vocabulary / slices * (size if cuda else 8) + 3 * shape.width * 4)


def _seconds(config, shape, card: Card, rows, prompt, new, processes, size) -> dict[str, float]:
    """Sampling reads all weights once a token of a batch; learning multiplies them 4 to 8 times a token."""
    held = shape.linear * (NF4 if config.quantize == "nf4" else size) + shape.tables * size
    cache = (prompt + new / 2) * 2 * shape.layers * shape.kv_heads * shape.head_size * size
    batches = max(1, -(-config.questions // (config.sample_batch or config.questions)) / processes)
    reading = new * batches * (held + cache * rows / max(batches * processes, 1)) / card.bandwidth
    arithmetic = 2 * shape.parameters * rows * (prompt + new) / processes / card.flops
    passes = 2 + (4 if config.adapters else 6) + (2 if config.checkpointing else 0)
    learning = passes * shape.parameters * rows * (prompt + new) / processes / card.flops
    return {"sampling": (reading + arithmetic) / READING, "learning": learning / LEARNING}


def told(config, shape: Shape, name: str, *, processes: int = 1) -> str:
    """The plan as text, for `train --dry-run`."""
    cuda, card = name != "laptop", CARDS[name]
    need = plan(config, shape, card, processes=processes, cuda=cuda)
    phase = "sampling" if sum(need.sampling.values()) > sum(need.learning.values()) else "learning"
    lines = [f"{config.name}: {shape.parameters / 1e9:.2f}B parameters, {processes} process(es) on {name}"]
    for title, parts in (("always", need.always), ("sampling", need.sampling), ("learning", need.learning)):
        lines += [f"  {title:9} {what:26} {value / 1e9:9.2f} GB" for what, value in parts.items()]
    verdict = "fits" if need.peak < 0.92 * card.memory else "does NOT fit"
    lines.append(f"  peak ({phase}) {need.peak / 1e9:.2f} GB of {card.memory / 1e9:.0f} GB: {verdict}")
    total = sum(need.seconds.values())
    spent = ", ".join(f"{what} {value:.1f} s" for what, value in need.seconds.items())
    hours = total * config.updates / 3600
    lines.append(f"  an update takes at least {total:.1f} s ({spent}); all {config.updates}: {hours:.1f} h")
    return "\n".join(lines)


def dry_run(config, card: str, processes: int = 1) -> str:
    """Every setting of a recipe, and what it needs."""
    from tangolite.adapters import base_of
    from tangolite.settings import plain

    settings = [f"  {name}: {value}" for name, value in plain(config).items()]
    shape = shape_of(base_of(config.generator if config.method == "tango" else config.policy))
    return "\n".join([*settings, told(config, shape, card, processes=processes)])
