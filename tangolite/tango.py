"""RL Tango (arXiv 2505.15034): a generator and a generative verifier, trained in turns.

A generator update samples solutions, grades their answers, lets the verifier judge every step, and
mixes both into one advantage per token.  A verifier update samples fresh solutions, verifies each of
them several times, and rewards only the final judgement (and the format).  No step label is ever used:
where a task knows the truth of its steps, it goes into the metrics alone.

Left out of the paper: nothing of the method.  Chosen here: see `TangoConfig`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tangolite.adapters import load_players
from tangolite.advantages import alpha_at, mix_advantages, outcome_advantage, step_advantage
from tangolite.grading import answers_match
from tangolite.losses import tango_loss
from tangolite.models import Policy
from tangolite.parallel import spread
from tangolite.parsing import (
    Verification,
    extract_answer,
    generator_format_score,
    parse_verification,
    split_steps,
    step_end_positions,
    verifier_format_score,
)
from tangolite.prompts import CHAT, TINY
from tangolite.rewards import ClassWeights, generator_reward, step_rewards, verifier_reward
from tangolite.rollouts import Rollouts, must_be_finite
from tangolite.sampling import keep_served, sample_shared, served_by
from tangolite.sources import task_from
from tangolite.tasks import Problem, problems
from tangolite.updates import adamw, optimise, seeded, set_lr, shares_of


@dataclass(frozen=True)
class TangoConfig:
    """Everything a Tango run depends on.  Defaults are the paper's where it gives them."""

    name: str = "tango"
    method: str = "tango"
    seed: int = 0
    updates: int = 440  # of both players together
    checkpoint_every: int = 20
    eval_every: int = 0  # held-out evaluation; 0: never
    generator: str = "tiny-generator"  # a built-in model, a folder, or a hub name
    verifier: str = "tiny-verifier"
    prompts: str = "tiny"  # tiny | chat
    task: dict = field(default_factory=lambda: {"kind": "chain"})
    verifier_task: dict | None = None  # what the verifier learns on, where it differs (easier problems)
    verifier_warmup: int = 40
    generator_per_verifier: int = 3
    verifier_updates: str = "always"  # always | warmup (then frozen) | never
    step_source: str = "verifier"  # verifier | truth (gold labels, a yardstick) | none (outcome only)
    questions: int = 256
    group: int = 5  # completions of a question, and verifications of a solution in a verifier update
    verifications: int = 1  # R, of a solution in a generator update
    estimator: str = "grpo"  # grpo | rloo | reinforce++
    rloo_step_scale: float = 10.0  # the released trainer's constant
    alpha: float = 0.1  # 0.5 in the REINFORCE++ recipe
    alpha_min: float = 1e-3
    alpha_schedule: str = "exp"  # exp | linear | cosine | none
    class_weights: str = "sqrt_inverse"  # sqrt_inverse | inverse | none
    gate: bool = False  # an answer is paid only after steps that work through the question's own operations
    final_weight: float = 1.0  # w of w * outcome + (1 - w) * final judgement
    temperature: float = 1.0
    max_new_tokens: int = 2048
    verifier_max_new_tokens: int = 4096
    lr: float = 1e-6
    verifier_lr: float = 1e-6
    lr_warmup: int = 0
    clip_eps: float = 0.2
    kl_coef: float = 1e-3
    verifier_kl_coef: float = 1e-3
    kl_kind: str = "k3"  # k1 | k2 (the REINFORCE++ recipe's) | k3 | abs
    entropy_coef: float = 1e-3
    aggregate: str = "token"  # token | sequence | constant
    mask_truncated: bool = False
    max_grad_norm: float = 1.0
    micro_batch: int = 128
    sample_batch: int = 0  # prompts sampled at a time; 0: all
    adapters: dict | None = None  # LoRA on one base, e.g. {rank: 16, scaling: 32}; null: all weights
    quantize: str = "none"  # none | nf4 (4-bit base, with adapters)
    dtype: str = "float32"  # of the weights, or of what 4-bit weights are computed in
    device: str = "auto"
    checkpointing: bool = False  # activations are computed again in the backward pass instead of kept
    spread: bool = False  # weights, gradients and optimizer over all processes (FSDP2)
    server: str = ""  # address of a vLLM server that samples; empty: the model itself
    server_folder: str = "served"  # where the server finds what is published to it

    def __post_init__(self) -> None:
        allowed = {
            "verifier_updates": ("always", "warmup", "never"),
            "step_source": ("verifier", "truth", "none"),
            "prompts": ("tiny", "chat"),
            "estimator": ("grpo", "rloo", "reinforce++"),
            "alpha_schedule": ("exp", "linear", "cosine", "none"),
            "class_weights": ("sqrt_inverse", "inverse", "none"),
            "kl_kind": ("k1", "k2", "k3", "abs"),
            "aggregate": ("token", "sequence", "constant"),
            "quantize": ("none", "nf4"),
            "dtype": ("float32", "bfloat16", "float16"),
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} must be one of {', '.join(values)}, got {getattr(self, name)!r}")
        for name in ("alpha", "final_weight"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        if self.alpha_min < 0 or (self.alpha_schedule == "exp" and self.alpha_min == 0):
            raise ValueError(
                f"alpha_min must not be negative, nor 0 with alpha_schedule exp, got {self.alpha_min}"
            )
        if self.estimator == "rloo" and self.group < 2:
            raise ValueError("rloo leaves one out, so it needs group >= 2: raise group, or take grpo")

    def turn(self, update: int) -> str:
        """Whose update number ``update`` (from 0) is: verifier warm-up, then 3 to 1."""
        if self.verifier_updates == "never":
            return "generator"
        if update < self.verifier_warmup:
            return "verifier"
        if self.verifier_updates == "warmup":
            return "generator"
        place = (update - self.verifier_warmup) % (self.generator_per_verifier + 1)
        return "generator" if place < self.generator_per_verifier else "verifier"

    def turns(self, player: str, before: int) -> int:
        """How many of the first ``before`` updates are this player's."""
        return sum(self.turn(update) == player for update in range(before))


class Solution(NamedTuple):
    """What was read from one completion of the generator."""

    problem: Problem
    text: str
    steps: list[str]
    ends: list[int]  # index of the token that completes each step
    correct: bool
    format: float


class Player:
    """A policy that learns, the frozen policy that it started as, and its optimizer."""

    def __init__(self, policy: Policy, lr: float, spread_out: bool = False) -> None:
        reference = policy.frozen_copy()
        self.policy, self.reference = (spread(p) if spread_out else p for p in (policy, reference))
        self.optimizer = adamw(policy, lr)


class Tango:
    """The state of a run: two players and the class counts."""

    def __init__(self, config: TangoConfig, generator: Policy | None = None, verifier: Policy | None = None):
        self.config = config
        self.prompts = CHAT if config.prompts == "chat" else TINY
        self.task = task_from(config.task, self.prompts)
        self.verifier_task = (
            task_from(config.verifier_task, self.prompts) if config.verifier_task else self.task
        )
        policies = {"generator": generator, "verifier": verifier}
        missing = {name: getattr(config, name) for name, policy in policies.items() if policy is None}
        policies |= load_players(missing, config, config.seed)
        policies = {name: served_by(config, name, policy) for name, policy in policies.items()}
        lrs = {"generator": config.lr, "verifier": config.verifier_lr}
        self.players = {name: Player(p, lrs[name], config.spread) for name, p in policies.items()}
        self.class_weights = ClassWeights(method=config.class_weights)

    @property
    def generator(self) -> Policy:
        return self.players["generator"].policy

    @property
    def verifier(self) -> Policy:
        return self.players["verifier"].policy

    def update(self, number: int) -> dict[str, float]:
        """Update number ``number`` (from 0) of the run; returns its metrics (see `METRICS`)."""
        turn = self.config.turn(number)
        for player in self.players.values():
            keep_served(player.policy)
        metrics = (generator_update if turn == "generator" else verifier_update)(self, number)
        return {"turn": turn} | metrics

    def state_dict(self) -> dict:
        return {"class_weights": self.class_weights.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.class_weights.load_state_dict(state["class_weights"])


def generator_update(run: Tango, number: int) -> dict[str, float]:
    """One update of the generator: outcome reward and the verifier's step rewards (Tango, Sec. 3)."""
    config, done = run.config, run.config.turns("generator", number)
    asked = problems(run.task, config.questions, f"{config.seed}/generator/{number}")
    rollouts, solutions = solve(run, asked, config.group, seeded(config.seed, "solutions", number))
    truths = [run.task.step_truth(s.problem, s.steps) for s in solutions]
    verifications = judge(run, solutions, truths, seeded(config.seed, "verifications", number))
    rollouts = rollouts.with_(reward=outcome_rewards(run, solutions, verifications))
    alpha, rollouts = 0.0, with_step_rewards(rollouts, solutions, verifications)
    if config.step_source != "none":
        alpha = alpha_at(done, config.turns("generator", config.updates), alpha0=config.alpha,
                         alpha_min=config.alpha_min, schedule=config.alpha_schedule)  # fmt: skip
    rollouts = with_advantage(rollouts, config, alpha)
    losses = learn(run, "generator", rollouts, done)
    return {"alpha": alpha} | losses | solution_metrics(rollouts, solutions, truths) | (
        judgement_metrics(solutions, truths, verifications) if config.step_source == "verifier" else {}
    )  # fmt: skip


def verifier_update(run: Tango, number: int) -> dict[str, float]:
    """One update of the verifier: only its final judgement is rewarded (Tango, Sec. 3)."""
    config, done = run.config, run.config.turns("verifier", number)
    task = run.verifier_task
    asked = problems(task, config.questions, f"{config.seed}/verifier/{number}")
    _, solutions = solve(run, asked, 1, seeded(config.seed, "fresh", number))
    rollouts, verifications = verify(run, solutions, config.group, seeded(config.seed, "verify", number))
    repeated = [s for s in solutions for _ in range(config.group)]
    rewards = [
        verifier_reward(v.final, s.correct, verifier_format_score(text, len(s.steps), s.format))
        for v, s, text in zip(verifications, repeated, texts(run.verifier, rollouts), strict=True)
    ]
    correct = torch.tensor([s.correct for s in repeated])
    rollouts = rollouts.with_(reward=torch.tensor(rewards), sample_weight=run.class_weights(correct))
    rollouts = with_advantage(rollouts, config, alpha=0.0)
    losses = learn(run, "verifier", rollouts, done)
    truths = [task.step_truth(s.problem, s.steps) for s in repeated]
    groups = [[v] for v in verifications]
    shared = {
        "reward": float(rollouts.reward.mean()), "length": float(rollouts.length.float().mean()),
        "truncated": float((~rollouts.terminated).float().mean()),
    }  # fmt: skip
    return losses | shared | judgement_metrics(repeated, truths, groups)


# --- the stages ------------------------------------------------------------------------------------


def texts(policy: Policy, rollouts: Rollouts) -> list[str]:
    return [policy.decode(rollouts.tokens(row)) for row in range(len(rollouts))]


def solve(
    run: Tango, asked: Sequence[Problem], n: int, random: torch.Generator, *, temperature=None, policy=None
):
    """``n`` solutions of each problem, by the generator unless told: (rollouts, what was read from them)."""
    config, policy = run.config, policy or run.generator
    prompts = [run.prompts.encode(policy.tokenizer, run.prompts.generator(p.question)) for p in asked]
    rollouts = sample_shared(
        policy, prompts, n=n, chunk=config.sample_batch, max_new_tokens=config.max_new_tokens,
        temperature=config.temperature if temperature is None else temperature, generator=random,
    )  # fmt: skip
    repeated = [p for p in asked for _ in range(n)]
    read = [read_solution(policy, rollouts.tokens(row), problem) for row, problem in enumerate(repeated)]
    return rollouts, read


def read_solution(policy: Policy, ids: list[int], problem: Problem) -> Solution:
    text = policy.decode(ids)
    answer = extract_answer(text)
    return Solution(
        problem=problem, text=text, steps=[step.text for step in split_steps(text)],
        ends=step_end_positions(ids, policy.tokenizer), format=generator_format_score(text),
        correct=answer is not None and answers_match(answer, problem.answer),
    )  # fmt: skip


def verify(run: Tango, solutions: Sequence[Solution], n: int, random: torch.Generator, temperature=None):
    """``n`` verifications of each solution: (rollouts, what was read from them)."""
    config, policy = run.config, run.verifier
    asked = [run.prompts.verifier(s.problem.question, s.text, len(s.steps)) for s in solutions]
    prompts = [run.prompts.encode(policy.tokenizer, text) for text in asked]
    rollouts = sample_shared(
        policy, prompts, n=n, chunk=config.sample_batch, max_new_tokens=config.verifier_max_new_tokens,
        temperature=config.temperature if temperature is None else temperature, generator=random,
    )  # fmt: skip
    counts = [len(s.steps) for s in solutions for _ in range(n)]
    read = [parse_verification(t, k) for t, k in zip(texts(policy, rollouts), counts, strict=True)]
    return rollouts, read


def judge(run: Tango, solutions, truths, random: torch.Generator) -> list[list[Verification]]:
    """R verifications of every solution, from where the configuration takes them."""
    if run.config.step_source == "none":
        return [[] for _ in solutions]
    if run.config.step_source == "truth":
        if any(truth is None for truth in truths):
            raise ValueError("step_source: truth needs a task that knows its steps, such as kind: chain")
        return [[Verification(list(t), s.correct)] for s, t in zip(solutions, truths, strict=True)]
    n = run.config.verifications
    _, read = verify(run, solutions, n, random)
    return [read[i : i + n] for i in range(0, len(read), n)]


def outcome_rewards(
    run: Tango, solutions: Sequence[Solution], verifications: Sequence[Sequence[Verification]]
) -> Float[Tensor, " B"]:
    """`generator_reward` of every solution; of R verifications the mean of the final judgements found."""
    passed = [not run.config.gate or run.task.restates(s.problem, s.steps) for s in solutions]
    outcome = torch.tensor([float(s.correct and ok) for s, ok in zip(solutions, passed, strict=True)])
    finals = [[float(v.final) for v in found if v.final is not None] for found in verifications]
    final = torch.tensor([sum(f) / max(len(f), 1) for f in finals])
    return generator_reward(
        outcome, final, run.config.final_weight, found=torch.tensor(list(map(bool, finals)))
    )


def with_step_rewards(rollouts: Rollouts, solutions, verifications) -> Rollouts:
    """Judgements become rewards on the last token of each step."""
    if not all(verifications):
        return rollouts
    width = rollouts.completion_ids.shape[1]
    pairs = [
        [step_rewards(v.judgements, s.ends, width) for v in found]
        for s, found in zip(solutions, verifications, strict=True)
    ]
    rewards = torch.stack([torch.stack([reward for reward, _ in row]) for row in pairs])
    masks = torch.stack([torch.stack([mask for _, mask in row]) for row in pairs])
    return rollouts.with_(step_reward=rewards, step_mask=masks)


def with_advantage(rollouts: Rollouts, config: TangoConfig, alpha: float) -> Rollouts:
    """Outcome advantage, mixed with the step advantage where there are step rewards."""
    mask = rollouts.mask
    advantage = outcome_advantage(rollouts.reward, rollouts.group, mask, estimator=config.estimator)
    if rollouts.step_reward is not None:
        scale = config.rloo_step_scale if config.estimator == "rloo" else None
        step = step_advantage(rollouts.step_reward, rollouts.step_mask, rollouts.group, mask,
                              estimator=config.estimator, scale=scale)  # fmt: skip
        advantage = mix_advantages(advantage, step, alpha)
    return rollouts.with_(advantage=advantage)


def learn(run: Tango, player: str, rollouts: Rollouts, done: int) -> dict[str, float]:
    """One optimizer step of a player on its rollouts."""
    config, me = run.config, run.players[player]
    lr, kl_coef, limit = (
        (config.lr, config.kl_coef, config.max_new_tokens) if player == "generator"
        else (config.verifier_lr, config.verifier_kl_coef, config.verifier_max_new_tokens)
    )  # fmt: skip
    set_lr(me.optimizer, lr, done, config.lr_warmup)
    trained = rollouts
    if config.mask_truncated:  # after the baseline, where they count; out of every mean of the loss
        trained = rollouts.with_(length=rollouts.length * rollouts.terminated)
    parts, batch = trained.micro_batches(config.micro_batch), {player: rollouts}

    def loss_of(part: Rollouts):
        part = part.to(me.policy.device)
        with torch.no_grad():
            ref_logp = me.reference.logp(part, temperature=config.temperature)
        logp, entropy = me.policy.logp(part, temperature=config.temperature, return_entropy=True)
        watched = {"log-prob": logp, "reference log-prob": ref_logp, "entropy": entropy}
        must_be_finite(part, batch, watched)
        return tango_loss(
            logp, part.old_logp, part.advantage, part.mask, ref_logp=ref_logp, entropy=entropy,
            clip_eps=config.clip_eps, kl_coef=kl_coef, kl_kind=config.kl_kind,
            entropy_coef=config.entropy_coef, sample_weight=part.sample_weight, aggregate=config.aggregate,
            constant_length=limit,
        )  # fmt: skip

    learned = optimise(me.policy, me.optimizer, parts, shares_of(parts, config.aggregate), loss_of,
                       max_grad_norm=config.max_grad_norm, batch=batch)  # fmt: skip
    return learned | keep_served(me.policy, changed=True)


# --- what is measured -------------------------------------------------------------------------------

METRICS = {
    "turn": "Whose update it was: generator or verifier.",
    "alpha": "Weight of the step advantage in the mix; it decays over the generator's own updates.",
    "loss": "The objective that was minimised: policy term - entropy bonus + KL penalty.",
    "policy": "The clipped policy-gradient term; near 0 at one pass per batch, its gradient is not.",
    "kl": "KL penalty towards the player's starting policy, per token (before its coefficient).",
    "entropy": "Mean entropy of the tempered next-token distribution, in nats.",
    "clip_fraction": "Share of tokens at which the clipped branch was active.",
    "approx_kl": "Estimated KL between the policy that sampled and the one that was trained.",
    "grad_norm": "Norm of the gradient before clipping.",
    "server_gap": "Mean distance in nats between a server's log-probs and the trainer's (with a server).",
    "reward": "Mean reward of the batch: for the generator the share of right answers (unless `gate` or "
    "`final_weight` change what is paid), for the verifier 1.0 * [final judgement right] + 0.8 * format.",
    "length": "Mean tokens of a completion, the end of sequence included.",
    "truncated": "Share of completions cut off at the length limit.",
    "dead_groups": "Share of groups whose rewards are all equal: they give no outcome signal.",
    "format": "Mean format score of the solutions (not rewarded).",
    "steps": "Mean number of steps in a solution.",
    "step_truth": "Share of the generator's steps that are true (measured, never rewarded).",
    "step_parsed": "Share of verifications with exactly one judgement per step.",
    "step_balanced": "Mean of the shares of true and of false steps judged rightly (measured only).",
    "step_correct_rate": "Share of steps that the verifier calls CORRECT.",
    "final_accuracy": "Share of verifications whose final judgement is right; a missing one is wrong.",
    "final_balanced": "Mean of the shares of right and of wrong solutions judged rightly in the end.",
}


def solution_metrics(rollouts: Rollouts, solutions, truths) -> dict[str, float]:
    """How the generator's batch looks; truths are None for tasks that do not know their steps."""
    reward = rollouts.reward
    by_group = [reward[rollouts.group == g] for g in rollouts.group.unique()]
    found = {
        "reward": float(reward.mean()),
        "length": float(rollouts.length.float().mean()),
        "truncated": float((~rollouts.terminated).float().mean()),
        "dead_groups": sum(bool((r == r[0]).all()) for r in by_group) / len(by_group),
        "format": sum(s.format for s in solutions) / len(solutions),
        "steps": sum(len(s.steps) for s in solutions) / len(solutions),
    }
    known = [step for truth in truths if truth is not None for step in truth]
    return found | ({"step_truth": sum(known) / len(known)} if known else {})


def balanced(judged: Sequence[bool | None], truth: Sequence[bool]) -> float:
    """Mean of the two classes' accuracies (of the one class, if only one occurs); None is wrong."""
    classes = [[j == t for j, t in zip(judged, truth, strict=True) if t is label] for label in (True, False)]
    shares = [sum(c) / len(c) for c in classes if c]
    return sum(shares) / len(shares) if shares else float("nan")


def judgement_metrics(solutions, truths, verifications: list[list[Verification]]) -> dict[str, float]:
    """How the verifier's judgements compare with the outcome and, where known, with the steps' truth."""
    flat = [(s, t, v) for s, t, found in zip(solutions, truths, verifications, strict=True) for v in found]
    finals, correct = [v.final for _, _, v in flat], [s.correct for s, _, _ in flat]
    found = {
        "final_accuracy": sum(f == c for f, c in zip(finals, correct, strict=True)) / len(flat),
        "final_balanced": balanced(finals, correct),
        "step_parsed": sum(v.judgements is not None for _, _, v in flat) / len(flat),
    }
    parsed = [(j, t) for _, truth, v in flat if truth is not None and v.judgements is not None
              for j, t in zip(v.judgements, truth, strict=True)]  # fmt: skip
    if parsed:
        judged, true = zip(*parsed, strict=True)
        found |= {"step_balanced": balanced(judged, true), "step_correct_rate": sum(judged) / len(judged)}
    return found
