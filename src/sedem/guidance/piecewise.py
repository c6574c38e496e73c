"""Exact attention over keys in pieces: attend to each piece alone, then join the results.

Softmax over all keys is a weighted mean of softmaxes over parts of them. The weight of a part is
the sum of its exponentials; each piece returns the logarithm of that sum. One piece bounds the
memory, for any number of keys. Ours, for independent blocks; the arithmetic is that of flash
attention, all in float32.

Letters: B rows, F query heads, G key heads, R query heads per key head, P positions, C columns per
piece, H head width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def attend_piece(
    query_BFPH: Tensor, key: Tensor, value: Tensor, added_BPC: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend to one piece.

    Args:
        key: keys of each row `[B, G, C, H]`, or keys shared by all rows `[G, C, H]`.
        value: values, of the same shape.
        added_BPC: added to the logits; -inf hides a column.

    Returns:
        The mean of the values under the softmax over this piece `[B, F, P, H]`, zero where every
        column is hidden, and the logarithm of the sum of exponentials `[B, F, P]`.
    """
    columns = "bgch" if key.dim() == 4 else "gch"
    groups = query_BFPH.shape[1] // key.shape[-3]
    query_BGRPH = query_BFPH.float().unflatten(1, (-1, groups)) * query_BFPH.shape[-1] ** -0.5
    logits = torch.einsum(f"bgrph,{columns}->bgrpc", query_BGRPH, key.float())
    if added_BPC is not None:
        logits = logits + added_BPC[:, None, None]
    # Finite where every column is hidden, because inf - inf is NaN.
    top = logits.amax(-1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)
    weights = (logits - top).exp_()
    total = weights.sum(-1)
    mixed = torch.einsum(f"bgrpc,{columns}->bgrph", weights, value.float())
    mixed = mixed / total.clamp_min(torch.finfo(total.dtype).tiny)[..., None]
    return mixed.flatten(1, 2), (top[..., 0] + total.log()).flatten(1, 2)


def join(mixed: Sequence[Tensor], log_sums: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Join the results of several pieces.

    Args:
        mixed: means of values `[B, F, P, H]`, one tensor for each piece.
        log_sums: their logarithms of sums `[B, F, P]`.

    Returns:
        The same two tensors for the joined piece.
    """
    parts = torch.stack(list(log_sums))
    joined = parts.logsumexp(0)
    weights = (parts - joined.clamp_min(torch.finfo(joined.dtype).min)).exp()
    return (torch.stack(list(mixed)) * weights[..., None]).sum(0), joined
