"""Temporary banks of texts that come with questions; texts that were already read are reused.

Each text is read into its own bank, so that a continued conversation reads only what is new.
Nothing is shared between API keys: not even the time of an answer reveals to one key what another
has sent.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from threading import Event

from sedem.answering.running import MEASURED, TELL
from sedem.bank.index import cached_bytes
from sedem.bank.memory_bank import Snapshot
from sedem.engine.device import step_back
from sedem.engine.kept import REQUESTS, half_of_memory
from sedem.errors import CancelledError, QueueFullError
from sedem.model import SeDeM
from sedem.types import Document
from sedem_serve.server.logs import log
from sedem_serve.server.settings import ServerSettings

LONG_CHARACTERS = 20_000
"""A longer text is read by a thread that steps back behind answers and short texts."""
KEPT_SHARE = 2
"""Kept banks and their keys take at most this part, one in so many, of the memory of requests."""

PartId = tuple[str, bytes]
"""Name of the API key, and SHA-256 of a document's name and text."""


@dataclass(eq=False)
class Reading:
    """A text that is being read or was read.

    Attributes:
        bytes: what its bank and the bank's keys take, once it is read.
        given_up: set once no request waits for it, so that reading it may stop.
    """

    document: Document
    bytes: int = 0
    waiting: int = 0
    given_up: Event = field(default_factory=Event)
    future: Future[Snapshot] = field(init=False)


class OnlineBanks:
    """Reads texts in its own threads and keeps the most recently used banks.

    The methods must be called in one event loop.
    """

    def __init__(self, model: SeDeM, settings: ServerSettings) -> None:
        self.model, self.settings = model, settings
        memory = settings.memory or half_of_memory()
        self._room = None if memory is None else memory // (REQUESTS * KEPT_SHARE)
        self._parts: OrderedDict[PartId, Reading] = OrderedDict()
        self._joined: OrderedDict[tuple[PartId, ...], Snapshot] = OrderedDict()
        # A short text need not wait for a long one to end.
        self._short = ThreadPoolExecutor(1, "sedem-reading")
        self._long = ThreadPoolExecutor(1, "sedem-long-reading", initializer=step_back)

    @property
    def waiting(self) -> int:
        """How many texts wait to be read or are being read."""
        return sum(not reading.future.done() for reading in self._parts.values())

    def __len__(self) -> int:
        """How many banks of texts are kept."""
        return len(self._parts)

    def close(self) -> None:
        """Stop reading, and wait until the threads have ended."""
        for reading in self._parts.values():
            reading.given_up.set()
        for executor in (self._short, self._long):
            executor.shutdown(cancel_futures=True)

    async def bank(self, owner: str, documents: Sequence[Document]) -> tuple[Snapshot, int]:
        """Return a bank of some texts, and how many of their tokens had been read before.

        Raises:
            QueueFullError: too many texts wait to be read.
            DataError: a text has no tokens.
        """
        texts = (f"{one.name}\0{one.text}".encode() for one in documents)
        ids = tuple((owner, sha256(text).digest()) for text in texts)
        known = [part in self._parts for part in ids]
        fresh = len(known) - sum(known)
        if fresh and self.waiting + fresh > max(self.settings.waiting, fresh):
            raise QueueFullError(
                f"{self.waiting} texts are waiting to be read; ask again later, or read documents "
                "into a bank once"
            )
        # Start to read what nobody has asked before.
        readings: list[Reading] = []
        for part, document in zip(ids, documents, strict=True):
            reading = self._parts.get(part)
            if reading is None:
                reading = self._parts[part] = Reading(document)
                long = len(document.text) > LONG_CHARACTERS
                reading.future = (self._long if long else self._short).submit(self._read, reading)
            self._parts.move_to_end(part)
            reading.waiting += 1
            readings.append(reading)
        try:
            parts = [await _shielded(reading.future) for reading in readings]
        finally:
            # Give up what failed, and what nobody waits for any more.
            for part, reading in zip(ids, readings, strict=True):
                reading.waiting -= 1
                future = reading.future
                failed = future.done() and (future.cancelled() or future.exception() is not None)
                if failed or (not future.done() and not reading.waiting):
                    reading.given_up.set()
                    future.cancel()
                    # Another reading of the same text may have started since.
                    if self._parts.get(part) is reading:
                        del self._parts[part]
        # Join several texts. Their bank is kept, because it owns the keys of its blocks.
        bank = parts[0] if len(parts) == 1 else self._joined.get(ids)
        if bank is None:
            bank = Snapshot([view for one in parts for view in one.views], parts[0].store)
        if len(parts) > 1:
            self._joined[ids] = bank
            self._joined.move_to_end(ids)
        # Drop the least recently used banks, until the others have room.
        size, most = sum(one.bytes for one in self._parts.values()), self.settings.online_banks
        for part in [part for part, reading in self._parts.items() if reading.future.done()]:
            if len(self._parts) <= most and (self._room is None or size <= self._room):
                break
            size -= self._parts.pop(part).bytes
        for joined in [*self._joined]:
            if len(self._joined) > most or any(part not in self._parts for part in joined):
                del self._joined[joined]
        return bank, sum(one.tokens for one, was in zip(parts, known, strict=True) if was)

    def _read(self, reading: Reading) -> Snapshot:
        began, told = time.perf_counter(), False

        def progress(done: int, total: int) -> None:
            nonlocal told
            if reading.given_up.is_set():
                raise CancelledError("nobody waits for this text any more")
            spent = time.perf_counter() - began
            if told or not done or spent < MEASURED:
                return
            told = True
            if (left := spent * (total - done) / done) > TELL - spent:
                log("long text", characters=len(reading.document.text), seconds=round(left))

        bank = self.model.read([reading.document], progress=progress).snapshot()
        held = sum(view.file.size for view in bank.views)
        reading.bytes = held + cached_bytes(bank, self.model.selector)
        return bank


async def _shielded(future: Future[Snapshot]) -> Snapshot:
    """Wait for a reading that others may wait for too; a cancelled wait does not end it."""
    waited = asyncio.wrap_future(future)
    # The exception is retrieved here, because a cancelled wait does not.
    waited.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(waited)
