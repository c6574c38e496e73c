"""The commands take a bank in an object store wherever they take one in a file."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
from commands import prints_json, succeeds
from conftest import LEASE, RECIPE
from object_server import ObjectServer

from sedem import MemoryBank, SeDeM
from sedem.bank.index import save_keys
from sedem.errors import BankError
from sedem.reading import building
from sedem.types import Document


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEDEM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def place(server: ObjectServer, model: SeDeM) -> str:
    """A bank of two parts, one document each."""
    place = server.place()
    for document in (Document("lease", LEASE), Document("recipe", RECIPE)):
        building.build_bank(model, model.engine, place, [document])
    return place


def test_a_bank_is_built_asked_and_kept(
    server: ObjectServer, model: SeDeM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers, documents and facts are those of the same bank in a file."""
    monkeypatch.setattr(SeDeM, "from_pretrained", lambda *_, **__: model)
    lease, recipe = tmp_path / "lease.txt", tmp_path / "recipe.txt"
    lease.write_text(LEASE)
    recipe.write_text(RECIPE)
    place, file = server.place(), tmp_path / "a.bank"
    for bank in (place, file):
        assert "2 added" in succeeds("build", bank, lease, recipe, "-m", "any")
        assert "2 unchanged" in succeeds("build", bank, lease, recipe, "-m", "any")
    question = ("What is the rent?", "-k", 2, "--json", "-m", "any")
    answers = [prints_json("ask", bank, *question) for bank in (place, file)]
    for answer in answers:
        answer.pop("timings")
    assert answers[0] == answers[1] and answers[0]["citations"]
    assert succeeds("bank", "ls", place) == succeeds("bank", "ls", file)
    assert succeeds("bank", "show", place) == succeeds("bank", "show", file)
    assert "all is well" in succeeds("bank", "verify", place)
    succeeds("bank", "rm", place, recipe)
    assert "now" in succeeds("bank", "compact", place, "--keep", 1)
    [left] = prints_json("bank", "ls", place, "--json")
    assert left["document"] == str(lease)


def test_what_needs_a_file_is_rejected(place: str, model: SeDeM) -> None:
    advice = f"copy it with 'sedem bank copy {place} FILE.bank'"
    with pytest.raises(BankError, match=f"'sedem build --keys' needs a bank in one file; {advice}"):
        building.build_bank(model, model.engine, place, [Document("a", RECIPE)], keys="int8")
    with pytest.raises(BankError, match="keys are stored in a bank in one file"):
        save_keys(MemoryBank.open(place), model.selector)


def test_objects_are_what_the_page_says(place: str, server: ObjectServer, tmp_path: Path) -> None:
    """Read as docs/bank-format.md describes it: each part is a bank that opens alone."""
    objects = server.objects(place)
    found = json.loads(objects.pop("bank.json"))
    assert (found["format"], found["commit"], len(found["parts"])) == (1, 2, 2)
    assert set(objects) == {f"{part['sha256']}.bank" for part in found["parts"]}
    for number, part in enumerate(found["parts"]):
        file = tmp_path / f"{part['sha256']}.bank"
        content = objects[file.name]
        assert part["sha256"] == hashlib.sha256(content).hexdigest()
        assert part["bytes"] == len(content)
        file.write_bytes(content)
        with closing(sqlite3.connect(file)) as connection:
            row = connection.execute("SELECT id, version, documents, blocks, tokens FROM bank")
            assert row.fetchone() == tuple(part["head"].values())
        opened = MemoryBank.open(file)
        assert asdict(opened.meta) == part["meta"]
        assert [*opened.documents] == [MemoryBank.open(place).documents[number]]
