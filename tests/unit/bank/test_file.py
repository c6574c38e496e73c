"""The file of a bank: commits, versions, removed rows, damaged and hostile files."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sqlite3
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from stored_banks import META, PRINT, append, change, facts, memory_of, path_of, text_of

from sedem import Document, MemoryBank
from sedem.bank import database
from sedem.bank.blocks import BlockRow, Blocks
from sedem.bank.copies import copy_bank, split
from sedem.bank.database import connect, page_size
from sedem.bank.file import BankFile, delete
from sedem.bank.memory_bank import View, store_at
from sedem.errors import BankError
from sedem.tensors import Quantized


@pytest.fixture
def file(tmp_path: Path) -> BankFile:
    """A bank of documents 0 and 1."""
    file = BankFile(tmp_path / "a.bank")
    with file.creating(META):
        append(file, 0)
    append(file, 1)
    return file


def names(file: BankFile) -> list[str]:
    return MemoryBank.open_from(file).documents.names


# Commits


@pytest.mark.parametrize("row_bytes", [40, 4_000, 16_600, 32_900, 65_700, 73_800, 131_200, 400_000])
def test_rows_waste_at_most_a_tenth_of_a_file(row_bytes: int, tmp_path: Path) -> None:
    connection = connect(tmp_path / "a", create=True)
    connection.execute(f"PRAGMA page_size = {page_size(row_bytes)}")
    connection.reserve_bytes("main", 8)
    connection.execute("CREATE TABLE a (id INTEGER PRIMARY KEY, b BLOB)")
    count = max(40, 2_000_000 // row_bytes)
    with connection:
        connection.executemany("INSERT INTO a VALUES (NULL, ?)", [(bytes(row_bytes - 8),)] * count)
    connection.close()
    assert (tmp_path / "a").stat().st_size < 1.1 * count * row_bytes + 3 * page_size(row_bytes)


def test_an_error_in_a_commit_changes_nothing(file: BankFile) -> None:
    before = facts(file)
    with pytest.raises(ZeroDivisionError), file.writing():
        append(file, 2)
        file.remove("0.txt")
        raise ZeroDivisionError
    assert str(facts(file)) == str(before)


@pytest.mark.parametrize("code", [1, 9])
def test_a_bank_whose_creation_fails_or_is_killed_never_appears(code: int, tmp_path: Path) -> None:
    file = BankFile(tmp_path / "a.bank")

    def broken_off() -> None:
        with file.creating(META):
            append(file, *range(300), characters=20_000)
            if code == 9:
                os._exit(9)
            raise ZeroDivisionError

    process = multiprocessing.get_context("fork").Process(target=broken_off)
    process.start()
    process.join()
    assert process.exitcode == code and (tmp_path / "a.bank").exists()
    assert not file.exists()
    with file.creating(META):
        append(file, 1)
    assert names(file) == ["1.txt"]


def test_of_two_processes_one_creates_a_bank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "WAIT", 0.2)
    others = [BankFile(tmp_path / "b.bank") for _ in range(2)]
    with others[0].creating(META):
        with (
            pytest.raises(BankError, match=r"written by another process|exists already"),
            others[1].creating(META),
        ):
            pytest.fail("two processes create one bank")
        append(others[0], 0)
    assert names(others[1]) == ["0.txt"]


def test_a_second_writer_waits_with_a_message(
    file: BankFile, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert file.path is not None
    second, message = BankFile(file.path), "another process is writing bank"
    with file.writing() as connection:
        connection.execute("UPDATE bank SET version = version")
        thread = threading.Thread(target=append, args=(second, 2))
        thread.start()
        until = time.monotonic() + 60
        while message not in caplog.text and time.monotonic() < until:
            time.sleep(0.05)
        assert names(file) == ["0.txt", "1.txt"], "readers do not wait"
    thread.join()
    assert names(file) == ["0.txt", "1.txt", "2.txt"]
    assert message in caplog.text
    monkeypatch.setattr(database, "WAIT", 0.1)
    with file.writing() as connection:
        connection.execute("UPDATE bank SET version = version")
        with pytest.raises(BankError, match="is being written by another process; wait until"):
            BankFile(file.path).remove("0.txt")


# Versions


def test_another_process_opens_the_same_version(file: BankFile) -> None:
    bank = MemoryBank.open_from(file)
    packed = pickle.dumps(bank.snapshot())
    in_ram = pickle.dumps(bank.cast("int8").snapshot())
    append(file, 0, version=1)
    assert pickle.loads(packed).documents.names == ["0.txt", "1.txt"]
    assert torch.equal(pickle.loads(packed).memory([0, 1]), memory_of(0))
    assert pickle.loads(in_ram).block_text(0) == text_of(0)[:9]
    assert file.path is not None
    delete(file.path)
    with BankFile(file.path).creating(META):
        pass
    for use in ("blocks", "documents"):
        with pytest.raises(BankError, match="another bank is at"):
            _ = getattr(pickle.loads(packed), use)[0]


def test_a_file_that_was_exchanged_is_not_read_as_the_old_one(file: BankFile) -> None:
    assert file.path is not None
    view = View.newest(file)
    file.path.rename(file.path.with_name("old"))
    with BankFile(file.path).creating(META):
        pass
    file._idle.clear()
    with pytest.raises(BankError, match="another file is at"):
        _ = view.columns


def test_compacting_frees_space_and_keeps_what_living_readers_need(file: BankFile) -> None:
    assert file.path is not None
    append(file, *range(2, 40), characters=40_000)
    bank, lazy = MemoryBank.open_from(file), MemoryBank.open_from(file).snapshot()
    reader = bank.snapshot()
    assert len(bank.blocks) and bank.documents[3].text
    bank.remove(*(f"{n}.txt" for n in range(2, 40)))
    assert file.compact().bytes_after > 1_500_000
    assert torch.equal(reader.memory([4, 5]), memory_of(2)) and lazy.documents[2].name == "2.txt"
    packed = [pickle.dumps(one) for one in (reader, lazy)]
    del reader, lazy
    report = bank.compact()
    file.close()
    assert report.bytes_after == file.path.stat().st_size < 1_400_000 < report.bytes_before
    # In another process they are read again.
    reader, lazy = map(pickle.loads, packed)
    for use in (lambda: reader.memory([4, 5]), lambda: lazy.blocks, lambda: lazy.documents.names):
        with pytest.raises(BankError, match="was compacted since it was opened"):
            use()
    assert names(file) == ["0.txt", "1.txt"] and bank.memory([0]).isfinite().all()


# Long documents


def test_a_part_that_does_not_follow_is_refused(file: BankFile) -> None:
    document, memory = Document("1.txt", text_of(5, characters=100)), Quantized(memory_of(5))
    rows = Blocks.of([BlockRow(0, 0, 9, (4,) * 4), BlockRow(0, 9, 30, (4,) * 4)])
    file.append_part(PRINT, document, rows, memory, before=0, last=False)
    with pytest.raises(BankError, match=r"4 blocks of '1.txt' were in bank .*, 2 are there now"):
        file.append_part(PRINT, document, rows, memory, before=4, last=True)
    assert (file.unfinished(), file.stored_part(document)) == (["1.txt"], 2)
    assert file.stored_part(Document("1.txt", "another text")) == 0
    assert MemoryBank.open_from(file).documents[1].text == text_of(1)
    file.compact()
    assert file.unfinished() == [] and file.stored_part(document) == 0


# Damage and strangers


def foreign_database(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE a (b)")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Path.touch, "is not a bank"),
        (lambda path: path.write_bytes(b"no database"), "is not a bank"),
        (lambda path: path.write_bytes(b"SQLite format 3\0" * 99), "but not a bank"),
        (foreign_database, "is a database, but not a bank"),
        (Path.mkdir, "is a folder, not a bank"),
        (os.mkfifo, "is not a file"),
    ],
)
def test_what_is_not_a_bank_is_refused_and_left_alone(
    made: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "a"
    made(path)
    before = path.read_bytes() if path.is_file() else b""
    with pytest.raises(BankError, match=message):
        MemoryBank.open(path)
    if made is not Path.touch:
        with pytest.raises(BankError, match="exists already"), BankFile(path).creating(META):
            pass
    assert not path.is_file() or path.read_bytes() == before


OTHER_TABLES = "its tables are not those of one"


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("PRAGMA user_version = 7", "has format 7, this sedem reads 6"),
        ("UPDATE bank SET texts = 0", "holds no texts, which this sedem needs; build it again"),
        ("CREATE VIEW more AS SELECT * FROM blocks", OTHER_TABLES),
        ("CREATE TRIGGER more AFTER INSERT ON blocks BEGIN DELETE FROM documents; END",
         OTHER_TABLES),
        ("CREATE TABLE more (a)", OTHER_TABLES),
        ("DROP INDEX blocks_place", OTHER_TABLES),
        ("ALTER TABLE blocks ADD COLUMN more TEXT", OTHER_TABLES),
    ],
)  # fmt: skip
def test_other_formats_tables_views_and_triggers_are_refused(
    statement: str, message: str, file: BankFile
) -> None:
    change(path_of(file), statement)
    for use in (names, lambda file: append(file, 3)):
        with pytest.raises(BankError, match=message):
            use(BankFile(file.path))


def test_a_bank_is_opened_through_a_link_and_written_in_its_place(
    file: BankFile, tmp_path: Path
) -> None:
    link = tmp_path / "elsewhere" / "link.bank"
    link.parent.mkdir()
    link.symlink_to(tmp_path / "a.bank")
    append(BankFile(link), 2)
    assert names(file) == ["0.txt", "1.txt", "2.txt"]
    assert os.listdir(link.parent) == ["link.bank"]


def test_a_bank_in_a_read_only_folder_is_read_and_not_changed(
    file: BankFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert file.path is not None
    file.close()
    # Root may write anywhere, so the answer of the system is replaced.
    monkeypatch.setattr(os, "access", lambda *_: False)
    reader = BankFile(file.path)
    assert names(reader) == ["0.txt", "1.txt"]
    with pytest.raises(BankError, match="cannot be used now"):
        append(reader, 2)
    reader.close()
    assert os.listdir(tmp_path) == ["a.bank"]


def test_banks_logs_exports_and_parts_are_private(tmp_path: Path) -> None:
    """Whatever the mask of the process; but a bank that its owner shares stays shared."""
    path, mask = tmp_path / "a.bank", os.umask(0)
    try:
        with BankFile(path).creating(META) as file:
            append(file, 1, 2)
        append(BankFile(path), 3)
        reader = connect(path)
        reader.execute("SELECT * FROM bank").fetchall()
        append(BankFile(path), 4)
        assert path.with_name("a.bank-wal").exists()
        copy_bank(path, tmp_path / "b.bank")
        copy_bank(path, tmp_path / "c.bank", check=True)
        split(path, tmp_path / "parts", 2)
        store_at(tmp_path / "parts").remove("1.txt")
        reader.close()
        files = [one for one in tmp_path.rglob("*") if one.is_file() and one.suffix != ".lock"]
        assert len(files) >= 6
        assert {stat.S_IMODE(one.stat().st_mode) for one in files} == {0o600}
        path.chmod(0o644)
        append(BankFile(path), 2, version=1)
        BankFile(path).remove("1.txt")
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
    finally:
        os.umask(mask)


def test_a_copy_of_a_live_bank_is_whole(file: BankFile, tmp_path: Path) -> None:
    with file.writing() as connection:
        connection.execute("UPDATE bank SET version = version + 1")
        assert file.copy_to(tmp_path / "b.bank") == (tmp_path / "b.bank").stat().st_size
    assert str(facts(BankFile(tmp_path / "b.bank"))) == str(facts(file))
    assert sorted(os.listdir(tmp_path))[:2] == ["a.bank", "a.bank-shm"]
    with pytest.raises(BankError, match="exists already"):
        file.copy_to(tmp_path / "b.bank")
