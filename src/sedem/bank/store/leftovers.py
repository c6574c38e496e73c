"""Files that no table names: left by a crash, a removal or a compaction, cleared by a writer.

A shard that a repair has set aside is not one of them; it stays until someone deletes it.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from sedem.bank.store import catalog, catalog_rows, kept_files, key_files
from sedem.bank.store.salvage import WORK
from sedem.bank.store.shard import SHARDS

_PART = re.compile(r"\d{6,}\.safetensors")
_UNFINISHED = re.compile(r"\.\d{6,}\.safetensors\.partial")


def clear(folder: Path, connection: sqlite3.Connection) -> None:
    """Remove shards that the catalog does not name, their derived files, and unfinished files.

    Args:
        folder: the bank's folder, whose lock is held.
        connection: connection to its catalog.

    Raises:
        BankError: files are left over and the catalog is damaged, so it may have lost the name of
            a shard that is needed.
    """
    shutil.rmtree(folder / WORK, ignore_errors=True)
    places = [folder / name for name in (SHARDS, key_files.FOLDER, kept_files.FOLDER)]
    named = catalog.shard_files(connection)
    if not any(path for place in places for path in _left_over(place, named)):
        return
    # SQLite answers from an index, which has no checksum; only verified rows may decide this.
    _, state = catalog_rows.read_meta(folder, connection)
    shards = catalog_rows.read_shards(folder, connection, state)
    named = {shard.row.file for shard in shards}
    for place in places:
        for path in [*_left_over(place, named)]:
            path.unlink(missing_ok=True)


def _left_over(folder: Path, named: set[str]) -> Iterator[Path]:
    # A link may point to the folder of another bank.
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        unnamed = _PART.fullmatch(path.name) and path.name not in named
        if unnamed or _UNFINISHED.fullmatch(path.name):
            yield path
