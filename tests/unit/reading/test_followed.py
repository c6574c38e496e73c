"""Banks as tools see them: the newest commit, and a folder that is followed but never changed."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from conftest import LEASE, RECIPE
from filelock import FileLock

from sedem import Document, SeDeM
from sedem.bank.file import BankFile
from sedem.errors import BankError, DataError
from sedem.reading import building, documents, followed
from sedem.reading.followed import FollowedBank, Follower, OpenBank, ReadInto
from sedem.reading.places import banks_at
from sedem.untrusted import StoppedError
from sedem_serve.tools.toolbox import Toolbox


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
def open_folder(folder: Path, tmp_path: Path) -> Callable[[], FollowedBank]:
    """Return a function that opens the folder as a new process does."""
    return lambda: FollowedBank(tmp_path / "home" / "papers.bank", folder, "papers")


@pytest.fixture
def bank(open_folder: Callable[[], FollowedBank]) -> FollowedBank:
    """The bank of the folder, into which nothing has been read yet."""
    return open_folder()


@pytest.fixture
def read(model: SeDeM) -> ReadInto:
    """What reads documents into banks."""
    return model.reads_into()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Where the banks of folders are kept."""
    return tmp_path / "home"


def names(bank: OpenBank) -> list[str]:
    return sorted(texts(bank))


def texts(bank: OpenBank) -> dict[str, str]:
    """The documents of a bank by name."""
    snapshot = bank.snapshot()
    return {} if snapshot is None else {one.name: one.text for one in snapshot.documents}


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def change(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 10**9))


def test_a_folder_is_read_and_not_touched(
    read: ReadInto, folder: Path, bank: FollowedBank, home: Path, tmp_path: Path
) -> None:
    before = contents(folder)
    assert bank.snapshot() is None and bank.reading() == "still reading 2 files of 'papers'"
    bank.catch_up(read)
    assert names(bank) == ["kitchen/recipe.md", "lease.txt"] and bank.reading() == ""
    bank.add(read, Document("a.note", "A note."))
    bank.remove("a.note")
    assert contents(folder) == before
    modes = {stat.S_IMODE(one.stat().st_mode) for one in home.iterdir() if one.suffix != ".lock"}
    assert (stat.S_IMODE(home.stat().st_mode), modes) == (0o700, {0o600})
    assert {path.parent for path in tmp_path.rglob("*.bank*")} == {home}


def test_a_forgotten_note_and_a_deleted_file_stand_nowhere(
    read: ReadInto, model: SeDeM, folder: Path, bank: FollowedBank, home: Path
) -> None:
    toolbox = Toolbox([bank], lambda: model, writable=True)

    def stands(text: str) -> bool:
        files = (path.read_bytes() for path in home.rglob("*") if path.is_file())
        return any(text.encode() in content for content in files)

    bank.catch_up(read)
    toolbox.remember("The door code is zqseven.", "door")
    assert toolbox.search("door code").results and stands("zqseven") and stands(LEASE[:40])
    toolbox.remember("The door code is zqeight.", "door")
    assert stands("zqeight") and not stands("seven")
    toolbox.forget("door")
    assert not stands("eight")
    change(folder / "lease.txt", "Another text.")
    bank.catch_up(read)
    assert not stands(LEASE[:40]) and stands("Another text.")
    (folder / "lease.txt").unlink()
    bank.catch_up(read)
    assert not stands("Another text.") and names(bank) == ["kitchen/recipe.md"]


def test_a_file_that_was_only_begun_and_then_deleted_stands_nowhere(
    read: ReadInto,
    folder: Path,
    open_folder: Callable[[], FollowedBank],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(building, "COMMIT", 500)
    monkeypatch.setattr(building, "PART", 100)
    (folder / "long.txt").write_text(16 * LEASE, "utf-8")
    append_part = BankFile.append_part

    def stopped(file: BankFile, *given: Any, **options: Any) -> None:
        append_part(file, *given, **options)
        raise StoppedError

    bank = open_folder()
    with monkeypatch.context() as patched, pytest.raises(StoppedError):
        patched.setattr(BankFile, "append_part", stopped)
        bank.catch_up(read)
    begun = BankFile(bank.path).unfinished()
    assert begun
    for name in begun:
        (folder / name).unlink()
    bank = open_folder()
    bank.catch_up(read)
    assert BankFile(bank.path).unfinished() == []
    assert not {*begun}.intersection(names(bank))


def test_changes_are_told_at_once_and_then_followed(
    read: ReadInto, folder: Path, bank: FollowedBank, open_folder: Callable[[], FollowedBank]
) -> None:
    bank.catch_up(read)
    bank.add(read, Document("a.note", "A note."))
    assert not bank.changed("lease.txt") and not bank.changed("a.note")
    change(folder / "lease.txt", "The rent is 950 euros.")
    (folder / "kitchen" / "recipe.md").unlink()
    (folder / "new.txt").write_text("New text.", "utf-8")
    assert bank.changed("lease.txt") and bank.changed("kitchen/recipe.md")
    # So does a process that starts only now.
    assert open_folder().changed("lease.txt")
    bank.catch_up(read)
    assert names(bank) == ["a.note", "lease.txt", "new.txt"] and not bank.changed("lease.txt")
    assert texts(bank)["lease.txt"] == "The rent is 950 euros."


def test_a_restart_reads_no_file_again(
    read: ReadInto, open_folder: Callable[[], FollowedBank], monkeypatch: pytest.MonkeyPatch
) -> None:
    open_folder().catch_up(read)

    def again(path: Path, **_: object) -> Document:
        raise AssertionError(f"{path} is read again")

    monkeypatch.setattr(followed, "read_document", again)
    bank = open_folder()
    bank.catch_up(read)
    assert len(names(bank)) == 2
    # Without the stamps, files are compared with the bank, which keeps what is the same.
    bank.path.with_name("papers.bank.sources").write_text("[]", "utf-8")
    monkeypatch.undo()
    version = bank.snapshot()
    open_folder().catch_up(read)
    assert bank.snapshot() is version


def test_a_file_that_cannot_be_read_does_not_stop_the_others(
    read: ReadInto, folder: Path, bank: FollowedBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "binary.txt").write_bytes(b"\0\1\2")
    (folder / "empty.txt").write_text(" ", "utf-8")
    (folder / "rejected.txt").write_text("The model rejects it.", "utf-8")
    os.close(os.open(os.fsencode(folder) + b"/caf\xe9.txt", os.O_CREAT))
    add = building.add_documents

    def picky(*given: Any) -> None:
        if any(one.name == "rejected.txt" for one in given[4]):
            raise DataError("'rejected.txt' has no tokens")
        add(*given)

    monkeypatch.setattr(building, "add_documents", picky)
    bank.catch_up(read)
    assert names(bank) == ["kitchen/recipe.md", "lease.txt"] and bank.reading() == ""
    told = bank.unreadable()
    assert len(told) == 4 and "binary.txt" in str(told) and "empty.txt" in str(told)
    assert "'rejected.txt' has no tokens" in told
    assert "names that are not UTF-8" in told[3] and r"caf\udce9.txt" in told[3]
    change(folder / "empty.txt", "Now it has text.")
    bank.catch_up(read)
    assert "empty.txt" in names(bank) and "empty.txt" not in str(bank.unreadable())


def test_another_process_does_not_try_what_could_not_be_read_until_it_changes_or_an_hour_later(
    folder: Path,
    open_folder: Callable[[], FollowedBank],
    read: ReadInto,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (folder / "binary.txt").write_bytes(b"\0\1\2")
    (folder / "empty.md").write_text(" ", "utf-8")
    (folder / "scan.pdf").write_bytes(b"%PDF-1.7")
    (folder / "private.txt").write_text("Not for everybody.", "utf-8")
    tried, reads, denied = list[str](), followed.read_document, {"private.txt"}

    def spied(path: Path, **options: Any) -> Document:
        tried.append(path.name)
        if path.name in denied:
            raise PermissionError(13, "Permission denied", str(path))
        return reads(path, **options)

    monkeypatch.setattr(followed, "read_document", spied)

    def process() -> FollowedBank:
        tried.clear()
        bank = open_folder()
        bank.catch_up(read)
        return bank

    told = process().unreadable()
    assert len(told) == 4 and {"binary.txt", "empty.md", "scan.pdf"} < {*tried}
    # The reasons are known; only access may have been given meanwhile.
    denied.clear()
    assert {*process().unreadable()} == {one for one in told if "private.txt" not in one}
    assert tried == ["private.txt"]
    change(folder / "empty.md", "Now it has text.")
    assert len(process().unreadable()) == 2 and tried == ["empty.md"]
    now = time.time() + documents.AGAIN_SECONDS
    monkeypatch.setattr(time, "time", lambda: now)
    assert len(process().unreadable()) == 2 and {*tried} == {"binary.txt", "scan.pdf"}


def test_what_is_read_can_be_asked_while_the_rest_is_read(
    read: ReadInto, bank: FollowedBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "GROUP_CHARACTERS", 1)
    seen = list[str]()
    parse = followed.read_document

    def slow(path: Path, **_: Any) -> Document:
        seen.extend(names(bank))
        if seen:
            assert bank.reading() == "still reading 1 files of 'papers'"
            bank.ended.set()
        return parse(path)

    monkeypatch.setattr(followed, "read_document", slow)
    with pytest.raises(StoppedError):
        bank.catch_up(read)
    bank.ended.clear()
    monkeypatch.setattr(followed, "read_document", parse)
    assert seen == names(bank) == ["kitchen/recipe.md"]
    bank.catch_up(read)
    assert len(names(bank)) == 2


def test_one_process_reads_and_the_other_sees_it(
    read: ReadInto, open_folder: Callable[[], FollowedBank]
) -> None:
    first, second = open_folder(), open_folder()
    first.path.parent.mkdir()
    with FileLock(first.path.with_name("papers.bank.lock")):
        Thread(target=second.catch_up, args=(read,)).start()
        second.catch_up(read)
    first.catch_up(read)
    with FileLock(first.path.with_name("papers.bank.lock")):
        second.catch_up(read)
    assert names(second) == names(first) and second.reading() == ""
    assert not second.changed("lease.txt")


def test_a_folder_is_followed_until_the_end(
    model: SeDeM, folder: Path, bank: FollowedBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(followed, "LOOK_SHARE", 0)
    read = Event()
    commit = FollowedBank._committed

    def committed(self: FollowedBank, done: list[str]) -> None:
        commit(self, done)
        if "late.txt" in done:
            read.set()

    monkeypatch.setattr(FollowedBank, "_committed", committed)
    follower = Follower(lambda: [bank], model.reads_into())
    follower.start()
    (folder / "late.txt").write_text("It came later.", "utf-8")
    assert read.wait(60)
    follower.close()
    assert "late.txt" in names(bank)


def test_a_folder_of_another_model_is_told(
    read: ReadInto, bank: FollowedBank, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail(*arguments: object, briefly: bool) -> None:
        raise BankError("another model made it")

    monkeypatch.setattr(bank, "catch_up", fail)
    assert bank.read_some(read) == followed.LOOK_SECONDS >= bank.read_some(read) > 0
    assert "'papers' cannot be read into its bank: another model made it" in bank.reading()


PAPERS = ["disk/a.txt", "disk/b.txt", "one.txt", "two.txt", "three.txt", "linked.txt", "sub/x.txt"]


@pytest.fixture
def papers(folder: Path, open_folder: Callable[[], FollowedBank]) -> Path:
    """The folder with other documents, one of them a link to a hidden file in it."""
    shutil.rmtree(folder)
    (folder / ".store").mkdir(parents=True)
    (folder / ".store" / "linked.txt").write_text("A linked text.", "utf-8")
    for name in PAPERS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name != "linked.txt":
            (folder / name).write_text(f"The text of {name}.", "utf-8")
    (folder / "linked.txt").symlink_to(folder / ".store" / "linked.txt")
    return folder


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


UNPLUGGED: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "missing": (shutil.rmtree, 7, "cannot be read: No such file or directory"),
    "empty": (_empty, 7, "is empty"),
    "a file": (lambda f: (shutil.rmtree(f), f.write_text("x")), 7, "cannot be read: Not a direct"),
    "most": (lambda f: [(f / one).unlink() for one in PAPERS[:5]], 5, "missing all at once"),
    "an inner disk": (lambda f: _empty(f / "disk"), 2, "missing all at once"),
    "a link": (lambda f: (f / ".store" / "linked.txt").unlink(), 1, "missing all"),
}


@pytest.mark.parametrize("how", UNPLUGGED)
def test_what_is_out_of_reach_is_not_forgotten_until_it_is_back(
    read: ReadInto,
    papers: Path,
    open_folder: Callable[[], FollowedBank],
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bank, (unplug, count, told) = open_folder(), UNPLUGGED[how]
    bank.catch_up(read)
    away = papers.with_name("away")
    shutil.copytree(papers, away, symlinks=True)
    unplug(papers)
    # So does a process that starts only now.
    for one in (bank, open_folder()):
        for _ in range(2):
            assert told in one.reading() or one is bank
            one.catch_up(read)
            assert names(one) == sorted(PAPERS)
            kept = f"what was read of {count} files of 'papers' is kept until they are back"
            assert told in one.reading() and kept in one.reading()
    # What comes back one by one does not make a deletion of the rest.
    if papers.is_file():
        papers.unlink()
    for source in sorted(away.rglob("*.txt")):
        target = papers / source.relative_to(away)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
        open_folder().catch_up(read)
        assert names(bank) == sorted(PAPERS)
    monkeypatch.setattr(followed, "read_document", None)  # nothing is read again
    bank.catch_up(read)
    assert names(bank) == sorted(PAPERS) and bank.reading() == "" and not bank.changed("one.txt")
    (papers / "one.txt").unlink()
    bank.catch_up(read)
    assert names(bank) == sorted({*PAPERS} - {"one.txt"})


DELETED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "one": (lambda f: (f / "one.txt").unlink(), PAPERS[:2] + PAPERS[3:]),
    "three of seven": (lambda f: [(f / one).unlink() for one in PAPERS[2:5]],
                       PAPERS[:2] + PAPERS[5:]),
    "the only one of an inner folder": (lambda f: (f / "sub" / "x.txt").unlink(), PAPERS[:6]),
    "an inner folder": (lambda f: shutil.rmtree(f / "disk"), PAPERS[2:]),
    "moved": (lambda f: [(f / "disk").rename(f / "new"), *(
        (f / one).rename(f / f"old-{one}") for one in PAPERS[2:5])],
        ["new/a.txt", "new/b.txt", "old-one.txt", "old-two.txt", "old-three.txt", *PAPERS[5:]]),
    "the link": (lambda f: (f / "linked.txt").unlink(), PAPERS[:5] + PAPERS[6:]),
}  # fmt: skip


@pytest.mark.parametrize("how", DELETED)
def test_what_somebody_deletes_or_moves_is_forgotten(
    read: ReadInto, papers: Path, bank: FollowedBank, how: str
) -> None:
    (delete, left) = DELETED[how]
    bank.catch_up(read)
    delete(papers)
    bank.catch_up(read)
    assert names(bank) == sorted(left) and bank.reading() == ""


def test_a_file_that_is_deleted_as_soon_as_its_folder_is_back_is_forgotten(
    read: ReadInto, papers: Path, open_folder: Callable[[], FollowedBank]
) -> None:
    bank = open_folder()
    bank.catch_up(read)
    papers.rename(papers.with_name("away"))
    bank.catch_up(read)
    assert names(bank) == sorted(PAPERS)
    papers.with_name("away").rename(papers)
    (papers / "one.txt").unlink()
    open_folder().catch_up(read)
    assert names(bank) == sorted({*PAPERS} - {"one.txt"})


def test_a_place_that_is_away_opens_if_it_was_read(
    read: ReadInto, folder: Path, home: Path
) -> None:
    [bank] = banks_at([str(folder)], home, "tiny")
    assert isinstance(bank, FollowedBank)
    bank.catch_up(read)
    shutil.rmtree(folder)
    [again] = banks_at([str(folder)], home, "tiny")
    assert names(again) == ["kitchen/recipe.md", "lease.txt"]
    assert "the folder of 'papers' cannot be read" in again.reading()


def test_a_file_that_goes_while_it_is_read_is_read_when_it_is_back(
    read: ReadInto, folder: Path, bank: FollowedBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unplugged(path: Path, **_: object) -> Document:
        path.rename(path.with_suffix(".away"))
        raise DataError("it is gone")

    with monkeypatch.context() as patch:
        patch.setattr(followed, "read_document", unplugged)
        bank.catch_up(read)
    assert names(bank) == [] and bank.unreadable() == []
    (folder / "lease.away").rename(folder / "lease.txt")
    bank.catch_up(read)
    assert names(bank) == ["lease.txt"]


@pytest.mark.parametrize("when", ["while", "after"])
def test_what_is_added_is_read_before_what_still_waits(
    read: ReadInto, folder: Path, bank: FollowedBank, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    monkeypatch.setattr(followed, "GROUP_CHARACTERS", 1)
    monkeypatch.setattr(followed, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(followed, "LOOK_SHARE", 0)
    order = list[str]()
    follower = Follower(lambda: [bank], read)
    commit = FollowedBank._committed
    for number in range(5):
        (folder / f"m{number}.txt").write_text(f"Text {number}.", "utf-8")

    def slow(self: FollowedBank, done: list[str]) -> None:
        commit(self, done)
        order.extend(done)
        if len(order) == (2 if when == "while" else 7):
            (folder / "z.txt").write_text("A late text.", "utf-8")
        time.sleep(0.05)
        if len(order) == 8:
            follower.stop()

    monkeypatch.setattr(FollowedBank, "_committed", slow)
    began = time.monotonic()
    follower.start()
    follower._thread.join(60)
    assert order.index("z.txt") <= (4 if when == "while" else 7)
    assert time.monotonic() - began < 60


def test_places_are_named_after_their_files(folder: Path, home: Path, tmp_path: Path) -> None:
    lease = tmp_path / "lease.bank"
    lease.touch()
    places = [str(lease), str(folder), f"{folder}/", "s3://bucket/far.bank"]
    opened = banks_at(places, home, "tiny")
    assert [one.name for one in opened] == ["lease", "papers", "papers-2", "far"]
    assert [type(one) for one in opened] == [OpenBank, FollowedBank, FollowedBank, OpenBank]
    (folder / "bank.json").write_text("{}", "utf-8")  # a bank in parts
    assert type(banks_at([str(folder)], home, "tiny")[0]) is OpenBank
    with pytest.raises(DataError, match="there is no bank and no folder 'nowhere'"):
        banks_at(["nowhere"], home, "tiny")
    assert not home.exists()


@pytest.mark.parametrize("spelling", ["papers", "papers/", "kitchen/../papers", "linked"])
def test_a_bank_belongs_to_its_folder_and_its_model(
    folder: Path, home: Path, tmp_path: Path, spelling: str
) -> None:
    (tmp_path / "kitchen").mkdir()
    (tmp_path / "other" / "papers").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(folder)
    [alone] = banks_at([str(folder)], home, "tiny")
    company = [str(tmp_path / "other" / "papers"), f"{tmp_path}/{spelling}"]
    assert banks_at(company, home, "tiny")[1].place == alone.place
    assert banks_at([str(folder)], home, "other")[0].place != alone.place


def test_a_moved_file_keeps_its_memory_and_a_touched_one_is_not_read(
    read: ReadInto, folder: Path, bank: FollowedBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank.catch_up(read)
    monkeypatch.delattr(building, "encode")  # nothing is computed
    (folder / "lease.txt").rename(folder / "kitchen" / "contract.txt")
    (folder / "copy.md").write_text(RECIPE, "utf-8")
    bank.catch_up(read)
    assert names(bank) == ["copy.md", "kitchen/contract.txt", "kitchen/recipe.md"]
    assert {*texts(bank).values()} == {LEASE, RECIPE}
    monkeypatch.delattr(followed, "read_document")
    os.utime(folder / "copy.md", ns=(1, 1))
    assert bank.changed("copy.md")
    bank.catch_up(read)
    assert not bank.changed("copy.md") and bank.reading() == ""


@pytest.mark.parametrize("how", ["a start", "a check"])
def test_an_edit_that_keeps_size_and_time_is_found(
    read: ReadInto,
    folder: Path,
    open_folder: Callable[[], FollowedBank],
    how: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(followed, "CHECK_SECONDS", 600.0 if how == "a start" else 0.0)
    bank, path = open_folder(), folder / "lease.txt"
    bank.catch_up(read)
    stamp = path.stat()
    path.write_text(LEASE.replace("rent", "wine"), "utf-8")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    bank = open_folder() if how == "a start" else bank
    bank.catch_up(read)
    assert "wine" in texts(bank)["lease.txt"]


@pytest.mark.parametrize("spent", [0.0, 0.3, 40.0])
def test_the_next_look_is_near_however_long_opening_a_bank_and_looking_takes(
    bank: FollowedBank, monkeypatch: pytest.MonkeyPatch, spent: float
) -> None:
    clock = [0.0]
    monkeypatch.setattr(followed.time, "monotonic", lambda: clock[0])
    files, snapshot = FollowedBank._files, FollowedBank.snapshot

    def slow(self: FollowedBank, of: Any, seconds: float) -> Any:
        clock[0] += seconds
        return of(self)

    monkeypatch.setattr(FollowedBank, "_files", lambda self: slow(self, files, spent))
    monkeypatch.setattr(FollowedBank, "snapshot", lambda self: slow(self, snapshot, 60.0))
    bank.look()
    assert bank._next_look - clock[0] == min(max(2.0, 20 * spent), 10.0)


def test_what_comes_while_a_long_document_is_read_is_told(
    read: ReadInto, folder: Path, bank: FollowedBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(followed, "LOOK_SHARE", 0)
    told = list[str]()

    def slowly(place: Path, documents: Any, progress: Callable[[int], None], **more: Any) -> None:
        if not told:
            progress(0)
            (folder / "new.txt").write_text("New text.", "utf-8")
            progress(1)
            told.append(bank.reading())
        read(place, documents, progress, **more)

    bank.catch_up(slowly)  # type: ignore[arg-type]
    assert told == ["still reading 3 files of 'papers'"]
