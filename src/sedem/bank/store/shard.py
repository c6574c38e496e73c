"""A shard: a safetensors file with the memory of blocks, written once, verified block by block.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

import math
import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from sedem.backbone.safetensors import save_tensors
from sedem.bank.blocks import Blocks
from sedem.bank.store.catalog_rows import StoredShard
from sedem.bank.store.tensor_files import Vectors, open_tensors, read_vectors
from sedem.durable_files import atomic_write, sha256
from sedem.errors import BankError, ChangedFileError
from sedem.quantization import BFLOAT16, DTYPES, Quantized
from sedem.types import Document

SHARDS = "shards"
"""The folder of shards in a bank."""
MEMORY = "memory"
SCALES = "scales"
PART = 2**26
"""Bytes that are checksummed at once."""
MAPS = 256
"""Shards of one bank that are mapped at the same time; a process may have some 65,000 maps."""

Check = Literal["once", "always"]
"""When a block's checksum is verified: on its first use from a file, or on every use."""

Identity = tuple[int, int, int, int]
"""Device, inode and times of a file; they differ for another file and after a write."""


@dataclass(frozen=True, eq=False)
class OpenFile:
    """The file of a shard as it was when it was opened.

    Attributes:
        memory: its tensors, mapped if possible.
        identity: the file's identity; None if the file was replaced while it was being opened.
        verified: which of its rows are known to match their checksums `[N]`.
    """

    memory: Vectors
    identity: Identity | None
    verified: NDArray[np.bool_]


class Maps:
    """The shards of a bank that are mapped now; the least recently used is dropped first.

    Args:
        limit: how many may be mapped.
    """

    def __init__(self, limit: int = MAPS) -> None:
        self.limit = limit
        # Not keyed by path: a rebuilt bank may have another shard at the same path.
        self._open: OrderedDict[Shard, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[Maps], tuple[int]]:
        # Another process maps its own files.
        return Maps, (self.limit,)

    def get(self, shard: Shard) -> OpenFile | None:
        """Return the file of a shard; None if it is not mapped."""
        with self._lock:
            found = self._open.get(shard)
            if found is not None:
                self._open.move_to_end(shard)
            return found

    def put(self, shard: Shard, file: OpenFile) -> None:
        """Keep the file of a shard mapped."""
        with self._lock:
            self._open[shard] = file
            while len(self._open) > self.limit:
                self._open.popitem(last=False)

    def drop(self, shard: Shard) -> None:
        """Stop keeping the file of a shard mapped."""
        with self._lock:
            self._open.pop(shard, None)


class Shard:
    """A piece of a bank on disk, opened when it is first used.

    A file may hold rows of removed documents; they are never requested.

    Args:
        folder: the folder of shards.
        stored: the shard according to the catalog.
        width: D, according to the catalog.
        dtype: type of the stored slots, according to the catalog.
        maps: the mapped files of the bank.
        check: when checksums are verified.
    """

    def __init__(
        self,
        folder: Path,
        stored: StoredShard,
        width: int,
        dtype: str,
        maps: Maps,
        check: Check = "once",
    ) -> None:
        self.path = folder / stored.row.file
        self.stored = stored
        self.block_shape = (stored.blocks.slots, width)
        self.dtype = dtype
        self.maps = maps
        self.check = check
        self._compared: tuple[Identity, NDArray[np.bool_]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Another process verifies checksums itself.
        return {**self.__dict__, "_compared": None}

    def __len__(self) -> int:
        """Number of rows, including rows of removed documents."""
        return len(self.stored.checksums)

    def take(self, rows: Sequence[int]) -> Quantized:
        """Return the memory `[n, J, D]` of some rows.

        Raises:
            BankError: the shard is missing, was changed, or a row is damaged.
        """
        file, taken = self._taken(rows)
        for place, row in enumerate(rows):
            if not file.verified[row] or self.check == "always":
                self._compare(row, taken[place], file)
        return taken

    def whole(self) -> Vectors:
        """Return the memory of every row of the file.

        Raises:
            BankError: the shard is missing, was changed, or a row is damaged.
        """
        file = self._open()
        for row in np.flatnonzero(~file.verified | (self.check == "always")).tolist():
            self._compare(row, file.memory[row], file)
        return file.memory

    def _taken(self, rows: Sequence[int]) -> tuple[OpenFile, Quantized]:
        """Return some unverified rows and the file that they are from."""
        file = self._open()
        try:
            return file, file.memory[list(rows)]
        except ChangedFileError:
            # The new file may be just as good: its rows are verified by their checksums.
            self.maps.drop(self)
        file = self._open()
        return file, file.memory[list(rows)]

    def renew(self) -> Identity:
        """Drop the open file if it was replaced or written to.

        The next use opens the current file and verifies the checksums of its rows again.

        Returns:
            The current identity of the file.

        Raises:
            BankError: the shard is missing or of another size.
        """
        identity = check_size(self.path, self.stored.row.size)
        file = self.maps.get(self)
        if file is not None and file.identity != identity:
            self.maps.drop(self)
        return identity

    def _compare(self, row: int, memory: Quantized, file: OpenFile) -> None:
        if checksum(memory) != self.stored.checksums[row]:
            raise BankError(
                f"block {row} of '{self.path}' is damaged (its checksum differs); restore the "
                "file, or run 'sedem bank verify --repair'"
            )
        if not memory.is_finite():
            raise BankError(
                f"block {row} of '{self.path}' holds NaN or infinite numbers; build the bank "
                "again with a model whose states are finite"
            )
        file.verified[row] = True

    def _open(self) -> OpenFile:
        """Return the file of the shard, mapped if possible."""
        file = self.maps.get(self)
        if file is not None and self.check == "once":
            return file
        identity = self.renew()
        file = self.maps.get(self)
        if file is None:
            memory = self._read()
            if check_size(self.path, self.stored.row.size) != identity:
                # It was replaced before or after it was opened; which one is unknown.
                file = OpenFile(memory, None, np.zeros(len(self), bool))
            else:
                file = OpenFile(memory, identity, self._verified(identity))
            self.maps.put(self, file)
        return file

    def _verified(self, identity: Identity) -> NDArray[np.bool_]:
        """Return which rows have matched their checksums; none if the file is a new one."""
        if self._compared is None or self._compared[0] != identity:
            self._compared = identity, np.zeros(len(self), bool)
        return self._compared[1]

    def _read(self) -> Vectors:
        try:
            with open_tensors(self.path) as file:
                memory = read_vectors(file, MEMORY, SCALES)
        except FileNotFoundError:
            raise _missing(self.path) from None
        except (SafetensorError, OSError) as error:
            raise BankError(f"shard '{self.path}' is damaged ({error}); restore it") from None
        values, scales = memory.values, memory.scales
        wanted = (len(self), *self.block_shape)
        fits = (
            values.dtype == DTYPES[self.dtype]
            and values.shape == wanted
            and (scales is None) == (self.dtype == BFLOAT16)
            and (scales is None or scales.shape == wanted[:-1])
        )
        if not fits:
            raise BankError(
                f"shard '{self.path}' holds {values.dtype} {list(values.shape)}, its catalog needs "
                f"{self.dtype} {list(wanted)}; restore it or build the bank again"
            )
        return memory


def checksum(vectors: Vectors) -> int:
    """CRC-32 of the bytes of the values, then of the scales."""
    crc = 0
    for tensor in (vectors.values, vectors.scales):
        if tensor is not None and len(tensor):
            # In parts, because vectors that are not mapped may not fit into memory.
            rows = max(1, PART * len(tensor) // (math.prod(tensor.shape) * tensor.dtype.itemsize))
            for first in range(0, len(tensor), rows):
                part = tensor[first : first + rows].contiguous().view(torch.uint8)
                crc = zlib.crc32(part.numpy().data, crc)
    return crc


def check_finite(documents: Sequence[Document], blocks: Blocks, memory_NJD: Quantized) -> None:
    """Refuse memory with infinities or NaN.

    Args:
        documents: the documents of the blocks.
        blocks: the blocks; `documents` are indices.
        memory_NJD: their memory.

    Raises:
        BankError: there is such memory; the message names the first block.
    """
    if memory_NJD.is_finite():
        return
    row = next(row for row in range(len(blocks)) if not memory_NJD[row].is_finite())
    block = blocks[row]
    raise BankError(
        f"the memory of characters {block.start:,} to {block.end:,} of document "
        f"'{documents[block.document].name}' holds NaN or infinite numbers; read it with a "
        "backbone in another type, such as float32"
    )


def write_shard(folder: Path, name: str, memory_NJD: Quantized) -> tuple[int, str]:
    """Write a shard atomically; returns its size in bytes and its SHA-256."""
    path = folder / name
    write_quantized(path, MEMORY, memory_NJD)
    return path.stat().st_size, sha256(path)


def write_quantized(
    path: Path, tensor: str, vectors: Quantized, metadata: dict[str, str] | None = None
) -> None:
    """Write vectors as a safetensors file, atomically.

    Args:
        path: the file. One that exists is replaced: a shard that the catalog does not know was
            left by a crash.
        tensor: name of the vectors in the file.
        vectors: the values, and the scales if there are any.
        metadata: entries of the file's header.
    """
    scales = {} if vectors.scales is None else {SCALES: vectors.scales.contiguous()}
    with atomic_write(path) as temporary:
        save_tensors({tensor: vectors.values.contiguous(), **scales}, temporary, metadata)


def check_size(path: Path, size: int) -> Identity:
    """Refuse a shard that is missing or whose size differs from the catalog.

    Returns:
        The identity of the file, which shows whether it is replaced or written to afterwards.

    Raises:
        BankError: it is missing or differs; the message names both sizes.
    """
    try:
        found = os.stat(path)
    except PermissionError:
        raise BankError(f"shard '{path}' may not be read; ask its owner for permission") from None
    except OSError:
        raise _missing(path) from None
    if found.st_size != size:
        raise BankError(
            f"shard '{path}' has {found.st_size} bytes, {size} are needed; restore it or build the "
            "bank again"
        )
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _missing(path: Path) -> BankError:
    return BankError(
        f"shard '{path}' is missing; restore it or run 'sedem bank verify --repair', or open the "
        "bank again if it was compacted"
    )
