"""Who may give work to a GPU: one thread of the process at a time.

What one thread captures as a CUDA graph is spoilt when another waits for the same GPU meanwhile, so
threads take turns at a GPU, whichever model they run. A CPU needs none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch

_LOCKS: dict[int, RLock] = {}
_NEW = RLock()


@contextmanager
def turn(device: torch.device) -> Iterator[None]:
    """Wait for a turn at a GPU and keep it, with the GPU current; turns of one thread nest."""
    if device.type == "cpu":
        yield
        return
    with _lock_of(device), torch.cuda.device(device):
        yield


def now(device: torch.device) -> float:
    """Seconds on a clock that is read when the device has done what it was given until now."""
    if device.type != "cpu":
        with turn(device):
            torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def _lock_of(device: torch.device) -> RLock:
    number = torch.cuda.current_device() if device.index is None else device.index
    with _NEW:
        return _LOCKS.setdefault(number, RLock())
