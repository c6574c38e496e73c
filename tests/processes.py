"""Real processes that do the same thing at the same time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

SECONDS = 60
"""After which a process that waits for nothing has failed."""


def in_two_processes(call: Callable[[], Any]) -> list[Any]:
    """What a call returns in two processes that start together; forked, to start at once."""
    forked = multiprocessing.get_context("fork")
    queue, start = forked.Queue(), forked.Barrier(2)

    def run() -> None:
        start.wait(SECONDS)
        try:
            queue.put(call())
        except BaseException as error:
            queue.put(error)

    processes = [forked.Process(target=run, daemon=True) for _ in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=SECONDS) for _ in processes]
    for process in processes:
        process.join(SECONDS)
    return results
