"""From selected blocks to the states of question and answer: decompress, guide, inject (3.3).

Training and the reference engine use this module; fast engines do the same in static buffers.

Letters: B batch, K selected blocks, J slots per block, U restored states, P prefix positions, G key
heads, H head width, D decoder width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sedem.guidance import independent
from sedem.method.injection import Blocks, Prefilled, prefill
from sedem.method.pooling import state_mask
from sedem.modules import SedemModules

if TYPE_CHECKING:
    from transformers import DynamicCache


def condition(
    model: SedemModules,
    ids_BP: Tensor,
    valid_BP: Tensor,
    memory_BKJD: Tensor,
    slot_tokens_BKJ: Tensor,
    scores_BK: Tensor,
    cache: DynamicCache | None = None,
) -> Prefilled:
    """Run prefixes on selected blocks, as the model's configuration specifies.

    Args:
        ids_BP: start token, question and, in training, answer; padded on the left.
        valid_BP: False where a token is padding.
        memory_BKJD: memory of the selected blocks, in the order in which the decoder sees them.
        slot_tokens_BKJ: real tokens behind each slot; 0 for all slots where there is no block.
        scores_BK: s_n of the blocks; -inf where there is no block.
        cache: an empty cache to continue decoding from; None if nothing follows.
    """
    config, decompressor = model.config, model.decompressor
    restored_BKUD = decompressor(memory_BKJD)
    real_BKU = state_mask(slot_tokens_BKJ, decompressor.states_per_slot)
    bias_BK = None if model.guidance is None else model.guidance(scores_BK)
    if config.block_context == "independent" and real_BKU.any():
        return _independent(model, ids_BP, valid_BP, restored_BKUD, real_BKU, bias_BK, cache)
    number_K = torch.arange(real_BKU.shape[1], device=real_BKU.device)
    states = real_BKU.shape[2]
    number_BU = number_K.repeat_interleave(states).expand(len(real_BKU), -1)
    bias_BU = None if bias_BK is None else bias_BK.repeat_interleave(states, dim=1)
    return prefill(
        model.decoder,
        config.inject_layer,
        ids_BP,
        valid_BP,
        restored_BKUD.flatten(1, 2),
        real_BKU.flatten(1),
        blocks=Blocks(number_BU, config.block_context, bias_BU),
        cache=cache,
    )


def real_first(restored_NUD: Tensor, real_NU: Tensor) -> tuple[Tensor, Tensor]:
    """Move the states of real tokens to the front of each block, and cut the common padding.

    Args:
        real_NU: False where a state stands for padding.

    Returns:
        States `[N, U, D]` and the mask of the real ones, for the longest block's U.
    """
    longest = int(real_NU.sum(1).max())
    order_NU = real_NU.long().argsort(dim=1, descending=True, stable=True)[:, :longest]
    rows_N1 = torch.arange(len(real_NU), device=real_NU.device)[:, None]
    return restored_NUD[rows_N1, order_NU], real_NU[rows_N1, order_NU]


def _independent(
    model: SedemModules,
    ids_BP: Tensor,
    valid_BP: Tensor,
    restored_BKUD: Tensor,
    real_BKU: Tensor,
    bias_BK: Tensor | None,
    cache: DynamicCache | None,
) -> Prefilled:
    """The two passes of `independent`: over each block alone, then over the prefixes."""
    batch, blocks = real_BKU.shape[:2]
    restored_NUD, real_NU = real_first(restored_BKUD.flatten(0, 1), real_BKU.flatten(0, 1))
    inject_layer = model.config.inject_layer

    def side_by_side(tensor_NGUH: Tensor) -> Tensor:
        return tensor_NGUH.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)

    memory = [
        (side_by_side(key), side_by_side(value))
        for key, value in independent.keys_values(model.decoder, inject_layer, restored_NUD)
    ]
    positions_U = torch.arange(1, real_NU.shape[1] + 1, device=real_NU.device)
    return independent.prefill(
        model.decoder,
        inject_layer,
        ids_BP,
        valid_BP,
        memory,
        positions_U.repeat(blocks).expand(batch, -1),
        real_NU.view(batch, -1),
        None if bias_BK is None else bias_BK.repeat_interleave(real_NU.shape[1], dim=1),
        cache,
    )
