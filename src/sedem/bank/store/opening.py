"""Map a bank's place to its store: a folder on local disk, or a place in an object store."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from sedem.bank.documents import Source
from sedem.bank.store import catalog
from sedem.bank.store.compaction import Compacted
from sedem.bank.store.local import LocalStore
from sedem.bank.store.shard import Check
from sedem.errors import BankError, ConfigError

if TYPE_CHECKING:
    from sedem.bank.store.object_store import ObjectStore

Place = str | Path
"""A folder, or a place in an object store such as "s3://bucket/folder"."""
PlacedStore: TypeAlias = "LocalStore | ObjectStore"
"""The store of a bank at a place."""


def store_at(
    place: Place, check: Check = "once", source: Source | None = None, wait: float = 0
) -> PlacedStore:
    """Return the store of the bank at a place; the bank need not exist yet.

    Args:
        place: a folder, or a place in an object store.
        check: when a block's checksum is verified: on its first use ("once") or on every use
            ("always").
        source: reads texts that the bank does not hold; None if there is no such source.
        wait: seconds to wait for another writer.

    Raises:
        ConfigError: the place needs a package that is not installed.
        BankError: no bank can be there.
    """
    if not is_remote(place):
        return LocalStore(Path(place), check, source, wait)
    from sedem.bank.store.object_store import ObjectStore

    return ObjectStore(str(place), check=check, source=source, wait=wait)


def check_is_bank(place: Place) -> None:
    """Refuse a place that holds no bank.

    Raises:
        BankError: there is none, or the place cannot be read.
    """
    store = store_at(place)
    if isinstance(store, LocalStore):
        catalog.check_is_bank(store.folder)
    else:
        store.commit()


def compact_at(place: Place, keep: float | None = None) -> Compacted:
    """Compact the bank at a place.

    Args:
        place: the bank's place.
        keep: hours for which an object store keeps the objects of earlier commits; None means 24.
            A folder frees its space at once.

    Raises:
        ConfigError: `keep` is given for a folder.
        BankError: as in `LocalStore.compact` and `ObjectStore.compact`.
    """
    store = store_at(place)
    if keep is None:
        return store.compact()
    if isinstance(store, LocalStore):
        raise ConfigError(
            f"--keep is for banks in object stores; '{place}' is on disk: leave it out"
        )
    return store.compact(timedelta(hours=keep))


def is_remote(place: Place) -> bool:
    """Whether a place is in an object store, not on local disk."""
    return isinstance(place, str) and "://" in place


def local_folder(place: Place, what: str) -> Path:
    """Return the folder of a bank on local disk.

    Args:
        place: the bank's place.
        what: what needs it, such as "'sedem bank warm'", for the message.

    Raises:
        BankError: the bank is in an object store.
    """
    if is_remote(place):
        raise BankError(
            f"{what} needs a bank on local disk; copy it down with 'sedem bank backup {place} "
            "FOLDER', and give FOLDER"
        )
    return Path(place)
