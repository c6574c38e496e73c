"""Deleted documents and banks are gone; answers keep the version that they began with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LEASE, RECIPE
from unit.server.conftest import finish, opened, upload

from sedem import SeDeM
from sedem.bank.file import BankFile
from sedem.errors import BankError
from sedem.reading import building as building_module
from sedem.untrusted import StoppedError
from sedem_serve.server.errors import FullDiskError
from sedem_serve.server.library import Library
from sedem_serve.server.settings import ServerSettings

TEXTS = {"lease.txt": LEASE, "recipe.txt": RECIPE, "long.txt": 16 * LEASE}


@pytest.fixture
def library(settings: ServerSettings, model: SeDeM) -> Iterator[Library]:
    """A bank of three documents, the last of which is more than half of it."""
    with opened(settings, model) as library:
        upload(library, "flat", TEXTS)
        finish(library)
        yield library


def stored_names(path: Path) -> list[str]:
    """The documents that still have rows."""
    with BankFile(path).reading() as connection:
        return [name for (name,) in connection.execute("SELECT name FROM documents ORDER BY id")]


def stands(text: str, folder: Path) -> bool:
    """Whether a text stands in any file of a folder."""
    files = (path.read_bytes() for path in folder.rglob("*") if path.is_file())
    return any(text.encode() in content for content in files)


def banks(settings: ServerSettings) -> set[str]:
    return {path.name for path in (settings.folder / "banks").iterdir()}


def test_a_deleted_document_stands_in_no_file_of_the_server(
    settings: ServerSettings, model: SeDeM, library: Library
) -> None:
    entry = library.writable("flat")
    assert entry.bank is not None
    size, memory = BankFile(entry.path).size, entry.bank.memory(range(len(entry.bank)))
    assert stands(LEASE[:40], settings.folder)
    library.remove_document("flat", "long.txt")
    upload(library, "flat", {"lease.txt": "Nothing is rented."})
    finish(library)
    assert not stands(LEASE[:40], settings.folder)
    library.remove_document("flat", "lease.txt")
    finish(library)
    assert not stands("rented", settings.folder)
    assert stored_names(entry.path) == ["recipe.txt"]
    assert BankFile(entry.path).size < size
    assert entry.bank.documents[0].text == RECIPE
    # The recipe is the second document.
    first = len(memory) - len(entry.bank)
    assert any(
        torch.equal(entry.bank.memory(range(len(entry.bank))), memory[at : at + len(entry.bank)])
        for at in range(first)
    )
    assert stands("recipe.txt", settings.folder) and not stands("lease.txt", settings.folder)
    # This server and the next one write on.
    upload(library, "flat", {"lease.txt": LEASE})
    finish(library)
    library.close()
    with opened(settings, model) as again:
        bank = again.get("flat").bank
        assert bank is not None
        texts = {one.name: one.text for one in bank.documents}
        assert texts == {"recipe.txt": RECIPE, "lease.txt": LEASE}


@pytest.mark.parametrize("is_new", [True, False])
def test_what_was_read_of_a_document_before_a_stop_is_deleted_with_it(
    is_new: bool, settings: ServerSettings, model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building_module, "COMMIT", 500)
    monkeypatch.setattr(building_module, "PART", 100)

    def stopped(file: BankFile, *given: Any, **options: Any) -> None:
        append_part(file, *given, **options)
        raise StoppedError

    append_part = BankFile.append_part
    with opened(settings, model) as library:
        if not is_new:
            upload(library, "flat", {"recipe.txt": "A recipe."})
            finish(library)
        with monkeypatch.context() as patched, pytest.raises(StoppedError):
            patched.setattr(BankFile, "append_part", stopped)
            upload(library, "flat", {"long.txt": 16 * LEASE})
            bank = library.writable("flat")
            bank.catch_up(library.read)
    with opened(settings, model) as library:
        file = library.writable("flat").path
        assert BankFile(file).unfinished() == ["long.txt"]
        library.remove_document("flat", "long.txt")
        finish(library)
        assert stored_names(file) == ["recipe.txt"] * (not is_new)
        assert not stands("long.txt", settings.folder)


def test_running_answers_keep_what_they_have_not_read_yet(library: Library, model: SeDeM) -> None:
    entry = library.writable("flat")
    assert entry.bank is not None
    expected = model.answer(entry.bank, "How much is the rent?", k=2)
    before = entry.bank.snapshot()
    library.remove_document("flat", "lease.txt")
    between = entry.bank.snapshot()
    library.remove_document("flat", "long.txt")
    finish(library)
    assert stored_names(entry.path) == [*TEXTS]
    assert model.answer(before, "How much is the rent?", k=2).text == expected.text
    assert {one.name: one.text for one in before.documents} == TEXTS
    del before
    finish(library)
    assert stored_names(entry.path) == ["recipe.txt", "long.txt"]
    assert {one.name for one in between.documents} == {"recipe.txt", "long.txt"}
    assert between.memory(range(len(between))).isfinite().all()
    del between
    finish(library)
    assert stored_names(entry.path) == ["recipe.txt"]


def test_a_purge_that_fails_is_not_tried_again(
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    entry, tries = library.writable("flat"), []

    def refused(file: BankFile) -> None:
        tries.append(file)
        raise BankError("the disk is full")

    monkeypatch.setattr(BankFile, "purge", refused)
    library.remove_document("flat", "long.txt")
    finish(library)
    finish(library)
    assert len(tries) == 1
    told = "removed documents stay in bank 'flat' for now: the disk is full"
    assert caplog.messages.count(told) == 1
    library.remove_document("flat", "lease.txt")
    finish(library)
    assert len(tries) == 2 and entry.bank is not None
    assert entry.bank.documents[0].text == RECIPE


def test_a_full_disk_is_one_warning_in_the_log(
    library: Library,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    upload(library, "flat", {"new.txt": RECIPE})
    bank = library.writable("flat")

    def full(*arguments: object) -> None:
        raise FullDiskError

    monkeypatch.setattr(bank, "_read_waiting", full)
    for _ in range(5):
        bank.next_turn = 0.0
        assert library.turn() > 0
    told = [one for one in caplog.records if "reading files of 'flat'" in one.getMessage()]
    assert [one.levelname for one in told] == ["WARNING"]
    assert "the disk of the server is full" in told[0].getMessage() and not told[0].exc_info
    assert "the disk of the server is full" in str(bank.progress().error)


def test_a_deleted_bank_is_removed_when_no_answer_reads_it(
    settings: ServerSettings, library: Library
) -> None:
    entry = library.writable("flat")
    assert entry.bank is not None
    snapshot = entry.bank.snapshot()
    library.delete("flat")
    finish(library)
    assert not library.entries() and entry.path.exists() and not entry.folder.exists()
    # Nothing of the snapshot was read before.
    assert {one.name: one.text for one in snapshot.documents} == TEXTS
    del snapshot
    finish(library)
    assert banks(settings) == set()
    assert not stands(RECIPE[:40], settings.folder)


def test_the_next_server_removes_what_a_killed_one_left(
    settings: ServerSettings, model: SeDeM, library: Library
) -> None:
    entry = library.writable("flat")
    assert entry.bank is not None
    kept, folder = banks(settings), settings.folder / "banks"
    # Deleted just before the kill; it was compacted before that, and had derived data.
    beside = (
        "a-00000000.bank.sources",
        "a-00000000.bank-wal",
        "b-00000000.bank.kept",
        "d-00000000.bank.codes-wal",
    )
    for name in ("a-00000000.bank", *beside):
        (folder / name).write_bytes(b"of a deleted bank")
    (folder / "converted.bank").write_bytes(b"of the operator")
    # What was never acknowledged goes, too.
    arriving = settings.folder / "uploads"
    for name in (f"file-{0:024}", "notes of the operator"):
        (arriving / name).write_text("a text")
    library.close()
    with opened(settings, model) as again:
        assert banks(settings) - kept == {"converted.bank"}
        assert [path.name for path in arriving.iterdir()] == ["notes of the operator"]
        assert again.get("flat").progress().status == "ready"
