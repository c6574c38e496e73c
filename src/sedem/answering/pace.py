"""How fast a queue drains, so that a refused caller knows when to try again."""

from __future__ import annotations

import time
from collections import deque
from math import ceil

LAST = 64
"""Number of recent questions that set the pace."""
MOST = 60
"""Longest wait to suggest, in seconds."""


class Pace:
    """The pace at which questions have left a queue since it was last idle."""

    def __init__(self) -> None:
        self._times = deque([time.monotonic()], maxlen=LAST + 1)

    def restart(self) -> None:
        """Note that the queue was idle until now."""
        self._times = deque([time.monotonic()], maxlen=LAST + 1)

    def left(self) -> None:
        """Note that a question has left the queue."""
        self._times.append(time.monotonic())

    def seconds(self, count: int) -> int:
        """Whole seconds until `count` more will have left, from 1 to `MOST`."""
        times = self._times
        passed = time.monotonic() - times[0]
        return min(max(ceil(count * passed / max(len(times) - 1, 1)), 1), MOST)
