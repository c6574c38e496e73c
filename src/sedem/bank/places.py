"""The store of a bank at a place: one file, or parts in a folder or an object store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from sedem.bank.database import WAIT
from sedem.bank.file import BankFile
from sedem.bank.manifest import MANIFEST
from sedem.errors import BankError

if TYPE_CHECKING:
    from sedem.bank.remote import Parts

Place = str | Path
"""A file, the folder of a bank in parts, or a place in an object store such as "s3://bucket/bank"."""
Store: TypeAlias = "BankFile | Parts"
"""The store of a bank."""


def store_at(place: Place, wait: float = WAIT) -> Store:
    """Return the store of the bank at a place; the bank need not exist yet.

    Args:
        place: a file, a folder, or a place in an object store.
        wait: seconds to wait for another writer.

    Raises:
        ConfigError: the place needs a package that is not installed.
        BankError: no bank can be there.
    """
    if not is_remote(place) and not Path(place, MANIFEST).exists():
        return BankFile(Path(place), wait)
    from sedem.bank.remote import Parts

    return Parts(place, wait)


def is_remote(place: Place) -> bool:
    """Whether a place is in an object store, not on local disk."""
    return isinstance(place, str) and "://" in place


def local_file(place: Place, what: str) -> Path:
    """Return the file of a bank on local disk.

    Args:
        place: the bank's place.
        what: what needs it, such as "'sedem bank warm'", for the message.

    Raises:
        BankError: the bank is in parts.
    """
    if isinstance(store_at(place), BankFile):
        return Path(place)
    raise BankError(
        f"{what} needs a bank in one file; copy it with 'sedem bank join {place} FILE.bank', and "
        "give that file"
    )
