"""Checks for the exercises of notebook 11: a merged adapter, rounded scales, a reference without a copy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from tangolite.exercises import name_mistake
from tangolite.models import Policy, tiny_policy
from tangolite.rollouts import Rollouts


def merged(answer: Callable[[Tensor, Tensor, Tensor, float], Float[Tensor, "out in"]]) -> None:
    """The weight V, shaped as W (out, in), for which x @ V.T is x @ W.T + scaling * (x @ A.T) @ B.T."""
    draws = torch.Generator().manual_seed(3)
    W, A, B = (torch.randn(*shape, generator=draws) for shape in ((6, 4), (2, 4), (6, 2)))
    for scaling in (1.0, 0.5):
        kept = W.clone()
        V = answer(kept, A.clone(), B.clone(), scaling)
        assert isinstance(V, Tensor), f"the merged weight must be a tensor, not {type(V).__name__}"
        assert V.shape != (4, 6), "the merged weight is (4, 6): it has been transposed, W is (out, in)"
        assert V.shape == (6, 4), f"the merged weight must be (6, 4) like W, not {tuple(V.shape)}"
        assert torch.equal(kept, W), "W itself was changed: the other player sits on it too; return a new one"
        _told(f"scaling {scaling}: this is not W and the correction", V, W + scaling * B @ A, {
            "the correction is missing: this is W": W,
            "W is missing: this is the correction alone": scaling * B @ A,
            "the scaling is missing: the correction is added as if it were 1": W + B @ A,
            "the scaling belongs to the correction only, not to W": scaling * (W + B @ A),
            "the correction is taken away rather than added": W - scaling * B @ A,
            "the scaling counts twice": W + scaling**2 * B @ A,
        })  # fmt: skip


def rounded_scales(answer: Callable[[Float[Tensor, "256"]], Float[Tensor, "256"]]) -> None:
    """256 scales, all positive, as 8 bits can hold them: at most 256 values, evenly spaced, fine steps."""
    draws = torch.Generator().manual_seed(4)
    scales = torch.randn(256, 64, generator=draws).abs().amax(-1)
    unit = scales.amax() / 127
    given = (scales / unit).round() * unit
    found = answer(scales.clone())
    assert isinstance(found, Tensor) and found.shape == scales.shape, "256 scales must come back, in a tensor"
    assert not torch.equal(found, scales), "nothing is rounded: these need 32 bits each"
    away = (found.mean() - scales.mean()).abs() / scales.mean()
    assert away < 0.5 or found.abs().max() < 100, "levels come back: multiply by the unit"
    assert away < 0.5, "the scales have lost their mean: what was taken away must be added again"
    steps = (found - found.min()) / found.unique().diff().min()
    assert (steps - steps.round()).abs().max() < 0.02, "the values are not evenly spaced: one unit for all"
    assert steps.max() < 255.5, f"{steps.max() + 1:.0f} levels from lowest to highest: 8 bits count 256"
    error, coarse = ((x - scales).abs().max() for x in (found, given))
    assert error < coarse * 1.01, f"largest error {error:.4f}, coarser than as given ({coarse:.4f})"
    assert error < coarse * 2 / 3, (
        f"largest error {error:.4f}, as coarse as given ({coarse:.4f}): no scale is negative, so half of the "
        "levels are still not used; how far apart are the scales that there are?"
    )


def start_of(answer: Callable[[Policy], Callable[[Rollouts], Float[Tensor, "B T"]]]) -> None:
    """A function of rollouts: their log-probs under the policy as it is now, also after it has learned.

    Without a copy of the base, and without another adapter on it.
    """
    from tangolite.lab.memory import peak_bytes

    policy, rollouts = _learned()
    asked, adapters = [], set(policy.model.peft_config)
    memory = peak_bytes(lambda: asked.append(answer(policy)))
    reference, base = asked[0], sum(p.numel() * p.element_size() for p in policy.model.parameters())
    assert callable(reference), f"return a function of rollouts, not {type(reference).__name__}"
    assert set(policy.model.peft_config) == adapters, "a further adapter lies on the base: do it without one"
    assert memory < base / 2, f"{memory / 1e3:.0f} kB were taken, more than half of the base: is it copied?"
    before, said = policy.logp(rollouts).detach(), reference(rollouts)
    assert torch.allclose(said, before), "the reference is not the policy as it was: is it the bare base?"
    _learn_something(policy)
    now, said = [p.detach().clone() for p in policy.parameters()], reference(rollouts)
    assert torch.allclose(said, before), "the reference moved when the policy learned: keep copies of numbers"
    kept = all(map(torch.equal, policy.parameters(), now))
    assert kept, "asking the reference undid what the policy has learned: put the numbers back"
    assert not said.requires_grad, "the reference's log-probs carry a gradient: it must not learn"


def _learned() -> tuple[Policy, Rollouts]:
    """A tiny base whose adapter is no longer zero, and rollouts of two completions."""
    from tangolite.adapters import attach
    from tangolite.warmstart import supervised_batch

    policy = attach(tiny_policy(5), ["generator"], seed=5, rank=2)["generator"]
    _learn_something(policy)
    return policy, supervised_batch(policy, [([20, 21, 22], [30, 31, 1]), ([23], [33, 34, 1])])


@torch.no_grad()
def _learn_something(policy: Policy) -> None:
    draws = torch.Generator().manual_seed(6)
    for p in policy.parameters():
        p.add_(0.1 * torch.randn(p.shape, generator=draws))


def _told(otherwise: str, found: Tensor, right: Tensor, mistakes: dict[str, Tensor]) -> None:
    """Nothing if ``found`` is right; else the words of the mistake that it equals, or ``otherwise``."""
    off = (found - right).abs().max()
    name_mistake(found, right, mistakes, f"{otherwise}: off by up to {off:.2g}")
