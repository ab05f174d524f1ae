"""Rollouts: masks from lengths, trimming that keeps every value, stacking that keeps groups apart."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from tangolite.rollouts import Rollouts, concatenate, length_mask, pad_left, pad_right

E = 9  # end of sequence and padding at once


def rollouts(prompts, completions, pad=0, group=None, **more) -> Rollouts:
    prompt_ids, prompt_length = pad_left(prompts, pad)
    completion_ids, length = pad_right(completions, pad)
    group = torch.arange(len(length)) if group is None else torch.tensor(group)
    terminated = torch.ones(len(length), dtype=torch.bool)
    return Rollouts(prompt_ids, prompt_length, completion_ids, length, terminated, group, **more)


def full(seed=0) -> Rollouts:
    """Five rows of different lengths with every field filled; padding of the fields is 0."""
    draw = torch.Generator().manual_seed(seed)
    prompts, completions = [[1] * n for n in (2, 5, 1, 3, 4)], [[2] * n for n in (4, 1, 3, 6, 2)]
    batch = rollouts(prompts, completions, group=[0, 0, 1, 1, 2])
    mask, (n, t) = batch.mask, batch.mask.shape
    per_token = {
        name: torch.rand(n, t, generator=draw) * mask for name in ("old_logp", "ref_logp", "advantage")
    }
    step = torch.rand(n, 2, t, generator=draw) * mask[:, None]
    per_row = {name: torch.rand(n, generator=draw) for name in ("reward", "sample_weight")}
    return batch.with_(**per_token, **per_row, step_reward=step, step_mask=step > 0.5)


def test_the_end_of_sequence_is_trained_on_where_padding_has_its_id():
    prompt_ids = torch.tensor([[1], [1]])
    completions = torch.tensor([[5, 6, E, E], [5, 6, 7, 8]])
    batch = Rollouts(
        prompt_ids, torch.tensor([1, 1]), completions, torch.tensor([3, 4]),
        torch.tensor([True, False]), torch.tensor([0, 0]),
    )  # fmt: skip
    assert batch.mask.tolist() == [[True, True, True, False], [True] * 4]
    assert batch.n_tokens == 7
    assert batch.tokens(0) == [5, 6, E] and batch.tokens(1) == [5, 6, 7, 8]


def test_length_mask_covers_none_some_and_all_columns():
    assert length_mask(torch.tensor([0, 2, 3]), 3).int().tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_prompts_are_padded_on_the_left_and_completions_on_the_right():
    rows = [[1, 2, 3], [4], []]
    ids, length = pad_left(rows, 0)
    assert ids.tolist() == [[1, 2, 3], [0, 0, 4], [0, 0, 0]] and length.tolist() == [3, 1, 0]
    ids, length = pad_right(rows, 0)
    assert ids.tolist() == [[1, 2, 3], [4, 0, 0], [0, 0, 0]] and length.tolist() == [3, 1, 0]
    assert pad_left([], 0)[0].shape == (0, 0) and pad_right([[]], 0)[0].shape == (1, 0)


@pytest.mark.parametrize("name", ["reward", "old_logp", "group"])
def test_fields_of_different_row_counts_are_refused_by_name(name):
    batch = full()
    with pytest.raises(ValueError, match=rf"same number of rows.*'{name}': 4"):
        batch.with_(**{name: getattr(batch, name)[:4]})


def test_with_leaves_the_original_alone_and_a_field_cannot_be_set():
    batch = full()
    changed = batch.with_(reward=torch.ones(5))
    assert changed.reward.tolist() == [1.0] * 5 and not torch.equal(batch.reward, changed.reward)
    with pytest.raises(AttributeError):
        batch.reward = torch.ones(5)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_micro_batches_hold_the_same_values_trimmed_to_their_longest_row(size):
    batch = full()
    parts = batch.micro_batches(size)
    assert [len(p) for p in parts] == [min(size, 5 - i) for i in range(0, 5, size)]
    assert sum(p.n_tokens for p in parts) == batch.n_tokens
    for part in parts:
        assert part.completion_ids.shape[1] == int(part.length.max())
        assert part.prompt_ids.shape[1] == int(part.prompt_length.max())
    row = 0
    for part in parts:
        for i in range(len(part)):
            same_row(part, i, batch, row)
            row += 1


def same_row(part: Rollouts, i: int, batch: Rollouts, row: int) -> None:
    for field in fields(Rollouts):
        mine, whole = getattr(part, field.name)[i], getattr(batch, field.name)[row]
        if field.name == "prompt_ids":
            n = int(batch.prompt_length[row])
            assert mine[len(mine) - n :].tolist() == whole[len(whole) - n :].tolist()
        elif whole.dim():
            n = int(batch.length[row])
            assert torch.equal(mine[..., :n], whole[..., :n]), field.name
            assert not mine[..., n:].any()
        else:
            assert mine == whole, field.name


def test_rows_can_be_picked_by_a_mask_and_reordered_by_an_index():
    batch = full()
    picked = batch.rows(torch.tensor([False, True, False, False, True]))
    assert picked.group.tolist() == [0, 2] and picked.completion_ids.shape[1] == 2
    order = torch.tensor([4, 0])
    assert torch.equal(batch.rows(order).reward, batch.reward[order])


def test_a_width_that_happens_to_equal_the_number_of_verifications_is_trimmed_once():
    batch = rollouts([[1]] * 2, [[2], [2, 2, 2]])
    step = torch.arange(18.0).view(2, 3, 3)  # R == T == 3
    first = batch.with_(step_reward=step).rows(slice(0, 1))
    assert first.step_reward.tolist() == [[[0.0], [3.0], [6.0]]]


def test_moving_keeps_every_field_and_leaves_empty_ones_empty():
    batch = full()
    moved = batch.to("cpu")
    assert all(torch.equal(getattr(moved, f.name), getattr(batch, f.name)) for f in fields(batch))
    assert rollouts([[1]], [[2]]).to("cpu").reward is None


def test_concatenating_the_micro_batches_gives_the_batch_back_with_groups_kept_apart():
    batch = full()
    joined = concatenate(batch.micro_batches(2))
    assert joined.group.tolist() == [0, 0, 2, 2, 5]  # 0 0 | 1 1 | 2, each shifted past the last
    for field in fields(Rollouts):
        if field.name != "group":
            assert torch.equal(getattr(joined, field.name), getattr(batch, field.name)), field.name


def test_concatenating_pads_ids_with_the_padding_id_and_numbers_with_zero():
    short = rollouts([[1]], [[2]], pad=7, old_logp=torch.tensor([[-1.0]]))
    long = rollouts([[3, 3]], [[4, 4]], pad=7, old_logp=torch.tensor([[-2.0, -3.0]]))
    joined = concatenate([short, long], pad_id=7)
    assert joined.prompt_ids.tolist() == [[7, 1], [3, 3]]
    assert joined.completion_ids.tolist() == [[2, 7], [4, 4]]
    assert joined.old_logp.tolist() == [[-1.0, 0.0], [-2.0, -3.0]]
    assert joined.group.tolist() == [0, 1]


def test_a_field_that_one_part_lacks_is_left_empty():
    batch = full()
    assert concatenate([batch, batch.with_(reward=None)]).reward is None


def test_concatenating_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one batch"):
        concatenate([])
