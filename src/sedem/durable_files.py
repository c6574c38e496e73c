"""Files that survive a crash whole, and the digest that tells one file's content from another's."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
