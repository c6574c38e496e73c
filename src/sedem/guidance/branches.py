"""Several continuations of one answer, read in one pass. Not in the paper.

Each branch sees memory, question and the answer so far, and itself, as if it were decoded alone.
Nothing is stored, so the answer can go on in another way.

Letters: S branches, L tokens of each, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sedem.backbone.decoder import Backbone
from sedem.method.injection import Stream


def branch_columns(ids_SL: Tensor, next_position: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions and the branches `[1, S * L]` of the columns of one row.

    Args:
        next_position: position of the row's next token `[1]`.
    """
    branches, length = ids_SL.shape
    ahead_SL = torch.arange(length, device=ids_SL.device).expand(branches, -1)
    branch_S = -2 - torch.arange(branches, device=ids_SL.device)
    return (next_position + ahead_SL).reshape(1, -1), branch_S.repeat_interleave(length)[None]


def run_branches(backbone: Backbone, inject_layer: int, ids_SL: Tensor, stream: Stream) -> Tensor:
    """Run the branches of one row through all layers.

    Args:
        ids_SL: tokens, padded on the right, where causal attention hides the padding.
        stream: the state of the row; its cache grows by the branches.

    Returns:
        States after the last layer `[S, L, D]`.
    """
    position_1P, branch_1P = branch_columns(ids_SL, stream.next_position)
    valid_1P = torch.ones_like(position_1P, dtype=torch.bool)
    hidden_1PD = backbone.embed(ids_SL.reshape(1, -1))
    depths = (0, inject_layer), (inject_layer, backbone.depth)
    for depth, axis in zip(depths, (stream.lower, stream.upper), strict=True):
        axis = axis.extended(position_1P, valid_1P, branch_1P)
        hidden_1PD = backbone.run(
            hidden_1PD, *depth, position_1P, valid_1P, axis, stream.cache, branch_1P
        )
    return hidden_1PD[0].unflatten(0, ids_SL.shape)
