"""Scores of one bank against those of its blocks."""

from __future__ import annotations

import pytest
import torch
from unit.method.conftest import case

from sedem.bank import scores
from sedem.bank.scores import key_scores
from sedem.method.selector import block_scores
from sedem.quantization import DTYPES, Quantized, quantize


@pytest.mark.parametrize("way", ["_scores_head_by_head", "_scores_of_all_heads"])
@pytest.mark.parametrize("room", [1, 40, 2**16])
@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_scores_are_those_of_the_blocks_in_parts_of_any_size(
    dtype: str | None, room: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "_scores_head_by_head", getattr(scores, way))
    query_BQRH, query_mask_BQ, keys_BNJRH, slot_mask_BNJ = case()
    keys_NJRH, slot_mask_NJ = keys_BNJRH[1], slot_mask_BNJ[1]
    quantized = Quantized(keys_NJRH) if dtype is None else quantize(keys_NJRH, dtype)
    monkeypatch.setattr("sedem.bank.scores.PRODUCTS", room)
    padding_P = (~slot_mask_NJ).flatten().nonzero()[:, 0]
    found_BN = key_scores(query_BQRH, query_mask_BQ, quantized, padding_P)
    keys_BNJRH = quantized.dequantize().float().expand_as(keys_BNJRH)
    slots_BNJ = slot_mask_NJ.expand_as(slot_mask_BNJ)
    torch.testing.assert_close(
        found_BN, block_scores(query_BQRH, query_mask_BQ, keys_BNJRH, slots_BNJ)
    )
    assert found_BN[:, 3].eq(-torch.inf).all(), "padding alone"


def test_scores_are_float32_under_autocast() -> None:
    query_BQRH, query_mask_BQ, keys_BNJRH, slot_mask_BNJ = case()
    padding_P = (~slot_mask_BNJ[1]).flatten().nonzero()[:, 0]
    arguments = query_BQRH, query_mask_BQ, Quantized(keys_BNJRH[1]), padding_P
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found_BN = key_scores(*arguments)
    assert found_BN.dtype == torch.float32
    assert torch.equal(found_BN, key_scores(*arguments))
