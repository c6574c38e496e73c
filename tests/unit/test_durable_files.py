"""Files and folders appear whole or not at all, in an order that a power cut cannot spoil."""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import time
from collections import namedtuple
from pathlib import Path

import pytest
from processes import in_two_processes

from sedem import durable_files
from sedem.durable_files import (
    atomic_write,
    build_once,
    bytes_text,
    check_free_space,
    make_folders,
    replaced_folder,
    reserve,
    sha256,
    write_text,
)
from sedem.errors import ConfigError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that exists already."""
    (tmp_path / "note.json").write_text("old")
    return tmp_path / "note.json"


def test_an_error_while_writing_leaves_the_old_file_and_the_next_write_succeeds(path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    write_text(path, "naïve\n")
    assert path.read_bytes() == "naïve\n".encode()
    assert [file.name for file in path.parent.iterdir()] == ["note.json"]


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


# Folders that are built once


def has_end(folder: Path) -> bool:
    return (folder / "end").is_file()


def test_of_two_processes_one_builds_and_the_other_waits_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "cache" / "numbers"
    built = tmp_path / "built"

    def build(partial: Path) -> None:
        with built.open("a") as file:
            file.write("once ")
        (partial / "start").write_text("1")
        assert not folder.exists()
        time.sleep(0.3)
        (partial / "end").write_text("2")

    def ask() -> tuple[list[str], list[str]]:
        caplog.clear()
        build_once(folder, has_end, build, "the numbers")
        return sorted(f.name for f in folder.iterdir()), caplog.messages

    (files, first), (others, second) = in_two_processes(ask)
    assert files == others == ["end", "start"]
    assert built.read_text() == "once "
    waited = "another process is writing the numbers; waiting until it is done"
    assert sorted([first, second]) == [[], [waited]]
    build_once(folder, has_end, build, "the numbers")
    assert built.read_text() == "once "


def test_what_a_killed_process_has_left_is_continued_and_never_taken_for_the_whole(
    tmp_path: Path,
) -> None:
    folder, found = tmp_path / "numbers", []
    folder.mkdir()
    (folder / "half").write_text("1")

    def build(partial: Path) -> None:
        found.append(sorted(f.name for f in partial.iterdir()))
        (partial / "start").write_text("1")
        if found == [[]]:
            os.kill(os.getpid(), signal.SIGKILL)
        (partial / "end").write_text("2")

    child = os.fork()
    if not child:
        build_once(folder, has_end, build, "the numbers")
    os.waitpid(child, 0)
    assert not has_end(folder)
    build_once(folder, has_end, build, "the numbers")
    assert found == [["start"]]
    assert sorted(file.name for file in folder.iterdir()) == ["end", "start"]


def test_a_disk_that_fills_up_is_a_sentence(tmp_path: Path) -> None:
    def build(partial: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ConfigError, match=r"the disk of '.*' is full while the numbers is written"):
        build_once(tmp_path / "numbers", has_end, build, "the numbers")


Usage = namedtuple("Usage", "total used free")


def test_too_little_space_is_refused_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_files.shutil, "disk_usage", lambda _: Usage(0, 0, 5000))
    check_free_space(tmp_path, 5000, "a cache")
    with pytest.raises(ConfigError, match=r"a cache needs 481 GB, but .* has 5 kB free; make room"):
        check_free_space(tmp_path, 481_000_000_000, "a cache")
    with pytest.raises(ConfigError, match=r"the states needs 6 MB, but"):
        reserve(tmp_path / "states.bin", 6_000_000, "the states")


def test_reserved_bytes_are_on_disk_and_what_was_written_stays(tmp_path: Path) -> None:
    path = tmp_path / "states.bin"
    path.write_bytes(b"start")
    reserve(path, 1 << 20, "the states")
    assert path.stat().st_size == 1 << 20
    assert path.stat().st_blocks * 512 >= 1 << 20
    assert path.read_bytes().rstrip(b"\0") == b"start"


def test_sizes_are_readable() -> None:
    sizes = [0, 999, 999_600, 15_360, 481_246_000_000, 2_500_000_000_000, 12_288 * 10**12]
    shown = ["0 bytes", "999 bytes", "1 MB", "15.4 kB", "481 GB", "2.5 TB", "12.3 PB"]
    assert [bytes_text(size) for size in sizes] == shown


# Folders


def test_every_new_folder_is_synced_into_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(durable_files, "sync_folder", synced.append)
    make_folders(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    make_folders(tmp_path / "a" / "b" / "c")
    assert len(synced) == 3
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_folders(tmp_path / "file")


def test_a_folder_that_cannot_be_renamed_is_kept_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def busy(path: Path, target: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "rename", busy)
    with (
        pytest.raises(ConfigError, match=r"folder' cannot be replaced \(Device or resource busy\)"),
        replaced_folder(folder),
    ):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_has_one_writer_and_stays_as_it_was_when_that_fails(tmp_path: Path) -> None:
    folder, words = tmp_path / "folder", "another process is writing '.*folder'"
    with replaced_folder(folder) as new:
        (new / "note").write_text("first")
        with pytest.raises(ConfigError, match=words), replaced_folder(folder):
            pass
    with pytest.raises(KeyboardInterrupt), replaced_folder(folder) as new:
        (new / "note").write_text("half")
        raise KeyboardInterrupt
    assert (folder / "note").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
