"""The thread that reads uploaded files into banks while questions are answered.

It takes its work from the database: work not recorded there as done is repeated after a restart,
and a bank skips the documents that it has. It reads in small groups. Answers run between any two
batches of segments, because the engine takes turns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from sedem.engine.interface import Engine
from sedem.errors import BankError, BankMismatchError, DataError, SedemError
from sedem.model import SeDeM
from sedem.reading.building import build_bank
from sedem.serve.bank_entry import BankEntry
from sedem.serve.database import is_full
from sedem.serve.errors import ApiError
from sedem.serve.library import Library
from sedem.serve.metrics import Metrics
from sedem.serve.parsing import ParserProcess, StoppedError
from sedem.serve.reading_list import ListedFile, Removal
from sedem.types import Document

logger = logging.getLogger(__name__)

GROUP_FILES = 16
GROUP_CHARACTERS = 100_000
"""Minimum characters per commit; a restart repeats at most this and a part of one document."""
IDLE_SECONDS = 2.0
"""How often the operator's banks are checked while there is nothing to read."""
RETRY_SECONDS = 5.0
"""How long to wait after an error that is not about a file, such as a full disk."""


class Builder:
    """Reads files in the background.

    Args:
        library: the banks and the files to read.
        model: reads them.
        metrics: counts the blocks that were read.
        parser: parses files; None means a process with the usual limits.
    """

    def __init__(
        self,
        library: Library,
        model: SeDeM,
        metrics: Metrics,
        parser: ParserProcess | None = None,
    ) -> None:
        self.library, self.model, self.metrics = library, model, metrics
        self.parser = parser or ParserProcess()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sedem-builder", daemon=True)

    @property
    def engine(self) -> Engine:
        """The engine of the model."""
        return self.model.engine

    def start(self) -> None:
        """Start, or continue what a stopped server has left."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the current batch of segments; the rest is read after the next start.

        What was committed is kept.
        """
        self._stop.set()
        self.library.work.set()
        if self._thread.is_alive():
            self._thread.join()
        self.parser.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.library.work.clear()
            try:
                busy = self.turn()
            except StoppedError:
                continue  # the server is stopping, or the bank was deleted
            except Exception:
                logger.exception("reading files failed; trying again in %g s", RETRY_SECONDS)
                self._stop.wait(RETRY_SECONDS)
                continue
            if not busy:
                self.library.work.wait(IDLE_SECONDS)

    def turn(self) -> bool:
        """Do pending removals and read one group of files, or else compact a bank.

        Returns:
            Whether there was work to do.
        """
        self.library.refresh()
        self.library.remove_deleted()
        files, removals = self.library.reading.next_work(GROUP_FILES)
        self._remove(removals)
        if files:
            entry = self.library.by_id(files[0].bank)
            if entry is not None:
                self._read(entry, files)
        return bool(files or removals) or self._compact()

    def _compact(self) -> bool:
        """Compact a bank that needs it, unless it is being read into; returns whether one did."""
        limit, reading = self.library.settings.max_removed_share, self.library.reading
        return any(
            entry.compact(limit)
            for entry in self.library.entries()
            if entry.id is not None and not reading.has_work(entry.id)
        )

    def _remove(self, removals: Sequence[Removal]) -> None:
        """Remove documents from their banks; missing ones are ignored."""
        for bank in {removal.bank for removal in removals}:
            entry = self.library.by_id(bank)
            if entry is not None:
                entry.remove({removal.name for removal in removals if removal.bank == bank})
        if removals:
            self.library.reading.removed(removals)

    def _read(self, entry: BankEntry, files: Sequence[ListedFile]) -> None:
        sizes: dict[int, int] = {}
        entry.live = 0, sizes
        try:
            documents: dict[int, Document] = {}
            for file in files:
                if (document := self._parsed(entry, file)) is not None:
                    documents[file.id] = document
                    entry.live = 0, {id: len(one.text) for id, one in documents.items()}
                if sum(len(one.text) for one in documents.values()) >= GROUP_CHARACTERS:
                    break
            if documents:
                self._build(entry, documents)
        finally:
            entry.live = 0, {}

    def _parsed(self, entry: BankEntry, file: ListedFile) -> Document | None:
        """Return a file's document; None if it cannot be read, which is recorded."""
        path = self.library.files.path(file.file)
        try:
            return self.parser.parse(path, file.name, lambda: self._stopped(entry))
        except DataError as error:
            self._failed(file.id, str(error))
            return None

    def _build(self, entry: BankEntry, documents: Mapping[int, Document]) -> None:
        """Read documents into a bank; one that cannot be read does not stop the others."""
        started = time.monotonic()
        before = 0 if entry.bank is None else len(entry.bank)

        def progress(characters: int) -> None:
            entry.live = characters, entry.live[1]
            self.library.refresh()
            if self._stopped(entry):
                raise StoppedError

        try:
            build_bank(
                self.model, self.engine, entry.path, documents.values(), progress,
                source=self.model.source,
            )  # fmt: skip
        except (StoppedError, ApiError):
            raise
        except SedemError as error:
            if self._stopped(entry):
                raise StoppedError from None
            self._one_by_one(entry, documents, error)
            return
        entry.refresh()
        sizes = {id: len(document.text) for id, document in documents.items()}
        self.library.files.forget(self.library.reading.completed(sizes))
        self.metrics.built(
            max(0, (0 if entry.bank is None else len(entry.bank)) - before),
            time.monotonic() - started,
        )

    def _one_by_one(
        self, entry: BankEntry, documents: Mapping[int, Document], error: SedemError
    ) -> None:
        """Find the document that cannot be read."""
        if len(documents) > 1:
            for id, document in documents.items():
                self._build(entry, {id: document})
            return
        (id,) = documents
        logger.warning("a file could not be read into bank '%s': %s", entry.name, error)
        self._failed(id, _sentence(entry, error))

    def _failed(self, id: int, error: str) -> None:
        logger.info("a file could not be read: row %d", id)
        self.metrics.build_failed()
        self.library.files.forget(self.library.reading.failed(id, error))

    def _stopped(self, entry: BankEntry) -> bool:
        return self._stop.is_set() or entry.deleted


def _sentence(entry: BankEntry, error: SedemError) -> str:
    """Return what a client is told about an error; it must not name the server's folders."""
    if isinstance(error, BankMismatchError):
        return (
            f"bank '{entry.name}' was built by another model; upload to a new bank, or serve the "
            "model that built it"
        )
    if is_full(error):
        return "the disk of the server is full; add the file again when there is room"
    if isinstance(error, BankError):
        return "the bank cannot be written now; the log of the server has the reason"
    return str(error)
