"""The thread that reads uploads into banks while questions are answered.

It reads in small groups, of one bank after the other. Answers run between any two batches of
segments, because the engine takes turns.
"""

from __future__ import annotations

import logging
import threading
import time

from sedem.engine.device import step_back
from sedem.errors import SedemError
from sedem.model import SeDeM
from sedem.serve.errors import ApiError
from sedem.serve.library import Library
from sedem.serve.metrics import Metrics
from sedem.serve.served import UploadBank
from sedem.tools.banks import reader_of
from sedem.untrusted import StoppedError

logger = logging.getLogger(__name__)

IDLE_SECONDS = 2.0
"""How often folders and the operator's banks are looked at while there is nothing to read."""
RETRY_SECONDS = 5.0
"""How long to wait after an error that is not about a file, such as a full disk."""


class Builder:
    """Reads uploads in the background."""

    def __init__(self, library: Library, model: SeDeM, metrics: Metrics) -> None:
        self.library, self.metrics, self._reader = library, metrics, reader_of(model)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sedem-builder", daemon=True)
        self._told: dict[str, str] = {}

    def start(self) -> None:
        """Start, or continue what a stopped server has left."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current batch of segments; the rest is read after the next start.

        What was committed is kept. This does not block.
        """
        self._stop.set()
        for bank in self.library.uploads():
            bank.ended.set()
        self.library.work.set()

    def close(self) -> None:
        """Stop, and wait until the thread has ended."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        step_back()
        while not self._stop.is_set():
            self.library.work.clear()
            if not self.turn():
                self.library.work.wait(IDLE_SECONDS)
            elif self._told:
                self._stop.wait(RETRY_SECONDS)

    def turn(self) -> bool:
        """Read a little of the files of each bank; returns whether more is to be read."""
        self.library.refresh()
        self.library.remove_deleted()
        for bank in self.library.uploads():
            if not bank.wants() or self._stop.is_set():
                continue
            try:
                self._read(bank)
                self._told.pop(bank.name, None)
            except StoppedError:
                continue  # the server is stopping, or the bank was deleted
            except (ApiError, SedemError, OSError) as error:  # such as a full disk
                if self._told.get(bank.name) != str(error):
                    logger.warning(
                        "reading files failed: %s; trying again every %g s", error, RETRY_SECONDS
                    )
                self._told[bank.name] = str(error)
            except Exception as error:
                logger.exception("reading files failed; trying again in %g s", RETRY_SECONDS)
                self._told[bank.name] = str(error)
        return any(bank.progress().status == "building" for bank in self.library.uploads())

    def _read(self, bank: UploadBank) -> None:
        began, before = time.monotonic(), bank.progress()
        bank.catch_up(self._reader, bank.ended, briefly=True)
        after = bank.progress()
        self.metrics.build_failures.inc(max(0, len(after.failed) - len(before.failed)))
        if after.files_done > before.files_done:
            self.metrics.built_blocks.inc(max(0, after.blocks - before.blocks))
            self.metrics.build_seconds.observe(time.monotonic() - began)
