"""A bank as one file: a tar archive of its catalog and its shards, which is checked on import.

An archive is untrusted. Its headers are read one by one, and only regular files with the names of a
catalog or of shards are accepted. The new bank appears only after everything has been checked.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from sedem.bank.store import catalog, catalog_rows, verify
from sedem.bank.store.backup import check_free, checked, copy_commit, removed_on_error
from sedem.bank.store.catalog import CATALOG, ShardRow
from sedem.bank.store.local import LocalStore
from sedem.bank.store.shard import SHARDS, Maps, Shard
from sedem.durable_files import sync_folder
from sedem.errors import BankError
from sedem.untrusted import open_file

_ALLOWED = re.compile(rf"{re.escape(CATALOG)}|{SHARDS}/\d{{6,18}}\.safetensors")
_CHUNK = 2**20


def export_bank(folder: Path, file: Path) -> int:
    """Write a bank as of one commit to an archive; other processes may write the bank meanwhile.

    Keys and kept values are left out because they can be recomputed.

    Args:
        folder: the bank's folder.
        file: the new archive, which appears when it is complete.

    Returns:
        Bytes of the archive.

    Raises:
        BankError: something exists at that path, the bank is damaged, or the archive cannot be
            written.
    """
    catalog.check_is_bank(folder)
    check_free(file)
    with LocalStore(file).hidden() as unfinished, removed_on_error(unfinished.folder):
        archive = unfinished.folder / "archive.tar"

        def write(rows: list[ShardRow]) -> None:
            with (
                archive.open("wb") as target,
                tarfile.open(fileobj=target, mode="w:", format=tarfile.GNU_FORMAT) as tar,
            ):
                with (unfinished.folder / CATALOG).open("rb") as source:
                    tar.addfile(_member(CATALOG, os.fstat(source.fileno()).st_size), source)
                for row in rows:
                    with checked(folder, row) as shard:
                        tar.addfile(_member(f"{SHARDS}/{row.file}", row.size), shard)

        copy_commit(folder, unfinished.folder, write)
        with archive.open("rb+") as written:
            os.fsync(written.fileno())
        archive.rename(file)
        sync_folder(file.parent)
        shutil.rmtree(unfinished.folder)
    return file.stat().st_size


def import_bank(file: Path, folder: Path) -> int:
    """Make a bank from an archive, after checking everything in it.

    Args:
        file: the archive.
        folder: the new bank, which appears when it is complete.

    Returns:
        Bytes of the archive.

    Raises:
        BankError: something exists at that path, or the archive is not exactly one whole bank.
    """
    check_free(folder)
    try:
        source = open_file(file, BankError)
    except FileNotFoundError:
        raise BankError(f"there is no archive '{file}'") from None
    with (
        source,
        LocalStore(folder).appearing() as unfinished,
        removed_on_error(unfinished.folder),
    ):
        (unfinished.folder / SHARDS).mkdir()
        names = set()
        for name, size in _members(source, file):
            if name in names:
                raise _refused(file, f"it has '{name}' twice")
            names.add(name)
            _extract(source, size, unfinished.folder / name)
        sync_folder(unfinished.folder / SHARDS)
        _check_whole(file, unfinished.folder, names)
        return os.fstat(source.fileno()).st_size


def _member(name: str, size: int) -> tarfile.TarInfo:
    """Return a header that depends only on the name and the size."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info


def _members(archive: IO[bytes], file: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and size of each member; the archive is then positioned at its content.

    Headers are parsed here, not by `tarfile.open`, which would follow long names, links and
    sparse files of any size.
    """
    end, place = os.fstat(archive.fileno()).st_size, 0
    while True:
        archive.seek(place)
        header = archive.read(tarfile.BLOCKSIZE)
        if len(header) == tarfile.BLOCKSIZE and not header.strip(b"\0"):
            return
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
        except (tarfile.TarError, ValueError):
            raise _refused(file, "it ends early or is not an uncompressed tar file") from None
        if info.type != tarfile.REGTYPE or not _ALLOWED.fullmatch(info.name):
            shown = info.name[:100]
            raise _refused(file, f"its member {shown!a} is not a bank's catalog or shard")
        place += tarfile.BLOCKSIZE
        if not 0 <= info.size <= end - place:
            raise _refused(file, f"its member '{info.name}' is larger than the archive")
        yield info.name, info.size
        place += -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _extract(archive: IO[bytes], size: int, path: Path) -> None:
    with path.open("xb") as target:
        while size:
            content = archive.read(min(size, _CHUNK))
            if not content:
                raise BankError(f"'{archive.name}' was shortened while it was read; try again")
            target.write(content)
            size -= len(content)
        target.flush()
        os.fsync(target.fileno())


def _check_whole(file: Path, folder: Path, names: set[str]) -> None:
    """Refuse an archive unless it holds exactly one complete bank."""
    if CATALOG not in names:
        raise _refused(file, f"it has no {CATALOG}")
    try:
        problem, named = _examined(folder)
    except BankError as error:
        problem, named = str(error).replace(str(folder), str(file)), set()
    if problem:
        raise _refused(file, problem)
    if more := names - {CATALOG} - named:
        raise _refused(file, f"its catalog does not name '{min(more)}'")


def _examined(folder: Path) -> tuple[str, set[str]]:
    """Return the first defect of a bank, if any, and the shards that it names."""
    with catalog.connect(folder) as connection:
        # A foreign schema may hold a view whose query never ends.
        if catalog.has_foreign_schema(connection):
            return "its catalog has other tables than those of a bank", set()
        meta, state = catalog_rows.read_meta(folder, connection)
        stored = catalog_rows.read_shards(folder, connection, state)
    if problems := verify.examine(folder).problems:
        return problems[0], set()
    width, maps = int(meta.made_by["width"]), Maps(limit=1)
    for shard in stored:
        Shard(folder / SHARDS, shard, width, meta.dtype, maps).whole()
    return "", {f"{SHARDS}/{shard.row.file}" for shard in stored}


def _refused(file: Path, reason: str) -> BankError:
    return BankError(f"'{file}' is not the archive of a bank: {reason}; export the bank again")
