"""A long document is read in parts, and a build that was killed goes on with the next one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LEASE, RECIPE

from sedem import Document, MemoryBank, SeDeM
from sedem.bank.care import examine
from sedem.bank.file import BankFile
from sedem.errors import DataError
from sedem.reading import building
from sedem.reading.building import build_bank

LONG = Document("long.txt", "\n\n".join([LEASE, RECIPE, LEASE[::-1], RECIPE.upper()]))
SHORT = Document("short.txt", "The key hangs behind the door.")


class Stop(BaseException):
    """Ends a build as a signal does."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "COMMIT", 100)
    monkeypatch.setattr(building, "PART", 64)


@pytest.fixture
def whole(model: SeDeM, tmp_path: Path) -> MemoryBank:
    """A bank of both documents that was built without an interruption."""
    build_bank(model, model.engine, tmp_path / "whole.bank", [LONG, SHORT])
    return MemoryBank.open(tmp_path / "whole.bank")


class Encoded:
    """Counts the segments that are encoded, and stops before one of the calls that commit."""

    def __init__(self, patched: pytest.MonkeyPatch, stop_at: int | None) -> None:
        self.segments = self.commits = 0
        compress, append_part = building.compress, BankFile.append_part

        def counted(model: Any, engine: Any, parts: Any, *rest: Any) -> Any:
            if isinstance(parts, list):  # short documents come as a stream
                self.segments += sum(map(len, parts))
            return compress(model, engine, parts, *rest)

        def stopped(*arguments: Any, **options: Any) -> None:
            if self.commits == stop_at:
                raise Stop
            append_part(*arguments, **options)
            self.commits += 1

        patched.setattr(building, "compress", counted)
        patched.setattr(BankFile, "append_part", stopped)


def interrupted(model: SeDeM, bank: Path, document: Document, commits: int) -> Encoded:
    """Build a bank, and stop when a number of parts is committed."""
    with pytest.MonkeyPatch.context() as patched:
        counts = Encoded(patched, commits)
        with pytest.raises(Stop):
            build_bank(model, model.engine, bank, [document])
    return counts


def finished(model: SeDeM, bank: Path, *documents: Document) -> Encoded:
    with pytest.MonkeyPatch.context() as patched:
        counts = Encoded(patched, None)
        build_bank(model, model.engine, bank, documents)
    return counts


def assert_equal(bank: Path, whole: MemoryBank) -> None:
    opened = MemoryBank.open(bank)
    assert examine(BankFile(bank)).problems == []
    assert opened.documents == whole.documents
    assert list(opened.blocks) == list(whole.blocks)
    every = range(len(whole))
    assert torch.equal(
        opened.memory(every).view(torch.int16), whole.memory(every).view(torch.int16)
    )


def test_parts_together_are_what_is_read_at_once(model: SeDeM, whole: MemoryBank) -> None:
    at_once = model.read([LONG, SHORT])
    assert list(whole.blocks) == list(at_once.blocks)
    every = range(len(whole))
    assert torch.allclose(
        whole.memory(every).float(), at_once.memory(every).float(), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize("commits", [0, 1, 2, 4])
def test_an_interrupted_build_goes_on_and_gives_the_same_bits(
    commits: int, model: SeDeM, whole: MemoryBank, tmp_path: Path
) -> None:
    bank = tmp_path / "a.bank"
    interrupted(model, bank, LONG, commits)
    assert (len(MemoryBank.open(bank).documents), len(MemoryBank.open(bank))) == (0, 0)
    assert examine(BankFile(bank)).problems == []
    step = building.part_segments(model.config)
    all_segments = finished(model, tmp_path / "again.bank", LONG).segments
    assert all_segments > 4 * step
    assert finished(model, bank, LONG, SHORT).segments == all_segments - commits * step
    assert_equal(bank, whole)


@pytest.mark.parametrize("change", ["another text", "other parts"])
def test_a_document_that_does_not_fit_what_is_stored_is_read_from_its_beginning(
    change: str, model: SeDeM, whole: MemoryBank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = tmp_path / "a.bank"
    if change == "another text":
        interrupted(model, bank, replace(LONG, text=LONG.text + " More."), 2)
    else:
        with monkeypatch.context() as patched:
            patched.setattr(building, "PART", 32)
            interrupted(model, bank, LONG, 3)
    counts = finished(model, bank, LONG, SHORT)
    assert counts.commits == -(-counts.segments // building.part_segments(model.config))
    assert_equal(bank, whole)


def test_a_part_ends_with_a_block(model: SeDeM) -> None:
    config = model.config
    for slots in (1, 3, 8):
        step = building.part_segments(config.with_changes(block_slots=slots))
        assert step * config.slots % slots == 0


def test_a_long_document_without_tokens_makes_no_bank(model: SeDeM, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(building, "COMMIT", 0)
        patched.setattr("sedem.reading.building.segment_text", _no_tokens)
        with pytest.raises(DataError, match="no tokens"):
            build_bank(model, model.engine, tmp_path / "a.bank", [SHORT])
    assert not (tmp_path / "a.bank").exists()


def _no_tokens(*_: Any) -> None:
    raise DataError("the text has no tokens; give a document with words in it")
