"""Sizes are compared with the keys and values that a backbone caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache
from unit.evaluation.conftest import Echo, hill

from sedem.backbone.decoder import FAMILIES
from sedem.backbone.loading import open_backbone
from sedem_lab.evaluation.run import evaluate
from sedem_lab.evaluation.storage import compression, kv_bytes_per_token, state_bytes_per_token


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_per_token_equal_those_of_a_cache(
    family: str, tiny_folder: Callable[..., str]
) -> None:
    backbone = open_backbone(tiny_folder(family, head_dim=16), dtype=torch.bfloat16)
    cache, positions = DynamicCache(), torch.arange(7)[None]
    with torch.no_grad():
        backbone.run(
            backbone.embed(torch.zeros(1, 7, dtype=torch.long)),
            0,
            backbone.depth,
            positions,
            cache=cache,
        )
    cached = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    assert kv_bytes_per_token(backbone.model.config) == cached / 7
    assert state_bytes_per_token(backbone.model.config) == 2 * backbone.width


def test_a_run_reports_how_many_times_smaller_its_memory_is(
    tiny_folder: Callable[..., str], tmp_path: Path
) -> None:
    method = Echo()
    method.backbone = open_backbone(tiny_folder())
    metrics = evaluate(method, [hill(1), hill(2)], {}, tmp_path)
    # 100 bytes for 10 tokens; 4 layers with 2 heads of 8, and a width of 32.
    assert metrics["times_smaller_than_kv_cache"]["mean"] == 2 * 2 * 4 * 2 * 8 / 10
    assert metrics["times_smaller_than_states"]["mean"] == 2 * 32 / 10
    assert metrics["backbone_bytes_per_token"] == {"kv_cache": 256, "states": 64}
    assert compression([{"error": "", "labelled": False}], method.backbone.model.config) == {}
