"""MemoryBank: documents that are read once and can be queried, changed and saved.

A bank is one file or several, each as of one version (`View`). Opening a version reads one row. The
columns of all blocks are read when the first question needs them; a newer version of the same file
reads only what changed. A file may come from anybody, so everything that other modules rely on is
checked here.

Letters: N blocks, n documents, J slots of a block, D decoder width.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import apsw
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sedem.bank.blocks import BlockRow, Blocks, Head, Meta, scan_ranges
from sedem.bank.database import damaged, query
from sedem.bank.file import (
    MANIFEST,
    TEXT_PIECE,
    BankFile,
    Compacted,
    Place,
    bounded,
    check_fingerprint,
    checked_text,
    is_remote,
)
from sedem.errors import BankError
from sedem.tensors import BFLOAT16, DTYPES, Quantized, check_dtype, empty, vector_bytes
from sedem.types import Citation, Document, are_pages

if TYPE_CHECKING:
    from sedem.bank.parts import Store

GROUP_BYTES = 2**26
"""Bytes of memory that are copied between banks at once."""
SPAN_CHARACTERS = 1_024
"""Most characters of a span per token."""
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
        """Return a view of the newest version; what an earlier view has read is reused."""
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
        """Ids and spans of all blocks."""
        known, version = self.known, self.head.version
        self.file.check_holds(self.head)
        with self.file.reading() as connection:
            found = query(connection, f"SELECT id, characters {_LIVE}", version, version)
            documents, characters = self._numbers(found).reshape(-1, 2).T.copy()
            # What an earlier version has read stays valid; only later documents are read.
            last, parts = 0, []
            if known is not None and len(known.documents):
                # A document can become visible after ones with larger ids.
                before = documents[documents <= known.documents[-1]]
                if np.isin(before, known.documents).all():
                    last = int(known.documents[-1])
                    owners = known.documents[known.blocks.documents]
                    parts.append(_live(documents, owners, known.ids, known.blocks))
            rows = iter(
                connection.execute(
                    'SELECT id, document, start, "end", tokens FROM blocks '
                    "INDEXED BY blocks_place WHERE document > ? ORDER BY document, number",
                    (last,),
                )
            )
            while some := list(islice(rows, ROWS)):
                *numbers, tokens = zip(*some, strict=True)
                ids, owners, starts, ends = map(self._numbers, numbers)
                if set(map(len, tokens)) != {self.meta.slots}:
                    raise damaged(self.file, "a block has another number of slots")
                slot_tokens = np.frombuffer(b"".join(tokens), np.uint8).reshape(len(ids), -1)
                parts.append(
                    _live(documents, owners, ids, Blocks(owners, starts, ends, slot_tokens))
                )
            oldest = int(connection.execute("SELECT oldest FROM bank").get)
        if oldest > version:
            raise self.compacted()
        ids = np.concatenate([np.zeros(0, np.int64), *(ids for ids, _ in parts)])
        blocks = Blocks.join([Blocks.none(self.meta.slots), *(some for _, some in parts)])
        # The file has to hold what its newest version claims, and spans that lie within texts.
        head = self.head
        if (len(documents), len(blocks)) != (head.documents, head.blocks):
            raise damaged(
                self.file,
                f"it holds {len(documents):,} documents and {len(blocks):,} blocks, its "
                f"table 'bank' says {head.documents:,} and {head.blocks:,}",
            )
        characters_N = characters[blocks.documents]
        outside = (blocks.starts < 0) | (blocks.starts > blocks.ends) | (blocks.ends > characters_N)
        if outside.any():
            raise damaged(self.file, "the span of a block lies outside its text")
        most = SPAN_CHARACTERS * blocks.slot_tokens.sum(1, dtype=np.int64)
        if (blocks.ends - blocks.starts > most).any():
            raise damaged(self.file, "the span of a block is too long for its tokens")
        self.known = None
        return Columns(documents, characters, ids, blocks)

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

    def _numbers(self, column: Sequence[Any]) -> NDArray[np.int64]:
        try:
            return np.array(column, np.int64)
        except (TypeError, ValueError, OverflowError):
            raise damaged(self.file, "a row holds something other than a number") from None

    def read(self, ids: Sequence[int], room: Quantized, places: Sequence[int]) -> None:
        """Read the memory of blocks from the pages of the file into tensors, without another copy.

        Args:
            ids: ids of the blocks.
            room: memory `[n, J, D]` in the type of the bank, contiguous and on the CPU.
            places: where each block belongs in it.
        """
        with self.file.reading() as connection:
            for name, rows in zip(("memory", "scales"), room.raw(), strict=True):
                if rows is None:
                    continue
                blobs = open_values(connection, "blocks", name, ids, self.compacted)
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
            if not pages or are_pages(pages, self.characters(index)):
                return pages
        except (TypeError, ValueError, RecursionError):
            pass
        file = self._at(index)[0].file
        raise damaged(file, f"the pages of document {index} lie outside its text")

    def page(self, index: int, character: int) -> int | None:
        """Number of the page that a character is on; None in a text without pages."""
        return bisect_right(self.pages(index), character) or None

    def text(self, index: int, start: int, end: int) -> str:
        """Return a span of a document's text; the rest of the text need not be read."""
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
    connection: apsw.Connection,
    table: str,
    column: str,
    ids: Iterable[int],
    gone: Callable[[], BankError],
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
        raise gone() from None
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


def checked_memory(name: object, memory: Quantized) -> Quantized:
    """Return memory or keys that are numbers; a NaN would win every question."""
    if not memory.is_finite():
        raise damaged(name, "it holds infinities or NaN")
    return memory


# Banks


class BankReader(ABC):
    """The read interface of a bank; each method reads one snapshot."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Return the bank as it is now."""

    @property
    def meta(self) -> Meta:
        """The bank-wide metadata."""
        return self.snapshot().views[0].meta

    @property
    def store(self) -> Store:
        """Where the bank is kept."""
        return self.snapshot().kept_in

    @property
    def path(self) -> Path | None:
        """The bank's file on local disk; None in RAM or if it is in parts."""
        store = self.store
        return store.path if isinstance(store, BankFile) else None

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.snapshot().held)

    def __iter__(self) -> Iterator[Document]:
        """Yield the documents, in reading order."""
        return iter(self.documents)

    def __contains__(self, document: object) -> bool:
        """Whether it has a document, given by its name or with its text."""
        return document in (self.names if isinstance(document, str) else self.documents)

    def __repr__(self) -> str:
        """Where it is kept, and how much it holds."""
        counts = (len(self.names), "document"), (len(self), "block")
        held = ", ".join(f"{number:,} {noun}{'s' * (number != 1)}" for number, noun in counts)
        return f"{type(self).__name__}('{self.store}', {held})"

    @property
    def names(self) -> list[str]:
        """Names of the documents, in reading order."""
        return self.documents.names

    @property
    def fingerprint(self) -> str:
        """Hash of the model that made the bank; other models reject it."""
        return self.meta.fingerprint

    @property
    def made_by(self) -> dict[str, Any]:
        """The settings behind the fingerprint, for people: model, layers, T, C."""
        return self.meta.made_by

    @property
    def dtype(self) -> str:
        """Type of the stored slots: "bfloat16", "int8" or "fp8"."""
        return self.meta.dtype

    @property
    def has_words(self) -> bool:
        """Whether every file of the bank has an index of words."""
        return all(view.meta.words for view in self.snapshot().views)

    @property
    def documents(self) -> Documents:
        """The documents, in reading order; a text is read when it is needed."""
        return self.snapshot().documents

    @property
    def blocks(self) -> Blocks:
        """The span behind each block, in reading order."""
        return self.snapshot().blocks

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(view.head.tokens for view in self.snapshot().views)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the slots as stored, including scales and the padding of last blocks."""
        meta = self.meta
        return len(self) * meta.slots * vector_bytes(meta.width, meta.dtype)

    def memory(self, indices: Sequence[int]) -> Tensor:
        """Memory of the given blocks `[n, J, D]`, in the order of `indices`.

        It is bfloat16, or float32 if slots are stored as int8 or fp8.
        """
        return self.stored(indices).dequantize()

    def stored(self, indices: Sequence[int]) -> Quantized:
        """Memory of the given blocks `[n, J, D]` in the stored type, in the order of `indices`."""
        now = self.snapshot()
        meta = now.meta
        room = empty((len(indices), meta.slots, meta.width), DTYPES[meta.dtype])
        for number, rows_n, places_n in now.located(indices):
            view = now.views[number]
            view.read(view.columns.ids[rows_n].tolist(), room, places_n.tolist())
        return room

    def rows(self, indices: Sequence[int]) -> Blocks:
        """Return the given blocks, in the order of `indices`; no other files are read."""
        now, order = self.snapshot(), [np.zeros(0, np.int64)]
        found = [Blocks.none(self.meta.slots)]
        for number, rows_n, places_n in now.located(indices):
            found.append(now.blocks_of(number, rows_n))
            order.append(places_n)
        return Blocks.join(found).take(np.argsort(np.concatenate(order)))

    def slot_tokens(self, indices: Sequence[int]) -> Tensor:
        """Number of real tokens behind each slot of the given blocks `[n, J]`."""
        return torch.from_numpy(self.rows(indices).slot_tokens.astype(np.int64))

    def restored_sizes(self, indices: Sequence[int], states_per_slot: int) -> list[int]:
        """Number of decoder states that each of the given blocks is restored to."""
        return self.slot_tokens(indices).clamp(max=states_per_slot).sum(1).tolist()

    def scan(self) -> Iterator[tuple[range, Tensor]]:
        """Yield the indices and memory of all blocks in order, a part at a time."""
        now = self.snapshot()
        for indices in scan_ranges(len(now)):
            yield indices, now.memory(indices)

    def citation(self, index: int, rank: int, score: float | None = None) -> Citation:
        """Return the span behind a block as a citation."""
        now = self.snapshot()
        block, documents = now.rows([index])[0], now.documents
        text = documents.text(block.document, block.start, block.end)
        name = documents.name(block.document)
        page = documents.page(block.document, block.start)
        also = documents.copies(block.document)
        return Citation(rank, name, block.start, block.end, score, text, page, also=also)

    def block_text(self, index: int) -> str:
        """Return the text behind a block."""
        now = self.snapshot()
        block = now.rows([index])[0]
        return now.documents.text(block.document, block.start, block.end)

    def check_made_by(self, fingerprint: str) -> None:
        """Raise a BankMismatchError, which names both fingerprints, if another model made it."""
        check_fingerprint(str(self.store), self.fingerprint, fingerprint)


class Snapshot(BankReader):
    """An immutable view of a bank as of one commit; each answer uses one snapshot.

    Data derived from the blocks, such as keys, belongs to a snapshot and is dropped with it.

    Args:
        views: the files of the bank, in reading order; at least one.
        held: which blocks of these files it holds; None means all.
    """

    def __init__(self, views: Sequence[View], kept_in: Store, held: range | None = None) -> None:
        self.views, self.kept_in = views, kept_in
        self._bounds = np.cumsum([0, *map(len, views)])
        self.held = range(int(self._bounds[-1])) if held is None else held

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process reads the columns itself.
        return Snapshot, (self.views, self.kept_in, self.held)

    def snapshot(self) -> Snapshot:
        """Return this snapshot."""
        return self

    @cached_property
    def documents(self) -> Documents:
        """The documents of the files, in reading order."""
        return Documents(self.views)

    @cached_property
    def blocks(self) -> Blocks:
        """The span behind each block, in reading order."""
        parts = [Blocks.none(self.meta.slots)]
        for number, first in enumerate(self._bounds[:-1].tolist()):
            start, stop = max(self.held.start - first, 0), self.held.stop - first
            if start < min(stop, len(self.views[number])):
                parts.append(self.blocks_of(number, slice(start, stop)))
        return Blocks.join(parts)

    def blocks_of(self, number: int, rows: NDArray[np.int64] | slice) -> Blocks:
        """Return some blocks of a file, with the bank's indices of documents."""
        part = self.views[number].columns.blocks.take(rows)
        return part.of_documents(part.documents + self.documents.bounds[number])

    def located(
        self, indices: Sequence[int]
    ) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
        """Yield the number of each file with some of the blocks, their rows and their places.

        Rows are indices of blocks in the file, places are indices in `indices`.
        """
        wanted_n = np.asarray(indices, np.int64)
        if not len(wanted_n):
            return
        if wanted_n.min() < 0 or wanted_n.max() >= len(self):
            raise IndexError(f"a bank of {len(self)} blocks has no block {max(indices)}")
        wanted_n = wanted_n + self.held.start
        files_n = np.searchsorted(self._bounds, wanted_n, side="right") - 1
        for number in np.unique(files_n).tolist():
            places_n = np.flatnonzero(files_n == number)
            yield number, wanted_n[places_n] - self._bounds[number], places_n

    def indices_of(self, number: int, rows_n: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where rows of a file are in this bank; it may hold only a part of them."""
        return rows_n + (int(self._bounds[number]) - self.held.start)

    def part(self, blocks: range) -> Snapshot:
        """Return consecutive blocks as a bank: its block 0 is block `blocks.start` of this one.

        Documents keep their indices, even those without a block in it. Files without a block in it
        are not read.
        """
        return Snapshot(self.views, self.kept_in, self.held[blocks.start : blocks.stop])

    def split(self, parts: int) -> list[range]:
        """Split the blocks into neighbouring parts of similar size; some may be empty.

        A bank of at least as many files is split between files, so that each file is needed in one
        place only.
        """
        bounds = [len(self) * part // parts for part in range(parts + 1)]
        if len(self.views) >= parts:
            ends = self._bounds.clip(self.held.start, self.held.stop) - self.held.start
            bounds = [int(ends[np.abs(ends - at).argmin()]) for at in bounds]
        return [range(*bounds[part : part + 2]) for part in range(parts)]

    def groups(
        self, documents: Sequence[int] | None = None
    ) -> Iterator[tuple[list[Document], Blocks, Quantized]]:
        """Yield documents of ascending indices with their blocks and memory; None means all."""
        bounds = np.searchsorted(self.blocks.documents, np.arange(len(self.documents) + 1))
        every = range(len(self.documents)) if documents is None else documents
        wanted = np.array(every, np.int64)
        counts = bounds[wanted + 1] - bounds[wanted]
        most = GROUP_BYTES // (self.meta.slots * vector_bytes(self.meta.width, self.meta.dtype))
        ends, stop = np.cumsum([0, *counts]), 0
        while stop < len(wanted):
            start = stop
            # As many documents as have at most `most` blocks, but at least one.
            fits = int(np.searchsorted(ends, ends[start] + most, side="right")) - 1
            stop = max(start + 1, fits)
            group = wanted[start:stop]
            rows = np.concatenate([np.arange(bounds[d], bounds[d + 1]) for d in group])
            blocks = self.blocks.take(rows)
            index = np.searchsorted(group, blocks.documents)
            texts = [self.documents[document] for document in group.tolist()]
            yield texts, blocks.of_documents(index), self.stored(rows.tolist())


class MemoryBank(BankReader):
    """The result of `SeDeM.read`: documents read once, to be queried any number of times.

    A change makes a new snapshot and replaces the current one with it. So threads may query the
    bank while another thread changes it. A new bank is in RAM, until it is saved.

    Args:
        fingerprint: hash of the model that made it; other models reject the bank.
        made_by: the settings behind the fingerprint, for people: model, layers, T, C.
        documents: the texts; as their blocks, in reading order.
        dtype: type of the stored slots: "bfloat16", "int8" or "fp8".

    Raises:
        BankError: the number of blocks is not the number of rows of memory.
    """

    def __init__(
        self,
        fingerprint: str,
        made_by: dict[str, Any],
        documents: Sequence[Document],
        blocks: Sequence[BlockRow],
        memory_NJD: Quantized,
        *,
        dtype: str = BFLOAT16,
    ) -> None:
        count, slots, width = memory_NJD.values.shape
        if count != len(blocks):
            raise BankError(f"the bank names {len(blocks)} blocks but has memory of {count}")
        meta = Meta(fingerprint, made_by, slots, width, check_dtype(dtype))
        file = BankFile()
        with file.creating(meta):
            file.append(fingerprint, documents, Blocks.of(blocks), memory_NJD)
        self._start(file)

    @classmethod
    def open(cls, path: Place) -> MemoryBank:
        """Open a bank; its memory is read when it is needed.

        Args:
            path: the file; or the folder or the place in an object store, such as
                "s3://bucket/folder", of a bank in parts, which are downloaded on first use.
        """
        return cls.open_from(store_at(path))

    @classmethod
    def open_from(cls, store: Store) -> MemoryBank:
        """Open the bank in a store, as `open` does at a place."""
        bank = cls.__new__(cls)
        bank._start(store)
        return bank

    def _start(self, store: Store) -> None:
        self._changing = threading.RLock()
        self._now = Snapshot([View.newest(file) for file in store.files()], store)

    def snapshot(self) -> Snapshot:
        """Return the bank as it is now; later changes do not affect the result."""
        return self._now

    def append(self, other: BankReader) -> None:
        """Add another bank's documents, in one commit; each replaces one of the same name.

        A document that the bank already has with the same text is kept.
        """
        other = other.snapshot()
        other.check_made_by(self.fingerprint)
        with self._changing:
            append_to(self.store, other)
            self.reload()
            self.purge()

    def remove(self, *names: str) -> None:
        """Remove documents and their blocks, in one commit."""
        with self._changing:
            self.store.remove(*names)
            self.reload()
            self.purge()

    def purge(self) -> bool:
        """Delete the rows of removed documents, unless a snapshot that somebody has needs them.

        Changes do so too; this is for after such a snapshot. Returns whether there were any.
        """
        return isinstance(self.store, BankFile) and self.store.purge()

    def compact(self) -> Compacted:
        """Free the space of removed documents; answers do not change."""
        with self._changing:
            report = self.store.compact()
            self.reload()
            return report

    def cast(self, dtype: str) -> MemoryBank:
        """Return a copy in RAM with slots of another type."""
        file = BankFile()
        copy_to(file, self.snapshot(), replace(self.meta, dtype=check_dtype(dtype)))
        return MemoryBank.open_from(file)

    def save(self, path: Place, dtype: str | None = None) -> None:
        """Write the bank to a new file; later changes are written there too.

        Args:
            path: the file, or a place in an object store such as "s3://bucket/folder".
            dtype: type to store slots as: "bfloat16", "int8" or "fp8"; None keeps the current one.
                Documents appended later are stored the same way.

        Raises:
            BankError: something exists at that path.
            ConfigError: there is no such type.
        """
        with self._changing:
            meta = replace(self.meta, dtype=check_dtype(dtype or self.dtype))
            store = store_at(path)
            copy_to(store, self.snapshot(), meta)
            self._start(store)

    def reload(self, prepare: Callable[[Snapshot], None] = lambda snapshot: None) -> None:
        """Load what other processes have written since; only what is new is read.

        Args:
            prepare: called with the new snapshot before any reader of this bank sees it.
        """
        with self._changing:
            before = {view.file: view for view in self._now.views}
            views = [View.newest(file, before.get(file)) for file in self.store.files()]
            if views != [*before.values()]:
                new = Snapshot(views, self.store)
                prepare(new)
                self._now = new


def store_at(place: Place) -> Store:
    """Return the store of the bank at a place, which need not exist yet; see `Parts`.

    Raises:
        ConfigError: the place needs a package that is not installed.
        BankError: no bank can be there.
    """
    if is_remote(place) or Path(place, MANIFEST).exists():
        from sedem.bank.parts import Parts

        return Parts(place)
    return BankFile(Path(place))


def append_to(store: Store, bank: Snapshot, documents: Sequence[int] | None = None) -> None:
    """Add the given documents of a bank to a store, in one commit; None means all."""
    if not isinstance(store, BankFile):
        with store.adding() as file:
            append_to(file, bank, documents)
        return
    with store.writing():
        for texts, blocks, memory_NJD in bank.groups(documents):
            store.append(bank.fingerprint, texts, blocks, memory_NJD)


def copy_to(
    store: Store, bank: Snapshot, meta: Meta, documents: Sequence[int] | None = None
) -> None:
    """Make a new bank of the given documents of another one; None means all.

    Its slots may have another type. The indices of documents are in ascending order.
    """
    with store.creating(meta) as file:
        append_to(file, bank, documents)
