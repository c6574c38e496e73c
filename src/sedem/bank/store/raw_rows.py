"""Rows of a shard by their position in the file: they are found even if its header is damaged.

The catalog gives the size of an intact file and of a row, and the rows are at the end of the file.
A row is used only if it matches its checksum, so nothing in the file has to be trusted.

Letters: N rows, J slots of a block, D decoder width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sedem.bank.store.catalog_rows import StoredShard
from sedem.bank.store.interface import Meta
from sedem.bank.store.shard import checksum
from sedem.errors import BankError
from sedem.quantization import BFLOAT16, DTYPES, Quantized, join


class RawRows:
    """The rows of a shard, each read when it is needed.

    Args:
        folder: the folder of shards.
        stored: the shard according to the catalog.
        meta: the bank's metadata.
    """

    def __init__(self, folder: Path, stored: StoredShard, meta: Meta) -> None:
        self.path = folder / stored.row.file
        self.checksums = stored.checksums
        self.dtype = DTYPES[meta.dtype]
        self.shape = (stored.blocks.slots, int(meta.made_by["width"]))
        slots, width = self.shape
        self._values = slots * width * self.dtype.itemsize
        self._scales = 0 if meta.dtype == BFLOAT16 else slots * torch.float32.itemsize
        # safetensors puts wider types first: the scales of all rows, then their values.
        rows = len(stored.checksums)
        self._scales_at = stored.row.size - rows * (self._values + self._scales)
        self._values_at = self._scales_at + rows * self._scales

    def __len__(self) -> int:
        return len(self.checksums)

    def take(self, rows: Sequence[int]) -> Quantized:
        """Return the memory `[n, J, D]` of some rows.

        Raises:
            BankError: one of them is damaged.
        """
        found = [self._intact(row) for row in rows]
        intact = [row for row in found if row is not None]
        if len(intact) < len(found):
            raise BankError(
                f"block {rows[found.index(None)]} of '{self.path}' is damaged (its checksum "
                "differs); run 'sedem bank verify --repair'"
            )
        return join(intact)

    def damaged(self) -> list[int]:
        """Rows that are missing or do not match their checksums."""
        return [row for row in range(len(self)) if self._intact(row) is None]

    def _intact(self, row: int) -> Quantized | None:
        values = self._read(self._values_at + row * self._values, self._values)
        scales = self._read(self._scales_at + row * self._scales, self._scales)
        if values is None or scales is None:
            return None
        memory = Quantized(
            torch.frombuffer(values, dtype=self.dtype).view(1, *self.shape),
            torch.frombuffer(scales, dtype=torch.float32).view(1, -1) if self._scales else None,
        )
        return memory if checksum(memory) == self.checksums[row] else None

    def _read(self, place: int, size: int) -> bytearray | None:
        """Read bytes of the file; None if it does not have them."""
        if place < 0:
            return None
        try:
            with self.path.open("rb") as file:
                file.seek(place)
                found = bytearray(file.read(size))
        except OSError:
            return None
        return found if len(found) == size else None
