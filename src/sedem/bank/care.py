"""Examine the file of a bank, and repair a damaged one.

SQLite compares every page with its checksum, so a row that can be read is intact. A repair copies
whole documents into a new file and sets the damaged one aside. A document that lost a block or its
text is read again or dropped, because answers from the rest would look complete.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import apsw
import torch

from sedem.bank.blocks import Meta
from sedem.bank.database import check_file, connect, database_errors, query
from sedem.bank.file import (
    BankFile,
    delete,
    insert_text,
    next_version,
    read_meta,
    show_document,
    text_digest,
)
from sedem.bank.parts import Store
from sedem.durable_files import link, sync_folder
from sedem.errors import BankError, DamagedBankError
from sedem.tensors import BFLOAT16, DTYPES, Quantized, vector_bytes
from sedem.types import Document, are_pages

DAMAGED = ".damaged"
"""Appended to the name of a file that was set aside."""
LISTED = 10
"""Number of damaged pages that are named."""
UNREADABLE = (
    apsw.IOError, apsw.CorruptError, apsw.NotADBError, apsw.TooBigError, UnicodeDecodeError,
)  # fmt: skip
"""What SQLite raises for rows on damaged pages."""


@dataclass(frozen=True)
class Damage:
    """The damage of a bank.

    Attributes:
        problems: one sentence for each defect.
        documents: documents that lost a part; empty if the file cannot be opened.
    """

    problems: list[str]
    documents: list[str]


class DamagedDocument(NamedTuple):
    """A document that lost a part; its text is None if that is damaged too."""

    name: str
    sha256: str
    text: str | None
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Repaired:
    """What a repair did: the defects that it found, one sentence each, and names.

    Attributes:
        set_aside: the damaged file, under its new name.
        repaired: damaged documents of which everything was found.
        dropped: documents that lost a part and were not read again.
        read_again: documents that lost a part and were read again.
    """

    problems: list[str]
    set_aside: list[str]
    repaired: list[str]
    dropped: list[str]
    read_again: list[str]


Again = Callable[[BankFile, Sequence[DamagedDocument]], Iterable[str]]
"""Reads documents into a bank that lacks them; returns the names of those that it read."""


def examine_all(store: Store) -> Damage:
    """Return the damage of a bank in one file or in parts; see `examine`."""
    files = store.files()
    found = [examine(file) for file in files]
    named = [f"{file}: " if len(files) > 1 else "" for file in files]
    return Damage(
        [name + line for name, one in zip(named, found, strict=True) for line in one.problems],
        [name for one in found for name in one.documents],
    )


def examine(file: BankFile) -> Damage:
    """Compare every page of a file with its checksum, and its tables with each other.

    Other processes may write the bank meanwhile.

    Raises:
        BankError: the bank does not exist, or it cannot be read now.
    """
    problems: list[str] = []
    try:
        # A new connection, because an old one does not check the index of words.
        with (
            file.reading() as reading,
            nullcontext(reading) if file.path is None else closing(connect(file.path)) as own,
        ):
            if file.path is not None:
                own.pragma("query_only", True)
                problems += _of_pages(own, file.path)
            own.execute("BEGIN")  # all statements see the same commit
            try:
                meta = read_meta(file, own)
                # Texts are long, and most documents are intact.
                documents = [one._replace(text=None) for one in _documents(own, meta)]
                problems = problems or _of_tables(own, documents)
            finally:
                if own.in_transaction:  # a damaged page ends it
                    own.execute("ROLLBACK")
    except DamagedBankError as error:
        return Damage(problems or [str(error)], [])
    lost = [one for one in documents if one.problem]
    problems += [f"document '{one.name}': {one.problem}" for one in lost]
    return Damage(problems, [one.name for one in lost if one.added is not None])


def _of_pages(connection: apsw.Connection, path: Path) -> list[str]:
    """Return a sentence on the pages that do not match their checksums; none if all do."""
    size, suspects = int(connection.pragma("page_size")), list[int]()

    def matches(page: int) -> bool:
        try:
            return connection.read("main", 0, page * size, size)[0]
        except apsw.IOError:
            return False

    for attempt in range(3):
        if attempt:
            # A page that was just being written, or whose newest content is in the log.
            with suppress(apsw.Error):
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            time.sleep(0.1)
        last = min(int(connection.pragma("page_count")), -(-path.stat().st_size // size))
        pages = [page for page in suspects if page < last] if attempt else range(last)
        suspects = [page for page in pages if not matches(page)]
        if not suspects:
            return []
    if len(suspects) == 1:
        return [f"page {suspects[0] + 1} does not match its checksum"]
    shown = ", ".join(str(page + 1) for page in suspects[:LISTED])
    shown += ", ..." * (len(suspects) > LISTED)
    return [f"{len(suspects):,} pages do not match their checksums: {shown}"]


def _of_tables(connection: apsw.Connection, documents: Sequence[_Examined]) -> list[str]:
    """Return contradictions within the database."""
    found = query(connection, f"PRAGMA integrity_check({LISTED})")
    problems = [f"the database is damaged: {line}" for (line,) in found if line != "ok"]
    for table, *_ in query(connection, "PRAGMA foreign_key_check")[:LISTED]:
        problems.append(f"a row of table '{table}' belongs to no document")
    live = [one for one in documents if one.added is not None]
    holds = len(live), sum(one.blocks for one in live), sum(one.tokens for one in live)
    [claims] = query(connection, "SELECT documents, blocks, tokens FROM bank")
    if holds != claims:
        told = "{:,} documents, {:,} blocks and {:,} tokens"
        problems.append(
            f"it holds {told.format(*holds)}, its table 'bank' says {told.format(*claims)}"
        )
    return problems


# Documents


class _Examined(NamedTuple):
    """A document of the newest version, or one that is being read.

    All fields but the last two are columns; `problem` is what it lost.
    """

    number: int
    name: str
    characters: int
    sha256: str
    pages: str
    blocks: int
    tokens: int
    added: int | None
    text: str | None = None
    problem: str = ""

    def first_characters(self) -> tuple[int, ...]:
        with suppress(TypeError, ValueError, RecursionError):
            found = tuple(json.loads(self.pages))
            if are_pages(found, self.characters):
                return found
        return ()


_DOCUMENT = """SELECT id, name, characters, sha256, pages, blocks, tokens, added FROM documents
WHERE id = ? AND removed IS NULL"""
_BLOCKS = """SELECT document, number, start, "end", tokens, memory, scales FROM blocks
WHERE document = ? ORDER BY number"""


def _documents(connection: apsw.Connection, meta: Meta) -> Iterator[_Examined]:
    """Yield the documents in reading order."""
    # The index has names of rows that cannot be read, the table those that the index lost.
    try:
        names = query(connection, "SELECT id, name FROM documents INDEXED BY documents_name")
    except UNREADABLE:
        names = query(connection, "SELECT id, name FROM documents NOT INDEXED")
    for number, name in sorted(names):
        text, one = _text(connection, number), None
        digest = "" if text is None else text_digest(text)
        try:
            for row in query(connection, _DOCUMENT, number):
                one = _Examined(*row)
        except UNREADABLE:
            # Its pages are lost too, so only its file can be read again.
            problem = "its row cannot be read"
            yield _Examined(number, name, 0, digest, "[]", 0, 0, 0, problem=problem)
        if one is not None:
            one = one._replace(text=text if digest == one.sha256 else None)
            yield one._replace(problem=_problem(connection, one, meta))


def _text(connection: apsw.Connection, number: int) -> str | None:
    """Return the stored text of a document; None if a piece cannot be read."""
    # Where the index of the pieces is damaged, they are found in their table, which takes long.
    for way in ("", "NOT INDEXED"):
        statement = f"SELECT text FROM texts {way} WHERE document = ? ORDER BY start"
        with suppress(TypeError, *UNREADABLE):
            return "".join(piece for (piece,) in query(connection, statement, number))
    return None


def _problem(connection: apsw.Connection, one: _Examined, meta: Meta) -> str:
    """Return what a document lost; empty if it is intact."""
    if one.added is not None and one.text is None:
        return "its text is damaged or incomplete"
    if one.pages != json.dumps([*one.first_characters()]):
        return "its pages lie outside its text"
    count = tokens = 0
    size = meta.slots * vector_bytes(meta.width, meta.dtype)
    scale_bytes = 4 * meta.slots * (meta.dtype != BFLOAT16)
    try:
        blocks = enumerate(connection.execute(_BLOCKS, (one.number,)), 1)
        for count, (_, number, start, end, slots, memory, scales) in blocks:
            tokens += sum(slots)
            if number != count - 1 or not 0 <= start <= end <= one.characters:
                return f"block {count - 1} has another number, or lies outside its text"
            sizes = len(slots), len(memory), len(scales or b"")
            is_whole = sizes == (meta.slots, size - scale_bytes, scale_bytes)
            if is_whole:
                values = torch.frombuffer(bytearray(memory), dtype=DTYPES[meta.dtype])
                factors = (
                    torch.frombuffer(bytearray(scales), dtype=torch.float32) if scales else None
                )
                is_whole = Quantized(values, factors).is_finite()
            if not is_whole:
                return f"block {count - 1} has another size, or holds infinities or NaN"
    except TypeError:
        return "its rows are malformed"
    except UNREADABLE:
        return f"{count:,} of its {one.blocks:,} blocks can be read"
    if count != one.blocks:
        return f"{count:,} of its {one.blocks:,} blocks can be read"
    if tokens != one.tokens:
        return f"its blocks have {tokens:,} tokens, not {one.tokens:,}"
    return ""


# Repairing


def repair(file: BankFile, again: Again = lambda bank, lost: ()) -> Repaired:
    """Copy what is intact into a new file, and put it in the place of the damaged one.

    No other process can use the bank meanwhile. A crash leaves the damaged file or the repaired
    one. Stored keys are not copied. Documents that are read again become the last ones.

    Args:
        again: is given the new bank and the documents that it lacks.

    Raises:
        BankError: too much is damaged, another process has the bank open, or the new file cannot be
            written; the bank is unchanged.
    """
    assert file.path is not None
    damage = examine(file)
    if not damage.problems:
        return Repaired([], [], [], [], [])
    file.close()
    new = BankFile(file.path.with_name(f".{file.path.name}.repaired"))
    assert new.path is not None
    delete(new.path)
    new.name = file.name
    try:
        with database_errors(file), _alone(file, file.path) as connection:
            lost = _copy(file, connection, new)
            read_again = list(again(new, lost)) if lost else []
            aside = _exchange(file.path, new)
    finally:
        new.close()
        delete(new.path)
    names = [one.name for one in lost]
    repaired = [name for name in damage.documents if name not in names]
    dropped = [name for name in names if name not in read_again]
    return Repaired(damage.problems, [aside.name], repaired, dropped, read_again)


@contextmanager
def _alone(file: BankFile, path: Path) -> Iterator[apsw.Connection]:
    """Keep other processes away from a file, and leave no log that could be taken for another's."""
    try:
        check_file(path, file)
        opened = connect(path)
    except (DamagedBankError, *UNREADABLE):
        raise _hopeless(file, "its first page is damaged, or its end is missing") from None
    with closing(opened) as connection:
        connection.pragma("locking_mode", "exclusive")
        try:
            connection.pragma("journal_mode", "delete")
            connection.execute("BEGIN EXCLUSIVE")
        except apsw.BusyError:
            raise BankError(
                f"bank '{file}' is open in another process; stop that process, and repair it again"
            ) from None
        yield connection
        # Who waits for the lock finds within this time that the file was exchanged.
        time.sleep(0.1)


def _copy(file: BankFile, damaged: apsw.Connection, new: BankFile) -> list[DamagedDocument]:
    """Copy intact documents into a new file, and return the others."""
    try:
        meta = read_meta(file, damaged)
        head = next(damaged.execute("SELECT id, version FROM bank"))
    except (*UNREADABLE, apsw.SQLError, BankError) as error:
        raise _hopeless(file, error) from None
    lost = []
    with new.creating(meta), new.writing() as writing:
        writing.execute("UPDATE bank SET id = ?, version = ?", head)
        version = next_version(writing)
        writing.execute("UPDATE bank SET oldest = version")
        for one in _documents(damaged, meta):
            if one.problem:
                if one.added is not None:
                    pages = one.first_characters()
                    lost.append(DamagedDocument(one.name, one.sha256, one.text, pages))
                continue
            writing.execute(
                "INSERT INTO documents (id, name, characters, sha256, pages, blocks, tokens) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                one[:7],
            )
            before = writing.total_changes()
            writing.executemany(
                'INSERT INTO blocks (document, number, start, "end", tokens, memory, scales) '
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                damaged.execute(_BLOCKS, (one.number,)),
            )
            if writing.total_changes() - before != one.blocks:
                raise BankError("blocks that were readable before are not any more; check the disk")
            if one.added is not None:
                assert one.text is not None
                insert_text(writing, meta, one.number, Document(one.name, one.text))
                show_document(writing, one.number, version)
    return lost


def _hopeless(file: BankFile, error: Exception | str) -> BankError:
    return BankError(
        f"bank '{file}' cannot be repaired ({error}); restore it from a backup, or build it again"
    )


def _exchange(path: Path, new: BankFile) -> Path:
    """Give a new file its name, and the damaged one another, which is returned."""
    assert new.path is not None
    new.close()
    with closing(connect(new.path)) as connection:
        connection.pragma("journal_mode", "delete")
    number, aside = 1, path.with_name(path.name + DAMAGED)
    # After a crash, the damaged file may have both names.
    while os.path.lexists(aside) and not os.path.samefile(path, aside):
        number, aside = number + 1, path.with_name(f"{path.name}{DAMAGED}.{number + 1}")
    if not os.path.lexists(aside):
        link(path, aside)
    sync_folder(path.parent)
    shutil.copymode(path, new.path)
    new.path.replace(path)
    sync_folder(path.parent)
    return aside
