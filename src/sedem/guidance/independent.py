"""Independent blocks: keys and values of a block are computed once, from the block alone. Ours.

A restored state sees only the start token and its own block, and the positions of every block start
at 1. What the upper layers compute for a block then depends neither on the question nor on other
blocks. It can be kept, and the order of blocks does not matter. The result equals that of
`injection.prefill` with context "independent".

Letters: B batch, N blocks, U restored states, L layers above the injection layer, G key heads, H
head width, P prefix positions, D width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sedem.backbone.decoder import Backbone
from sedem.backbone.masks import KeyAxis
from sedem.method.injection import Prefilled, Stream

if TYPE_CHECKING:
    from transformers import DynamicCache

KeysValues = list[tuple[Tensor, Tensor]]
"""Keys and values `[N, G, U, H]` of each layer above the injection layer."""


def start_state(backbone: Backbone, inject_layer: int) -> Tensor:
    """State of the start token at the injection layer `[1, 1, D]`; it is constant."""
    ids_11 = torch.full((1, 1), backbone.bos_token_id, device=backbone.device)
    return backbone.run(backbone.embed(ids_11), 0, inject_layer, torch.zeros_like(ids_11))


def keys_values(backbone: Backbone, inject_layer: int, restored_NUD: Tensor) -> KeysValues:
    """Keys and values of blocks in the layers above the injection layer.

    Args:
        restored_NUD: restored states, one block per row, padded on the right; attention is causal,
            so padding does not affect the states before it.

    Returns:
        Keys, rotated to positions from 1, and values, without the start token's.
    """
    count, length = restored_NUD.shape[:2]
    start_11D = start_state(backbone, inject_layer)
    hidden_NLD = torch.cat(
        [start_11D.expand(count, -1, -1), restored_NUD.to(start_11D.dtype)], dim=1
    )
    positions_NL = torch.arange(length + 1, device=hidden_NLD.device).expand(count, -1)
    from transformers import DynamicCache

    cache = DynamicCache()
    backbone.run(hidden_NLD, inject_layer, backbone.depth, positions_NL, cache=cache)
    layers = cache.layers[inject_layer:]
    return [(layer.keys[:, :, 1:], layer.values[:, :, 1:]) for layer in layers]


def read_prefix(backbone: Backbone, inject_layer: int, ids_P: Tensor, longest: int) -> Tensor:
    """States of a prefix at the injection layer `[P, D]`, before its blocks are known.

    Args:
        longest: number of states for which its positions leave room.
    """
    ids_1P = ids_P[None].to(backbone.device)
    valid_1P = torch.ones_like(ids_1P, dtype=torch.bool)
    positions_1P = prefix_positions(valid_1P, torch.full_like(ids_1P[:, :1], longest))
    return backbone.run(backbone.embed(ids_1P), 0, inject_layer, positions_1P)[0]


def prefix_positions(valid_BP: Tensor, longest_B1: Tensor) -> Tensor:
    """Positions of a prefix: the start token is at 0, the question after the longest block.

    Args:
        valid_BP: False where a prefix token is padding; padding is on the left.
        longest_B1: number of states of the longest block.

    Returns:
        `[B, P]`; 0 at padding.
    """
    prefix_BP = valid_BP.long().cumsum(1) - 1
    return (prefix_BP + longest_B1 * (prefix_BP > 0)) * valid_BP


def prefill(
    backbone: Backbone,
    inject_layer: int,
    ids_BP: Tensor,
    valid_BP: Tensor,
    memory: KeysValues,
    positions_BU: Tensor,
    memory_valid_BU: Tensor,
    bias_BU: Tensor | None = None,
    cache: DynamicCache | None = None,
    longest: int | None = None,
) -> Prefilled:
    """Run a prefix through all layers; the upper ones also attend to the blocks.

    Args:
        inject_layer: l_inject, the number of layers that see only the prefix.
        ids_BP: start token, question and, in training, answer; padded on the left.
        valid_BP: False where a token is padding.
        memory: keys and values `[B, G, U, H]` of the blocks of each row, side by side.
        positions_BU: position of each state within its block, from 1.
        memory_valid_BU: False where a state is padding, which may be anywhere.
        bias_BU: added to the attention logits on each state.
        cache: an empty cache for later calls of `injection.step`; None if there are none.
        longest: number of states for which positions of the prefix leave room, if there is any
            memory; None means those of the longest block.

    Returns:
        States of the prefix; `restored` is empty, because those states are not computed.
    """
    from transformers import DynamicCache

    longest_B1 = (positions_BU * memory_valid_BU).amax(1, keepdim=True)
    if longest is not None:
        longest_B1 = longest * (longest_B1 > 0)
    prefix_BP = prefix_positions(valid_BP, longest_B1)
    padded = not (bool(valid_BP.all()) and bool(memory_valid_BU.all()))
    span = ids_BP.shape[1] + positions_BU.shape[1]
    continued = cache is not None
    # Not `cache or`: an empty cache is falsy.
    cache = DynamicCache() if cache is None else cache
    lower = KeyAxis(prefix_BP, valid_BP, padded, span)
    hidden_BPD = backbone.run(
        backbone.embed(ids_BP), 0, inject_layer, prefix_BP, valid_BP, lower, cache
    )
    for layer, (key, value) in enumerate(memory, start=inject_layer):
        cache.update(key, value, layer)
    bias_BL = None
    if bias_BU is not None:
        bias_BL = torch.cat([bias_BU, torch.zeros_like(prefix_BP).to(bias_BU)], dim=1)
    upper = KeyAxis(
        torch.cat([positions_BU, prefix_BP], dim=1),
        torch.cat([memory_valid_BU, valid_BP], dim=1),
        padded,
        span,
        bias=bias_BL,
    )
    hidden_BPD = backbone.run(
        hidden_BPD, inject_layer, backbone.depth, prefix_BP, valid_BP, upper, cache
    )
    next_B = torch.maximum(prefix_BP[:, -1], longest_B1[:, 0]) + 1
    nothing_B0D = hidden_BPD.new_zeros(len(hidden_BPD), 0, hidden_BPD.shape[2])
    stream = Stream(cache, lower, upper, next_B) if continued else None
    return Prefilled(hidden_BPD, nothing_B0D, stream)
