"""The commands take a bank in an object store wherever they take one in a folder."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest
from conftest import LEASE, RECIPE
from object_server import ObjectServer
from typer.testing import CliRunner

from sedem import MemoryBank, SeDeM
from sedem.bank.key_index import save_keys
from sedem.bank.store.opening import store_at
from sedem.cli.main import app
from sedem.errors import BankError
from sedem.inference import build, read_parts
from sedem.serve.bank_entry import BankEntry
from sedem.types import Document

RUN = CliRunner()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEDEM_CACHE", str(tmp_path / "cache"))


def sedem(*arguments: object, fails: bool = False) -> str:
    result = RUN.invoke(app, [str(argument) for argument in arguments])
    assert bool(result.exit_code) == fails, (result.output, result.exception)
    return result.output


def test_a_bank_is_built_asked_and_kept(
    server: ObjectServer, model: SeDeM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers, documents and sizes are those of the same bank in a folder."""
    monkeypatch.setattr("sedem.model.SeDeM.from_pretrained", lambda *_, **__: model)
    lease, recipe = tmp_path / "lease.txt", tmp_path / "recipe.txt"
    lease.write_text(LEASE)
    recipe.write_text(RECIPE)
    place, folder = server.place(), tmp_path / "a.bank"
    for bank in (place, folder):
        assert "2 added" in sedem("build", bank, lease, recipe, "-m", "any")
        assert "2 unchanged" in sedem("build", bank, lease, recipe, "-m", "any")
    question = ("What is the rent?", "-k", 2, "--json", "-m", "any")
    answers = [json.loads(sedem("ask", bank, *question)) for bank in (place, folder)]
    for answer in answers:
        answer.pop("timings")
    assert answers[0] == answers[1]
    assert answers[0]["citations"]
    assert sedem("bank", "ls", place) == sedem("bank", "ls", folder)
    assert sedem("bank", "show", place) == sedem("bank", "show", folder)
    assert "all is well" in sedem("bank", "verify", place)
    sedem("bank", "rm", place, recipe)
    assert "now" in sedem("bank", "compact", place)
    assert [one["document"] for one in json.loads(sedem("bank", "ls", place, "--json"))] == [
        str(lease)
    ]
    copied = json.loads(sedem("bank", "backup", place, tmp_path / "b.bank", "--json"))
    assert copied["from"] == place and copied["bytes"] > 0
    sedem("bank", "export", place, tmp_path / "a.tar")
    again = server.place()
    sedem("bank", "import", tmp_path / "a.tar", again)
    assert sedem("bank", "ls", again) == sedem("bank", "ls", tmp_path / "b.bank")


def test_a_damaged_bank_is_reported(server: ObjectServer, model: SeDeM) -> None:
    place = server.place()
    build.build_bank(model, model.engine, place, [Document("lease", LEASE)])
    name = next(name for name in server.objects(place) if name.startswith("shards/"))
    server.delete(place, name)
    result = RUN.invoke(app, ["bank", "verify", place])
    assert result.exit_code == 1
    assert f"{place}: shard" in result.output and "is missing" in result.output


def test_what_needs_a_folder_is_refused(server: ObjectServer, model: SeDeM) -> None:
    place = server.place()
    build.build_bank(model, model.engine, place, [Document("lease", LEASE)])
    assert "copy it down with 'sedem bank backup" in sedem("bank", "warm", place, fails=True)
    repair = sedem("bank", "verify", place, "--repair", fails=True)
    assert f"sedem bank rm {place}" in repair
    with pytest.raises(BankError, match="storing keys needs a bank on local disk; copy it down"):
        save_keys(MemoryBank.open(place), model.selector)
    with pytest.raises(BankError, match="--keys' needs a bank on local disk"):
        build.build_bank(model, model.engine, place, [Document("a", RECIPE)], keys="int8")


def test_a_long_document_is_read_in_parts(
    server: ObjectServer, model: SeDeM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that was killed goes on after its last part, as in a folder."""
    monkeypatch.setattr(read_parts, "PART", 64)
    monkeypatch.setattr(build, "COMMIT", 300)
    place = server.place()
    document = Document("long", LEASE + RECIPE + LEASE)
    append, parts = read_parts.append_part, []

    def killed(*arguments: object, **options: object) -> None:
        if len(parts) == 2:
            raise KeyboardInterrupt
        parts.append(options)
        append(*arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(read_parts, "append_part", killed)
        build.build_bank(model, model.engine, place, [document])
    store = store_at(place)
    assert build.describe(place)["unfinished"] == ["long"]
    assert store.digests() == {}
    with monkeypatch.context() as counted:
        counted.setattr(
            read_parts, "append_part", lambda *a, **o: (parts.append(o), append(*a, **o))
        )
        build.build_bank(model, model.engine, place, [document])
    assert [part["before"] for part in parts] == sorted({part["before"] for part in parts})
    folder = tmp_path / "a.bank"
    build.build_bank(model, model.engine, folder, [document])
    one, other = MemoryBank.open(place), MemoryBank.open(folder)
    assert one.documents[0] == other.documents[0]
    assert (one.memory(range(len(one))) == other.memory(range(len(other)))).all()


def test_a_server_sees_new_commits(server: ObjectServer, model: SeDeM) -> None:
    """A bank that cannot be reached keeps its last snapshot, and is read again afterwards."""
    place = server.place()
    build.build_bank(model, model.engine, place, [Document("lease", LEASE)])
    entry = BankEntry(None, "a", "a", {}, place, 0, files=None)  # type: ignore[arg-type]
    assert list(entry.reload().documents.names) == ["lease"]
    build.build_bank(model, model.engine, place, [Document("recipe", RECIPE)])

    def refreshed(until: object) -> None:
        for _ in range(500):
            entry.refresh()
            time.sleep(0.02)
            assert entry.bank is not None
            if (list(entry.bank.documents.names), entry.error is None) == until:
                return
        raise AssertionError(entry.error)

    refreshed((["lease", "recipe"], True))
    name = store_at(place).commit().name  # type: ignore[union-attr]
    content = server.objects(place)[name]
    server.put(place, name, b"damaged")
    refreshed((["lease", "recipe"], False))
    server.put(place, name, content)
    refreshed((["lease", "recipe"], True))


def test_objects_are_what_the_page_says(server: ObjectServer, model: SeDeM, tmp_path: Path) -> None:
    """Read as docs/bank-format.md describes it, with nothing but a hash and a parser of JSON."""
    place = server.place()
    for document in (Document("lease", LEASE), Document("recipe", RECIPE)):
        build.build_bank(model, model.engine, place, [document])
    objects = server.objects(place)
    names = sorted(name for name in objects if name.startswith("commits/"))
    assert names == ["commits/000000000001", "commits/000000000002"]
    commits = []
    for name in names:
        line, digest, end = objects[name].split(b"\n")
        assert (hashlib.sha256(line).hexdigest().encode(), end) == (digest, b"")
        commits.append(json.loads(line))
    assert [commit["number"] for commit in commits] == [1, 2]
    assert [commit["parent"] for commit in commits] == ["", commits[0]["writer"]]
    newest = commits[1]
    parts = [objects[f"catalog/{digest}"] for digest in newest["catalog"]]
    assert {len(part) for part in parts[:-1]} <= {2**20}
    for folder, ending in (("catalog/", ""), ("shards/", ".safetensors")):
        for name in (name for name in objects if name.startswith(folder)):
            assert name == f"{folder}{hashlib.sha256(objects[name]).hexdigest()}{ending}"
    (tmp_path / "a.bank" / "shards").mkdir(parents=True)
    (tmp_path / "a.bank" / "catalog.sqlite").write_bytes(b"".join(parts))
    assert (tmp_path / "a.bank" / "catalog.sqlite").stat().st_size == newest["bytes"]
    with closing(sqlite3.connect(tmp_path / "a.bank" / "catalog.sqlite")) as connection:
        shards = connection.execute("SELECT file, sha256 FROM shards").fetchall()
    assert newest["shards"] == sorted(digest for _, digest in shards)
    for file, digest in shards:
        (tmp_path / "a.bank" / "shards" / file).write_bytes(objects[f"shards/{digest}.safetensors"])
    assert store_at(tmp_path / "a.bank").verify() == []
    assert [*MemoryBank.open(tmp_path / "a.bank").documents] == [*MemoryBank.open(place).documents]
