"""One log-probability per sampled token, from hidden states and the head's weight, without the logits.

The usual way builds N x V logits to read one number of each row.  Here the vocabulary is visited in slices:
the forward keeps a running maximum and sum per row, the backward makes each slice of the logits once more.

    reference.py   the plain way, for small logits and as the oracle of the others
    chunked.py     slices in PyTorch, on any device
    kernels.py     the same in Triton, tile by tile in registers; fused.py launches them
    autograd.py    what the two share: what is saved, which rows are visited, the two large products
"""

from __future__ import annotations

import importlib.util

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tangolite.logprob import autograd, reference

BACKENDS = ("auto", "reference", "chunked", "triton")
SMALL = 2**22  # logits (16 MB in float32) up to which the plain way is as fast and its memory no matter


def linear_logprob(
    hidden: Float[Tensor, "... D"],
    weight: Float[Tensor, "V D"],
    target: Int[Tensor, "..."],
    *,
    temperature: float = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    mask: Bool[Tensor, "..."] | None = None,
    return_entropy: bool = False,
    backend: str = "auto",
) -> Float[Tensor, "..."] | tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """log softmax(z)[target] in nats, and the entropy of softmax(z) if asked, where
    z = softcap tanh((hidden weight' + bias) / softcap) / temperature.

    Logits are float32 whatever the inputs are (float64 for float64), and so are the results.  A temperature
    of 0 stands for greedy decoding, whose log-probs are the untempered ones.  Rows outside ``mask`` are
    never read: log-prob 0, entropy 0, gradient 0.  Gradients flow to hidden, weight and bias, each computed
    only if it is required; a row whose incoming gradient is 0 costs nothing in the backward.

    ``backend``: "reference" (plain), "chunked" (PyTorch, any device), "triton" (CUDA; CPU tensors under
    TRITON_INTERPRET=1), or "auto": triton on CUDA, on the CPU chunked unless the logits are small.

    Raises ValueError for what does not fit, a target outside the vocabulary, or a weight that is not all
    there (sharded, meta, quantised).  On CUDA the check of the targets waits for the device once.
    """
    _check(hidden, weight, target, bias, mask)
    if temperature < 0 or (softcap is not None and softcap <= 0):
        raise ValueError(f"temperature must be >= 0 and softcap > 0, got {temperature} and {softcap}")
    chosen = choose_backend(hidden, weight, backend)
    if target.dim() == 0:
        hidden, target, mask = hidden[None], target[None], None if mask is None else mask[None]
        results = _run(chosen, hidden, weight, target, mask, bias, temperature, softcap, return_entropy)
        results = tuple(x[0] for x in results)
    else:
        results = _run(chosen, hidden, weight, target, mask, bias, temperature, softcap, return_entropy)
    return results if return_entropy else results[0]


def choose_backend(hidden: Tensor, weight: Tensor, asked: str = "auto") -> str:
    """The backend that `linear_logprob` takes for these tensors; ValueError if the one asked for cannot."""
    if asked not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {asked!r}")
    if asked == "triton":
        _check_triton(hidden, weight)
    if asked != "auto":
        return asked
    rows = hidden.numel() // max(hidden.shape[-1], 1)
    if rows * weight.shape[0] <= SMALL:
        return "reference"
    return "triton" if hidden.is_cuda and _fits_triton(hidden, weight) else "chunked"


def _fits_triton(hidden: Tensor, weight: Tensor) -> bool:
    """Cards before Ampere have no fast path for these tiles: their registers would spill."""
    if torch.float64 in (hidden.dtype, weight.dtype) or not importlib.util.find_spec("triton"):
        return False
    return torch.cuda.get_device_capability(hidden.device)[0] >= 8


def _run(backend, hidden, weight, target, mask, bias, temperature, softcap, entropy):
    target = target.long()
    mask = None if mask is None else mask.bool()
    scale = 1 / temperature if temperature > 0 else 1.0
    if backend == "reference":
        autograd.check_targets(target, mask, weight.shape[0])
        return reference.logp_and_entropy(hidden, weight, target, mask, bias, scale, softcap, entropy)
    logp, uncertainty, *_ = autograd.head_logp(
        hidden, weight, target, mask, bias, float(scale), softcap, entropy, backend
    )
    return (logp, uncertainty) if entropy else (logp,)


def _check(hidden, weight, target, bias, mask) -> None:
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if x is not None and not x.is_floating_point():
            raise ValueError(
                f"{name} must be floating point, got {x.dtype}: pass hidden states and the head's own "
                f"weight, neither ids nor a quantised weight"
            )
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(f"target must hold token ids, got {target.dtype}")
    sharded = any(hasattr(x, "placements") for x in (hidden, weight, bias)) or weight.dim() == 1
    if sharded or (weight.numel() == 0 and hidden.shape[-1] > 0):
        raise ValueError(
            f"weight {tuple(weight.shape)} ({type(weight).__name__}) is not the whole head: a shard of FSDP, "
            f"ZeRO-3 or tensor parallelism has to be gathered first (e.g. lm_head.weight.full_tensor())"
        )
    if weight.is_meta or hidden.is_meta:
        raise ValueError("hidden and weight must hold numbers, not stand on the meta device: load them first")
    if weight.dim() != 2 or hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
        raise ValueError(f"the last size of hidden must be the width of weight (V, D), got {shapes}")
    if target.shape != hidden.shape[:-1] or (mask is not None and mask.shape != target.shape):
        shapes = f"hidden {tuple(hidden.shape)}, target {tuple(target.shape)}"
        raise ValueError(f"target and mask must have the leading shape of hidden, got {shapes}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be (V,) = ({weight.shape[0]},), got {tuple(bias.shape)}")
    places = {x.device for x in (hidden, weight, target, bias, mask) if x is not None}
    if len(places) > 1:
        raise ValueError(f"all tensors must be on one device, got {', '.join(sorted(map(str, places)))}")


def _check_triton(hidden: Tensor, weight: Tensor) -> None:
    if not importlib.util.find_spec("triton"):
        raise ValueError('the package triton is not installed: pip install triton, or backend="chunked"')
    if torch.float64 in (hidden.dtype, weight.dtype):
        raise ValueError('backend="triton" computes in float32: for float64 use "chunked" or "reference"')
    if not hidden.is_cuda:
        from tangolite.logprob.fused import interpreted

        if not interpreted():
            raise ValueError(
                f'backend="triton" needs CUDA tensors, got {hidden.device}: use backend="chunked", or set '
                f"TRITON_INTERPRET=1 before Python starts to run the kernels, slowly, on the CPU"
            )
