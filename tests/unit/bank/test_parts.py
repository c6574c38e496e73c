"""Banks in parts, in folders and in an object store: commits, races, crashes, damage, the cache."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from object_server import BUCKET, ObjectServer
from stored_banks import META, OTHER, append, facts, memory_of, text_of

from sedem import Document, MemoryBank
from sedem.bank import buckets, database
from sedem.bank.file import MANIFEST, BankFile
from sedem.bank.parts import Parts
from sedem.errors import BankError, ConfigError

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
    with made.creating(META) as file:
        append(file, 1)
    for number in (2, *more):
        append(made, number)
    return made


def names(parts: Parts) -> list[str]:
    return MemoryBank.open_from(parts).documents.names


def objects(parts: Parts) -> set[str]:
    return {name for name, _, _ in parts.bucket.entries() if name.endswith("bank")}


# Commits


def test_a_bank_is_made_once(place: str | Path) -> None:
    with pytest.raises(BankError, match=f"bank '{place}' does not exist; create it"):
        Parts(place).meta()
    with pytest.raises(BankError, match="exists already"), Parts(place).creating(META) as file:
        append(file, 1)
        with Parts(place).creating(META):
            pass
    assert names(Parts(place)) == []


def test_documents_are_replaced_in_their_parts_only(parts: Parts) -> None:
    append(parts, 3, 4)
    before = parts.files()
    append(parts, 3, version=1)
    assert parts.files()[:2] == before[:2] and parts.manifest().commit == 4
    append(parts, 2, 4)
    assert parts.manifest().commit == 4, "nothing has changed"
    parts.remove(*names(parts))
    append(parts, 5)
    assert len(parts.files()) == 1


def test_parts_of_workers_are_committed(parts: Parts, tmp_path: Path) -> None:
    entries = []
    for number in (3, 4):
        file = BankFile(tmp_path / f"{number}.bank")
        with file.creating(META):
            append(file, number)
        append(file, 1, version=number)
        entries.append(pickle.loads(pickle.dumps(parts)).publish(file))
    for entry in (*entries, entries[1]):
        parts.commit([entry], ["1.txt"])
    assert names(parts) == ["2.txt", "3.txt", "4.txt", "1.txt"] and parts.manifest().commit == 4


def test_readers_keep_what_they_have_opened(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    bank = MemoryBank.open_from(parts)
    sent, before = pickle.dumps(bank.snapshot()), bank.snapshot()
    parts.remove("1.txt")
    append(parts, 3)
    parts.compact()
    assert bank.documents[0] == Document("1.txt", text_of(1))
    bank.reload()
    assert bank.snapshot().views[0] is before.views[1]
    monkeypatch.setenv("SEDEM_CACHE", str(Path(os.environ["SEDEM_CACHE"], "another machine")))
    assert torch.equal(pickle.loads(sent).memory([0, 1]), memory_of(1))
    report = parts.compact(NOW)
    assert report.bytes_before > report.bytes_after > 0
    monkeypatch.setenv("SEDEM_CACHE", str(Path(os.environ["SEDEM_CACHE"], "and another")))
    with pytest.raises(BankError, match=r"is missing or damaged; open the bank again if it was"):
        pickle.loads(sent).memory([0])


@pytest.mark.parametrize("is_new", [False, True])
def test_a_build_is_one_part_and_is_resumed(
    place: str | Path, is_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "WAIT", 0.1)
    parts = Parts(place) if is_new else filled(place)
    with suppress(RuntimeError), parts.building(META) as file:
        append(file, 3)
        append(file, 2)
        raise RuntimeError
    again = Parts(place)
    assert again.exists() != is_new
    with again.building(META) as file:
        assert [*file.digests()] == ["3.txt", "2.txt"]
        append(file, 4)
        busy = pytest.raises(BankError, match="is being written by another process")
        with busy, Parts(place).building(META):
            pass
    assert names(again) == (["3.txt", "2.txt"] if is_new else ["1.txt", "2.txt", "3.txt"]) + [
        "4.txt"
    ]
    assert len(again.files()) == (1 if is_new else 3)
    with again.building(META) as file:
        assert not file.digests()
    assert again.manifest().commit == (1 if is_new else 3)


# Races and crashes


def test_every_append_of_two_writers_is_there(parts: Parts) -> None:
    def write(writer: int) -> None:
        for number in range(3):
            append(Parts(str(parts)), 100 * writer + number, 7, version=writer)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, (1, 2)))
    assert {*names(parts)} == {f"{n}.txt" for n in (1, 2, 7, 100, 101, 102, 200, 201, 202)}
    assert len(names(parts)) == 9


def test_another_writer_may_delete_its_files_while_links_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, scan = Parts(str(tmp_path / "bank")), os.scandir
    gone = tmp_path / "bank" / ".work" / "other"
    gone.mkdir(parents=True)

    def vanishing(path: Any) -> Any:
        if Path(path) == gone:
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    assert parts.work == gone.parent
    (gone.parent / "link").symlink_to(tmp_path)
    with pytest.raises(BankError, match="is a link, which could lead anywhere"):
        _ = parts.work


def test_a_writer_that_always_loses_gives_up(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loses nothing of the others, and its next attempt succeeds."""
    loser, numbers = Parts(str(parts)), itertools.count(10)
    real = loser.bucket.replace

    def late(*what: Any) -> Any:
        append(parts, next(numbers))
        return real(*what)

    with monkeypatch.context() as patch:
        patch.setattr(database, "WAIT", 0.0)
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

    for change in (lambda: append(parts, 3), lambda: append(parts, 2, version=1)):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(parts.bucket, "replace", die)
            change()
        assert names(Parts(str(parts))) == ["1.txt", "2.txt"]
    listed, left = {entry.name for entry in parts.manifest().parts}, objects(parts)
    parts.compact()
    assert objects(parts) == left > listed
    parts.compact(NOW)
    assert objects(parts) == listed


# Parts from anybody


HOSTILE: list[tuple[str, Any, str]] = [
    ("parts.1.sha256", "../../etc/passwd", r"parts\[1\]\.sha256"),
    ("parts.1.sha256", "0" * 64 + "\n", r"parts\[1\]\.sha256"),
    ("parts.1.head.blocks", 2**61, "cannot hold what it is said to hold"),
    ("parts.1.head.tokens", 2**62, "cannot hold"),
    ("parts.1.meta.slots", 2**40, "cannot hold"),
    ("parts.1.meta.fingerprint", OTHER, "parts differ in their model"),
    ("parts.1.meta.texts", False, "texts is False; input should be True"),
    ("parts.1.other", 1, "other is 1; extra inputs"),
    ("parts", [], "parts is .*; tuple should have"),
    ("format", 2, "format is 2; .*use the sedem that wrote it"),
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
    for damaged in (b"", b"[]", b"[" * 100_000, b"\xff", b"[" + b" " * buckets.LIMIT):
        path.write_bytes(damaged)
        with pytest.raises(BankError, match=r"manifest of bank '.*' is damaged|at most .* read"):
            MemoryBank.open(tmp_path)


@pytest.mark.parametrize("kind", ["link", "cut", "pipe", "gone", "manifest"])
def test_what_is_no_part_is_not_opened(kind: str, tmp_path: Path) -> None:
    parts = filled(tmp_path / "parts")
    name = MANIFEST if kind == "manifest" else parts.manifest().parts[1].name
    path = tmp_path / "parts" / name
    moved = path.rename(tmp_path / "elsewhere.bank")
    if kind == "link":
        path.symlink_to(moved)
    elif kind == "cut":
        path.write_bytes(moved.read_bytes()[:-1])
    elif kind != "gone":
        os.mkfifo(path)
    with pytest.raises(BankError, match=r"is missing or damaged|is a link, or not a file"):
        MemoryBank.open_from(Parts(tmp_path / "parts")).memory([2])


# The cache


@pytest.fixture
def stored(server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parts:
    """A bank of documents 1 to 4 in an object store, of which this machine has no copy."""
    place = str(filled(server.place(), 3, 4))
    monkeypatch.setenv("SEDEM_CACHE", str(tmp_path / "here"))
    return Parts(place)


def copies(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "here").glob("banks/*")}


def copy_of(parts: Parts, number: int) -> str:
    return parts.manifest().parts[number - 1].name


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
    words = f"part '{place}/{name}' is missing or damaged"
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
    documents = MemoryBank.open(str(stored)).documents
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
    assert len(bank) == 8 and bank.tokens > 0 and not copies(tmp_path)
    with stored.files()[0].reading() as connection:
        for start in (2, 4, 6):
            bank.part(range(start, start + 2)).memory([0])
        assert copies(tmp_path) == {copy_of(stored, 3), copy_of(stored, 4)}
        assert len(connection.execute("SELECT memory FROM blocks").fetchall()) == 2
    assert torch.equal(bank.memory([0, 1]), memory_of(1))
    assert copies(tmp_path) == {copy_of(stored, 1), copy_of(stored, 4)}
    monkeypatch.setenv("SEDEM_CACHE_BYTES", "1 GB")
    with pytest.raises(ConfigError, match="SEDEM_CACHE_BYTES is '1 GB'; give a number of bytes"):
        facts(Parts(str(stored)))


def test_what_is_wrong_with_the_store_is_named(
    server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("s3://", "s3://bucket", "s3:///folder", "ftp://bucket/folder"):
        with pytest.raises(BankError, match=f"'{place}' is not a place in .*s3://BUCKET/FOLDER"):
            Parts(place)
    nobody = Parts("s3://nobody-has-this/bank")
    assert not nobody.exists()
    with pytest.raises(BankError, match=r"cannot be used .*; check its"), nobody.creating(META):
        pass
    monkeypatch.setitem(buckets._RETRIES, "max_retries", 0)
    monkeypatch.setenv("AWS_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(BankError, match=r"cannot be used .*the network, and the credentials in"):
        Parts(f"s3://{BUCKET}/x").exists()
    monkeypatch.setattr(buckets, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs obstore; run pip install 'sedem\[scale\]'"):
        Parts(f"s3://{BUCKET}/x")
