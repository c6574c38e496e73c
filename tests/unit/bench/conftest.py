"""A tiny checkpoint for the bench, and a machine that need not be measured."""

from __future__ import annotations

import pytest
import torch

from sedem import SeDeM, SedemConfig
from sedem.backbone.loading import open_backbone


@pytest.fixture(scope="session")
def checkpoint(config: SedemConfig, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four layers of random weights, 512 positions, a byte tokenizer."""
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    backbone = open_backbone(config.encoder)
    torch.manual_seed(1)
    model = SeDeM(config, backbone, backbone)
    model.decoder.add_lora(4, 8)
    model.save_pretrained(folder)
    return str(folder)
