"""Checksums of rows: each row of a catalog has one, and the catalog knows the sum of them all.

A row that was changed does not match its own checksum. A row that was lost, or one that came back,
changes the sum.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


def row_checksum(*values: str | int | bytes) -> int:
    """CRC-32 of the values of a row, each after its length in 8 bytes.

    Text counts as UTF-8 and a number as 8 bytes; numbers are little-endian and signed.
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
        """With some rows more."""
        added = list(checksums)
        return Sum(self.count + len(added), self.total + sum(added))

    def minus(self, checksums: Iterable[int]) -> Sum:
        """With some rows less."""
        gone = list(checksums)
        return Sum(self.count - len(gone), self.total - sum(gone))


@dataclass(frozen=True)
class State:
    """What must change with every commit.

    Attributes:
        commit: number of commits.
        sums: of the tables "documents", "shards" and "texts".
    """

    commit: int
    sums: Mapping[str, Sum]

    def with_sums(self, **sums: Sum) -> State:
        """With other sums of some tables."""
        return State(self.commit, {**self.sums, **sums})

    def committed(self) -> State:
        """With one commit more."""
        return State(self.commit + 1, self.sums)
