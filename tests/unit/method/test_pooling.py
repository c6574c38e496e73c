from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sedem.method.pooling import pool, slot_tokens, state_mask


def naive_pool(
    states: list[list[list[float]]], real: list[list[bool]], compression: int
) -> list[list[list[float]]]:
    pooled = []
    for s in range(len(states)):
        slots = []
        for j in range(len(states[s]) // compression):
            members = []
            for k in range(compression):
                t = j * compression + k
                if real[s][t]:
                    members.append(states[s][t])
            slot = []
            for e in range(len(states[s][0])):
                slot.append(sum(m[e] for m in members) / len(members) if members else 0.0)
            slots.append(slot)
        pooled.append(slots)
    return pooled


def lengths_mask(lengths: list[int], segment_length: int) -> torch.Tensor:
    return torch.tensor([[t < length for t in range(segment_length)] for length in lengths])


@pytest.mark.parametrize("compression", [1, 2, 4, 12])
@pytest.mark.parametrize("lengths", [(12, 12), (12, 7), (9, 1), (4, 8)])
def test_pool_is_the_mean_of_each_run_of_c_real_states(
    compression: int, lengths: tuple[int, int]
) -> None:
    states_STE = torch.randn(2, 12, 3, generator=torch.Generator().manual_seed(0)).double()
    mask_ST = lengths_mask(list(lengths), 12)
    expected = naive_pool(states_STE.tolist(), mask_ST.tolist(), compression)
    torch.testing.assert_close(
        pool(states_STE, mask_ST, compression), torch.tensor(expected).double()
    )


def test_a_full_slot_is_the_sum_over_c_as_the_paper_writes_it() -> None:
    states_STE = torch.arange(16.0).view(1, 8, 2)
    pooled_SME = pool(states_STE, torch.ones(1, 8, dtype=torch.bool), 4)
    assert pooled_SME.tolist() == [[[3.0, 4.0], [11.0, 12.0]]]


def test_a_slot_of_padding_alone_is_zero_and_not_nan() -> None:
    pooled_SME = pool(torch.randn(1, 8, 3), lengths_mask([2], 8), 4)
    assert pooled_SME[0, 1].tolist() == [0.0, 0.0, 0.0]
    assert pooled_SME.isfinite().all()


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    compression=st.sampled_from([1, 2, 3, 4, 6]),
    seed=st.integers(0, 2**16),
)
def test_the_content_of_padding_never_changes_a_pooled_slot(
    lengths: list[int], compression: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask_ST = lengths_mask(lengths, 12)
    states_STE = torch.randn(len(lengths), 12, 2, generator=generator)
    other_STE = torch.where(mask_ST[..., None], states_STE, 1e6)
    assert torch.equal(
        pool(states_STE, mask_ST, compression), pool(other_STE, mask_ST, compression)
    )


@pytest.mark.parametrize("compression", [1, 3, 4])
def test_slot_tokens_counts_the_real_tokens_of_each_slot(compression: int) -> None:
    lengths = [12, 7, 0]
    expected = [
        [
            sum(t < length for t in range(j * compression, (j + 1) * compression))
            for j in range(12 // compression)
        ]
        for length in lengths
    ]
    assert slot_tokens(lengths_mask(lengths, 12), compression).tolist() == expected


def test_state_mask_marks_the_first_states_of_a_slot_as_real() -> None:
    tokens_KJ = torch.tensor([[4, 4, 1], [2, 0, 0]])
    expected = [[rank < count for count in row for rank in range(4)] for row in tokens_KJ.tolist()]
    assert state_mask(tokens_KJ, 4).tolist() == expected


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 24), min_size=1, max_size=4),
    compression=st.sampled_from([1, 2, 4, 8]),
)
def test_state_mask_gives_back_the_token_mask(lengths: list[int], compression: int) -> None:
    mask_ST = lengths_mask(lengths, 24)
    assert torch.equal(state_mask(slot_tokens(mask_ST, compression), compression), mask_ST)
