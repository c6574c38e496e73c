"""Files and folders that stay intact in a crash, and digests that identify contents."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from sedem.errors import ConfigError

logger = logging.getLogger(__name__)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write a file that appears under its name only when it is complete.

    The temporary file is synced and renamed, and then the folder is synced. A crash at any point
    leaves the old file or the new one, never a part of one.

    Yields:
        A temporary path in the same folder. Write and close it inside the `with` block; if the
        block raises, `path` stays as it was and the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.partial")
    temporary.unlink(missing_ok=True)  # a link there would be written through
    try:
        yield temporary
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write text as UTF-8 with `atomic_write`."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def build_once(
    folder: Path, is_complete: Callable[[Path], bool], build: Callable[[Path], None], what: str
) -> None:
    """Build a cache folder, unless it is complete or another process completes it.

    One process builds, under a lock and in a hidden folder next to it; the others wait. The folder
    appears with one rename. What a killed process left in the hidden folder is kept for the next
    build.

    Args:
        is_complete: whether a folder holds everything.
        build: fills the hidden folder.
        what: its content, for messages.

    Raises:
        ConfigError: the disk is full.
    """
    if is_complete(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(_beside(folder, "lock"))
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        logger.warning("another process is writing %s; waiting until it is done", what)
        held = lock.acquire()
    with held:
        if is_complete(folder):
            return
        if folder.exists():
            shutil.rmtree(folder)
        partial = _beside(folder, "partial")
        partial.mkdir(exist_ok=True)
        try:
            build(partial)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise ConfigError(
                f"the disk of '{folder.parent}' is full while {what} is written; make room or "
                "choose a cache on another disk, and run the same command again"
            ) from None
        sync_folder(partial)
        partial.rename(folder)
        sync_folder(folder.parent)


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Write a folder that appears, or replaces an existing one, only when it is complete.

    Every file is synced first. Then the old folder is renamed aside, the new one gets its name, and
    the old one is removed. A crash at any point leaves the old folder or the new one, which
    `whole_folder` finds; the next writer removes all other leftovers.

    Yields:
        A new hidden folder next to it. Write into it inside the `with` block; if the block raises,
        `folder` stays as it was.

    Raises:
        ConfigError: another process writes this folder, or it is the working folder.
    """
    folder = folder.resolve()
    new, old = _beside(folder, "partial"), _beside(folder, "old")
    if Path.cwd().is_relative_to(folder):
        raise ConfigError(
            f"'{folder}' is the working folder and would be replaced; run the command from "
            "another folder"
        )
    make_folders(folder.parent)
    lock = _beside(folder, "lock")
    try:
        held = FileLock(lock).acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"another process is writing '{folder}'; wait until it is done, or give another folder"
        ) from None
    with held:
        try:
            _clear_beside(folder)
            new.mkdir()
            yield new
            if folder.exists():
                shutil.copymode(folder, new)
            sync_tree(new)
            if folder.exists():
                try:
                    folder.rename(old)
                except OSError as error:
                    raise ConfigError(
                        f"'{folder}' cannot be replaced ({error.strerror}); give a new folder, "
                        "such as one inside it"
                    ) from None
            new.rename(folder)
            sync_folder(folder.parent)
        finally:
            _clear_beside(folder)
            lock.unlink(missing_ok=True)


def whole_folder(folder: Path) -> Path:
    """Return a folder that `replaced_folder` writes, or the old one if a crash left it aside."""
    with suppress(OSError, ValueError):  # the name may not be a valid one
        old = _beside(folder.resolve(), "old")
        if old.is_dir() and not folder.exists():
            return old
    return folder


def link_missing(source: Path, folder: Path) -> None:
    """Give a folder the entries of another one that it lacks, as links if the disk has them."""
    for entry in source.iterdir():
        target = folder / entry.name
        if target.exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, target, symlinks=True, copy_function=link)
        else:
            link(entry, target)


def link(source: str | Path, target: str | Path) -> None:
    """Give a file a second name; it is a copy where the file system has no hard links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


def _clear_beside(folder: Path) -> None:
    """Restore the name of an old folder that a crash left aside, and remove all other leftovers."""
    old = _beside(folder, "old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    for left in (old, _beside(folder, "partial")):
        if left.exists():
            shutil.rmtree(left)


def check_free_space(folder: Path, size: int, what: str) -> None:
    """Refuse to write `what`, of `size` bytes, if the disk of a folder has no room for it."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ConfigError(
            f"{what} needs {bytes_text(size)}, but the disk of '{folder}' has "
            f"{bytes_text(free)} free; make room or choose a cache on another disk"
        )


def reserve(path: Path, size: int, what: str) -> None:
    """Allocate a file on disk now, because writing to a mapped file on a full disk is fatal.

    Existing bytes are kept.
    """
    with path.open("ab") as file:
        allocated = os.fstat(file.fileno()).st_blocks * 512
        check_free_space(path.parent, size - allocated, what)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)


def bytes_text(size: int) -> str:
    """Format a number of bytes for people, such as "481 GB"."""
    amount = float(size)
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.3g} PB"


def create_private(path: Path) -> None:
    """Create an empty file that only its owner may read and write; an existing one stays."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0), 0o600))


def make_folders(folder: Path, mode: int = 0o777) -> None:
    """Create a folder and its missing parents; a power cut after that loses none of them."""
    missing = [place for place in (folder, *folder.parents) if not place.is_dir()]
    for place in reversed(missing):
        place.mkdir(mode, exist_ok=True)
        sync_folder(place.parent)


def sync_folder(folder: Path) -> None:
    """Make the renames in a folder durable, or the content of a file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make everything in a folder durable: the content of its files, and their names."""
    for place, _, names in os.walk(folder, topdown=False):
        for path in (Path(place, name) for name in names):
            if not path.is_symlink():
                sync_folder(path)
        sync_folder(Path(place))


def sha256(*paths: Path) -> str:
    """Return the hexadecimal SHA-256 of a file, or of several files joined in this order."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
