from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from sedem.backbone.decoder import Backbone
from sedem.config import SedemConfig
from sedem.method.compressor import (
    LayerMixture,
    PoolingCompressor,
    QueryCompressor,
    build_compressor,
    encode,
    pool,
    slot_tokens,
    state_mask,
)

IDS_ST = torch.randint(2, 258, (3, 10), generator=torch.Generator().manual_seed(0))


def test_states_come_in_the_order_of_the_requested_layers(backbone: Backbone) -> None:
    mixed = encode(backbone, IDS_ST, [3, 1, 3])
    assert mixed.shape == (3, 3, 10, backbone.width)
    for place, layer in enumerate([3, 1, 3]):
        torch.testing.assert_close(mixed[place], encode(backbone, IDS_ST, [layer])[0])


def test_deeper_layers_are_not_run(backbone: Backbone) -> None:
    run: list[int] = []
    for index, layer in enumerate(backbone.model.get_decoder().layers):
        layer.register_forward_hook(lambda *_, index=index: run.append(index))
    encode(backbone, IDS_ST, [1, 3])
    assert run == [0, 1, 2]


def test_encoding_is_not_differentiated(backbone: Backbone) -> None:
    backbone.requires_grad_(True)
    assert not encode(backbone, IDS_ST, [2]).requires_grad


def test_reading_has_no_mask_so_that_a_gpu_takes_flash_attention(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, attention = [], functional.scaled_dot_product_attention

    def attending(*tensors: Tensor, **settings: Any) -> Tensor:
        given.append((settings.get("attn_mask"), settings["is_causal"]))
        return attention(*tensors, **settings)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attending)
    encode(backbone, IDS_ST, [3])
    assert given == [(None, True)] * 3


@pytest.mark.parametrize(
    ("learned", "logits"), [(False, [0.0] * 3), (True, [0.3, -1.0, 2.0]), (True, [0.0])]
)
def test_a_mixture_is_the_mean_or_weighs_layers_by_a_softmax(
    learned: bool, logits: list[float]
) -> None:
    states_XSTE = torch.randn(len(logits), 2, 2, 4)
    mixture = LayerMixture(len(logits), learned=learned)
    torch.testing.assert_close(mixture(states_XSTE), states_XSTE.mean(0))
    has_weights = learned and len(logits) > 1
    assert bool(list(mixture.parameters())) == has_weights
    if has_weights:
        assert mixture.logits is not None
        mixture.logits.data = torch.tensor(logits)
        assert mixture.weights().tolist() == pytest.approx(torch.tensor(logits).softmax(0).tolist())
        mixture(states_XSTE).sum().backward()
        assert mixture.logits.grad is not None and mixture.logits.grad.ne(0).any()
    weights = torch.tensor(logits).exp() / torch.tensor(logits).exp().sum()
    expected = sum(w * states_STE for w, states_STE in zip(weights, states_XSTE, strict=True))
    torch.testing.assert_close(mixture(states_XSTE), expected)


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
