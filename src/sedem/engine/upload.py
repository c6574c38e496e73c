"""Inputs of fixed size that are copied to a device together, without waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 64
"""Every input starts at a multiple of this many bytes."""

Shape = tuple[int, ...]


class Upload:
    """Tensors that are filled on the host and read on the device.

    On a GPU they are views of two buffers, one in pinned memory and one on the device. A copy from
    memory that is not pinned would wait for the GPU, and every further copy would cost another
    launch. On a CPU, host and device are the same.

    Args:
        device: the device.
        fields: shape and type of each tensor, by name.

    Attributes:
        host: the tensors to fill, by name.
        device: the tensors to read, by name.
    """

    def __init__(
        self, device: torch.device, fields: Mapping[str, tuple[Shape, torch.dtype]]
    ) -> None:
        starts, end = {}, 0
        for name, (shape, dtype) in fields.items():
            starts[name] = end
            end += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        on_gpu = device.type == "cuda"
        self.buffer = torch.zeros(end, dtype=torch.uint8, device=device)
        self._pinned = self.buffer
        if on_gpu:
            self._pinned = torch.zeros(end, dtype=torch.uint8, pin_memory=True)
        self._sent = torch.cuda.Event() if on_gpu else None

        def views(buffer: Tensor) -> dict[str, Tensor]:
            return {
                name: buffer[starts[name] : starts[name] + prod(shape) * dtype.itemsize]
                .view(dtype)
                .view(shape)
                for name, (shape, dtype) in fields.items()
            }

        self.host, self.device = views(self._pinned), views(self.buffer)

    def begin(self) -> None:
        """Wait until the last copy has left the host; only then may its tensors be refilled."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self) -> None:
        """Copy everything to the device, ahead of all work submitted after this call."""
        if self._sent is not None:
            self.buffer.copy_(self._pinned, non_blocking=True)
            self._sent.record(torch.cuda.current_stream(self.buffer.device))


def fill(buffer: Tensor, rows: Sequence[Tensor], padding: float = 0.0) -> None:
    """Copy rows of different lengths into a buffer of the host, padded on the right.

    Args:
        buffer: `[B, L, ...]`.
        rows: B tensors on the CPU, of at most L entries.
        padding: the padding value.
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
