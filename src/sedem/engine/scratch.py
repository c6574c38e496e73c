"""Keys and values that exceed the memory, in a memory-mapped temporary file.

Letters: L layers above injection, G key heads, U states per block, H head width.
"""

from __future__ import annotations

import mmap
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sedem.errors import ConfigError
from sedem.quantization import Quantized


@dataclass(frozen=True)
class _Place:
    """The place of a tensor in the file."""

    start: int
    shape: torch.Size
    dtype: torch.dtype


class Scratch:
    """A file without a name, which disappears once nothing uses it, even after a crash.

    It is written first and read afterwards.

    Args:
        needed: how many bytes will be written.

    Raises:
        ConfigError: the folder of temporary files does not have enough room.
    """

    def __init__(self, needed: int) -> None:
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise ConfigError(
                f"keys and values of the selected blocks need {needed:,} bytes beyond the memory "
                f"that may be used, '{folder}' has {free:,} left; use a smaller k, allow more "
                "memory, or set TMPDIR to a folder with room"
            )
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as its tensors
        self._places: list[tuple[_Place, _Place | None]] = []
        self._size = 0

    def add(self, entry: Quantized) -> None:
        """Write keys and values `[L, 2, G, U, H]` of a block."""
        values = self._write(entry.values)
        self._places.append((values, None if entry.scales is None else self._write(entry.scales)))

    def entries(self) -> Sequence[Quantized]:
        """Map all that was written, in order."""
        if not self._size:
            return []
        self._file.flush()
        # Private and writable, because a tensor of a read-only buffer causes a warning.
        content = mmap.mmap(self._file.fileno(), self._size, access=mmap.ACCESS_COPY)
        self._file.close()

        def tensor(place: _Place) -> Tensor:
            flat = torch.frombuffer(
                content, dtype=place.dtype, count=place.shape.numel(), offset=place.start
            )
            return flat.view(place.shape)

        return [
            Quantized(tensor(values), None if scales is None else tensor(scales))
            for values, scales in self._places
        ]

    def _write(self, tensor: Tensor) -> _Place:
        content = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        start = self._size
        self._file.write(content)
        self._file.write(b"\0" * (-len(content) % mmap.PAGESIZE))
        self._size += -(-len(content) // mmap.PAGESIZE) * mmap.PAGESIZE
        return _Place(start, tensor.shape, tensor.dtype)
