"""A document that is appended in parts is there after the last part, and not a moment before."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bank_reader import read_bank
from unit.bank.crashes import Machine, every_stop
from unit.bank.test_store import (
    OTHER,
    PRINT,
    append,
    assert_holds,
    flip,
    make_bank,
    memory_of,
    rows_of,
    shard_file,
    text_of,
)

from sedem import Document, MemoryBank
from sedem.bank.blocks import Blocks
from sedem.bank.store import catalog
from sedem.bank.store.archive import export_bank, import_bank
from sedem.bank.store.backup import backup
from sedem.bank.store.local import LocalStore
from sedem.bank.store.unfinished import append_part, replace_part, stored_parts
from sedem.errors import BankError, BankMismatchError
from sedem.quantization import Quantized


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    """A bank of documents 0 and 1; the first of two parts of document 2 is in it as well."""
    folder = make_bank(tmp_path / "a.bank", 2)
    part(folder, 2, 0)
    return folder


def document(number: int, name: str | None = None) -> Document:
    return Document(name or f"doc-{number}", text_of(number))


def part(folder: Path, number: int, row: int, name: str | None = None) -> None:
    """Append one of the two blocks of a document."""
    append_part(
        LocalStore(folder),
        PRINT,
        document(number, name),
        Blocks.of(rows_of(number)[row : row + 1]),
        Quantized(memory_of(number)[row : row + 1]),
        before=row,
        last=row == 1,
    )


def part_again(folder: Path, number: int, row: int) -> None:
    """Write one of the blocks of a document again."""
    replace_part(
        LocalStore(folder),
        PRINT,
        document(number),
        Blocks.of(rows_of(number)[row : row + 1]),
        Quantized(memory_of(number)[row : row + 1]),
        row,
    )


def removed(folder: Path) -> list[tuple[str, int]]:
    with sqlite3.connect(folder / catalog.CATALOG) as connection:
        return connection.execute("SELECT name, removed FROM documents ORDER BY id").fetchall()


def assert_finished(folder: Path, others: list[int]) -> None:
    """The bank holds others and document 2, which is read in the order of its first part."""
    part(folder, 2, 1)
    assert_holds(folder, [*others, 2])
    assert list(read_bank(folder)[0]) == [f"doc-{number}" for number in [*others, 2]]


def test_a_part_is_not_seen_by_anybody(bank: Path, tmp_path: Path) -> None:
    assert removed(bank)[-1] == ("doc-2", 2)
    assert_holds(bank, [0, 1])
    assert [*LocalStore(bank).digests()] == ["doc-0", "doc-1"]
    assert [*read_bank(bank)[0]] == ["doc-0", "doc-1"]
    assert {name for name, *_ in read_bank(bank)[1]} == {"doc-0", "doc-1"}
    with pytest.raises(BankError, match="no document 'doc-2'"):
        LocalStore(bank).remove("doc-2")
    backup(bank, tmp_path / "b.bank")
    export_bank(bank, tmp_path / "b.tar")
    import_bank(tmp_path / "b.tar", tmp_path / "c.bank")
    for copy in ("b.bank", "c.bank"):
        assert_holds(tmp_path / copy, [0, 1])
        assert_finished(tmp_path / copy, [0, 1])


def test_the_last_part_makes_it_a_document(bank: Path) -> None:
    before = MemoryBank.open(bank)
    (first,) = stored_parts(LocalStore(bank), document(2))
    assert first.whole
    assert list(first.blocks) == [
        type(row)(3, row.start, row.end, row.slot_tokens) for row in rows_of(2)[:1]
    ]
    assert_finished(bank, [0, 1])
    assert len(before) == 4
    before.reload()
    assert torch.equal(before.memory([4, 5]), memory_of(2))
    assert stored_parts(LocalStore(bank), document(2)) == []


def test_the_old_version_is_there_until_the_last_part(tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "a.bank", 1)
    part(bank, 5, 0, "doc-0")
    assert_holds(bank, [0])
    part(bank, 5, 1, "doc-0")
    assert MemoryBank.open(bank).documents == [document(5, "doc-0")]


def test_a_commit_in_between_changes_nothing(bank: Path) -> None:
    append(bank, 3)
    LocalStore(bank).remove("doc-0")
    part(bank, 2, 1)
    assert_holds(bank, [1, 2, 3])


@pytest.mark.parametrize("how", ["another text in parts", "another text", "compaction"])
def test_parts_are_dropped_by(how: str, bank: Path) -> None:
    if how == "another text in parts":
        part(bank, 7, 0, "doc-2")
    elif how == "another text":
        append(bank, 2)
    else:
        LocalStore(bank).compact()
        assert removed(bank) == [("doc-0", 0), ("doc-1", 0)]
        assert len([*(bank / "shards").iterdir()]) == 1
    assert stored_parts(LocalStore(bank), document(2)) == []
    with pytest.raises(BankError, match=r"1 blocks of 'doc-2' were in .* 0 are there now"):
        part(bank, 2, 1)
    assert_holds(bank, [0, 1, 2] if how == "another text" else [0, 1])


def test_other_pages_are_another_document(bank: Path) -> None:
    assert stored_parts(LocalStore(bank), Document("doc-2", text_of(2), (0, 4))) == []


def test_a_bank_with_parts_is_repaired_and_the_document_begins_again(bank: Path) -> None:
    (bank / "shards" / "000003.safetensors").unlink()
    assert LocalStore(bank).verify() == [
        "shard '000003.safetensors' is missing; it affects no document"
    ]
    assert LocalStore(bank).repair().dropped == []
    assert stored_parts(LocalStore(bank), document(2)) == []
    part(bank, 2, 0)
    assert_finished(bank, [0, 1])


def test_another_model_cannot_add_a_part(bank: Path) -> None:
    with pytest.raises(BankMismatchError):
        append_part(
            LocalStore(bank),
            OTHER,
            document(2),
            Blocks.of(rows_of(2)[1:]),
            Quantized(memory_of(2)[1:]),
            before=1,
            last=True,
        )
    assert_finished(bank, [0, 1])


SPOILT: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "cut": lambda path: os.truncate(path, 60),
    "changed": lambda path: flip(path, -1),
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_part_whose_file_is_not_whole_is_written_again_in_its_place(how: str, bank: Path) -> None:
    SPOILT[how](shard_file(bank, 3))
    assert [one.whole for one in stored_parts(LocalStore(bank), document(2))] == [False]
    assert_opens(bank, 2)
    part_again(bank, 2, 0)
    assert [one.whole for one in stored_parts(LocalStore(bank), document(2))] == [True]
    assert_finished(bank, [0, 1])


def assert_opens(bank: Path, documents: int) -> None:
    """Nothing that readers see is missing."""
    assert len(MemoryBank.open(bank).documents) == documents


def test_a_part_that_is_not_there_is_not_written_again(bank: Path) -> None:
    with pytest.raises(BankError, match=r"1 blocks of 'doc-2' were in .*, 0 are there now"):
        part_again(bank, 2, 1)
    with pytest.raises(BankError, match=r"1 blocks of 'doc-3' were in .*, 0 are there now"):
        part_again(bank, 3, 0)
    assert_finished(bank, [0, 1])


def test_a_stop_while_a_part_is_written_again_leaves_one_that_is_lost_or_whole(
    tmp_path: Path,
) -> None:
    whole = make_bank(tmp_path / "whole.bank", 2)
    part(whole, 2, 0)
    flip(shard_file(whole, 3), -1)
    bank = tmp_path / "a.bank"

    def run(machine: Machine) -> None:
        shutil.rmtree(bank, ignore_errors=True)
        shutil.copytree(whole, bank)
        with machine.running():
            part_again(bank, 2, 0)

    for _ in every_stop(run):
        assert_opens(bank, 2)
        (stored,) = stored_parts(LocalStore(bank), document(2))
        if not stored.whole:
            part_again(bank, 2, 0)
        assert_finished(bank, [0, 1])
