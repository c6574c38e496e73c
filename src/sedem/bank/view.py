"""A bank file as of one version: its documents, its blocks, and their memory, each read on demand.

Opening a version reads one row. The columns of all blocks are read when the first question needs
them; a newer version of the same file reads only what changed. A file may come from anybody, so
everything that other modules rely on is checked here.

Letters: N blocks, n documents, J slots of a block, D decoder width.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, overload

import apsw
import numpy as np
from numpy.typing import NDArray

from sedem.bank.blocks import Blocks
from sedem.bank.database import damaged, query
from sedem.bank.file import BankFile
from sedem.bank.rows import (
    TEXT_PIECE,
    Head,
    Meta,
    bounded,
    checked_memory,
    checked_spans,
    checked_text,
)
from sedem.errors import BankError
from sedem.tensors import Quantized
from sedem.types import Document, are_pages

COPIES = 10
"""Documents of the same text that a citation names."""
ROWS = 50_000
"""Rows that are converted to columns at once."""
_LIVE = "FROM documents WHERE added <= ? AND (removed IS NULL OR removed > ?) ORDER BY id"


@dataclass(frozen=True, eq=False)
class Columns:
    """What is known of all documents and blocks of a version, in reading order.

    Attributes:
        documents: ids of the documents `[n]`.
        characters: lengths of their texts `[n]`.
        ids: ids of the blocks `[N]`.
        blocks: the blocks; `Blocks.documents` are indices into `documents`.
    """

    documents: NDArray[np.int64]
    characters: NDArray[np.int64]
    ids: NDArray[np.int64]
    blocks: Blocks


@dataclass(eq=False)
class View:
    """A version of a bank file; threads may share it.

    Attributes:
        known: columns of an earlier version, for those of this one; None if there are none.
    """

    file: BankFile
    meta: Meta
    head: Head
    known: Columns | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.file.add_reader(self)

    @classmethod
    def newest(cls, file: BankFile, before: View | None = None) -> View:
        """Return a view of the newest version; what an earlier view has read is reused.

        Raises:
            BankError: there is no bank, or it is damaged.
        """
        head = file.head()
        if before is None:
            return cls(file, file.meta(), head)
        if before.head == head:
            return before
        known = before.__dict__.get("columns", before.known)
        return cls(file, before.meta, head, known if before.head.id == head.id else None)

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the same version of the same file, or gets the bank in RAM.
        return View, (self.file, self.meta, self.head)

    def __len__(self) -> int:
        """N."""
        return self.head.blocks

    @cached_property
    def columns(self) -> Columns:
        """Ids and spans of all blocks.

        Raises:
            BankError: they are damaged, or the bank was compacted since.
        """
        known, version = self.known, self.head.version
        self.file.check_holds(self.head)
        with self.file.reading() as connection:
            found = query(connection, f"SELECT id, characters {_LIVE}", version, version)
            documents, characters = self._numbers(found).reshape(-1, 2).T.copy()
            last, parts = 0, []
            if known is not None and len(known.documents):
                # A document can become visible after ones with larger ids.
                before = documents[documents <= known.documents[-1]]
                if np.isin(before, known.documents).all():
                    last = int(known.documents[-1])
                    owners = known.documents[known.blocks.documents]
                    parts.append(_live(documents, owners, known.ids, known.blocks))
            parts += self._block_rows(connection, documents, last)
            oldest = int(connection.execute("SELECT oldest FROM bank").get)
        if oldest > version:
            raise self.compacted()
        ids = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in parts)])
        none = Blocks.none(self.meta.slots)
        columns = Columns(
            documents, characters, ids, Blocks.join([none, *(blocks for _, blocks in parts)])
        )
        self._check(columns)
        self.known = None
        return columns

    @cached_property
    def _by_id(self) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
        """Ids of all blocks in order, and their rows."""
        rows_N = np.argsort(self.columns.ids, kind="stable")
        return self.columns.ids[rows_N], rows_N

    def rows_of(self, ids_n: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of the blocks with some ids; -1 for an id that this version has not."""
        ids_N, rows_N = self._by_id
        if not len(ids_N):
            return np.full(len(ids_n), -1)
        places_n = np.searchsorted(ids_N, ids_n).clip(max=len(ids_N) - 1)
        return np.where(ids_N[places_n] == ids_n, rows_N[places_n], -1)

    def _block_rows(
        self, connection: apsw.Connection, documents: NDArray[np.int64], after: int
    ) -> Iterator[tuple[NDArray[np.int64], Blocks]]:
        """Yield ids and columns of the blocks of documents whose id is above `after`."""
        rows = iter(
            connection.execute(
                'SELECT id, document, start, "end", tokens FROM blocks INDEXED BY blocks_place '
                "WHERE document > ? ORDER BY document, number",
                (after,),
            )
        )
        while some := list(islice(rows, ROWS)):
            *numbers, tokens = zip(*some, strict=True)
            ids, owners, starts, ends = map(self._numbers, numbers)
            if set(map(len, tokens)) != {self.meta.slots}:
                raise damaged(self.file, "a block has another number of slots")
            slot_tokens = np.frombuffer(b"".join(tokens), np.uint8).reshape(len(ids), -1)
            yield _live(documents, owners, ids, Blocks(owners, starts, ends, slot_tokens))

    def _numbers(self, column: Sequence[Any]) -> NDArray[np.int64]:
        try:
            return np.array(column, np.int64)
        except (TypeError, ValueError, OverflowError):
            raise damaged(self.file, "a row holds something other than a number") from None

    def _check(self, columns: Columns) -> None:
        blocks, head = columns.blocks, self.head
        if (len(columns.documents), len(blocks)) != (head.documents, head.blocks):
            raise damaged(
                self.file,
                f"it holds {len(columns.documents):,} documents and {len(blocks):,} blocks, its "
                f"table 'bank' says {head.documents:,} and {head.blocks:,}",
            )
        checked_spans(self.file, blocks, columns.characters[blocks.documents])

    def read(self, ids: Sequence[int], room: Quantized, places: Sequence[int]) -> None:
        """Read the memory of blocks from the pages of the file into tensors, without another copy.

        Args:
            ids: ids of the blocks.
            room: memory `[n, J, D]` in the type of the bank, contiguous and on the CPU.
            places: where each block belongs in it.

        Raises:
            BankError: a block is damaged, or the bank was compacted since.
        """
        with self.file.reading() as connection:
            for name, rows in zip(("memory", "scales"), room.raw(), strict=True):
                if rows is None:
                    continue
                blobs = open_values(connection, "blocks", name, ids, self.compacted())
                for blob, number, place in zip(blobs, ids, places, strict=True):
                    if blob.length() != rows[place].nbytes:
                        raise damaged(self.file, f"block {number} has memory of another size")
                    blob.read_into(rows[place].data)
        # A copy only if the bank has more files.
        own = room if len(places) == len(room.values) else room[list(places)]
        checked_memory(self.file, own)

    def compacted(self) -> BankError:
        """Return the error for what is gone."""
        return BankError(
            f"bank '{self.file}' was compacted since it was opened, and what it held then is gone; "
            "open it again"
        )


class Documents(Sequence[Document]):
    """The documents of some files in reading order; each name and text is read when it is needed.

    Attributes:
        bounds: index of the first document of each file, and their number.
    """

    def __init__(self, views: Sequence[View]) -> None:
        self._views = views
        self.bounds = np.cumsum([0, *(view.head.documents for view in views)])

    def __len__(self) -> int:
        return int(self.bounds[-1])

    @overload
    def __getitem__(self, index: int) -> Document: ...
    @overload
    def __getitem__(self, index: slice) -> list[Document]: ...
    def __getitem__(self, index: int | slice) -> Document | list[Document]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        text = self.text(number, 0, self.characters(number))
        return Document(self.name(number), text, self.pages(number))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    @cached_property
    def names(self) -> list[str]:
        """Names of all documents."""
        names: list[str] = []
        for view in self._views:
            view.file.check_holds(view.head)
            with view.file.reading() as connection:
                statement = f"SELECT {bounded('name')} {_LIVE}"
                found = query(connection, statement, *[view.head.version] * 2)
            if len(found) != view.head.documents:
                raise view.compacted()
            names += (checked_text(view.file, "name", name) for (name,) in found)
        return names

    @cached_property
    def firsts(self) -> NDArray[np.int64] | None:
        """Index of the first document of the same text, for each `[n]`; None if all differ.

        Documents of different parts of a bank are not compared.
        """
        if len(self._views) != 1:
            return None
        [view] = self._views
        with view.file.reading() as connection:
            found = query(connection, f"SELECT sha256 {_LIVE}", *[view.head.version] * 2)
        if len(found) != view.head.documents:
            raise view.compacted()
        seen: dict[str, int] = {}
        firsts = [seen.setdefault(one, index) for index, (one,) in enumerate(found)]
        return np.array(firsts, np.int64) if len(seen) < len(found) else None

    def copies(self, index: int) -> tuple[str, ...]:
        """Names of the other documents of the same text, at most `COPIES`."""
        if self.firsts is None:
            return ()
        same = np.flatnonzero(self.firsts == self.firsts[index]).tolist()
        return tuple(self.name(one) for one in same if one != index)[:COPIES]

    def name(self, index: int) -> str:
        """Name of a document."""
        return checked_text(self._at(index)[0].file, "name", self._column(bounded("name"), index))

    def characters(self, index: int) -> int:
        """Length of a document's text."""
        view, index = self._at(index)
        return int(view.columns.characters[index])

    def pages(self, index: int) -> tuple[int, ...]:
        """First character of each page of a document's text; empty if it has no pages."""
        try:
            pages = tuple(json.loads(self._column(bounded("pages"), index)))
            if are_pages(pages, self.characters(index)):
                return pages
        except (TypeError, ValueError, RecursionError):
            pass
        file = self._at(index)[0].file
        raise damaged(file, f"the pages of document {index} lie outside its text")

    def text(self, index: int, start: int, end: int) -> str:
        """Return a span of a document's text; the rest of the text need not be read.

        Raises:
            BankError: it is damaged, or the bank was compacted since.
        """
        view, number = self._at(index)
        with view.file.reading() as connection:
            rows = query(
                connection,
                "SELECT start, text FROM texts WHERE document = ? AND start BETWEEN ? AND ? "
                "ORDER BY start",
                *(int(view.columns.documents[number]), start - start % TEXT_PIECE),
                max(start, end - 1),
            )
        first = rows[0][0] if rows else 0
        found = "".join(text for _, text in rows)[start - first : end - first]
        if len(found) == end - start:
            return found
        if not rows:
            raise view.compacted()
        raise damaged(view.file, f"the text of document {index} is incomplete")

    def _at(self, index: int) -> tuple[View, int]:
        """Return the file of a document and its index there."""
        number = int(np.searchsorted(self.bounds, index, side="right")) - 1
        return self._views[number], index - int(self.bounds[number])

    def _column(self, column: str, index: int) -> Any:
        view, number = self._at(index)
        identity = int(view.columns.documents[number])
        statement = f"SELECT {column} FROM documents WHERE id = ?"
        with view.file.reading() as connection:
            row = query(connection, statement, identity)
        if not row:
            raise view.compacted()
        return row[0][0]


def open_values(
    connection: apsw.Connection, table: str, column: str, ids: Iterable[int], gone: BankError
) -> Iterator[apsw.Blob]:
    """Yield a column's value in each row, open for reading; raise `gone` if there is no such row.

    A value stays open while the next row is the same.
    """
    blob, opened = None, None
    try:
        for number in ids:
            if blob is None:
                blob = connection.blob_open("main", table, column, number, False)
            elif number != opened:
                blob.reopen(number)
            opened = number
            blob.seek(0)
            yield blob
    except apsw.SQLError:
        raise gone from None
    finally:
        if blob is not None:
            blob.close(True)


def _live(
    documents: NDArray[np.int64],
    owners_N: NDArray[np.int64],
    ids_N: NDArray[np.int64],
    rows: Blocks,
) -> tuple[NDArray[np.int64], Blocks]:
    """Return the ids and rows of those blocks whose owner is among some documents, sorted by id."""
    is_live_N = np.isin(owners_N, documents)
    index_N = np.searchsorted(documents, owners_N[is_live_N])
    return ids_N[is_live_N], rows.take(is_live_N).of_documents(index_N)
