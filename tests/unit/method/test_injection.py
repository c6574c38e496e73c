from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from sedem.backbone.decoder import Backbone
from sedem.config import StartPlacement
from sedem.method.injection import Prefilled, positions, prefill, step

PLACEMENTS: tuple[StartPlacement, ...] = ("front", "between")
INJECT = 2


def naive_positions(
    valid: list[bool], restored_valid: list[bool], placement: str
) -> tuple[list[int], list[int]]:
    """Positions of one row, counted in the order in which the decoder reads."""
    prefix, memory = [0] * len(valid), [0] * len(restored_valid)
    real = [("prefix", at) for at, ok in enumerate(valid) if ok]
    states = [("memory", at) for at, ok in enumerate(restored_valid) if ok]
    order = real[:1] + states + real[1:] if placement == "front" else states + real
    for position, (kind, at) in enumerate(order):
        (prefix if kind == "prefix" else memory)[at] = position
    return prefix, memory


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 6), st.lists(st.booleans(), min_size=4, max_size=4)),
        min_size=1,
        max_size=3,
    ),
    placement=st.sampled_from(PLACEMENTS),
)
def test_positions_count_real_tokens_and_states_in_reading_order(
    rows: list[tuple[int, list[bool]]], placement: StartPlacement
) -> None:
    valid = [[at >= 6 - length for at in range(6)] for length, _ in rows]
    restored_valid = [states for _, states in rows]
    prefix_BP, restored_BU = positions(torch.tensor(valid), torch.tensor(restored_valid), placement)
    for b in range(len(rows)):
        expected = naive_positions(valid[b], restored_valid[b], placement)
        assert (prefix_BP[b].tolist(), restored_BU[b].tolist()) == expected


def test_front_is_start_memory_question_and_between_is_memory_start_question() -> None:
    valid_1P, restored_1U = torch.ones(1, 3, dtype=torch.bool), torch.ones(1, 2, dtype=torch.bool)
    front, between = (positions(valid_1P, restored_1U, placement) for placement in PLACEMENTS)
    assert [p.tolist() for p in front] == [[[0, 3, 4]], [[1, 2]]]
    assert [p.tolist() for p in between] == [[[2, 3, 4]], [[0, 1]]]


def fill(
    backbone: Backbone,
    placement: StartPlacement,
    prefix: int = 4,
    count: int = 3,
    cache: DynamicCache | None = None,
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
        placement=placement,
        cache=cache,
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("count", [0, 3])
def test_layers_of_one_cache_differ_in_length(
    backbone: Backbone, placement: StartPlacement, count: int
) -> None:
    filled = fill(backbone, placement, count=count, cache=DynamicCache())
    assert filled.stream is not None
    assert filled.prefix.shape == (1, 4, backbone.width)
    assert filled.restored.shape == (1, count, backbone.width)
    lengths = [filled.stream.cache.get_seq_length(layer) for layer in range(backbone.depth)]
    assert lengths == [4, 4, 4 + count, 4 + count]
    assert filled.stream.next_position.tolist() == [4 + count]
    step(backbone, INJECT, torch.tensor([7]), filled.stream)
    lengths = [filled.stream.cache.get_seq_length(layer) for layer in range(backbone.depth)]
    assert lengths == [5, 5, 5 + count, 5 + count]
    assert filled.stream.next_position.tolist() == [5 + count]
    for axis, columns in ((filled.stream.lower, 5), (filled.stream.upper, 5 + count)):
        assert axis.positions.shape == axis.valid.shape == (1, columns)
        assert axis.positions[0, -1] == 4 + count


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_first_token_after_a_start_token_alone_comes_after_the_memory(
    backbone: Backbone, placement: StartPlacement
) -> None:
    filled = fill(backbone, placement, prefix=1, cache=DynamicCache())
    assert filled.stream is not None
    assert filled.stream.next_position.tolist() == [4]
    state_1D = step(backbone, INJECT, torch.tensor([40]), filled.stream)
    longer = fill(backbone, placement, prefix=2)
    torch.testing.assert_close(state_1D, longer.prefix[:, -1], rtol=1e-4, atol=1e-5)


def test_a_prefill_without_a_cache_has_no_stream(backbone: Backbone) -> None:
    assert fill(backbone, "front").stream is None


@pytest.mark.parametrize(("placement", "start_sees_memory"), [("front", False), ("between", True)])
def test_only_later_positions_see_the_memory(
    backbone: Backbone, placement: StartPlacement, start_sees_memory: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    one, other = torch.randn(2, 1, 3, backbone.width, generator=generator) * 3
    first = fill(backbone, placement, restored=one).prefix
    second = fill(backbone, placement, restored=other).prefix
    changed_P = (first != second).any(-1)[0].tolist()
    assert changed_P == [start_sees_memory, True, True, True]


def test_the_order_of_the_restored_states_matters(backbone: Backbone) -> None:
    restored = torch.randn(1, 3, backbone.width, generator=torch.Generator().manual_seed(2)) * 3
    turned = fill(backbone, "front", restored=restored.flip(1)).prefix[:, -1]
    assert not torch.allclose(fill(backbone, "front", restored=restored).prefix[:, -1], turned)


def test_gradients_reach_the_restored_states_and_not_the_backbone(backbone: Backbone) -> None:
    restored = torch.randn(1, 3, backbone.width).requires_grad_()
    backbone.logits(fill(backbone, "front", restored=restored).prefix).sum().backward()
    assert restored.grad is not None
    assert restored.grad.ne(0).any(-1).all()
    assert all(parameter.grad is None for parameter in backbone.parameters())


def test_restored_states_are_cast_to_the_type_of_the_backbone(backbone: Backbone) -> None:
    restored = torch.randn(1, 3, backbone.width)
    backbone.model.bfloat16()
    assert fill(backbone, "front", restored=restored).prefix.dtype == torch.bfloat16
