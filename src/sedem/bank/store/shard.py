"""One sealed file of blocks: written once, synced, mapped, verified block by block.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sedem.durable_files import atomic_write, sha256
from sedem.errors import BankError
from sedem.quantization import Quantized

MEMORY = "memory"
SCALES = "scales"


class Shard:
    """A sealed shard, memory-mapped; each block's checksum is verified when it is first touched."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[int] = []
        self.checksums: list[int] = []
        self._verified: list[bool] = []
        self._memory: Quantized | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, row: int, crc32: int) -> None:
        """Name one of the file's rows as a live block with its checksum."""
        self.rows.append(row)
        self.checksums.append(crc32)
        self._verified.append(False)

    def take(self, indices: Sequence[int]) -> Quantized:
        """Memory `[n, J, D]` of some of this shard's live blocks.

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
        """Memory of every row of the file, those of removed documents included.

        Raises:
            BankError: the shard is missing, or a live block is damaged.
        """
        self.take(range(len(self)))
        return self._open()

    def _open(self) -> Quantized:
        if self._memory is None:
            try:
                with safe_open(self.path, framework="pt") as file:
                    self._memory = read_quantized(file, MEMORY)
            except FileNotFoundError:
                raise BankError(f"shard '{self.path}' is missing; restore it") from None
            except (SafetensorError, OSError) as error:
                raise BankError(f"shard '{self.path}' is damaged ({error}); restore it") from None
        return self._memory


def read_quantized(file: Any, name: str) -> Quantized:
    """Vectors of an open safetensors file, with their scales if it has any."""
    scales = file.get_tensor(SCALES) if SCALES in file.keys() else None  # noqa: SIM118
    return Quantized(file.get_tensor(name), scales)


def checksum(vectors: Quantized) -> int:
    """CRC-32 of the bytes of some vectors, their scales after them."""
    tensors = [vectors.values] if vectors.scales is None else [vectors.values, vectors.scales]
    crc = 0
    for tensor in tensors:
        crc = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().data, crc)
    return crc


def write_shard(folder: Path, name: str, memory_NJD: Quantized) -> tuple[int, str]:
    """Write and sync a shard; returns its size in bytes and its SHA-256."""
    path = write_quantized(folder, name, MEMORY, memory_NJD)
    return path.stat().st_size, sha256(path)


def write_quantized(
    folder: Path, name: str, tensor: str, vectors: Quantized, about: dict[str, str] | None = None
) -> Path:
    """Write vectors and sync them; the file appears under its name when it is whole.

    Args:
        folder: where.
        name: of the file; what has it already is replaced.
        tensor: what the vectors are called in the file.
        vectors: what is written.
        about: kept in the file's header.
    """
    scales = {} if vectors.scales is None else {SCALES: vectors.scales.contiguous()}
    # A shard of this number that the catalog does not know was left by a crash.
    with atomic_write(folder / name) as temporary:
        save_file({tensor: vectors.values.contiguous(), **scales}, temporary, about)
    return folder / name


def check_size(path: Path, size: int) -> None:
    """Refuse a shard that is missing or of another size.

    Raises:
        BankError: with both sizes.
    """
    if not path.is_file():
        raise BankError(f"shard '{path}' is missing; restore it or build the bank again")
    if path.stat().st_size != size:
        raise BankError(
            f"shard '{path}' has {path.stat().st_size} bytes, {size} are needed; restore it or "
            "build the bank again"
        )
