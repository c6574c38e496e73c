"""The thread that reads uploads into banks while questions are answered.

It takes its work from the database: work not recorded there as done is repeated after a restart,
and a bank skips the documents that it has. It reads in small groups. Answers run between any two
batches of segments, because the engine takes turns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sedem.engine.device import step_back
from sedem.errors import BankError, BankMismatchError, DataError, SedemError
from sedem.model import SeDeM
from sedem.reading.building import build_bank
from sedem.reading.document_formats import parse_file
from sedem.serve.bank_entry import BankEntry
from sedem.serve.database import is_full
from sedem.serve.errors import ApiError
from sedem.serve.library import Library
from sedem.serve.metrics import Metrics
from sedem.serve.uploads import Removal, Upload
from sedem.types import Document
from sedem.untrusted import StoppedError

logger = logging.getLogger(__name__)

GROUP_FILES = 16
GROUP_CHARACTERS = 100_000
"""Minimum characters per commit; a restart repeats at most this and a part of one document."""
IDLE_SECONDS = 2.0
"""How often the operator's banks are checked while there is nothing to read."""
RETRY_SECONDS = 5.0
"""How long to wait after an error that is not about a file, such as a full disk."""


def parse_upload(path: Path, name: str, stopped: Callable[[], bool] = lambda: False) -> Document:
    """Return an uploaded file as a document.

    Raises:
        DataError: it cannot be read, or takes too much time or memory; one sentence.
        StoppedError: `stopped` returned true.
    """
    try:
        return Document(name, *parse_file(path, name, stopped=stopped))
    except FileNotFoundError:
        raise DataError(f"the upload '{name}' is not stored any more; upload it again") from None


class Builder:
    """Reads uploads in the background."""

    def __init__(
        self,
        library: Library,
        model: SeDeM,
        metrics: Metrics,
        parse: Callable[..., Document] = parse_upload,
    ) -> None:
        self.library, self.model, self.metrics, self.parse = library, model, metrics, parse
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sedem-builder", daemon=True)

    def start(self) -> None:
        """Start, or continue what a stopped server has left."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current batch of segments; the rest is read after the next start.

        What was committed is kept. This does not block.
        """
        self._stop.set()
        self.library.work.set()

    def close(self) -> None:
        """Stop, and wait until the thread has ended."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        step_back()
        told = ""
        while not self._stop.is_set():
            self.library.work.clear()
            try:
                busy = self.turn()
            except StoppedError:
                continue  # the server is stopping, or the bank was deleted
            except (ApiError, SedemError) as error:  # such as a full disk
                if str(error) != told:
                    logger.warning(
                        "reading files failed: %s; trying again every %g s", error, RETRY_SECONDS
                    )
                told = str(error)
                self._stop.wait(RETRY_SECONDS)
                continue
            except Exception:
                logger.exception("reading files failed; trying again in %g s", RETRY_SECONDS)
                self._stop.wait(RETRY_SECONDS)
                continue
            told = ""
            if not busy:
                self.library.work.wait(IDLE_SECONDS)

    def turn(self) -> bool:
        """Do pending removals and read one group of files, or else purge a bank.

        Returns:
            Whether there was work to do.
        """
        self.library.refresh()
        self.library.remove_deleted()
        uploads, removals = self.library.uploads.next_work(GROUP_FILES)
        self._remove(removals)
        if uploads:
            entry = self.library.by_id(uploads[0].bank)
            if entry is not None:
                self._read(entry, uploads)
        return bool(uploads or removals) or self._purge()

    def _purge(self) -> bool:
        """Purge a bank of documents that no answer reads any more; returns whether one was."""
        return any(entry.purge() for entry in self.library.entries() if entry.id is not None)

    def _remove(self, removals: Sequence[Removal]) -> None:
        """Remove documents from their banks; missing ones are ignored."""
        for bank in {removal.bank for removal in removals}:
            entry = self.library.by_id(bank)
            if entry is not None:
                entry.remove({removal.name for removal in removals if removal.bank == bank})
        if removals:
            self.library.uploads.removed(removals)

    def _read(self, entry: BankEntry, uploads: Sequence[Upload]) -> None:
        documents: dict[Upload, Document] = {}
        try:
            for upload in uploads:
                try:
                    documents[upload] = self.parse(
                        self.library.uploads.path(upload),
                        upload.name,
                        lambda: self._stopped(entry),
                    )
                except DataError as error:
                    self._failed(upload, str(error))
                entry.live = 0, {one.id: len(read.text) for one, read in documents.items()}
                if sum(len(document.text) for document in documents.values()) >= GROUP_CHARACTERS:
                    break
            if documents:
                self._build(entry, documents)
        finally:
            entry.live = 0, {}

    def _build(self, entry: BankEntry, documents: Mapping[Upload, Document]) -> None:
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
                self.model, self.model.engine, entry.path, documents.values(), progress,
                source=self.model.source,
            )  # fmt: skip
        except (StoppedError, ApiError):
            raise
        except SedemError as error:
            if self._stopped(entry):
                raise StoppedError from None
            if len(documents) > 1:
                for upload, document in documents.items():
                    self._build(entry, {upload: document})
                return
            (upload,) = documents
            logger.warning("a file could not be read into bank '%s': %s", entry.name, error)
            self._failed(upload, _sentence(entry, error))
            return
        entry.refresh()
        self.library.uploads.read(documents)
        after = 0 if entry.bank is None else len(entry.bank)
        self.metrics.built_blocks.inc(max(0, after - before))
        self.metrics.build_seconds.observe(time.monotonic() - started)

    def _failed(self, upload: Upload, error: str) -> None:
        logger.info("a file could not be read: row %d", upload.id)
        self.metrics.build_failures.inc()
        self.library.uploads.failed(upload, error)

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
