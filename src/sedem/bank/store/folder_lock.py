"""The lock of a bank's folder, and errors that may occur while writing to it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import Timeout
from safetensors import SafetensorError

from sedem.errors import BankError

LOCK = "LOCK"


@contextmanager
def write_errors(bank: Path) -> Iterator[None]:
    """Raise errors of the lock, the file system and safetensors as `BankError`."""
    try:
        yield
    except Timeout:
        raise being_written(bank) from None
    except (OSError, SafetensorError) as error:
        raise BankError(f"bank '{bank}' cannot be written ({error}); it is unchanged") from None


def being_written(bank: object) -> BankError:
    """Return the error for a bank that another process is writing."""
    return BankError(f"bank '{bank}' is being written by another process; wait until it is done")


def already_there(bank: object) -> BankError:
    """Return the error for a place that is already taken."""
    return BankError(f"'{bank}' exists already; choose another name or append to it")


def check_absent(folder: Path) -> None:
    """Refuse to make a bank where something exists.

    Raises:
        BankError: something has that name.
    """
    if folder.exists():
        raise already_there(folder)


def clear_folder(folder: Path) -> None:
    """Remove the files of a killed process, except the lock."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != LOCK:
            entry.unlink()
