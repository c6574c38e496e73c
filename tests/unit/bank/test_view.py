"""Versions of files are read on demand; texts that are not stored come from unchanged sources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_banks import META, append, memory_of, text_of

from sedem import MemoryBank
from sedem.bank.file import BankFile
from sedem.bank.memory_bank import Snapshot
from sedem.bank.view import View
from sedem.errors import NoTextError


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    """A bank without the texts of documents 0 and 1."""
    file = BankFile(tmp_path / "a.bank")
    with file.creating(replace(META, texts=False)):
        append(file, 0, 1)
    return tmp_path / "a.bank"


def test_a_citation_shows_the_text_of_an_unchanged_source_alone(bank: Path) -> None:
    assert text_of(1).encode()[:12] not in bank.read_bytes()
    with BankFile(bank).reading() as connection:
        assert not connection.execute("SELECT 1 FROM texts").fetchall()
        assert connection.execute("SELECT rowid FROM words WHERE words MATCH '7919'").fetchall()
    sources = {"0.txt": text_of(0), "1.txt": text_of(1) + " and more"}
    asked: list[str] = []

    def source(name: str) -> str | None:
        asked.append(name)
        return sources.get(name)

    opened = MemoryBank.open(bank, source=source)
    assert opened.citation(0, 1, 0.5).text == text_of(0)[:9]
    assert opened.block_text(1) == text_of(0)[9:] and asked == ["0.txt"], "it is read once"
    changed = opened.citation(2, 1, 0.5)
    assert changed.text == "" and "'1.txt' has changed since" in str(changed.note)
    del sources["1.txt"]
    assert "'1.txt' cannot be read" in str(opened.citation(2, 1, 0.5).note)
    assert "open it with `source`" in str(MemoryBank.open(bank).citation(0, 1, 0.5).note)


def test_an_append_skips_what_has_the_same_text_and_replaces_the_rest(bank: Path) -> None:
    file = BankFile(bank)
    before = file.head()
    append(file, 0, 1, version=0)
    assert file.head() == before
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
    file = BankFile()
    with file.creating(META):
        append(file, 0, 1)
    MemoryBank.open_from(file).save(tmp_path / "c.bank", no_text=True)
    without = MemoryBank.open(tmp_path / "c.bank")
    assert not without.meta.texts and without.blocks == opened.blocks


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_snapshots_of_several_files_and_of_parts_read_as_one_bank(parts: int) -> None:
    views = []
    for numbers in ((0,), (), (1, 2)):
        file = BankFile()
        with file.creating(META):
            if numbers:
                append(file, *numbers)
        views.append(View.newest(file))
    bank = Snapshot(views, BankFile())
    assert bank.documents.names == ["0.txt", "1.txt", "2.txt"]
    assert [bank.block_text(n)[:9] for n in (4, 0)] == [text_of(2)[:9], text_of(0)[:9]]
    every = torch.cat([memory_of(n) for n in range(3)])
    for order in ([4, 0, 0, 5, 1], [5, 5], []):
        assert torch.equal(bank.memory(order), every[order])
        assert bank.rows(order) == [bank.blocks[n] for n in order]
    for wanted in bank.split(parts):
        part = bank.part(wanted)
        assert part.blocks == bank.blocks[wanted.start : wanted.stop]
        assert torch.equal(part.memory(range(len(part))), every[wanted.start : wanted.stop])
        assert part.part(range(1, 2)).blocks == part.blocks[1:2]
    with pytest.raises(IndexError, match="a bank of 6 blocks has no block 6"):
        bank.memory([0, 6])


def test_opening_and_reloading_read_no_rows_that_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = View._block_rows

    def counting(view: View, *rest: Any) -> Iterator[Any]:
        for ids, blocks in real(view, *rest):
            read.append(len(ids))
            yield ids, blocks

    monkeypatch.setattr(View, "_block_rows", counting)
    file = BankFile(tmp_path / "a.bank")
    with file.creating(META):
        append(file, *range(9))
    bank = MemoryBank.open_from(file)
    assert len(bank) == 18 and not read
    assert len(bank.blocks) == sum(read) == 18
    file.remove("3.txt")
    append(file, 9)
    bank.reload()
    bank.reload()
    assert len(bank.blocks) == 18 and sum(read) == 20
    assert bank.blocks == MemoryBank.open_from(file).blocks
