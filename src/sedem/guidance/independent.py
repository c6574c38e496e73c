"""Passes that see nothing of each other: blocks, prefixes and branches of an answer. Ours.

Independent blocks: a restored state sees only the start token and its own block, and the positions
of every block start at 1. What the upper layers compute for a block then depends neither on the
question nor on other blocks. It can be kept, and the order of blocks does not matter.
`injection.prefill` with these keys and values equals one with the states themselves and context
"independent".

Branches: several continuations of one answer, read in one pass. Each sees memory, question and the
answer so far, and itself, as if it were decoded alone. Nothing is stored, so the answer can go on
in another way.

Letters: N blocks, U restored states, G key heads, H head width, P prefix positions, D width, S
branches, L tokens of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sedem.backbone.decoder import KeyAxis, KeyValues
from sedem.method.encoder import LayerRunner
from sedem.method.injection import Cache, GrowingColumns, LayerColumns, prefix_positions

KeysValues = list[tuple[Tensor, Tensor]]
"""Keys and values `[N, G, U, H]` of each layer above the injection layer."""


def start_state(decoder: LayerRunner, inject_layer: int) -> Tensor:
    """State of the start token at the injection layer `[1, 1, D]`; it is constant."""
    ids_11 = torch.full((1, 1), decoder.bos_token_id, device=decoder.device)
    return decoder.run(decoder.embed(ids_11), 0, inject_layer, torch.zeros_like(ids_11))


def keys_values(
    decoder: LayerRunner, inject_layer: int, restored_NUD: Tensor, start_11D: Tensor | None = None
) -> KeysValues:
    """Keys and values of blocks in the layers above the injection layer.

    Args:
        restored_NUD: restored states, one block per row, padded on the right; attention is causal,
            so padding does not affect the states before it.
        start_11D: the `start_state`, if it is known.

    Returns:
        Keys, rotated to positions from 1, and values, without the start token's.
    """
    count, length = restored_NUD.shape[:2]
    if start_11D is None:
        start_11D = start_state(decoder, inject_layer)
    start_N1D = start_11D.expand(count, -1, -1)
    hidden_NLD = torch.cat([start_N1D, restored_NUD.to(start_11D.dtype)], dim=1)
    positions_NL = torch.arange(length + 1, device=hidden_NLD.device).expand(count, -1)
    cache, nothing_N0 = GrowingColumns(), positions_NL[:, :0]
    decoder.run(
        *(hidden_NLD, inject_layer, decoder.depth, positions_NL), cache=cache, only_BQ=nothing_N0
    )
    return [(key[:, :, 1:], value[:, :, 1:]) for key, value in cache.stored.values()]


def real_first(
    restored_NUD: Tensor, real_NU: Tensor, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Move the states of real tokens to the front of each block, and cut the common padding.

    Args:
        length: number of states to keep; None means those of the longest block.

    Returns:
        States `[N, U, D]` and the mask of the real ones.
    """
    length = int(real_NU.sum(1).max()) if length is None else length
    order_NU = real_NU.long().argsort(dim=1, descending=True, stable=True)[:, :length]
    rows_N1 = torch.arange(len(real_NU), device=real_NU.device)[:, None]
    return restored_NUD[rows_N1, order_NU], real_NU[rows_N1, order_NU]


def read_prefix(
    decoder: LayerRunner,
    inject_layer: int,
    ids_P: Tensor,
    room: int,
    cache: KeyValues | None = None,
) -> Tensor:
    """States of a prefix at the injection layer `[P, D]`, before its blocks are known.

    Args:
        room: number of states for which its positions leave room.
        cache: takes the keys and values of the layers below injection.
    """
    ids_1P = ids_P[None].to(decoder.device)
    valid_1P = torch.ones_like(ids_1P, dtype=torch.bool)
    positions_1P = prefix_positions(valid_1P, torch.full_like(ids_1P[:, :1], room))
    axis = KeyAxis(positions_1P, valid_1P, padded=False, span=len(ids_P) + room)
    embedded_1PD = decoder.embed(ids_1P)
    return decoder.run(embedded_1PD, 0, inject_layer, positions_1P, valid_1P, axis, cache)[0]


class Beside:
    """The columns of one row, and new ones after them that are not stored."""

    def __init__(self, columns: LayerColumns, row: int) -> None:
        self.columns, self.row = columns, slice(row, row + 1)

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the row, followed by new ones."""
        keys, values = self.columns.of(layer)
        return torch.cat([keys[self.row], key], 2), torch.cat([values[self.row], value], 2)


def run_branches(
    decoder: LayerRunner, inject_layer: int, ids_SL: Tensor, cache: Cache, row: int
) -> Tensor:
    """Run the branches of one row through all layers.

    Args:
        ids_SL: tokens, padded on the right, where causal attention hides the padding.
        cache: holds what the row has seen; it does not change.

    Returns:
        States after the last layer `[S, L, D]`.
    """
    branches, length = ids_SL.shape
    ahead_L = torch.arange(length, device=ids_SL.device)
    position_1P = (cache.next_position[row] + ahead_L).repeat(branches)[None]
    # The number of each branch tells its columns from those of the others; see `KeyAxis.block`.
    branch_S = -2 - torch.arange(branches, device=ids_SL.device)
    branch_1P = branch_S.repeat_interleave(length)[None]
    valid_1P = torch.ones_like(position_1P, dtype=torch.bool)
    hidden_1PD = decoder.embed(ids_SL.reshape(1, -1))
    depths = (0, inject_layer), (inject_layer, decoder.depth)
    for depth, columns in zip(depths, (cache.lower, cache.upper), strict=True):
        axis = columns.axis.row(row).extended(position_1P, valid_1P, branch_1P)
        beside = Beside(columns, row)
        hidden_1PD = decoder.run(hidden_1PD, *depth, position_1P, valid_1P, axis, beside, branch_1P)
    return hidden_1PD[0].unflatten(0, ids_SL.shape)
