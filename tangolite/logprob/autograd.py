"""What the chunked and the Triton backend share: the operator, its gradient, and which rows are visited.

With z the logits of a row, m their maximum, s = sum e^(z-m), p = e^(z-m)/s and H the entropy,

    logp = (z_t - m) - log s                     H = log s - sum p (z-m)
    d logp / dz = 1_t - p                        dH / dz = -p (log p + H)

m and log s are kept apart: z_t - (m + log s) would lose what a large common offset of the logits rounds away.
The backward has m, log s, logp and H (16 bytes a row; 12 without entropy) and makes the logits once more.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

LOWEST = -1e30  # stands for -inf, of which a difference would be NaN


class Head(NamedTuple):
    """Rows and the head that they meet: logits are softcap(hidden weight' + bias) * scale."""

    hidden: Float[Tensor, "N D"]
    weight: Float[Tensor, "V D"]
    bias: Float[Tensor, " V"] | None
    scale: float
    softcap: float | None

    def rows(self, span: slice) -> Head:
        return self._replace(hidden=self.hidden[span])

    @property
    def wide(self) -> torch.dtype:
        """Of the logits and of every sum: float32, or float64 if anything is."""
        return torch.promote_types(torch.promote_types(self.hidden.dtype, self.weight.dtype), torch.float32)


class RowValues(NamedTuple):
    """Results of the forward, one per row (``entropy`` is empty unless asked for)."""

    logp: Float[Tensor, " N"]
    entropy: Float[Tensor, " N"]
    maximum: Float[Tensor, " N"]
    log_sum: Float[Tensor, " N"]


class RowTerms(NamedTuple):
    """Of a row's logits the gradient is -p (constant + linear log p), and ``at_target`` at the target."""

    maximum: Float[Tensor, " N"]
    log_sum: Float[Tensor, " N"]
    at_target: Float[Tensor, " N"]
    constant: Float[Tensor, " N"]
    linear: Float[Tensor, " N"] | None

    def rows(self, span: slice) -> RowTerms:
        return RowTerms(*(None if x is None else x[span] for x in self))


# --- the operator ---------------------------------------------------------------------------------------
# An operator of its own, so that torch.compile takes it as one piece: which rows are visited depends on data.


@torch.library.custom_op("tangolite::head_logp", mutates_args=())
def head_logp(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    entropy: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`RowValues` of all rows, in the shape of target; zeros outside mask."""
    check_targets(target, mask, weight.shape[0])
    module = backend_module(backend)
    rows = Rows(target.shape, None if mask is None else mask.nonzero(as_tuple=True))
    bias = None if bias is None else bias.contiguous()
    head = Head(rows.pick(hidden).to(module.operand(hidden, weight)), weight, bias, scale, softcap)
    tokens = rows.pick(target).contiguous()
    with torch.autocast(hidden.device.type, enabled=False):  # which would round the logits to 16 bits
        parts = [
            module.statistics(head.rows(span), tokens[span], entropy, slice_width(weight))
            for span in row_blocks(len(tokens))
        ]
    logp, uncertainty, maximum, log_sum = (torch.cat(x) for x in zip(*parts, strict=True))
    uncertainty = rows.put_back(uncertainty) if entropy else uncertainty[:0]
    return rows.put_back(logp), uncertainty, rows.put_back(maximum), rows.put_back(log_sum)


@head_logp.register_fake
def _(hidden, weight, target, mask, bias, scale, softcap, entropy, backend):
    wide = Head(hidden, weight, bias, scale, softcap).wide
    row = lambda: torch.empty_like(target, dtype=wide, memory_format=torch.contiguous_format)  # noqa: E731
    return row(), row() if entropy else hidden.new_empty(0, dtype=wide), row(), row()


@torch.library.custom_op("tangolite::head_logp_gradient", mutates_args=())
def head_logp_gradient(
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    saved: list[Tensor],
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    backend: str,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; an empty tensor for each that is not needed."""
    module = backend_module(backend)
    live = torch.zeros_like(target, dtype=torch.bool)
    for grad in (grad_logp, grad_entropy):
        live = live if grad is None else live | (grad != 0)
    live = live if mask is None else live & mask
    rows = Rows(target.shape, live.nonzero(as_tuple=True))
    grads = (None if grad is None else rows.pick(grad) for grad in (grad_logp, grad_entropy))
    tokens = rows.pick(target).contiguous()
    terms = row_terms(RowValues(*map(rows.pick, saved)), *grads, scale)
    like, bias = bias, None if bias is None else bias.contiguous()
    head = Head(rows.pick(hidden).to(module.operand(hidden, weight)), weight, bias, scale, softcap)

    with torch.autocast(hidden.device.type, enabled=False), exact_sums(hidden):
        of_hidden, of_weight, of_bias = _products(module, head, tokens, terms, needed)
    of_hidden = rows.put_back(of_hidden.to(hidden.dtype)) if needed[0] else hidden.new_empty(0)
    of_bias = of_bias if like is None else of_bias.to(like.dtype)
    return of_hidden, of_weight if needed[1] else weight.new_empty(0), of_bias


@head_logp_gradient.register_fake
def _(grad_logp, grad_entropy, saved, hidden, weight, target, mask, bias, scale, softcap, backend, needed):
    of_bias = weight.new_empty(0, dtype=Head(hidden, weight, bias, scale, softcap).wide)
    return (
        hidden.new_empty(hidden.shape if needed[0] else 0),
        weight.new_empty(weight.shape if needed[1] else 0),
        of_bias if bias is None else bias.new_empty(bias.shape if needed[2] else 0),
    )


def _save(ctx, inputs, output) -> None:
    hidden, weight, target, mask, bias, ctx.scale, ctx.softcap, ctx.entropy, ctx.backend = inputs
    ctx.save_for_backward(hidden, weight, target, mask, bias, *output)
    ctx.set_materialize_grads(False)  # an unused result has no gradient, rather than a tensor of zeros


def _backward(ctx, grad_logp, grad_entropy, *_):
    hidden, weight, target, mask, bias, *saved = ctx.saved_tensors
    if not ctx.entropy:
        grad_entropy, saved[1] = None, saved[0]  # an empty tensor has no rows to pick from
    needed = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[4]]
    if grad_logp is None and grad_entropy is None:
        return (None,) * 9
    made = head_logp_gradient(
        grad_logp, grad_entropy, saved, hidden, weight, target, mask, bias,
        ctx.scale, ctx.softcap, ctx.backend, needed,
    )  # fmt: skip
    of_hidden, of_weight, of_bias = (x if need else None for x, need in zip(made, needed, strict=True))
    return of_hidden, of_weight, None, None, of_bias, None, None, None, None


head_logp.register_autograd(_backward, setup_context=_save)


def _no_second(ctx, *_):
    raise RuntimeError('this backend gives first derivatives only: use backend="reference" for second ones')


head_logp_gradient.register_autograd(_no_second)

# --- its parts ------------------------------------------------------------------------------------------


def row_terms(values: RowValues, grad_logp, grad_entropy, scale: float) -> RowTerms:
    """g (1_t - p) - h p (log p + H), with g and h the incoming gradients, as -p (constant + linear log p)."""
    g = torch.zeros_like(values.logp) if grad_logp is None else grad_logp * scale
    # 1 - p of a confident token is a small number: -expm1(log p) has all its digits.
    at_target = g * -torch.expm1(values.logp)
    if grad_entropy is None:
        return RowTerms(values.maximum, values.log_sum, at_target, g, None)
    h = grad_entropy * scale
    at_target = at_target - h * values.logp.exp() * (values.logp + values.entropy)
    return RowTerms(values.maximum, values.log_sum, at_target, g + h * values.entropy, h)


def _products(module, head: Head, tokens, terms: RowTerms, needed) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, one slice of the vocabulary at a time: each slice of the weight's is written once."""
    (n, width_of_hidden), vocabulary = head.hidden.shape, head.weight.shape[0]
    make = head.hidden.new_zeros
    of_hidden = make(n if needed[0] else 0, width_of_hidden, dtype=head.wide)
    of_weight = head.weight.new_empty((vocabulary if needed[1] else 0, width_of_hidden))
    of_bias = make(vocabulary if needed[2] else 0, dtype=head.wide)
    blocks, width = row_blocks(n), slice_width(head.weight)
    buffer = head.hidden.new_empty(min(n, ROWS) * width, dtype=module.buffer_dtype(head))
    for start in range(0, vocabulary, width):
        stop = min(start + width, vocabulary)
        part = of_weight[start:stop]
        if needed[1] and len(blocks) > 1:  # summed over the blocks in full precision, then rounded once
            part = make(part.shape, dtype=head.wide)
        for block in blocks:
            block_head = head.rows(block)
            dz = module.logit_gradient(block_head, tokens[block], terms.rows(block), start, stop, buffer)
            if needed[0]:
                product(of_hidden[block], dz, head.weight[start:stop], add=True)
            if needed[1]:
                product(part, dz.T, block_head.hidden, add=len(blocks) > 1)
            if needed[2]:
                of_bias[start:stop] += dz.sum(0, dtype=head.wide)
        if needed[1] and len(blocks) > 1:
            of_weight[start:stop] = part
    return of_hidden, of_weight, of_bias


HALF = (torch.float16, torch.bfloat16)


def product(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """out = a @ b, or out += a @ b: summed in float32 or better whatever the operands are, rounded once."""
    if a.is_cuda and a.dtype in HALF and a.dtype == b.dtype:  # the sums of a tensor core are float32
        if out.dtype == a.dtype:
            torch.mm(a, b, out=out)
        elif add:
            torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
        else:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
        return
    wide = torch.promote_types(out.dtype, torch.float32)
    a, b = a.to(wide), b.to(wide)
    if add:
        out.addmm_(a, b)
    elif out.dtype == wide:
        torch.mm(a, b, out=out)
    else:
        out.copy_(a @ b)


@contextmanager
def exact_sums(x: Tensor) -> Iterator[None]:
    """Keeps cuBLAS from adding the parts of a long sum in 16 bits, as it may by default."""
    if not x.is_cuda:
        yield
        return
    flags, names = (
        torch.backends.cuda.matmul,
        [f"allow_{t}_reduced_precision_reduction" for t in ("bf16", "fp16")],
    )
    before = [getattr(flags, name) for name in names]
    try:
        for name in names:
            setattr(flags, name, False)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(flags, name, value)


class Rows(NamedTuple):
    """The rows that are visited: all of a shape, or those of an index (from `nonzero(as_tuple=True)`)."""

    shape: torch.Size
    index: tuple[Tensor, ...] | None

    @property
    def all(self) -> bool:
        return self.index is None or len(self.index[0]) == self.shape.numel()

    def pick(self, x: Tensor) -> Tensor:
        """(*shape, …) -> (n, …); a view where it can be."""
        if self.all:
            return x.reshape(self.shape.numel(), *x.shape[len(self.shape) :])
        return x[self.index]

    def put_back(self, x: Tensor) -> Tensor:
        """(n, …) -> (*shape, …), zero in the rows that were not visited."""
        if self.all:
            return x.view(*self.shape, *x.shape[1:])
        full = x.new_zeros(*self.shape, *x.shape[1:])
        full[self.index] = x
        return full


ROWS = 8192  # visited at a time
SLICES = {"cpu": 64, "cuda": 24}  # of the vocabulary, at most: the buffer is that part of the logits
NARROWEST = 1024  # narrower slices would not keep a matrix product busy


def row_blocks(n: int) -> list[slice]:
    """At least one, so that no rows give no results rather than an error."""
    return [slice(i, min(i + ROWS, n)) for i in range(0, max(n, 1), ROWS)]


def slice_width(weight: Tensor) -> int:
    """Words of a slice: a multiple of 256, so that every slice but the last is aligned alike."""
    width = max(NARROWEST, weight.shape[0] // SLICES.get(weight.device.type, 24))
    return min(-(-width // 256) * 256, weight.shape[0])


def backend_module(name: str):
    """The module of a backend; Triton is imported only when it is used."""
    return importlib.import_module(f"tangolite.logprob.{'fused' if name == 'triton' else name}")


def check_targets(target: Tensor, mask: Tensor | None, vocabulary: int) -> None:
    """ValueError unless every target inside mask is a token: beyond the weight there is other memory."""
    if torch.compiler.is_compiling():
        return  # inside the compiled program the operator itself checks
    wrong = (target < 0) | (target >= vocabulary)
    wrong = wrong if mask is None else wrong & mask
    if bool(wrong.any()):
        first = int(target[wrong][0])
        raise ValueError(
            f"target must lie in 0..{vocabulary - 1}, got {first} in {int(wrong.sum())} row(s): "
            f"mask out what is not a token"
        )
