"""Who sees whom, and what guidance adds, written out for every pair of positions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sedem.backbone.decoder import Backbone
from sedem.config import BlockContext
from sedem.method.injection import Blocks, positions, prefill

CONTEXTS: tuple[BlockContext, ...] = ("joint", "separate", "independent")
INJECT = 2


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
        blocks=Blocks(number_BU, context, bias_BU),
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
    prefix_BP, memory_BU = positions(valid_BP, valid_BU, "front", number_BU)
    assert memory_BU.tolist() == [[1, 2, 0, 1, 2, 3], [1, 0, 0, 1, 0, 0]]
    assert prefix_BP.tolist() == [[0, 4, 5], [0, 2, 3]]
