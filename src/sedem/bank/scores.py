"""Late-interaction scores of one bank's blocks for several questions, in bounded memory.

Letters: B questions, Q question tokens, X question tokens of all questions, N blocks, J slots of a
block, L slots of all blocks, P padded slots, R heads, H width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sedem.quantization import Quantized

PRODUCTS = 2**16
"""Cosines of one head that are computed at once on a CPU; more do not fit its cache."""
PRODUCTS_ON_GPU = 2**26
"""The same on a GPU, which is faster on large products: 256 MB."""


def key_scores(
    query_BQRH: Tensor, query_mask_BQ: Tensor, keys_NJRH: Quantized, padding_P: Tensor
) -> Tensor:
    """Compute `selector.block_scores` for questions that share one bank, in bounded memory.

    Args:
        query_BQRH: unit vectors, one for each question token and head.
        query_mask_BQ: False where a question token is padding.
        keys_NJRH: unit vectors in their stored type; never copied as a whole.
        padding_P: indices of padding among the N * J slots, in order, on the CPU.

    Returns:
        fp32 scores `[B, N]`.
    """
    blocks, slots = keys_NJRH.values.shape[:2]
    # Tokens of all questions in a row: a long question causes no padding in the others.
    query_XRH, lengths = query_BQRH[query_mask_BQ], query_mask_BQ.sum(1).tolist()
    budget = PRODUCTS if query_BQRH.device.type == "cpu" else PRODUCTS_ON_GPU
    step = max(1, budget // (slots * max(1, len(query_XRH))))
    scores = []
    for start in range(0, blocks, step):
        stop = min(start + step, blocks)
        first, last = torch.searchsorted(padding_P, torch.tensor([start, stop]) * slots).tolist()
        part_padding_P = padding_P[first:last] - start * slots
        scores.append(_part_scores(query_XRH, lengths, keys_NJRH[start:stop], part_padding_P))
    return torch.cat(scores, 1)


def _part_scores(
    query_XRH: Tensor, lengths: list[int], keys_NJRH: Quantized, padding_P: Tensor
) -> Tensor:
    blocks, slots, heads = keys_NJRH.values.shape[:3]
    padding_P = padding_P.to(query_XRH.device)
    values_NJRH = _multipliable(keys_NJRH.values)
    total_XN = query_XRH.new_zeros(len(query_XRH), blocks, dtype=torch.float32)
    for head in range(heads):
        # One head at a time: its keys are a strided matrix, which the product does not copy.
        cosine_XL = _products(query_XRH[:, head], values_NJRH[:, :, head].flatten(0, 1))
        if keys_NJRH.scales is not None:
            cosine_XL *= keys_NJRH.scales[:, :, head].flatten()
        # Masked before the maximum: a padded slot at zero would beat a negative cosine.
        cosine_XL.index_fill_(1, padding_P, -torch.inf)
        total_XN += cosine_XL.view(-1, blocks, slots).amax(-1)
    return torch.stack([tokens_QN.sum(0) for tokens_QN in total_XN.split(lengths)]) / heads


def _multipliable(values: Tensor) -> Tensor:
    """Convert stored values to a type for products: float32 on a CPU, bfloat16 on a GPU.

    Both represent int8 and fp8 exactly, so scales can be applied to the products.
    """
    if values.device.type == "cpu":
        return values.float()
    return values if values.dtype == torch.float32 else values.bfloat16()


def _products(query_XH: Tensor, keys_LH: Tensor) -> Tensor:
    """Return all products `[X, L]` in float32, under autocast too."""
    with torch.autocast(query_XH.device.type, enabled=False):
        if keys_LH.dtype == torch.float32:
            return query_XH.float() @ keys_LH.T
        return torch.mm(query_XH.to(keys_LH.dtype), keys_LH.T, out_dtype=torch.float32)
