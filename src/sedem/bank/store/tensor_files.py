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
"""The environment variable that has files read, not mapped, if it is 1."""
OPEN_FILES = 256
"""Files without a map that are open at the same time; a process may often have 1,024."""
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
"""Bytes that safetensors allows a header."""
_WARNED = threading.Event()


def reading() -> bool:
    """Whether the environment forbids to map files."""
    return os.environ.get(READ) == "1"


def open_tensors(path: Path) -> Any:
    """Open a safetensors file, mapped if that is possible.

    Returns:
        What `safe_open` or `ReadFile` gives; both have `keys`, `metadata` and `get_tensor`.

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
            return True  # Nothing to map; safetensors says what is wrong.
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
    """An open file; it is closed when nobody uses it any more."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.opened = self.state()

    def state(self) -> tuple[int, int, int]:
        """Size and times of the last change, as they are now."""
        found = os.fstat(self.number)
        # Inode numbers of FUSE may change while nobody has the file open.
        return found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def __del__(self) -> None:
        os.close(self.number)


class ReadFile:
    """A safetensors file whose tensors are read row by row.

    The file stays open, so it may be deleted; those opened first are closed above `OPEN_FILES` and
    opened again when they are used.

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
            raise SafetensorError(f"its header would end behind the file's {size} bytes")
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
        """Return a tensor, not read yet.

        Raises:
            SafetensorError: there is none of that name.
        """
        if name not in self._tensors:
            raise SafetensorError(f"it holds no tensor '{name}'")
        return ReadTensor(self, *self._tensors[name])

    def read(self, place: int, size: int) -> bytearray:
        """Read bytes from a place of the file.

        Raises:
            BankError: the file was changed since it was opened, or cannot be read any more.
        """
        found = bytearray(size)
        self.read_into(place, memoryview(found))
        return found

    def read_into(self, place: int, room: memoryview) -> None:
        """Fill some bytes from a place of the file.

        Raises:
            ChangedFileError: the file was changed since it was opened.
            BankError: it cannot be read any more.
        """
        try:
            descriptor = self._descriptor()
            while len(room):
                count = os.preadv(descriptor.number, [room], place)
                if not count:
                    raise OSError(f"it ends at byte {place:,}")
                room, place = room[count:], place + count
            # After reading, so that nothing is returned that was written meanwhile. The third
            # number changes when the file is deleted, which does no harm to who has it open.
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
                    # A thread that reads from it has the descriptor, which closes after that.
                    oldest._open = None
        return found


def _place(
    name: str, entry: Mapping[str, Any], start: int, size: int
) -> tuple[int, tuple[int, ...], torch.dtype]:
    """Where a tensor starts, its shape and its type, if it lies in a file of that size."""
    dtype, shape, (first, end) = TYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    whole = all(type(number) is int and number >= 0 for number in (*shape, first, end))
    if not whole or not shape or end > size - start:
        raise ValueError(f"tensor '{name}' does not lie in the file")
    if math.prod(shape) * dtype.itemsize != end - first:
        raise ValueError(f"tensor '{name}' has {end - first} bytes, which is not its shape")
    return start + first, tuple(shape), dtype


@dataclass(frozen=True)
class ReadTensor:
    """A tensor in a file; the rows that are selected are read.

    Attributes:
        file: the file.
        start: place of its first byte.
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
            IndexError: a row is outside.
            BankError: the file was changed since it was opened, or cannot be read any more.
        """
        if isinstance(index, int):
            return self[[index]][0]
        rows_n = np.array(range(len(self))[index] if isinstance(index, slice) else index, int)
        outside = rows_n[(rows_n < 0) | (rows_n >= len(self))]
        if len(outside):
            raise IndexError(f"row {outside[0]} of '{self.file.path}' is out of its {len(self)}")
        taken = torch.empty(len(rows_n), *self.shape[1:], dtype=self.dtype)
        room = taken.view(-1).view(torch.uint8).numpy().data
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        # Rows that follow each other are read at once.
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
        file: as `open_tensors` gives it.
        name: of the tensor of values.
        scales: name of that of their scales, which the file need not have.
    """
    values = file.get_tensor(name)
    kind = ReadVectors if isinstance(values, ReadTensor) else Quantized
    return kind(values, file.get_tensor(scales) if scales in file.keys() else None)  # noqa: SIM118
