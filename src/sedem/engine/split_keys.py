"""Attention of a single position over a long cache, whose parts are attended to in parallel.

A GPU kernel gives every key head of a row to one processor, which walks all columns. With few rows,
most processors are idle. Parts of the columns are therefore run as if they were heads, and joined
by the logarithms of their sums of exponentials, which is exact.

Letters: B rows, F query heads, G key heads, R query heads per key head, S parts, C columns per
part, K = S * C columns, H head width.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sedem.engine.layers import Bias

PART = 256
"""C."""
LONG = 2048
"""Number of columns from which parts are worth the four small operations that join them."""
BUSY = 64
"""Key heads of all rows that keep a GPU busy without parts: about half of its processors."""
ALIGNED = 8
"""The kernel needs a head width that is a multiple of this."""


def pays(rows: int, columns: int, key_heads: int, width: int) -> bool:
    """Return whether a cache of some size is attended to in parts."""
    return columns >= LONG and rows * key_heads <= BUSY and width % ALIGNED == 0


def whole_parts(columns: int) -> int:
    """Round a number of columns up to whole parts."""
    return -(-columns // PART) * PART


def split_biases(biases: Mapping[int | None, Bias], key_heads: int) -> dict[int | None, Bias]:
    """Return biases `[B, 1, 1, K]` of one position as those of its parts `[B, G * S, 1, C]`."""
    return {window: _split(bias, key_heads) for window, bias in biases.items()}


def attend_in_parts(
    layer: int, query_BF1H: Tensor, key: Tensor, value: Tensor, bias: Bias
) -> Tensor:
    """Grouped-query attention of one position `[B, 1, F * H]`; see `layers.attend`.

    Args:
        layer: not used here.
        query_BF1H: queries.
        key: keys `[B, G, K, H]`.
        value: values, of the same shape.
        bias: from `split_biases`.
    """
    assert bias is not None
    rows, heads, _, width = query_BF1H.shape
    split = key.shape[1], key.shape[2] // PART
    query_BG1RH = query_BF1H.reshape(rows, split[0], 1, -1, width)
    query = query_BG1RH.expand(-1, -1, split[1], -1, -1).flatten(1, 2)
    key, value = (t.unflatten(2, (-1, PART)).flatten(1, 2) for t in (key, value))
    mixed, log_sums = _attend(query, key, value, bias.expand(-1, -1, query.shape[2], -1))
    weights_BGSR = log_sums.unflatten(1, split).softmax(2)
    mixed_BGRH = (mixed.unflatten(1, split) * weights_BGSR[..., None]).sum(2)
    return mixed_BGRH.to(query.dtype).reshape(rows, 1, heads * width)


def _split(bias: Bias, key_heads: int) -> Tensor:
    assert bias is not None
    # Finite, so that a part without any visible column has a finite sum of no weight. The kernel
    # multiplies it by log2(e).
    lowest = torch.finfo(bias.dtype).min / 4
    bias_B1SC = bias.clamp_min(lowest)[:, :, 0].unflatten(2, (-1, PART))
    return bias_B1SC.expand(-1, key_heads, -1, -1).flatten(1, 2)[:, :, None]


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Fused attention that also returns the logarithm of each sum, unlike the public function."""
    if query.is_cuda:
        fused = torch.ops.aten._scaled_dot_product_efficient_attention
        mixed, log_sums, *_ = fused(query, key, value, bias, compute_log_sumexp=True)
        # The kernel pads the rows of logarithms.
        return mixed, log_sums[..., : query.shape[2]]
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mixed, log_sums = fused(query, key, value, attn_mask=bias)
    return mixed, log_sums
