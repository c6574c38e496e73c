"""A shard: a safetensors file of blocks' memory, written once, checked block by block.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from sedem.backbone.safetensors import save_tensors
from sedem.bank.store.catalog_rows import StoredShard
from sedem.durable_files import atomic_write, sha256
from sedem.errors import BankError
from sedem.quantization import BFLOAT16, DTYPES, Quantized

SHARDS = "shards"
"""The folder of shards in a bank."""
MEMORY = "memory"
SCALES = "scales"
MAPS = 256
"""Shards of one bank that are mapped at the same time; a process may have some 65,000 maps."""

Check = Literal["once", "always"]
"""When a block's checksum is compared: when it is first used, or whenever it is used."""


class Maps:
    """The shards of a bank that are mapped now; the one that was used longest ago goes first.

    Args:
        limit: how many may be mapped.
    """

    def __init__(self, limit: int = MAPS) -> None:
        self.limit = limit
        self._open: OrderedDict[Path, Quantized] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path) -> Quantized | None:
        """Return a mapped file; None if it is not mapped."""
        with self._lock:
            found = self._open.get(path)
            if found is not None:
                self._open.move_to_end(path)
            return found

    def put(self, path: Path, memory: Quantized) -> None:
        """Keep a file mapped."""
        with self._lock:
            self._open[path] = memory
            while len(self._open) > self.limit:
                self._open.popitem(last=False)


class Shard:
    """A piece of a bank on disk, opened when it is first used.

    A file may hold rows of removed documents; nobody asks for them.

    Args:
        folder: of shards.
        stored: what the catalog says of it.
        width: D, as the catalog says.
        dtype: type of the stored slots, as the catalog says.
        maps: the mapped files of the bank.
        check: when checksums are compared.
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
        self._verified = np.zeros(len(stored.checksums), bool)
        self._file: tuple[int, int] | None = None

    def __len__(self) -> int:
        """Number of rows; rows of removed documents are counted."""
        return len(self.stored.checksums)

    def take(self, rows: Sequence[int]) -> Quantized:
        """Return the memory `[n, J, D]` of some rows.

        Raises:
            BankError: the shard is missing, was changed, or a row is damaged.
        """
        taken = self._open()[list(rows)]
        for place, row in enumerate(rows):
            if not self._verified[row] or self.check == "always":
                self._compare(row, taken[place])
        return taken

    def whole(self) -> Quantized:
        """Return the memory of every row of the file.

        Raises:
            BankError: the shard is missing, was changed, or a row is damaged.
        """
        memory = self._open()
        for row in np.flatnonzero(~self._verified).tolist():
            self._compare(row, memory[row])
        return memory

    def _compare(self, row: int, memory: Quantized) -> None:
        if checksum(memory) != self.stored.checksums[row]:
            raise BankError(
                f"block {row} of '{self.path}' is damaged (its checksum differs); restore the "
                "file, or run 'sedem bank verify --repair'"
            )
        if not memory.is_finite():
            raise BankError(
                f"block {row} of '{self.path}' holds infinite numbers or none at all; build the "
                "bank again with a model whose states are finite"
            )
        self._verified[row] = True

    def _open(self) -> Quantized:
        """The file's tensors, mapped; a file that was exchanged since is refused."""
        memory = self.maps.get(self.path)
        if memory is not None and self.check == "once":
            return memory
        identity = check_size(self.path, self.stored.row.size)
        if self._file not in (None, identity):
            raise BankError(
                f"shard '{self.path}' was changed while the bank was open; open the bank again"
            )
        self._file = identity
        if memory is None:
            memory = self._read()
            self.maps.put(self.path, memory)
        return memory

    def _read(self) -> Quantized:
        try:
            with safe_open(self.path, framework="pt") as file:
                memory = read_quantized(file, MEMORY)
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


def read_quantized(file: Any, name: str) -> Quantized:
    """Read vectors from an open safetensors file, with their scales if it has any."""
    scales = file.get_tensor(SCALES) if SCALES in file.keys() else None  # noqa: SIM118
    return Quantized(file.get_tensor(name), scales)


def checksum(vectors: Quantized) -> int:
    """CRC-32 of the bytes of the values, then of the scales."""
    tensors = [vectors.values] if vectors.scales is None else [vectors.values, vectors.scales]
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, crc)
    return crc


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


def check_size(path: Path, size: int) -> tuple[int, int]:
    """Refuse a shard that is missing or of another size than the catalog says.

    Returns:
        Device and inode of the file, which tell whether it was exchanged.

    Raises:
        BankError: it is; the message names both sizes.
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
    return found.st_dev, found.st_ino


def _missing(path: Path) -> BankError:
    return BankError(
        f"shard '{path}' is missing; restore it or run 'sedem bank verify --repair', or open the "
        "bank again if it was compacted"
    )
