from __future__ import annotations

import torch
from answers import build
from torch import Tensor

from sedem import SeDeM, SedemConfig
from sedem.backbone.decoder import Backbone
from sedem.engine.eager import condition
from sedem.method.compressor import state_mask
from sedem.method.injection import GrowingCache, Prefilled, RestoredBlocks, prefill, step

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
