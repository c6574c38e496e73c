"""A bank in an object store: commits, races, crashes, readers and its cache."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from object_server import ObjectServer
from stored_banks import META, OTHER, append, facts, memory_of, text_of

from sedem import Document, MemoryBank
from sedem.bank.store import object_commits, object_store
from sedem.bank.store.object_commits import Commit
from sedem.bank.store.object_store import ObjectStore
from sedem.errors import BankError, BankMismatchError, UnknownDocumentError

NOW = timedelta()


@pytest.fixture
def store(server: ObjectServer, tmp_path: Path) -> ObjectStore:
    """A store whose bank holds document 1."""
    made = ObjectStore(server.place(), tmp_path / "cache")
    with made.creating(META) as unfinished:
        append(unfinished, 1)
    return made


def again(store: ObjectStore, cache: Path) -> ObjectStore:
    """The store of another machine: its cache is empty."""
    return ObjectStore(store.url, cache)


def test_a_bank_is_written_and_read(store: ObjectStore, tmp_path: Path) -> None:
    append(store, 2, 3)
    store.remove("1.txt")
    found = facts(again(store, tmp_path / "other"))
    assert [name for name, *_ in found] == ["2.txt", "3.txt"]
    assert found[0][1] == text_of(2)
    assert torch.equal(found[0][3], memory_of(2))
    assert store.verify() == []


def test_there_is_no_bank_before_it_is_complete(server: ObjectServer, tmp_path: Path) -> None:
    store = ObjectStore(server.place(), tmp_path)
    assert not store.exists()
    with pytest.raises(BankError, match=r"there is no bank 's3://.*sedem build"):
        store.open()
    with pytest.raises(RuntimeError), store.creating(META) as unfinished:
        append(unfinished, 1)
        raise RuntimeError
    assert server.objects(store.url) == {}
    with store.creating(META):
        pass
    assert store.exists()
    with pytest.raises(BankError, match="exists already"), store.creating(META):
        pass


def test_a_bank_is_created_once(server: ObjectServer, tmp_path: Path) -> None:
    place = server.place()
    one, other = ObjectStore(place, tmp_path / "1"), ObjectStore(place, tmp_path / "2")
    with (
        pytest.raises(BankError, match="exists already"),
        one.creating(META) as unfinished,
    ):
        append(unfinished, 1)
        with other.creating(META) as first:
            append(first, 2)
    assert [name for name, *_ in facts(one)] == ["2.txt"]


def test_a_store_without_conditions_is_refused(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise two writers would both believe that they have made the next commit."""
    store = ObjectStore(server.place(), tmp_path)

    def create(name: str, content: bytes) -> bool:
        store.bucket.write(name, content)
        return True

    monkeypatch.setattr(store.bucket, "create", create)
    with pytest.raises(BankError, match="ignores conditions"), store.creating(META):
        pass
    assert not store.exists()


def test_another_model_is_refused(store: ObjectStore) -> None:
    with pytest.raises(BankMismatchError, match=f"bank '{store.url}'"):
        append(store, 2, fingerprint=OTHER)
    with pytest.raises(UnknownDocumentError, match=f"'{store.url}' has no document 'x'"):
        store.remove("x")
    assert store.commit().number == 1


def test_an_append_that_changes_nothing_is_no_commit(store: ObjectStore) -> None:
    append(store, 1)
    assert store.commit().number == 1


def test_a_commit_uploads_what_it_adds(store: ObjectStore, server: ObjectServer) -> None:
    """Shards and parts of the catalog that are there already are not written again."""
    append(store, *range(10, 14), characters=2 * object_commits.PART)
    before = {*server.objects(store.url)}
    written: list[str] = []
    server.before_put.append(written.append)
    append(store, 2)
    server.before_put.clear()
    new = {*server.objects(store.url)} - before
    assert len(written) == len(new)
    assert len([name for name in new if name.startswith("shards/")]) == 1
    assert len([name for name in new if name.startswith("catalog/")]) < len(store.commit().parts)


def test_readers_keep_the_commit_that_they_have_opened(store: ObjectStore, tmp_path: Path) -> None:
    append(store, 2)
    reader = MemoryBank.open_from(again(store, tmp_path / "other"))
    assert torch.equal(reader.memory([0, 1]), memory_of(1))
    store.remove("1.txt")
    store.compact()
    assert reader.documents[0] == Document("1.txt", text_of(1))
    # Its objects are kept for a day, so what was not downloaded yet can be read too.
    assert torch.equal(reader.memory([2, 3]), memory_of(2))
    reader.reload()
    assert list(reader.documents.names) == ["2.txt"]
    assert torch.equal(reader.memory([0, 1]), memory_of(2))


def test_reloading_reads_only_what_is_new(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = MemoryBank.open_from(again(store, tmp_path / "other"))
    piece, contents = reader.pieces[0], reader.contents
    reader.reload()
    assert reader.contents is contents
    append(store, 2)
    reader.reload()
    assert reader.pieces[0] is piece and len(reader.pieces) == 2


def test_every_append_of_two_writers_is_there(store: ObjectStore, tmp_path: Path) -> None:
    """Two machines append at the same time; whoever loses a race appends again."""
    failed: list[BaseException] = []

    def write(machine: int) -> None:
        try:
            other = ObjectStore(store.url, tmp_path / str(machine), wait=60)
            for number in range(6):
                append(other, 100 * machine + number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=(machine,)) for machine in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    names = {name for name, *_ in facts(store)}
    assert names == {"1.txt", *(f"{100 * m + n}.txt" for m in (1, 2) for n in range(6))}
    assert store.commit().number == 13
    assert store.verify() == []


def test_a_writer_that_always_loses_is_refused(
    store: ObjectStore, server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "ATTEMPTS", 3)
    loser, numbers = again(store, tmp_path / "other"), iter(range(10, 99))

    def faster(name: str) -> None:
        if "/commits/" in name or name.startswith("commits/"):
            server.before_put.clear()
            append(store, next(numbers))
            server.before_put.append(faster)

    server.before_put.append(faster)
    with pytest.raises(BankError, match=f"'{store.url}' is being written by another process"):
        append(loser, 2)
    server.before_put.clear()
    assert [name for name, *_ in facts(store)] == ["1.txt", "10.txt", "11.txt", "12.txt"]
    append(loser, 2)
    assert "2.txt" in [name for name, *_ in facts(store)]


def test_an_answer_that_was_lost_is_no_lost_race(
    store: ObjectStore, server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store made the commit, but the client had to ask again."""
    create = store.bucket.create

    def twice(name: str, content: bytes) -> bool:
        assert create(name, content)
        return create(name, content)

    monkeypatch.setattr(store.bucket, "create", twice)
    append(store, 2)
    assert store.commit().number == 2
    assert len(facts(store)) == 2


def test_a_writer_that_slept_too_long_does_not_commit_into_the_past(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit's number was given to others, and their commits were cleared away since."""
    sleeper = again(store, tmp_path / "other")
    publish = object_commits.publish

    def late(bucket: object, commit: Commit) -> str:
        monkeypatch.undo()
        for number in range(10, 14):
            append(store, number)
        store.compact(NOW)
        return publish(sleeper.bucket, commit)

    monkeypatch.setattr("sedem.bank.store.object_writing.create", late)
    append(sleeper, 2)
    names = [name for name, *_ in facts(store)]
    assert names == ["1.txt", "10.txt", "11.txt", "12.txt", "13.txt", "2.txt"]
    assert store.verify() == []


def test_a_bank_that_was_made_again_is_seen(
    store: ObjectStore, server: ObjectServer, tmp_path: Path
) -> None:
    reader = MemoryBank.open_from(again(store, tmp_path / "other"))
    for name in server.objects(store.url):
        server.delete(store.url, name)
    with again(store, tmp_path / "third").creating(META) as unfinished:
        append(unfinished, 7)
    reader.reload()
    assert list(reader.documents.names) == ["7.txt"]
    append(store, 8)
    assert [name for name, *_ in facts(store)] == ["7.txt", "8.txt"]


def test_compacting_merges_shards_and_answers_stay(store: ObjectStore, tmp_path: Path) -> None:
    append(store, 2)
    append(store, 3)
    store.remove("2.txt")
    before = facts(store)
    report = store.compact(NOW)
    assert (report.shards_before, report.shards_after) == (3, 1)
    assert report.bytes_after < report.bytes_before
    after = facts(again(store, tmp_path / "other"))
    assert [one[:3] for one in after] == [one[:3] for one in before]
    assert all(torch.equal(a[3], b[3]) for a, b in zip(after, before, strict=True))


def test_compacting_leaves_nothing_that_the_bank_does_not_need(
    store: ObjectStore, server: ObjectServer
) -> None:
    append(store, 2)
    store.remove("1.txt")
    # A writer that was killed before its commit leaves these.
    server.put(store.url, f"shards/{'0' * 64}.safetensors", b"lost")
    server.put(store.url, f"catalog/{'0' * 64}", b"lost")
    store.compact()
    assert f"catalog/{'0' * 64}" in server.objects(store.url)
    store.compact(NOW)
    commit = store.commit()
    assert {*server.objects(store.url)} == {commit.name, *commit.objects}
    assert store.verify() == []
    assert facts(store)[0][1] == text_of(2)


@pytest.mark.parametrize("stop", ["shards/", "catalog/", "commits/"])
def test_a_killed_writer_leaves_the_bank_as_it_was(
    store: ObjectStore, server: ObjectServer, tmp_path: Path, stop: str
) -> None:
    class Killed(BaseException):
        pass

    killed = again(store, tmp_path / "other")
    write, create = killed.bucket.write, killed.bucket.create

    def dying(name: str, content: bytes | Path) -> None:
        write(name, content)
        if name.startswith(stop):
            raise Killed

    def dying_before(name: str, content: bytes) -> bool:
        raise Killed if stop == "commits/" else AssertionError(create)

    killed.bucket.write = dying  # type: ignore[method-assign]
    killed.bucket.create = dying_before  # type: ignore[method-assign]
    with pytest.raises(Killed):
        append(killed, 2)
    assert [name for name, *_ in facts(again(store, tmp_path / "third"))] == ["1.txt"]
    assert store.verify() == []
    append(store, 3)
    store.compact(NOW)
    commit = store.commit()
    assert {*server.objects(store.url)} == {commit.name, *commit.objects}
    # The process goes on after all, for example because only a thread had died.
    killed = again(store, tmp_path / "other")
    append(killed, 2)
    assert [name for name, *_ in facts(store)] == ["1.txt", "3.txt", "2.txt"]
