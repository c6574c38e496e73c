from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sedem.config import SedemConfig
from sedem.method.compressor import (
    PoolingCompressor,
    QueryCompressor,
    build_compressor,
    pool,
    slot_tokens,
    state_mask,
)

Vector = list[float]


def dot(first: Vector, second: Vector) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


def norm(vector: Vector, layer: nn.LayerNorm) -> Vector:
    mean = sum(vector) / len(vector)
    variance = sum((value - mean) ** 2 for value in vector) / len(vector)
    return [
        (value - mean) / math.sqrt(variance + layer.eps) * scale + shift
        for value, scale, shift in zip(
            vector, layer.weight.tolist(), layer.bias.tolist(), strict=True
        )
    ]


def gelu(value: float) -> float:
    return 0.5 * value * (1 + math.erf(value / math.sqrt(2)))


def linear(vector: Vector, layer: nn.Linear) -> Vector:
    """W_in as the paper writes it, a row vector times a matrix."""
    shift = layer.bias.tolist() if layer.bias is not None else [0.0] * layer.out_features
    return [dot(vector, column) + b for column, b in zip(layer.weight.tolist(), shift, strict=True)]


def mean_of(vectors: list[Vector]) -> Vector:
    return [sum(values) / len(vectors) for values in zip(*vectors, strict=True)]


def slot_means(states: list[Vector], length: int, compression: int) -> list[Vector]:
    means = []
    for j in range(len(states) // compression):
        run = states[j * compression : min((j + 1) * compression, length)]
        means.append(mean_of(run) if run else [0.0] * len(states[0]))
    return means


def tail_mask(lengths: list[int], segment_length: int) -> torch.Tensor:
    return torch.arange(segment_length)[None, :] < torch.tensor(lengths)[:, None]


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module.double()


LENGTHS = [8, 5, 1]
HIDDEN_STE = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(7)).double()
MASK_ST = tail_mask(LENGTHS, 8)


def test_linear_slots_are_pooled_means_times_w_in() -> None:
    compressor = randomised(PoolingCompressor(4, 6, 2))
    expected = [
        [linear(mean, compressor.w_in) for mean in slot_means(states, length, 2)]
        for states, length in zip(HIDDEN_STE.tolist(), LENGTHS, strict=True)
    ]
    torch.testing.assert_close(
        compressor(HIDDEN_STE, MASK_ST), torch.tensor(expected, dtype=torch.float64)
    )


def test_the_linear_target_is_projected_and_not_pooled() -> None:
    compressor = randomised(PoolingCompressor(4, 6, 2))
    expected = [
        [linear(state, compressor.w_in) for state in states] for states in HIDDEN_STE.tolist()
    ]
    torch.testing.assert_close(
        compressor.target(HIDDEN_STE), torch.tensor(expected, dtype=torch.float64)
    )


def test_w_in_starts_as_the_identity_when_widths_agree() -> None:
    assert torch.equal(PoolingCompressor(5, 5, 2).w_in.weight, torch.eye(5))


@pytest.mark.parametrize(("d_enc", "d_dec"), [(4, 6), (6, 4)])
def test_w_in_starts_orthogonal_when_widths_differ(d_enc: int, d_dec: int) -> None:
    weight = PoolingCompressor(d_enc, d_dec, 2).w_in.weight
    square = weight @ weight.T if d_dec < d_enc else weight.T @ weight
    torch.testing.assert_close(square, torch.eye(min(d_enc, d_dec)), atol=1e-6, rtol=0)


def naive_mlp(vector: Vector, compressor: PoolingCompressor) -> Vector:
    layer_norm, first, _, second = compressor.w_in
    activation = [gelu(value) for value in linear(norm(vector, layer_norm), first)]
    return linear(activation, second)


def test_mlp_slots_are_an_mlp_of_pooled_means() -> None:
    compressor = randomised(PoolingCompressor(4, 6, 2, mlp=True))
    expected = [
        [naive_mlp(mean, compressor) for mean in slot_means(states, length, 2)]
        for states, length in zip(HIDDEN_STE.tolist(), LENGTHS, strict=True)
    ]
    torch.testing.assert_close(
        compressor(HIDDEN_STE, MASK_ST), torch.tensor(expected, dtype=torch.float64)
    )


def test_the_mlp_target_is_the_mlp_of_each_state() -> None:
    compressor = randomised(PoolingCompressor(4, 6, 2, mlp=True))
    expected = [[naive_mlp(state, compressor) for state in row] for row in HIDDEN_STE.tolist()]
    torch.testing.assert_close(
        compressor.target(HIDDEN_STE), torch.tensor(expected, dtype=torch.float64)
    )


def naive_attention(
    states: list[Vector], length: int, compressor: QueryCompressor
) -> list[list[Vector]]:
    """A^h of one segment by head, slot and token, as the appendix writes it.

    Only the first ceil(length / C) queries compete for a segment of that length.
    """
    slots, d_dec = -(-length // compressor.compression), compressor.queries.shape[1]
    dim = d_dec // compressor.heads
    queries = [
        linear(norm(row, compressor.norm_query), compressor.w_query)
        for row in compressor.queries.tolist()
    ]
    keys = [linear(norm(row, compressor.norm_state), compressor.w_key) for row in states]
    attention = []
    for head in range(compressor.heads):
        part = slice(head * dim, (head + 1) * dim)
        initial = []
        for i in range(slots):
            weights = [
                math.exp(dot(queries[i][part], keys[t][part]) / math.sqrt(dim))
                for t in range(length)
            ]
            initial.append([weight / sum(weights) for weight in weights])
        attention.append(
            [
                [
                    initial[i][t] / (sum(initial[j][t] for j in range(slots)) + 1e-6)
                    for t in range(length)
                ]
                for i in range(slots)
            ]
        )
    return attention


def naive_query_slots(
    states: list[Vector], length: int, compressor: QueryCompressor
) -> list[Vector]:
    dim = compressor.queries.shape[1] // compressor.heads
    values = [linear(norm(row, compressor.norm_state), compressor.w_value) for row in states]
    attention = naive_attention(states, length, compressor)
    memory = []
    for i, query in enumerate(compressor.queries.tolist()):
        if i >= -(-length // compressor.compression):
            memory.append([0.0] * len(query))
            continue
        mixed = []
        for head in range(compressor.heads):
            for d in range(head * dim, (head + 1) * dim):
                mixed.append(sum(attention[head][i][t] * values[t][d] for t in range(length)))
        memory.append([q + z for q, z in zip(query, mixed, strict=True)])
    return memory


@pytest.fixture
def query_compressor() -> QueryCompressor:
    compressor = randomised(QueryCompressor(4, 6, 2, slots=4, heads=2))
    assert isinstance(compressor, QueryCompressor)
    return compressor


def test_query_slots_are_queries_plus_concatenated_heads(query_compressor: QueryCompressor) -> None:
    expected = [
        naive_query_slots(states, length, query_compressor)
        for states, length in zip(HIDDEN_STE.tolist(), LENGTHS, strict=True)
    ]
    torch.testing.assert_close(
        query_compressor(HIDDEN_STE, MASK_ST), torch.tensor(expected, dtype=torch.float64)
    )


def test_query_attention_competes_for_tokens(query_compressor: QueryCompressor) -> None:
    attention_ShMT = query_compressor.attention(HIDDEN_STE, MASK_ST)
    for s, length in enumerate(LENGTHS):
        expected = naive_attention(HIDDEN_STE[s].tolist(), length, query_compressor)
        used = len(expected[0])
        torch.testing.assert_close(
            attention_ShMT[s, :, :used, :length], torch.tensor(expected, dtype=torch.float64)
        )
        assert attention_ShMT[s, :, :, length:].eq(0).all()
        assert attention_ShMT[s, :, used:].eq(0).all()
    mass_ShT = attention_ShMT.sum(2)
    torch.testing.assert_close(
        mass_ShT[MASK_ST[:, None].expand_as(mass_ShT)],
        torch.ones(sum(LENGTHS) * 2).double(),
        atol=1e-2,
        rtol=0,
    )


def test_the_query_target_is_the_value_of_each_state(query_compressor: QueryCompressor) -> None:
    expected = [
        [
            linear(norm(state, query_compressor.norm_state), query_compressor.w_value)
            for state in states
        ]
        for states in HIDDEN_STE.tolist()
    ]
    torch.testing.assert_close(
        query_compressor.target(HIDDEN_STE), torch.tensor(expected, dtype=torch.float64)
    )


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
