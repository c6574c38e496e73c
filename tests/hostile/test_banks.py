"""A stranger's bank leads into no other: every file beside it is opened without following links."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from stored_banks import META, append

from sedem import MemoryBank
from sedem.bank.codes import CodesFile
from sedem.bank.database import SUFFIXES
from sedem.bank.file import MANIFEST, BankFile
from sedem.bank.parts import Parts
from sedem.errors import BankError

NOW = timedelta()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A bank of the user with codes, in a folder with other files."""
    path = tmp_path / "home" / "mine.bank"
    path.parent.mkdir()
    make_bank(path)
    CodesFile(path).close()
    (path.parent / "sub").mkdir()
    (path.parent / "sub" / "notes.txt").write_text("notes")
    os.utime(path.parent / "sub", (0, 0))
    return path


@pytest.fixture
def intact(victim: Path) -> Callable[[], bool]:
    """Whether every byte of the user's folder is as it was."""

    def state() -> dict[str, bytes]:
        files = (path for path in victim.parent.rglob("*") if path.is_file())
        return {str(path.relative_to(victim.parent)): path.read_bytes() for path in files}

    before = state()
    return lambda: state() == before


def make_bank(path: Path) -> None:
    with BankFile(path).creating(META) as file:
        append(file, 1, 2)


def use(path: Path) -> None:
    """What a user does with a bank, as far as it goes."""
    for step in (
        lambda: MemoryBank.open(path).documents.names,
        lambda: append(BankFile(path), 3),
        lambda: BankFile(path).compact(),
        lambda: BankFile(path).remove("1.txt"),
        lambda: CodesFile(path).close(),
        lambda: BankFile(path).copy_to(path.with_name("copy.bank")),
    ):
        with suppress(BankError):
            step()


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".codes", *(f".codes{end}" for end in SUFFIXES)])
@pytest.mark.parametrize("target", ["mine.bank", "mine.bank.codes", "sub/notes.txt", "new"])
def test_a_file_beside_a_bank_is_no_way_into_another(
    suffix: str, target: str, victim: Path, intact: Callable[[], bool], tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger" / "a.bank"
    stranger.parent.mkdir()
    make_bank(stranger)
    link = stranger.with_name(stranger.name + suffix)
    link.symlink_to(victim.parent / target)
    codes = suffix.startswith(".codes")
    with pytest.raises(BankError, match=rf"^'.*a\.bank{suffix}' is a link, or not a file; remove"):
        CodesFile(stranger, create=False) if codes else BankFile(stranger).meta()
    use(stranger)
    assert intact() and link.is_symlink() and not (victim.parent / "new").exists()
    link.unlink()
    os.mkfifo(link)
    use(stranger)
    assert intact()


@pytest.mark.parametrize("target", ["mine.bank", "sub/notes.txt", "sub", "new"])
def test_a_link_in_place_of_what_earlier_releases_kept_leads_nowhere(
    target: str, victim: Path, intact: Callable[[], bool], tmp_path: Path
) -> None:
    stranger = tmp_path / "strange" / "a.bank"
    stranger.parent.mkdir()
    make_bank(stranger)
    stranger.with_name("a.bank.kept").symlink_to(victim.parent / target)
    use(stranger)
    assert MemoryBank.open(stranger).documents.names == ["2.txt", "3.txt"]
    assert intact() and not (victim.parent / "new").exists()


# Parts


@pytest.fixture
def parts(tmp_path: Path) -> Parts:
    made = Parts(tmp_path / "stranger")
    with made.creating(META) as file:
        append(file, 1)
    append(made, 2)
    return made


def use_parts(place: Path) -> None:
    for step in (
        lambda: MemoryBank.open(place).documents.names,
        lambda: append(Parts(place), 3),
        lambda: Parts(place).remove("1"),
        lambda: Parts(place).compact(NOW),
        lambda: _build(place),
    ):
        with suppress(BankError):
            step()


def _build(place: Path) -> None:
    with Parts(place).building(META) as file:
        append(file, 4)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        (MANIFEST, "sub/notes.txt"),
        (f".{MANIFEST}.lock", "mine.bank"),
        (f".{MANIFEST}.partial", "mine.bank"),
        (".work", "."),
        (".work/build", "."),
        (".work/build/part.bank", "mine.bank"),
        (".work/build.lock", "mine.bank"),
        ("{part}", "mine.bank"),
        ("{part}-wal", "mine.bank"),
        ("{part}-journal", "mine.bank"),
    ],
)
def test_a_folder_of_parts_is_no_way_into_another_bank(
    name: str, target: str, parts: Parts, victim: Path, intact: Callable[[], bool], tmp_path: Path
) -> None:
    place = tmp_path / "stranger"
    link = place / name.replace("{part}", parts.files()[0].place.name)
    if link.is_dir():
        shutil.rmtree(link)
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(victim.parent / target)
    use_parts(place)
    assert intact()
