"""A bank file as of one version: its documents, its blocks, and their memory, each read on demand.

Opening a version reads one row. The columns of all blocks are read when the first question needs
them; a newer version of the same file reads only what changed. A file may come from anybody, so
everything that other modules rely on is checked here.

Letters: N blocks, n documents, J slots of a block, D decoder width.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, overload

import apsw
import numpy as np
import torch
from numpy.typing import NDArray

from sedem.bank.blocks import Blocks
from sedem.bank.database import damaged, query
from sedem.bank.file import BankFile
from sedem.bank.rows import TEXT_PIECE, Head, Meta, text_digest
from sedem.errors import BankError, NoTextError
from sedem.quantization import DTYPES, Quantized
from sedem.types import Document, are_pages

Source = Callable[[str], str | None]
"""Rereads the text of a document by its name; None if it no longer exists."""

SOURCES = 4
"""Number of texts read from their sources that stay in RAM: an answer cites few documents."""
ROWS = 50_000
"""Rows that are converted to columns at once."""


class Documents(Sequence[Document]):
    """Documents in reading order: each name and text is read when it is needed."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """Names of all documents."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Name of a document."""

    @abstractmethod
    def characters(self, index: int) -> int:
        """Length of a document's text."""

    @abstractmethod
    def pages(self, index: int) -> tuple[int, ...]:
        """First character of each page of a document's text; empty if it has no pages."""

    @abstractmethod
    def text(self, index: int, start: int, end: int) -> str:
        """Return a span of a document's text; the rest of the text need not be read.

        Raises:
            NoTextError: the bank does not hold it, and it cannot be read from its source.
            BankError: it is damaged, or the bank was compacted since.
        """

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


@dataclass(frozen=True, eq=False)
class Columns:
    """What is known of all documents and blocks of a version.

    Attributes:
        documents: ids of the documents `[n]`, in reading order.
        characters: lengths of their texts `[n]`.
        ids: ids of the blocks `[N]`, in reading order.
        blocks: the blocks; `Blocks.documents` are indices into `documents`.
    """

    documents: NDArray[np.int64]
    characters: NDArray[np.int64]
    ids: NDArray[np.int64]
    blocks: Blocks


@dataclass(frozen=True, eq=False)
class View:
    """A version of a bank file; threads may share it.

    Attributes:
        file: the file.
        meta: the bank-wide metadata.
        head: the version, and how much it holds.
        source: reads texts that the bank does not hold; None if there is no such source.
        before: a view of an earlier version, whose columns are reused; None if there is none.
    """

    file: BankFile
    meta: Meta
    head: Head
    source: Source | None = None
    before: list[View] = field(default_factory=list, repr=False)

    @classmethod
    def newest(
        cls, file: BankFile, source: Source | None = None, before: View | None = None
    ) -> View:
        """Return a view of the newest version.

        Raises:
            BankError: there is no bank, or it is damaged.
        """
        head = file.head()
        if before is not None and before.head == head:
            return before
        meta = file.meta() if before is None else before.meta
        if before is not None and before.head.id != head.id:
            before = None
        elif before is not None and "columns" not in before.__dict__ and before.before:
            before = before.before[0]
        return cls(file, meta, head, source, [] if before is None else [before])

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens the same version of the same file, or gets the bank in RAM.
        return View, (self.file, self.meta, self.head, self.source)

    def __len__(self) -> int:
        """N."""
        return self.head.blocks

    @cached_property
    def columns(self) -> Columns:
        """Ids and spans of all blocks.

        Raises:
            BankError: they are damaged, or the bank was compacted since.
        """
        before = self.before.pop() if self.before else None
        known = before.__dict__.get("columns") if before is not None else None
        version = self.head.version
        self.file.check_holds(self.head)
        with self.file.reading() as connection:
            documents, characters = self._document_rows(connection)
            if known is not None and _extends(documents, known.documents):
                kept = np.isin(known.documents, documents)
                last = int(known.documents[-1]) if len(known.documents) else 0
                known = _without(known, kept)
            else:
                known, last = None, 0
            ids, blocks = self._block_rows(connection, documents, last)
            oldest = int(connection.execute("SELECT oldest FROM bank").get)
        if oldest > version:
            raise self._compacted()
        if known is not None:
            ids = np.concatenate([known.ids, ids])
            blocks = Blocks.join([known.blocks, blocks])
        columns = Columns(documents, characters, ids, blocks)
        self._check(columns)
        return columns

    def _document_rows(
        self, connection: apsw.Connection
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        version = self.head.version
        found = query(
            connection,
            "SELECT id, characters FROM documents WHERE added <= ? "
            "AND (removed IS NULL OR removed > ?) ORDER BY id",
            *(version, version),
        )
        ids, characters = zip(*found, strict=True) if found else ((), ())
        return self._numbers(ids), self._numbers(characters)

    def _block_rows(
        self, connection: apsw.Connection, documents: NDArray[np.int64], after: int
    ) -> tuple[NDArray[np.int64], Blocks]:
        """Return ids and columns of the blocks of documents whose id is above `after`."""
        rows = iter(
            connection.execute(
                'SELECT id, document, start, "end", tokens FROM blocks INDEXED BY blocks_place '
                "WHERE document > ? ORDER BY document, number",
                (after,),
            )
        )
        parts: list[tuple[NDArray[np.int64], Blocks]] = []
        while some := list(islice(rows, ROWS)):
            *numbers, tokens = zip(*some, strict=True)
            ids, owners, starts, ends = map(self._numbers, numbers)
            index, is_live = _find(documents, owners)
            if set(map(len, tokens)) != {self.meta.slots}:
                raise damaged(self.file, "a block has another number of slots")
            slot_tokens = np.frombuffer(b"".join(tokens), np.uint8).reshape(len(ids), -1)
            found = Blocks(index, starts, ends, slot_tokens).take(is_live)
            parts.append((ids[is_live], found))
        if not parts:
            return np.zeros(0, np.int64), Blocks.none(self.meta.slots)
        ids_N = np.concatenate([ids for ids, _ in parts])
        return ids_N, Blocks.join([blocks for _, blocks in parts])

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
        outside = (blocks.starts < 0) | (blocks.starts > blocks.ends)
        outside |= blocks.ends > columns.characters[blocks.documents]
        if outside.any():
            raise damaged(self.file, "the span of a block lies outside its text")

    @cached_property
    def documents(self) -> StoredDocuments:
        """The documents, in reading order."""
        return StoredDocuments(self)

    def read(self, ids: Sequence[int], room: Quantized, places: Sequence[int]) -> None:
        """Read the memory of blocks from the pages of the file into tensors, without another copy.

        Args:
            ids: ids of the blocks.
            room: memory `[n, J, D]` in the type of the bank, contiguous and on the CPU.
            places: where each block belongs in it.

        Raises:
            BankError: a block is damaged, or the bank was compacted since.
        """
        for name, tensor in (("memory", room.values), ("scales", room.scales)):
            if tensor is None or not len(ids):
                continue
            rows = tensor.flatten(1).view(torch.uint8).numpy()
            with self.file.reading() as connection:
                self._read_rows(connection, name, zip(ids, places, strict=True), rows)

    def _read_rows(
        self,
        connection: apsw.Connection,
        column: str,
        wanted: Iterable[tuple[int, int]],
        rows: NDArray[np.uint8],
    ) -> None:
        blob = None
        try:
            for number, place in wanted:
                if blob is None:
                    blob = connection.blob_open("main", "blocks", column, number, False)
                else:
                    blob.reopen(number)
                if blob.length() != rows.shape[1]:
                    raise damaged(self.file, f"block {number} has memory of another size")
                blob.read_into(rows[place].data)
        except apsw.SQLError:
            raise self._compacted() from None
        finally:
            if blob is not None:
                blob.close(True)

    def _compacted(self) -> BankError:
        return BankError(
            f"bank '{self.file}' was compacted since it was opened, and what it held then is gone; "
            "open it again"
        )

    def empty(self, count: int, pinned: bool = False) -> Quantized:
        """Return room for the memory of some blocks `[n, J, D]`, for `read`."""
        dtype, shape = DTYPES[self.meta.dtype], (count, self.meta.slots)
        has_scales = dtype != torch.bfloat16
        scales = torch.empty(shape, pin_memory=pinned) if has_scales else None
        return Quantized(
            torch.empty(*shape, self.meta.width, dtype=dtype, pin_memory=pinned), scales
        )


class StoredDocuments(Documents):
    """The documents of a view.

    Args:
        view: the view.
    """

    def __init__(self, view: View) -> None:
        self.view = view
        self._source_text = lru_cache(SOURCES)(self._read_source)

    def __len__(self) -> int:
        return self.view.head.documents

    @cached_property
    def names(self) -> list[str]:
        """Names of all documents."""
        head = self.view.head
        self.view.file.check_holds(head)
        statement = (
            "SELECT name FROM documents WHERE added <= ? "
            "AND (removed IS NULL OR removed > ?) ORDER BY id"
        )
        with self.view.file.reading() as connection:
            found = query(connection, statement, head.version, head.version)
        if len(found) != len(self):
            raise self.view._compacted()
        return [str(name) for (name,) in found]

    def name(self, index: int) -> str:
        """Name of a document."""
        return str(self._column("name", index))

    def characters(self, index: int) -> int:
        """Length of a document's text."""
        return int(self.view.columns.characters[index])

    def pages(self, index: int) -> tuple[int, ...]:
        """First character of each page of a document's text."""
        try:
            pages = tuple(json.loads(self._column("pages", index)))
            if are_pages(pages, self.characters(index)):
                return pages
        except (TypeError, ValueError, RecursionError):
            pass
        raise damaged(self.view.file, f"the pages of document {index} lie outside its text")

    def text(self, index: int, start: int, end: int) -> str:
        """Return a span of a document's text; errors as in `Documents.text`."""
        if not self.view.meta.texts:
            return self._source_text(index)[start:end]
        number = int(self.view.columns.documents[index])
        with self.view.file.reading() as connection:
            rows = query(
                connection,
                "SELECT start, text FROM texts WHERE document = ? AND start BETWEEN ? AND ? "
                "ORDER BY start",
                *(number, start - start % TEXT_PIECE, max(start, end - 1)),
            )
        first = rows[0][0] if rows else 0
        found = "".join(text for _, text in rows)[start - first : end - first]
        if len(found) != end - start:
            raise (
                self.view._compacted()
                if not rows
                else damaged(self.view.file, f"the text of document {index} is incomplete")
            )
        return found

    def _column(self, column: str, index: int) -> Any:
        number = int(self.view.columns.documents[index])
        with self.view.file.reading() as connection:
            row = connection.execute(
                f"SELECT {column} FROM documents WHERE id = ?", (number,)
            ).fetchone()
        if row is None:
            raise self.view._compacted()
        return row[0]

    def _read_source(self, index: int) -> str:
        """Read a text from its source; its SHA-256 must be that of the text read before."""
        name, file = self.name(index), self.view.file
        if self.view.source is None:
            raise NoTextError(
                f"bank '{file}' holds no texts; open it with `source` to read them again"
            )
        text = self.view.source(name)
        if text is None or text_digest(text) != self._column("sha256", index):
            what = "cannot be read" if text is None else "has changed since"
            raise NoTextError(
                f"bank '{file}' holds no texts, and '{name}' {what}; put the original file back "
                "in its place to see it"
            )
        return text


def _find(ids: NDArray[np.int64], wanted_N: NDArray[np.int64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return indices `[N]` of ids in a sorted array, and whether each id is in it `[N]`."""
    if not len(ids):
        return np.zeros_like(wanted_N), np.zeros(len(wanted_N), bool)
    index_N = np.searchsorted(ids, wanted_N).clip(max=len(ids) - 1)
    return index_N, ids[index_N] == wanted_N


def _extends(documents: NDArray[np.int64], known: NDArray[np.int64]) -> bool:
    """Whether documents that are not among the known ones come after all of them."""
    new = documents[~np.isin(documents, known)]
    return not len(new) or not len(known) or bool(new[0] > known[-1])


def _without(columns: Columns, kept: NDArray[np.bool_]) -> Columns:
    """Return the columns of some of the documents."""
    if kept.all():
        return columns
    is_kept_N = kept[columns.blocks.documents]
    index = np.cumsum(kept) - 1
    blocks = columns.blocks.take(is_kept_N)
    return Columns(
        columns.documents[kept],
        columns.characters[kept],
        columns.ids[is_kept_N],
        blocks.of_documents(index[blocks.documents]),
    )
