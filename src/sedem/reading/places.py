"""The banks that people name: one that was built, or a folder that is read into one.

The files of a folder are only read: its bank is elsewhere and holds the notes of agents too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path

from sedem.errors import DataError
from sedem.reading.followed import FollowedBank, OpenBank
from sedem.untrusted import exists, is_folder

PARTS = "bank.json"
"""File of a folder that is a bank in parts, `bank.file.MANIFEST`."""


def banks_at(places: Sequence[str], home: Path, model: str) -> list[OpenBank]:
    """Return the banks at some places, with distinct names.

    Args:
        home: where the banks of folders are kept.
        model: name of the model that reads them; each model has its own bank of a folder.
    """
    banks: dict[str, OpenBank] = {}
    for place in places:
        path = Path(place).expanduser()
        stem = os.path.basename(os.path.abspath(place)).removesuffix(".bank") or "folder"
        numbered = (f"{stem}-{number}" for number in count(2))
        name = next(name for name in chain([stem], numbered) if name not in banks)
        if "://" in place:
            banks[name] = OpenBank(place, name)
        elif path.is_file() or exists(path / PARTS):
            banks[name] = OpenBank(path, name)
        else:
            # Wherever and in whatever company the folder is named, its bank is the same.
            key = f"{path.resolve()}\n{model}".encode()
            file = f"{hashlib.sha256(key).hexdigest()[:12]}.bank"
            known = home.expanduser() / f"{path.resolve().name}-{file}"
            # Earlier releases named it by what else was named.
            bank = next(home.expanduser().glob(f"*-{file}"), known)
            if not is_folder(path) and not bank.exists():
                raise DataError(f"there is no bank and no folder '{place}'; give one that exists")
            banks[name] = FollowedBank(bank, path, name)
    return [*banks.values()]
