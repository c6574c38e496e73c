"""Examine the file of a bank, and repair a damaged one.

A repair copies everything whose pages match their checksums into a new file. Then the damaged file
is set aside. A document that lost one block or a piece of its text is read again or dropped,
because answers from the rest would look complete.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import apsw

from sedem.bank import rows
from sedem.bank.database import check_file, check_tables, connect, database_errors
from sedem.bank.file import BankFile, delete
from sedem.bank.places import Store
from sedem.bank.rows import Meta
from sedem.bank.salvage import UNREADABLE, ReadableRows, StoredDocument
from sedem.durable_files import link, sync_folder
from sedem.errors import BankError, DamagedBankError
from sedem.types import Document

DAMAGED = ".damaged"
"""Appended to the name of a file that was set aside."""
LISTED = 10
"""Number of damaged pages that are named."""


@dataclass(frozen=True)
class Damage:
    """The damage of a bank.

    Attributes:
        problems: one sentence for each defect.
        documents: names of the documents that lost a part, in reading order. It is empty if the
            file cannot be opened.
    """

    problems: list[str]
    documents: list[str]


@dataclass(frozen=True)
class Lost:
    """A document that lost a part.

    Attributes:
        name: its name.
        sha256: SHA-256 of its text.
        text: its text; None if it is damaged too, or the bank stores no texts.
        pages: first character of each of its pages.
    """

    name: str
    sha256: str
    text: str | None
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Repaired:
    """What a repair did.

    Attributes:
        problems: the defects that it found, one sentence each.
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


Again = Callable[[BankFile, Sequence[Lost]], Iterable[str]]
"""Reads lost documents into a bank that lacks them; returns the names of those that it read."""


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
        BankError: there is no bank, or it cannot be read now.
    """
    try:
        with file.reading() as reading, _opened(file, reading) as connection:
            pages = [] if file.path is None else _damaged_pages(connection, file.path)
            with _opened(file, reading, verify=False) as loose, _one_commit(connection):
                found = ReadableRows(connection, loose, rows.read_meta(file, connection), pages)
                # Texts are long, and most documents are intact.
                documents = [one._replace(text=None) for one in found.documents()]
                problems = _of_pages(pages) if pages else _of_tables(connection, documents)
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
def _opened(
    file: BankFile, connection: apsw.Connection, verify: bool = True
) -> Iterator[apsw.Connection]:
    """Open a new connection to a file, because an index of words is not checked with an old one."""
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


def _of_tables(connection: apsw.Connection, documents: Sequence[StoredDocument]) -> list[str]:
    """Return contradictions within the database."""
    found = connection.execute(f"PRAGMA integrity_check({LISTED})").fetchall()
    problems = [f"the database is damaged: {line}" for (line,) in found if line != "ok"]
    for table, *_ in connection.execute("PRAGMA foreign_key_check").fetchall()[:LISTED]:
        problems.append(f"a row of table '{table}' belongs to no document")
    live = [one for one in documents if one.added is not None]
    holds = len(live), sum(one.blocks for one in live), sum(one.tokens for one in live)
    claims = connection.execute("SELECT documents, blocks, tokens FROM bank").fetchall()[0]
    if holds != claims:
        told = "{:,} documents, {:,} blocks and {:,} tokens"
        problems.append(
            f"it holds {told.format(*holds)}, its table 'bank' says {told.format(*claims)}"
        )
    return problems


def repair(file: BankFile, again: Again = lambda bank, lost: ()) -> Repaired:
    """Copy what is intact into a new file, and put it in the place of the damaged one.

    No other process can use the bank meanwhile. A crash leaves the damaged file or the repaired
    one. Stored keys are not copied, and neither is the index of words of a bank without texts.

    Args:
        file: the bank.
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
            lost, copied = _copy(file, file.path, new)
            read_again = list(again(new, [*lost.values()])) if lost else []
            _number(new, {one.name: number for number, one in lost.items()}, read_again)
            aside = _exchange(file.path, new)
    finally:
        new.close()
        delete(new.path)
    repaired = [name for name in damage.documents if name in copied]
    dropped = [one.name for one in lost.values() if one.name not in read_again]
    return Repaired(damage.problems, [aside.name], repaired, dropped, read_again)


def _fill_last_page(file: BankFile, path: Path) -> None:
    """Fill a page that was cut short, so that it is compared with its checksum."""
    try:
        check_file(path, file)
    except DamagedBankError:
        with path.open("rb") as content:
            page = int.from_bytes(content.read(18)[16:])
        page = 2**16 if page == 1 else max(page, 1)
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


def _copy(file: BankFile, path: Path, new: BankFile) -> tuple[dict[int, Lost], set[str]]:
    """Copy intact documents into a new file; returns lost ones by id, and the names of others."""
    with closing(connect(path, frozen=True, verify=False)) as loose:
        try:
            check_tables(file, loose)
            loose.execute("PRAGMA checksum_verification = ON")
            pages = _damaged_pages(loose, path)
            loose.execute("PRAGMA checksum_verification = OFF")
            strict = connect(path, frozen=True) if _hold_rows(loose, pages) else loose
            meta = rows.read_meta(file, strict)
            head = strict.execute("SELECT id, version FROM bank").fetchone()
        except (*UNREADABLE, apsw.SQLError, BankError) as error:
            raise _hopeless(file, error) from None
        # The index of words is made from the texts.
        meta = replace(meta, words=meta.words and meta.texts)
        with closing(strict), new.creating(meta), new.writing() as writing:
            writing.execute("UPDATE bank SET id = ?, version = ?", head)
            return _copy_documents(ReadableRows(strict, loose, meta, pages), meta, writing)


def _hopeless(file: BankFile, error: Exception) -> BankError:
    return BankError(
        f"bank '{file}' cannot be repaired ({error}); restore it from a backup, or build it again"
    )


def _hold_rows(loose: apsw.Connection, pages: Sequence[int]) -> bool:
    """Whether rows lie on damaged pages; if not, checksums need not be compared again."""
    with suppress(*UNREADABLE):
        return bool(
            loose.execute(
                "SELECT 1 FROM dbstat WHERE name IN ('bank', 'documents', 'texts', 'blocks') AND "
                "pagetype <> 'internal' AND pageno IN (SELECT value FROM json_each(?)) LIMIT 1",
                (json.dumps([*pages]),),
            ).fetchall()
        )
    return True


def _copy_documents(
    source: ReadableRows, meta: Meta, writing: apsw.Connection
) -> tuple[dict[int, Lost], set[str]]:
    lost, copied = dict[int, Lost](), set[str]()
    version = rows.next_version(writing)
    for one in source.documents():
        if one.problem:
            if one.added is not None:
                lost[one.number] = Lost(one.name, one.sha256, one.text, one.first_characters())
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
            (row for row in map(source.block, one.ids) if row and row[0] == one.number),
        )
        if writing.total_changes() - before != one.blocks:
            raise BankError("blocks that were readable before are not any more; check the disk")
        if one.added is not None:
            if one.text is not None:
                rows.insert_text(writing, meta, one.number, Document(one.name, one.text))
            rows.show_document(writing, one.number, version)
            copied.add(one.name)
    return lost, copied


def _number(new: BankFile, numbers: dict[str, int], names: Sequence[str]) -> None:
    """Give documents that were read again their ids, so that the reading order stays."""
    with new.writing() as writing:
        writing.execute("PRAGMA defer_foreign_keys = ON")
        for name in names:
            [(found,)] = writing.execute(
                "SELECT id FROM documents WHERE name = ? AND added NOT NULL AND removed IS NULL",
                (name,),
            ).fetchall()
            for table, column in (
                ("documents", "id"),
                ("texts", "document"),
                ("blocks", "document"),
            ):
                writing.execute(
                    f"UPDATE {table} SET {column} = ? WHERE {column} = ?", (numbers[name], found)
                )
        writing.execute("UPDATE bank SET oldest = version")


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
    new.path.replace(path)
    sync_folder(path.parent)
    return aside
