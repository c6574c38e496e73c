"""The rows of a bank's file, as far as its pages match their checksums.

Rows are looked up one by one, so that a damaged page costs only the rows on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import apsw
import torch

from sedem.bank.rows import Meta, text_digest
from sedem.quantization import BFLOAT16, DTYPES, Quantized
from sedem.types import are_pages

UNREADABLE = (
    apsw.IOError, apsw.CorruptError, apsw.NotADBError, apsw.TooBigError, UnicodeDecodeError,
)  # fmt: skip
"""What SQLite raises for rows on damaged pages."""


class StoredDocument(NamedTuple):
    """A document of the newest version, or one that is being read.

    Attributes:
        number: its id.
        name: its name.
        characters: length of its text.
        sha256: SHA-256 of its text.
        pages: JSON: first character of each page.
        blocks: number of its blocks.
        tokens: number of its tokens.
        added: None while it is being read.
        text: None if it is damaged or not stored.
        ids: ids of its blocks.
        problem: what it lost; empty if it is intact.
    """

    number: int
    name: str
    characters: int
    sha256: str
    pages: str
    blocks: int
    tokens: int
    added: int | None
    text: str | None
    ids: Sequence[int]
    problem: str = ""

    def first_characters(self) -> tuple[int, ...]:
        """First character of each page of its text; empty if the row is malformed."""
        with suppress(TypeError, ValueError, RecursionError):
            found = tuple(json.loads(self.pages))
            if are_pages(found, self.characters):
                return found
        return ()


class ReadableRows:
    """The rows of a file that can be read.

    Args:
        strict: a connection that compares every page with its checksum.
        loose: one that does not.
        meta: the bank-wide metadata.
        pages: numbers of the damaged pages.
    """

    def __init__(
        self, strict: apsw.Connection, loose: apsw.Connection, meta: Meta, pages: Sequence[int]
    ) -> None:
        self.strict, self.loose, self.meta, self.pages = strict, loose, meta, pages
        self._names: dict[int, str] = dict(_scan(strict, "documents", "name", "documents_name"))

    def documents(self) -> Iterator[StoredDocument]:
        """Yield the documents in reading order."""
        numbers, owned = {*self._names}, dict[int, list[int]]()
        if self.pages:
            # An index knows rows that lie between damaged pages; a table knows what an index lost.
            for connection in (self.strict, self.loose):
                numbers |= {number for number, _ in _scan(connection, "documents", "id")}
            owners = dict(_scan(self.strict, "blocks", "document", "blocks_place"))
            owners |= _scan(self.strict, "blocks", "document")
            for block, number in sorted(owners.items()):
                owned.setdefault(number, []).append(block)
        for number in sorted(numbers):
            row, is_checked = self._row(number)
            if row is None or row[-1] is not None:
                continue
            name, _, sha256, pages, *_ = row
            # The text proves its SHA-256, and the index proves the name; nothing else proves pages.
            is_known = is_checked or (self._names.get(number) == name and pages == "[]")
            text = self._text(number, sha256) if is_known else None
            ids = owned.get(number, ()) if self.pages else self._ids(number)
            fields: list[Any] = [number, *row[:7], text, ids]
            one = StoredDocument(*fields)
            yield one._replace(problem=self._problem(one, is_checked))

    def block(self, number: int) -> Any:
        """Return the row of a block; None if it cannot be read."""
        with suppress(*UNREADABLE):
            return self.strict.execute(
                'SELECT document, number, start, "end", tokens, memory, scales FROM blocks '
                "WHERE id = ?",
                (number,),
            ).fetchone()
        return None

    def _ids(self, number: int) -> list[int]:
        with suppress(*UNREADABLE):
            found = self.strict.execute(
                "SELECT id FROM blocks WHERE document = ? ORDER BY number", (number,)
            )
            return [block for (block,) in found]
        return []

    def _row(self, number: int) -> tuple[Any, bool]:
        """Return the row of a document, and whether its page matches its checksum."""
        for connection in (self.strict, self.loose):
            with suppress(*UNREADABLE):
                row = connection.execute(
                    "SELECT name, characters, sha256, pages, blocks, tokens, added, removed "
                    "FROM documents WHERE id = ?",
                    (number,),
                ).fetchone()
                return row, connection is self.strict
        return (self._names.get(number, f"number {number}"), 0, "", "[]", 0, 0, 0, None), False

    def _text(self, number: int, sha256: str) -> str | None:
        """Return the text of a document, if it is the one that was read."""
        # A piece that an index has lost is found in the table, which takes long.
        ways = (self.strict, ""), (self.loose, ""), (self.loose, "NOT INDEXED")
        for connection, way in ways if self.pages else ways[:1]:
            with suppress(*UNREADABLE, TypeError):
                pieces = connection.execute(
                    f"SELECT text FROM texts {way} WHERE document = ? ORDER BY start", (number,)
                )
                text = "".join(piece for (piece,) in pieces)
                if text_digest(text) == sha256:
                    return text
        return None

    def _problem(self, one: StoredDocument, is_checked: bool) -> str:
        if not is_checked and one.text is None:
            return "its row cannot be read"
        if self.meta.texts and one.added is not None and one.text is None:
            return "its text is damaged or incomplete"
        if one.pages != json.dumps([*one.first_characters()]):
            return "its pages lie outside its text"
        try:
            return self._problem_of_blocks(one)
        except TypeError:
            return "its rows are malformed"

    def _problem_of_blocks(self, one: StoredDocument) -> str:
        found = (row for row in map(self.block, one.ids) if row and row[0] == one.number)
        count = tokens = 0
        for count, (_, number, start, end, slots, *memory) in enumerate(found, 1):
            tokens += sum(slots)
            if number != count - 1 or not 0 <= start <= end <= one.characters:
                return f"block {count - 1} has another number, or lies outside its text"
            if len(slots) != self.meta.slots or not _is_finite(self.meta, *memory):
                return f"block {count - 1} has another size, or holds infinities or NaN"
        if count != one.blocks:
            return f"{count:,} of its {one.blocks:,} blocks can be read"
        if tokens != one.tokens:
            return f"its blocks have {tokens:,} tokens, not {one.tokens:,}"
        return ""


def _scan(connection: apsw.Connection, table: str, column: str, index: str = "") -> list[Any]:
    """Return ids and a column of a table, from both ends up to the first damaged page."""
    way = f"INDEXED BY {index} ORDER BY {column}" if index else "NOT INDEXED ORDER BY id"
    found: list[Any] = []
    for order in ("ASC", "DESC"):
        try:
            for row in connection.execute(f"SELECT id, {column} FROM {table} {way} {order}"):
                found.append(row)
            break
        except UNREADABLE:
            continue
    return found


def _is_finite(meta: Meta, memory: bytes, scales: bytes | None) -> bool:
    """Whether the memory of a block has its size, and holds numbers alone."""
    dtype, scales_bytes = DTYPES[meta.dtype], 4 * meta.slots * (meta.dtype != BFLOAT16)
    if (
        len(memory) != meta.slots * meta.width * dtype.itemsize
        or len(scales or b"") != scales_bytes
    ):
        return False
    values = torch.frombuffer(bytearray(memory), dtype=dtype)
    if scales is None:
        return Quantized(values).is_finite()
    return Quantized(values, torch.frombuffer(bytearray(scales), dtype=torch.float32)).is_finite()
