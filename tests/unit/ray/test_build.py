"""A bank that the workers of a Ray cluster build is the one that this machine builds."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from importlib.metadata import version as version_of
from pathlib import Path
from threading import Thread

import psutil
import pyarrow as pa
import pytest
from conftest import LEASE, RECIPE
from object_server import ObjectServer
from pyarrow import parquet
from scale.building import differences, write_checkpoint
from scale.campaigns import local_cluster

from sedem import Document, MemoryBank, SeDeM
from sedem.bank.file import BankFile
from sedem.bank.parts import Parts
from sedem.errors import BankError, ConfigError, DataError, UnavailableError
from sedem.reading import building
from sedem_serve.ray import build
from sedem_serve.ray.build import Workers, build_on_ray, received
from sedem_serve.ray.sources import Sources

LONG = "\n\n".join([LEASE, RECIPE, LEASE[::-1], RECIPE.upper()])
SMALL = [f"Room {n} of the house has {n + 2} windows and a door to the yard." for n in range(40)]
COMMIT, PART = 600, 64


@pytest.fixture(scope="module")
def cluster(server: ObjectServer) -> Iterator[str]:
    """The address of a cluster with two CPUs, to which this process is connected.

    Its workers have the environment of this process, and so the credentials of the object store.
    """
    with local_cluster(2) as address:
        yield address


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def model(checkpoint: str) -> SeDeM:
    return SeDeM.from_pretrained(checkpoint)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "COMMIT", COMMIT)
    monkeypatch.setattr(building, "PART", PART)

    # Defined here, so that its code is sent to the workers.
    def encode(job: build.Job, documents: Sequence[Document]) -> object:
        building.COMMIT, building.PART = COMMIT, PART
        time.sleep(0.2)  # long enough to be killed
        return build.encode(job, documents)

    monkeypatch.setattr(build, "encode", encode)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small and long documents, as texts, JSON lines and parquet."""
    place = tmp_path_factory.mktemp("texts")
    (place / "b-long.txt").write_text(LONG)
    for number, text in enumerate(SMALL[:16]):
        (place / f"a{number:02d}.md").write_text(text)
    lines = [json.dumps({"name": f"line {n}", "text": text}) for n, text in enumerate(SMALL[16:32])]
    (place / "c.jsonl").write_text("\n".join(lines))
    rows = pa.table({"text": SMALL[32:], "other": range(8)})
    parquet.write_table(rows, place / "d.parquet")
    return place


@pytest.fixture
def alone(model: SeDeM, folder: Path, tmp_path: Path) -> Path:
    """The bank that this machine builds alone."""
    notes = [(str(folder / f"a{n:02d}.md"), text) for n, text in enumerate(SMALL[:16])]
    lines = [(f"line {n}", text) for n, text in enumerate(SMALL[16:32])]
    rows = [(f"{folder}/d.parquet#{n}", text) for n, text in enumerate(SMALL[32:], start=1)]
    texts = [*notes, (str(folder / "b-long.txt"), LONG), *lines, *rows]
    bank = tmp_path / "alone.bank"
    building.build_bank(model, model.engine, bank, [Document(*one) for one in texts])
    return bank


def committed(bank: Path) -> dict[str, int]:
    """The version that added each document."""
    with BankFile(bank).reading() as connection:
        return dict(connection.execute("SELECT name, added FROM documents WHERE added NOT NULL"))


def workers() -> list[psutil.Process]:
    """The processes of the encoders."""
    started = psutil.Process().children(recursive=True)
    return [process for process in started if "encode" in process.name()]


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_the_bank_is_the_one_of_this_machine_though_workers_are_killed(
    kills: int,
    cluster: str,
    checkpoint: str,
    model: SeDeM,
    folder: Path,
    alone: Path,
    tmp_path: Path,
) -> None:
    bank, seen, killed = tmp_path / "a.bank", [], set()

    def kill() -> None:
        while len(killed) < kills:
            for process in workers():
                killed.add(process.pid)
                process.kill()
            time.sleep(0.02)

    killer = Thread(target=kill, daemon=True)

    def note(*progress: float) -> None:
        seen.append(progress)
        if len(seen) == 1:
            killer.start()

    report = build_on_ray(model, Workers(cluster, checkpoint), bank, Sources([str(folder)]), note)
    # There are two workers, so more kills than that hit those that came after the first.
    assert len(killed) >= kills
    assert differences(bank, alone) == []
    assert committed(bank) == committed(alone)
    assert (report.added, report.documents) == (41, 41)
    assert len(seen) == BankFile(bank).head().version < 30, "small documents are read together"
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert all(done <= total and speed > 0 for done, total, speed in seen)
    # A bank that has all documents stays as it is.
    before = bank.read_bytes()
    report = build_on_ray(model, Workers(cluster, checkpoint), bank, Sources([str(folder)]))
    assert (report.added, report.unchanged) == (0, 41)
    assert bank.read_bytes() == before


@pytest.mark.slow
def test_a_bank_in_parts_is_extended_and_its_documents_replaced(
    cluster: str, checkpoint: str, model: SeDeM, folder: Path, alone: Path, tmp_path: Path
) -> None:
    bank, texts = tmp_path / "parts", tmp_path / "texts"
    with Parts(bank).creating(building.new_meta(model)):
        pass
    build_on_ray(model, Workers(cluster, checkpoint), bank, Sources([str(folder)]))
    assert differences(bank, alone) == []
    before = [part.name for part in Parts(bank).manifest().parts]
    assert len(before) == BankFile(alone).head().version

    texts.mkdir()
    (texts / "a.txt").write_text(SMALL[0])
    (texts / "b.jsonl").write_text(json.dumps({"name": "line 3", "text": "another text"}))
    report = build_on_ray(model, Workers(cluster, checkpoint), bank, Sources([str(texts)]))
    assert (report.added, report.replaced, report.documents) == (1, 1, 42)
    opened = MemoryBank.open(bank)
    assert opened.documents[-1] == Document("line 3", "another text")
    assert sorted(opened.documents.names) == sorted({*opened.documents.names})
    after = [part.name for part in Parts(bank).manifest().parts]
    assert len({*before} - {*after}) == 1, "other parts are not written again"


@pytest.mark.slow
def test_a_document_that_cannot_be_read_is_left_out_unless_it_is_strict(
    cluster: str, checkpoint: str, model: SeDeM, tmp_path: Path
) -> None:
    for name, text in zip("abc", SMALL, strict=False):
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "b.txt").write_bytes(b"\0\0")
    (tmp_path / "d.jsonl").write_text('{"text": "The key is blue."}\n{"title": "no text"}\n')
    bank = tmp_path / "a.bank"
    given = Sources([str(tmp_path)], strict=True)
    with pytest.raises(DataError, match=r"b\.txt' holds binary data"):
        build_on_ray(model, Workers(cluster, checkpoint), bank, given)
    assert [*MemoryBank.open(bank).documents.names] == [str(tmp_path / "a.txt")]
    given = Sources([str(tmp_path)])
    report = build_on_ray(model, Workers(cluster, checkpoint), bank, given)
    assert (report.added, report.unchanged) == (2, 1)
    assert [*MemoryBank.open(bank).documents.names][1:] == [
        str(tmp_path / "c.txt"),
        f"{tmp_path}/d.jsonl#1",
    ]
    binary, record = given.failed
    assert "b.txt' holds binary data" in binary
    assert record.endswith("d.jsonl', record 2 needs 'text', and 'name' if given, as strings")


@pytest.mark.slow
def test_a_worker_without_the_model_is_named(
    cluster: str, model: SeDeM, folder: Path, tmp_path: Path
) -> None:
    for workers, sentence in (
        (Workers(cluster, "/nowhere"), r"host '.*' of the cluster cannot open '/nowhere'"),
        (Workers(cluster, "x", cpus=99), r"no host of the cluster has a GPU or 99 CPUs"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            build_on_ray(model, workers, tmp_path / "a.bank", Sources([str(folder)]))
    assert not (tmp_path / "a.bank").exists()


def test_a_worker_that_cannot_be_used_is_named(
    checkpoint: str, model: SeDeM, tmp_path: Path
) -> None:
    version, fingerprint, nowhere = version_of("sedem"), model.fingerprint(), tmp_path / "nowhere"
    for given, sentence in (
        (("0.0", fingerprint, None), r"of the cluster has sedem .*, this machine has 0\.0"),
        ((version, "f" * 64, None), r"of the cluster has another model at "),
        ((version, fingerprint, nowhere), r"of the cluster cannot use bank.*does not exist there"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            build._opened(checkpoint, *given, None)
    assert not nowhere.exists()


@pytest.mark.slow
def test_a_piece_that_kills_every_worker_is_given_up(
    cluster: str,
    checkpoint: str,
    model: SeDeM,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def encode(job: build.Job, documents: Sequence[Document]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(build, "encode", encode)
    with pytest.raises(UnavailableError, match=r"4 workers died while they read '.*a00\.md'"):
        build_on_ray(
            model, Workers(cluster, checkpoint, most=1), tmp_path / "a.bank", Sources([str(folder)])
        )


def test_a_bank_that_was_damaged_on_the_way_is_rejected(alone: Path, tmp_path: Path) -> None:
    BankFile(alone).copy_to(tmp_path / "sent.bank")
    content = (tmp_path / "sent.bank").read_bytes()
    digest = sha256(content).hexdigest()
    assert received(content, digest).documents == MemoryBank.open(alone).documents
    damaged = content[:-100] + bytes([content[-100] ^ 1]) + content[-99:]
    with pytest.raises(BankError, match="damaged between a worker and this machine"):
        received(damaged, digest)


@pytest.mark.slow
def test_sources_and_bank_may_be_in_an_object_store(
    cluster: str, checkpoint: str, model: SeDeM, server: ObjectServer, tmp_path: Path
) -> None:
    place = server.place()
    server.put(place, "texts/long.txt", LONG.encode())
    server.put(place, "texts/note.md", SMALL[0].encode())
    found = Sources([f"{place}/texts"])
    report = build_on_ray(model, Workers(cluster, checkpoint), f"{place}/bank", found)
    documents = [
        Document(f"{place}/texts/long.txt", LONG),
        Document(f"{place}/texts/note.md", SMALL[0]),
    ]
    building.build_bank(model, model.engine, tmp_path / "alone.bank", documents)
    assert (report.added, report.documents) == (2, 2)
    assert differences(f"{place}/bank", tmp_path / "alone.bank") == []
