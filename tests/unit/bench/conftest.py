"""A tiny checkpoint for the bench."""

from __future__ import annotations

from pathlib import Path

import pytest

from sedem import SeDeM


@pytest.fixture
def checkpoint(model: SeDeM, tmp_path: Path) -> str:
    """Four layers of random weights, 512 positions, a byte tokenizer."""
    folder = tmp_path / "tiny"
    model.decoder.add_lora(4, 8)
    model.save_pretrained(folder)
    return str(folder)
