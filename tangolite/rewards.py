"""Rewards: from judgements and answer log-probs to numbers. Tensors, bools and floats; no text, no model.

Letters: B rollouts, T completion tokens, A answer tokens, K steps of a solution. Left out of the papers:
nothing. Added: a reward of NaN means "unscorable" (no gold answer), which is not the same as wrong;
`tangolite.advantages` keeps such a rollout out of its group's statistics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def as_float(x: Tensor | Sequence | float) -> Tensor:
    """A float tensor: float64 stays float64 (for gradient checks), everything else becomes float32."""
    x = torch.as_tensor(x)
    return x if x.dtype == torch.float64 else x.float()


def check_shape(shape: Sequence[int], **tensors: Tensor | None) -> None:
    """Raise ValueError, naming the argument, unless every tensor given has `shape`; None is passed over."""
    for name, tensor in tensors.items():
        if tensor is not None and tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")


def check_name(argument: str, value: str, accepted: Sequence[str]) -> None:
    """Raise ValueError, naming the argument and what it accepts, unless `value` is one of `accepted`."""
    if value not in accepted:
        raise ValueError(f"{argument}={value!r} is unknown, expected one of {', '.join(map(repr, accepted))}")


class ClassWeights:
    """Class-aware reweighting of the verifier's samples (Tango, section on the verifier's training).

    The generator is mostly wrong at first, so an unweighted verifier learns to say INCORRECT always. An
    exponential moving average counts how many solutions of a batch are truly correct and truly incorrect; it
    starts from the first batch and takes in each batch *before* that batch is weighted, so a class that is
    present never has count 0 and no smoothing is needed. A sample weighs `1/sqrt(count of its class)`
    ("sqrt_inverse"), `1/count` ("inverse") or 1 ("none"), scaled so that the weights of the batch have mean
    1; a batch of one class weighs exactly 1 throughout. The averages are training state: keep `state_dict()`
    in checkpoints.
    """

    def __init__(self, decay: float = 0.8, method: str = "sqrt_inverse") -> None:
        """Raises ValueError for a decay outside [0, 1) or an unknown method."""
        check_name("method", method, ("sqrt_inverse", "inverse", "none"))
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay} must lie in [0, 1)")
        self.decay, self.method = decay, method
        self.correct_ema: float | None = None
        self.incorrect_ema: float | None = None

    def __call__(self, is_correct: Bool[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Take the batch into the averages and return its weights, float32 (B,).

        `is_correct` is the truth of each verified solution (bool, or numbers read as `> 0.5`); unscored
        solutions must be left out. Raises ValueError when it is not one-dimensional or holds NaN.
        """
        is_correct = torch.as_tensor(is_correct)
        if is_correct.ndim != 1 or is_correct.isnan().any():
            raise ValueError(f"is_correct has shape {tuple(is_correct.shape)}, expected (B,) without NaN")
        is_correct = is_correct > 0.5
        n_correct = int(is_correct.sum())
        n_incorrect = len(is_correct) - n_correct
        if len(is_correct) == 0:
            return torch.ones(0, dtype=torch.float32, device=is_correct.device)
        self._update(n_correct, n_incorrect)
        right, wrong = self._raw(self.correct_ema), self._raw(self.incorrect_ema)
        mean = (n_correct * right + n_incorrect * wrong) / len(is_correct)
        weights = torch.full(is_correct.shape, wrong / mean, dtype=torch.float32, device=is_correct.device)
        return weights.masked_fill(is_correct, right / mean)

    def _update(self, n_correct: int, n_incorrect: int) -> None:
        if self.correct_ema is None:
            self.correct_ema, self.incorrect_ema = float(n_correct), float(n_incorrect)
            return
        self.correct_ema = self.decay * self.correct_ema + (1 - self.decay) * n_correct
        self.incorrect_ema = self.decay * self.incorrect_ema + (1 - self.decay) * n_incorrect

    def _raw(self, count: float) -> float:
        if self.method == "none" or count == 0:  # count 0: the class is absent, its weight is never used
            return 1.0
        return 1 / math.sqrt(count) if self.method == "sqrt_inverse" else 1 / count

    def state_dict(self) -> dict[str, float | None]:
        """The moving averages, as plain numbers that JSON can hold (None before the first batch)."""
        return {"correct_ema": self.correct_ema, "incorrect_ema": self.incorrect_ema}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Put back what `state_dict` gave; decay and method stay as constructed. KeyError if one is
        missing."""
        self.correct_ema, self.incorrect_ema = state["correct_ema"], state["incorrect_ema"]


def step_rewards(
    judgements: Sequence[bool] | None, step_ends: Sequence[int], length: int
) -> tuple[Float[Tensor, " T"], Bool[Tensor, " T"]]:
    """Step rewards of one solution under one verification (Tango, the generator's step reward).

    Step k earns +1/K if judged correct and -1/K if not, on the token that completes it (`step_ends[k]`, an
    index into the `length` completion tokens). A verification without exactly K judgements (or with one that
    is None, or K = 0) rewards nothing: zeros, and a mask of False. It is not cut to the shorter of the two.
    Where one token completes two steps, their rewards add up there.

    Returns reward (T,) float32 and mask (T,) bool. Raises ValueError for a step end outside the completion.
    """
    reward, mask = torch.zeros(length, dtype=torch.float32), torch.zeros(length, dtype=torch.bool)
    outside = [end for end in step_ends if not 0 <= end < length]
    if outside:
        raise ValueError(f"step_ends holds {outside[0]}, expected indices in [0, length={length})")
    n_steps = len(step_ends)
    if n_steps == 0 or judgements is None or len(judgements) != n_steps or None in judgements:
        return reward, mask
    ends = torch.tensor(step_ends)
    sign = torch.tensor([1.0 if judged else -1.0 for judged in judgements], dtype=torch.float32)
    mask[ends] = True
    return reward.index_add(0, ends, sign / n_steps), mask


def verifier_reward(
    final: bool | None,
    is_correct: bool,
    format_score: float,
    *,
    correctness_weight: float = 1.0,
    format_weight: float = 0.8,
) -> float:
    """Tango's verifier reward: `correctness_weight * [final == is_correct] + format_weight * format_score`.

    `final` is its final judgement, None where none was found: the correctness part is then 0, the format part
    stays. `is_correct` is the truth of the solution (a bool, or an outcome reward read as `> 0.5`). No step
    label enters. Raises ValueError for an `is_correct` of NaN (unscorable).
    """
    if math.isnan(is_correct):
        raise ValueError("is_correct is NaN (unscorable), expected True or False: leave such a sample out")
    agrees = final is not None and bool(final) == bool(is_correct > 0.5)
    return correctness_weight * float(agrees) + format_weight * float(format_score)


def generator_reward(
    outcome: Float[Tensor, " B"],
    final: Tensor | Sequence[bool | None],
    weight: float = 1.0,
    *,
    found: Bool[Tensor, " B"] | None = None,
) -> Float[Tensor, " B"]:
    """Tango's optional mix `weight * outcome + (1 - weight) * final`, only where a final judgement was found.

    `outcome` (B,) is 1, 0, or NaN for unscorable (which stays NaN). `final` is a list of bool or None, or a
    tensor (B,) of 0/1 with `found` (B,) saying where a judgement stands (all, by default). With the default
    weight 1 the outcome alone counts. Raises ValueError for shapes that differ or a weight outside [0, 1].
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"weight={weight} must lie in [0, 1]")
    outcome = as_float(outcome)
    if not isinstance(final, Tensor):
        found = torch.tensor([judged is not None for judged in final], device=outcome.device)
        final = torch.tensor([bool(judged) for judged in final], device=outcome.device)
    found = torch.ones_like(final, dtype=torch.bool) if found is None else found.bool()
    check_shape(outcome.shape, final=final, found=found)
    return torch.where(found, weight * outcome + (1 - weight) * final.to(outcome.dtype), outcome)


def answer_reward(
    answer_logp: Float[Tensor, "B A"], answer_mask: Bool[Tensor, "B A"], *, recipe: str = "mean_logp"
) -> Float[Tensor, " B"]:
    """CoVRL's reward of a trace: how likely the reference answer is after it, under the old policy.

    `answer_logp` is log p(y|z,x) per answer token; `answer_mask` is true on the answer's own tokens, template
    tokens excluded. Recipes: "mean_logp" and "sum_logp" over the tokens' log-probs; "mean_prob" and
    "sum_prob" over their probabilities; "prod_prob" = exp(sum of log-probs), the probability of the whole
    answer. An answer without tokens earns 0 under every recipe: all traces of a group share it, so their
    advantage is 0. Masked places may hold anything. Returns (B,). Raises ValueError for shapes that differ or
    an unknown recipe.
    """
    check_name("recipe", recipe, ("mean_logp", "sum_logp", "mean_prob", "sum_prob", "prod_prob"))
    check_shape(answer_logp.shape, answer_mask=answer_mask)
    answer_mask = answer_mask.bool()
    logp = as_float(answer_logp).masked_fill(~answer_mask, 0.0)
    count = answer_mask.sum(-1)
    token = logp.exp() if recipe in ("mean_prob", "sum_prob") else logp
    total = token.masked_fill(~answer_mask, 0.0).sum(-1)
    if recipe in ("mean_logp", "mean_prob"):
        total = total / count.clamp(min=1)
    return (total.exp() if recipe == "prod_prob" else total).masked_fill(count == 0, 0.0)
