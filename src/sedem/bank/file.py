"""A bank's file: created, extended, edited and compacted in transactions; docs/bank-format.md.

Every change is one SQLite transaction and gets the next version number. Rows of blocks never change
and their ids are never reused. A reader needs no lock and no long transaction: it remembers a
version (`view.View`) and reads rows of that version whenever it needs them, while others append,
remove, and shrink the file. The rows of a removed document go with the transaction that removes it.
Only while a reader of this process has an earlier version do they stay, marked with the version
that removed it; then the next change or `compact` deletes them.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import apsw
import numpy as np

from sedem.bank.blocks import Blocks, Head, Meta, fits
from sedem.bank.codes import forget_codes
from sedem.bank.database import (
    FORMAT,
    check_file,
    check_tables,
    connect,
    create_tables,
    damaged,
    database_errors,
    delete_database,
    empty_log,
    free_space,
    has_moved,
    has_tables,
    prepare_empty,
    query,
    renew_words,
    use_log,
    vacuum_into,
)
from sedem.durable_files import make_folders, sync_folder
from sedem.errors import BankError, BankMismatchError, DamagedBankError, UnknownDocumentError
from sedem.folding import folded
from sedem.tensors import DTYPES, Quantized
from sedem.types import MOST_PAGES, NAME_CHARACTERS, Document

logger = logging.getLogger(__name__)

Place = str | Path
"""A file, the folder of a bank in parts, or a place in an object store such as "s3://bucket/bank"."""
MANIFEST = "bank.json"
"""Names the parts of a bank, in its folder."""
TEXT_PIECE = 2**16
"""Characters of text per row."""
LIVE = "added NOT NULL AND removed IS NULL"
"""Condition for the documents of the newest version."""
_UNFINISHED = "name = ? AND added IS NULL"
"""Condition for what an interrupted build has read of a document."""
_LIMITS = {"name": 4 * NAME_CHARACTERS, "pages": 16 * MOST_PAGES, "made_by": 2**20}
"""Most bytes of the text columns."""
IDLE = 8
"""Connections that stay open while nobody uses them."""
LISTED = 10
"""Number of names listed in an unknown-document error; a bank may have millions."""
_READERS = weakref.WeakSet[Any]()
_READERS_LOCK = threading.Lock()


@dataclass(frozen=True)
class Compacted:
    """The size of a bank before and after it was compacted."""

    bytes_before: int
    bytes_after: int


def is_remote(place: Place) -> bool:
    """Whether a place is in an object store, not on local disk."""
    return isinstance(place, str) and "://" in place


class BankFile:
    """The file of a bank, or a bank in RAM; threads may share it.

    Args:
        path: the file; it need not exist yet. None makes a bank in RAM, which ends with the object.
    """

    may_change = True

    def __init__(self, path: Path | None = None) -> None:
        self.name = "in memory" if path is None else str(path)
        # Links are followed here once: a connection follows none.
        self.path = None if path is None else path.parent.resolve() / path.name
        if self.path is not None and self.path.is_symlink():
            self.path = self.path.resolve()
        self._idle: list[apsw.Connection] = []
        self._lock, self._writing = threading.Lock(), threading.RLock()
        self._open: apsw.Connection | None = None
        self._purged = False
        self._inode: tuple[int, int] | None = None
        if path is None:
            self._open = connect(None)
        weakref.finalize(self, _close, self._idle)

    @classmethod
    def of_bytes(cls, content: bytes) -> BankFile:
        """Return a bank in RAM with the content of a file."""
        file = cls()
        assert file._open is not None
        # A file in RAM has no log, which bytes 18 and 19 of a bank's header ask for.
        file._open.deserialize("main", content[:18] + b"\1\1" + content[20:])
        return file

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process opens its own connections, or gets the bank in RAM.
        if self.path is not None:
            return type(self), (self.path,)
        with self.reading() as connection:
            return BankFile.of_bytes, (connection.serialize("main"),)

    def check_holds(self, head: Head) -> None:
        """Reject another bank at the place of the one that had a version.

        Raises:
            BankError: it is another bank, or an older copy of it.
        """
        found = self.head()
        if found.id != head.id or found.version < head.version:
            raise BankError(f"another bank is at '{self}' now; open the bank again")

    def __str__(self) -> str:
        return self.name

    def exists(self) -> bool:
        """Whether something is there; `meta` rejects it if it is not a bank.

        What a killed process left before its first commit is nothing.
        """
        if self.path is None:
            assert self._open is not None
            return has_tables(self._open)
        if not self.path.is_file():
            return os.path.lexists(self.path)
        if self.path.stat().st_size == 0:
            return False
        with suppress(BankError), database_errors(self), closing(connect(self.path)) as connection:
            return has_tables(connection)
        return True

    @property
    def size(self) -> int:
        """Bytes of the file and of its log."""
        if self.path is None:
            with self.reading() as connection:
                return int(connection.pragma("page_count")) * int(connection.pragma("page_size"))
        log = self.path.with_name(self.path.name + "-wal")
        return self.path.stat().st_size + (log.stat().st_size if log.exists() else 0)

    # Transactions

    @contextmanager
    def reading(self) -> Iterator[apsw.Connection]:
        """Yield a connection that may only read; every statement sees one commit."""
        if self.path is None:
            assert self._open is not None
            with self._writing, database_errors(self):
                yield self._open
            return
        with database_errors(self):
            connection = self._taken()
            try:
                yield connection
            except BaseException:
                connection.close()
                raise
            with self._lock:
                if len(self._idle) < IDLE:
                    self._idle.append(connection)
                    return
            connection.close()

    @contextmanager
    def writing(self) -> Iterator[apsw.Connection]:
        """Run a transaction: at the end of the block it is durable, or nothing has changed.

        Inside another `writing` of the same thread, it is a part of that transaction.

        Raises:
            BankError: there is no bank, another process is writing it, or it cannot be written.
        """
        with self._writing:
            if self.path is not None and self._open is None:
                check_file(self.path, self)
                with self._transaction(create=False) as connection:
                    if not check_tables(self, connection):
                        _index_again(connection)
                    # So that the log names its bank; see `database.connect`. SQLite writes no page
                    # of a row that is set to what it is.
                    for step in (1, -1):
                        connection.execute("UPDATE bank SET oldest = oldest + ?", (step,))
                    yield connection
                return
            with database_errors(self):
                assert self._open is not None
                if self._open.in_transaction:
                    yield self._open
                else:
                    with self._open:
                        yield self._open

    @contextmanager
    def creating(self, meta: Meta) -> Iterator[BankFile]:
        """Create the bank; it appears, with what was added, if the block ends without an error."""
        if self.exists():
            raise already_there(self)
        if self.path is not None:
            try:
                make_folders(self.path.parent)
            except OSError as error:
                raise BankError(f"bank '{self}' cannot be created ({error.strerror})") from None
        with (
            self._writing,
            self._transaction(create=True, row_bytes=meta.row_bytes) as creating,
        ):
            if has_tables(creating):
                raise already_there(self)
            create_tables(creating, meta.words)
            creating.execute(
                "INSERT INTO bank VALUES (?, ?, ?, ?, ?, ?, ?, 0, 0, 0, 0, 0)",
                (secrets.token_hex(16), meta.fingerprint, json.dumps(meta.made_by), meta.dtype,
                 meta.slots, meta.width, meta.texts),
            )  # fmt: skip
            yield self

    @contextmanager
    def _transaction(self, create: bool, row_bytes: int = 0) -> Iterator[apsw.Connection]:
        """Open a connection for one transaction."""
        with database_errors(self):
            if self.path is None:
                assert self._open is not None
                prepare_empty(self._open, row_bytes)
                with self._open:
                    yield self._open
                return
            self._open = connect(self.path, create=create)
            try:
                if create:
                    prepare_empty(self._open, row_bytes)
                use_log(self._open)
                self._open.execute("BEGIN IMMEDIATE")
                try:
                    if has_moved(self._open):
                        raise _exchanged(self)
                    yield self._open
                    self._open.execute("COMMIT")
                    if self._purged:
                        empty_log(self, self._open)
                except BaseException:
                    if self._open.in_transaction:
                        self._open.execute("ROLLBACK")
                    raise
            finally:
                open_, self._open, self._purged = self._open, None, False
                open_.close()
            if create:
                sync_folder(self.path.parent)

    def _taken(self) -> apsw.Connection:
        """Return an idle connection, or a new one to the same file."""
        assert self.path is not None
        with self._lock:
            if self._idle:
                return self._idle.pop()
        check_file(self.path, self)
        connection = connect(self.path)
        try:
            connection.pragma("query_only", True)
            is_old = not check_tables(self, connection) and not connection.readonly("main")
            found = self.path.stat()
            inode = found.st_dev, found.st_ino
            with self._lock:
                self._inode = self._inode or inode
                if self._inode != inode or has_moved(connection):
                    raise _exchanged(self)
        except BaseException:
            connection.close()
            raise
        if is_old and self._open is None and self.may_change:
            connection.close()
            logger.warning("bank '%s' is of an older release; its words are indexed anew", self)
            with self.writing():
                pass
            return self._taken()
        return connection

    def close(self) -> None:
        """Close idle connections, so that the file may be moved or deleted."""
        with self._lock:
            _close(self._idle)
            self._inode = None

    # What it holds

    def files(self) -> list[BankFile]:
        """Return this file: it is the whole bank."""
        return [self]

    def meta(self) -> Meta:
        """Return the bank-wide metadata."""
        with self.reading() as connection:
            return read_meta(self, connection)

    def head(self) -> Head:
        """Return the newest version."""
        with self.reading() as connection:
            # Another process may shrink the file meanwhile.
            before, meta = self.size, read_meta(self, connection)
            found = query(connection, "SELECT id, version, documents, blocks, tokens FROM bank")
        if not found or not fits(head := Head(*found[0]), meta, max(before, self.size)):
            raise damaged(self, "its table 'bank' is empty or malformed")
        return head

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each document's text by name."""
        with self.reading() as connection:
            statement = f"SELECT {bounded('name')}, sha256 FROM documents WHERE {LIVE}"
            return {
                checked_text(self, "name", name): digest
                for name, digest in connection.execute(statement)
            }

    def unfinished(self) -> list[str]:
        """Return the names of documents whose reading was interrupted."""
        with self.reading() as connection:
            name = bounded("name")
            statement = f"SELECT {name} FROM documents WHERE added IS NULL ORDER BY id"
            found = query(connection, statement)
            return [checked_text(self, "name", name) for (name,) in found]

    # Changes

    def add_reader(self, reader: Any) -> None:
        """Keep what an object may read, a `view.View`, until nobody has it any more."""
        with _READERS_LOCK:
            _READERS.add(reader)

    def append(
        self,
        fingerprint: str,
        documents: Sequence[Document],
        blocks: Blocks,
        memory_NJD: Quantized,
    ) -> None:
        """Add documents and their blocks in one commit; each replaces one of the same name.

        Args:
            fingerprint: hash of the model that made the memory.
            documents: the documents; one that the bank has with the same text is skipped.
            blocks: their blocks, in order; `Blocks.documents` are indices into `documents`.
            memory_NJD: of the blocks, in any type.

        Raises:
            BankMismatchError: another model made the bank, or its blocks have another size.
            BankError: the bank cannot be written, or memory holds infinities or NaN.
        """
        with self.writing() as connection:
            meta, stored_NJD = self._checked(connection, fingerprint, blocks, memory_NJD)
            version = None
            for index, document in enumerate(documents):
                held = f"SELECT 1 FROM documents WHERE name = ? AND sha256 = ? AND {LIVE}"
                if query(connection, held, document.name, text_digest(document.text)):
                    continue
                version = version or next_version(connection)
                self._delete(connection, _UNFINISHED, document.name)
                number = _begin_document(connection, document)
                chosen = np.flatnonzero(blocks.documents == index).tolist()
                _insert_blocks(connection, number, blocks, stored_NJD, chosen)
                insert_text(connection, meta, number, document)
                show_document(connection, number, version)
            self._purge(connection)

    def append_part(
        self, fingerprint: str, document: Document, blocks: Blocks, memory_NJD: Quantized,
        *, before: int, last: bool,
    ) -> None:  # fmt: skip
        """Add a part of a long document in one commit; readers see it after the last part.

        Args:
            fingerprint: hash of the model that made the memory.
            document: the whole document.
            blocks: blocks of the part, in order.
            memory_NJD: of these blocks, in any type.
            before: blocks in the earlier parts; 0 drops what an earlier build left.
            last: whether this is the last part.
        """
        with self.writing() as connection:
            meta, stored_NJD = self._checked(connection, fingerprint, blocks, memory_NJD)
            number, stored = _find_unfinished(connection, document)
            if before and stored != before:
                raise BankError(
                    f"{before:,} blocks of '{document.name}' were in bank '{self}', {stored:,} are "
                    "there now: another process has changed it; build again"
                )
            if not before or number is None:
                self._delete(connection, _UNFINISHED, document.name)
                number = _begin_document(connection, document)
            _insert_blocks(connection, number, blocks, stored_NJD, range(len(blocks)))
            if last:
                insert_text(connection, meta, number, document)
                show_document(connection, number, next_version(connection))
                self._purge(connection)

    def stored_part(self, document: Document) -> int:
        """Return how many blocks of an unfinished document are stored."""
        with self.reading() as connection:
            return _find_unfinished(connection, document)[1]

    def remove(self, *names: str) -> None:
        """Remove documents in one commit, and what interrupted builds have read of them.

        Raises:
            UnknownDocumentError: no document has one of the names; then none is removed.
            BankError: the bank cannot be written.
        """
        with self.writing() as connection:
            held = "SELECT 1 FROM documents WHERE name = ? AND removed IS NULL"
            for name in names:
                if not query(connection, held, name):
                    raise unknown_document(f"'{self}'", name, list(self.digests()))
            version = next_version(connection)
            for name in dict.fromkeys(names):
                self._delete(connection, _UNFINISHED, name)
                _mark_removed(connection, name, version)
            self._purge(connection)

    def compact(self) -> Compacted:
        """Delete removed and unfinished documents and free their space; answers do not change."""
        size = self.size
        with self.writing() as connection:
            self._purge(connection, "added IS NULL OR")
            _merge_words(connection)
            free_space(connection)
        if self.path is not None:
            with database_errors(self), closing(connect(self.path)) as connection:
                empty_log(self, connection)
        return Compacted(size, self.size)

    def purge(self) -> bool:
        """Delete removed documents that no reader of this process needs any more.

        Returns:
            Whether there were any.
        """
        with self.reading() as connection:
            statement = "SELECT 1 FROM documents WHERE removed <= ? LIMIT 1"
            found = query(connection, statement, self._oldest_read(connection))
        if found:
            with self.writing() as connection:
                self._purge(connection)
        return bool(found)

    def _purge(self, connection: apsw.Connection, condition: str = "") -> None:
        """Delete what readers of this process do not need; others have to open the bank again."""
        limit = self._oldest_read(connection)
        if self._delete(connection, f"{condition} removed <= ?", limit):
            connection.execute("UPDATE bank SET oldest = max(oldest, ?)", (limit,))

    def _delete(self, connection: apsw.Connection, condition: str, *values: object) -> bool:
        """Delete documents from the file, its log and what lies beside it; return if there are."""
        purged = _purge_rows(connection, condition, *values)
        if purged is None:
            return False
        free_space(connection)
        self._purged = True
        if self.path is not None:
            forget_codes(self.path, purged)
            # Earlier releases stored keys and values of the blocks beside the bank.
            kept = self.path.with_name(self.path.name + ".kept")
            if kept.is_file():
                delete_database(kept)
        return True

    def _oldest_read(self, connection: apsw.Connection) -> int:
        """Return the oldest version that this process may read."""
        [(id, newest)] = query(connection, "SELECT id, version FROM bank")
        with _READERS_LOCK:
            heads = [
                one.head
                for one in _READERS
                if one.file is self or (self.path is not None and one.file.path == self.path)
            ]
        return min([newest, *(head.version for head in heads if head.id == id)])

    def copy_to(self, path: Path) -> int:
        """Copy the newest commit into a new file while others write, and return its bytes."""
        target = BankFile(path)
        if target.exists():
            raise already_there(target)
        assert target.path is not None
        partial = target.path.with_name(f".{path.name}.partial")
        delete(partial)
        try:
            with self.reading() as source, database_errors(path):
                vacuum_into(source, partial)
                with closing(connect(partial)) as copy:
                    use_log(copy)
                    with copy:
                        if not check_tables(path, copy):
                            _index_again(copy)
                        copy.execute("UPDATE bank SET id = ?", (secrets.token_hex(16),))
                        if _purge_rows(copy, "added IS NULL OR removed NOT NULL") is not None:
                            copy.execute("UPDATE bank SET oldest = version")
                            free_space(copy)
            os.link(partial, target.path)
        except FileExistsError:
            raise already_there(target) from None
        except DamagedBankError as error:
            # What is written anew has no damage: it is the bank that has it.
            raise DamagedBankError(str(error).replace(f"'{path}'", f"'{self}'")) from None
        finally:
            delete(partial)
        return target.path.stat().st_size

    def _checked(
        self, connection: apsw.Connection, fingerprint: str, blocks: Blocks, memory_NJD: Quantized
    ) -> tuple[Meta, Quantized]:
        """Return the metadata, and new memory in the bank's type."""
        meta = read_meta(self, connection)
        check_fingerprint(str(self), meta.fingerprint, fingerprint)
        shape = tuple(memory_NJD.values.shape)
        if shape != (len(blocks), meta.slots, meta.width):
            raise BankMismatchError(
                f"bank '{self}' has blocks of {meta.slots} slots of {meta.width} numbers, the "
                f"memory of {len(blocks)} new blocks is {shape}; build another bank"
            )
        if not memory_NJD.is_finite():
            raise BankError(
                f"memory for bank '{self}' holds infinities or NaN; check the model, and that its "
                "type has the range of its states"
            )
        return meta, memory_NJD.cast(meta.dtype)


def _close(idle: list[apsw.Connection]) -> None:
    while idle:
        idle.pop().close()


def is_read(path: Path) -> bool:
    """Whether a reader of this process may still need the bank at a path."""
    own = BankFile(path).path
    with _READERS_LOCK:
        return any(one.file.path == own for one in _READERS)


def delete(path: Path) -> None:
    """Delete the file of a bank, what SQLite keeps beside it, and its derived data."""
    for derived in (".kept", ".codes", ".sources", ""):
        delete_database(path.with_name(path.name + derived))


def _exchanged(file: BankFile) -> BankError:
    return BankError(f"another file is at '{file}' now; open the bank again")


def check_fingerprint(bank: str, has: str, needs: str) -> None:
    """Raise a BankMismatchError if the model that made a bank is not the one that would use it."""
    if has != needs:
        raise BankMismatchError(
            f"bank '{bank}' was built by model {has[:12]}, this model is {needs[:12]}; only the "
            "model that made a memory can use it: use that one, or build again with 'sedem build'"
        )


def unknown_document(bank: str, name: str, known: Sequence[str]) -> UnknownDocumentError:
    """Return the error for a name that no document of a bank has; `known` are those of all."""
    listed = ", ".join(f"'{one}'" for one in known[:LISTED]) or "none"
    more = f" and {len(known) - LISTED:,} more" if len(known) > LISTED else ""
    return UnknownDocumentError(f"{bank} has no document '{name}'; it has {listed}{more}")


def already_there(bank: object) -> BankError:
    """Return the error for a place that is already taken."""
    return BankError(f"'{bank}' exists already; choose another name or append to it")


# Rows


def text_digest(text: str) -> str:
    """SHA-256 of a document's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def bounded(column: str) -> str:
    """Return the expression of a text column that is NULL if it is too long, which is not read."""
    return f"iif(octet_length({column}) <= {_LIMITS[column]}, {column}, NULL)"


def checked_text(name: object, column: str, value: object) -> str:
    """Return a value of a `bounded` column.

    Raises:
        DamagedBankError: it is too long; `name` is how messages refer to the bank.
    """
    if not isinstance(value, str):
        raise damaged(name, f"the {column} of a document are longer than {_LIMITS[column]:,} bytes")
    return value


def read_meta(name: object, connection: apsw.Connection) -> Meta:
    """Return the bank-wide metadata; `name` is how messages refer to the bank.

    Raises:
        BankError: it is malformed, or of a type that this release does not know.
    """
    found = query(
        connection,
        f"SELECT fingerprint, {bounded('made_by')}, slots, width, dtype, texts FROM bank LIMIT 2",
    )
    try:
        [(fingerprint, made_by, slots, width, dtype, texts)] = found
        made_by = json.loads(made_by)
        is_whole = isinstance(made_by, dict) and 1 <= slots < 2**16 and 1 <= width < 2**20
    except (TypeError, ValueError, RecursionError):
        is_whole = False
    if not is_whole:
        raise damaged(name, "its table 'bank' is empty or malformed")
    if dtype not in DTYPES:
        raise BankError(
            f"bank '{name}' stores its slots as '{dtype}', this sedem reads {', '.join(DTYPES)}; "
            "use the sedem that wrote it or build it again"
        )
    if not texts:
        raise BankError(
            f"bank '{name}' holds no texts, which this sedem needs; build it again from its files"
        )
    # An index that could not be made anew has words in another form.
    words = connection.table_exists("main", "words") and connection.pragma("user_version") == FORMAT
    return Meta(fingerprint, made_by, slots, width, dtype, True, words)


def next_version(connection: apsw.Connection) -> int:
    """Count a change; returns the number of the version that it makes."""
    statement = "UPDATE bank SET version = version + 1 RETURNING version"
    return int(query(connection, statement)[0][0])


def _count(connection: apsw.Connection, sign: str, document: int) -> None:
    """Add a document to the numbers of the newest version, or subtract it."""
    connection.execute(
        f"UPDATE bank SET documents = bank.documents {sign} 1, blocks = bank.blocks {sign} "
        f"one.blocks, tokens = bank.tokens {sign} one.tokens FROM documents AS one "
        "WHERE one.id = ?",
        (document,),
    )


def _mark_removed(connection: apsw.Connection, name: str, version: int) -> None:
    """Remove a document from the newest version, if there is one.

    Readers of earlier versions have its rows until they are purged.
    """
    statement = f"UPDATE documents SET removed = ? WHERE name = ? AND {LIVE} RETURNING id"
    for (number,) in query(connection, statement, version, name):
        _count(connection, "-", number)


def _begin_document(connection: apsw.Connection, document: Document) -> int:
    """Add the row of a document that is read from now on; returns its id."""
    connection.execute(
        "INSERT INTO documents (name, characters, sha256, pages, blocks, tokens) "
        "VALUES (?, ?, ?, ?, 0, 0)",
        (
            document.name,
            len(document.text),
            text_digest(document.text),
            json.dumps([*document.pages]),
        ),
    )
    return connection.last_insert_rowid()


def _insert_blocks(
    connection: apsw.Connection,
    number: int,
    blocks: Blocks,
    stored_NJD: Quantized,
    rows: Sequence[int],
) -> None:
    """Append the given rows of `blocks` and their memory to a document that is being read."""
    [(first,)] = query(connection, "SELECT blocks FROM documents WHERE id = ?", number)
    values, scales = stored_NJD.raw()
    for place, row in enumerate(rows):
        start, end = int(blocks.starts[row]), int(blocks.ends[row])
        connection.execute(
            'INSERT INTO blocks (document, number, start, "end", tokens, memory, scales) '
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (number, first + place, start, end, blocks.slot_tokens[row].tobytes(),
             values[row].data, None if scales is None else scales[row].data),
        )  # fmt: skip
    connection.execute(
        "UPDATE documents SET blocks = blocks + ?, tokens = tokens + ? WHERE id = ?",
        (len(rows), int(blocks.slot_tokens[rows].sum(dtype=np.int64)), number),
    )


def insert_text(connection: apsw.Connection, meta: Meta, number: int, document: Document) -> None:
    """Store the text of a document, and index the words of its blocks."""
    text = document.text
    starts = range(0, len(text), TEXT_PIECE)
    pieces = ((number, start, text[start : start + TEXT_PIECE]) for start in starts)
    connection.executemany("INSERT INTO texts VALUES (?, ?, ?)", pieces)
    if meta.words:
        _index_words(connection, number, document.name, text)


def _index_words(connection: apsw.Connection, number: int, name: str, text: str) -> None:
    """Index the words of a document's blocks, and of its name with each."""
    blocks = query(connection, 'SELECT id, start, "end" FROM blocks WHERE document = ?', number)
    folded_name = folded(name)
    connection.executemany(
        "INSERT INTO words (rowid, name, text) VALUES (?, ?, ?)",
        ((id, folded_name, folded(text[start:end])) for id, start, end in blocks),
    )


def _index_again(connection: apsw.Connection) -> None:
    """Index all words as this release folds them."""
    renew_words(connection)
    statement = "SELECT id, name FROM documents WHERE added NOT NULL"
    for number, title in query(connection, statement):
        pieces = query(
            connection, "SELECT text FROM texts WHERE document = ? ORDER BY start", number
        )
        _index_words(connection, number, title, "".join(piece for (piece,) in pieces))


def show_document(connection: apsw.Connection, number: int, version: int) -> None:
    """Make a document that was being read visible in a version, in place of any of its name."""
    [(name,)] = query(connection, "SELECT name FROM documents WHERE id = ?", number)
    _mark_removed(connection, name, version)
    connection.execute("UPDATE documents SET added = ? WHERE id = ?", (version, number))
    _count(connection, "+", number)


def _find_unfinished(connection: apsw.Connection, document: Document) -> tuple[int | None, int]:
    """Return the id of an unfinished document and its number of blocks; None and 0 without one."""
    statement = (
        "SELECT id, blocks FROM documents WHERE name = ? AND sha256 = ? AND pages = ? "
        "AND added IS NULL"
    )
    pages = json.dumps([*document.pages])
    found = query(connection, statement, document.name, text_digest(document.text), pages)
    return found[0] if found else (None, 0)


def _purge_rows(connection: apsw.Connection, condition: str, *values: object) -> list[int] | None:
    """Delete the rows of documents, and what was derived from their blocks.

    Nothing of them stays in the file, because connections overwrite what they delete.

    Returns:
        The ids of their blocks; None without such a document.
    """
    documents = query(connection, f"SELECT id FROM documents WHERE {condition}", *values)
    if not documents:
        return None
    purged: list[int] = []
    has_words = connection.table_exists("main", "words")
    for (document,) in documents:
        ids = query(connection, "SELECT id FROM blocks WHERE document = ?", document)
        if has_words:
            connection.executemany("DELETE FROM words WHERE rowid = ?", ids)
        for table, column in (("texts", "document"), ("blocks", "document"), ("documents", "id")):
            connection.execute(f"DELETE FROM {table} WHERE {column} = ?", (document,))
        purged += (id for (id,) in ids)
    gone = np.fromiter(purged, np.int64)
    for number, blocks in query(connection, "SELECT id, blocks FROM keys"):
        if np.isin(np.frombuffer(blocks, "<i8"), gone).any():
            connection.execute("DELETE FROM keys WHERE id = ?", (number,))
    _merge_words(connection)
    return purged


def _merge_words(connection: apsw.Connection) -> None:
    """Write the index of words again without what was deleted from it.

    An index without texts only marks what is deleted, and FTS5's 'secure-delete' has no effect on
    it.
    """
    if connection.table_exists("main", "words"):
        connection.execute("INSERT INTO words (words) VALUES ('optimize')")
