"""The thread that reads uploads into banks while questions are answered.

Answers run between any two batches of segments, because the engine takes turns.
"""

from __future__ import annotations

import time

from sedem.engine.device import step_back
from sedem.model import SeDeM
from sedem.reading.followed import FollowedBank, Follower
from sedem_serve.server.library import Library
from sedem_serve.server.metrics import Metrics
from sedem_serve.server.served import UploadBank
from sedem_serve.tools.banks import reader_of


class Builder(Follower):
    """Reads uploads in the background, and keeps the banks of a library in order."""

    def __init__(self, library: Library, model: SeDeM, metrics: Metrics) -> None:
        super().__init__(library.uploads, reader_of(model))
        self.library, self.metrics, self.work = library, metrics, library.work

    def run(self) -> None:
        """Read until the end, behind answers and short texts."""
        step_back()
        super().run()

    def turn(self) -> float:
        """Read a little into each bank, after what else there is to do."""
        self.library.refresh()
        self.library.remove_deleted()
        return super().turn()

    def read_some(self, bank: FollowedBank) -> float:
        """Read a little into a bank, and count it."""
        assert isinstance(bank, UploadBank)
        began, before = time.monotonic(), bank.progress()
        wait, after = super().read_some(bank), bank.progress()
        self.metrics.build_failures.inc(max(0, len(after.failed) - len(before.failed)))
        if after.files_done > before.files_done:
            self.metrics.built_blocks.inc(max(0, after.blocks - before.blocks))
            self.metrics.build_seconds.observe(time.monotonic() - began)
        return wait
