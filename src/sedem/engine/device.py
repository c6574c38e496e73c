"""The lock of a GPU, times that wait for it, and the memory that tensors occupy.

One thread of the process at a time gives work to a GPU, whichever model it runs: a CUDA graph that
one thread captures is spoilt when another synchronizes the same GPU. A CPU needs no lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock

import torch
from torch import Tensor

_LOCKS: dict[int, RLock] = {}
_NEW = RLock()


@contextmanager
def device_lock(device: torch.device) -> Iterator[None]:
    """Hold the lock of a GPU and make it the current device; the lock is reentrant."""
    if device.type == "cpu":
        yield
        return
    with _lock_of(device), torch.cuda.device(device):
        yield


def synchronized_time(device: torch.device) -> float:
    """Seconds on a clock that is read when the device has finished all work given to it."""
    if device.type != "cpu":
        with device_lock(device):
            torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def _lock_of(device: torch.device) -> RLock:
    number = torch.cuda.current_device() if device.index is None else device.index
    with _NEW:
        return _LOCKS.setdefault(number, RLock())


class Clock:
    """Milliseconds by stage; waits for the device before it is read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timings: dict[str, float] = {}
        self._start = self._last = synchronized_time(self.device)

    def lap(self, name: str) -> None:
        """Record the time since the last lap."""
        before, self._last = self._last, synchronized_time(self.device)
        self.timings[name] = (self._last - before) * 1e3

    def mark(self, name: str) -> None:
        """Record the time since the start."""
        self.timings[name] = (synchronized_time(self.device) - self._start) * 1e3


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes behind some tensors, each storage counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
