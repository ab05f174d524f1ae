"""A discriminative verifier, the contrast that the Tango paper draws: one probability in place of a judgement.

The built-in verifier's own network with a single number read from its last state, taught by supervised learning
whether a solution's answer is right.  It sees more graded solutions than Tango's verifier does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tangolite.models import Policy
from tangolite.rollouts import Rollouts, length_mask, pad_left
from tangolite.tango import METRICS, Solution, Tango, learn, solution_metrics, solve, with_advantage
from tangolite.tasks import problems
from tangolite.updates import seeded

UPDATES = 80  # as many as Tango's verifier gets


class ScoreModel:
    """P(the solution is right), from the state at the end of the verifier's prompt."""

    def __init__(self, policy: Policy, prompts, seed: int) -> None:
        self.policy, self.prompts = policy, prompts
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.head = nn.Linear(policy.model.config.hidden_size, 1)

    def logits(self, solutions: list[Solution]) -> Float[Tensor, " B"]:
        texts = [self.prompts.verifier(s.problem.question, s.text, len(s.steps)) for s in solutions]
        ids, length = pad_left(
            [self.prompts.encode(self.policy.tokenizer, t) for t in texts], self.policy.pad_id
        )
        padding = ids.shape[1] - length
        position = (torch.arange(ids.shape[1])[None] - padding[:, None]).clamp(min=0)
        seen = (~length_mask(padding, ids.shape[1])).long()
        backbone = self.policy.model.get_decoder()
        out = backbone(input_ids=ids, attention_mask=seen, position_ids=position, use_cache=False)
        return self.head(out.last_hidden_state[:, -1])[:, 0]

    def scores(self, solutions: list[Solution]) -> Float[Tensor, " B"]:
        with torch.no_grad():
            return self.logits(solutions).sigmoid()


def taught(run: Tango, model: ScoreModel, updates: int = UPDATES, lr: float = 3e-4) -> list[float]:
    """Supervised learning on the outcomes of fresh solutions, short and long chains in turns; the losses."""
    optimizer = torch.optim.AdamW(
        [*model.policy.parameters(), *model.head.parameters()], lr=lr, weight_decay=0.0
    )
    losses = []
    for number in range(updates):
        task = run.task if number % 2 else run.verifier_task
        asked = problems(task, run.config.questions, f"{run.config.seed}/scores/{number}")
        _, solutions = solve(run, asked, run.config.group, seeded(run.config.seed, "scores", number))
        right = torch.tensor([float(s.correct) for s in solutions])
        share = right.mean().clamp(0.02, 0.98)
        weight = torch.where(
            right > 0.5, 0.5 / share, 0.5 / (1 - share)
        )  # balanced classes, in the head's favour
        loss = F.binary_cross_entropy_with_logits(model.logits(solutions), right, weight=weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*model.policy.parameters(), *model.head.parameters()], 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def paid_by_scores(run: Tango, model: ScoreModel, number: int) -> dict[str, float]:
    """One generator update whose only reward is the score; nothing looks at the gold answer."""
    asked = problems(run.task, run.config.questions, f"{run.config.seed}/generator/{number}")
    rollouts, solutions = solve(run, asked, run.config.group, seeded(run.config.seed, "solutions", number))
    rollouts: Rollouts = rollouts.with_(reward=model.scores(solutions))
    losses = learn(run, "generator", with_advantage(rollouts, run.config, 0.0), number)
    truths = [run.task.step_truth(s.problem, s.steps) for s in solutions]
    found = solution_metrics(rollouts, solutions, truths)
    assert found.keys() <= METRICS.keys()
    return losses | found | {"correct": sum(s.correct for s in solutions) / len(solutions)}
