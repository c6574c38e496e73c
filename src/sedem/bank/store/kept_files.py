"""Kept keys and values: what a decoder computes for each block of a shard, in a separate file.

They are derived data and not part of the bank: the folder may be deleted at any time. A file that
cannot be used is ignored with a warning, because its content can be computed from memory.

The file is written block by block, so that its size is not limited by memory. A block's entry has
the shape `[L, 2, G, U, H]` and holds only states of real tokens, so entries differ in length.

Letters: N rows of a shard, L layers above injection, G key heads, U states of a block, H width of a
head.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO

import torch
from safetensors import SafetensorError
from torch import Tensor

from sedem.bank.store.shard import SCALES, Shard, checksum
from sedem.bank.store.tensor_files import TYPES, Vectors, open_tensors, read_vectors
from sedem.durable_files import atomic_write
from sedem.errors import BankError
from sedem.quantization import Quantized

logger = logging.getLogger(__name__)

FOLDER = "kept"
ENDS, CHECKSUMS, VALUES, DECODER = "ends", "checksums", "values", "decoder"
_NAMES = {dtype: name for name, dtype in TYPES.items()}
"""Types as safetensors names them."""

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Type and shape of each tensor of a file, in the order of the file."""


class KeptFile:
    """The memory-mapped entries of one shard.

    Args:
        path: the file.
        shape: L, G and H.
        ends: number of states up to the end of each row `[N]`; a row without an entry adds none.
        checksums: CRC-32 of each entry `[N]`.
        vectors: all keys and values, concatenated, in the stored type.
    """

    def __init__(
        self,
        path: Path,
        shape: tuple[int, int, int],
        ends: list[int],
        checksums: list[int],
        vectors: Vectors,
    ) -> None:
        self.path = path
        self.shape = shape
        self.ends = ends
        self.checksums = checksums
        self.vectors = vectors
        self._verified: dict[int, bool] = {}

    def holds(self, sizes: Mapping[int, int], dtype: torch.dtype) -> bool:
        """Whether every row has an entry of this type with the given number of states."""
        ends = [0, *self.ends]
        return self.vectors.values.dtype == dtype and all(
            row < len(self.ends) and ends[row + 1] - ends[row] == size
            for row, size in sizes.items()
        )

    def entry(self, row: int, states: int) -> Quantized | None:
        """Return keys and values `[L, 2, G, U, H]` of a row; None if they cannot be used.

        Args:
            row: row of the shard.
            states: U, according to the bank's catalog.
        """
        first = self.ends[row - 1] if row else 0
        if row >= len(self.ends) or self.ends[row] - first != states:
            return None
        layers, heads, width = self.shape
        each = layers * 2 * heads
        entry = self.vectors[first * each : self.ends[row] * each]
        shape = (layers, 2, heads, states)
        scales = None if entry.scales is None else entry.scales.view(shape)
        entry = Quantized(entry.values.view(*shape, width), scales)
        if row not in self._verified:
            self._verified[row] = checksum(entry) == self.checksums[row]
            if not self._verified[row]:
                logger.warning(
                    "row %d of '%s' is damaged (its checksum differs); it is computed again",
                    row,
                    self.path,
                )
        return entry if self._verified[row] else None


def read_kept(shard: Shard, decoder: str, shape: tuple[int, int, int]) -> KeptFile | None:
    """Map the entries of a shard.

    Args:
        shard: the shard.
        decoder: fingerprint of everything that computes keys and values.
        shape: L, G and H.

    Returns:
        The file; None if there is none or, with a warning, if it cannot be used.
    """
    path = path_of(shard)
    if not path.is_file():
        return None
    try:
        with open_tensors(path) as file:
            if (file.metadata() or {}).get(DECODER) != decoder:
                logger.warning("'%s' is of another decoder; it is not used", path)
                return None
            ends, checksums = (file.get_tensor(name)[:].tolist() for name in (ENDS, CHECKSUMS))
            vectors = read_vectors(file, VALUES, SCALES)
    except (SafetensorError, OSError) as error:
        logger.warning("'%s' is damaged (%s); it is not used", path, error)
        return None
    values, scales = vectors.values, vectors.scales
    count = (ends[-1] if ends else 0) * shape[0] * 2 * shape[1]
    fits = (
        ends == sorted(ends)
        and len(checksums) == len(ends)
        and values.shape == (count, shape[2])
        and (scales is None or scales.shape == (count,))
    )
    if not fits:
        logger.warning("'%s' does not fit its shard; it is not used", path)
        return None
    return KeptFile(path, shape, ends, checksums, vectors)


def write_kept(
    shard: Shard,
    decoder: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    sizes: Mapping[int, int],
    entries: Iterable[tuple[int, Quantized]],
) -> None:
    """Write the entries of a shard's blocks, one after the other.

    Args:
        shard: the shard.
        decoder: fingerprint of everything that computes keys and values.
        shape: L, G and H.
        dtype: type of the entries.
        sizes: number of states of each row that is a block of the bank.
        entries: each of these rows with its entry `[L, 2, G, U, H]`, on the CPU.

    Raises:
        BankError: the disk has no room for it.
    """
    rows = max(sizes, default=-1) + 1
    ends = torch.tensor([sizes.get(row, 0) for row in range(rows)]).cumsum(0)
    vectors = sum(sizes.values()) * shape[0] * 2 * shape[1]
    layout: Layout = {ENDS: (torch.int64, (rows,)), CHECKSUMS: (torch.int64, (rows,))}
    if dtype in (torch.int8, torch.float8_e4m3fn):
        layout[SCALES] = (torch.float32, (vectors,))
    layout[VALUES] = (dtype, (vectors, shape[2]))
    header, places, size = _header(layout, {DECODER: decoder})
    path = path_of(shard)
    path.parent.mkdir(exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise BankError(
            f"'{path}' needs {size:,} bytes, the disk has {free:,} left; store the keys and values "
            "as int8, or make room"
        )
    checksums = torch.zeros(rows, dtype=torch.int64)
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.write(header)
        for row, entry in entries:
            first = (int(ends[row]) - sizes[row]) * shape[0] * 2 * shape[1]
            _write_at(file, places[VALUES] + first * shape[2] * dtype.itemsize, entry.values)
            if entry.scales is not None:
                _write_at(file, places[SCALES] + first * 4, entry.scales)
            checksums[row] = checksum(entry)
        _write_at(file, places[ENDS], ends)
        _write_at(file, places[CHECKSUMS], checksums)
        file.truncate(size)


def kept_bytes(folder: Path) -> int:
    """Total bytes of the kept keys and values of the bank in a folder."""
    return sum(file.stat().st_size for file in (folder / FOLDER).glob("*.safetensors"))


def path_of(shard: Shard) -> Path:
    """Return the file of a shard."""
    return shard.path.parent.parent / FOLDER / shard.path.name


def _header(layout: Layout, metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int], int]:
    """Return the header of a safetensors file, where each tensor starts, and the file's size."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    starts, end = {}, 0
    for name, (dtype, shape) in layout.items():
        starts[name], end = end, end + math.prod(shape) * dtype.itemsize
        offsets = [starts[name], end]
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    places = {name: len(header) + start for name, start in starts.items()}
    return header, places, len(header) + end


def _write_at(file: IO[bytes], place: int, tensor: Tensor) -> None:
    file.seek(place)
    file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
