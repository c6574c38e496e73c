"""Several continuations of one answer, read in one pass. Not in the paper.

Each branch sees memory, question and the answer so far, and itself, as if it were decoded alone.
Nothing is stored, so the answer can go on in another way.

Letters: S branches, L tokens of each, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sedem.method.encoder import LayerRunner
from sedem.method.injection import Cache, LayerColumns


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
