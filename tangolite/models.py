"""The policies: built-in tiny models, or any causal LM of the transformers library.

A `Policy` is a model, its tokenizer and the ids that end a completion.  Its one job in training is
`logp`: the log-probs of rollouts under it, computed by the backbone and `linear_logprob`.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tangolite.logprob import linear_logprob
from tangolite.logprob.reference import plain_logits
from tangolite.rollouts import Rollouts, length_mask

WEIGHTS = Path(__file__).parent / "weights"

ROLES = [
    "<|pad|>",
    "<|eos|>",
    "<|unk|>",
    "<|generator|>",
    "<|verifier|>",
    "<|prior|>",
    "<|posterior|>",
    "<|end|>",
]
TAGS = [
    *("<think>", "</think>", "<step>", "</step>", "<answer>", "</answer>"),
    *("<step_verification>", "</step_verification>", "<final_verification>", "</final_verification>"),
    *("\\boxed{CORRECT}", "\\boxed{INCORRECT}", "\\boxed{", "}"),
]
SYMBOLS = [*"+-*=?:;,. ", *"abcdefghijklmnopqrstuvwxyz"]


def tiny_tokenizer():
    """A fast tokenizer with one token per value (0 to 99), letter, symbol and tag.

    It decodes without loss: the pieces are joined as they are.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ROLES + TAGS + SYMBOLS + [str(value) for value in range(100)]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[1-9]\d|\d|[^\d]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    core.add_tokens(TAGS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<|unk|>", pad_token="<|pad|>", eos_token="<|eos|>",
        additional_special_tokens=ROLES[3:], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    return tokenizer


def tiny_model(
    seed: int,
    *,
    width: int = 64,
    layers: int = 3,
    heads: int = 4,
    vocab_size: int | None = None,
):
    """A randomly initialised Qwen2 of about 130k parameters; the same seed gives the same weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocab_size or len(tiny_tokenizer()), hidden_size=width, intermediate_size=2 * width,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        max_position_embeddings=1024, tie_word_embeddings=True,
        # Fast rotations: with the usual base of 10,000 sixteen dimensions tell near places apart badly, and
        # the model does not learn to follow a question operation by operation (see LOG.md).
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval()


BASE = ""  # in the place of an adapter's name: the shared model with its adapters off


@dataclass
class Policy:
    """A causal LM, its tokenizer and the ids that end a completion."""

    model: nn.Module
    tokenizer: object
    eos_ids: tuple[int, ...]
    pad_id: int
    adapter: str | None = None  # of a base that several policies share; BASE: none of them; None: no adapters
    frozen: bool = False
    name: str = ""  # what the model was loaded from, for the files of its adapters
    gate: nn.Module | None = None  # the root of weights that are spread over processes (see `parallel`)
    checkpointing: bool = False  # make activations again in the backward pass instead of keeping them
    sampler: Callable | None = None  # another way to sample than this model's own (see `sampling.sample`)
    _shape: tuple[float | None, float] | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, model: nn.Module, tokenizer) -> Policy:
        """Reads the end-of-sequence ids (there may be several) from the model's own files."""
        ids = getattr(model.generation_config, "eos_token_id", None)
        ids = tokenizer.eos_token_id if ids is None else ids
        eos = tuple(ids) if isinstance(ids, list | tuple) else (ids,)
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else eos[0]
        return cls(model, tokenizer, eos, pad)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What an optimizer may change: the adapter's own, by its name, whichever adapter is active now.

        Raises ValueError when there is nothing.
        """
        every = self.model.named_parameters()
        if self.adapter is None:
            trainable = {name: p for name, p in every if p.requires_grad}
        else:
            trainable = {n: p for n, p in every if "lora_" in n and f".{self.adapter}." in n}
        if not trainable:
            raise ValueError("this policy has no trainable parameters: nothing would be learned")
        return trainable

    def parameters(self) -> list[nn.Parameter]:
        return list(self.named_parameters().values())

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, a forward of the model is this policy's: its adapter, or none, is the one that counts.

        The adapter stays active afterwards: a backward pass must find it as the forward left it.
        """
        if self.adapter is None:
            yield
        elif self.adapter == BASE:
            with self.model.disable_adapter():
                yield
        else:
            self.model.set_adapter(self.adapter, inference_mode=self.frozen)
            yield

    def frozen_copy(self) -> Policy:
        """An independent copy that never trains: the reference of a KL penalty.

        Of an adapter, a frozen twin on the same base; an adapter that is still zero is the base itself.
        """
        if self.adapter is None:
            model = copy.deepcopy(self.model).eval().requires_grad_(False)
            return Policy(model, self.tokenizer, self.eos_ids, self.pad_id, frozen=True)
        if self.adapter == BASE or not any(
            p.any() for n, p in self.named_parameters().items() if "lora_B" in n
        ):
            return replace(self, adapter=BASE, frozen=True, sampler=None)
        twins = sum(name.startswith(f"{self.adapter}_start") for name in self.model.peft_config)
        twin = f"{self.adapter}_start{twins or ''}"
        self.model.add_adapter(twin, copy.deepcopy(self.model.peft_config[self.adapter]))
        copied = replace(self, adapter=twin, frozen=True, sampler=None)
        with torch.no_grad():
            for mine, theirs in zip(copied.parameters(), self.parameters(), strict=True):
                mine.copy_(theirs)
                mine.requires_grad_(False)
        return copied

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """Text of the ids, special tokens included, without end of sequence and padding at the end."""
        last = len(ids)
        while last and ids[last - 1] in (*self.eos_ids, self.pad_id):
            last -= 1
        return self.tokenizer.decode(ids[:last], skip_special_tokens=False)

    def hidden(self, rollouts: Rollouts) -> Float[Tensor, "B T D"]:
        """The states that predict each completion token, on the model's device."""
        rollouts, backbone = rollouts.to(self.device), self.model.get_decoder()
        ids = torch.cat([rollouts.prompt_ids, rollouts.completion_ids], dim=1)
        prompt = rollouts.prompt_ids.shape[1]
        padding = prompt - rollouts.prompt_length
        given = {}
        if bool((padding > 0).any()):  # right padding cannot be seen by causal attention
            position = (torch.arange(ids.shape[1], device=ids.device)[None] - padding[:, None]).clamp(min=0)
            given = {"attention_mask": (~length_mask(padding, ids.shape[1])).long(), "position_ids": position}
        with recomputed(self.model) if self.checkpointing and torch.is_grad_enabled() else nullcontext():
            out = backbone(input_ids=ids, use_cache=False, **given)
        return out.last_hidden_state[:, prompt - 1 : -1]

    def logp(
        self, rollouts: Rollouts, *, temperature: float = 1.0, return_entropy: bool = False
    ) -> Float[Tensor, "B T"] | tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
        """Log-probs of the completion tokens under the tempered policy, and the entropies if asked."""
        compute = self._logp if self.gate is None else partial(self.gate, self._logp)
        with self.active():
            return compute(rollouts.to(self.device), temperature, return_entropy)

    def _logp(self, rollouts: Rollouts, temperature: float, return_entropy: bool):
        head, (softcap, scale) = self.head()
        return linear_logprob(
            self.hidden(rollouts), head.weight, rollouts.completion_ids, bias=head.bias, softcap=softcap,
            temperature=(temperature or 1.0) / scale, mask=rollouts.mask, return_entropy=return_entropy,
        )  # fmt: skip

    def all_logp(self, rollouts: Rollouts, *, temperature: float = 1.0) -> Float[Tensor, "B T V"]:
        """Log-probs of every word at every completion position: for small vocabularies only."""
        with self.active():
            head, (softcap, scale) = self.head()
            hidden = self.hidden(rollouts)
        logits = plain_logits(hidden, head.weight, head.bias, scale / temperature, softcap)
        return torch.log_softmax(logits, dim=-1)

    def head(self) -> tuple[nn.Linear, tuple[float | None, float]]:
        """The output layer, and the (softcap, scale) that make its products the model's own logits.

        Looked for once, by a forward of a few tokens.  Raises ValueError for a head whose log-probs would not
        be the model's: with adapters, quantised, sharded, or followed by anything but a softcap and a scale.
        """
        head = self.model.get_output_embeddings()
        if type(head) is not nn.Linear:
            kind = f"{type(head).__module__}.{type(head).__name__}"
            raise ValueError(
                f"the output layer is a {kind}; log-probs need a plain Linear: leave the head (lm_head) out "
                f"of adapters, modules_to_save and quantisation"
            )
        if self._shape is None:
            self._shape = shape_of_logits(self.model, head)
        return head, self._shape


SCALES = ("logit_scale", "logits_scaling", "output_multiplier", "lm_head_multiplier")
SOFTCAPS = ("final_logit_softcapping", "softcap")


def shape_of_logits(model: nn.Module, head: nn.Linear) -> tuple[float | None, float]:
    """(softcap, scale) such that scale * softcap tanh(head(hidden) / softcap) are the model's own logits.

    Libraries disagree on the names: `logits_scaling` multiplies in one model and divides in another.  So what
    the configuration names is tried on a few tokens, and what reproduces the model is taken.
    """
    config = model.config.get_text_config()
    named = [getattr(config, name, None) for name in SCALES]
    scales = [1.0, *(x for s in named if s for x in (float(s), 1 / float(s)))]
    cap = next((float(c) for name in SOFTCAPS if (c := getattr(config, name, None))), None)
    ids = torch.arange(min(8, head.weight.shape[0]), device=head.weight.device)[None]
    tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    with sampling_mode(model):
        hidden, theirs = model.get_decoder()(**tokens).last_hidden_state, model(**tokens).logits
    weight, bias = (None if x is None else x.detach() for x in (head.weight, head.bias))
    near = 1e-4 if theirs.dtype == torch.float32 else 2e-2
    for scale in scales:
        softcap = None if cap is None else cap / scale  # the library's scale comes before the cap, ours after
        ours = plain_logits(hidden, weight, bias, scale, softcap)
        close = near * max(1.0, float(ours.nan_to_num().abs().max()))
        if ours.shape == theirs.shape and ours.allclose(theirs.to(ours), rtol=0, atol=close, equal_nan=True):
            return softcap, scale
    raise ValueError(
        f"the logits of {type(model).__name__} are not its head times its last states, with the softcap "
        f"and scale that the configuration names: log-probs made from those would not be the model's"
    )


def trainable_copy(policy: Policy) -> Policy:
    """An independent copy that learns on its own; ValueError for an adapter, which shares its base."""
    if policy.adapter is not None:
        raise ValueError(
            f"{policy.adapter!r} is an adapter: attach another one to the base instead of a copy"
        )
    copied = policy.frozen_copy()
    copied.model.requires_grad_(True)
    copied.frozen = False
    return copied


@contextmanager
def recomputed(model: nn.Module) -> Iterator[None]:
    """Each layer of a forward inside keeps its input alone, and is computed again in the backward pass.

    The library does that for layers in training mode.  Only the layers are put into it, not what is inside
    them, so that dropout stays off: the policy that is trained is the one that sampled.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    before = [layer.training for layer in layers]
    if not all(layer.gradient_checkpointing for layer in layers):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            layer.training = training


@contextmanager
def sampling_mode(model: nn.Module) -> Iterator[None]:
    """No gradient and no dropout inside; the model's previous mode afterwards."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def tiny_policy(seed: int = 0, **sizes: int) -> Policy:
    """An untrained built-in model with its tokenizer."""
    return Policy.of(tiny_model(seed, **sizes), tiny_tokenizer())


def load_policy(
    name_or_folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    nf4: bool = False,
) -> Policy:
    """A built-in model by name (a folder of ``tangolite/weights``), or any causal LM by name or folder.

    Weights are read from safetensors only, with ``nf4`` into 4 bits, computed with in ``dtype``.  Raises
    OSError, with the library's reason, for a name or folder that holds no model.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    source = _source(name_or_folder)
    options = {"quantization_config": four_bits(dtype), "device_map": {"": str(device)}} if nf4 else {}
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, use_safetensors=True, **options)
        model = one_way_of_computing(model.eval()) if nf4 else model.eval().to(device)
        policy = Policy.of(model, load_tokenizer(source))
        return replace(policy, name=str(name_or_folder))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the library raises many kinds, and its words say little of what was asked
        raise _no_model(name_or_folder, " ".join(str(error).split())) from error


def four_bits(dtype: torch.dtype):
    """NF4 with its scales quantised too (QLoRA, arXiv 2305.14314); raises OSError without bitsandbytes."""
    from transformers import BitsAndBytesConfig

    if importlib.util.find_spec("bitsandbytes") is None:
        raise OSError("4-bit weights need the package bitsandbytes: pip install bitsandbytes")
    kind = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **kind)


def one_way_of_computing(model: nn.Module) -> nn.Module:
    """Keeps bitsandbytes (0.50) from repacking 4-bit layers on CPUs with bfloat16 at the first sample.

    The repacked layers compute in bfloat16, so the policy that samples would not be the one that is trained
    (see LOG.md), and they pass no gradient on.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def built_in() -> list[str]:
    """The models that need no download."""
    return sorted(path.parent.name for path in WEIGHTS.glob("*/config.json"))


def _source(name_or_folder: str | Path) -> Path | str:
    """Where to load from; a hub is asked for OWNER/NAME alone, so that a misspelt name fails at once."""
    if str(name_or_folder) in built_in():
        return WEIGHTS / str(name_or_folder)
    if Path(name_or_folder).is_dir():
        return Path(name_or_folder)
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(name_or_folder)):
        raise _no_model(name_or_folder, "neither a built-in model, nor a folder, nor OWNER/NAME of a hub")
    return name_or_folder


def _no_model(name_or_folder: str | Path, reason: str) -> OSError:
    return OSError(
        f"no model {str(name_or_folder)!r} ({reason}). Built in are {', '.join(built_in()) or 'none here'}; "
        f"a folder of your own needs config.json, model.safetensors and the tokenizer's files"
    )


def load_tokenizer(source: str | Path, **options):
    """The tokenizer of a model, as its own files describe it.

    `AutoTokenizer` (5.24) goes by the model's type: for a folder with a Qwen2 model it puts Qwen's own
    splitting rules in place of those in `tokenizer.json`.  A tokenizer that was saved as a generic fast
    one is therefore read as such.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file, generic = Path(source) / "tokenizer_config.json", ("PreTrainedTokenizerFast", "TokenizersBackend")
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if settings.get("tokenizer_class") in generic:
        return PreTrainedTokenizerFast.from_pretrained(source)
    return AutoTokenizer.from_pretrained(source, **options)


def count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def token_table(policy: Policy, ids: list[int] | Int[Tensor, " T"]) -> list[str]:
    """The piece of text that each token stands for, for display."""
    return [policy.tokenizer.decode([int(i)], skip_special_tokens=False) for i in ids]
