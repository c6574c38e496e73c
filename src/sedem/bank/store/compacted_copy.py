"""A compacted copy of a bank in a new folder, so that readers of the bank are not disturbed."""

from __future__ import annotations

import shutil
from pathlib import Path

from sedem.bank.store import catalog, catalog_rows
from sedem.bank.store.backup import check_free, copy_commit, removed_on_error
from sedem.bank.store.catalog import ShardRow
from sedem.bank.store.checksums import State
from sedem.bank.store.kept_files import FOLDER as KEPT
from sedem.bank.store.key_files import FOLDER as KEYS
from sedem.bank.store.local import LocalStore
from sedem.bank.store.shard import SHARDS
from sedem.durable_files import link, sync_folder


def compacted_copy(folder: Path, target: Path) -> State:
    """Copy a bank as of one commit and compact the copy; others may write the bank meanwhile.

    Unchanged files are hard-linked instead of copied, so the bank must be removed once it has
    no readers: the copy is not a backup.

    Args:
        folder: the bank's folder.
        target: the new folder, which appears when it is complete.

    Returns:
        The state that was copied; if `state_of` the bank differs, the bank was written since.

    Raises:
        BankError: something exists at the target, the bank is damaged, or the copy cannot be
            written.
    """
    catalog.check_is_bank(folder)
    check_free(target)
    with LocalStore(target).appearing() as unfinished, removed_on_error(unfinished.folder):

        def copy(rows: list[ShardRow]) -> None:
            for name in (SHARDS, KEYS, KEPT):
                place = unfinished.folder / name
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                for row in rows:
                    # Files derived from a shard may be missing; they can be recomputed.
                    if name == SHARDS or (folder / name / row.file).is_file():
                        link(folder / name / row.file, place / row.file)
                sync_folder(place)

        copy_commit(folder, unfinished.folder, copy)
        copied = state_of(unfinished.folder)
        unfinished.compact()
        return copied


def state_of(folder: Path) -> State:
    """Return the state of a bank, which changes with every commit.

    Raises:
        BankError: there is no bank, or its catalog is damaged.
    """
    with catalog.connect(folder) as connection:
        return catalog_rows.read_meta(folder, connection)[1]
