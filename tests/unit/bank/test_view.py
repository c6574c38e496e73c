"""A bank without texts keeps their SHA-256, and shows the text of an unchanged source alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stored_banks import META, append, memory_of, text_of

from sedem import MemoryBank
from sedem.bank.file import BankFile
from sedem.errors import NoTextError


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    """A bank without the texts of documents 0 and 1."""
    file = BankFile(tmp_path / "a.bank")
    with file.creating(replace(META, texts=False)):
        append(file, 0, 1)
    return tmp_path / "a.bank"


def test_no_part_of_a_text_is_in_the_file(bank: Path) -> None:
    assert text_of(1).encode()[:12] not in bank.read_bytes()
    with BankFile(bank).reading() as connection:
        assert not connection.execute("SELECT 1 FROM texts").fetchall()
        assert connection.execute("SELECT rowid FROM words WHERE words MATCH '7919'").fetchall()


def test_a_citation_shows_the_text_of_an_unchanged_source_alone(bank: Path) -> None:
    sources = {"0.txt": text_of(0), "1.txt": text_of(1) + " and more"}
    opened = MemoryBank.open(bank, source=sources.get)
    assert opened.citation(0, 1, 0.5).text == text_of(0)[:9]
    changed = opened.citation(2, 1, 0.5)
    assert changed.text == "" and "'1.txt' has changed since" in str(changed.note)
    del sources["1.txt"]
    assert "'1.txt' cannot be read" in str(opened.citation(2, 1, 0.5).note)
    assert "open it with `source`" in str(MemoryBank.open(bank).citation(0, 1, 0.5).note)


def test_a_source_is_read_once_for_several_spans(bank: Path) -> None:
    asked: list[str] = []

    def source(name: str) -> str:
        asked.append(name)
        return text_of(int(name[0]))

    opened = MemoryBank.open(bank, source=source)
    assert [opened.block_text(n) for n in (0, 1, 0)] == [
        text_of(0)[:9], text_of(0)[9:], text_of(0)[:9],
    ]  # fmt: skip
    assert asked == ["0.txt"]


def test_an_append_skips_what_has_the_same_text_and_replaces_the_rest(bank: Path) -> None:
    file = BankFile(bank)
    append(file, 0, 1, version=0)
    append(file, 1, version=1)
    opened = MemoryBank.open(bank)
    assert opened.documents.names == ["0.txt", "1.txt"]
    assert torch.equal(opened.memory(range(4)), torch.cat([memory_of(0), memory_of(1001)]))


def test_a_copy_needs_the_sources_and_holds_no_texts_either(bank: Path, tmp_path: Path) -> None:
    with pytest.raises(NoTextError, match="holds no texts"):
        MemoryBank.open(bank).cast("int8")
    opened = MemoryBank.open(bank, source=lambda name: text_of(int(name[0])))
    opened.save(tmp_path / "b.bank")
    assert not MemoryBank.open(tmp_path / "b.bank").meta.texts
    assert BankFile(bank).copy_to(tmp_path / "c.bank")
    assert not MemoryBank.open(tmp_path / "c.bank").meta.texts


def test_a_bank_with_texts_is_saved_without_them(tmp_path: Path) -> None:
    file = BankFile()
    with file.creating(META):
        append(file, 0, 1)
    with_texts = MemoryBank.open_from(file)
    with_texts.save(tmp_path / "b.bank", no_text=True)
    opened = MemoryBank.open(tmp_path / "b.bank")
    assert not opened.meta.texts and opened.blocks == with_texts.blocks
