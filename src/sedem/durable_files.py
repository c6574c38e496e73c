"""Files and folders that survive a crash whole, and digests that tell contents apart."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from sedem.errors import ConfigError

logger = logging.getLogger(__name__)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write a file that appears under its name only when it is complete.

    The temporary file is synced and renamed, and then the folder is synced. A crash at any point
    leaves the old file or the new one, never a part of one.

    Args:
        path: the file; one that exists is replaced.

    Yields:
        A temporary path in the same folder. Write and close it inside the `with` block; if the
        block raises, `path` stays as it was and the temporary file is removed.
    """
    temporary = path.with_name(f".{path.name}.partial")
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
    """Build a folder of a cache, unless it is complete or another process completes it.

    One process builds, under a lock and in a hidden folder beside; the others wait for it. The
    folder appears with one rename. What a killed process has left in the hidden folder is there
    when the next one builds.

    Args:
        folder: the folder.
        is_complete: whether a folder holds everything.
        build: fills the hidden folder.
        what: its content, for messages.

    Raises:
        ConfigError: the disk is full.
    """
    if is_complete(folder):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder, what):
        if is_complete(folder):
            return
        if folder.exists():
            shutil.rmtree(folder)
        partial = folder.with_name(f".{folder.name}.partial")
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
def _locked(folder: Path, what: str) -> Iterator[None]:
    """Hold the lock of a folder; say so if it takes waiting."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.warning("another process is writing %s; waiting until it is done", what)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def check_free_space(folder: Path, size: int, what: str) -> None:
    """Refuse to write what the disk has no room for.

    Args:
        folder: an existing folder on the disk.
        size: bytes to write.
        what: what is written, for the message.

    Raises:
        ConfigError: fewer bytes are free, with both numbers.
    """
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ConfigError(
            f"{what} needs {bytes_text(size)}, but the disk of '{folder}' has "
            f"{bytes_text(free)} free; make room or choose a cache on another disk"
        )


def reserve(path: Path, size: int, what: str) -> None:
    """Give a file all its bytes on disk now: writing to a mapped file on a full disk is fatal.

    Args:
        path: the file; bytes that it has are kept.
        size: bytes of the file.
        what: its content, for the message.

    Raises:
        ConfigError: the disk has no room for it.
    """
    with path.open("ab") as file:
        allocated = os.fstat(file.fileno()).st_blocks * 512
        check_free_space(path.parent, size - allocated, what)
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)


def bytes_text(size: int) -> str:
    """A number of bytes for people, such as "481 GB"."""
    amount = float(size)
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.3g} TB"


def make_folders(folder: Path) -> None:
    """Create a folder and the missing ones above it, so that a power cut cannot take one back.

    Args:
        folder: the folder; it may exist.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir(exist_ok=True)
        sync_folder(place.parent)


def sync_folder(folder: Path) -> None:
    """Make the renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(*paths: Path) -> str:
    """SHA-256, in hexadecimal, of a file's content, or of several files' joined in this order."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()
