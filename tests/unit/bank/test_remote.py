"""Banks in parts, in folders and in an object store: commits, races, crashes, damage, the cache."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from object_server import BUCKET, ObjectServer
from stored_banks import META, OTHER, PRINT, append, facts, memory_of, same, text_of

from sedem import Document, MemoryBank
from sedem.bank import buckets, remote
from sedem.bank.blocks import Blocks
from sedem.bank.buckets import Bucket
from sedem.bank.file import BankFile
from sedem.bank.manifest import MANIFEST
from sedem.bank.remote import Parts
from sedem.errors import BankError, BankMismatchError, ConfigError, UnknownDocumentError
from sedem.quantization import Quantized

NOW = timedelta()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "cache").symlink_to("real")
    monkeypatch.setenv("SEDEM_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=["folder", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path, server: ObjectServer) -> str | Path:
    return tmp_path / "parts" if request.param == "folder" else server.place()


@pytest.fixture
def parts(place: str | Path) -> Parts:
    """A bank of documents 1 and 2, one part each."""
    return filled(place)


def filled(place: str | Path, *more: int) -> Parts:
    made = Parts(place)
    with made.creating(META):
        append(made, 1)
    for number in (2, *more):
        append(made, number)
    return made


def names(parts: Parts) -> list[str]:
    return MemoryBank.open_from(parts).documents.names


def objects(parts: Parts) -> set[str]:
    return {one.name for one in parts.bucket.entries() if one.name.endswith("bank")}


# Commits


def test_a_bank_appears_when_it_is_complete(place: str | Path) -> None:
    parts = Parts(place)
    with pytest.raises(BankError, match=f"bank '{place}' does not exist; create it"):
        parts.meta()
    with suppress(RuntimeError), parts.creating(META):
        raise RuntimeError
    with pytest.raises(BankError, match="exists already"), parts.creating(META):
        append(parts, 1)
        assert not Parts(place).exists()
        with Parts(place).creating(META):
            append(parts, 2)
    assert parts.meta() == META and names(parts) == []


def test_documents_are_replaced_and_removed_in_their_parts_only(parts: Parts) -> None:
    append(parts, 3, 4)
    before = parts.files()
    append(parts, 3, version=1)
    after = parts.files()
    assert names(parts) == ["1.txt", "2.txt", "4.txt", "3.txt"] and after[:2] == before[:2]
    assert facts(parts)[3][1] == text_of(1003) and torch.equal(facts(parts)[3][3], memory_of(1003))
    parts.remove("1.txt", "3.txt")
    assert names(parts) == ["2.txt", "4.txt"] and parts.manifest().commit == 5
    with pytest.raises(UnknownDocumentError, match=r"has no document 'x'; it has 2\.txt, 4\.txt"):
        parts.remove("2.txt", "x")
    parts.remove("2.txt", "4.txt")
    assert names(parts) == [] and parts.meta() == META
    append(parts, 5)
    assert names(parts) == ["5.txt"] and len(parts.files()) == 1


def test_what_changes_nothing_is_no_commit(parts: Parts) -> None:
    append(parts, 1, 2)
    with pytest.raises(BankMismatchError, match=f"bank '{parts}' was built by model"):
        append(parts, 3, fingerprint=OTHER)
    with suppress(RuntimeError), parts.writing():
        append(parts, 3)
        raise RuntimeError
    assert parts.manifest().commit == 2


def test_parts_of_workers_are_committed(parts: Parts, tmp_path: Path) -> None:
    entries = []
    for number in (3, 4):
        file = BankFile(tmp_path / f"{number}.bank")
        with file.creating(META):
            append(file, number)
        append(file, 1, version=number)
        entries.append(pickle.loads(pickle.dumps(parts)).publish(tmp_path / f"{number}.bank"))
    for entry in (*entries, entries[1]):
        parts.commit([entry], ["1.txt"])
    assert names(parts) == ["2.txt", "3.txt", "4.txt", "1.txt"] and parts.manifest().commit == 4
    with pytest.raises(BankMismatchError):
        parts.commit([entry.model_copy(update={"meta": replace(META, fingerprint=OTHER)})])


def test_readers_keep_what_they_have_opened(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PART_BYTES", 0)
    bank = MemoryBank.open_from(parts)
    sent, before = pickle.dumps(bank.snapshot()), bank.snapshot()
    bank.reload()
    assert bank.snapshot() is before
    parts.remove("1.txt")
    append(parts, 3)
    parts.compact()
    assert bank.documents[0] == Document("1.txt", text_of(1))
    bank.reload()
    assert bank.documents.names == ["2.txt", "3.txt"]
    assert bank.snapshot().spans[0].view is before.spans[1].view
    monkeypatch.setenv("SEDEM_CACHE", str(Path(os.environ["SEDEM_CACHE"], "another machine")))
    assert torch.equal(pickle.loads(sent).memory([0, 1]), memory_of(1))
    parts.compact(NOW)
    monkeypatch.setenv("SEDEM_CACHE", str(Path(os.environ["SEDEM_CACHE"], "and another")))
    with pytest.raises(BankError, match=r"is missing or damaged .*; open the bank again if it was"):
        pickle.loads(sent).memory([0])


def test_compacting_merges_small_neighbours(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    append(parts, 3)
    append(parts, 4)
    before = facts(parts)
    monkeypatch.setattr(remote, "PART_BYTES", 2 * parts.manifest().parts[0].bytes)
    report = parts.compact(NOW)
    assert [file.head().documents for file in parts.files()] == [2, 2]
    assert (report.bytes_before, report.bytes_after) == (2 * parts.size, parts.size)
    assert same(facts(parts), before)
    assert objects(parts) == {entry.name for entry in parts.manifest().parts}


def test_a_long_document_is_resumed(parts: Parts) -> None:
    document, no = Document("long", text_of(7, 500)), np.zeros(6, np.int64)
    blocks = Blocks(no, np.arange(6), np.arange(1, 7), np.ones((6, 4), np.uint8))
    memory = Quantized(torch.cat([memory_of(number) for number in range(3)]))

    def add(store: BankFile | Parts, *starts: int) -> None:
        for start in starts:
            chosen = slice(start, start + 2)
            what = blocks.take(chosen), memory[chosen]
            store.append_part(PRINT, document, *what, before=start, last=start == 4)

    add(parts, 0, 2)
    again = Parts(parts.place)
    assert (again.unfinished(), again.stored_part(document)) == (["long"], 4)
    assert names(again) == ["1.txt", "2.txt"] and again.manifest().commit == 2
    with pytest.raises(BankError, match="another process has changed it; build again"):
        add(again, 0, 4)
    add(again, 2, 4)
    assert again.unfinished() == [] and not list((parts.work / "unfinished").iterdir())
    file = BankFile()
    with file.creating(META):
        append(file, 1, 2)
    add(file, 0, 2, 4)
    assert same(facts(again), facts(file)) and len(again.files()) == 3


# Races and crashes


def test_every_append_of_two_writers_is_there(parts: Parts) -> None:
    def write(writer: int) -> None:
        for number in range(3):
            append(Parts(parts.place), 100 * writer + number, 7, version=writer)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, (1, 2)))
    assert {*names(parts)} == {f"{n}.txt" for n in (1, 2, 7, 100, 101, 102, 200, 201, 202)}
    assert len(names(parts)) == 9


def test_a_writer_that_always_loses_gives_up(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loses nothing of the others, and its next attempt succeeds."""
    loser, numbers = Parts(parts.place, wait=0.0), itertools.count(10)
    real = loser.bucket.replace

    def late(*what: Any) -> Any:
        append(parts, next(numbers))
        return real(*what)

    with monkeypatch.context() as patch:
        patch.setattr(loser.bucket, "replace", late)
        for change in (lambda: append(loser, 3), lambda: loser.remove("1.txt")):
            with pytest.raises(BankError, match=f"'{parts}' is being written by another process"):
                change()
    append(loser, 3)
    assert names(parts) == ["1.txt", "2.txt", "10.txt", "11.txt", "3.txt"]


def test_a_writer_that_dies_before_its_commit_changes_nothing(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def die(*what: Any) -> Any:
        raise Killed

    for change in (lambda: append(parts, 3), lambda: append(parts, 2, version=1), parts.compact):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(parts.bucket, "replace", die)
            change()
        assert names(Parts(parts.place)) == ["1.txt", "2.txt"]
    listed, left = {entry.name for entry in parts.manifest().parts}, objects(parts)
    monkeypatch.setattr(remote, "PART_BYTES", 0)
    parts.compact()
    assert objects(parts) == left > listed
    parts.compact(NOW)
    assert objects(parts) == listed


def test_a_request_that_is_repeated_is_no_lost_race(server: ObjectServer) -> None:
    bucket = Bucket(server.place())
    assert bucket.replace("a", b"1", None) and bucket.replace("a", b"1", None)
    found = bucket.load("a")
    assert found is not None and not bucket.replace("a", b"2", None)
    assert bucket.replace("a", b"2", found[1]) and bucket.replace("a", b"2", found[1])
    assert not bucket.replace("a", b"3", found[1]) and bucket.read("a", 9) == b"2"


# Parts from anybody


HOSTILE: list[tuple[str, Any, str]] = [
    ("parts.1.name", "../../etc/passwd", r"parts\[1\]\.name"),
    ("parts.1.name", "0123456789abcdef.bank\n", r"parts\[1\]\.name"),
    ("parts.1.sha256", "0" * 64, "is not named by its SHA-256"),
    ("parts.1.head.blocks", 2**61, "cannot hold what it is said to hold"),
    ("parts.1.head.tokens", 2**62, "cannot hold"),
    ("parts.1.head.blocks", "2", "a whole number is needed"),
    ("parts.1.meta.slots", 2**40, "cannot hold"),
    ("parts.1.meta.dtype", "float64", "cannot hold"),
    ("parts.1.meta.width", 4, "parts differ in .* how they store memory"),
    ("parts.1.meta.fingerprint", OTHER, "parts differ in their model"),
    ("parts.1.other", 1, "unknown key 'other'"),
    ("parts", [], "parts is empty"),
    ("format", 2, "format is 2; .*use the sedem that wrote it"),
    ("commit", 10**400, "commit is"),
]


def test_a_manifest_that_cannot_be_true_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / MANIFEST
    content = (filled(tmp_path) and path).read_text()
    for key, value, words in HOSTILE:
        at = found = json.loads(content)
        *steps, last = (int(step) if step.isdecimal() else step for step in key.split("."))
        for step in steps:
            at = at[step]
        at[last] = value
        path.write_text(json.dumps(found))
        with pytest.raises(BankError, match=f"^the manifest of bank '{tmp_path}' is .*{words}"):
            MemoryBank.open(tmp_path)
    for damaged in (b"", b"[]", b"[" * 100_000, b"\xff", b"[" + b" " * 2**26):
        path.write_bytes(damaged)
        with pytest.raises(BankError, match=r"manifest of bank '.*' is damaged|at most .* read"):
            MemoryBank.open(tmp_path)


@pytest.mark.parametrize("kind", ["link", "cut", "pipe", "gone", "manifest"])
def test_what_is_no_part_is_not_opened(kind: str, tmp_path: Path) -> None:
    parts = filled(tmp_path / "parts")
    name = MANIFEST if kind == "manifest" else parts.manifest().parts[1].name
    path = tmp_path / "parts" / name
    moved = path.rename(tmp_path / "elsewhere.bank")
    if kind in ("link", "manifest"):
        path.symlink_to(moved)
    elif kind == "cut":
        path.write_bytes(moved.read_bytes()[:-1])
    elif kind == "pipe":
        os.mkfifo(path)
    with pytest.raises(BankError, match="is not a regular file"):
        MemoryBank.open_from(Parts(tmp_path / "parts")).memory([2])


# The cache


@pytest.fixture
def stored(server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parts:
    """A bank of documents 1 to 4 in an object store, of which this machine has no copy."""
    place = filled(server.place(), 3, 4).place
    monkeypatch.setenv("SEDEM_CACHE", str(tmp_path / "here"))
    return Parts(place)


def copies(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "here").glob("banks/*")}


def copy_of(parts: Parts, number: int) -> str:
    return f"{parts.manifest().parts[number - 1].sha256}.bank"


def test_a_part_is_downloaded_when_it_is_first_used(
    stored: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = MemoryBank.open_from(stored)
    assert len(bank) == 8 and bank.tokens > 0 and not copies(tmp_path)
    assert torch.equal(bank.snapshot().part(range(2, 4)).memory([0, 1]), memory_of(2))
    assert copies(tmp_path) == {copy_of(stored, 2)}
    monkeypatch.delattr(Bucket, "download")
    again = MemoryBank.open(stored.place).snapshot()
    assert torch.equal(again.part(range(2, 4)).memory([0, 1]), memory_of(2))


@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_a_damaged_object_is_rejected(
    how: str, stored: Parts, server: ObjectServer, tmp_path: Path
) -> None:
    place, name = str(stored), stored.manifest().parts[0].name
    content = server.objects(place)[name]
    server.put(place, name, content[:-1] + bytes([content[-1] ^ 1] if how == "flip" else []))
    if how == "gone":
        server.delete(place, name)
    bank = MemoryBank.open_from(stored)
    words = f"part '{place}/{name}' is missing or damaged .its size or SHA-256 differs"
    with pytest.raises(BankError, match=words):
        bank.memory([0])
    assert not copies(tmp_path)
    server.put(place, name, content)
    assert torch.equal(bank.memory([0, 1]), memory_of(1))


@pytest.mark.parametrize("how", ["flip", "header", "cut", "gone"])
def test_a_damaged_copy_is_downloaded_again(how: str, stored: Parts, tmp_path: Path) -> None:
    facts(stored)
    path = tmp_path / "here" / "banks" / copy_of(stored, 1)
    content = path.read_bytes()
    path.unlink()
    if how != "gone":
        flipped = content.replace(b"document 1 says", b"document 7 says")
        path.write_bytes({"flip": flipped, "header": b"?" + content[1:]}.get(how, content[:4096]))
    documents = MemoryBank.open(stored.place).documents
    if how in ("flip", "header"):
        with pytest.raises(BankError, match=f"the copy of '{stored}/.*' in the cache was damaged"):
            _ = documents[0]
    assert documents[0].text == text_of(1) and path.read_bytes() == content


def test_the_cache_keeps_its_budget(
    stored: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part that was used longest ago goes; who reads it is not disturbed."""
    monkeypatch.setenv("SEDEM_CACHE_BYTES", str(2 * stored.manifest().parts[0].bytes))
    bank = MemoryBank.open_from(stored).snapshot()
    with stored.files()[0].reading() as connection:
        for start in (2, 4, 6):
            bank.part(range(start, start + 2)).memory([0])
        assert copies(tmp_path) == {copy_of(stored, 3), copy_of(stored, 4)}
        assert len(connection.execute("SELECT memory FROM blocks").fetchall()) == 2
    assert torch.equal(bank.memory([0, 1]), memory_of(1))
    assert copies(tmp_path) == {copy_of(stored, 1), copy_of(stored, 4)}
    monkeypatch.setenv("SEDEM_CACHE_BYTES", "1 GB")
    with pytest.raises(ConfigError, match="SEDEM_CACHE_BYTES is '1 GB'; give a number of bytes"):
        facts(Parts(stored.place))


def test_what_cannot_be_written_is_named(
    stored: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(BankError, match=f"'{tmp_path}/file.*' cannot be written"):
        filled(tmp_path / "file")
    monkeypatch.setenv("SEDEM_CACHE", str(tmp_path / "file"))
    with pytest.raises(BankError, match=r"cannot be written .*; make room, or set SEDEM_CACHE"):
        MemoryBank.open(stored.place).memory([0])


# On the way to the store


@pytest.mark.parametrize("ignored", ["If-Match", "If-None-Match"])
def test_a_store_that_ignores_conditions_is_rejected(
    ignored: str, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, real = Parts(server.place()), Bucket.replace

    def careless(self: Bucket, name: str, content: bytes, tag: Any) -> bool:
        if (tag is None) == (ignored == "If-None-Match"):
            server.put(self.url, name, content)
            return True
        return real(self, name, content, tag)

    monkeypatch.setattr(Bucket, "replace", careless)
    with pytest.raises(BankError, match="ignores conditions"), parts.creating(META):
        pass
    assert not parts.exists()


def test_what_is_wrong_with_the_store_is_named(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def assert_named(words: str, place: str = f"s3://{BUCKET}/x") -> None:
        with pytest.raises((BankError, ConfigError), match=words):
            Parts(place).exists()

    for place in ("s3://", "s3://bucket", "s3:///folder", "ftp://bucket/folder"):
        assert_named(f"'{place}' is not a place in .*s3://BUCKET/FOLDER", place)
    assert_named("there is no bucket 'nobody-has-this' for 's3://", "s3://nobody-has-this/bank")
    with monkeypatch.context() as patch:
        patch.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0)
        assert_named("rejects these credentials; check AWS_ACCESS_KEY_ID")
    with monkeypatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        patch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
        assert_named(f"no credentials for 's3://{BUCKET}/x'; set AWS_ACCESS")
    monkeypatch.setitem(buckets._RETRIES, "max_retries", 1)
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    assert_named("cannot be reached; check the network, and AWS_ENDPOINT")
    monkeypatch.setattr(buckets, "find_spec", lambda name: None)
    assert_named(r"needs obstore; run pip install 'sedem\[scale\]'")
