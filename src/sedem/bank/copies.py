"""Copies of banks: backups, checked ones, and one file from parts or parts from one.

Memory and texts are copied as they are, so a copy gives the same answers. It appears when it is
complete. All functions return the bytes of the copy. They raise a BankError if something exists at
the target, the bank is damaged, or the copy cannot be written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from sedem.bank.care import examine
from sedem.bank.file import BankFile, Place, already_there, delete, is_remote
from sedem.bank.memory_bank import MemoryBank, copy_to, store_at
from sedem.bank.parts import Parts
from sedem.durable_files import make_folders, sync_folder
from sedem.errors import BankError, DamagedBankError


def copy_bank(source: Place, target: Place, *, check: bool = False) -> int:
    """Copy a bank as of one commit into a new file, or to a new place in an object store.

    Other processes may write the bank meanwhile.

    Args:
        check: read all of the copy before it appears; it must be free of defects.
    """
    if is_remote(target) and check:
        with _new(target).temporary() as path:
            copy_bank(source, path, check=True)
            return copy_bank(path, target)
    files = store_at(source).files()
    if is_remote(target):
        return _publish(files, _new(target))
    with _appearing(Path(target), checked=source if check else None) as path:
        if len(files) == 1:
            files[0].copy_to(path)
        else:
            bank = MemoryBank.open(source).snapshot()
            copy_to(BankFile(path), bank, bank.meta)
    return Path(target).stat().st_size


def split(source: Place, target: Place, parts: int) -> int:
    """Write a bank as parts of similar size; each has whole documents.

    There are fewer parts than `parts` if there are fewer documents.
    """
    bank, given = MemoryBank.open(source).snapshot(), _new(target)
    blocks = np.bincount(bank.blocks.documents, minlength=len(bank.documents))
    # The part in which the middle of a document lies, if all blocks are divided evenly.
    middles = np.cumsum(blocks) - blocks / 2
    owners = np.floor(middles * parts / max(1, blocks.sum())).astype(int).clip(0, parts - 1)
    with given.temporary() as path:
        files = []
        for part in np.unique(owners).tolist() or [0]:
            files.append(BankFile(path.with_name(f"{part}.bank")))
            copy_to(files[-1], bank, bank.meta, np.flatnonzero(owners == part).tolist())
        return _publish(files, given)


def _publish(files: Sequence[BankFile], target: Parts) -> int:
    entries = [target.publish(file) for file in files]
    target.start(entries)
    return sum(entry.bytes for entry in entries)


def _new(place: Place) -> Parts:
    parts = Parts(place)
    if parts.exists():
        raise already_there(parts)
    return parts


@contextmanager
def _appearing(path: Path, checked: Place | None = None) -> Iterator[Path]:
    """Yield the path of a file that gets its name at the end, unless something has it.

    A copy of the bank `checked` must be free of defects; the first one is an error.
    """
    if os.path.lexists(path):
        raise already_there(path)
    partial = path.with_name(f".{path.name}.new")
    try:
        make_folders(path.parent)
        delete(partial)
        yield partial
        if checked is not None:
            file = BankFile(partial)
            # The copy is what is checked, but it is the source that the message is about.
            file.name = str(checked)
            problems = examine(file).problems
            file.close()
            if problems:
                more = f" (and {len(problems) - 1:,} more defects)" if problems[1:] else ""
                told = f"bank '{checked}' is damaged: {problems[0]}{more}; restore it"
                raise DamagedBankError(told)
        os.link(partial, path)
        sync_folder(path.parent)
    except FileExistsError:
        raise already_there(path) from None
    except OSError as error:
        raise BankError(f"'{path}' cannot be created ({error.strerror})") from None
    finally:
        delete(partial)
