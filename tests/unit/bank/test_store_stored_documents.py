"""A bank that holds no texts shows what it can read again from the sources, and says what not."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bank_reader import read_bank
from unit.bank.test_store import META, PRINT, append, flip, memory_of, rows_of, shard_file, text_of

from sedem import Document, MemoryBank
from sedem.bank.blocks import InMemory
from sedem.bank.store import catalog
from sedem.bank.store.archive import export_bank, import_bank
from sedem.bank.store.backup import backup
from sedem.bank.store.interface import Meta
from sedem.bank.store.local import LocalStore
from sedem.errors import BankError, NoTextError
from sedem.inference.repair import texts_at_hand
from sedem.quantization import Quantized

WITHOUT = Meta(PRINT, META.made_by, texts=False)
SOURCES = {f"doc-{number}": text_of(number) for number in range(3)}


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    """A bank without texts of documents 0, 1 and 2."""
    folder = tmp_path / "a.bank"
    with LocalStore(folder).creating(WITHOUT) as unfinished:
        for number in range(3):
            append(unfinished, number)
    return folder


def bytes_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def assert_same_memory(folder: Path, numbers: list[int]) -> None:
    opened = MemoryBank.open(folder, source=SOURCES.get)
    assert opened.documents == [Document(f"doc-{n}", text_of(n)) for n in numbers]
    assert torch.equal(
        opened.memory(range(len(opened))), torch.cat([memory_of(n) for n in numbers])
    )
    assert list(opened.blocks) == [row for i, n in enumerate(numbers) for row in rows_of(n, i)]
    assert LocalStore(folder).verify() == []


def test_no_part_of_a_text_is_in_any_file(bank: Path) -> None:
    assert b"says" not in bytes_of(bank)
    LocalStore(bank).remove("doc-1")
    LocalStore(bank).compact()
    assert b"says" not in bytes_of(bank)
    assert_same_memory(bank, [0, 2])


def test_a_citation_shows_the_text_of_an_unchanged_source_alone(bank: Path) -> None:
    sources = dict(SOURCES)
    opened = MemoryBank.open(bank, source=sources.get)
    citation = opened.citation(1, 1, 2.0)
    assert (citation.text, citation.note) == (text_of(0)[9:], None)
    sources |= {"doc-1": text_of(1) + "."}
    del sources["doc-2"]
    for block, said in ((2, "'doc-1' has changed since; put"), (4, "'doc-2' cannot be read; put")):
        citation = opened.citation(block, 1, 2.0)
        assert (citation.start, citation.end, citation.text) == (0, 9, "")
        assert said in (citation.note or "")
        with pytest.raises(NoTextError, match=said):
            opened.block_text(block)
    unread = MemoryBank.open(bank).citation(0, 1, 2.0)
    assert "a.bank' holds no texts; open it with `source`" in (unread.note or "")


def test_a_source_is_read_once_for_several_spans(bank: Path) -> None:
    read: list[str] = []

    def source(name: str) -> str | None:
        read.append(name)
        return SOURCES[name]

    opened = MemoryBank.open(bank, source=source)
    assert [opened.block_text(block) for block in (0, 1, 3, 0)]
    assert read == ["doc-0", "doc-1"]


def test_an_append_skips_what_has_the_same_text_and_replaces_the_rest(bank: Path) -> None:
    before = bytes_of(bank)
    append(bank, 1)
    assert bytes_of(bank) == before
    append(bank, 7, name="doc-1")
    assert [*MemoryBank.open(bank).documents.names] == ["doc-0", "doc-2", "doc-1"]
    assert LocalStore(bank).digests()["doc-1"] == catalog.text_digest(text_of(7))
    assert b"says" not in bytes_of(bank)


@pytest.mark.parametrize("way", ["backup", "archive"])
def test_a_copy_holds_no_texts_either(way: str, bank: Path, tmp_path: Path) -> None:
    if way == "backup":
        backup(bank, tmp_path / "b.bank")
    else:
        export_bank(bank, tmp_path / "b.tar")
        import_bank(tmp_path / "b.tar", tmp_path / "b.bank")
    assert not MemoryBank.open(tmp_path / "b.bank").contents.meta.texts
    assert_same_memory(tmp_path / "b.bank", [0, 1, 2])


def test_what_needs_texts_is_refused_unless_the_sources_are_there(
    bank: Path, tmp_path: Path
) -> None:
    closed, opened = MemoryBank.open(bank), MemoryBank.open(bank, source=SOURCES.get)
    other = MemoryBank(PRINT, META.made_by, [], [], [])
    attempts: list[Callable[[], object]] = [
        lambda: closed.save(tmp_path / "b.bank"),
        lambda: closed.cast("int8"),
        lambda: other.append(closed),
    ]
    for attempt in attempts:
        with pytest.raises(NoTextError, match="holds no texts"):
            attempt()
    assert not (tmp_path / "b.bank").exists()
    other.append(opened)
    assert other.documents == opened.documents


def test_a_bank_with_texts_is_copied_without_them(tmp_path: Path) -> None:
    whole = MemoryBank(
        PRINT,
        META.made_by,
        [Document("doc-1", text_of(1))],
        rows_of(1),
        [InMemory(Quantized(memory_of(1)))],
    )
    whole.save(tmp_path / "whole.bank")
    MemoryBank.open(tmp_path / "whole.bank").save(tmp_path / "a.bank", no_text=True)
    assert b"says" in bytes_of(tmp_path / "whole.bank")
    assert b"says" not in bytes_of(tmp_path / "a.bank")
    assert_same_memory(tmp_path / "a.bank", [1])


def test_a_damaged_document_is_read_again_from_an_unchanged_source(bank: Path) -> None:
    flip(shard_file(bank, 2), -1)
    flip(shard_file(bank, 3), -1)
    sources = {**SOURCES, "doc-2": "something else"}
    assert texts_at_hand(bank, []) == []
    assert texts_at_hand(bank, [], sources.get) == [Document("doc-1", text_of(1))]
    given = [Document("doc-2", text_of(2))]
    assert [d.name for d in texts_at_hand(bank, given, sources.get)] == ["doc-1", "doc-2"]
    done = LocalStore(bank).repair()
    assert done.dropped == ["doc-1", "doc-2"]
    assert_same_memory(bank, [0])


def test_a_bank_that_holds_its_texts_looks_for_no_files(tmp_path: Path) -> None:
    with LocalStore(tmp_path / "a.bank").creating(META) as unfinished:
        append(unfinished, 0)
    with sqlite3.connect(tmp_path / "a.bank" / catalog.CATALOG) as connection:
        connection.execute("DELETE FROM texts")
    opened = MemoryBank.open(tmp_path / "a.bank", source=SOURCES.get)
    with pytest.raises(BankError, match="is not in bank"):
        opened.citation(0, 1, 1.0)
    assert texts_at_hand(tmp_path / "a.bank", [], SOURCES.get) == []


def test_a_reader_without_sedem_finds_spans_and_memory(bank: Path) -> None:
    texts, blocks = read_bank(bank)
    assert texts == dict.fromkeys(SOURCES, "")
    assert [(name, start, end) for name, start, end, _ in blocks] == [
        (f"doc-{n}", row.start, row.end) for n in range(3) for row in rows_of(n)
    ]
