"""Of a damaged catalog everything is kept that can be read, and nothing else is believed."""

from __future__ import annotations

import errno
import io
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from unit.bank.crashes import Machine, every_stop
from unit.bank.test_store import append, assert_holds, flip, make_bank, numbers_in, shard_file

from sedem import MemoryBank
from sedem.bank.store import salvage, sqlite_pages
from sedem.bank.store.catalog import CATALOG
from sedem.bank.store.local import LocalStore
from sedem.errors import BankError, DamagedCatalogError

PAGE = sqlite_pages.PAGE
DOCUMENTS = 5


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents 0 to 4, each in its own shard; a sixth was removed."""
    bank = make_bank(tmp_path_factory.mktemp("whole") / "a.bank", DOCUMENTS, "int8")
    append(bank, 9)
    LocalStore(bank).remove("doc-9")
    return bank


@pytest.fixture
def bank(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "a.bank")


def change(bank: Path, statement: str) -> None:
    with closing(sqlite3.connect(bank / CATALOG)) as connection, connection:
        connection.execute(statement)


def pages_of(bank: Path, name: str) -> list[int]:
    """The pages of a table or an index."""
    with closing(sqlite3.connect(bank / CATALOG)) as connection:
        found = connection.execute("SELECT pageno FROM dbstat WHERE name = ?", (name,)).fetchall()
    return [number for (number,) in found]


def zero(path: Path, start: int, size: int) -> None:
    with path.open("rb+") as file:
        file.seek(start)
        file.write(bytes(size))


def test_a_whole_catalog_is_left_as_it_is(bank: Path) -> None:
    before = (bank / CATALOG).read_bytes()
    assert LocalStore(bank).salvage().problems == []
    assert (bank / CATALOG).read_bytes() == before
    assert not (bank / f"{CATALOG}.damaged").exists()


@pytest.mark.parametrize("size", [100, PAGE])
def test_a_header_and_a_schema_cost_nothing(size: int, bank: Path) -> None:
    zero(bank / CATALOG, 0, size)
    damaged = (bank / CATALOG).read_bytes()
    with pytest.raises(DamagedCatalogError, match="verify --repair"):
        MemoryBank.open(bank)
    done = LocalStore(bank).repair()
    assert (done.set_aside, done.dropped) == ([f"{CATALOG}.damaged"], [])
    assert len(done.problems) == 1
    assert (bank / done.set_aside[0]).read_bytes() == damaged
    assert_holds(bank, [*range(DOCUMENTS)])
    append(bank, 7)
    assert_holds(bank, [*range(DOCUMENTS), 7])
    LocalStore(bank).compact()
    assert_holds(bank, [*range(DOCUMENTS), 7])


@pytest.mark.parametrize("index", ["documents_name", "texts_place", "sqlite_autoindex_shards_1"])
def test_an_index_costs_nothing(index: str, bank: Path) -> None:
    for page in pages_of(bank, index):
        zero(bank / CATALOG, (page - 1) * PAGE, PAGE)
    assert LocalStore(bank).repair().dropped == []
    assert_holds(bank, [*range(DOCUMENTS)])


def test_a_lost_row_of_a_shard_costs_its_document(bank: Path) -> None:
    change(bank, "DELETE FROM shards WHERE id = 2")
    done = LocalStore(bank).repair()
    assert done.dropped == ["doc-1"]
    assert "1 of 6 rows of table 'shards' are lost" in done.problems
    assert "some memory of 'doc-1' cannot be located any more" in done.problems
    assert_holds(bank, [0, 2, 3, 4])
    assert f"shards/{shard_file(bank, 2).name}.damaged" in done.set_aside
    assert (bank / "shards" / f"{shard_file(bank, 2).name}.damaged").exists()
    append(bank, 1)
    assert_holds(bank, [0, 2, 3, 4, 1])


def test_a_document_of_several_shards_is_dropped_with_one_of_them(
    bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    LocalStore(bank).compact()
    LocalStore(bank).remove("doc-4")
    monkeypatch.setattr("sedem.bank.store.rewriting.SHARD_BYTES", 64)
    assert LocalStore(bank).compact().shards_after == 8  # one block in each
    for place, left in ((1, [1, 2, 3]), (2, [2, 3])):
        with closing(sqlite3.connect(bank / CATALOG)) as connection:
            listed = connection.execute("SELECT id FROM shards ORDER BY id").fetchall()
        change(bank, f"DELETE FROM shards WHERE id = {listed[place][0]}")
        assert len(LocalStore(bank).repair().dropped) == 1
        assert_holds(bank, left)


def test_a_lost_document_is_told_by_its_text(bank: Path) -> None:
    change(bank, "DELETE FROM documents WHERE name = 'doc-3'")
    done = LocalStore(bank).repair()
    assert any("document 4 (its text begins with 'document 3 says" in one for one in done.problems)
    assert_holds(bank, [0, 1, 2, 4])
    LocalStore(bank).compact()
    assert_holds(bank, [0, 1, 2, 4])


def test_lost_texts_cost_their_documents(bank: Path) -> None:
    change(bank, "DROP TABLE texts")
    assert LocalStore(bank).repair().dropped == [f"doc-{n}" for n in range(DOCUMENTS)]
    assert LocalStore(bank).verify() == numbers_in(bank) == []
    append(bank, 3)
    assert_holds(bank, [3])


def test_without_the_state_what_is_there_is_kept_and_the_doubt_told(bank: Path) -> None:
    change(bank, "DELETE FROM meta WHERE key = 'state'")
    done = LocalStore(bank).repair()
    assert "more may be lost: the row counts are lost too" in done.problems
    assert_holds(bank, [*range(DOCUMENTS)])


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM meta WHERE key = 'fingerprint'",
        "UPDATE meta SET value = 'x' WHERE key = 'made_by'",
        "DROP TABLE meta",
    ],
)
def test_without_the_model_nothing_can_be_kept(statement: str, bank: Path) -> None:
    change(bank, statement)
    damaged = (bank / CATALOG).read_bytes()
    with pytest.raises(BankError, match="restore a backup, or read the documents again") as refused:
        LocalStore(bank).repair()
    assert "\n" not in str(refused.value)
    assert (bank / CATALOG).read_bytes() == damaged
    assert shard_file(bank).exists()
    assert not (bank / ".salvage").exists()


def test_an_empty_file_is_refused(bank: Path) -> None:
    (bank / CATALOG).write_bytes(b"")
    with pytest.raises(BankError, match="cannot be repaired"):
        LocalStore(bank).repair()


def test_a_row_of_an_earlier_commit_is_not_taken_for_one_of_today(bank: Path) -> None:
    """A page that was never written holds what was there before, with right checksums."""
    with closing(sqlite3.connect(bank / CATALOG)) as connection:
        before = connection.execute("SELECT * FROM documents WHERE name = 'doc-2'").fetchone()
    LocalStore(bank).remove("doc-2")
    with closing(sqlite3.connect(bank / CATALOG)) as connection, connection:
        connection.execute("DELETE FROM documents WHERE name = 'doc-2'")
        connection.execute("INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?, ?)", before)
    with pytest.raises(BankError, match="cannot be repaired"):
        LocalStore(bank).repair()


def test_what_is_only_in_the_log_is_kept(bank: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.bank"
    with closing(sqlite3.connect(bank / CATALOG)) as reader:
        reader.execute("SELECT count(*) FROM documents").fetchone()
        append(bank, 8)
        shutil.copytree(bank, copy)
    assert (copy / f"{CATALOG}-wal").stat().st_size
    zero(copy / CATALOG, 0, PAGE)
    (copy / f"{CATALOG}-shm").unlink()
    zero(copy / CATALOG, 0, 100)
    done = LocalStore(copy).repair()
    assert done.dropped == []
    assert_holds(copy, [*range(DOCUMENTS), 8])


def test_nothing_is_written_into_a_damaged_page(bank: Path) -> None:
    """Where the rows of a page begin matters to a row that is added, not to reading."""
    [page] = pages_of(bank, "shards")
    begin = (page - 1) * PAGE + 6
    content = bytearray((bank / CATALOG).read_bytes())
    content[begin] ^= 2
    (bank / CATALOG).write_bytes(content)
    assert len(MemoryBank.open(bank).documents) == DOCUMENTS
    with pytest.raises(DamagedCatalogError, match=r"nothing is written into it; .*--repair"):
        append(bank, 7)
    assert (bank / CATALOG).read_bytes() == content
    assert not LocalStore(bank).repair().dropped
    append(bank, 7)
    assert_holds(bank, [*range(DOCUMENTS), 7])


def test_a_disk_that_is_full_while_the_catalog_is_copied_loses_no_page(
    bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero(bank / CATALOG, 0, 4096)
    damaged = (bank / CATALOG).read_bytes()
    room = iter([True, False])

    class Full(io.FileIO):
        def write(self, content: Any) -> int:
            if not next(room, True):  # and then there is room again
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(content)

    monkeypatch.setattr(salvage, "open", lambda path, mode: Full(path, "w"), raising=False)
    with pytest.raises(BankError, match="No space left on device"):
        LocalStore(bank).repair()
    assert (bank / CATALOG).read_bytes() == damaged
    assert not LocalStore(bank).repair().dropped


def test_a_second_damage_does_not_overwrite_what_was_set_aside(bank: Path) -> None:
    for number, name in enumerate((f"{CATALOG}.damaged", f"{CATALOG}.2.damaged")):
        zero(bank / CATALOG, 0, PAGE)
        assert LocalStore(bank).repair().set_aside == [name]
        assert_holds(bank, [*range(DOCUMENTS + number)])
        append(bank, DOCUMENTS + number)
    assert (bank / f"{CATALOG}.damaged").exists()


def test_random_damage_leaves_a_sound_bank_or_one_that_is_refused(
    whole: Path, tmp_path: Path
) -> None:
    chance = random.Random(0)
    size = (whole / CATALOG).stat().st_size
    kept = []
    for number in range(60):
        bank = tmp_path / "a.bank"
        shutil.rmtree(bank, ignore_errors=True)
        shutil.copytree(whole, bank)
        place = chance.randrange(size)
        kind = number % 3
        if kind == 0:
            flip(bank / CATALOG, place)
        elif kind == 1:
            zero(bank / CATALOG, place // PAGE * PAGE, PAGE)
        else:
            (bank / CATALOG).write_bytes((bank / CATALOG).read_bytes()[: max(place, 1)])
        try:
            done = LocalStore(bank).repair()
        except BankError:
            kept.append(-1)
            continue
        assert done.problems or len(numbers_in(bank)) == DOCUMENTS
        # Every document that remains is whole, to the bit; the others are gone.
        numbers = numbers_in(bank)
        assert set(numbers) <= {*range(DOCUMENTS)}
        if not numbers:
            append(bank, 0)
        assert_holds(bank, numbers or [0])
        kept.append(len(numbers))
    assert kept.count(DOCUMENTS) > len(kept) // 3


def test_a_stop_at_any_call_leaves_a_catalog_that_can_be_repaired(
    whole: Path, tmp_path: Path
) -> None:
    bank = tmp_path / "a.bank"

    def run(machine: Machine) -> None:
        shutil.rmtree(bank, ignore_errors=True)
        shutil.copytree(whole, bank)
        zero(bank / CATALOG, 0, PAGE)
        with machine.running():
            LocalStore(bank).repair()

    for _ in every_stop(run):
        LocalStore(bank).repair()
        assert_holds(bank, [*range(DOCUMENTS)])
        assert (bank / f"{CATALOG}.damaged").exists()
