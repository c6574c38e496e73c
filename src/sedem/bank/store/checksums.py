"""Checksums of rows: each row of a catalog has one, and the catalog stores their sum.

A changed row does not match its own checksum. A lost row, or one that came back, changes the sum.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


def row_checksum(*values: str | int | bytes) -> int:
    """CRC-32 of the values of a row, each preceded by its length in 8 bytes.

    Text is encoded as UTF-8 and a number as 8 bytes, little-endian and signed.
    """
    crc = 0
    for value in values:
        if isinstance(value, str):
            data = value.encode()
        elif isinstance(value, int):
            data = value.to_bytes(8, "little", signed=True)
        else:
            data = value
        crc = zlib.crc32(data, zlib.crc32(len(data).to_bytes(8, "little"), crc))
    return crc


@dataclass(frozen=True)
class Sum:
    """The number of a table's rows, and the sum of their checksums."""

    count: int = 0
    total: int = 0

    def plus(self, checksums: Iterable[int]) -> Sum:
        """Return the sum with rows added."""
        added = list(checksums)
        return Sum(self.count + len(added), self.total + sum(added))

    def minus(self, checksums: Iterable[int]) -> Sum:
        """Return the sum with rows removed."""
        gone = list(checksums)
        return Sum(self.count - len(gone), self.total - sum(gone))


@dataclass(frozen=True)
class State:
    """The state of a catalog, which changes with every commit.

    Attributes:
        commit: number of commits.
        sums: sums of the tables "documents", "shards" and "texts".
    """

    commit: int
    sums: Mapping[str, Sum]

    def with_sums(self, **sums: Sum) -> State:
        """Return the state with new sums for some tables."""
        return State(self.commit, {**self.sums, **sums})

    def committed(self) -> State:
        """Return the state after one more commit."""
        return State(self.commit + 1, self.sums)
