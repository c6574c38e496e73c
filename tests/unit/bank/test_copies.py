"""A bank is the same wherever it is: copies between files, folders and an object store."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from object_server import ObjectServer
from stored_banks import META, append, facts, same

from sedem.bank.copies import copy_bank, split
from sedem.bank.database import connect
from sedem.bank.file import BankFile, Place
from sedem.bank.memory_bank import store_at
from sedem.bank.parts import Parts, Store
from sedem.errors import BankError, DamagedBankError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEDEM_CACHE", str(tmp_path / "cache"))


def fill(store: Store) -> None:
    """Make a bank of documents 1, 3, 4 and 5 in several commits."""
    with store.creating(META) as file:
        append(file, 1, 2)
    append(store, 3, 4, characters=100_000)
    append(store, 5)
    store.remove("2.txt")


@pytest.fixture(params=["file", "folder", "bucket"])
def bank(request: pytest.FixtureRequest, tmp_path: Path, server: ObjectServer) -> Place:
    place = server.place() if request.param == "bucket" else tmp_path / "a.bank"
    fill(BankFile(tmp_path / "a.bank") if request.param == "file" else Parts(place))
    return place


def assert_equal(one: Place, other: Place, size: int | None = None) -> None:
    mine, theirs = store_at(one), store_at(other)
    assert size in (None, sum(file.size for file in mine.files()))
    assert mine.meta() == theirs.meta()
    assert mine.digests() == theirs.digests()
    assert same(facts(mine), facts(theirs))


def test_every_copy_is_equal_and_replaces_nothing(
    bank: Place, server: ObjectServer, tmp_path: Path
) -> None:
    file, place, exported, imported = tmp_path / "b", server.place(), tmp_path / "c", server.place()
    copies: list[tuple[Callable[[], int], Place]] = [
        (lambda: copy_bank(bank, file), file),
        (lambda: copy_bank(bank, place), place),
        (lambda: copy_bank(place, exported, check=True), exported),
        (lambda: copy_bank(exported, tmp_path / "d", check=True), tmp_path / "d"),
        (lambda: copy_bank(exported, imported, check=True), imported),
    ]
    for copy, target in copies:
        assert_equal(target, bank, copy())
    for copy, _ in (*copies, (lambda: split(file, place, 2), place)):
        with pytest.raises(BankError, match="exists already; choose another name"):
            copy()
    append(store_at(imported), 6)
    assert len(store_at(imported).digests()) == 5


@pytest.mark.parametrize("parts", [1, 3, 9])
def test_a_bank_is_split_and_joined(parts: int, bank: Place, tmp_path: Path) -> None:
    assert_equal(tmp_path / "parts", bank, split(bank, tmp_path / "parts", parts))
    counts = [file.head().documents for file in store_at(tmp_path / "parts").files()]
    assert sum(counts) == 4 and len(counts) == min(parts, 4) and max(counts) - min(counts) <= 1
    assert_equal(tmp_path / "b", bank, copy_bank(tmp_path / "parts", tmp_path / "b"))


def test_an_empty_bank_is_copied(tmp_path: Path) -> None:
    with BankFile(tmp_path / "a.bank").creating(META):
        pass
    split(tmp_path / "a.bank", tmp_path / "parts", 3)
    copy_bank(tmp_path / "parts", tmp_path / "b.bank")
    assert_equal(tmp_path / "b.bank", tmp_path / "a.bank")


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
        (flipped, lambda: copy_bank(flipped, tmp_path / "c.bank", check=True)),
        (flipped, lambda: split(flipped, place, 2)),
        (lie, lambda: copy_bank(lie, place, check=True)),
        (lie, lambda: copy_bank(lie, tmp_path / "c.bank", check=True)),
    ):
        with pytest.raises(DamagedBankError, match=f"bank '{file}' is damaged"):
            attempt()
    assert not Parts(place).exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "cache") == here
