"""Rows of a SQLite file, read page by page, so that only damaged rows are lost.

SQLite finds a row through the header, the schema and the inner pages of a table, and gives up if
one of them is damaged. Here every leaf page of a table is read on its own. A page does not say
which table it belongs to, so callers must recognise a row by its content and its checksum. The page
layout is that of https://www.sqlite.org/fileformat.html, which is guaranteed to stay stable.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PAGE = 4096
"""Bytes of a page, unless the header gives another valid size."""
MAGIC = b"SQLite format 3\0"
_SIZES = {2**power for power in range(9, 16)}
_LEAF = 13
_WHOLE_NUMBERS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
"""Bytes of a number by its serial type."""

Value = str | int | bytes | None


def first_page(pages: int, size: int = PAGE) -> bytes:
    """Return the first page of a UTF-8 file with a write-ahead log and no tables."""
    fixed = struct.pack(">HBBBBBB", size, 2, 2, 0, 64, 32, 32)
    counts = struct.pack(">12I", 1, pages, 0, 0, 1, 4, 0, 0, 1, 0, 0, 0)
    start = MAGIC + fixed + counts + bytes(20) + struct.pack(">II", 1, 3_040_001)
    return (start + struct.pack(">BHHHB", _LEAF, 0, 0, size, 0)).ljust(size, b"\0")


def page_size(start: bytes) -> int:
    """Return the bytes of a page, given the start of a file."""
    size = int.from_bytes(start[16:18])
    return size if size in _SIZES else PAGE


def rows(path: Path) -> Iterator[tuple[int, list[Value]]]:
    """Yield the id and the columns of each readable row, in no particular order.

    A column that is the id itself is None. Free pages are skipped.
    """
    with path.open("rb") as file:
        pages = _Pages(file)
        free = pages.free()
        for number in range(1, pages.count + 1):
            if number not in free:
                yield from pages.rows(number)


class _Pages:
    """The pages of an open file, counted from 1."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size = page_size(file.read(100))
        self._bytes = file.seek(0, 2)
        self.count = -(-self._bytes // self.size)

    def page(self, number: int) -> bytes:
        self._file.seek((number - 1) * self.size)
        return self._file.read(self.size)

    def free(self) -> set[int]:
        """Return the free pages; an empty set if the list of them is damaged."""
        trunk, wanted = struct.unpack_from(">II", self.page(1).ljust(100, b"\0"), 32)
        found: set[int] = set()
        while 0 < trunk <= self.count and trunk not in found:
            page = self.page(trunk).ljust(self.size, b"\0")
            following, leaves = struct.unpack_from(">II", page)
            if leaves > self.size // 4 - 2:
                return set()
            found |= {trunk, *struct.unpack_from(f">{leaves}I", page, 8)}
            trunk = following
        return found if len(found) == wanted else set()

    def rows(self, number: int) -> Iterator[tuple[int, list[Value]]]:
        """Yield the readable rows of a page; none if it is not a leaf of a table."""
        page = self.page(number)
        start = 100 if number == 1 else 0
        if page[start : start + 1] != bytes([_LEAF]):
            return
        cells = int.from_bytes(page[start + 3 : start + 5])
        for at in range(start + 8, min(start + 8 + 2 * cells, len(page) - 1), 2):
            try:
                yield self._cell(page, int.from_bytes(page[at : at + 2]))
            except (IndexError, ValueError):
                continue

    def _cell(self, page: bytes, at: int) -> tuple[int, list[Value]]:
        """Return the row at an offset of a page.

        Raises:
            IndexError: it extends beyond the available bytes.
            ValueError: it is not a row.
        """
        length, at = _varint(page, at)
        number, at = _varint(page, at)
        if length > self._bytes:
            raise ValueError("longer than the file")
        here, most = length, self.size - 35
        if length > most:
            least = (self.size - 12) * 32 // 255 - 23
            here = least + (length - least) % (self.size - 4)
            here = least if here > most else here
        parts = [page[at : at + here]]
        following, missing = int.from_bytes(page[at + here : at + here + 4]), length - here
        while missing > 0:
            if not 0 < following <= self.count:
                raise ValueError("no such page")
            more = self.page(following)
            following = int.from_bytes(more[:4])
            parts.append(more[4 : 4 + missing])
            missing -= self.size - 4
        return _signed(number), _columns(b"".join(parts))


def _columns(record: bytes) -> list[Value]:
    """Return the values of a row; errors as in `_Pages._cell`."""
    end, at = _varint(record, 0)
    kinds = []
    while at < end:
        kind, at = _varint(record, at)
        kinds.append(kind)
    values: list[Value] = []
    at = end
    for kind in kinds:
        size = _WHOLE_NUMBERS.get(kind, 0) if kind < 12 else (kind - 12) // 2
        data = record[at : at + size]
        at += size
        if len(data) < size or kind in (7, 10, 11):
            raise ValueError("a column that is cut off, or of a type no catalog has")
        if kind >= 12:
            values.append(data if kind % 2 == 0 else data.decode())
        elif kind in (8, 9):
            values.append(kind - 8)
        else:
            values.append(int.from_bytes(data, signed=True) if kind else None)
    return values


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of one to nine bytes, and the offset after it."""
    value = 0
    for place in range(at, at + 8):
        value = value << 7 | data[place] & 127
        if data[place] < 128:
            return value, place + 1
    return value << 8 | data[at + 8], at + 9


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
