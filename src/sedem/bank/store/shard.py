"""A shard: a safetensors file of blocks' memory, written once, mapped, checked block by block.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sedem.backbone.safetensors import save_tensors
from sedem.durable_files import atomic_write, sha256
from sedem.errors import BankError
from sedem.quantization import BFLOAT16, DTYPES, Quantized

MEMORY = "memory"
SCALES = "scales"


class Shard:
    """A piece of a bank on disk, mapped when it is first used.

    The catalog names the rows of the file that are blocks of the bank; rows of removed documents
    remain in the file. A block's checksum is compared when the block is first used.

    Args:
        path: the file.
        block_shape: J and D, as the catalog says.
        dtype: type of the stored slots, as the catalog says.
    """

    def __init__(self, path: Path, block_shape: tuple[int, int], dtype: str) -> None:
        self.path = path
        self.block_shape = block_shape
        self.dtype = dtype
        self.rows: list[int] = []
        self.checksums: list[int] = []
        self._verified: list[bool] = []
        self._memory: Quantized | None = None

    def __len__(self) -> int:
        """Number of blocks of the bank in this shard."""
        return len(self.rows)

    def add(self, row: int, crc32: int) -> None:
        """Add a row of the file as the next block, with its checksum."""
        self.rows.append(row)
        self.checksums.append(crc32)
        self._verified.append(False)

    def take(self, indices: Sequence[int]) -> Quantized:
        """Return the memory `[n, J, D]` of some of the shard's blocks.

        Raises:
            BankError: the shard is missing or damaged.
        """
        memory = self._open()
        for index in indices:
            if not self._verified[index]:
                if checksum(memory[self.rows[index]]) != self.checksums[index]:
                    raise BankError(
                        f"block {self.rows[index]} of '{self.path}' is damaged (its checksum "
                        "differs); restore the file or build the bank again"
                    )
                self._verified[index] = True
        return memory[[self.rows[index] for index in indices]]

    def whole(self) -> Quantized:
        """Return the memory of every row of the file, including rows of removed documents.

        Raises:
            BankError: the shard is missing, or one of its blocks is damaged.
        """
        self.take(range(len(self)))
        return self._open()

    def _open(self) -> Quantized:
        if self._memory is None:
            try:
                with safe_open(self.path, framework="pt") as file:
                    memory = read_quantized(file, MEMORY)
            except FileNotFoundError:
                raise BankError(f"shard '{self.path}' is missing; restore it") from None
            except (SafetensorError, OSError) as error:
                raise BankError(f"shard '{self.path}' is damaged ({error}); restore it") from None
            self._check(memory)
            self._memory = memory
        return self._memory

    def _check(self, memory: Quantized) -> None:
        """Compare type and shape with the catalog; both files may come from anybody."""
        values, scales = memory.values, memory.scales
        needed = max(self.rows, default=-1) + 1
        fits = (
            values.dtype == DTYPES[self.dtype]
            and values.dim() == 3
            and (not self.rows or values.shape[1:] == self.block_shape)
            and len(values) >= needed
            and (scales is None) == (self.dtype == BFLOAT16)
            and (scales is None or scales.shape == values.shape[:-1])
        )
        if not fits:
            raise BankError(
                f"shard '{self.path}' holds {values.dtype} {list(values.shape)}, its catalog needs "
                f"{self.dtype} {[needed, *self.block_shape]}; restore it or build the bank again"
            )


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


def check_size(path: Path, size: int) -> None:
    """Refuse a shard that is missing or of another size than the catalog says.

    Raises:
        BankError: it is; the message names both sizes.
    """
    if not path.is_file():
        raise BankError(f"shard '{path}' is missing; restore it or build the bank again")
    if path.stat().st_size != size:
        raise BankError(
            f"shard '{path}' has {path.stat().st_size} bytes, {size} are needed; restore it or "
            "build the bank again"
        )
