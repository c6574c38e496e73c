"""A bank is the same wherever it is: copies between files, folders and an object store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from object_server import ObjectServer
from stored_banks import META, append, facts, same

from sedem.bank.copies import backup, export_bank, import_bank, join, split
from sedem.bank.database import connect
from sedem.bank.file import BankFile
from sedem.bank.places import Place, Store, store_at
from sedem.bank.remote import Parts
from sedem.errors import BankError, DamagedBankError, NoTextError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEDEM_CACHE", str(tmp_path / "cache"))


def fill(store: Store, texts: bool = True) -> None:
    """Make a bank of documents 1, 3, 4 and 5 in several commits."""
    with store.creating(replace(META, texts=texts)):
        append(store, 1, 2)
    append(store, 3, 4, characters=100_000)
    append(store, 5)
    store.remove("2.txt")


@pytest.fixture(params=["file", "folder", "bucket"])
def bank(request: pytest.FixtureRequest, tmp_path: Path, server: ObjectServer) -> Place:
    place = server.place() if request.param == "bucket" else tmp_path / "a.bank"
    fill(BankFile(tmp_path / "a.bank") if request.param == "file" else Parts(place))
    return place


def assert_equal(one: Place, other: Place) -> None:
    mine, theirs = store_at(one), store_at(other)
    assert mine.meta() == theirs.meta()
    assert mine.digests() == theirs.digests()
    assert same(facts(mine), facts(theirs))


def test_every_copy_is_equal(bank: Place, server: ObjectServer, tmp_path: Path) -> None:
    file, place, again = tmp_path / "b.bank", server.place(), tmp_path / "c.bank"
    assert backup(bank, file) == file.stat().st_size
    assert backup(bank, place) == Parts(place).size
    assert_equal(file, bank)
    assert_equal(place, bank)
    assert backup(place, again) == again.stat().st_size
    assert_equal(again, bank)
    exported, imported = tmp_path / "d.bank", tmp_path / "e.bank"
    assert export_bank(bank, exported) == exported.stat().st_size
    assert import_bank(exported, imported) == imported.stat().st_size
    assert_equal(imported, bank)
    elsewhere = server.place()
    assert import_bank(exported, elsewhere) == Parts(elsewhere).size
    assert_equal(elsewhere, bank)
    append(store_at(elsewhere), 6)
    assert len(store_at(elsewhere).digests()) == 5


@pytest.mark.parametrize("parts", [1, 3, 9])
def test_a_bank_is_split_and_joined(parts: int, bank: Place, tmp_path: Path) -> None:
    assert split(bank, tmp_path / "parts", parts) == Parts(tmp_path / "parts").size
    counts = [file.head().documents for file in store_at(tmp_path / "parts").files()]
    assert sum(counts) == 4 and len(counts) == min(parts, 4) and max(counts) - min(counts) <= 1
    assert_equal(tmp_path / "parts", bank)
    assert join(tmp_path / "parts", tmp_path / "b.bank") == (tmp_path / "b.bank").stat().st_size
    assert_equal(tmp_path / "b.bank", bank)


def test_an_empty_bank_is_copied(tmp_path: Path) -> None:
    with BankFile(tmp_path / "a.bank").creating(META):
        pass
    split(tmp_path / "a.bank", tmp_path / "parts", 3)
    join(tmp_path / "parts", tmp_path / "b.bank")
    assert_equal(tmp_path / "b.bank", tmp_path / "a.bank")


def test_a_bank_without_texts_is_copied_but_not_split(tmp_path: Path) -> None:
    """The words and digests of another file are made from the texts."""
    fill(BankFile(tmp_path / "a.bank"), texts=False)
    backup(tmp_path / "a.bank", tmp_path / "b.bank")
    assert BankFile(tmp_path / "b.bank").digests() == BankFile(tmp_path / "a.bank").digests()
    with pytest.raises(NoTextError, match=r"'.*a\.bank' holds no texts, which are needed to split"):
        split(tmp_path / "a.bank", tmp_path / "parts", 2)
    assert not Parts(tmp_path / "parts").exists()


def test_nothing_is_replaced(bank: Place, server: ObjectServer, tmp_path: Path) -> None:
    file, place = tmp_path / "b.bank", server.place()
    export_bank(bank, file)
    backup(bank, place)
    attempts: list[Callable[[], int]] = [
        lambda: backup(bank, file),
        lambda: backup(bank, place),
        lambda: export_bank(place, file),
        lambda: import_bank(file, file),
        lambda: import_bank(file, place),
        lambda: split(file, place, 2),
        lambda: join(place, file),
    ]
    for attempt in attempts:
        with pytest.raises(BankError, match="exists already; choose another name"):
            attempt()


def test_a_damaged_file_is_not_copied(server: ObjectServer, tmp_path: Path) -> None:
    """Neither a flipped bit nor a row that somebody changed, with the right checksums."""
    flipped, lie, place = tmp_path / "a.bank", tmp_path / "b.bank", server.place()
    fill(BankFile(flipped))
    fill(BankFile(lie))
    flipped.write_bytes(flipped.read_bytes().replace(b"document 1 says", b"document 7 says"))
    with closing(connect(lie)) as connection:
        connection.execute("UPDATE documents SET sha256 = ? WHERE name = '1.txt'", ("0" * 64,))
    here = sorted(path.name for path in tmp_path.iterdir())
    for file, attempt in (
        (flipped, lambda: import_bank(flipped, tmp_path / "c.bank")),
        (flipped, lambda: split(flipped, place, 2)),
        (lie, lambda: import_bank(lie, place)),
        (lie, lambda: export_bank(lie, tmp_path / "c.bank")),
    ):
        with pytest.raises(DamagedBankError, match=f"bank '{file}' is damaged"):
            attempt()
    assert not Parts(place).exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == here
    (tmp_path / "text").write_text("no bank")
    with pytest.raises(BankError, match=r"text' is not a bank"):
        import_bank(tmp_path / "text", tmp_path / "c.bank")
