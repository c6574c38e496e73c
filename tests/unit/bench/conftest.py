"""A tiny checkpoint for the bench, and a machine that need not be measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from sedem import SeDeM
from sedem.bench import command


@pytest.fixture
def checkpoint(model: SeDeM, tmp_path: Path) -> str:
    """Four layers of random weights, 512 positions, a byte tokenizer."""
    folder = tmp_path / "tiny"
    model.decoder.add_lora(4, 8)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed ceilings; measuring the machine takes seconds."""
    ceilings = command.Ceilings(1e10, 1e11)
    monkeypatch.setattr(command, "measure_ceilings", lambda device, dtype: ceilings)
