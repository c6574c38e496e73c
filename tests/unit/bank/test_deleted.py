"""Deleted is gone: no byte of a removed document stays in a bank, beside it, or in a copy of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from stored_banks import META, PRINT, append, memory_of

from sedem import Document, MemoryBank
from sedem.bank.blocks import BlockRow, Blocks
from sedem.bank.codes import CodesFile, CodeSpace, codes_path
from sedem.bank.copies import copy_bank
from sedem.bank.database import connect
from sedem.bank.file import BankFile, text_digest
from sedem.tensors import Quantized

NAME, TEXT, SEED = "zqname.txt", "The zqsecret password is zqtulip.", 77
CODE, KEPT = 0xABCDEF0123456789, b"zqkept"
TRACE = CODE.to_bytes(8, "little")


def put(bank: BankFile, text: str = TEXT, seed: int = SEED) -> None:
    """Add the document that is removed later, or replace it."""
    rows = Blocks.of([BlockRow(0, 0, 9, (4,) * 4), BlockRow(0, 9, len(text), (4,) * 4)])
    bank.append(PRINT, [Document(NAME, text)], rows, Quantized(memory_of(seed)))


def derive(path: Path) -> None:
    """Make codes of the bank, and what earlier releases kept of its blocks."""
    view, ids = MemoryBank.open(path).snapshot().views[0], np.zeros(0, np.int64)
    with closing(CodesFile(path, view.head.id, "selector")) as codes:
        space = codes.space(lambda: CodeSpace(torch.ones(4), torch.ones(64, 4)))
        for ids in np.array_split(view.columns.ids, 4):
            codes.add(ids, np.full((len(ids), space.words), CODE, np.uint64))
    for suffix in (".kept", ".kept-wal"):
        path.with_name(path.name + suffix).write_bytes(KEPT)


def traces() -> dict[str, bytes]:
    """What stands in the files as long as the document is there, by what it is."""
    return {
        "its text": b"zqtulip",
        "a word": b"tulip",
        "its digest": text_digest(TEXT).encode(),
        "its memory": memory_of(SEED)[0].view(torch.uint8).numpy().tobytes(),
        "its keys and values": KEPT,
    }


def found(folder: Path) -> set[str]:
    """The traces that stand in any file of a folder."""
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    return {what for what, trace in traces().items() if any(trace in one for one in files)}


def rm(path: Path) -> None:
    BankFile(path).remove(NAME)


def rm_while_open(path: Path) -> None:
    bank = MemoryBank.open(path)
    assert len(bank.blocks) and bank.documents.names
    bank.remove(NAME)
    assert NAME not in bank.documents.names


def rm_with_readers(path: Path) -> None:
    reader = MemoryBank.open(path)
    assert reader.documents[reader.documents.names.index(NAME)].text == TEXT
    rm(path)
    assert found(path.parent) == {*traces()}, "a reader of this process still has it"
    reader.reload()
    assert reader.purge() and not reader.purge()


def replace(path: Path) -> None:
    put(BankFile(path), "Nothing to see.", seed=78)


def replace_in_parts(path: Path) -> None:
    document = Document(NAME, "Another text that is long.")
    rows = Blocks.of([BlockRow(0, 0, 9, (4,) * 4), BlockRow(0, 9, 20, (4,) * 4)])
    for part in range(2):
        memory = Quantized(memory_of(80 + part))
        BankFile(path).append_part(PRINT, document, rows, memory, before=2 * part, last=part == 1)


@pytest.mark.parametrize("road", [rm, rm_while_open, rm_with_readers, replace, replace_in_parts])
@pytest.mark.parametrize("others", [1, 300])
def test_a_removed_document_stands_nowhere(
    road: Callable[[Path], None], others: int, tmp_path: Path
) -> None:
    path = tmp_path / "bank" / "a.bank"
    with BankFile(path).creating(META) as file:
        append(file, *range(1000, 1000 + others))
    put(BankFile(path))
    append(BankFile(path), 1, 2)
    derive(path)
    reader = connect(path)  # keeps the log
    reader.execute("SELECT count(*) FROM bank").fetchall()
    assert found(path.parent) == {*traces()}
    codes = codes_path(path).read_bytes().count(TRACE)
    road(path)
    assert found(path.parent) == set()
    assert 0 < codes_path(path).read_bytes().count(TRACE) < codes
    copy_bank(path, tmp_path / "copies" / "b.bank")
    copy_bank(path, tmp_path / "copies" / "c.bank", check=True)
    assert found(tmp_path) == set()
    reader.close()
    assert len(MemoryBank.open(path).documents) == others + 2 + (
        road in (replace, replace_in_parts)
    )


def test_a_copy_has_nothing_that_the_bank_only_keeps_for_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "bank" / "a.bank"
    with BankFile(path).creating(META) as file:
        append(file, 1)
    put(BankFile(path))
    document, rows = Document("other", TEXT), Blocks.of([BlockRow(0, 0, 9, (4,) * 4)] * 2)
    memory = Quantized(memory_of(SEED))
    BankFile(path).append_part(PRINT, document, rows, memory, before=0, last=False)
    reader = MemoryBank.open(path)
    rm(path)
    assert found(path.parent)
    copy_bank(path, tmp_path / "copies" / "b.bank", check=True)
    assert found(tmp_path / "copies") == set()
    assert NAME in reader.documents.names


def begin(path: Path, text: str = TEXT, seed: int = SEED) -> None:
    """Read the first part of a document."""
    rows = Blocks.of([BlockRow(0, 0, 9, (4,) * 4)] * 2)
    memory = Quantized(memory_of(seed))
    BankFile(path).append_part(PRINT, Document(NAME, text), rows, memory, before=0, last=False)


def begin_another_text(path: Path) -> None:
    begin(path, "Nothing to see.", 79)
    assert BankFile(path).unfinished() == [NAME]


def compact(path: Path) -> None:
    BankFile(path).compact()


@pytest.mark.parametrize("road", [rm, replace, begin_another_text, compact])
def test_what_was_read_of_a_document_before_a_build_was_stopped_stands_nowhere(
    road: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "a.bank"
    with BankFile(path).creating(META) as file:
        append(file, 1)
    begin(path)
    reader = connect(path)  # keeps the log
    reader.execute("SELECT count(*) FROM bank").fetchall()
    assert found(tmp_path) == {"its digest", "its memory"}
    road(path)
    assert found(tmp_path) == set()
    reader.close()


def test_names_in_any_order_leave_nothing_behind_when_pages_are_divided(tmp_path: Path) -> None:
    """SQLite moves rows between the pages of an index; what it leaves there is overwritten too."""
    path, generator = tmp_path / "a.bank", np.random.default_rng(0)
    names = [f"zqname{number:05d}{'x' * 60}" for number in generator.permutation(2_000)]
    rows, memory = Blocks.of([BlockRow(0, 0, 1, (4,) * 4)]), Quantized(memory_of(1)[:1])
    file = BankFile(path)
    with file.creating(META):
        for name in names:
            file.append(PRINT, [Document(name, "a")], rows, memory)
    gone = names[::2]
    file.remove(*gone)
    content = path.read_bytes()
    assert [name for name in gone if name[:11].encode() in content] == []


@pytest.mark.parametrize("follows", [False, True])
def test_a_bank_stays_small_however_it_is_written(follows: bool, tmp_path: Path) -> None:
    """Small commits, replaced and removed documents leave a bank at most twice a fresh one."""
    often, once = BankFile(tmp_path / "often.bank"), BankFile(tmp_path / "once.bank")
    with often.creating(META):
        pass
    reader = MemoryBank.open(tmp_path / "often.bank") if follows else None
    for number in range(300):
        append(often, number % 100, version=number // 100)
        if number % 3 == 0:
            append(often, 1000)
            often.remove("1000.txt")
        if reader is not None:
            reader.reload()
    with once.creating(META) as file:
        append(file, *range(100), version=2)
    assert often.size <= 2 * once.size


def test_a_log_that_a_reader_keeps_stays_as_small_as_its_bank(tmp_path: Path) -> None:
    often, once = BankFile(tmp_path / "often.bank"), BankFile(tmp_path / "once.bank")
    with often.creating(META):
        append(often, 0)
    reader, largest = MemoryBank.open(tmp_path / "often.bank"), 0
    for number in range(1, 300):
        append(often, number)
        largest = max(largest, often.size)
    with once.creating(META) as file:
        append(file, *range(300))
    assert len(reader.documents) == 1 and largest <= 2.2 * once.size
