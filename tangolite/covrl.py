"""CoVRL (arXiv 2512.12576): reasoning from the question, coupled with reasoning that has seen the answer.

One policy plays three parts by prompt: the prior p(z|x) reasons from the question, the posterior
q(z|x,y) has been shown the reference answer, and p(y|z,x) scores the reference after a trace z.  The
bound log p(y|x) >= E_p'[log p(y|z,x)] - KL(p' || p), with p' = (p + q) / 2 per token, is raised by three
terms: a policy gradient on p', the likelihood of the answer, and the KL as a loss of its own.

Left out of the paper: nothing of the method.  Chosen here: the form of the soft clip and the division
of the advantage by the group's deviation (see `tangolite.losses` and `CoVRLConfig`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tangolite.adapters import load_players
from tangolite.advantages import outcome_advantage
from tangolite.losses import covrl_loss, exact_composite_kl
from tangolite.models import Policy
from tangolite.parallel import spread
from tangolite.parsing import split_steps, thinking_end
from tangolite.prompts import CHAT, TINY
from tangolite.rewards import answer_reward
from tangolite.rollouts import Rollouts, must_be_finite, pad_left, pad_right
from tangolite.sampling import keep_served, logp_of, sample_shared, served_by
from tangolite.sources import task_from
from tangolite.tasks import Problem, problems
from tangolite.updates import adamw, optimise, seeded, set_lr, shares_of


@dataclass(frozen=True)
class CoVRLConfig:
    """Everything a CoVRL run depends on.  Defaults are the paper's where it gives them."""

    name: str = "covrl"
    method: str = "covrl"
    seed: int = 0
    updates: int = 440
    checkpoint_every: int = 20
    eval_every: int = 0  # held-out evaluation; 0: never
    policy: str = "tiny-covrl"
    prompts: str = "tiny"  # tiny | chat
    task: dict = field(default_factory=lambda: {"kind": "chain"})
    questions: int = 192
    traces: int = 8  # of a question
    alpha: float = 0.5  # share of traces from the prior; 1: prior only, no posterior and no KL
    reward: str = "mean_logp"  # mean_logp | sum_logp | mean_prob | sum_prob | prod_prob
    scale_advantage: bool = True  # divide by the group's deviation, as GRPO; False: centre only
    clip_eps: float = 0.3
    soft_clip: bool = True  # exp(c tanh(log r / c)), c = log 5
    kl_coef: float = 1.0
    kl_gradient: str = "both"  # both | prior (KL balancing, a deviation from the paper)
    kl_estimator: str = "sampled"  # sampled | exact (sums over the vocabulary: small ones only)
    nll_coef: float = 1.0
    nll_weighted: bool = False  # weight the likelihood term with p(y|z,x), as VeriFree does
    temperature: float = 1.0
    max_new_tokens: int = 2048
    lr: float = 1e-6
    lr_warmup: int = 64
    lr_schedule: str = "cosine"  # cosine | constant
    aggregate: str = "token"  # token | sequence | constant
    max_grad_norm: float = 1.0
    micro_batch: int = 128
    sample_batch: int = 0  # prompts sampled at a time; 0: all
    adapters: dict | None = None  # LoRA on the base, e.g. {rank: 16, scaling: 32}; null: all weights
    quantize: str = "none"  # none | nf4 (4-bit base, with adapters)
    dtype: str = "float32"  # of the weights, or of what 4-bit weights are computed in
    device: str = "auto"
    checkpointing: bool = False  # activations are computed again in the backward pass instead of kept
    spread: bool = False  # weights, gradients and optimizer over all processes (FSDP2)
    server: str = ""  # address of a vLLM server that samples; empty: the model itself
    server_folder: str = "served"  # where the server finds what is published to it

    def __post_init__(self) -> None:
        allowed = {"kl_gradient": ("both", "prior"), "kl_estimator": ("sampled", "exact"),
                   "prompts": ("tiny", "chat"), "lr_schedule": ("cosine", "constant"),
                   "aggregate": ("token", "sequence", "constant"), "quantize": ("none", "nf4"),
                   "dtype": ("float32", "bfloat16", "float16"),
                   "reward": ("mean_logp", "sum_logp", "mean_prob", "sum_prob", "prod_prob")}  # fmt: skip
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {', '.join(values)}, got {getattr(self, name)!r}")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must lie in 0..1, got {self.alpha}")


@dataclass(frozen=True)
class Traces:
    """B traces, each seen under both prompts, and the reference answer after each of them.

    ``prior`` and ``posterior`` hold the same completions, the trace up to the token that completes
    `</think>`.  ``answer`` has the prior's prompt and the trace as its prompt, and the reference as its
    completion; ``answer_mask`` is True on the reference's own tokens.
    """

    prior: Rollouts
    posterior: Rollouts
    answer: Rollouts
    answer_mask: Bool[Tensor, "B A"]
    from_prior: Bool[Tensor, " B"]
    valid: Bool[Tensor, " B"]  # `<think>` … `</think>`, once
    truncated: Bool[Tensor, " B"]  # cut at the length limit before `</think>`

    def __len__(self) -> int:
        return len(self.from_prior)

    def rows(self, index: slice) -> Traces:
        answer = self.answer.rows(index)
        return Traces(
            self.prior.rows(index), self.posterior.rows(index), answer,
            self.answer_mask[index, : answer.completion_ids.shape[1]],
            self.from_prior[index], self.valid[index], self.truncated[index],
        )  # fmt: skip

    def to(self, device: torch.device) -> Traces:
        return Traces(*(getattr(self, f.name).to(device) for f in fields(self)))

    def micro_batches(self, size: int) -> list[Traces]:
        return [self.rows(slice(i, i + size)) for i in range(0, len(self), size)]

    def with_(self, **changes: Tensor) -> Traces:
        """A copy with a reward or an advantage filled in, which the prior's view carries."""
        return replace(self, prior=self.prior.with_(**changes))


class CoVRL:
    """The state of a run: one policy and its optimizer."""

    def __init__(self, config: CoVRLConfig, policy: Policy | None = None) -> None:
        self.config, self.prompts = config, CHAT if config.prompts == "chat" else TINY
        self.task = task_from(config.task, self.prompts, part="prior", read=written_answer)
        self.policy = policy or load_players({"policy": config.policy}, config, config.seed)["policy"]
        self.policy = served_by(config, "policy", spread(self.policy) if config.spread else self.policy)
        self.optimizer = adamw(self.policy, config.lr)

    def update(self, number: int) -> dict[str, float]:
        """Update number ``number`` (from 0) of the run; returns its metrics (see `METRICS`)."""
        keep_served(self.policy)
        return covrl_update(self, number) | keep_served(self.policy, changed=True)

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass  # nothing but weights and the optimizer changes


def covrl_update(run: CoVRL, number: int) -> dict[str, float]:
    """One update: hybrid sampling, the answer's likelihood as reward, and the three terms."""
    config = run.config
    asked = problems(run.task, config.questions, f"{config.seed}/covrl/{number}")
    repeated = [p for p in asked for _ in range(config.traces)]
    traces, texts = sample_traces(
        run.policy, run.prompts, repeated, config, seeded(config.seed, "traces", number)
    )
    reward = reward_of(run.policy, traces, config.reward, config.micro_batch)
    group = torch.arange(len(repeated)) // config.traces
    advantage = outcome_advantage(reward, group, traces.prior.mask, scale=config.scale_advantage)
    losses = learn(run, traces.with_(reward=reward, advantage=advantage), number)
    return losses | trace_metrics(run, traces, texts, repeated, reward)


# --- the stages ------------------------------------------------------------------------------------


def sample_traces(
    policy: Policy, prompts, asked: Sequence[Problem], config: CoVRLConfig, generator: torch.Generator
) -> tuple[Traces, list[str]]:
    """One trace for each entry of ``asked``, from the prior with probability alpha: (traces, texts)."""
    from_prior = torch.rand(len(asked), generator=generator) < config.alpha
    prior = [prompts.encode(policy.tokenizer, prompts.prior(p.question)) for p in asked]
    posterior = [prompts.encode(policy.tokenizer, prompts.posterior(p.question, p.shown)) for p in asked]
    used = [p if first else q for p, q, first in zip(prior, posterior, from_prior, strict=True)]
    sampled = sample_shared(
        policy, used, chunk=config.sample_batch, max_new_tokens=config.max_new_tokens,
        temperature=config.temperature, generator=generator,
    )  # fmt: skip
    ids = [sampled.tokens(row) for row in range(len(asked))]
    ends = [thinking_end(row, policy.tokenizer) for row in ids]
    cut = [row if end is None else row[: end + 1] for row, end in zip(ids, ends, strict=True)]
    found = torch.tensor([end is not None for end in ends])
    answers = [answer_tokens(policy, p.shown) for p in asked]
    before = [p + z + opening for p, z, (opening, _) in zip(prior, cut, answers, strict=True)]
    answer = _view(policy, before, [y for _, y in answers], torch.ones_like(found))
    traces = Traces(
        prior=_view(policy, prior, cut, sampled.terminated),
        posterior=_view(policy, posterior, cut, sampled.terminated),
        answer=answer,
        answer_mask=answer.mask,
        from_prior=from_prior,
        valid=found & torch.tensor([_valid(policy.decode(row)) for row in cut]),
        truncated=~found & ~sampled.terminated,
    )
    return traces, [policy.decode(row) for row in ids]


def _view(policy: Policy, prompts, completions, terminated) -> Rollouts:
    prompt_ids, prompt_length = pad_left(prompts, policy.pad_id)
    ids, length = pad_right(completions, policy.pad_id)
    return Rollouts(prompt_ids, prompt_length, ids, length, terminated, torch.arange(len(ids)))


def _valid(trace: str) -> bool:
    trace = trace.strip()
    once = trace.count("<think>") == 1 and trace.count("</think>") == 1
    return once and trace.startswith("<think>") and trace.endswith("</think>")


def answer_tokens(policy: Policy, reference: str) -> tuple[list[int], list[int]]:
    """(opening tag, the tokens of the reference).

    Tokenised with both tags in one piece, as the model would write it; a token across a boundary belongs to the
    reference, and what follows it is left out.
    """
    text = f"<answer>{reference}</answer>"
    encoded = policy.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    start, end = len("<answer>"), len("<answer>") + len(reference)
    own = [a < end and b > start for a, b in encoded["offset_mapping"]]
    first = own.index(True) if True in own else len(own)
    last = len(own) - own[::-1].index(True) if True in own else len(own)
    ids = list(encoded["input_ids"])
    return ids[:first], ids[first:last]


def reward_of(policy: Policy, traces: Traces, recipe: str, rows: int = 128) -> Float[Tensor, " B"]:
    """The likelihood of the reference answer after each trace, under the policy that sampled."""
    return answer_reward(logp_of(policy, traces.answer, 1.0, rows), traces.answer_mask, recipe=recipe)


def learn(run: CoVRL, traces: Traces, number: int) -> dict[str, float]:
    """One optimizer step.  With one pass per batch the old policy is the current one, detached."""
    config, policy = run.config, run.policy
    set_lr(run.optimizer, config.lr, number, config.lr_warmup,
           config.updates if config.lr_schedule == "cosine" else None)  # fmt: skip
    parts = traces.micro_batches(config.micro_batch)
    views = {"prior": traces.prior, "posterior": traces.posterior, "answer": traces.answer}

    def loss_of(part: Traces):
        part = part.to(policy.device)
        prior_only = config.alpha == 1
        logp_p = policy.logp(part.prior, temperature=config.temperature)
        logp_q = None if prior_only else policy.logp(part.posterior, temperature=config.temperature)
        answer = policy.logp(part.answer)
        watched = {"log-prob under the prior": logp_p, "log-prob under the posterior": logp_q}
        must_be_finite(part.prior, views, watched)
        must_be_finite(part.answer, views, {"log-prob of the answer": answer})
        likelihood = (answer.detach() * part.answer_mask).sum(1).exp()
        return covrl_loss(
            logp_p, logp_q, answer, old_logp_prior=logp_p.detach(),
            old_logp_posterior=None if prior_only else logp_q.detach(),
            advantage=part.prior.advantage, mask=part.prior.mask, answer_mask=part.answer_mask,
            from_prior=part.from_prior, valid=part.valid, truncated=part.truncated, alpha=config.alpha,
            clip_eps=config.clip_eps, soft_clip=math.log(5.0) if config.soft_clip else None,
            kl_coef=config.kl_coef, kl=exact_kl(run, part), kl_gradient=config.kl_gradient,
            nll_coef=config.nll_coef, nll_weight=likelihood if config.nll_weighted else None,
            aggregate=config.aggregate, constant_length=config.max_new_tokens,
        )  # fmt: skip

    shares = shares_of([part.prior for part in parts], config.aggregate)
    return optimise(
        policy, run.optimizer, parts, shares, loss_of, max_grad_norm=config.max_grad_norm, batch=views
    )


def exact_kl(run: CoVRL, part: Traces) -> Float[Tensor, "B T"] | None:
    """KL(p' || p) at each position, summed over the vocabulary; None where the estimate is used."""
    if run.config.kl_estimator == "sampled" or run.config.alpha == 1:
        return None
    log_p = run.policy.all_logp(part.prior, temperature=run.config.temperature)
    log_q = run.policy.all_logp(part.posterior, temperature=run.config.temperature)
    return exact_composite_kl(log_p, log_q.detach() if run.config.kl_gradient == "prior" else log_q)


# --- what is measured -------------------------------------------------------------------------------

METRICS = {
    "loss": "The objective that was minimised: policy term + nll_coef * nll + kl_coef * kl.",
    "policy": "The clipped policy-gradient term on the composite p'.",
    "nll": "-log p(y|z,x) of well-formed prior traces with positive advantage, per trace token.",
    "kl": "Estimate of KL(p' || p) per trace token; never negative.",
    "clip_fraction": "Share of tokens at which the clipped branch was active.",
    "approx_kl": "Estimated KL between the density that sampled and the composite that was trained.",
    "grad_norm": "Norm of the gradient before clipping.",
    "server_gap": "Mean distance in nats between a server's log-probs and the trainer's (with a server).",
    "lr": "Learning rate of this update.",
    "reward": "Mean reward of all traces, in the units of the recipe (mean log-prob unless told).",
    "reward_prior": "Mean reward of the traces that the prior wrote.",
    "reward_posterior": "Mean reward of the traces that the posterior wrote, having seen the answer.",
    "length": "Mean tokens of a trace, `</think>` included.",
    "valid": "Share of traces with one `<think>` … `</think>`.",
    "truncated": "Share of traces cut at the length limit before `</think>`.",
    "answer_prior": "Share of prior traces whose own sampled answer is the reference, word for word.",
    "step_truth_prior": "Share of true steps in prior traces (measured, never rewarded).",
    "step_truth_posterior": "Share of true steps in posterior traces: its fall is posterior collapse.",
}


def written_answer(text: str) -> str | None:
    """What stands between the answer tags, blanks at the ends removed."""
    _, opened, rest = text.rpartition("<answer>")
    inside, closed, _ = rest.partition("</answer>")
    return inside.strip() if opened and closed else None


def trace_metrics(run: CoVRL, traces: Traces, texts, asked, reward) -> dict[str, float]:
    found = {
        "lr": run.optimizer.param_groups[0]["lr"],
        "reward": float(reward.mean()),
        "length": float(traces.prior.length.float().mean()),
        "valid": float(traces.valid.float().mean()),
        "truncated": float(traces.truncated.float().mean()),
    }
    for name, chosen in (("prior", traces.from_prior), ("posterior", ~traces.from_prior)):
        rows = chosen.nonzero()[:, 0].tolist()
        if not rows:
            continue
        found[f"reward_{name}"] = float(reward[chosen].mean())
        read = [(asked[row], [step.text for step in split_steps(texts[row])]) for row in rows]
        known = [run.task.step_truth(problem, steps) for problem, steps in read]
        flat = [step for truth in known if truth is not None for step in truth]
        if flat:
            found[f"step_truth_{name}"] = sum(flat) / len(flat)
        if name == "prior":
            right = [written_answer(texts[row]) == asked[row].shown for row in rows]
            found["answer_prior"] = sum(right) / len(right)
    return found
