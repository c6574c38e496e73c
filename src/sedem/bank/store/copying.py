"""Copy banks between folders, object stores and archives; shards are copied unchanged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from sedem.bank.store import archive, catalog
from sedem.bank.store.backup import backup, copy_commit, removed_on_error, shard_rows
from sedem.bank.store.catalog import CATALOG, ShardRow
from sedem.bank.store.local import LocalStore
from sedem.bank.store.opening import Place, store_at
from sedem.bank.store.shard import SHARDS
from sedem.durable_files import folder_bytes, sync_tree

if TYPE_CHECKING:
    from sedem.bank.store.object_store import ObjectStore


def copy_bank(source: Place, target: Place) -> int:
    """Copy a bank as of one commit; other processes may write it meanwhile.

    Args:
        source: a folder, or a place in an object store.
        target: a new place of either kind; the copy appears there when it is complete.

    Returns:
        Bytes of the copy.

    Raises:
        BankError: something exists at the target, the bank is damaged, or the copy cannot be
            written.
    """
    taken, given = store_at(source), store_at(target)
    if isinstance(taken, LocalStore):
        if isinstance(given, LocalStore):
            return backup(taken.folder, given.folder)
        return _upload(taken.folder, given)
    if isinstance(given, LocalStore):
        return _download(taken, given)
    with taken.as_folder() as folder:
        return _upload(folder, given)


def archive_of(source: Place, file: Path) -> int:
    """Write a bank to an archive; see `archive.export_bank`."""
    store = store_at(source)
    if isinstance(store, LocalStore):
        return archive.export_bank(store.folder, file)
    with store.as_folder() as folder:
        return archive.export_bank(folder, file)


def bank_of(file: Path, target: Place) -> int:
    """Make a bank from an archive; see `archive.import_bank`."""
    store = store_at(target)
    if isinstance(store, LocalStore):
        return archive.import_bank(file, store.folder)
    with store.appearing() as folder:
        size = archive.import_bank(file, folder / "bank")
        store.publish(folder / "bank")
        return size


def _upload(source: Path, store: ObjectStore) -> int:
    """Copy a folder into an object store; returns the bytes of the copy."""
    catalog.check_is_bank(source)
    with store.appearing() as folder:

        def copy(rows: list[ShardRow]) -> None:
            store.publish(folder, lambda row: source / SHARDS / row.file)

        copy_commit(source, folder, copy)
        return store.size()


def _download(store: ObjectStore, target: LocalStore) -> int:
    """Copy a bank from an object store into a new folder; returns the bytes of the copy."""
    with target.appearing() as unfinished, removed_on_error(unfinished.folder):
        with store.at_hand() as folder:
            shutil.copyfile(folder / CATALOG, unfinished.folder / CATALOG)
        shards = unfinished.folder / SHARDS
        shards.mkdir()
        for row in shard_rows(unfinished.folder)[0]:
            store.cache.download(row, shards / row.file)
        sync_tree(unfinished.folder)
        return folder_bytes(unfinished.folder)
