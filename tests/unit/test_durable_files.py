"""A file is replaced whole or not at all, in an order that a power cut cannot spoil."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from sedem import durable_files
from sedem.durable_files import atomic_write, sha256, write_text


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that exists already."""
    (tmp_path / "note.json").write_text("old")
    return tmp_path / "note.json"


def names_beside(path: Path) -> list[str]:
    return [file.name for file in path.parent.iterdir()]


def test_a_new_file_and_a_replaced_one_hold_the_text_and_nothing_is_left_beside(path: Path) -> None:
    write_text(path, "naïve\n")
    assert path.read_bytes() == "naïve\n".encode()
    write_text(path.with_name("new.json"), "first")
    assert path.with_name("new.json").read_text() == "first"
    assert sorted(names_beside(path)) == ["new.json", "note.json"]


def test_an_error_while_writing_leaves_the_old_file_and_the_next_write_succeeds(path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new"
    assert names_beside(path) == ["note.json"]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_an_error_before_the_rename_leaves_the_old_file(
    step: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(durable_files.os if step == "fsync" else Path, step, fail)
    with pytest.raises(OSError, match="no space"):
        write_text(path, "new")
    assert path.read_text() == "old"


def test_the_file_is_synced_before_it_is_renamed_and_its_folder_after(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    real_fsync, real_replace = os.fsync, Path.replace

    def fsync(descriptor: int) -> None:
        happened.append("sync " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_fsync(descriptor)

    def replace(self: Path, target: Path) -> Path:
        happened.append(f"rename {self.name} {target.name}")
        return real_replace(self, target)

    monkeypatch.setattr(durable_files.os, "fsync", fsync)
    monkeypatch.setattr(durable_files.Path, "replace", replace)
    write_text(path, "new")
    assert happened == [
        "sync .note.json.partial",
        "rename .note.json.partial note.json",
        f"sync {path.parent.name}",
    ]


def test_the_digest_is_that_of_the_content_and_of_joined_contents(path: Path) -> None:
    other = path.with_name("large.bin")
    other.write_bytes(os.urandom(2**19) + b"end")
    assert sha256(path) == hashlib.sha256(b"old").hexdigest()
    assert sha256(path, other) == hashlib.sha256(b"old" + other.read_bytes()).hexdigest()
    assert sha256(path, other) != sha256(other, path)
