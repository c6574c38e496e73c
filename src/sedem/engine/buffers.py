"""Buffers of fixed size: inputs copied to a device, and functions replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Shape = tuple[int, ...]

Pool = Any
"""torch's opaque handle of the memory that graphs share."""

_SIDE_STREAMS: dict[int, torch.cuda.Stream] = {}


class Upload:
    """Tensors that are filled on the host and read on the device.

    On a GPU the host's are in pinned memory: a copy from other memory would wait for the GPU. On a
    CPU, host and device are the same.

    Args:
        fields: shape and type of each tensor, by name.

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
        buffer: `[B, L, ...]`.
        rows: B tensors on the CPU, of at most L entries.
    """
    # NumPy, because each operation on a tensor costs microseconds before the first token.
    target = buffer.numpy()
    target.fill(padding)
    for place, row in zip(target, rows, strict=True):
        place[: len(row)] = row.numpy()


def fill_lengths(buffer: Tensor, lengths: Sequence[int]) -> None:
    """Set the first entries of each row of a host buffer to True, and the others to False.

    Args:
        buffer: `[B, L]`.
        lengths: number of True entries per row.
    """
    buffer.numpy()[:] = mask_of(lengths, buffer.shape[1])


def mask_of(lengths: Sequence[int], width: int) -> NDArray[np.bool_]:
    """`[B, width]`, True in the first entries of each row."""
    return np.arange(width) < np.asarray(lengths)[:, None]


def new_pool() -> Pool:
    """Return a new memory pool on the current GPU."""
    return torch.cuda.graph_pool_handle()


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
    """Runs a function repeatedly, on a GPU as one captured graph.

    A graph reads and writes fixed addresses. Inputs must be copied into fixed buffers, and results
    are read from fixed buffers. Every run first checks that no buffer was moved, even without a
    graph, so that a mistake shows on any machine.

    The function is passed to each call and not stored. The owner of the replay is therefore freed,
    with its buffers and graph, as soon as nothing refers to it.

    Args:
        buffers: all tensors that the function shares with its caller.
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

    def __call__(self, function: Callable[[], None]) -> None:
        """Run the function once.

        Args:
            function: reads and writes the buffers, without waiting for the device. It must be the
                same every time, because only the first call captures it.
        """
        assert self._layout() == self._addresses, "a buffer was moved after it was fixed"
        if not self.graph:
            function()
            return
        if self._captured is None:
            self._captured = self._capture(function)
        self._captured.replay()

    def rehearse(self, function: Callable[[], None]) -> None:
        """Run the function once and restore the state that it has changed."""
        before = [buffer.clone() for buffer in self.state]
        function()
        for buffer, value in zip(self.state, before, strict=True):
            buffer.copy_(value)

    def _capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        # Libraries allocate workspaces in their first run, which must not be captured.
        side = side_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.rehearse(function)
        torch.cuda.current_stream().wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            captured, pool=self.pool, stream=side, capture_error_mode="thread_local"
        ):
            function()
        return captured

    def _layout(self) -> list[tuple[int, torch.Size, tuple[int, ...]]]:
        return [(b.data_ptr(), b.shape, b.stride()) for b in self.buffers]


def round_up(count: int, unit: int) -> int:
    """Round up to the next bucket size: 1 to 8, 10, 12, 14, 16, 20, 24, ... times `unit`."""
    units = -(-count // unit)
    stride = 1
    while units > 8 * stride:
        stride *= 2
    return -(-units // stride) * stride * unit
