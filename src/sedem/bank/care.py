"""Examine the file of a bank, and repair a damaged one.

SQLite compares every page with its checksum, so a row that can be read is intact. Rows are looked
up one by one: a damaged page costs only the rows on it. A repair copies what can be read into a new
file and sets the damaged one aside. A document that lost a block or a piece of its text is read
again or dropped, because answers from the rest would look complete.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import apsw
import torch

from sedem.bank import rows
from sedem.bank.database import (
    check_file,
    check_tables,
    connect,
    database_errors,
    query,
    stored_page_size,
)
from sedem.bank.file import BankFile, delete
from sedem.bank.parts import Store
from sedem.bank.rows import Meta, text_digest
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
    try:
        with file.reading() as reading, _reopened(file, reading) as strict:
            pages = [] if file.path is None else _damaged_pages(strict, file.path)
            with _reopened(file, reading, verify=False) as loose, _one_commit(strict):
                meta = rows.read_meta(file, strict)
                # Texts are long, and most documents are intact.
                documents = [
                    one._replace(text=None) for one in _documents(strict, loose, meta, pages)
                ]
                problems = _of_pages(pages) if pages else _of_tables(strict, documents)
    except DamagedBankError as error:
        return Damage([str(error)], [])
    lost = [one for one in documents if one.problem]
    problems += [f"document '{one.name}': {one.problem}" for one in lost]
    return Damage(problems, [one.name for one in lost if one.added is not None])


@contextmanager
def _one_commit(connection: apsw.Connection) -> Iterator[None]:
    """Let all statements see the same commit; SQLite ends that by itself at a damaged page."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextmanager
def _reopened(
    file: BankFile, connection: apsw.Connection, verify: bool = True
) -> Iterator[apsw.Connection]:
    """Open a new connection to a file, because an old one does not check the index of words."""
    if file.path is None:
        yield connection
        return
    with closing(connect(file.path, verify=verify)) as new:
        new.pragma("query_only", True)
        yield new


def _damaged_pages(connection: apsw.Connection, path: Path) -> list[int]:
    """Return the numbers of the pages that do not match their checksums, from 1."""
    size, suspects = int(connection.pragma("page_size")), list[int]()
    for attempt in range(3):
        if attempt:
            # A page that was just being written, or whose newest content is in the log.
            with suppress(apsw.Error):
                connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
            time.sleep(0.1)
        last = min(int(connection.pragma("page_count")), -(-path.stat().st_size // size))
        pages = [page for page in suspects if page < last] if attempt else range(last)
        suspects = [page for page in pages if not _matches(connection, page, size)]
        if not suspects:
            break
    return [page + 1 for page in suspects]


def _matches(connection: apsw.Connection, page: int, size: int) -> bool:
    try:
        return connection.read("main", 0, page * size, size)[0]
    except apsw.IOError:
        return False


def _of_pages(pages: Sequence[int]) -> list[str]:
    shown = ", ".join(map(str, pages[:LISTED])) + ", ..." * (len(pages) > LISTED)
    if len(pages) == 1:
        return [f"page {shown} does not match its checksum"]
    return [f"{len(pages):,} pages do not match their checksums: {shown}"]


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


# Reading rows one by one


class _Examined(NamedTuple):
    """A document of the newest version, or one that is being read.

    Its first fields are columns; `ids` are those of its blocks, and `problem` is what it lost.
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
        with suppress(TypeError, ValueError, RecursionError):
            found = tuple(json.loads(self.pages))
            if are_pages(found, self.characters):
                return found
        return ()


def _documents(
    strict: apsw.Connection, loose: apsw.Connection, meta: Meta, pages: Sequence[int]
) -> Iterator[_Examined]:
    """Yield the documents in reading order; `loose` compares no page with its checksum."""
    names = dict(_scan(strict, "documents", "name", "documents_name"))
    numbers, owned = {*names}, dict[int, list[int]]()
    if pages:
        # An index has rows that lie between damaged pages; a table has what an index lost.
        numbers |= {number for number, _ in _scan(loose, "documents", "id")}
        owners = dict(_scan(strict, "blocks", "document", "blocks_place"))
        owners |= _scan(strict, "blocks", "document")
        for block, number in sorted(owners.items()):
            owned.setdefault(number, []).append(block)
    for number in sorted(numbers):
        row = _read(strict, _DOCUMENT, number)
        is_checked = bool(row)
        row = row or _read(loose, _DOCUMENT, number)
        unknown = names.get(number, f"number {number}"), 0, "", "[]", 0, 0, 0, None
        *values, removed = row[0] if row else unknown
        if removed is not None:
            continue
        name, _, sha256, first_characters, *_ = values
        # The text proves its SHA-256, and the index proves the name; nothing else proves pages.
        is_known = is_checked or (names.get(number) == name and first_characters == "[]")
        text = _text(strict, loose, number, sha256) if is_known else None
        ids = owned.get(number, ()) if pages else [id for (id,) in _read(strict, _BLOCKS, number)]
        one = _Examined._make((number, *values, text, ids, ""))
        yield one._replace(problem=_problem(strict, one, meta, is_checked))


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


_DOCUMENT = """SELECT name, characters, sha256, pages, blocks, tokens, added, removed
FROM documents WHERE id = ?"""
_BLOCKS = "SELECT id FROM blocks WHERE document = ? ORDER BY number"
_BLOCK = """SELECT document, number, start, "end", tokens, memory, scales
FROM blocks WHERE id = ?"""


def _read(connection: apsw.Connection, statement: str, number: int) -> list[Any]:
    """Return all rows of a statement; none if one cannot be read."""
    with suppress(*UNREADABLE):
        return query(connection, statement, number)
    return []


def _text(strict: apsw.Connection, loose: apsw.Connection, number: int, sha256: str) -> str | None:
    """Return the text of a document, if it is the one that was read."""
    # A piece that an index has lost is found in the table, which takes long.
    for connection, way in ((strict, ""), (loose, "NOT INDEXED")):
        statement = f"SELECT text FROM texts {way} WHERE document = ? ORDER BY start"
        with suppress(TypeError):
            text = "".join(piece for (piece,) in _read(connection, statement, number))
            if text_digest(text) == sha256:
                return text
    return None


def _problem(connection: apsw.Connection, one: _Examined, meta: Meta, is_checked: bool) -> str:
    """Return what a document lost; empty if it is intact."""
    if not is_checked and one.text is None:
        return "its row cannot be read"
    if one.added is not None and one.text is None:
        return "its text is damaged or incomplete"
    if one.pages != json.dumps([*one.first_characters()]):
        return "its pages lie outside its text"
    count = tokens = 0
    found = (row for block in one.ids for row in _read(connection, _BLOCK, block))
    try:
        for count, (_, number, start, end, slots, *memory) in enumerate(found, 1):
            tokens += sum(slots)
            if number != count - 1 or not 0 <= start <= end <= one.characters:
                return f"block {count - 1} has another number, or lies outside its text"
            if len(slots) != meta.slots or not _is_finite(meta, *memory):
                return f"block {count - 1} has another size, or holds infinities or NaN"
    except TypeError:
        return "its rows are malformed"
    if count != one.blocks:
        return f"{count:,} of its {one.blocks:,} blocks can be read"
    if tokens != one.tokens:
        return f"its blocks have {tokens:,} tokens, not {one.tokens:,}"
    return ""


def _is_finite(meta: Meta, memory: bytes, scales: bytes | None) -> bool:
    """Whether the memory of a block has its size, and holds numbers alone."""
    scale_bytes = 4 * meta.slots * (meta.dtype != BFLOAT16)
    if len(scales or b"") != scale_bytes or len(memory) + scale_bytes != meta.slots * vector_bytes(
        meta.width, meta.dtype
    ):
        return False
    values = torch.frombuffer(bytearray(memory), dtype=DTYPES[meta.dtype])
    factors = torch.frombuffer(bytearray(scales), dtype=torch.float32) if scales else None
    return Quantized(values, factors).is_finite()


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
    _fill_last_page(file, file.path)
    damage = examine(file)
    if not damage.problems:
        return Repaired([], [], [], [], [])
    file.close()
    new = BankFile(file.path.with_name(f".{file.path.name}.repaired"))
    assert new.path is not None
    delete(new.path)
    new.name = file.name
    try:
        with database_errors(file), _alone(file, file.path):
            lost, traceless = _copy(file, file.path, new)
            read_again = list(again(new, lost)) if lost else []
            aside = _exchange(file.path, new)
    finally:
        new.close()
        delete(new.path)
    names = [one.name for one in lost]
    repaired = [name for name in damage.documents if name not in names]
    dropped = [name for name in names if name not in read_again]
    problems = damage.problems
    if traceless:
        problems = [*problems, f"nothing can be read of {traceless:,} documents, not even a name"]
    return Repaired(problems, [aside.name], repaired, dropped, read_again)


def _fill_last_page(file: BankFile, path: Path) -> None:
    """Fill a page that was cut short, so that it is compared with its checksum."""
    try:
        check_file(path, file)
    except DamagedBankError:
        with path.open("rb") as content:
            page = stored_page_size(content.read(18))
        os.truncate(path, -(-path.stat().st_size // page) * page)
        check_file(path, file)


@contextmanager
def _alone(file: BankFile, path: Path) -> Iterator[None]:
    """Keep other processes away from a file, and leave no log that could be taken for another's."""
    try:
        connection = connect(path, wait=file.wait)
    except UNREADABLE as error:
        # Nobody can open a bank whose first page is damaged.
        if any(path.with_name(path.name + suffix).exists() for suffix in ("-wal", "-journal")):
            raise _hopeless(file, error) from None
        yield
        return
    with closing(connection):
        connection.pragma("locking_mode", "exclusive")
        try:
            connection.pragma("journal_mode", "delete")
            connection.execute("BEGIN EXCLUSIVE")
        except apsw.BusyError:
            raise BankError(
                f"bank '{file}' is open in another process; stop that process, and repair it again"
            ) from None
        yield
        # Who waits for the lock finds within this time that the file was exchanged.
        time.sleep(0.1)


def _copy(file: BankFile, path: Path, new: BankFile) -> tuple[list[DamagedDocument], int]:
    """Copy intact documents into a new file.

    Returns:
        The others, and how many more the bank had.

    Raises:
        BankError: no document can be found.
    """
    with closing(connect(path, frozen=True, verify=False)) as loose, ExitStack() as stack:
        try:
            check_tables(file, loose)
            loose.execute("PRAGMA checksum_verification = ON")
            pages = _damaged_pages(loose, path)
            loose.execute("PRAGMA checksum_verification = OFF")
            # The pages of rows cannot be found without the others, which need not be compared.
            strict = connect(path, frozen=True) if _hold_rows(loose, pages) else loose
            stack.callback(strict.close)
            meta = rows.read_meta(file, strict)
            *head, total = next(strict.execute("SELECT id, version, documents FROM bank"))
        except (*UNREADABLE, apsw.SQLError, BankError) as error:
            raise _hopeless(file, error) from None
        # The index of words is made from the texts.
        meta = replace(meta, words=loose.table_exists("main", "words"))
        with new.creating(meta), new.writing() as writing:
            writing.execute("UPDATE bank SET id = ?, version = ?", head)
            version = rows.next_version(writing)
            writing.execute("UPDATE bank SET oldest = version")
            lost, count = [], total
            for one in _documents(strict, loose, meta, pages):
                count -= one.added is not None
                if not one.problem:
                    _copy_document(strict, one, meta, writing, version)
                elif one.added is not None:
                    lost.append(
                        DamagedDocument(one.name, one.sha256, one.text, one.first_characters())
                    )
            if count == total > 0:
                raise _hopeless(file, "none of its documents can be found")
            return lost, max(count, 0)


def _hold_rows(loose: apsw.Connection, pages: Sequence[int]) -> bool:
    statement = (
        "SELECT 1 FROM dbstat WHERE name IN ('bank', 'documents', 'texts', 'blocks') AND "
        "pagetype <> 'internal' AND pageno IN (SELECT value FROM json_each(?)) LIMIT 1"
    )
    with suppress(*UNREADABLE):
        return bool(query(loose, statement, json.dumps([*pages])))
    return True


def _hopeless(file: BankFile, error: Exception | str) -> BankError:
    return BankError(
        f"bank '{file}' cannot be repaired ({error}); restore it from a backup, or build it again"
    )


def _copy_document(
    source: apsw.Connection, one: _Examined, meta: Meta, writing: apsw.Connection, version: int
) -> None:
    writing.execute(
        "INSERT INTO documents (id, name, characters, sha256, pages, blocks, tokens) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        one[:7],
    )
    before = writing.total_changes()
    writing.executemany(
        'INSERT INTO blocks (document, number, start, "end", tokens, memory, scales) '
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        (row for block in one.ids for row in _read(source, _BLOCK, block)),
    )
    if writing.total_changes() - before != one.blocks:
        raise BankError("blocks that were readable before are not any more; check the disk")
    if one.added is not None:
        assert one.text is not None
        rows.insert_text(writing, meta, one.number, Document(one.name, one.text))
        rows.show_document(writing, one.number, version)


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
