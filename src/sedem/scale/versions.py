"""Versions of banks: what a question is answered from, the same on every machine.

The process that serves HTTP makes a version of each snapshot of a bank that it sees, and sends it
to the replicas: of a stored bank its place and the number of the version, of a bank in RAM its
bytes. Every replica opens exactly this version, no matter what was written to the bank since. A
request names its version, so a replica that has just been started opens that version on demand, and
cannot use another one by mistake.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

from sedem.bank.file import BankFile
from sedem.bank.memory_bank import Snapshot
from sedem.errors import UnavailableError

T = TypeVar("T")
KEPT = 64
"""Versions that a replica keeps open; one that is needed again later is reopened."""
KEPT_OF_ONE = 2
"""Versions of one bank among them: the newest, and one that questions may still run on."""


@dataclass(frozen=True)
class Version:
    """One version of a bank.

    Attributes:
        id: unique among all versions of all banks.
        number: later versions have larger numbers.
        bank: the same for all versions of one bank.
        blocks: its number of blocks.
        stored: whether every replica opens it at its place. Its blocks are then selected by parts.
            Banks in RAM are small, and one replica answers from them alone.
        content: where its snapshot is; a reference to a Ray object.
    """

    id: str
    number: int
    bank: str
    blocks: int
    stored: bool
    content: Any


class Versions:
    """The versions that one process hands out; threads may share it.

    A version lives as long as its snapshot, and so as long as a question runs on it.

    Args:
        put: stores a snapshot for the replicas, and returns a reference to it.
    """

    def __init__(self, put: Callable[[Snapshot], Any]) -> None:
        self._put = put
        self._known: WeakKeyDictionary[Snapshot, Version] = WeakKeyDictionary()
        self._numbers = count(1)
        # Another process may have handed out versions of the same banks.
        self._run = uuid4().hex[:12]
        self._lock = threading.Lock()

    def of(self, snapshot: Snapshot) -> Version:
        """Return the version of a snapshot; the first call stores the snapshot for replicas."""
        with self._lock:
            if (known := self._known.get(snapshot)) is not None:
                return known
            number = next(self._numbers)
            id = f"{self._run}-{number}"
            store = snapshot.store
            is_stored = not isinstance(store, BankFile) or store.path is not None
            bank = str(store) if is_stored else id
            content = self._put(snapshot)
            version = Version(id, number, bank, len(snapshot), is_stored, content)
            self._known[snapshot] = version
            return version


class OpenVersions(Generic[T]):
    """What one replica has made from the requested versions; threads may share it.

    Args:
        fetch: returns the snapshot of a version.
        make: makes what the replica needs from a snapshot.
        kept: versions that stay open.
    """

    def __init__(
        self,
        fetch: Callable[[Any], Snapshot],
        make: Callable[[Snapshot], T],
        kept: int = KEPT,
    ) -> None:
        self._fetch, self._make, self._kept = fetch, make, kept
        self._open: OrderedDict[str, tuple[Version, T]] = OrderedDict()
        self._lock, self._making = threading.Lock(), threading.Lock()

    def get(self, version: Version) -> T:
        """Return what was made from a version; this takes long the first time.

        Raises:
            UnavailableError: the process that handed it out has ended.
            BankError: another bank is at its place now.
            SedemError: what `make` raises.
        """
        if (found := self._look(version)) is not None:
            return found
        # One at a time: two would take the memory of both.
        with self._making:
            if (found := self._look(version)) is not None:
                return found
            made = self._make(self._fetched(version))
            self._keep(version, made)
            return made

    def ids(self) -> list[str]:
        """Return the ids of the open versions, the most recently used one last."""
        with self._lock:
            return [*self._open]

    def _look(self, version: Version) -> T | None:
        with self._lock:
            if version.id not in self._open:
                return None
            self._open.move_to_end(version.id)
            return self._open[version.id][1]

    def _keep(self, version: Version, made: T) -> None:
        with self._lock:
            self._open[version.id] = version, made
            same = [one for one, _ in self._open.values() if one.bank == version.bank]
            for old in sorted(same, key=lambda one: one.number)[:-KEPT_OF_ONE]:
                if old.id != version.id:
                    del self._open[old.id]
            while len(self._open) > self._kept:
                self._open.popitem(last=False)

    def _fetched(self, version: Version) -> Snapshot:
        try:
            snapshot = self._fetch(version.content)
        except Exception as error:
            raise UnavailableError(
                f"version {version.number} of the bank is lost with the process that served it; "
                "ask again"
            ) from error
        for view in snapshot.views:
            view.file.check_holds(view.head)
        return snapshot
