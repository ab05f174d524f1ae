"""Our own KV-cache decoder for plain Qwen2 models, one new token per row and step.

Prompts are read once per group, keys and values go into one preallocated cache, finished rows leave the
batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from tangolite.rollouts import length_mask

LEAVE_AT = 0.1  # copying the cache pays once a tenth has finished


def choose(
    logits: Float[Tensor, "B V"], temperature: float, u: Float[Tensor, "B 1"]
) -> tuple[Int[Tensor, " B"], Float[Tensor, " B"]]:
    """One token per row and its log-prob, drawn by inverting the cumulative distribution.

    ``u`` is uniform on [0, 1).  The token is the first whose cumulative probability reaches 1 - u, so a token
    of probability 0 is never drawn.
    """
    logp = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        token = logp.argmax(-1)
    else:
        cumulative = logp.exp().cumsum(-1)
        token = (cumulative < (1 - u.to(logp.device)) * cumulative[:, -1:]).sum(-1)
    return token, logp.gather(1, token[:, None])[:, 0]


def is_plain_qwen2(model) -> bool:
    """Our decoder knows plain linear layers only: no adapters, no 4-bit weights, no sliding window."""
    config = model.config
    if type(model).__name__ != "Qwen2ForCausalLM" or config.use_sliding_window or config.hidden_act != "silu":
        return False
    homes = (
        *(f"torch.nn.modules.{name}" for name in ("linear", "sparse", "container", "activation")),
        *("transformers.models.qwen2.modeling_qwen2", "transformers.activations"),
    )
    return all(_home(module) in homes for module in model.modules())


def _home(module) -> str:
    """Where its class is written; FSDP2 puts one of its own before it, which computes the same."""
    return next(c for c in type(module).__mro__ if not c.__name__.startswith("FSDP")).__module__


def cached(policy, ids, length, n, max_new_tokens, temperature, generator):
    tokens = torch.full((len(ids) * n, max_new_tokens), policy.pad_id)
    logp = torch.zeros(len(ids) * n, max_new_tokens)
    with torch.inference_mode():  # cheaper than no_grad; what is returned was made outside
        done = _decode(policy, ids, length, n, tokens, logp, temperature, generator)
    return tokens[:, :done], logp[:, :done]


def _decode(policy, ids, length, n, tokens, logp, temperature, generator) -> int:
    """Fill in tokens and log-probs; returns how many columns were needed."""
    max_new_tokens = tokens.shape[1]
    decoder = _Decoder(policy.model, len(ids), n, max_new_tokens)
    hidden = decoder.read(ids.to(policy.device), length.to(policy.device))
    alive, eos = torch.arange(len(tokens)), torch.tensor(policy.eos_ids)
    ended = torch.zeros(
        len(tokens), dtype=torch.bool
    )  # of those in the batch, which go on until they leave it
    for t in range(max_new_tokens):
        u = torch.rand(
            len(tokens), 1, generator=generator
        )  # for all, so that no row's luck hangs on the others
        token, token_logp = choose(decoder.head(hidden), temperature, u[alive])
        tokens[alive, t], logp[alive, t] = token.cpu(), token_logp.cpu()
        ended |= torch.isin(token.cpu(), eos)
        if ended.all() or t + 1 == max_new_tokens:
            break
        if ended.sum() > LEAVE_AT * len(ended):
            running = ~ended
            alive, token, ended = alive[running], token[running], ended[running]
            decoder.keep(running)
        hidden = decoder.step(token)
    return t + 1


class _Decoder:
    """Qwen2, one new token per row and step.

    Keys and values of the U prompts are kept once, (U, heads, P, size) a layer; each row has its own
    for what it sampled, (B, heads, new, size), preallocated.  A query attends to both and one softmax
    runs over the two score blocks.
    """

    def __init__(self, model, prompts: int, n: int, new: int) -> None:
        self.model, self.config, self.n, self.sampled = model, model.config, n, 0
        self.heads, self.kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        self.size, self.head = model.model.layers[0].self_attn.head_dim, model.lm_head
        weight, layers = model.model.embed_tokens.weight, model.model.layers
        shape = (len(layers), 2, prompts * n, self.kv_heads, new, self.size)
        self.own = torch.empty(shape, dtype=weight.dtype, device=weight.device)
        self.slot = torch.arange(prompts * n, device=weight.device)  # row -> its place in (U, n)
        self.layers = [self._fuse(layer) for layer in layers]

    @staticmethod
    def _fuse(layer):
        """One product for queries, keys and values, and one for gate and up."""
        a, m = layer.self_attn, layer.mlp
        qkv = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
        bias = torch.cat([a.q_proj.bias, a.k_proj.bias, a.v_proj.bias])
        return layer, qkv, bias, torch.cat([m.gate_proj.weight, m.up_proj.weight])

    def read(self, ids: Int[Tensor, "U P"], length: Int[Tensor, " U"]) -> Float[Tensor, "B D"]:
        """Run the prompts, keep their keys and values, return the last state once per completion."""
        width, self.prompt_length, self.prompts = ids.shape[1], length, []
        pad = length_mask(width - length, width)
        position = (torch.arange(width, device=ids.device)[None] - (width - length)[:, None]).clamp(min=0)
        causal = torch.ones(width, width, dtype=torch.bool, device=ids.device).tril()
        itself = torch.eye(width, dtype=torch.bool, device=ids.device)  # a padding row sees itself
        seen = (causal & ~pad[:, None, None]) | itself
        self.hidden_pad = pad[:, None, None, None] if bool(pad.any()) else None

        def attend(index, q, k, v):
            self.prompts.append((k.mT.contiguous(), v.contiguous()))  # views would be copied at every step
            shared = self.heads != self.kv_heads
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=shared)

        return self._forward(ids, position, attend)[:, -1].repeat_interleave(self.n, 0)

    def step(self, token: Int[Tensor, " B"]) -> Float[Tensor, "B D"]:
        """Append one token to every row."""
        position = (self.prompt_length.repeat_interleave(self.n)[self.slot] + self.sampled)[:, None]
        hidden = self._forward(token[:, None], position, self._attend)[:, 0]
        self.sampled += 1
        return hidden

    def keep(self, rows: Tensor) -> None:
        """Go on with some of the rows, and with the prompts that these answer."""
        self.own, self.slot = self.own[:, :, rows], self.slot[rows]
        prompts, place = torch.unique(self.slot // self.n, return_inverse=True)
        if len(prompts) < len(self.prompt_length):
            self.slot = place * self.n + self.slot % self.n
            self.prompts = [(keys[prompts], values[prompts]) for keys, values in self.prompts]
            self.prompt_length = self.prompt_length[prompts]
            self.hidden_pad = None if self.hidden_pad is None else self.hidden_pad[prompts]

    def _attend(self, index, q, k, v) -> Float[Tensor, "B H 1 d"]:
        keys, values = self.own[index][:, :, :, : self.sampled + 1]
        keys[:, :, -1:], values[:, :, -1:] = k, v
        q = q.view(len(q), self.kv_heads, -1, self.size) * self.size**-0.5
        prompt_keys, prompt_values = self.prompts[index]
        scores = torch.cat([self._by_prompt(q, prompt_keys, self.hidden_pad), q @ keys.mT], dim=-1)
        shares = scores.softmax(-1).split([prompt_keys.shape[3], keys.shape[2]], dim=-1)
        out = self._by_prompt(shares[0], prompt_values) + shares[1] @ values
        return out.view(len(q), self.heads, 1, self.size)

    def _by_prompt(self, x: Float[Tensor, "B H g a"], y: Float[Tensor, "U H a b"], hide=None) -> Tensor:
        """x @ y with y shared by the rows of a group: one product per prompt, not per row."""
        heads, g, a = x.shape[1:]
        whole = x
        if len(x) < len(y) * self.n:  # rows that have finished leave a gap in their group
            whole = x.new_zeros(len(y) * self.n, heads, g, a)
            whole[self.slot] = x
        grouped = whole.view(len(y), self.n, heads, g, a).transpose(1, 2)
        out = (grouped.reshape(len(y), heads, self.n * g, a) @ y).view(len(y), heads, self.n, g, -1)
        if hide is not None:
            out = out.masked_fill(hide, float("-inf"))
        out = out.transpose(1, 2).reshape(len(whole), heads, g, -1)
        return out if whole is x else out[self.slot]

    def _forward(self, ids, position, attend) -> Float[Tensor, "B T D"]:
        inner, eps = self.model.model, self.config.rms_norm_eps
        hidden = inner.embed_tokens(ids)
        cos, sin = (x[:, None] for x in inner.rotary_emb(hidden, position))
        for index, (layer, qkv, bias, gate_up) in enumerate(self.layers):
            x = F.rms_norm(hidden, hidden.shape[-1:], layer.input_layernorm.weight, eps)
            heads = F.linear(x, qkv, bias).unflatten(-1, (-1, self.size)).transpose(1, 2)
            turning, v = heads.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
            q, k = _rotate(turning, cos, sin).split([self.heads, self.kv_heads], dim=1)
            out = attend(index, q, k, v)
            hidden = hidden + layer.self_attn.o_proj(out.transpose(1, 2).flatten(2))
            x = F.rms_norm(hidden, hidden.shape[-1:], layer.post_attention_layernorm.weight, eps)
            gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
            hidden = hidden + layer.mlp.down_proj(F.silu(gate) * up)
        return F.rms_norm(hidden, hidden.shape[-1:], inner.norm.weight, eps)


def _rotate(x: Float[Tensor, "B H T d"], cos: Tensor, sin: Tensor) -> Float[Tensor, "B H T d"]:
    """Rotary position embedding (the half-split form of Llama and Qwen)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
