"""Publishing the bank in a folder as a commit of an object store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sedem.bank.store import catalog
from sedem.bank.store.backup import shard_rows
from sedem.bank.store.catalog import CATALOG, ShardRow
from sedem.bank.store.object_bucket import AT_ONCE
from sedem.bank.store.object_cache import Cache
from sedem.bank.store.object_commits import (
    PART,
    Commit,
    part_digests,
    part_name,
    shard_name,
)
from sedem.bank.store.object_commits import (
    publish as create,
)
from sedem.bank.store.shard import SHARDS
from sedem.durable_files import sha256
from sedem.errors import BankError


def publish(
    cache: Cache,
    base: Commit | None,
    folder: Path,
    path_of: Callable[[ShardRow], Path] | None = None,
) -> Commit:
    """Make the bank in a folder the newest commit.

    Everything that the previous commit does not name is uploaded, even if the store has it: an
    object that no commit names may be removed at any time, unless it is new.

    Args:
        cache: the bank's cache; new shards in the folder are moved into it.
        base: the commit that the folder was made from; None for a new bank.
        folder: holds the catalog, and the shards that `base` lacks.
        path_of: where those shards are; they stay there. None means in the folder.

    Returns:
        The commit; `base` if nothing has changed.

    Raises:
        LostRaceError: another writer came first; the bank is as that writer left it.
        BankError: a shard is damaged, or the store cannot be used.
    """
    with catalog.connect(folder, alone=True) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    rows, _ = shard_rows(folder)
    parts = part_digests(folder / CATALOG)
    if base is not None and parts == base.parts:
        return base
    known = set() if base is None else {*base.parts, *base.shards}
    new = [row for row in rows if row.sha256 not in known]
    for row in new:
        path = folder / SHARDS / row.file if path_of is None else path_of(row)
        if path.stat().st_size != row.size or sha256(path) != row.sha256:
            raise BankError(f"shard '{path}' is damaged; run 'sedem bank verify --repair'")
        cache.bucket.write(shard_name(row.sha256), path)
    _write_parts(cache, folder / CATALOG, [*enumerate(parts)], known)
    commit = Commit(
        number=1 if base is None else base.number + 1,
        parent="" if base is None else base.writer,
        size=(folder / CATALOG).stat().st_size,
        parts=parts,
        shards=tuple(sorted({row.sha256 for row in rows})),
    )
    create(cache.bucket, commit)
    if path_of is None:
        for row in new:
            cache.adopt(row, folder / SHARDS / row.file)
    return commit


def _write_parts(cache: Cache, path: Path, parts: list[tuple[int, str]], known: set[str]) -> None:
    """Upload the parts of a catalog that the previous commit does not name."""

    def write(part: tuple[int, str]) -> None:
        index, digest = part
        with path.open("rb") as file:
            file.seek(index * PART)
            cache.bucket.write(part_name(digest), file.read(PART))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(write, [part for part in parts if part[1] not in known]):
            pass
