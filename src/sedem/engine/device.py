"""The lock of a GPU, clocks that wait for it, and the memory that tensors occupy.

Only one thread of the process submits work to a GPU at a time, whichever model it runs: a thread
that synchronizes a GPU breaks the CUDA graph that another is capturing there. A CPU needs no lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock

import torch
from torch import Tensor

_LOCKS: dict[int, RLock] = {}
_LOCKS_GUARD = RLock()


@contextmanager
def device_lock(device: torch.device) -> Iterator[None]:
    """Hold the lock of a GPU and make it the current device; the lock is reentrant."""
    if device.type == "cpu":
        yield
        return
    with _lock_of(device), torch.cuda.device(device):
        yield


def synchronized_time(device: torch.device) -> float:
    """Wait until the device has finished its work, then return the time in seconds."""
    if device.type != "cpu":
        with device_lock(device):
            torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def _lock_of(device: torch.device) -> RLock:
    number = torch.cuda.current_device() if device.index is None else device.index
    with _LOCKS_GUARD:
        return _LOCKS.setdefault(number, RLock())


class Clock:
    """Times stages of work on a device, in milliseconds; each reading waits for the device.

    Args:
        device: the device.

    Attributes:
        timings: milliseconds by name.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timings: dict[str, float] = {}
        self._start = self._last = synchronized_time(self.device)

    def lap(self, name: str) -> None:
        """Record the time since the last lap, or since the start."""
        before, self._last = self._last, synchronized_time(self.device)
        self.timings[name] = (self._last - before) * 1e3

    def mark(self, name: str) -> None:
        """Record the time since the start."""
        self.timings[name] = (synchronized_time(self.device) - self._start) * 1e3


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages of some tensors; a shared storage counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
