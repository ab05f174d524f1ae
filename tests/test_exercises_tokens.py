"""The checks of notebook 1's exercises accept the solutions and name the mistakes that are usually made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tangolite.exercises import tokens


def test_masks_from_lengths(solutions, told_apart) -> None:
    def places(width: int) -> Tensor:
        return torch.arange(width)[None]

    told_apart(
        tokens.mask_of,
        solutions("01_tokens")["mask_of"],
        {
            "end of sequence, is left out": lambda n, w: places(w) < n[:, None] - 1,
            "one position too many": lambda n, w: places(w) <= n[:, None],
            "turned round": lambda n, w: places(w) >= n[:, None],
            "yours end at the last": lambda n, w: places(w) >= w - n[:, None],
            "need not be the longest": lambda n, w: places(int(n.max())) < n[:, None],
            "a mask is bool": lambda n, w: (places(w) < n[:, None]).float(),
            "not list": lambda n, w: [[t < x for t in range(w)] for x in n.tolist()],
            "has shape": lambda n, w: (places(w) < n[:, None]).T,
            "should count": lambda n, w: places(w) < 2 * n[:, None],
        },
    )


def scored(logits: Tensor, ids: Tensor, states: slice, targets: slice, temperature: float = 1.0) -> Tensor:
    rows = torch.log_softmax(logits.float() / temperature, -1)[:, states]
    return rows.gather(-1, ids[:, targets, None])[..., 0]


def right(logits, ids, prompt, temperature, *, after=None) -> Tensor:
    found = scored(logits, ids, slice(prompt - 1, -1), slice(prompt, None), temperature)
    return found if after is None else after(found)


def overflowing(logits, ids, prompt, temperature) -> Tensor:
    share = (logits / temperature).exp()
    return scored(
        (share / share.sum(-1, keepdim=True)).log(), ids, slice(prompt - 1, -1), slice(prompt, None)
    )


def in_half(logits, ids, prompt, temperature) -> Tensor:
    rows = torch.log_softmax(logits[:, prompt - 1 : -1] / temperature, -1)
    return rows.gather(-1, ids[:, prompt:, None])[..., 0].float()


def test_logp_with_the_shift(solutions, told_apart) -> None:
    told_apart(
        tokens.logp_of,
        solutions("01_tokens")["logp_of"],
        {
            "have read token t already": lambda z, i, p, t: scored(z, i, slice(p, None), slice(p, None), t),
            "targets are one place early": lambda z, i, p, t: scored(
                z, i, slice(p - 1, -1), slice(p - 1, -1), t
            ),
            "log-softmax is missing": lambda z, i, p, t: z[:, p - 1 : -1].gather(-1, i[:, p:, None])[..., 0],
            "logarithm is missing": lambda z, i, p, t: right(z, i, p, t, after=torch.exp),
            "nobody sampled": lambda z, i, p, t: scored(z, i, slice(None, -1), slice(1, None), t),
            "gather": lambda z, i, p, t: torch.log_softmax(z[:, p - 1 : -1] / t, -1),
            "last dimension of one": lambda z, i, p, t: right(z, i, p, t)[..., None],
            "one token is lost": lambda z, i, p, t: scored(z, i, slice(p, -1), slice(p + 1, None), t),
            "temperature is not used": lambda z, i, p, t: right(z, i, p, 1.0),
            "divide the logits": lambda z, i, p, t: right(z, i, p, 1.0) / t,
            "multiplied": lambda z, i, p, t: right(z, i, p, 1 / t),
            "overflow": overflowing,
            "bfloat16": in_half,
            "three lines": lambda z, i, p, t: -right(z, i, p, t),
        },
    )


LONGEST = 4  # a row of the longest question, which has no padding on the left


def of_one_row(score, rollouts, row: int = LONGEST) -> bool:
    gap = score(rollouts)[row] - rollouts.old_logp[row]
    return bool(gap[rollouts.mask[row]].abs().max() < 1e-3)


def test_a_test_that_can_fail(solutions, told_apart) -> None:
    told_apart(
        tokens.trustworthy,
        solutions("01_tokens")["trustworthy"],
        {
            "rejects log-probs that agree": lambda s, r: bool((s(r) == r.old_logp)[r.mask].all()),
            "rejects a score with NaN": lambda s, r: bool((s(r) - r.old_logp).abs().max() < 1e-3),
            "trusts the log-probs of other tokens": lambda s, r: True,
            "trusts log-probs at temperature": lambda s, r: bool(s(r)[r.mask].mean() > -1),
            "trusts rows turned": lambda s, r: abs(s(r)[r.mask].mean() - r.old_logp[r.mask].mean()) < 1e-3,
            "trusts a model that attends": of_one_row,
        },
    )


def test_a_stub_stays_the_readers_turn(capsys) -> None:
    from tangolite.exercises import attempt

    def stub(*arguments):
        raise NotImplementedError("your turn")

    for check in (tokens.mask_of, tokens.logp_of, tokens.trustworthy):
        attempt(check, stub)
    assert capsys.readouterr().out.count("your turn") == 3


def test_the_broken_scores_are_broken_enough_to_be_seen() -> None:
    policy, rollouts = tokens._material()
    logp = policy.logp(rollouts).detach()
    torch.testing.assert_close(logp[rollouts.mask], rollouts.old_logp[rollouts.mask], atol=1e-4, rtol=1e-4)
    for what, wrong in tokens._broken(policy, rollouts, logp).items():
        assert (wrong - logp)[rollouts.mask].abs().max() > 0.1, what
    with pytest.raises(AssertionError, match="trusts"):
        tokens.trustworthy(lambda score, r: True)
