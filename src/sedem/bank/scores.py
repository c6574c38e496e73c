"""Scores of the blocks of one bank for several questions, in bounded memory.

Letters: B questions, Q question tokens, X question tokens of all questions, N blocks, J slots of a
block, L slots of all blocks, P padded slots, R heads, H width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sedem.quantization import Quantized

PRODUCTS = 2**16
"""Cosines of one head that are looked at together on a CPU: more fall out of its cache."""
PRODUCTS_ON_GPU = 2**26
"""The same on a GPU, which needs much to do at once: 256 MB."""


def key_scores(
    query_BQRH: Tensor, query_mask_BQ: Tensor, keys_NJRH: Quantized, padding_P: Tensor
) -> Tensor:
    """`block_scores` of several questions and the blocks of one bank, in bounded memory.

    Args:
        query_BQRH: unit vectors, one a question token and head.
        query_mask_BQ: False where a question token is padding.
        keys_NJRH: unit vectors as they are kept; never copied as a whole.
        padding_P: which of the N * J slots are padding, in order, on the CPU.

    Returns:
        fp32 scores `[B, N]`.
    """
    blocks, slots = keys_NJRH.values.shape[:2]
    # Tokens of all questions, one after the other: a long one makes no padding for the others.
    query_XRH, lengths = query_BQRH[query_mask_BQ], query_mask_BQ.sum(1).tolist()
    room = PRODUCTS if query_BQRH.device.type == "cpu" else PRODUCTS_ON_GPU
    step = max(1, room // (slots * max(1, len(query_XRH))))
    scores = []
    for start in range(0, blocks, step):
        stop = min(start + step, blocks)
        first, last = torch.searchsorted(padding_P, torch.tensor([start, stop]) * slots).tolist()
        hidden_P = padding_P[first:last] - start * slots
        scores.append(_part_scores(query_XRH, lengths, keys_NJRH[start:stop], hidden_P))
    return torch.cat(scores, 1)


def _part_scores(
    query_XRH: Tensor, lengths: list[int], keys_NJRH: Quantized, padding_P: Tensor
) -> Tensor:
    blocks, slots, heads = keys_NJRH.values.shape[:3]
    padding_P = padding_P.to(query_XRH.device)
    values_NJRH = _multipliable(keys_NJRH.values)
    total_XN = query_XRH.new_zeros(len(query_XRH), blocks, dtype=torch.float32)
    for head in range(heads):
        # Heads one by one: rows of one head are a matrix with a stride, which no product copies.
        cosine_XL = _products(query_XRH[:, head], values_NJRH[:, :, head].flatten(0, 1))
        if keys_NJRH.scales is not None:
            cosine_XL *= keys_NJRH.scales[:, :, head].flatten()
        # Filled before the maximum: a padded slot at zero would beat a negative cosine.
        cosine_XL.index_fill_(1, padding_P, -torch.inf)
        total_XN += cosine_XL.view(-1, blocks, slots).amax(-1)
    return torch.stack([tokens_QN.sum(0) for tokens_QN in total_XN.split(lengths)]) / heads


def _multipliable(values: Tensor) -> Tensor:
    """Stored values as something matrices multiply: float32 on a CPU, at least bfloat16 on a GPU.

    Both hold int8 and fp8 exactly; a product with the vector's scale is then the product with it.
    """
    if values.device.type == "cpu":
        return values.float()
    return values if values.dtype == torch.float32 else values.bfloat16()


def _products(query_XH: Tensor, keys_LH: Tensor) -> Tensor:
    """All cosines `[X, L]` in float32, whatever type is multiplied, under autocast too."""
    with torch.autocast(query_XH.device.type, enabled=False):
        if keys_LH.dtype == torch.float32:
            return query_XH.float() @ keys_LH.T
        return torch.mm(query_XH.to(keys_LH.dtype), keys_LH.T, out_dtype=torch.float32)
