"""The one hand-off: every stage reads and extends a frozen batch of rollouts.

Sampling fills the ids and lengths, scoring fills the log-probs, grading the rewards, and the
estimators the advantages.  A field never changes meaning on the way; a field that a stage has not
filled yet is None.  Masks come from lengths, never from token values, so the end-of-sequence token is
trained on even where padding and end of sequence share one id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def length_mask(length: Int[Tensor, " B"], width: int) -> Bool[Tensor, "B T"]:
    """True on the first ``length[b]`` of ``width`` positions of row b."""
    return torch.arange(width, device=length.device)[None] < length[:, None]


def pad_left(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Int[Tensor, "B P"], Int[Tensor, " B"]]:
    """Pad lists of ids on the left to one width; returns (ids, lengths)."""
    width = max(map(len, rows), default=0)
    ids = [[pad_id] * (width - len(row)) + list(row) for row in rows]
    return torch.tensor(ids, dtype=torch.long).view(len(rows), width), torch.tensor([len(r) for r in rows])


def pad_right(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[Int[Tensor, "B T"], Int[Tensor, " B"]]:
    """Pad lists of ids on the right to one width; returns (ids, lengths)."""
    width = max(map(len, rows), default=0)
    ids = [list(row) + [pad_id] * (width - len(row)) for row in rows]
    return torch.tensor(ids, dtype=torch.long).view(len(rows), width), torch.tensor([len(r) for r in rows])


@dataclass(frozen=True)
class Rollouts:
    """B completions of prompts, and what the later stages found out about them.

    Prompts are padded on the left and completions on the right, so that column P is the first sampled
    token of every row.  ``length`` counts completion tokens up to and including the end-of-sequence
    token; ``terminated`` is False where the length limit cut a completion off.
    """

    prompt_ids: Int[Tensor, "B P"]
    prompt_length: Int[Tensor, " B"]
    completion_ids: Int[Tensor, "B T"]
    length: Int[Tensor, " B"]
    terminated: Bool[Tensor, " B"]
    group: Int[Tensor, " B"]  # equal numbers share a prompt
    old_logp: Float[Tensor, "B T"] | None = None  # of the policy that sampled, tempered
    ref_logp: Float[Tensor, "B T"] | None = None
    reward: Float[Tensor, " B"] | None = None
    step_reward: Float[Tensor, "B R T"] | None = None
    step_mask: Bool[Tensor, "B R T"] | None = None
    advantage: Float[Tensor, "B T"] | None = None
    sample_weight: Float[Tensor, " B"] | None = None

    def __post_init__(self) -> None:
        rows = {f.name: len(v) for f in fields(self) if (v := getattr(self, f.name)) is not None}
        if len(set(rows.values())) > 1:
            raise ValueError(f"every field of Rollouts needs the same number of rows, got {rows}")

    def __len__(self) -> int:
        return len(self.length)

    @property
    def mask(self) -> Bool[Tensor, "B T"]:
        """True on completion tokens, the end-of-sequence token included."""
        return length_mask(self.length, self.completion_ids.shape[1])

    @property
    def n_tokens(self) -> int:
        return int(self.length.sum())

    def tokens(self, row: int) -> list[int]:
        """The sampled ids of one completion, without padding."""
        return self.completion_ids[row, : int(self.length[row])].tolist()

    def with_(self, **changes: Tensor) -> Rollouts:
        """A copy with more fields filled in."""
        return replace(self, **changes)

    def not_finite(self) -> str | None:
        """Which number of which rollout is NaN or infinite, in words; None if all are finite.

        Padding does not count.
        """
        names = {"reward": "reward", "step_reward": "step reward", "old_logp": "old log-prob",
                 "ref_logp": "reference log-prob", "advantage": "advantage", "sample_weight": "weight"}  # fmt: skip
        for field, name in names.items():
            if (value := getattr(self, field)) is not None and (said := first_not_finite(value, self.mask)):
                return f"the {name} of {said}"
        return None

    def _map(self, change) -> Rollouts:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return replace(self, **{name: change(name, v) for name, v in values if v is not None})

    def to(self, device: torch.device | str) -> Rollouts:
        return self._map(lambda _, value: value.to(device))

    def rows(self, index: slice | Tensor) -> Rollouts:
        """Some of the rows, with columns that are padding in all of them cut off."""
        part = self._map(lambda _, value: value[index])
        longest, prompt = int(part.length.max()), int(part.prompt_length.max())
        width, prompt_width = part.completion_ids.shape[1], part.prompt_ids.shape[1]

        def trim(name: str, value: Tensor) -> Tensor:
            if name == "prompt_ids":
                return value[:, prompt_width - prompt :]
            return value[..., :longest] if value.dim() > 1 and value.shape[-1] == width else value

        return part._map(trim)

    def micro_batches(self, size: int) -> list[Rollouts]:
        """Consecutive slices of at most ``size`` rows, each trimmed to its own longest row."""
        return [self.rows(slice(i, i + size)) for i in range(0, len(self), size)]


def first_not_finite(value: Tensor, mask: Bool[Tensor, "B T"]) -> str | None:
    """The first of B rollouts whose value (B,), (B, T) or (B, R, T) is not finite: `rollout 3 is nan`."""
    bad = ~value.isfinite()
    if value.dim() > 1:
        bad = bad & mask.reshape(len(mask), *[1] * (value.dim() - 2), -1)
    if not bad.any():
        return None
    return f"rollout {int(bad.nonzero()[0, 0])} is {value[bad][0].item()}"


class NonFiniteError(RuntimeError):
    """A number that is NaN or infinite, named; ``batch`` holds the rollouts of the update, if it had any."""

    def __init__(self, what: str, batch: dict[str, Rollouts], *, changed: bool = False) -> None:
        super().__init__(what)
        self.batch, self.changed = batch, changed  # have weights changed in this update?


def must_be_finite(part: Rollouts, batch: dict[str, Rollouts], logps: dict[str, Tensor | None]) -> None:
    """Raises NonFiniteError that names the first log-prob of a micro-batch that is not finite."""
    for name, logp in logps.items():
        if logp is not None and (said := first_not_finite(logp.detach(), part.mask)):
            raise NonFiniteError(f"the {name} of {said} (counted in its micro-batch)", batch)


def check_batch(batch: dict[str, Rollouts]) -> None:
    """Raises NonFiniteError that names the first number of a batch that is not finite, and whose it is."""
    for name, rollouts in batch.items():
        if said := rollouts.not_finite():
            raise NonFiniteError(f"{said} (in the batch of the {name})", batch)


def tensors_of(batch: dict[str, Rollouts]) -> dict[str, Tensor]:
    """Every tensor of a batch by a name such as `generator.old_logp`, ready for a file."""
    pairs = (
        (f"{name}.{f.name}", getattr(part, f.name)) for name, part in batch.items() for f in fields(part)
    )
    return {key: value.detach().contiguous().clone() for key, value in pairs if value is not None}


def _pad_to(value: Tensor, width: int, fill: int, left: bool) -> Tensor:
    missing = width - value.shape[-1]
    return F.pad(value, (missing, 0) if left else (0, missing), value=fill)


def concatenate(parts: Sequence[Rollouts], pad_id: int = 0) -> Rollouts:
    """Stack batches; group numbers are shifted so that groups of different parts stay apart."""
    if not parts:
        raise ValueError("concatenate needs at least one batch of rollouts")
    prompt = max(p.prompt_ids.shape[1] for p in parts)
    width = max(p.completion_ids.shape[1] for p in parts)
    merged, shift, groups = {}, 0, []
    for part in parts:
        groups.append(part.group + shift)
        shift += int(part.group.max()) + 1 if len(part) else 0
    for field in fields(Rollouts):
        values = [getattr(p, field.name) for p in parts]
        if any(v is None for v in values):
            merged[field.name] = None
        elif field.name == "prompt_ids":
            merged[field.name] = torch.cat([_pad_to(v, prompt, pad_id, left=True) for v in values])
        elif values[0].dim() > 1:
            fill = pad_id if field.name == "completion_ids" else 0
            merged[field.name] = torch.cat([_pad_to(v, width, fill, left=False) for v in values])
        else:
            merged[field.name] = torch.cat(values)
    return Rollouts(**merged | {"group": torch.cat(groups)})
