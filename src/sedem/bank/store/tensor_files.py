"""The tensors of a safetensors file: mapped, or read row by row where files cannot be mapped.

Some network file systems and FUSE mounts refuse `mmap`. There a file is opened without its tensors,
and a row is read whenever it is selected.

Letters: N rows of a tensor.
"""

from __future__ import annotations

import json
import logging
import math
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sedem.errors import BankError, ChangedFileError
from sedem.quantization import Quantized

logger = logging.getLogger(__name__)

READ = "SEDEM_READ"
"""The environment variable that makes files be read, not mapped, if it is 1."""
OPEN_FILES = 256
"""Unmapped files that are open at the same time; processes are often limited to 1,024."""
TYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
}
"""Types of a bank's tensors as safetensors names them."""
_LONGEST = 10**8
"""Largest header, in bytes, that safetensors allows."""
_WARNED = threading.Event()


def reading() -> bool:
    """Whether the environment forbids mapping files."""
    return os.environ.get(READ) == "1"


def open_tensors(path: Path) -> Any:
    """Open a safetensors file, mapped if possible.

    Returns:
        The result of `safe_open` or `ReadFile`; both have `keys`, `metadata` and `get_tensor`.

    Raises:
        OSError: the file cannot be opened.
        SafetensorError: its header is damaged.
    """
    return safe_open(path, framework="pt") if _can_be_mapped(path) else ReadFile(path)


def _can_be_mapped(path: Path) -> bool:
    if reading():
        return False
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return True  # Nothing to map; safetensors reports the error.
        try:
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ).close()
        except OSError as error:
            if not _WARNED.is_set():
                _WARNED.set()
                logger.warning(
                    "'%s' cannot be mapped into memory (%s); its rows are read whenever they are "
                    "used, which is slower; copy the bank to a local disk",
                    path,
                    error,
                )
            return False
    return True


class _Descriptor:
    """An open file; it is closed when it is no longer used."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.opened = self.state()

    def state(self) -> tuple[int, int, int]:
        """Current size and times of the last change."""
        found = os.fstat(self.number)
        # FUSE inode numbers may change while the file is not open.
        return found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def __del__(self) -> None:
        os.close(self.number)


class ReadFile:
    """A safetensors file whose tensors are read row by row.

    The file stays open, so it may be deleted. Above `OPEN_FILES`, the files opened first are closed
    and reopened when they are used.

    Args:
        path: the file.

    Raises:
        OSError: it cannot be opened.
        SafetensorError: its header is damaged.
    """

    _all: ClassVar[deque[weakref.ref[ReadFile]]] = deque()

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: _Descriptor | None = None
        self._state: tuple[int, int, int] | None = None
        self._state = self._descriptor().opened
        size = self._state[0]
        length = int.from_bytes(self.read(0, 8), "little") if size >= 8 else size
        if length > min(size - 8, _LONGEST):
            raise SafetensorError(f"its header would end past the file's {size} bytes")
        try:
            header = json.loads(self.read(8, length))
            self._metadata = dict(header.pop("__metadata__", {}))
            # Not the tensors: they refer to the file, which would then outlive its last use.
            self._tensors = {
                name: _place(name, entry, 8 + length, size) for name, entry in header.items()
            }
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise SafetensorError(f"its header is damaged: {error}") from None

    def __enter__(self) -> ReadFile:
        return self

    def __exit__(self, *_: object) -> None:
        """Stay open for the tensors."""

    def keys(self) -> list[str]:
        """Names of the tensors."""
        return list(self._tensors)

    def metadata(self) -> dict[str, str]:
        """Entries of the header."""
        return self._metadata

    def get_tensor(self, name: str) -> ReadTensor:
        """Return a tensor that is not read yet.

        Raises:
            SafetensorError: there is no tensor of that name.
        """
        if name not in self._tensors:
            raise SafetensorError(f"it holds no tensor '{name}'")
        return ReadTensor(self, *self._tensors[name])

    def read(self, place: int, size: int) -> bytearray:
        """Read bytes at an offset of the file.

        Raises:
            BankError: the file was changed since it was opened, or can no longer be read.
        """
        found = bytearray(size)
        self.read_into(place, memoryview(found))
        return found

    def read_into(self, place: int, room: memoryview) -> None:
        """Fill a buffer with bytes at an offset of the file.

        Raises:
            ChangedFileError: the file was changed since it was opened.
            BankError: it can no longer be read.
        """
        try:
            descriptor = self._descriptor()
            while len(room):
                count = os.preadv(descriptor.number, [room], place)
                if not count:
                    raise OSError(f"it ends at byte {place:,}")
                room, place = room[count:], place + count
            # Checked after reading, so that nothing written meanwhile is returned. The third
            # number changes when the file is deleted, which does not affect an open file.
            if descriptor.state()[:2] != descriptor.opened[:2]:
                raise ChangedFileError(self._lost("it was changed while the bank was open"))
        except OSError as error:
            raise BankError(self._lost(str(error))) from None

    def _lost(self, reason: str) -> str:
        return (
            f"'{self.path}' cannot be read any more ({reason}); restore it if it was changed, and "
            "open the bank again"
        )

    def _descriptor(self) -> _Descriptor:
        found = self._open
        if found is None:
            found = _Descriptor(os.open(self.path, os.O_RDONLY))
            if self._state not in (None, found.opened):
                raise ChangedFileError(self._lost("it was changed while the bank was open"))
            self._open = found
            self._all.append(weakref.ref(self))
            while len(self._all) > OPEN_FILES:
                oldest = self._all.popleft()()
                if oldest is not None:
                    # A thread that is reading holds the descriptor, which closes afterwards.
                    oldest._open = None
        return found


def _place(
    name: str, entry: Mapping[str, Any], start: int, size: int
) -> tuple[int, tuple[int, ...], torch.dtype]:
    """Return where a tensor starts, its shape and its type, if a file of that size holds it."""
    dtype, shape, (first, end) = TYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    whole = all(type(number) is int and number >= 0 for number in (*shape, first, end))
    if not whole or not shape or end > size - start:
        raise ValueError(f"tensor '{name}' does not lie in the file")
    if math.prod(shape) * dtype.itemsize != end - first:
        raise ValueError(f"tensor '{name}' has {end - first} bytes, unlike its shape")
    return start + first, tuple(shape), dtype


@dataclass(frozen=True)
class ReadTensor:
    """A tensor in a file; selected rows are read.

    Attributes:
        file: the file.
        start: offset of its first byte.
        shape: N and the shape of a row.
        dtype: type of its values.
    """

    file: ReadFile
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | slice | Sequence[int]) -> Tensor:
        """Read a row, a range of rows, or some rows.

        Raises:
            IndexError: a row is out of range.
            BankError: the file was changed since it was opened, or can no longer be read.
        """
        if isinstance(index, int):
            return self[[index]][0]
        rows_n = np.array(range(len(self))[index] if isinstance(index, slice) else index, int)
        outside = rows_n[(rows_n < 0) | (rows_n >= len(self))]
        if len(outside):
            raise IndexError(f"no row {outside[0]} in '{self.file.path}', it has {len(self)}")
        taken = torch.empty(len(rows_n), *self.shape[1:], dtype=self.dtype)
        room = taken.view(-1).view(torch.uint8).numpy().data
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        # Consecutive rows are read at once.
        for run in np.split(rows_n, np.flatnonzero(np.diff(rows_n) != 1) + 1):
            self.file.read_into(self.start + int(run[:1].sum()) * row, room[: len(run) * row])
            room = room[len(run) * row :]
        return taken


@dataclass(frozen=True)
class ReadVectors:
    """Stored vectors in a file that is not mapped; see `Quantized`.

    Attributes:
        values: `[N, ..., D]`.
        scales: `[N, ...]`; None for a type that needs none.
    """

    values: ReadTensor
    scales: ReadTensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int | slice | Sequence[int]) -> Quantized:
        """Read vectors by an index of the first dimension."""
        return Quantized(self.values[index], None if self.scales is None else self.scales[index])


Vectors = Quantized | ReadVectors
"""Stored vectors: in memory or mapped, or read when they are selected."""


def read_vectors(file: Any, name: str, scales: str) -> Vectors:
    """Return the vectors of an open file.

    Args:
        file: a file returned by `open_tensors`.
        name: name of the tensor of values.
        scales: name of the tensor of scales, which the file need not have.
    """
    values = file.get_tensor(name)
    kind = ReadVectors if isinstance(values, ReadTensor) else Quantized
    return kind(values, file.get_tensor(scales) if scales in file.keys() else None)  # noqa: SIM118
