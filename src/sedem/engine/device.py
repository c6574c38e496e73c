"""Devices: which are usable, the lock of a GPU, clocks, and the memory of tensors.

Only one thread of the process submits work to a GPU at a time, whichever model it runs: a thread
that synchronizes a GPU breaks the CUDA graph that another is capturing there. A CPU needs no lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sedem.engine.fair_lock import FairLock
from sedem.errors import ConfigError

ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_LOCKS: dict[int, FairLock] = {}
_LOCKS_GUARD = Lock()


def chosen_device(device: torch.device | str | None) -> torch.device:
    """Return a device that sedem can use; None means a GPU if there is one, else the CPU.

    Raises:
        ConfigError: it cannot be used.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (reason := unusable(device)) is not None:
        raise ConfigError(f"device is '{device}'; {reason}")
    return torch.device(device)


def unusable(device: torch.device | str) -> str | None:
    """Return why a device cannot be used, and which can be; None if it can."""
    try:
        place = torch.device(device)
    except RuntimeError:
        return "it can be cpu or cuda"
    if place.type not in ("cpu", "cuda"):
        return "it can be cpu or cuda"
    if place.type == "cuda" and not torch.cuda.is_available():
        return "this machine has no GPU, leave it out"
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        last = f"cuda:{torch.cuda.device_count() - 1}"
        return f"the last GPU of this machine is {last}, use another"
    return None


def multiplies_bfloat16() -> bool:
    """Whether this machine (its GPU if it has one) has hardware for bfloat16 products."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return any(has.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


@contextmanager
def device_lock(device: torch.device) -> Iterator[None]:
    """Hold the lock of a GPU and make it the current device; the lock is reentrant."""
    if device.type == "cpu":
        yield
        return
    with _lock_of(device), torch.cuda.device(device):
        yield


@contextmanager
def attention_backends(device: torch.device) -> Iterator[None]:
    """Choose attention kernels that need no planning.

    On a GPU, cuDNN would be used first. It plans every new shape, which takes 20 to 400 ms.
    """
    if device.type == "cpu":
        yield
        return
    with sdpa_kernel(ATTENTION):
        yield


def synchronized_time(device: torch.device) -> float:
    """Wait until the device has finished its work, then return the time in seconds."""
    if device.type != "cpu":
        with device_lock(device):
            torch.cuda.current_stream(device).synchronize()
    return time.perf_counter()


def _lock_of(device: torch.device) -> FairLock:
    number = torch.cuda.current_device() if device.index is None else device.index
    with _LOCKS_GUARD:
        return _LOCKS.setdefault(number, FairLock())


class Clock:
    """Times stages of work on a device, in milliseconds.

    Laps and marks do not wait for the device. A lap is device time: on a GPU, an event marks the
    place in its queue and is read later. A mark is host time, for results that the host has read.

    Args:
        device: the device.
        since: start time of marks, by `time.perf_counter`; None means now.
    """

    def __init__(self, device: torch.device, since: float | None = None) -> None:
        self.device = device
        self._start = synchronized_time(device) if since is None else since
        self._timings: dict[str, float] = {}
        self._laps: list[tuple[str, Moment, Moment]] = []
        self._last = _moment(device)

    @property
    def timings(self) -> dict[str, float]:
        """Milliseconds by name; waits for the end of the last lap."""
        for name, before, after in self._laps:
            self._timings[name] = _between(before, after, self.device)
        self._laps = []
        return self._timings

    def lap(self, name: str) -> None:
        """Record the time since the last lap, or since the start."""
        before, self._last = self._last, _moment(self.device)
        self._laps.append((name, before, self._last))

    def mark(self, name: str) -> None:
        """Record the time since the start."""
        self._timings[name] = (time.perf_counter() - self._start) * 1e3


Moment = float | torch.cuda.Event
"""A time in seconds, or a place in the queue of a GPU."""


def _moment(device: torch.device) -> Moment:
    if device.type == "cpu":
        return time.perf_counter()
    with device_lock(device):
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
    return event


def _between(before: Moment, after: Moment, device: torch.device) -> float:
    """Milliseconds from one moment to a later one."""
    if isinstance(before, float) or isinstance(after, float):
        assert isinstance(before, float) and isinstance(after, float)
        return (after - before) * 1e3
    with device_lock(device):
        after.synchronize()
        return before.elapsed_time(after)


def device_bytes(device: torch.device) -> int:
    """Memory of a GPU; 0 for a CPU."""
    if device.type == "cpu":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages of some tensors; a shared storage counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
