"""The cold start is measured in processes of its own, part by part."""

from __future__ import annotations

from pathlib import Path

import pytest

from sedem import SeDeM
from sedem.bench.cold_start import PARTS, measure_cold_start
from sedem.errors import SedemError


def test_its_parts_add_up(model: SeDeM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "tiny")
    found = measure_cold_start(str(tmp_path / "tiny"), "static", runs=1)
    assert tuple(found) == PARTS
    *parts, whole = found.values()
    assert min(parts) > 0 and sum(parts) == pytest.approx(whole)


def test_a_process_that_fails_is_named(model: SeDeM, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "tiny")
    with pytest.raises(SedemError, match="engine is 'quick'"):
        measure_cold_start(str(tmp_path / "tiny"), "quick", runs=1)
