"""Rows of different lengths in one flat array, in memory or mapped from disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import DTypeLike, NDArray


@dataclass(frozen=True)
class Ragged(Sequence[NDArray[Any]]):
    """A list of rows of numbers.

    Attributes:
        values: all rows, one after another.
        bounds: start of each row, and the end of the last one.
    """

    values: NDArray[Any]
    bounds: NDArray[np.int64]

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """Concatenate the rows of several lists; a single list is not copied."""
        if len(parts) == 1:
            return parts[0]
        starts = np.cumsum([0, *(part.bounds[-1] for part in parts)])
        bounds = [part.bounds[1:] + start for part, start in zip(parts, starts, strict=False)]
        first = np.zeros(1, np.int64)
        return cls(np.concatenate([p.values for p in parts]), np.concatenate([first, *bounds]))

    @classmethod
    def load(cls, folder: Path, name: str) -> Ragged:
        """Map rows from the files that `save` has written."""
        values, bounds = (_file(folder, name, part) for part in ("values", "bounds"))
        # An empty array cannot be mapped.
        mode: Any = "r" if np.load(bounds)[-1] else None
        return cls(np.load(values, mmap_mode=mode), np.load(bounds))

    def save(self, folder: Path, name: str) -> None:
        """Write the rows to two files."""
        np.save(_file(folder, name, "values"), self.values)
        np.save(_file(folder, name, "bounds"), self.bounds)

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, with their bounds."""
        return self.values.nbytes + self.bounds.nbytes

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, index: int) -> NDArray[Any]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[NDArray[Any]]: ...

    def __getitem__(self, index: int | slice) -> NDArray[Any] | Sequence[NDArray[Any]]:
        """The row at an index, or a list of rows."""
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return self.values[self.bounds[index] : self.bounds[index + 1]]


@dataclass
class RaggedBuilder:
    """Collects rows for a `Ragged`, without keeping their numbers as Python objects."""

    dtype: DTypeLike = np.int32
    _values: list[NDArray[Any]] = field(default_factory=list)
    _lengths: list[int] = field(default_factory=lambda: [0])

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._lengths) - 1

    def extend(self, rows: Sequence[Sequence[int]]) -> None:
        """Add rows."""
        lengths = [len(row) for row in rows]
        self._values.append(np.fromiter(chain.from_iterable(rows), self.dtype, sum(lengths)))
        self._lengths += lengths

    def build(self) -> Ragged:
        """Return all rows that were added."""
        values = [np.zeros(0, self.dtype), *self._values]
        return Ragged(np.concatenate(values), np.cumsum(self._lengths, dtype=np.int64))


def _file(folder: Path, name: str, part: str) -> Path:
    return folder / f"{name}-{part}.npy"
