"""Banks as tools see them: the newest commit, and a folder that is followed but never changed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

import pytest
from conftest import LEASE, RECIPE
from filelock import FileLock

from sedem import Document, MemoryBank, SeDeM
from sedem.errors import BankError, DataError
from sedem.tools import banks
from sedem.tools.banks import BuiltBank, FolderBank, StoppedError, banks_at, following
from sedem.tools.toolbox import Toolbox


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two documents, one of them in a folder of its own."""
    folder = tmp_path / "papers"
    (folder / "kitchen").mkdir(parents=True)
    (folder / "lease.txt").write_text(LEASE, "utf-8")
    (folder / "kitchen" / "recipe.md").write_text(RECIPE, "utf-8")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


@pytest.fixture
def open_folder(folder: Path, tmp_path: Path) -> Callable[[], FolderBank]:
    """Return a function that opens the folder as a new process does."""
    return lambda: FolderBank(folder, tmp_path / "home", "tiny", "papers")


def names(bank: BuiltBank) -> list[str]:
    snapshot = bank.snapshot()
    return [] if snapshot is None else sorted(snapshot.documents.names)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def change(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**9))


def test_what_another_process_commits_is_seen(model: SeDeM, lease: Path) -> None:
    bank = BuiltBank(lease, "lease")
    assert names(bank) == ["kitchen/recipe.txt", "lease.txt"]
    MemoryBank.open(lease).append(model.read([Document("new.txt", "New text.")]))
    assert "new.txt" in names(bank)
    # Another bank at the same place.
    lease.unlink()
    model.read([Document("other.txt", "Other text.")]).save(lease)
    assert names(bank) == ["other.txt"]
    lease.write_bytes(b"no bank at all")
    with pytest.raises(BankError):
        bank.snapshot()


def test_a_folder_is_read_and_not_touched(
    model: SeDeM, folder: Path, open_folder: Callable[[], FolderBank], tmp_path: Path
) -> None:
    before, bank = contents(folder), open_folder()
    assert bank.snapshot() is None and bank.reading() == "still reading 2 files of 'papers'"
    bank.catch_up(model, Event())
    assert names(bank) == ["kitchen/recipe.md", "lease.txt"] and bank.reading() == ""
    bank.add(model, Document("a.note", "A note."))
    bank.remove("a.note")
    assert contents(folder) == before
    home = tmp_path / "home"
    modes = {stat.S_IMODE(one.stat().st_mode) for one in home.iterdir() if one.suffix != ".lock"}
    assert (stat.S_IMODE(home.stat().st_mode), modes) == (0o700, {0o600})
    assert {path.parent for path in tmp_path.rglob("*.bank*")} == {tmp_path / "home"}


def test_a_forgotten_note_and_a_deleted_file_stand_nowhere(
    model: SeDeM, folder: Path, open_folder: Callable[[], FolderBank], tmp_path: Path
) -> None:
    bank = open_folder()
    toolbox = Toolbox([bank], lambda: model, writable=True)

    def stands(text: str) -> bool:
        files = (path.read_bytes() for path in (tmp_path / "home").rglob("*") if path.is_file())
        return any(text.encode() in content for content in files)

    bank.catch_up(model, Event())
    toolbox.remember("The door code is zqseven.", "door")
    assert toolbox.search("door code").results and stands("zqseven") and stands(LEASE[:40])
    toolbox.remember("The door code is zqeight.", "door")
    assert stands("zqeight") and not stands("seven")
    toolbox.forget("door")
    assert not stands("eight")
    change(folder / "lease.txt", "Another text.")
    bank.catch_up(model, Event())
    assert not stands(LEASE[:40]) and stands("Another text.")
    (folder / "lease.txt").unlink()
    bank.catch_up(model, Event())
    assert not stands("Another text.") and names(bank) == ["kitchen/recipe.md"]


def test_changes_are_told_at_once_and_then_followed(
    model: SeDeM, folder: Path, open_folder: Callable[[], FolderBank]
) -> None:
    bank = open_folder()
    bank.catch_up(model, Event())
    bank.add(model, Document("a.note", "A note."))
    assert not bank.changed("lease.txt") and not bank.changed("a.note")
    change(folder / "lease.txt", "The rent is 950 euros.")
    (folder / "kitchen" / "recipe.md").unlink()
    (folder / "new.txt").write_text("New text.", "utf-8")
    assert bank.changed("lease.txt") and bank.changed("kitchen/recipe.md")
    # So does a process that starts only now.
    assert open_folder().changed("lease.txt")
    bank.catch_up(model, Event())
    assert names(bank) == ["a.note", "lease.txt", "new.txt"] and not bank.changed("lease.txt")
    snapshot = bank.snapshot()
    assert snapshot is not None
    texts = {one.name: one.text for one in snapshot.documents}
    assert texts["lease.txt"] == "The rent is 950 euros."


def test_a_restart_reads_no_file_again(
    model: SeDeM, open_folder: Callable[[], FolderBank], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_folder().catch_up(model, Event())

    def read(path: Path) -> Document:
        raise AssertionError(f"{path} is read again")

    monkeypatch.setattr(banks, "read_document", read)
    bank = open_folder()
    bank.catch_up(model, Event())
    assert len(names(bank)) == 2
    # Without the stamps, files are compared with the bank, which keeps what is the same.
    bank.path.with_suffix(".json").write_text("[]", "utf-8")
    monkeypatch.undo()
    version = bank.snapshot()
    open_folder().catch_up(model, Event())
    assert bank.snapshot() is version


def test_a_file_that_cannot_be_read_does_not_stop_the_others(
    model: SeDeM, folder: Path, open_folder: Callable[[], FolderBank]
) -> None:
    (folder / "binary.txt").write_bytes(b"\0\1\2")
    (folder / "empty.txt").write_text(" ", "utf-8")
    bank = open_folder()
    bank.catch_up(model, Event())
    assert names(bank) == ["kitchen/recipe.md", "lease.txt"]
    told = bank.reading()
    assert "binary.txt" in told and "empty.txt" in told and "still reading" not in told
    change(folder / "empty.txt", "Now it has text.")
    bank.catch_up(model, Event())
    assert "empty.txt" in names(bank) and "empty.txt" not in bank.reading()


def test_a_document_that_the_model_rejects_does_not_stop_the_others(
    model: SeDeM, open_folder: Callable[[], FolderBank], monkeypatch: pytest.MonkeyPatch
) -> None:
    add = BuiltBank.add

    def picky(self: BuiltBank, model: SeDeM, *documents: Document, progress: object) -> None:
        if "lease.txt" in {one.name for one in documents}:
            raise DataError("'lease.txt' has no tokens")
        add(self, model, *documents)

    monkeypatch.setattr(BuiltBank, "add", picky)
    bank = open_folder()
    bank.catch_up(model, Event())
    assert names(bank) == ["kitchen/recipe.md"] and bank.reading() == "'lease.txt' has no tokens"


def test_what_is_read_can_be_asked_while_the_rest_is_read(
    model: SeDeM, open_folder: Callable[[], FolderBank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(banks, "GROUP_CHARACTERS", 1)
    bank, stop, seen = open_folder(), Event(), list[str]()
    read = banks.read_document

    def slow(path: Path) -> Document:
        seen.extend(names(bank))
        if seen:
            assert bank.reading() == "still reading 1 files of 'papers'"
            stop.set()
        return read(path)

    monkeypatch.setattr(banks, "read_document", slow)
    with pytest.raises(StoppedError):
        bank.catch_up(model, stop)
    assert seen == names(bank) == ["kitchen/recipe.md"]
    bank.catch_up(model, Event())
    assert len(names(bank)) == 2


def test_one_process_reads_and_the_other_sees_it(
    model: SeDeM, open_folder: Callable[[], FolderBank]
) -> None:
    first, second = open_folder(), open_folder()
    first.path.parent.mkdir()
    with FileLock(first.path.with_suffix(".lock")):
        Thread(target=second.catch_up, args=(model, Event())).start()
        second.catch_up(model, Event())
    first.catch_up(model, Event())
    with FileLock(first.path.with_suffix(".lock")):
        second.catch_up(model, Event())
    assert names(second) == names(first) and second.reading() == ""
    assert not second.changed("lease.txt")


def test_a_folder_is_followed_until_the_end(
    model: SeDeM, folder: Path, open_folder: Callable[[], FolderBank],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(banks, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(banks, "LOOK_SHARE", 0)
    bank, read = open_folder(), Event()
    commit = FolderBank._save

    def saved(self: FolderBank, stamps: dict[str, banks.Stamp]) -> None:
        commit(self, stamps)
        if "late.txt" in stamps:
            read.set()

    monkeypatch.setattr(FolderBank, "_save", saved)
    with following([bank], model):
        (folder / "late.txt").write_text("It came later.", "utf-8")
        assert read.wait(60)
    assert "late.txt" in names(bank)


def test_a_folder_of_another_model_is_told(
    model: SeDeM, open_folder: Callable[[], FolderBank], monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, stop = open_folder(), Event()

    def fail(*arguments: object) -> None:
        stop.set()
        raise BankError("another model made it")

    monkeypatch.setattr(bank, "catch_up", fail)
    bank.follow(model, stop)
    assert "'papers' cannot be read into its bank: another model made it" in bank.reading()


def test_places_are_named_after_their_files(folder: Path, lease: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    places = [str(lease), str(folder), f"{folder}/", "s3://bucket/far.bank"]
    opened = banks_at(places, home, "tiny")
    assert [one.name for one in opened] == ["lease", "papers", "papers-2", "far"]
    assert [type(one) for one in opened] == [BuiltBank, FolderBank, FolderBank, BuiltBank]
    (folder / "bank.json").write_text("{}", "utf-8")  # a bank in parts
    assert type(banks_at([str(folder)], home, "tiny")[0]) is BuiltBank
    with pytest.raises(DataError, match="there is no bank and no folder 'nowhere'"):
        banks_at(["nowhere"], home, "tiny")
    assert not home.exists()


def test_each_model_has_its_own_bank_of_a_folder(folder: Path, tmp_path: Path) -> None:
    first, second = (FolderBank(folder, tmp_path, name, "papers") for name in ("a", "b"))
    assert first.path != second.path
