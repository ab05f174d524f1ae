"""Advantages: from rewards to one number per token. Tensors only.

Letters: B rollouts, T completion tokens, R verifications of a solution. `group` (B,) holds a number per
rollout; equal numbers share a prompt, in any order. Sources: Tango (arXiv 2505.15034), its advantages and the
decay of alpha; CoVRL (arXiv 2512.12576) takes the GRPO outcome advantage. Left out: a discount (gamma is 1 in
both papers) and a value function (neither has one).
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tangolite.rewards import as_float, check_name, check_shape

ESTIMATORS = ("grpo", "rloo", "reinforce++")
EPS_STD = 1e-6  # added to a group's standard deviation
EPS_VAR = 1e-8  # added to the batch variance when whitening


def to_go(x: Float[Tensor, "*batch T"]) -> Float[Tensor, "*batch T"]:
    """Sum from each token to the last, the return at gamma = 1 (reverse cumulative sum, last dimension)."""
    return x.flip(-1).cumsum(-1).flip(-1)


def _group_statistics(
    value: Float[Tensor, "B N"], valid: Bool[Tensor, "B N"], group: Int[Tensor, " B"]
) -> tuple[Float[Tensor, "B 1"], Float[Tensor, "B 1"], Float[Tensor, "B 1"]]:
    """Count, mean and unbiased std of each rollout's group, over valid values; below two: mean 0, std 1."""
    _, index = torch.unique(group, return_inverse=True)

    def pool(per_rollout: Float[Tensor, " B"]) -> Float[Tensor, "B 1"]:
        return torch.zeros_like(per_rollout).index_add(0, index, per_rollout)[index, None]

    # Measured from the group's smallest value: rewards that are all equal then meet no rounding at all.
    lowest = value.masked_fill(~valid, math.inf).amin(1)
    lowest = torch.full_like(lowest, math.inf).scatter_reduce(0, index, lowest, "amin")[index, None]
    lowest = lowest.masked_fill(lowest.isinf(), 0.0)
    above = (value - lowest).masked_fill(~valid, 0.0)
    count = pool(valid.sum(1).to(value.dtype))
    mean = pool(above.sum(1)) / count.clamp(min=1)
    variance = pool((above - mean).masked_fill(~valid, 0.0).square().sum(1)) / (count - 1).clamp(min=1)
    few = count < 2
    return count, (lowest + mean).masked_fill(few, 0.0), variance.sqrt().masked_fill(few, 1.0)


def _standardise(
    value: Float[Tensor, "B N"],
    valid: Bool[Tensor, "B N"],
    group: Int[Tensor, " B"],
    estimator: str,
    divide_by_std: bool = True,
) -> Float[Tensor, "B N"]:
    """GRPO's or RLOO's group-relative value; 0 where not valid."""
    count, mean, std = _group_statistics(value, valid, group)
    centred = value - mean
    if estimator == "rloo":
        centred = torch.where(count > 1, centred * count / (count - 1).clamp(min=1), 0.0)
    elif divide_by_std:
        centred = centred / (std + EPS_STD)
    return centred.masked_fill(~valid, 0.0)


def _whiten(value: Float[Tensor, "B T"], valid: Bool[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Mean 0 and unbiased variance 1 over all valid entries; 0 elsewhere, and for a single valid entry."""
    count = valid.sum()
    lowest = value.masked_fill(~valid, math.inf).amin() if value.numel() else value.sum()
    above = (value - lowest).masked_fill(~valid, 0.0)
    centred = (above - above.sum() / count.clamp(min=1)).masked_fill(~valid, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred * torch.rsqrt(variance + EPS_VAR)


def outcome_advantage(
    reward: Float[Tensor, " B"],
    group: Int[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    *,
    estimator: str = "grpo",
    scale: bool = True,
) -> Float[Tensor, "B T"]:
    """Advantage of the outcome reward, constant over each completion and 0 outside `mask`.

    - "grpo": `(reward - mean) / (std + 1e-6)` over the group, unbiased std. A group of one keeps its reward
      (mean 0, std 1). `scale=False` centres only, without the division (the field argues about it, so it has
      a name).
    - "rloo": `n/(n-1) * (reward - mean)`, that is, reward minus the mean of the others. A group of one gives
      0, so RLOO learns nothing at G = 1.
    - "reinforce++": the return at every token, whitened over all tokens of the batch (a longer completion
      counts more often).

    A reward of NaN (or infinity) means unscorable: it takes no part in the statistics and its advantage is 0.
    Rewards that are all equal give exactly 0. Masked tokens never matter. Source: Tango, GRPO / RLOO /
    REINFORCE++ as its released trainer computes them.

    Raises ValueError for wrong shapes, an unknown estimator, or `scale=False` with an estimator other than
    "grpo".
    """
    check_name("estimator", estimator, ESTIMATORS)
    if not scale and estimator != "grpo":
        raise ValueError(f"scale=False is for estimator='grpo' only, got estimator={estimator!r}")
    reward, mask = as_float(reward), mask.bool()
    check_shape(mask.shape[:1], reward=reward, group=group)
    valid = reward.isfinite()[:, None]
    reward = reward[:, None].masked_fill(~valid, 0.0)
    if estimator == "reinforce++":
        return _whiten(reward.expand(mask.shape), valid & mask)
    return _standardise(reward, valid, group, estimator, scale) * mask


def step_advantage(
    step_reward: Float[Tensor, "B R T"],
    step_mask: Bool[Tensor, "B R T"],
    group: Int[Tensor, " B"],
    mask: Bool[Tensor, "B T"],
    *,
    estimator: str = "grpo",
    scale: float | None = None,
) -> Float[Tensor, "B T"]:
    """Advantage of the step rewards: those still to come, averaged over R verifications; 0 outside `mask`.

    - "grpo" and "rloo": each step reward is set against *all step rewards of its group* (all completions, all
      verifications), GRPO's or RLOO's way; the results are summed backwards over tokens. So tokens after the
      last step get 0. With fewer than two step rewards in the group GRPO keeps them (mean 0, std 1) and RLOO
      gives 0. Flattened statistics have a price: a solution of four steps earns 1/4 a step and one of one
      step earns 1, so right steps of the long one can come out negative.
    - "reinforce++": rewards are summed backwards and averaged over R first, then whitened over the tokens of
      the batch; rollouts without any step reward are left out and get 0. Here tokens after the last step
      share in the batch mean. (The released trainer loops over the verification axis in place of the tokens,
      which leaves next to nothing.)

    `step_mask` says where a step reward sits. A verification without any adds 0 and still counts among the R
    of the average, as released. `scale` multiplies the result: None means 10 for RLOO (the released trainer's
    constant, "by observed scale") and 1 otherwise. Raises ValueError for wrong shapes or an unknown
    estimator.
    """
    check_name("estimator", estimator, ESTIMATORS)
    if step_mask.ndim != 3:
        raise ValueError(f"step_mask has shape {tuple(step_mask.shape)}, expected (B, R, T)")
    n_rollouts, _, length = step_mask.shape
    check_shape(step_mask.shape, step_reward=step_reward)
    check_shape((n_rollouts,), group=group)
    check_shape((n_rollouts, length), mask=mask)
    step_mask, mask = step_mask.bool(), mask.bool()
    if step_mask.numel() == 0:
        return torch.zeros_like(mask, dtype=as_float(step_reward).dtype)
    reward = as_float(step_reward).masked_fill(~step_mask, 0.0)
    if estimator == "reinforce++":
        verified = step_mask.flatten(1).any(1, keepdim=True)
        advantage = _whiten(to_go(reward).mean(1), verified & mask)
    else:
        flat = _standardise(reward.flatten(1), step_mask.flatten(1), group, estimator)
        advantage = to_go(flat.view_as(reward)).mean(1)
    factor = (10.0 if estimator == "rloo" else 1.0) if scale is None else scale
    return factor * advantage * mask


def mix_advantages(
    outcome: Float[Tensor, "B T"], step: Float[Tensor, "B T"], alpha: float
) -> Float[Tensor, "B T"]:
    """`(1 - alpha) * outcome + alpha * step` (Tango); ValueError if shapes differ or alpha leaves [0, 1]."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha} must lie in [0, 1]")
    check_shape(outcome.shape, step=step)
    return (1 - alpha) * as_float(outcome) + alpha * as_float(step)


def alpha_at(
    step: int, total_steps: int, *, alpha0: float, alpha_min: float = 1e-3, schedule: str = "exp"
) -> float:
    """Weight of the step advantage at the generator's own update `step` of `total_steps` (0 is its first).

    Falls from `alpha0` at 0 to `alpha_min` at `total_steps`: "exp" (the paper's), "linear" or "cosine";
    "none" stays at `alpha0`, as does an `alpha0` not above `alpha_min`. A negative step (the generator's turn
    has not come) gives 0. After the last update alpha stays at `alpha_min`; the released trainer lets the
    cosine run on there, so that it rises again.

    Raises ValueError for an unknown schedule, `total_steps` below 1, a negative alpha, or an exponential
    towards 0.
    """
    check_name("schedule", schedule, ("exp", "linear", "cosine", "none"))
    if total_steps < 1:
        raise ValueError(f"total_steps={total_steps} must be at least 1")
    if alpha0 < 0 or alpha_min < 0 or (schedule == "exp" and alpha_min == 0):
        raise ValueError(
            f"alpha0={alpha0}, alpha_min={alpha_min}: neither may be negative, nor alpha_min 0 with 'exp'"
        )
    if step < 0:
        return 0.0
    if schedule == "none" or alpha0 <= alpha_min:
        return float(alpha0)
    done = min(step / total_steps, 1.0)
    if done == 1.0:
        return alpha_min
    if schedule == "exp":
        return alpha0 * (alpha_min / alpha0) ** done
    left = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return alpha_min + (alpha0 - alpha_min) * left
