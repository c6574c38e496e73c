"""A bank is the same wherever it lies: copies between folders, object stores and archives."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import pytest
import torch
from object_server import ObjectServer
from stored_banks import META, append, facts

from sedem.bank.blocks import BlockRow, Blocks
from sedem.bank.store.catalog import CATALOG
from sedem.bank.store.copying import archive_of, bank_of, copy_bank
from sedem.bank.store.interface import Meta
from sedem.bank.store.local import LocalStore
from sedem.bank.store.object_commits import shard_name
from sedem.bank.store.object_store import ObjectStore
from sedem.bank.store.opening import PlacedStore, compact_at, local_folder, store_at
from sedem.bank.store.shard import SHARDS
from sedem.bank.store.unfinished import append_part, stored_parts, unfinished_documents
from sedem.errors import BankError, ConfigError, UnknownDocumentError
from sedem.quantization import Quantized
from sedem.types import Document


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def filled(place: str | Path) -> PlacedStore:
    """A bank with three commits and a removed document."""
    store = store_at(place)
    with store.creating(META) as unfinished:
        append(unfinished, 1, 2)
    append(store, 3)
    append(store, 4, 5)
    store.remove("2.txt")
    return store


def assert_equal(one: PlacedStore, other: PlacedStore) -> None:
    assert one.meta() == other.meta()
    assert one.digests() == other.digests()
    for mine, theirs in zip(facts(one), facts(other), strict=True):
        assert mine[:3] == theirs[:3]
        assert torch.equal(mine[3], theirs[3])


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a bank, but for the lock and SQLite's log."""
    found = sorted(path for path in folder.rglob("*") if path.suffix in (".sqlite", ".safetensors"))
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in found
    }


def test_a_copy_up_and_down_again_is_the_same_byte_for_byte(
    server: ObjectServer, tmp_path: Path
) -> None:
    here, place, back = tmp_path / "here.bank", server.place(), tmp_path / "back.bank"
    filled(here)
    copied = copy_bank(here, place)
    assert copy_bank(place, back) == copied
    assert_equal(store_at(here), store_at(place))
    assert_equal(store_at(here), store_at(back))
    objects = server.objects(place)
    for path in (here / SHARDS).iterdir():
        content = path.read_bytes()
        assert objects[shard_name(hashlib.sha256(content).hexdigest())] == content
    shards = {name: digest for name, digest in digests(here).items() if name != CATALOG}
    assert {name: digest for name, digest in digests(back).items() if name != CATALOG} == shards
    # SQLite counts copies in the header of a catalog; a second copy has every byte of the first.
    copy_bank(place, tmp_path / "again.bank")
    assert digests(tmp_path / "again.bank") == digests(back)
    assert store_at(place).verify() == store_at(back).verify() == []


def test_a_bank_that_was_made_in_a_store_goes_on_in_a_folder(
    server: ObjectServer, tmp_path: Path
) -> None:
    place, folder = server.place(), tmp_path / "a.bank"
    store = filled(place)
    copy_bank(place, folder)
    for each in (store, store_at(folder)):
        append(each, 6)
        each.remove("1.txt")
    assert_equal(store, store_at(folder))


def test_a_copy_from_store_to_store(server: ObjectServer) -> None:
    one, other = server.place(), server.place()
    filled(one)
    copy_bank(one, other)
    assert_equal(store_at(one), store_at(other))


def test_an_archive_of_a_store_is_that_of_its_copy(server: ObjectServer, tmp_path: Path) -> None:
    place, folder, again = server.place(), tmp_path / "a.bank", server.place()
    filled(place)
    copy_bank(place, folder)
    archive_of(place, tmp_path / "1.tar")
    archive_of(folder, tmp_path / "2.tar")
    assert (tmp_path / "1.tar").read_bytes() == (tmp_path / "2.tar").read_bytes()
    bank_of(tmp_path / "1.tar", again)
    assert_equal(store_at(place), store_at(again))
    bank_of(tmp_path / "1.tar", tmp_path / "b.bank")
    assert_equal(store_at(place), store_at(tmp_path / "b.bank"))


def test_nothing_is_replaced_by_a_copy(server: ObjectServer, tmp_path: Path) -> None:
    place, folder = server.place(), tmp_path / "a.bank"
    filled(place)
    filled(folder)
    archive_of(place, tmp_path / "a.tar")
    for attempt in (
        lambda: copy_bank(folder, place),
        lambda: copy_bank(place, folder),
        lambda: bank_of(tmp_path / "a.tar", place),
        lambda: bank_of(tmp_path / "a.tar", folder),
    ):
        with pytest.raises(BankError, match="exists already"):
            attempt()
    with pytest.raises(BankError, match="there is no bank"):
        copy_bank(server.place(), tmp_path / "b.bank")
    with pytest.raises(BankError, match="there is no bank"):
        copy_bank(tmp_path / "none.bank", server.place())
    assert not (tmp_path / "b.bank").exists()


def test_a_damaged_bank_is_not_copied(server: ObjectServer, tmp_path: Path) -> None:
    place, folder = server.place(), tmp_path / "a.bank"
    filled(folder)
    shard = next((folder / SHARDS).iterdir())
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BankError, match="is damaged"):
        copy_bank(folder, place)
    assert not store_at(place).exists()
    filled(place)
    name = next(name for name in server.objects(place) if name.startswith("shards/"))
    server.put(place, name, b"?")
    with pytest.raises(BankError, match=f"'{place}/{name}' is damaged"):
        copy_bank(place, tmp_path / "b.bank")
    assert not (tmp_path / "b.bank").exists()


def test_a_long_document_is_appended_in_parts(server: ObjectServer) -> None:
    """As in a folder, nobody sees it before its last part."""
    store = filled(server.place())
    document = Document("long", "long text " * 9)
    parts = [Blocks.of([BlockRow(0, 9 * n, 9 * n + 9, (4, 4, 4, 4))]) for n in range(3)]
    for number, blocks in enumerate(parts):
        assert len(facts(store)) == 4
        assert [part.whole for part in stored_parts(store, document)] == [True] * number
        assert unfinished_documents(store) == (["long"] if number else [])
        memory = Quantized(torch.full((1, 4, 8), float(number), dtype=torch.bfloat16))
        last = number == 2
        append_part(store, META.fingerprint, document, blocks, memory, before=number, last=last)
    found = facts(store)[-1]
    assert found[:2] == ("long", document.text)
    assert found[3][:, 0, 0].tolist() == [0, 1, 2]
    assert unfinished_documents(store) == []


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_changes_gives_the_same_bank(
    server: ObjectServer, tmp_path: Path, seed: int
) -> None:
    """Appending, replacing, removing, compacting and opening again, in a folder and in a store."""
    place, folder = server.place(), tmp_path / "a.bank"
    stores: list[PlacedStore] = [store_at(folder), store_at(place)]
    meta = Meta(META.fingerprint, META.made_by, ["bfloat16", "int8"][seed % 2], seed < 2)
    for store in stores:
        with store.creating(meta) as unfinished:
            append(unfinished, 0)
    rng = random.Random(seed)
    for step in range(12):
        kind = rng.choice(["append", "append", "replace", "remove", "remove", "compact", "open"])
        numbers = rng.sample(range(9), rng.randint(1, 3))
        errors = []
        for index, store in enumerate(stores):
            try:
                if kind in ("append", "replace"):
                    append(store, *numbers, version=step if kind == "replace" else 0)
                elif kind == "remove":
                    store.remove(*(f"{number}.txt" for number in numbers))
                elif kind == "compact":
                    store.compact()
                else:
                    stores[index] = store_at(place if index else folder)
            except UnknownDocumentError as error:
                errors.append(str(error).replace(str(store), "the bank"))
        assert len(errors) in (0, 2) and len({*errors}) <= 1
        assert stores[0].digests() == stores[1].digests()
    if meta.texts:
        assert_equal(*stores)
    memory = [facts_of_memory(store) for store in stores]
    assert torch.equal(*memory)
    assert stores[0].verify() == stores[1].verify() == []


def facts_of_memory(store: PlacedStore) -> torch.Tensor:
    from sedem import MemoryBank

    bank = MemoryBank.open_from(store)
    return bank.memory(range(len(bank)))


def test_a_place_opens_its_store(tmp_path: Path) -> None:
    assert isinstance(store_at(tmp_path / "a"), LocalStore)
    assert isinstance(store_at(str(tmp_path / "a")), LocalStore)
    found = store_at("s3://bucket/folder/", wait=3)
    assert isinstance(found, ObjectStore)
    assert (str(found), found.wait) == ("s3://bucket/folder", 3)


def test_what_needs_a_folder_says_so(server: ObjectServer, tmp_path: Path) -> None:
    assert local_folder(str(tmp_path), "'sedem bank warm'") == tmp_path
    with pytest.raises(BankError, match="'sedem bank warm' needs a bank on local disk; copy it"):
        local_folder("s3://bucket/folder", "'sedem bank warm'")
    filled(tmp_path / "a.bank")
    with pytest.raises(ConfigError, match="--keep is for banks in object stores"):
        compact_at(tmp_path / "a.bank", 3)
    place = server.place()
    filled(place)
    compact_at(place)
    # Two commits of the copy in a folder and five in the store: none is older than a day.
    assert len([name for name in server.objects(place) if name.startswith("commits/")]) == 5
    compact_at(place, 0)
    assert len([name for name in server.objects(place) if name.startswith("commits/")]) == 1
