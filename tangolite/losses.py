"""Losses: policy gradient, KL penalties, and the whole objectives of Tango and CoVRL. Tensors only.

Letters: B rollouts, T completion tokens, A answer tokens, V vocabulary. Every log-prob is of the tempered
distribution that was sampled from. `mask` (B, T) is true on completion tokens; what stands outside it (NaN
and infinity included) touches neither a value nor a gradient. Sources: Tango (arXiv 2505.15034) as its
released trainer computes it, CoVRL (arXiv 2512.12576).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from tangolite.rewards import as_float, check_name, check_shape

LOG_MAX = 88.0  # exp(88) still fits float32; past it a branch that is not taken would give 0 * inf = NaN


class PolicyLoss(NamedTuple):
    """`loss` carries the gradient; the others are detached means over all tokens, whatever the aggregation.

    `clip_fraction` is the share of tokens whose clipped branch is the active one (gradient zero); `approx_kl`
    the mean of `ratio - 1 - log ratio`, an estimate of KL(old || new) that is never negative.
    """

    loss: Float[Tensor, ""]
    clip_fraction: Float[Tensor, ""]
    approx_kl: Float[Tensor, ""]


class TangoLoss(NamedTuple):
    """`loss` carries the gradient; its parts (before their coefficients) and the metrics are detached."""

    loss: Float[Tensor, ""]
    policy: Float[Tensor, ""]
    kl: Float[Tensor, ""]
    entropy: Float[Tensor, ""]
    clip_fraction: Float[Tensor, ""]
    approx_kl: Float[Tensor, ""]


class CoVRLLoss(NamedTuple):
    """`loss` carries the gradient; its parts (before their coefficients) and the metrics are detached."""

    loss: Float[Tensor, ""]
    policy: Float[Tensor, ""]
    nll: Float[Tensor, ""]
    kl: Float[Tensor, ""]
    clip_fraction: Float[Tensor, ""]
    approx_kl: Float[Tensor, ""]


def _exp(x: Tensor) -> Tensor:
    return x.clamp(max=LOG_MAX).exp()


def _fill(x: Tensor, mask: Bool[Tensor, "B T"]) -> Tensor:
    """Zeros in masked places, before any arithmetic: a NaN masked afterwards still has a NaN gradient."""
    return as_float(x).masked_fill(~mask, 0.0)


def _bregman(x: Tensor) -> Tensor:
    """x + exp(-x) - 1, at least 0 (the clamp is for an expm1 off in its last digit); k3 is that of x = -d."""
    return (x + torch.expm1((-x).clamp(max=LOG_MAX))).clamp(min=0)


def aggregate(
    values: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    how: str = "token",
    *,
    constant_length: int | None = None,
) -> Float[Tensor, ""]:
    """One number from a number per token; the choice decides how much a long completion counts.

    - "token": mean over all tokens of the batch (Tango's released trainer). Long completions weigh more. It
      is exact under gradient accumulation: losses of micro-batches, each times its share of the tokens, add
      up to the loss of the whole batch.
    - "sequence": mean over the tokens of each completion, then over completions that have tokens (the
      equation of the paper). A token of a long completion weighs less.
    - "constant": sum over tokens divided by `B * constant_length` (Dr. GRPO); `constant_length` None means T.

    Without any token the result is 0, with a graph. Raises ValueError for shapes that differ or are not
    (B, T), or an unknown `how`.
    """
    check_name("aggregate", how, ("token", "sequence", "constant"))
    if values.ndim != 2:
        raise ValueError(f"values has shape {tuple(values.shape)}, expected (B, T)")
    check_shape(values.shape, mask=mask)
    mask = mask.bool()
    values, length = _fill(values, mask), mask.sum(1)
    if how == "token":
        return values.sum() / length.sum().clamp(min=1)
    if how == "sequence":
        return (values.sum(1) / length.clamp(min=1)).sum() / (length > 0).sum().clamp(min=1)
    n_rollouts, n_tokens = mask.shape
    return values.sum() / max(n_rollouts * (n_tokens if constant_length is None else constant_length), 1)


_aggregate = aggregate  # the functions below have an argument of this name


def policy_loss(
    logp: Float[Tensor, "B T"],
    old_logp: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    clip_eps: float = 0.2,
    sample_weight: Float[Tensor, " B"] | None = None,
    aggregate: str = "token",
    soft_clip: float | None = None,
    constant_length: int | None = None,
) -> PolicyLoss:
    """Clipped policy-gradient loss with one ratio per token (PPO's, as in Tango and CoVRL).

    `ratio = exp(logp - old_logp)`, loss per token `max(-A * ratio, -A * clip(ratio, 1 - eps, 1 + eps))`,
    times `sample_weight` of its rollout if given, aggregated as `aggregate` says. `old_logp`, `advantage` and
    `sample_weight` are constants (detached). `soft_clip=c` first damps large ratios to `exp(c * tanh(log
    ratio / c))`, which lies in (e^-c, e^c) and equals the ratio near 1; CoVRL damps without printing a form,
    this one (c = log 5) is ours. For CoVRL call it with `composite_logp` of the new policy and `hybrid_logp`
    of the old one. Log ratios above 88 are taken as 88.

    Raises ValueError for shapes that differ, an unknown aggregation or a `soft_clip` that is not positive.
    """
    check_shape(logp.shape, old_logp=old_logp, advantage=advantage, mask=mask)
    check_shape(logp.shape[:1], sample_weight=sample_weight)
    if soft_clip is not None and soft_clip <= 0:
        raise ValueError(f"soft_clip={soft_clip} must be positive, or None for no damping")
    mask = mask.bool()
    log_ratio = _fill(logp, mask) - _fill(old_logp, mask).detach()
    advantage = _fill(advantage, mask).detach()
    approx_kl = _aggregate(_bregman(-log_ratio.detach()), mask)
    if soft_clip is not None:
        log_ratio = soft_clip * torch.tanh(log_ratio / soft_clip)
    ratio = _exp(log_ratio)
    free = -advantage * ratio
    clipped = -advantage * ratio.clamp(1 - clip_eps, 1 + clip_eps)
    per_token = torch.maximum(free, clipped)
    if sample_weight is not None:
        per_token = per_token * as_float(sample_weight).detach()[:, None]
    loss = _aggregate(per_token, mask, aggregate, constant_length=constant_length)
    return PolicyLoss(loss, _aggregate(clipped.detach() > free.detach(), mask), approx_kl)


def kl_penalty(
    logp: Float[Tensor, "B T"],
    ref_logp: Float[Tensor, "B T"],
    *,
    kind: str = "k3",
    clamp: float | None = None,
) -> Float[Tensor, "B T"]:
    """Estimates of KL(policy || reference), one per token drawn from the policy; `ref_logp` is a constant.

    With `d = ref_logp - logp`: "k1" is `-d` (unbiased, of either sign), "k2" `d^2 / 2` (biased), "k3" `exp(d)
    - 1 - d` (unbiased, never negative), "abs" `|d|`. As a loss, only the *gradient* of k2 is the gradient of
    the KL in expectation; k3's is that of KL(reference || policy). Exact unless `clamp` limits it to [-clamp,
    clamp], where the gradient is 0 (Tango's recipe: 10). Raises ValueError for shapes that differ or an
    unknown kind.
    """
    check_name("kind", kind, ("k1", "k2", "k3", "abs"))
    check_shape(logp.shape, ref_logp=ref_logp)
    d = as_float(ref_logp).detach() - as_float(logp)
    kl = {"k1": -d, "k2": d.square() / 2, "k3": _bregman(-d), "abs": d.abs()}[kind]
    return kl if clamp is None else kl.clamp(-clamp, clamp)


def composite_logp(
    logp_prior: Float[Tensor, "B T"], logp_posterior: Float[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """log of CoVRL's composite `p' = (p + q) / 2`, from log p (prior) and log q (posterior), in log space."""
    check_shape(logp_prior.shape, logp_posterior=logp_posterior)
    return torch.logaddexp(as_float(logp_prior), as_float(logp_posterior)) - math.log(2)


def hybrid_logp(
    logp_prior: Float[Tensor, "B T"], logp_posterior: Float[Tensor, "B T"], alpha: float
) -> Float[Tensor, "B T"]:
    """log of CoVRL's sampling density `alpha * p + (1 - alpha) * q`, alpha the share of prior traces.

    Exactly log q at alpha 0 and log p at alpha 1. Raises ValueError for shapes that differ or alpha outside
    [0, 1].
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha} must lie in [0, 1]")
    check_shape(logp_prior.shape, logp_posterior=logp_posterior)
    log_p, log_q = as_float(logp_prior), as_float(logp_posterior)
    if alpha in (0, 1):  # log 0 = -inf would make the gradient of logaddexp NaN for very unlikely tokens
        return log_p if alpha == 1 else log_q
    return torch.logaddexp(math.log(alpha) + log_p, math.log1p(-alpha) + log_q)


def _log_composite_over_prior(log_p: Tensor, log_q: Tensor) -> Tensor:
    """x = log(p' / p) = softplus(log q - log p) - log 2, without forming p'.

    Written with logsigmoid, since torch's softplus turns into the identity above 20.
    """
    return -F.logsigmoid(log_p - log_q) - math.log(2)


def covrl_kl(
    logp_prior: Float[Tensor, "B T"],
    logp_posterior: Float[Tensor, "B T"],
    from_prior: Bool[Tensor, " B"],
    *,
    sampler_logp: Float[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T"]:
    """CoVRL's per-token estimate of KL(p' || p), p' = (p + q) / 2: `(p' log(p'/p) - p' + p) / pi`.

    pi is the density that the token was sampled from: the trace's own template by default (p where
    `from_prior`, else q), or `sampler_logp` as given (the old policy's; `hybrid_logp` of it only where every
    token, not every trace, is drawn from the mixture: otherwise that is biased, see notebook 9). For pi = p
    this is the paper's `u log u - u + 1` with u = p'/p, for pi = q its `s log(p'/p) + s - 1` with s = p'/q,
    for pi = p' it is k3. Unbiased at a given prefix, because p - p' sums to 0 over the vocabulary; never
    negative, because x log x - x + 1 >= 0. **pi is a constant**, always detached: a gradient through the
    denominator is biased, one that leaves it out is exact. Raises ValueError for shapes that differ.
    """
    check_shape(logp_prior.shape, logp_posterior=logp_posterior, sampler_logp=sampler_logp)
    check_shape(logp_prior.shape[:1], from_prior=from_prior)
    log_p, log_q = as_float(logp_prior), as_float(logp_posterior)
    if sampler_logp is None:
        sampler_logp = torch.where(from_prior.bool()[:, None], log_p, log_q)
    log_weight = composite_logp(log_p, log_q) - as_float(sampler_logp).detach()
    return _exp(log_weight) * _bregman(_log_composite_over_prior(log_p, log_q))


def exact_composite_kl(
    log_prior: Float[Tensor, "B T V"], log_posterior: Float[Tensor, "B T V"]
) -> Float[Tensor, "B T"]:
    """KL(p' || p) at every position, summed over a (small) vocabulary; both inputs are normalised log-probs.

    Summed in the form `p' log(p'/p) - p' + p`, whose every term is at least 0. Raises ValueError for shapes
    that differ.
    """
    log_composite = composite_logp(log_prior, log_posterior)
    x = _log_composite_over_prior(as_float(log_prior), as_float(log_posterior))
    return (log_composite.exp() * _bregman(x)).sum(-1)


def tango_loss(
    logp: Float[Tensor, "B T"],
    old_logp: Float[Tensor, "B T"],
    advantage: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    *,
    ref_logp: Float[Tensor, "B T"] | None = None,
    entropy: Float[Tensor, "B T"] | None = None,
    clip_eps: float = 0.2,
    kl_coef: float = 1e-3,
    entropy_coef: float = 1e-3,
    kl_kind: str = "k3",
    kl_clamp: float | None = 10.0,
    sample_weight: Float[Tensor, " B"] | None = None,
    aggregate: str = "token",
    constant_length: int | None = None,
) -> TangoLoss:
    """Tango's objective, for either player: `policy - entropy_coef * entropy + kl_coef * kl`.

    The policy term is `policy_loss`; `kl` is `kl_penalty` towards `ref_logp` (0 if None): "k3", clamped at
    `kl_clamp` as released, or "k2", never clamped, in the REINFORCE++ recipe; `entropy` (B, T) is that of each
    token's distribution (0 if None). All three use one aggregation; `sample_weight`, the verifier's class weights,
    multiplies the policy term only. Raises ValueError for wrong shapes or names.
    """
    check_shape(logp.shape, ref_logp=ref_logp, entropy=entropy)
    policy = policy_loss(
        logp,
        old_logp,
        advantage,
        mask,
        clip_eps=clip_eps,
        sample_weight=sample_weight,
        aggregate=aggregate,
        constant_length=constant_length,
    )
    mask = mask.bool()
    kl = mean_entropy = torch.zeros_like(policy.loss)
    if ref_logp is not None:
        per_token = kl_penalty(_fill(logp, mask), _fill(ref_logp, mask), kind=kl_kind,
                               clamp=kl_clamp if kl_kind == "k3" else None)  # fmt: skip
        kl = _aggregate(per_token, mask, aggregate, constant_length=constant_length)
    if entropy is not None:
        mean_entropy = _aggregate(entropy, mask, aggregate, constant_length=constant_length)
    loss = policy.loss - entropy_coef * mean_entropy + kl_coef * kl
    parts = policy.loss.detach(), kl.detach(), mean_entropy.detach()
    return TangoLoss(loss, *parts, policy.clip_fraction, policy.approx_kl)


def covrl_loss(
    logp_prior: Float[Tensor, "B T"],
    logp_posterior: Float[Tensor, "B T"] | None,
    answer_logp: Float[Tensor, "B A"],
    *,
    old_logp_prior: Float[Tensor, "B T"],
    old_logp_posterior: Float[Tensor, "B T"] | None,
    advantage: Float[Tensor, "B T"],
    mask: Bool[Tensor, "B T"],
    answer_mask: Bool[Tensor, "B A"],
    from_prior: Bool[Tensor, " B"],
    valid: Bool[Tensor, " B"],
    truncated: Bool[Tensor, " B"],
    alpha: float = 0.5,
    clip_eps: float = 0.3,
    kl_coef: float = 1.0,
    nll_coef: float = 1.0,
    soft_clip: float | None = math.log(5.0),
    kl: Float[Tensor, "B T"] | None = None,
    kl_gradient: str = "both",
    nll_weight: Float[Tensor, " B"] | None = None,
    aggregate: str = "token",
    constant_length: int | None = None,
) -> CoVRLLoss:
    """CoVRL's objective: `policy + nll_coef * nll + kl_coef * kl`, every term over the same trace tokens.

    - policy, on all traces: `policy_loss` with the ratio p'_new / p_hyb,old, damped by `soft_clip` (None:
      off) and clipped.
    - nll: `-answer_logp` summed over the answer's tokens, for traces that come from the prior, have a valid
      format and a positive advantage (summed over the trace); divided by the count of *trace* tokens.
      `nll_weight` (B,) is an optional constant factor, such as p(y|z,x).
    - kl: `covrl_kl` against the old density of the trace's own template; 0 on truncated traces, whose tokens
      still count in the mean. `kl` (B, T) puts another estimate in its place, such as `exact_composite_kl`.
      `kl_gradient="prior"` is KL balancing, **a deviation from the paper**: no gradient into the posterior
      through the KL, which guards against posterior collapse. It does not apply to a `kl` handed in: detach
      the posterior there yourself.

    The baseline that samples from the prior alone: `logp_posterior=None, old_logp_posterior=None, alpha=1`;
    then the ratio is p_new / p_old and there is no KL. `approx_kl` is that of the policy ratio: with alpha
    other than 0.5 it is not 0 at the first step.

    Raises ValueError for wrong shapes or names, for only one of the two posteriors, and for a prior-only call
    with alpha other than 1, with traces from the posterior, or with `kl`.
    """
    check_name("kl_gradient", kl_gradient, ("both", "prior"))
    check_shape(logp_prior.shape, logp_posterior=logp_posterior, old_logp_posterior=old_logp_posterior)
    check_shape(logp_prior.shape, old_logp_prior=old_logp_prior, advantage=advantage, mask=mask, kl=kl)
    check_shape(
        logp_prior.shape[:1], from_prior=from_prior, valid=valid, truncated=truncated, nll_weight=nll_weight
    )
    check_shape((len(mask), answer_logp.shape[-1]), answer_logp=answer_logp, answer_mask=answer_mask)
    mask, from_prior, truncated = mask.bool(), from_prior.bool(), truncated.bool()
    log_p, old_p = _fill(logp_prior, mask), _fill(old_logp_prior, mask).detach()
    if logp_posterior is None or old_logp_posterior is None:
        _check_prior_only(logp_posterior, old_logp_posterior, from_prior, alpha, kl)
        new, old, kl = log_p, old_p, torch.zeros_like(log_p)
    else:
        log_q, old_q = _fill(logp_posterior, mask), _fill(old_logp_posterior, mask).detach()
        new, old = composite_logp(log_p, log_q), hybrid_logp(old_p, old_q, alpha)
        if kl is None:
            sampler = torch.where(from_prior[:, None], old_p, old_q)
            kl_q = log_q.detach() if kl_gradient == "prior" else log_q
            kl = covrl_kl(log_p, kl_q, from_prior, sampler_logp=sampler)
    policy = policy_loss(
        new,
        old,
        advantage,
        mask,
        clip_eps=clip_eps,
        soft_clip=soft_clip,
        aggregate=aggregate,
        constant_length=constant_length,
    )
    rewarded = from_prior & valid.bool() & (_fill(advantage, mask).sum(1) > 0)
    nll = _answer_nll(answer_logp, answer_mask.bool() & rewarded[:, None], mask, nll_weight)
    mean_nll = _aggregate(nll, mask, aggregate, constant_length=constant_length)
    mean_kl = _aggregate(
        _fill(kl, mask & ~truncated[:, None]), mask, aggregate, constant_length=constant_length
    )
    loss = policy.loss + nll_coef * mean_nll + kl_coef * mean_kl
    parts = policy.loss.detach(), mean_nll.detach(), mean_kl.detach()
    return CoVRLLoss(loss, *parts, policy.clip_fraction, policy.approx_kl)


def _check_prior_only(
    logp_posterior: Tensor | None,
    old_logp_posterior: Tensor | None,
    from_prior: Tensor,
    alpha: float,
    kl: Tensor | None,
) -> None:
    if logp_posterior is not None or old_logp_posterior is not None:
        raise ValueError(
            "logp_posterior and old_logp_posterior must both be given, or both be None (prior only)"
        )
    if alpha != 1 or kl is not None or not from_prior.all():
        raise ValueError(
            "logp_posterior=None (prior only) needs alpha=1, kl=None and from_prior true for every trace"
        )


def _answer_nll(
    answer_logp: Float[Tensor, "B A"],
    kept: Bool[Tensor, "B A"],
    mask: Bool[Tensor, "B T"],
    weight: Float[Tensor, " B"] | None,
) -> Float[Tensor, "B T"]:
    """-log p(y|z,x) spread evenly over the trace's own tokens: any aggregation then counts trace tokens."""
    nll = -_fill(answer_logp, kept)
    if weight is not None:
        nll = nll * _fill(weight[:, None].expand(kept.shape), kept).detach()
    length = mask.sum(1).clamp(min=1)
    return (nll.sum(1) / length)[:, None].expand(mask.shape)
