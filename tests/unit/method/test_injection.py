from __future__ import annotations

import math

import pytest
import torch
from answers import build
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sedem import SeDeM, SedemConfig
from sedem.backbone.decoder import Backbone
from sedem.config import BlockContext
from sedem.engine.eager import condition
from sedem.method.compressor import state_mask
from sedem.method.injection import (
    Decompressor,
    GrowingCache,
    IdentityDecompressor,
    Prefilled,
    RestoredBlocks,
    build_decompressor,
    positions,
    prefill,
    step,
)


@pytest.fixture
def decompressor() -> Decompressor:
    torch.manual_seed(5)
    module = Decompressor(d_dec=4, compression=3, hidden=6).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
        module.spread.copy_(torch.rand(4) + 0.5)
    return module


def naive_states(slot_D: Tensor, module: Decompressor) -> Tensor:
    """The C states of one slot, by the equations of section 3.3."""
    norm = module.norm
    normed_D = (slot_D - slot_D.mean()) / (slot_D.var(correction=0) + norm.eps).sqrt()
    value_H = (normed_D * norm.weight + norm.bias) @ module.w_1.weight.T + module.w_1.bias
    active_H = 0.5 * value_H * (1 + torch.erf(value_H / math.sqrt(2)))
    states_CD = (active_H @ module.w_2.weight.T + module.w_2.bias).view(-1, len(slot_D))
    return states_CD * module.spread


def test_states_equal_the_mlp_and_stand_in_the_order_of_their_slots(
    decompressor: Decompressor,
) -> None:
    memory_KJD = torch.randn(2, 3, 4).double()
    expected = [torch.cat([naive_states(slot, decompressor) for slot in b]) for b in memory_KJD]
    torch.testing.assert_close(decompressor(memory_KJD), torch.stack(expected))


def test_calibrate_starts_at_the_mean_and_scale_of_the_sample(decompressor: Decompressor) -> None:
    states_PD = torch.randn(50, 4) * torch.tensor([100.0, 3.0, 0.5, 20.0]) + torch.arange(4.0)
    before_JCD = decompressor(torch.ones(1, 4).double()) / decompressor.spread
    bias_CD = decompressor.w_2.bias.clone().view(3, 4)
    decompressor.calibrate(states_PD)
    spread_D, mean_D = states_PD.double().std(0), states_PD.double().mean(0)
    torch.testing.assert_close(decompressor.spread, spread_D, rtol=1e-5, atol=0)
    # The old output in units of the spread, moved to the sample's mean.
    expected = (before_JCD - bias_CD) * spread_D + mean_D
    found = decompressor(torch.ones(1, 4).double())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_calibrate_survives_a_dimension_that_never_varies(decompressor: Decompressor) -> None:
    states_PD = torch.randn(20, 4)
    states_PD[:, 2] = 7.0
    decompressor.calibrate(states_PD)
    restored = decompressor(torch.randn(2, 4).double())
    assert restored.isfinite().all()
    torch.testing.assert_close(restored[:, 2], torch.full((6,), 7.0).double(), rtol=1e-4, atol=1e-3)


def test_the_spread_is_saved_and_not_trained(decompressor: Decompressor) -> None:
    assert "spread" in decompressor.state_dict()
    assert "spread" not in dict(decompressor.named_parameters())


@pytest.mark.parametrize(("hidden", "expected"), [(None, 8), (12, 12)])
def test_the_hidden_width_is_that_of_the_decoder_by_default(
    hidden: int | None, expected: int
) -> None:
    config = SedemConfig(
        encoder="-", extract_layers=(1,), inject_layer=1, decompressor_hidden=hidden
    )
    module = build_decompressor(config, 8)
    assert module.w_1.weight.shape == (expected, 8)
    assert module.w_2.weight.shape == (4 * 8, expected)


def test_the_identity_returns_its_slots_whatever_it_was_calibrated_on() -> None:
    config = SedemConfig(
        encoder="-", extract_layers=(1,), inject_layer=1, compression=1, decompressor="identity"
    )
    module = build_decompressor(config, 8)
    assert isinstance(module, IdentityDecompressor)
    states_PD = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) * 300
    module.calibrate(states_PD)
    slots_JD = torch.randn(4, 8)
    assert torch.equal(module(slots_JD), slots_JD)
    torch.testing.assert_close(module.spread, states_PD.std(0))
    assert not list(module.parameters())


INJECT = 2


def naive_positions(valid: list[bool], restored_valid: list[bool]) -> tuple[list[int], list[int]]:
    """Positions of one row, counted in the order in which the decoder reads."""
    prefix, memory = [0] * len(valid), [0] * len(restored_valid)
    real = [("prefix", at) for at, ok in enumerate(valid) if ok]
    states = [("memory", at) for at, ok in enumerate(restored_valid) if ok]
    for position, (kind, at) in enumerate(real[:1] + states + real[1:]):
        (prefix if kind == "prefix" else memory)[at] = position
    return prefix, memory


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 6), st.lists(st.booleans(), min_size=4, max_size=4)),
        min_size=1,
        max_size=3,
    )
)
def test_positions_count_real_tokens_and_states_in_reading_order(
    rows: list[tuple[int, list[bool]]],
) -> None:
    valid = [[at >= 6 - length for at in range(6)] for length, _ in rows]
    restored_valid = [states for _, states in rows]
    prefix_BP, restored_BU = positions(torch.tensor(valid), torch.tensor(restored_valid))
    for b in range(len(rows)):
        expected = naive_positions(valid[b], restored_valid[b])
        assert (prefix_BP[b].tolist(), restored_BU[b].tolist()) == expected


def fill(
    backbone: Backbone,
    prefix: int = 4,
    count: int = 3,
    cache: GrowingCache | None = None,
    restored: Tensor | None = None,
) -> Prefilled:
    ids_1P = torch.tensor([[backbone.bos_token_id, *range(40, 39 + prefix)]])
    if restored is None:
        generator = torch.Generator().manual_seed(1)
        restored = torch.randn(1, count, backbone.width, generator=generator) * 3
    return prefill(
        backbone,
        INJECT,
        ids_1P,
        torch.ones_like(ids_1P, dtype=torch.bool),
        restored,
        torch.ones(restored.shape[:2], dtype=torch.bool),
        cache=cache,
    )


def lengths(cache: GrowingCache) -> list[int]:
    """How many columns each layer has."""
    found = {**cache.lower.stored, **cache.upper.stored}
    return [found[layer][0].shape[2] for layer in range(len(found))]


@pytest.mark.parametrize("count", [0, 3])
def test_layers_of_one_cache_differ_in_length(backbone: Backbone, count: int) -> None:
    cache = GrowingCache()
    filled = fill(backbone, count=count, cache=cache)
    assert filled.prefix.shape == (1, 4, backbone.width)
    assert filled.restored.shape == (1, count, backbone.width)
    assert lengths(cache) == [4, 4, 4 + count, 4 + count]
    assert cache.next_position.tolist() == [4 + count]
    step(backbone, INJECT, torch.tensor([7]), cache)
    assert lengths(cache) == [5, 5, 5 + count, 5 + count]
    assert cache.next_position.tolist() == [5 + count]
    for axis, columns in ((cache.lower.axis, 5), (cache.upper.axis, 5 + count)):
        assert axis.positions.shape == axis.valid.shape == (1, columns)
        assert axis.positions[0, -1] == 4 + count


def test_the_first_token_after_a_start_token_alone_comes_after_the_memory(
    backbone: Backbone,
) -> None:
    cache = GrowingCache()
    fill(backbone, prefix=1, cache=cache)
    assert cache.next_position.tolist() == [4]
    state_1D = step(backbone, INJECT, torch.tensor([40]), cache)
    longer = fill(backbone, prefix=2)
    torch.testing.assert_close(state_1D, longer.prefix[:, -1], rtol=1e-4, atol=1e-5)


def test_gradients_reach_the_restored_states_and_not_the_backbone(backbone: Backbone) -> None:
    restored = torch.randn(1, 3, backbone.width).requires_grad_()
    backbone.logits(fill(backbone, restored=restored).prefix).sum().backward()
    assert restored.grad is not None
    assert restored.grad.ne(0).any(-1).all()
    assert all(parameter.grad is None for parameter in backbone.parameters())


def test_restored_states_are_cast_to_the_type_of_the_backbone(backbone: Backbone) -> None:
    restored = torch.randn(1, 3, backbone.width)
    backbone.model.bfloat16()
    assert fill(backbone, restored=restored).prefix.dtype == torch.bfloat16


# Contexts of blocks: who sees whom, and what guidance adds, written out for every pair

CONTEXTS: tuple[BlockContext, ...] = ("joint", "separate", "independent")


def naive(
    backbone: Backbone,
    ids: list[int],
    blocks: list[Tensor],
    context: BlockContext,
    bias: list[float],
) -> Tensor:
    """States of one prefix after the last layer, with the mask of the upper layers by hand.

    Columns are the start token, the blocks one after the other, then question and answer.
    """
    sizes = [len(block) for block in blocks]
    owner = [-1, *[n for n, size in enumerate(sizes) for _ in range(size)], *[-1] * (len(ids) - 1)]
    within = [at for size in sizes for at in range(1, size + 1)]
    if context == "independent":
        after = max(sizes)
        at = [0, *within, *range(after + 1, after + len(ids))]
    else:
        at = list(range(len(owner)))
    mask = torch.full((len(owner), len(owner)), torch.finfo(torch.float32).min)
    for row in range(len(owner)):
        for column in range(row + 1):
            apart = context != "joint" and owner[row] >= 0 and owner[column] not in (-1, owner[row])
            if not apart:
                guided = owner[row] == -1 and owner[column] >= 0
                mask[row, column] = bias[owner[column]] if guided else 0.0
    text = [column for column, block in enumerate(owner) if block == -1]
    layers = backbone.model.get_decoder().layers
    positions_1P = torch.tensor([[at[column] for column in text]])
    hidden = backbone.run(backbone.embed(torch.tensor([ids])), 0, INJECT, positions_1P)
    hidden = torch.cat([hidden[:, :1], torch.cat(blocks)[None], hidden[:, 1:]], dim=1)
    positions_1L = torch.tensor([at])
    rope = backbone.model.get_decoder().rotary_emb(hidden, position_ids=positions_1L)
    for layer in layers[INJECT:]:
        hidden = layer(
            hidden,
            attention_mask=mask[None, None],
            position_ids=positions_1L,
            position_embeddings=rope,
        )
    return hidden[0, text]


@torch.no_grad()
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_prefill_is_attention_with_the_mask_written_out(
    backbone: Backbone, context: BlockContext
) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = [
        ([0, 40, 41, 42], [torch.randn(size, 32, generator=generator) for size in (3, 5)], [0, -2]),
        ([0, 50, 51], [torch.randn(size, 32, generator=generator) for size in (4, 1)], [-0.5, 0]),
    ]
    ids_BP = torch.tensor([[0, 40, 41, 42], [0, 0, 50, 51]])
    valid_BP = torch.tensor([[True] * 4, [False, True, True, True]])
    states_BUD = torch.zeros(2, 10, 32)
    number_BU = torch.tensor([0] * 5 + [1] * 5).expand(2, -1)
    valid_BU = torch.zeros(2, 10, dtype=torch.bool)
    for b, (_, blocks, _) in enumerate(rows):
        for n, block in enumerate(blocks):
            states_BUD[b, 5 * n : 5 * n + len(block)] = block
            valid_BU[b, 5 * n : 5 * n + len(block)] = True
    bias_BU = torch.tensor([bias for _, _, bias in rows]).float().gather(1, number_BU)
    filled = prefill(
        backbone,
        INJECT,
        ids_BP,
        valid_BP,
        states_BUD,
        valid_BU,
        blocks=RestoredBlocks(number_BU, context, bias_BU),
    )
    for b, (ids, blocks, bias) in enumerate(rows):
        expected = naive(backbone, ids, blocks, context, [float(value) for value in bias])
        torch.testing.assert_close(
            filled.prefix[b][valid_BP[b]], expected, rtol=1e-4, atol=1e-4, msg=f"row {b}"
        )


def test_blocks_apart_have_positions_from_one_on_and_the_question_follows_the_longest() -> None:
    valid_BU = torch.tensor([[True, True, False, True, True, True], [True, False, False] * 2])
    number_BU = torch.tensor([0, 0, 0, 1, 1, 1]).expand(2, -1)
    valid_BP = torch.ones(2, 3, dtype=torch.bool)
    prefix_BP, memory_BU = positions(valid_BP, valid_BU, RestoredBlocks(number_BU, "independent"))
    assert memory_BU.tolist() == [[1, 2, 0, 1, 2, 3], [1, 0, 0, 1, 0, 0]]
    assert prefix_BP.tolist() == [[0, 4, 5], [0, 2, 3]]


SLOT_TOKENS = torch.tensor(
    [
        # A whole block, one that ends inside a slot, and one with a gap after a short segment.
        [[4, 4, 4, 4], [4, 4, 3, 0], [4, 2, 4, 1]],
        [[4, 4, 1, 0], [4, 4, 4, 4], [0, 0, 0, 0]],
    ]
)
SCORES = torch.tensor([[3.0, 5.0, 4.5], [2.0, 1.0, -torch.inf]])


def prompts(backbone: Backbone) -> tuple[Tensor, Tensor]:
    ids_BP = torch.tensor(
        [[backbone.bos_token_id, 40, 41, 42, 43], [0, 0, backbone.bos_token_id, 50, 51]]
    )
    valid_BP = torch.tensor([[True] * 5, [False, False, True, True, True]])
    return ids_BP, valid_BP


def memory(model: SeDeM) -> Tensor:
    shape = (*SLOT_TOKENS.shape, model.decoder.width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def by_masks(model: SeDeM, cache: GrowingCache) -> Prefilled:
    restored = model.decompressor(memory(model)).flatten(1, 2)
    real_BKU = state_mask(SLOT_TOKENS, 4)
    number_BU = torch.arange(3).repeat_interleave(16).expand(2, -1)
    assert model.guidance is not None
    bias_BU = model.guidance(SCORES).repeat_interleave(16, dim=1)
    return prefill(
        model.decoder,
        2,
        *prompts(model.decoder),
        restored,
        real_BKU.flatten(1),
        blocks=RestoredBlocks(number_BU, model.config.block_context, bias_BU),
        cache=cache,
    )


def test_the_two_walks_give_what_one_mask_gives(config: SedemConfig, backbone: Backbone) -> None:
    model = build(config, backbone, block_context="independent", guidance=True)
    ids_BP, valid_BP = prompts(backbone)
    slow, fast = GrowingCache(), GrowingCache()
    expected = by_masks(model, slow)
    found = condition(model, ids_BP, valid_BP, memory(model), SLOT_TOKENS, SCORES, fast)
    torch.testing.assert_close(
        found.prefix[valid_BP], expected.prefix[valid_BP], rtol=1e-4, atol=1e-4
    )
    assert fast.next_position.tolist() == slow.next_position.tolist()
    for token in (60, 61):
        ids_B = torch.tensor([token, token + 5])
        states = [step(backbone, 2, ids_B, cache) for cache in (slow, fast)]
        torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)
