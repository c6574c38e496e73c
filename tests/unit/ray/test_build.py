"""A bank that the workers of a Ray cluster build is the one that this machine builds."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from hashlib import sha256
from importlib.metadata import version as version_of
from pathlib import Path

import psutil
import pyarrow as pa
import pytest
import torch
from conftest import LEASE, RECIPE
from object_server import ObjectServer
from pyarrow import parquet

from sedem import Document, MemoryBank, SeDeM
from sedem.backbone.loading import open_backbone
from sedem.bank.file import BankFile
from sedem.bank.parts import Parts, Place, store_at
from sedem.config import SedemConfig
from sedem.errors import BankError, ConfigError, DataError, UnavailableError
from sedem.ray import build
from sedem.ray.build import Workers, build_on_ray, received
from sedem.ray.sources import Sources
from sedem.reading import building

LONG = "\n\n".join([LEASE, RECIPE, LEASE[::-1], RECIPE.upper()])
SMALL = [f"Room {n} of the house has {n + 2} windows and a door to the yard." for n in range(40)]
COMMIT, PART = 600, 64


@pytest.fixture(scope="module")
def cluster(server: ObjectServer) -> Iterator[str]:
    """The address of a cluster with two CPUs, to which this process is connected.

    Its workers have the environment of this process, and so the credentials of the object store.
    """
    import ray

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_AUTH_MODE", "disabled")
        # Its workers would wait for everything else on a busy machine.
        patched.setenv("RAY_worker_niceness", "0")
        # A socket's path has at most 107 characters.
        folder = Path("/tmp") / f"sedem-{os.getpid():x}"
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=100_000_000,
            _temp_dir=str(folder),
        )
        try:
            yield ray.get_runtime_context().gcs_address
        finally:
            ray.shutdown()
            subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.fixture(scope="module")
def checkpoint(config: SedemConfig, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(1)
    opened = open_backbone(config.encoder)
    folder = tmp_path_factory.mktemp("checkpoint")
    SeDeM(config, opened, opened).eval().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model(checkpoint: str) -> SeDeM:
    return SeDeM.from_pretrained(checkpoint, light=True)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "COMMIT", COMMIT)
    monkeypatch.setattr(building, "PART", PART)

    # Defined here, so that its code is sent to the workers.
    def encode(job: build.Job, documents: Sequence[Document]) -> object:
        building.COMMIT, building.PART = COMMIT, PART
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


def documents_of(folder: Path) -> list[Document]:
    """The documents of the folder in their order."""
    notes = [(str(folder / f"a{n:02d}.md"), text) for n, text in enumerate(SMALL[:16])]
    lines = [(f"line {n}", text) for n, text in enumerate(SMALL[16:32])]
    rows = [(f"{folder}/d.parquet#{n}", text) for n, text in enumerate(SMALL[32:], start=1)]
    return [
        Document(name, text)
        for name, text in [*notes, (str(folder / "b-long.txt"), LONG), *lines, *rows]
    ]


@pytest.fixture
def alone(model: SeDeM, folder: Path, tmp_path: Path) -> Path:
    """The bank that this machine builds alone."""
    building.build_bank(model, model.engine, tmp_path / "alone.bank", documents_of(folder))
    return tmp_path / "alone.bank"


def assert_equal(bank: Place, alone: Path) -> None:
    """The same documents, blocks and memory, to the bit."""
    found, wanted = MemoryBank.open(bank), MemoryBank.open(alone)
    assert found.documents == wanted.documents
    assert list(found.blocks) == list(wanted.blocks)
    assert found.meta == wanted.meta
    every = range(len(wanted))
    assert torch.equal(found.memory(every), wanted.memory(every))
    assert words(bank) == words(alone) > 0


def words(bank: Place) -> int:
    """Number of blocks whose words are indexed."""
    count = 0
    for file in store_at(bank).files():
        with file.reading() as connection:
            query = "SELECT count(*) FROM words WHERE words MATCH 'a*'"
            count += connection.execute(query).fetchone()[0]
    return count


def committed(bank: Path) -> dict[str, int]:
    """The version that added each document."""
    with BankFile(bank).reading() as connection:
        return dict(connection.execute("SELECT name, added FROM documents WHERE added NOT NULL"))


def workers() -> list[psutil.Process]:
    """The processes of the encoders."""
    started = psutil.Process().children(recursive=True)
    return [process for process in started if "encode" in process.name()]


def test_the_bank_is_the_one_of_this_machine_though_workers_are_killed(
    cluster: str,
    checkpoint: str,
    model: SeDeM,
    folder: Path,
    alone: Path,
    tmp_path: Path,
) -> None:
    bank, seen, killed = tmp_path / "a.bank", [], set()

    def kill(*progress: float) -> None:
        seen.append(progress)
        if len(killed) < 3:
            for process in workers():
                killed.add(process.pid)
                process.kill()

    report = build_on_ray(model, Workers(cluster, checkpoint), bank, Sources([str(folder)]), kill)
    assert len(killed) >= 3, "workers that came after the first were killed too"
    assert_equal(bank, alone)
    assert committed(bank) == committed(alone)
    assert (report.added, report.documents) == (41, 41)
    assert len(seen) == BankFile(bank).head().version < 30, "small documents are read together"
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert all(done <= total and speed > 0 for done, total, speed in seen)


@pytest.mark.slow
def test_a_bank_that_has_all_documents_stays_as_it_is(
    cluster: str, checkpoint: str, model: SeDeM, folder: Path, alone: Path
) -> None:
    before = alone.read_bytes()
    report = build_on_ray(model, Workers(cluster, checkpoint), alone, Sources([str(folder)]))
    assert (report.added, report.unchanged) == (0, 41)
    assert alone.read_bytes() == before


DRIVER = f"""
import os, signal, sys
from pathlib import Path
from sedem import SeDeM
from sedem.reading import building
from sedem.ray import build
from sedem.ray.build import Workers, build_on_ray
from sedem.ray.sources import Sources
address, checkpoint, bank, folder, commits = sys.argv[1:]
building.COMMIT, building.PART = {COMMIT}, {PART}
def encode(job, documents):
    building.COMMIT, building.PART = {COMMIT}, {PART}
    from sedem.ray.build import encode
    return encode(job, documents)
build.encode = encode
seen = []
def progress(*_):
    seen.append(1)
    if len(seen) == int(commits):
        os.kill(os.getpid(), signal.SIGKILL)
model = SeDeM.from_pretrained(checkpoint, light=True)
build_on_ray(model, Workers(address, checkpoint), Path(bank), Sources([folder]), progress)
"""


@pytest.mark.slow
@pytest.mark.parametrize("commits", [3])
def test_a_killed_driver_goes_on_when_it_is_started_again(
    commits: int, cluster: str, checkpoint: str, folder: Path, alone: Path, tmp_path: Path
) -> None:
    bank = tmp_path / "a.bank"

    def drive(commits: int) -> int:
        arguments = [cluster, checkpoint, str(bank), str(folder), str(commits)]
        command = [sys.executable, "-c", DRIVER, *arguments]
        return subprocess.run(command, timeout=200).returncode

    assert drive(commits) == -signal.SIGKILL
    before = committed(bank)
    assert BankFile(bank).head().version == commits
    assert drive(0) == 0
    assert before.items() <= committed(bank).items(), "what was committed is not read again"
    assert_equal(bank, alone)


@pytest.mark.slow
def test_a_bank_in_parts_is_extended_and_its_documents_replaced(
    cluster: str, checkpoint: str, model: SeDeM, folder: Path, alone: Path, tmp_path: Path
) -> None:
    bank, texts = tmp_path / "parts", tmp_path / "texts"
    with Parts(bank).creating(building.new_meta(model)):
        pass
    build_on_ray(model, Workers(cluster, checkpoint), bank, Sources([str(folder)]))
    assert_equal(bank, alone)
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
def test_a_document_that_cannot_be_read_follows_keep_going(
    cluster: str, checkpoint: str, model: SeDeM, tmp_path: Path
) -> None:
    for name, text in zip("abc", SMALL, strict=False):
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "b.txt").write_bytes(b"\0\0")
    (tmp_path / "d.jsonl").write_text('{"text": "The key is blue."}\n{"title": "no text"}\n')
    bank = tmp_path / "a.bank"
    given = Sources([str(tmp_path)])
    with pytest.raises(DataError, match=r"b\.txt' holds binary data.*--keep-going"):
        build_on_ray(model, Workers(cluster, checkpoint), bank, given)
    assert [*MemoryBank.open(bank).documents.names] == [str(tmp_path / "a.txt")]
    given = Sources([str(tmp_path)], keep_going=True)
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
    cluster: str, model: SeDeM, folder: Path, tmp_path: Path, chat_folder: str
) -> None:
    nowhere = Workers(cluster, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"host '.*' of the cluster cannot open '.*nowhere'"):
        build_on_ray(model, nowhere, tmp_path / "a.bank", Sources([str(folder)]))
    with pytest.raises(ConfigError, match=r"no host of the cluster has a GPU or 99 CPUs"):
        build_on_ray(
            model, Workers(cluster, "x", cpus=99), tmp_path / "a.bank", Sources([str(folder)])
        )
    assert not (tmp_path / "a.bank").exists()


def test_a_worker_that_does_not_see_the_folder_of_a_bank_is_named(
    checkpoint: str, model: SeDeM, tmp_path: Path
) -> None:
    nowhere = tmp_path / "nowhere"
    with pytest.raises(ConfigError, match=r"of the cluster cannot use bank.*does not exist there"):
        build._opened(checkpoint, version_of("sedem"), model.fingerprint(), nowhere, None)
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
    assert_equal(f"{place}/bank", tmp_path / "alone.bank")
