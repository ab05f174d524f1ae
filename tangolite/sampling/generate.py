"""Completions by transformers' `generate`, for every model that our decoder does not know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F

from tangolite.rollouts import length_mask


def generate(policy, ids, length, n, max_new_tokens, temperature, generator):
    """Every sampling field is ours: the model's own files, which may say top_k=1, are kept out.

    `generate` draws from the global random state, so ours lends it a seed and puts the old one back.
    """
    from transformers import GenerationConfig

    ids, length = ids.repeat_interleave(n, 0), length.repeat_interleave(n, 0)
    attention = (~length_mask(ids.shape[1] - length, ids.shape[1])).long()
    drawn = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
    drawn |= {"epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
    settings = GenerationConfig(
        **(drawn if temperature > 0 else {}), do_sample=temperature > 0,
        repetition_penalty=1.0, encoder_repetition_penalty=1.0,
        no_repeat_ngram_size=0, length_penalty=1.0, num_beams=1, num_return_sequences=1, min_length=0,
        renormalize_logits=False, guidance_scale=1.0, max_new_tokens=max_new_tokens,
        eos_token_id=list(policy.eos_ids), pad_token_id=policy.pad_id, use_cache=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    device, seeded = policy.device, generator is not None
    forked = torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=seeded)
    with forked, lent(policy.model, settings), unpacked(policy.model):
        if seeded:
            torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        out = policy.model.generate(
            ids.to(device), attention_mask=attention.to(device), generation_config=settings,
            synced_gpus=False,  # spread weights have been brought together (`parallel.brought_together`)
        )  # fmt: skip
    return out.sequences[:, ids.shape[1] :].cpu()


@contextmanager
def lent(model, settings) -> Iterator[None]:
    """`generate` fills what `settings` leave at None from the model's own generation config: lend it ours."""
    own = {m: m.generation_config for m in model.modules() if "generation_config" in vars(m)}
    try:
        for module in own:
            module.generation_config = settings
        yield
    finally:
        for module, config in own.items():
            module.generation_config = config


@contextmanager
def unpacked(model) -> Iterator[None]:
    """On a CPU, 4-bit layers are widened once for all tokens inside, rather than for each token anew.

    The numbers are the same; it takes the memory of the wide weights for as long as it lasts.
    """
    layers = [m for m in model.modules() if type(m).__module__.startswith("bitsandbytes")]
    layers = [layer for layer in layers if layer.weight.device.type == "cpu"]
    try:
        for layer in layers:
            layer.forward = partial(_wide, dequantised(layer), layer.bias)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def dequantised(layer) -> torch.Tensor:
    """(out, in) weight of a 4-bit layer in the type that it computes in."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(layer.weight.data, layer.weight.quant_state).to(
        layer.compute_dtype or torch.float32
    )


def _wide(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    bias = None if bias is None else bias.to(weight.dtype)
    return F.linear(x.to(weight.dtype), weight, bias).to(x.dtype)
