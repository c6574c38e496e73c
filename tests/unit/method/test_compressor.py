from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sedem.config import SedemConfig
from sedem.method.compressor import (
    PoolingCompressor,
    QueryCompressor,
    build_compressor,
    pool,
    slot_tokens,
    state_mask,
)

LENGTHS = [8, 5, 1]
HIDDEN_STE = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(7)).double()


def tail_mask(lengths: list[int], segment_length: int) -> Tensor:
    return torch.tensor([[t < length for t in range(segment_length)] for length in lengths])


MASK_ST = tail_mask(LENGTHS, 8)


def randomised(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module.double()


def slot_means(states_TE: Tensor, length: int, compression: int) -> Tensor:
    """The mean of each run of C states that are real, slot by slot."""
    means = []
    for start in range(0, len(states_TE), compression):
        run = states_TE[start : min(start + compression, max(start, length))]
        means.append(run.mean(0) if len(run) else torch.zeros_like(states_TE[0]))
    return torch.stack(means)


@pytest.mark.parametrize("compression", [1, 2, 4, 12])
@pytest.mark.parametrize("lengths", [(12, 12), (12, 7), (9, 1), (4, 8)])
def test_pool_is_the_mean_of_each_run_of_c_real_states(
    compression: int, lengths: tuple[int, int]
) -> None:
    states_STE = torch.randn(2, 12, 3, generator=torch.Generator().manual_seed(0)).double()
    expected = [
        slot_means(states, length, compression)
        for states, length in zip(states_STE, lengths, strict=True)
    ]
    found = pool(states_STE, tail_mask([*lengths], 12), compression)
    torch.testing.assert_close(found, torch.stack(expected))


def naive_map(vectors: Tensor, compressor: PoolingCompressor) -> Tensor:
    """W_in as the paper writes it, or the MLP of the appendix in its place."""
    if isinstance(compressor.w_in, nn.Linear):
        return vectors @ compressor.w_in.weight.T
    norm, first, _, second = compressor.w_in
    normed = F.layer_norm(vectors, (vectors.shape[-1],), norm.weight, norm.bias, norm.eps)
    return F.gelu(normed @ first.weight.T + first.bias) @ second.weight.T + second.bias


@pytest.mark.parametrize("mlp", [False, True])
def test_slots_are_mapped_means_and_the_target_is_each_state_mapped(mlp: bool) -> None:
    compressor = randomised(PoolingCompressor(4, 6, 2, mlp=mlp))
    assert isinstance(compressor, PoolingCompressor)
    means = [
        slot_means(states, length, 2) for states, length in zip(HIDDEN_STE, LENGTHS, strict=True)
    ]
    expected = naive_map(torch.stack(means), compressor)
    torch.testing.assert_close(compressor(HIDDEN_STE, MASK_ST), expected)
    torch.testing.assert_close(compressor.target(HIDDEN_STE), naive_map(HIDDEN_STE, compressor))


@pytest.mark.parametrize(("d_enc", "d_dec"), [(4, 6), (6, 4), (5, 5)])
def test_w_in_starts_orthogonal_and_as_the_identity_when_widths_agree(
    d_enc: int, d_dec: int
) -> None:
    weight = PoolingCompressor(d_enc, d_dec, 2).w_in.weight
    square = weight @ weight.T if d_dec < d_enc else weight.T @ weight
    torch.testing.assert_close(square, torch.eye(min(d_enc, d_dec)), atol=1e-6, rtol=0)
    assert torch.equal(weight, torch.eye(5)) == (d_enc == d_dec)


def naive_attention(states_TE: Tensor, length: int, compressor: QueryCompressor) -> list[Tensor]:
    """A^h of one segment by head, as the appendix writes it.

    Only the first ceil(length / C) queries compete for a segment of that length.
    """
    slots, dim = -(-length // compressor.compression), compressor.queries.shape[1]
    queries = compressor.w_query(compressor.norm_query(compressor.queries))[:slots]
    keys = compressor.w_key(compressor.norm_state(states_TE))[:length]
    attention = []
    for part in torch.arange(dim).chunk(compressor.heads):
        scores = queries[:, part] @ keys[:, part].T / (dim / compressor.heads) ** 0.5
        initial = scores.exp() / scores.exp().sum(1, keepdim=True)
        attention.append(initial / (initial.sum(0) + 1e-6))
    return attention


def test_query_slots_are_queries_plus_what_their_heads_win_of_the_tokens() -> None:
    compressor = randomised(QueryCompressor(4, 6, 2, slots=4, heads=2))
    assert isinstance(compressor, QueryCompressor)
    values_STD = compressor.w_value(compressor.norm_state(HIDDEN_STE))
    attention_ShMT = compressor.attention(HIDDEN_STE, MASK_ST)
    memory_SMD = compressor(HIDDEN_STE, MASK_ST)
    for s, length in enumerate(LENGTHS):
        expected = naive_attention(HIDDEN_STE[s], length, compressor)
        used = len(expected[0])
        torch.testing.assert_close(attention_ShMT[s, :, :used, :length], torch.stack(expected))
        assert attention_ShMT[s, :, :, length:].eq(0).all()
        assert attention_ShMT[s, :, used:].eq(0).all() and memory_SMD[s, used:].eq(0).all()
        mixed = [a @ v for a, v in zip(expected, values_STD[s, :length].chunk(2, 1), strict=True)]
        torch.testing.assert_close(
            memory_SMD[s, :used], compressor.queries[:used] + torch.cat(mixed, 1)
        )
    torch.testing.assert_close(compressor.target(HIDDEN_STE), values_STD)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("linear", PoolingCompressor), ("mlp", PoolingCompressor), ("query", QueryCompressor)],
)
def test_build_compressor_makes_the_kind_that_the_configuration_names(
    name: str, kind: type[nn.Module]
) -> None:
    config = SedemConfig(
        encoder="-",
        extract_layers=(1,),
        inject_layer=1,
        segment_length=8,
        compression=2,
        compressor=name,
        compressor_heads=3,
    )
    compressor = build_compressor(config, 4, 6)
    assert type(compressor) is kind
    assert compressor(HIDDEN_STE.float(), MASK_ST).shape == (3, 4, 6)
    assert compressor.target(HIDDEN_STE.float()).shape == (3, 8, 6)


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 24), min_size=1, max_size=4),
    compression=st.sampled_from([1, 2, 4, 8]),
)
def test_slots_count_their_real_tokens_and_their_first_states_are_real(
    lengths: list[int], compression: int
) -> None:
    mask_ST = tail_mask(lengths, 24)
    tokens_SM = slot_tokens(mask_ST, compression)
    runs = range(0, 24, compression)
    assert tokens_SM.tolist() == [
        [min(max(length - start, 0), compression) for start in runs] for length in lengths
    ]
    assert torch.equal(state_mask(tokens_SM, compression), mask_ST)


def test_real_states_of_a_slot_come_first() -> None:
    """Also where a short slot has others after it."""
    tokens_KJ = torch.tensor([[4, 1, 4], [2, 0, 0]])
    expected = [[rank < count for count in row for rank in range(4)] for row in tokens_KJ.tolist()]
    assert state_mask(tokens_KJ, 4).tolist() == expected
