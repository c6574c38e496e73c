"""Devices: which are usable, locks, clocks, memory, and buffers of fixed size, replayed as graphs.

Only one thread of the process submits work to a GPU at a time, whichever model it runs: a thread
that synchronizes a GPU breaks the CUDA graph that another is capturing there. A CPU needs no lock.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from threading import Lock, get_ident, get_native_id, local
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sedem.errors import ConfigError

ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
IDLE_SECONDS = 0.01
"""A lock that stays free for this long is not needed by others; answer steps follow faster."""
POLL_SECONDS = 0.001
NICE = 19
"""How far long work steps back from what others wait for. The system then gives it a sixtieth of a
core that both want, and all that others leave: a step of an answer never fills every core."""
PIECE = 128
"""Items, such as words, that Python handles in a piece."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""The memory that a container may use, or "max"."""


Item = TypeVar("Item")


class _Work(local):
    """What watches the work of this thread, and how many locks it has."""

    watch: Callable[[int, int], None] | None = None
    locks = 0


_WORK = _Work()


class FairLock:
    """A reentrant lock that is handed over to the thread that has waited longest.

    Python's own locks go to any running thread. A thread that reads documents releases its lock and
    takes it again at once, so a thread that answers would get it late or never. With this lock they
    alternate: an answer waits for at most one batch of segments before each token.

    A batch takes as long as many tokens, so work in long pieces uses `in_turns`: after a piece that
    made others wait, they have the lock for as long as the piece took.
    """

    def __init__(self) -> None:
        # Held only for moments without allocation: the garbage collector could otherwise run there
        # and drop an answer, whose end takes this lock too.
        self._guard = Lock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: deque[tuple[int, Lock]] = deque()
        # Total seconds the lock was held, and the times of the last acquire and release.
        self._held = 0.0
        self._since = self._free_since = time.perf_counter()
        self._owed: dict[int, float] = {}

    def __enter__(self) -> None:
        me = get_ident()
        if self._owner == me:
            self._depth += 1
            return
        turn = Lock()
        turn.acquire()
        waiter = (me, turn)
        with self._guard:
            if self._owner is None:
                self._owner, self._depth = me, 1
                self._since = time.perf_counter()
                _WORK.locks += 1
                return
            self._waiting.append(waiter)
        try:
            turn.acquire()
        except BaseException:
            # For example Ctrl-C in the main thread; the lock may already be handed over.
            with self._guard:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                else:
                    self._hand_over()
            raise
        _WORK.locks += 1

    def __exit__(self, *error: object) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        _WORK.locks -= 1
        with self._guard:
            self._hand_over()

    def _hand_over(self) -> None:
        """Give the lock to the thread that has waited longest; the caller holds the guard."""
        self._owner, self._depth = None, 0
        self._free_since = now = time.perf_counter()
        self._held += now - self._since
        self._since = now
        if self._waiting:
            self._owner, turn = self._waiting.popleft()
            self._depth = 1
            turn.release()

    @contextmanager
    def in_turns(self) -> Iterator[None]:
        """Surround one long piece of work, in which this lock is taken.

        It first waits until others have had the lock for as long as the last piece took, or do not
        need it.
        """
        me = get_ident()
        enough = self._held + self._owed.pop(me, 0.0)
        while self._held < enough and (
            self._owner is not None or time.perf_counter() - self._free_since <= IDLE_SECONDS
        ):
            time.sleep(POLL_SECONDS)
        began = time.perf_counter()
        yield
        if self._owner is not None:
            self._owed[me] = time.perf_counter() - began


@contextmanager
def watched(watch: Callable[[int, int], None] | None) -> Iterator[None]:
    """Watch the long work of this thread.

    Args:
        watch: called between two pieces, with how much of how much is done, or with 0 and 0 if that
            is not known there. An error that it raises ends the work. None watches nothing.
    """
    before, _WORK.watch = _WORK.watch, watch
    try:
        yield
    finally:
        _WORK.watch = before


def between_pieces(done: int = 0, total: int = 0) -> None:
    """Let whoever watches this thread look at it, or end its work.

    It does nothing while the thread has a lock that others may wait for.
    """
    if _WORK.watch is not None and not _WORK.locks:
        _WORK.watch(done, total)


def in_pieces(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield items for work in Python, `PIECE` at a time between two looks of whoever watches."""
    rest = iter(items)
    while piece := list(islice(rest, PIECE)):
        if len(piece) == PIECE:
            between_pieces()
        yield piece


def step_back() -> None:
    """Lower the priority of the calling thread for good; only Linux has one for each thread."""
    if sys.platform == "linux":
        me = get_native_id()
        os.setpriority(os.PRIO_PROCESS, me, os.getpriority(os.PRIO_PROCESS, me) + NICE)


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
    number = torch.cuda.current_device() if device.index is None else device.index
    with _LOCKS_GUARD:
        lock = _LOCKS.setdefault(number, FairLock())
    with lock, torch.cuda.device(device):
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


class Clock:
    """Times stages of work on a device, in milliseconds.

    Laps and marks do not wait for the device. A lap is device time: on a GPU, an event marks the
    place in its queue and is read later. A mark is host time, for results that the host has read.

    Args:
        since: start time of marks, by `time.perf_counter`; None means now.
    """

    def __init__(self, device: torch.device, since: float | None = None) -> None:
        self.device = device
        self._start = synchronized_time(device) if since is None else since
        self._timings: dict[str, float] = {}
        # Seconds on a CPU, places in the queue of a GPU.
        self._laps: list[tuple[str, Any, Any]] = []
        self._last = self._now()

    @property
    def timings(self) -> dict[str, float]:
        """Milliseconds by name; waits for the end of the last lap."""
        for name, before, after in self._laps:
            if self.device.type == "cpu":
                self._timings[name] = (after - before) * 1e3
                continue
            with device_lock(self.device):
                after.synchronize()
                self._timings[name] = before.elapsed_time(after)
        self._laps = []
        return self._timings

    def lap(self, name: str) -> None:
        """Record the time since the last lap, or since the start."""
        before, self._last = self._last, self._now()
        self._laps.append((name, before, self._last))

    def mark(self, name: str) -> None:
        """Record the time since the start."""
        self._timings[name] = (time.perf_counter() - self._start) * 1e3

    def _now(self) -> float | torch.cuda.Event:
        if self.device.type == "cpu":
            return time.perf_counter()
        with device_lock(self.device):
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
        return event


def device_bytes(device: torch.device) -> int:
    """Memory of a GPU; 0 for a CPU."""
    if device.type == "cpu":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated; a CPU's counts pages that the system can drop."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return sys.maxsize
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable:"))


def machine_bytes() -> int | None:
    """RAM of the machine, or of the container that it is; None if the system does not say."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
    own = CGROUP_LIMIT.read_text("ascii").strip() if CGROUP_LIMIT.exists() else ""
    return min(whole, int(own)) if own.isdecimal() else whole


def resident_bytes() -> int:
    """RAM that this process has now; 0 if the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storages of some tensors; a shared storage counts once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


Shape = tuple[int, ...]

Pool = Any
"""torch's opaque handle of the memory that graphs share."""

_SIDE_STREAMS: dict[int, torch.cuda.Stream] = {}


class Upload:
    """Tensors that are filled on the host and read on the device.

    On a GPU the host's are in pinned memory: a copy from other memory would wait for the GPU. On a
    CPU, host and device are the same.

    Attributes:
        host: the tensors to fill, by name.
        device: the tensors to read, by name.
    """

    def __init__(
        self, device: torch.device, fields: Mapping[str, tuple[Shape, torch.dtype]]
    ) -> None:
        on_gpu = device.type == "cuda"
        self.host = {
            name: torch.zeros(shape, dtype=dtype, pin_memory=on_gpu)
            for name, (shape, dtype) in fields.items()
        }
        self.device = {name: tensor.to(device) for name, tensor in self.host.items()}
        self._sent = torch.cuda.Event() if on_gpu else None

    def begin(self) -> None:
        """Wait until the last copy has left the host; only then may its tensors be refilled."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self) -> None:
        """Copy everything to the device, ahead of all work submitted after this call."""
        if self._sent is not None:
            for name, tensor in self.device.items():
                tensor.copy_(self.host[name], non_blocking=True)
            self._sent.record(torch.cuda.current_stream(tensor.device))


def fill(buffer: Tensor, rows: Sequence[Tensor], padding: float = 0.0) -> None:
    """Copy rows of different lengths into a buffer of the host, padded on the right.

    Args:
        rows: B tensors on the CPU, of at most L entries.
    """
    # NumPy, because each operation on a tensor costs microseconds before the first token.
    target = buffer.numpy()
    target.fill(padding)
    for place, row in zip(target, rows, strict=True):
        place[: len(row)] = row.numpy()


def mask_of(lengths: Sequence[int], width: int) -> NDArray[np.bool_]:
    """`[B, width]`, True in the first entries of each row."""
    return np.arange(width) < np.asarray(lengths)[:, None]


def pool_bytes(pool: Pool) -> int:
    """Bytes of a pool, which its graphs keep for intermediate results."""
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == tuple(pool))


def side_stream() -> torch.cuda.Stream:
    """Return the stream of the current GPU for rehearsals and captures.

    Libraries and the allocator keep memory for every stream ever used, so there is only one.
    """
    device = torch.cuda.current_device()
    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.cuda.Stream()
    return _SIDE_STREAMS[device]


class Replay:
    """Runs a piece of work again and again, on a GPU as one captured graph.

        for run in replay.runs():
            with run:
                ...  # reads and writes the buffers, without waiting for the device

    A graph reads and writes fixed addresses. Inputs must be copied into fixed buffers, and results
    are read from fixed buffers. Every run first checks that no buffer was moved, even without a
    graph, so that a mistake shows on any machine.

    Args:
        buffers: all tensors that the work shares with its caller.
        state: the buffers that a run both reads and changes; a rehearsal restores them.
    """

    def __init__(
        self,
        buffers: Sequence[Tensor],
        state: Sequence[Tensor] = (),
        *,
        graph: bool = False,
        pool: Pool = None,
    ) -> None:
        self.buffers = list(buffers)
        self.state = list(state)
        self.graph = graph
        self.pool = pool
        self._addresses = self._layout()
        self._captured: torch.cuda.CUDAGraph | None = None

    def runs(self) -> Iterator[AbstractContextManager[Any]]:
        """Yield what to run the work in: once, twice to capture it, never once it is captured.

        The work must be the same every time.
        """
        assert self._layout() == self._addresses, "a buffer was moved after it was fixed"
        if not self.graph:
            yield nullcontext()
            return
        if self._captured is None:
            # Libraries allocate workspaces in their first run, which must not be captured.
            side, captured = side_stream(), torch.cuda.CUDAGraph()
            side.wait_stream(torch.cuda.current_stream())
            yield self.rehearsal()
            torch.cuda.current_stream().wait_stream(side)
            yield torch.cuda.graph(
                captured, pool=self.pool, stream=side, capture_error_mode="thread_local"
            )
            self._captured = captured
        self._captured.replay()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Run work beside the replays, and restore the state that it changes."""
        with torch.cuda.stream(side_stream()) if self.graph else nullcontext():
            before = [buffer.clone() for buffer in self.state]
            yield
            for buffer, value in zip(self.state, before, strict=True):
                buffer.copy_(value)

    def _layout(self) -> list[tuple[int, torch.Size, tuple[int, ...]]]:
        return [(b.data_ptr(), b.shape, b.stride()) for b in self.buffers]


def round_up(count: int, unit: int) -> int:
    """Round up to the next size of a buffer: 1 to 8, 10, 12, 14, 16, 20, 24, ... times `unit`."""
    units = -(-count // unit)
    stride = 1
    while units > 8 * stride:
        stride *= 2
    return -(-units // stride) * stride * unit
