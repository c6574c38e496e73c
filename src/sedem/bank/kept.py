"""Kept keys and values: what a decoder computes for each block, in a file beside the bank.

They are derived data and not part of the bank: the file may be deleted at any time, and one that
cannot be used is ignored with a warning. An entry is found by the digest of the memory that it was
computed from and by the decoder, so it never belongs to another bank by mistake.

Letters: L layers above injection, G key heads, U states of a block, H width of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path

import apsw
import numpy as np
import torch
from numpy.typing import NDArray

from sedem.bank.database import query
from sedem.bank.derived import DerivedFile, delete_from
from sedem.bank.rows import stored_digest
from sedem.errors import BankError
from sedem.quantization import Quantized, empty

logger = logging.getLogger(__name__)

SUFFIX = ".kept"
_WHAT, _APPLICATION = "kept keys and values", 0x53644B56
_TABLE = """
CREATE TABLE kept (
    decoder TEXT NOT NULL,  -- fingerprint of everything that computes keys and values
    memory BLOB NOT NULL,   -- digest of the block's memory
    dtype TEXT NOT NULL,    -- type of the numbers
    entry BLOB NOT NULL,    -- L x 2 x G x U x H numbers
    scales BLOB,            -- one float32 per vector for int8 and fp8
    PRIMARY KEY (decoder, memory)
) STRICT;
"""
_TYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")


def kept_path(bank: Path) -> Path:
    """Return the file of kept keys and values of a bank."""
    return bank.with_name(bank.name + SUFFIX)


def kept_bytes(bank: Path) -> int:
    """Bytes of the kept keys and values of a bank on local disk."""
    path = kept_path(bank)
    return path.stat().st_size if path.is_file() and not path.is_symlink() else 0


def memory_digest(memory_JD: Quantized) -> bytes:
    """Digest of the memory of a block as it is stored."""
    return stored_digest(
        *(content if content is None else content.data for content in memory_JD.raw())
    )


def forget_kept(bank: Path, memories: Collection[bytes]) -> None:
    """Delete what is kept of blocks with the given digests of memory, for every decoder."""
    delete_from(
        kept_path(bank), _WHAT, _APPLICATION, _TABLE,
        lambda connection: connection.executemany(
            "DELETE FROM kept WHERE memory = ?", ((one,) for one in memories)
        ),
    )  # fmt: skip


class KeptFile(DerivedFile):
    """The kept keys and values of one decoder beside a bank; threads may share it.

    Args:
        bank: file of the bank.
        decoder: fingerprint of everything that computes keys and values.
        shape: L, G and H.
        create: create the file if it does not exist.

    Raises:
        BankError: the file is damaged, or it is something else.
    """

    def __init__(
        self, bank: Path, decoder: str, shape: tuple[int, int, int], *, create: bool = False
    ) -> None:
        path = kept_path(bank)
        super().__init__(path, _WHAT, _APPLICATION, _TABLE, 2**20, create)
        self.decoder, self.shape = decoder, shape

    def entry(self, memory_JD: Quantized, states: int) -> Quantized | None:
        """Return keys and values `[L, 2, G, U, H]` of a block; None if they cannot be used."""
        layers, heads, width = self.shape
        shape = (layers, 2, heads, states, width)
        try:
            with self.using() as connection:
                row, dtype = self._row(connection, memory_JD)
                if dtype not in _TYPES:
                    return None
                found = empty(shape, getattr(torch, dtype))
                for column, room in zip(("entry", "scales"), found.raw(), strict=True):
                    if room is not None and not _read(connection, column, row, room):
                        return None
        except BankError as error:
            logger.warning("%s; it is computed again", error)
            return None
        return found if found.is_finite() else None

    def holds(self, memory_JD: Quantized, dtype: torch.dtype) -> bool:
        """Whether there is an entry of this type for a block with this memory."""
        with self.using() as connection:
            return self._row(connection, memory_JD)[1] == _name(dtype)

    def put(self, memory_JD: Quantized, entry: Quantized) -> None:
        """Store keys and values `[L, 2, G, U, H]` of a block, in one commit.

        Raises:
            BankError: the disk is full, or the file cannot be written.
        """
        row = self.decoder, memory_digest(memory_JD), _name(entry.values.dtype), *entry.raw()
        with self.using() as connection:
            connection.execute("INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?, ?)", row)

    def keep_only(self, memories: Collection[bytes], dtype: torch.dtype) -> None:
        """Delete what is of another decoder or type, or of blocks that are gone; free its space.

        `memories` are the digests of the memory of all blocks.
        """
        kept = self.decoder, _name(dtype)
        with self.deleting() as connection:
            rows = query(connection, "SELECT rowid, memory, decoder, dtype FROM kept")
            gone = [(row,) for row, memory, *of in rows if (*of,) != kept or memory not in memories]
            connection.executemany("DELETE FROM kept WHERE rowid = ?", gone)

    def _row(self, connection: apsw.Connection, memory_JD: Quantized) -> tuple[int, str]:
        """Return the row of a block and its type; no type without a row."""
        statement = "SELECT rowid, dtype FROM kept WHERE decoder = ? AND memory = ?"
        found = query(connection, statement, self.decoder, memory_digest(memory_JD))
        return found[0] if found else (0, "")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _read(connection: apsw.Connection, column: str, row: int, room: NDArray[np.uint8]) -> bool:
    """Read a value into an array; returns whether it has the right size."""
    blob = connection.blob_open("main", "kept", column, row, False)
    fits = blob.length() == room.nbytes
    if fits:
        blob.read_into(room.data)
    blob.close(True)
    return fits
