"""Files of a bank in an object store on local disk, and what can go wrong on the way to it."""

from __future__ import annotations

import gc
import pickle
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from object_server import BUCKET, ObjectServer
from stored_banks import META, append, facts, memory_of, text_of

from sedem import MemoryBank
from sedem.bank.store import object_bucket
from sedem.bank.store.catalog import CATALOG
from sedem.bank.store.object_commits import Commit, shard_name
from sedem.bank.store.object_store import ObjectStore
from sedem.errors import BankError, ConfigError


@pytest.fixture
def store(server: ObjectServer, tmp_path: Path) -> ObjectStore:
    """A store whose bank holds documents 1 and 2, in two shards."""
    made = ObjectStore(server.place(), tmp_path / "cache")
    with made.creating(META) as unfinished:
        append(unfinished, 1)
        append(unfinished, 2)
    return made


def files(folder: Path) -> list[Path]:
    """The shards in some caches."""
    return sorted(folder.rglob("*.safetensors"))


def shard_of(store: ObjectStore, number: int) -> str:
    """Name of the object that holds the memory of a document."""
    bank = MemoryBank.open_from(store)
    index = list(bank.documents.names).index(f"{number}.txt")
    piece = bank.pieces[int(bank.places[2 * index, 0])]
    return shard_name(piece.stored.row.sha256)  # type: ignore[attr-defined]


# The cache


def test_a_shard_is_downloaded_once_when_it_is_used(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ObjectStore(store.url, tmp_path / "other")
    bank = MemoryBank.open_from(other)
    assert files(tmp_path / "other") == []
    assert torch.equal(bank.memory([2, 3]), memory_of(2))
    assert len(files(tmp_path / "other")) == 1
    # Another process of this machine needs nothing but to look for the newest commit.
    again = ObjectStore(store.url, tmp_path / "other")
    monkeypatch.delattr(object_bucket.Bucket, "download")
    assert torch.equal(MemoryBank.open_from(again).memory([2, 3]), memory_of(2))


def test_what_was_written_need_not_be_downloaded(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(store, 3)
    monkeypatch.delattr(object_bucket.Bucket, "download")
    assert torch.equal(MemoryBank.open_from(store).memory(range(4, 6)), memory_of(3))


@pytest.mark.parametrize("how", ["changed", "cut", "gone"])
def test_a_damaged_cache_is_downloaded_again(store: ObjectStore, tmp_path: Path, how: str) -> None:
    facts(store)
    for path in files(tmp_path):
        content = path.read_bytes()
        if how == "changed":
            path.write_bytes(content[:-8] + bytes(8))
        elif how == "cut":
            path.write_bytes(content[:50])
        else:
            path.unlink()
    again = ObjectStore(store.url, tmp_path / "cache")
    assert torch.equal(facts(again)[1][3], memory_of(2))


def test_a_damaged_catalog_in_the_cache_is_downloaded_again(
    store: ObjectStore, tmp_path: Path
) -> None:
    facts(store)
    (path,) = (tmp_path / "cache").rglob(f"commits/*/{CATALOG}")
    content = path.read_bytes()
    again = ObjectStore(store.url, tmp_path / "cache")
    for damaged in (b"?" * 4096 + content[4096:], content.replace(b"1.txt", b"7.txt"), b""):
        path.write_bytes(damaged)
        assert [one[:2] for one in facts(again)] == [("1.txt", text_of(1)), ("2.txt", text_of(2))]
        assert path.read_bytes() == content


def test_the_cache_keeps_its_limit(store: ObjectStore, tmp_path: Path) -> None:
    """The shard that was used longest ago goes; who has it open keeps it."""
    for number in (3, 4):
        append(store, number)
    size = files(tmp_path / "cache")[0].stat().st_size
    small = ObjectStore(store.url, tmp_path / "small", limit=2 * size)
    bank = MemoryBank.open_from(small)
    for number in range(4):
        assert torch.equal(bank.memory(range(2 * number, 2 * number + 2)), memory_of(number + 1))
        time.sleep(0.01)
    assert len(files(tmp_path / "small")) == 2
    assert torch.equal(bank.memory([0, 1]), memory_of(1))
    names = {path.name for path in files(tmp_path / "small")}
    assert shard_of(small, 4).removeprefix("shards/") in names


def test_catalogs_are_kept_while_somebody_reads_them(store: ObjectStore, tmp_path: Path) -> None:
    reader = MemoryBank.open_from(ObjectStore(store.url, tmp_path / "cache"))
    append(store, 3)
    newer = MemoryBank.open_from(store)

    def commits() -> list[int]:
        found = (tmp_path / "cache").rglob(f"commits/*/{CATALOG}")
        return sorted(int(path.parent.name.split("-")[0]) for path in found)

    assert commits() == [1, 2]
    assert reader.documents[0].text == text_of(1)
    reader.reload()
    # Documents and their reader of sources refer to each other.
    gc.collect()
    append(store, 4)
    newer.reload()
    assert commits() == [2, 3]


def test_files_of_a_process_go_with_it(store: ObjectStore, tmp_path: Path) -> None:
    other = ObjectStore(store.url, tmp_path / "other")
    append(other, 3)
    (work,) = (tmp_path / "other").glob("*/work")
    (left,) = work.iterdir()
    # A killed process holds no lock any more.
    killed = work / "killed"
    killed.mkdir()
    (killed / "IN_USE").touch()
    append(ObjectStore(store.url, tmp_path / "other"), 4)
    assert left.exists() and not killed.exists()
    del other
    assert not left.exists()


def test_a_snapshot_can_be_sent_to_another_machine(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEDEM_CACHE", str(tmp_path / "here"))
    snapshot = MemoryBank.open_from(ObjectStore(store.url)).snapshot()
    sent = pickle.dumps(snapshot)
    monkeypatch.setenv("SEDEM_CACHE", str(tmp_path / "there"))
    found = pickle.loads(sent)
    assert found.documents[1].text == text_of(2)
    assert torch.equal(found.memory([2, 3]), memory_of(2))
    assert files(tmp_path / "there") and not files(tmp_path / "here")


def test_a_cache_that_cannot_be_written_is_named(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    other = ObjectStore(store.url, tmp_path / "file")
    with pytest.raises(BankError, match=r"the cache '.*' cannot be written .*set SEDEM_CACHE"):
        other.open()


# Damage in the store


def test_damaged_objects_are_named(
    store: ObjectStore, server: ObjectServer, tmp_path: Path
) -> None:
    name = shard_of(store, 2)
    content = server.objects(store.url)[name]
    server.put(store.url, name, content[:-1] + bytes([content[-1] ^ 1]))
    (problem,) = store.verify()
    assert "its SHA-256 differs" in problem and "it affects '2.txt'" in problem
    other = MemoryBank.open_from(ObjectStore(store.url, tmp_path / "other"))
    with pytest.raises(BankError, match=f"'{store.url}/{name}' is damaged"):
        other.memory([2])
    assert torch.equal(other.memory([0, 1]), memory_of(1))
    server.delete(store.url, name)
    (problem,) = store.verify()
    assert "is missing; it affects '2.txt'" in problem
    with pytest.raises(BankError, match=f"'{store.url}/{name}' is missing; open the bank again"):
        other.memory([2])
    # The damaged document can be removed, and what is left can be compacted.
    again = ObjectStore(store.url, tmp_path / "third")
    again.remove("2.txt")
    again.compact()
    assert again.verify() == []


@pytest.mark.parametrize("how", ["changed", "gone"])
def test_a_damaged_part_of_the_catalog_is_named(
    store: ObjectStore, server: ObjectServer, tmp_path: Path, how: str
) -> None:
    (name,) = (name for name in server.objects(store.url) if name.startswith("catalog/"))
    if how == "gone":
        server.delete(store.url, name)
    else:
        server.put(store.url, name, b"?" + server.objects(store.url)[name][1:])
    what = "missing" if how == "gone" else "damaged"
    with pytest.raises(BankError, match=f"'{store.url}/{name}' is {what}"):
        ObjectStore(store.url, tmp_path / "other").open()
    assert what in store.verify()[0]


def test_a_damaged_commit_is_named(
    store: ObjectStore, server: ObjectServer, tmp_path: Path
) -> None:
    commit = store.commit()
    content = commit.content()
    evil = replace(commit, shards=("../" * 20 + "etc",))
    for damaged in (
        b"",
        b"{}",
        content[:-10],
        content.replace(b'"number": 1', b'"number": 2'),
        replace(commit, number=7).content(),
        replace(commit, size=-1).content(),
        evil.content(),
    ):
        server.put(store.url, commit.name, damaged)
        with pytest.raises(BankError, match=f"the commit '{store.url}/{commit.name}' is damaged"):
            ObjectStore(store.url, tmp_path / "other").open()


def test_another_format_is_named(
    store: ObjectStore, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit: Commit = store.commit()
    with monkeypatch.context() as patch:
        patch.setattr("sedem.bank.store.object_commits.FORMAT", 2)
        server.put(store.url, commit.name, commit.content())
    with pytest.raises(BankError, match="format 2 of object stores, this sedem reads 1"):
        ObjectStore(store.url, tmp_path / "other").open()


# On the way to the store


@pytest.mark.parametrize(
    "place", ["s3://", "s3://bucket", "s3:///folder", "ftp://bucket/folder", "file:///tmp/bank"]
)
def test_a_place_that_cannot_hold_a_bank_is_named(place: str, tmp_path: Path) -> None:
    with pytest.raises(BankError, match=f"'{place}' is not a place in .*s3://BUCKET/FOLDER"):
        ObjectStore(place, tmp_path)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_bucket, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs obstore; run pip install 'sedem\[scale\]'"):
        ObjectStore("s3://bucket/folder", tmp_path)


def test_a_missing_bucket_is_named(server: ObjectServer, tmp_path: Path) -> None:
    store = ObjectStore("s3://nobody-has-this/bank", tmp_path)
    for use in (store.open, store.exists, lambda: store.creating(META).__enter__()):
        with pytest.raises(BankError, match="there is no bucket 'nobody-has-this' for 's3://"):
            use()


def test_wrong_credentials_are_named(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0)
    with pytest.raises(BankError, match="refuses these credentials; check AWS_ACCESS_KEY_ID"):
        ObjectStore(server.place(), tmp_path).exists()


def test_missing_credentials_are_named(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(BankError, match=f"no credentials for 's3://{BUCKET}/x'; set AWS_ACCESS"):
        ObjectStore(f"s3://{BUCKET}/x", tmp_path).exists()


def test_a_store_that_cannot_be_reached_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: ObjectServer
) -> None:
    monkeypatch.setattr(object_bucket, "_RETRIES", 1)
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(BankError, match="cannot be reached; check the network and AWS_ENDPOINT"):
        ObjectStore("s3://bucket/bank", tmp_path).exists()
