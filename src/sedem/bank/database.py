"""The SQLite database of a bank: its tables, safe connections to it, and its errors as sentences.

SQLite's checksum VFS adds a checksum to every page and compares it whenever a page is read, so
damage is found without any code of ours. A file may come from anybody: it has to have exactly
these tables, no view and no trigger, and what is read from it is checked by `view`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import re
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import apsw
import apsw.sqlite_extra

from sedem.durable_files import create_private, sync_folder
from sedem.errors import BankError, DamagedBankError, first_line

logger = logging.getLogger(__name__)

APPLICATION = 0x53644D42
"""`application_id` of a bank: "SdMB"."""
FORMAT = 6
"""`user_version` of a bank. It grows with every change of `folding`."""
FOLDED_BEFORE = 5
"""The format in which only the index of words is another; opening a bank makes it anew."""
CHECKSUM_BYTES = 8
"""Bytes that the checksum VFS uses of every page."""
LONGEST = 2**28
"""Maximum bytes of a value; a file with longer ones is not read."""
WAIT = 60.0
"""Seconds that a writer waits for another one."""
JOURNAL_SECONDS = 1.0
"""How long a journal beside a bank may exist; that of another database stays."""
LOG_BYTES = 2**22
"""Most bytes of a log before it is written into its file, if no long read prevents that."""
LOG_WAIT = 5_000
"""Milliseconds to wait for readers before a log is emptied."""
_ID = re.compile("[0-9a-f]{32}")
SUFFIXES = ("-wal", "-shm", "-journal")
"""What SQLite appends to the name of a file for those beside it."""

TABLES = """
CREATE TABLE bank (
    id TEXT NOT NULL,             -- random; copies have the same
    fingerprint TEXT NOT NULL,    -- of the model that made the memory; others reject the bank
    made_by TEXT NOT NULL,        -- JSON, for people: model, layers, T, C
    dtype TEXT NOT NULL,          -- type of the slots: bfloat16, int8 or fp8
    slots INTEGER NOT NULL,       -- slots per block
    width INTEGER NOT NULL,       -- numbers per slot
    texts INTEGER NOT NULL,       -- 1 if texts are stored, else 0
    version INTEGER NOT NULL,     -- grows by 1 with every change
    oldest INTEGER NOT NULL,      -- oldest version that can still be read
    documents INTEGER NOT NULL,   -- documents, blocks and tokens in this version
    blocks INTEGER NOT NULL,
    tokens INTEGER NOT NULL
) STRICT;
CREATE TABLE documents (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name TEXT NOT NULL,
    characters INTEGER NOT NULL,
    sha256 TEXT NOT NULL,         -- of the text in UTF-8
    pages TEXT NOT NULL,          -- JSON: first character of each page
    blocks INTEGER NOT NULL,      -- number of its blocks
    tokens INTEGER NOT NULL,      -- number of its tokens
    added INTEGER,                -- version that added it; NULL while it is being read
    removed INTEGER               -- version that removed it; NULL while it is in the bank
) STRICT;
CREATE INDEX documents_name ON documents (name);
CREATE TABLE texts (              -- in pieces, so that a span is read without the rest
    document INTEGER NOT NULL REFERENCES documents (id),
    start INTEGER NOT NULL,       -- first character of the piece
    text TEXT NOT NULL,
    PRIMARY KEY (document, start)
) STRICT;
CREATE TABLE blocks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    document INTEGER NOT NULL REFERENCES documents (id),
    number INTEGER NOT NULL,      -- in the document, from 0
    start INTEGER NOT NULL,       -- first character of its span
    "end" INTEGER NOT NULL,       -- character after its span
    tokens BLOB NOT NULL,         -- real tokens behind each slot, one byte each; 0 is padding
    memory BLOB NOT NULL,         -- slots x width numbers of type dtype, little-endian
    scales BLOB                   -- one float32 per slot for int8 and fp8
) STRICT;
CREATE UNIQUE INDEX blocks_place ON blocks (document, number, start, "end", tokens);
CREATE TABLE keys (               -- derived: the selector's keys of many blocks per row
    id INTEGER PRIMARY KEY,
    selector TEXT NOT NULL,       -- digest of the selector that made them
    dtype TEXT NOT NULL,
    blocks BLOB NOT NULL,         -- ids of blocks, int64
    vectors BLOB NOT NULL,        -- blocks x slots x heads x width numbers
    scales BLOB                   -- one float32 per vector for int8 and fp8
) STRICT;
"""
WORDS = """
CREATE VIRTUAL TABLE words USING fts5 (  -- rowid is the id of a block
    name, text, content = '', contentless_delete = 1,
    tokenize = 'porter unicode61 remove_diacritics 0 categories ''L* M* N* Co'' tokenchars ''.'''
);
"""
_WORDS_BEFORE = """
CREATE VIRTUAL TABLE words USING fts5 (  -- rowid is the id of a block
    name, text, content = '', contentless_delete = 1,
    tokenize = 'porter unicode61 remove_diacritics 2'
);
"""
_COVER = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name"
_CREATE = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE


def connect(
    path: Path | None,
    *,
    create: bool = False,
    frozen: bool = False,
) -> apsw.Connection:
    """Open a connection to a file, or an empty database in RAM; see `database_errors`.

    Args:
        path: the file; None means RAM.
        frozen: read the file without a lock, because nobody can write it.

    Raises:
        BankError: one of the files beside it is a link or no file, which SQLite would write to; or
            it belongs to another database, whose pages SQLite would put into this one.
    """
    uri, flags, vfs = ":memory:", _CREATE, None
    if path is not None:
        for suffix in SUFFIXES:
            check_no_link(path.with_name(path.name + suffix))
        _register_checksums()
        if not create and not frozen:
            _check_logs(path)
        uri, vfs = path.as_uri(), "cksmvfs"
        if frozen:
            uri, flags = uri + "?immutable=1", apsw.SQLITE_OPEN_READONLY
        elif not create:
            flags = apsw.SQLITE_OPEN_READWRITE
            if not (os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)):
                # Without a log nobody is writing, and a read-only folder cannot hold one.
                alone = not path.with_name(path.name + "-wal").exists()
                uri, flags = uri + "?immutable=1" * alone, apsw.SQLITE_OPEN_READONLY
        else:
            # What SQLite creates beside a file has the same owner and mode.
            with suppress(OSError):  # SQLite says why
                create_private(path)
        flags |= apsw.SQLITE_OPEN_URI | apsw.SQLITE_OPEN_NOFOLLOW
    connection = apsw.Connection(uri, flags=flags, vfs=vfs)
    try:
        # First, because what follows already reads the file.
        connection.set_busy_handler(_waiter(path))
        if frozen:
            # Then SQLite also reads a file whose end is missing.
            connection.execute("PRAGMA writable_schema = ON")
        # A file may come from anybody.
        for option in (
            apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA,
            apsw.SQLITE_DBCONFIG_ENABLE_TRIGGER,
            apsw.SQLITE_DBCONFIG_ENABLE_VIEW,
        ):
            connection.config(option, 0)
        connection.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, int(not frozen))
        connection.limit(apsw.SQLITE_LIMIT_LENGTH, LONGEST)
        for pragma in ("cell_size_check", "foreign_keys", "secure_delete"):
            connection.execute(f"PRAGMA {pragma} = ON")
        connection.execute("PRAGMA synchronous = FULL")
    except BaseException:
        connection.close()
        raise
    return connection


def check_no_link(path: Path) -> None:
    """Reject anything but a regular file at a path; a link could lead into another bank.

    Raises:
        BankError: it is a link, or no file. Nothing at all is no error.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise BankError(f"'{path}' is a link, or not a file; remove it")


def _check_logs(path: Path) -> None:
    """Reject a log or journal that would put pages of another database into a bank.

    Every commit to a bank writes the page with its id, so its own log has the id. A bank has a log
    from its creation on, so its own journal is that of a process which turned that on or off, and
    has the first page alone.

    Raises:
        BankError: there is one; nothing was changed.
    """
    log, journal = (path.with_name(path.name + suffix) for suffix in ("-wal", "-journal"))

    def is_used(one: Path) -> bool:
        with suppress(FileNotFoundError), one.open("rb") as file:
            return file.read(1) not in (b"", b"\0")  # SQLite ignores such ones
        return False

    if not is_used(log) and not is_used(journal):
        return
    try:
        with closing(connect(path, frozen=True)) as alone:
            id = str(alone.execute("SELECT id FROM bank").get)
    except (apsw.Error, UnicodeDecodeError):
        return  # it is no bank yet, or is being written
    if not _ID.fullmatch(id):
        return  # so far, its page is written in part
    until = time.monotonic() + JOURNAL_SECONDS
    while is_used(journal) and not _is_journal_of(path, journal) and time.monotonic() < until:
        time.sleep(0.01)
    for one in filter(is_used, (log, journal)):
        with suppress(FileNotFoundError):
            own = _is_log_of(log, id.encode()) if one == log else _is_journal_of(path, journal)
            if not own:
                raise BankError(
                    f"'{one}' does not belong to the bank beside it; move it to another folder, "
                    "and open the bank again"
                )


def _is_journal_of(path: Path, journal: Path) -> bool:
    """Whether a rollback journal would only put the way a file is written, and its counters, back.

    https://sqlite.org/fileformat.html#the_rollback_journal: a header in a sector, and the number,
    content and checksum of each page.
    """
    with suppress(FileNotFoundError), journal.open("rb") as log, path.open("rb") as file:
        header, page = log.read(28), stored_page_size(file.read(18))
        count, _, pages, sector, size = struct.unpack(">5I", header[8:].ljust(20, b"\0"))
        file.seek(0)
        log.seek(sector)
        record, own = log.read(page + 9), file.read(page)
        if (pages, size) != (os.path.getsize(path) // page, page) or len(record) > page + 8:
            return False
        return count == 0 or (
            record[:4] == bytes([0, 0, 0, 1]) and _unchanging(record[4:-4]) == _unchanging(own)
        )
    return True


def _unchanging(page: bytes) -> bytes:
    """The first page of a file without how it is written, its counters, and its checksum."""
    return page[:18] + page[20:24] + page[28:92] + page[100:-CHECKSUM_BYTES]


def _is_log_of(log: Path, id: bytes) -> bool:
    """Whether a write-ahead log has the id of a bank, or has no commit that SQLite would read.

    https://sqlite.org/fileformat.html#walformat: a header, and frames of a header and a page each.
    """
    with log.open("rb") as file:
        header = file.read(32)
        size = int.from_bytes(header[8:12])
        while len(head := file.read(24)) == 24 and head[8:16] == header[16:24]:
            if id in file.read(size):
                return True
        # A power cut may have lost the page with the id: then a checksum differs.
        file.seek(32)
        order = "<" if header[:4] == bytes.fromhex("377f0682") else ">"
        first, second = struct.unpack(">2I", header[24:].rjust(8, b"\0"))
        while len(head := file.read(24)) == 24 and head[8:16] == header[16:24]:
            words = head[:8] + (page := file.read(size))
            for one, two in struct.iter_unpack(f"{order}2I", words[: len(words) // 8 * 8]):
                first = (first + one + second) & 0xFFFFFFFF
                second = (second + two + first) & 0xFFFFFFFF
            # The log may have grown since.
            if struct.pack(">2I", first, second) != head[16:] or id in page:
                return True
            if head[4:8] != bytes(4):
                return False
    return True


def create_tables(connection: apsw.Connection, words: bool) -> None:
    """Create the tables of a bank, inside a transaction."""
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {FORMAT}")
    connection.execute(TABLES + WORDS * words)


def renew_words(connection: apsw.Connection) -> None:
    """Make the index of words of an older bank anew and empty, inside a transaction."""
    connection.execute(f"PRAGMA user_version = {FORMAT}")
    if connection.table_exists("main", "words"):
        connection.execute(f"DROP TABLE words; {WORDS}")


def query(connection: apsw.Connection, statement: str, *values: Any) -> list[Any]:
    """Return all rows of a statement as tuples."""
    return connection.execute(statement, values).fetchall()


def has_tables(connection: apsw.Connection) -> bool:
    """Whether a database has a table; a killed process may have left one without."""
    return bool(query(connection, "SELECT 1 FROM sqlite_master"))


def free_space(connection: apsw.Connection) -> None:
    """Shrink a file by its free pages; also within a transaction."""
    query(connection, "PRAGMA incremental_vacuum")


def use_log(connection: apsw.Connection) -> None:
    """Write commits of a connection to a log, which goes into the file when it is half as large.

    SQLite itself waits for a thousand pages, which is 64 MB if they are large.
    """
    connection.pragma("journal_mode", "wal")
    page, pages = connection.pragma("page_size"), connection.pragma("page_count")
    most = max(1, min(pages // 2, LOG_BYTES // page))
    connection.wal_autocheckpoint(most)
    connection.pragma("journal_size_limit", most * page)


def empty_log(name: object, connection: apsw.Connection) -> None:
    """Write the log of a file into the file and truncate it, so that nothing deleted stays there.

    A long read of another process prevents that; it is reported, because the change is durable.
    """
    connection.set_busy_timeout(LOG_WAIT)
    try:
        connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    except apsw.Error as error:
        logger.warning(
            "the log beside '%s' still holds what was removed (%s); run 'sedem bank compact' when "
            "no other process reads the bank",
            name,
            first_line(error),
        )


def vacuum_into(connection: apsw.Connection, path: Path) -> None:
    """Copy the newest commit of a database into a new file, without its free pages."""
    _register_checksums()
    create_private(path)
    is_reader = connection.pragma("query_only")
    connection.pragma("query_only", False)
    try:
        connection.execute("VACUUM INTO ?", (f"{path.as_uri()}?vfs=cksmvfs",))
    finally:
        connection.pragma("query_only", is_reader)
    sync_folder(path)


def prepare_empty(connection: apsw.Connection, row_bytes: int) -> None:
    """Choose the page size of an empty database for its rows, and reserve room for checksums."""
    connection.execute(f"PRAGMA page_size = {page_size(row_bytes)}")
    connection.reserve_bytes("main", CHECKSUM_BYTES)
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")


def page_size(row_bytes: int) -> int:
    """Return the largest page size that wastes at most a tenth of the space of rows.

    Large pages are faster, but two rows of 32 KB, for example, do not fit into one of 64 KB.
    """
    for page in (2**16, 2**15, 2**14, 2**13):
        usable = page - CHECKSUM_BYTES
        if row_bytes <= usable - 35:
            taken = page / (usable // row_bytes)
        else:
            # https://sqlite.org/fileformat.html#b_tree_pages: a long row keeps a part of itself in
            # its page, and the rest goes to pages of its own.
            least = (usable - 12) * 32 // 255 - 23
            kept = least + (row_bytes - least) % (usable - 4)
            kept = kept if kept <= usable - 35 else least
            taken = page / max(1, usable // kept) + -(-(row_bytes - kept) // (usable - 4)) * page
        if taken <= 1.1 * row_bytes:
            return page
    return 2**12


def check_file(path: Path, name: object) -> None:
    """Reject what is not the file of a bank, before SQLite opens it; `name` is for messages.

    Raises:
        BankError: there is no file, it may not be read, or it is not a bank.
    """
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise BankError(f"'{name}' is a folder, not a bank; give the file of a bank")
        if not stat.S_ISREG(found.st_mode):
            raise BankError(f"'{name}' is not a file; give the file of a bank")
        with path.open("rb") as file:
            header = file.read(100)
    except PermissionError:
        raise BankError(f"'{name}' may not be read; ask its owner for permission") from None
    except (FileNotFoundError, NotADirectoryError, ValueError):
        raise BankError(
            f"bank '{name}' does not exist; create it with 'sedem build {name} FILE...'"
        ) from None
    if header[:16] != b"SQLite format 3\0":
        raise BankError(f"'{name}' is not a bank, or its first bytes are damaged")
    if int.from_bytes(header[68:72]) != APPLICATION:
        raise BankError(f"'{name}' is a database, but not a bank")
    if (version := int.from_bytes(header[60:64])) not in (FORMAT, FOLDED_BEFORE):
        raise BankError(
            f"bank '{name}' has format {version}, this sedem reads {FORMAT}; use the sedem that "
            "wrote it, or build it again"
        )
    if header[20] != CHECKSUM_BYTES:
        raise DamagedBankError(f"bank '{name}' has no checksums; restore it or build it again")
    if found.st_size % stored_page_size(header):
        # It may be incomplete because it is being written, or a writer was killed.
        logs = (path.with_name(path.name + suffix) for suffix in SUFFIXES)
        if not any(log.exists() for log in logs) and path.stat().st_size == found.st_size:
            # SQLite fills a page that is cut short with zeros, and does not compare it with its
            # checksum.
            raise damaged(name, "it is cut short")


def stored_page_size(header: bytes) -> int:
    """Return the page size in the first bytes of a file."""
    page = int.from_bytes(header[16:18])
    return 2**16 if page == 1 else max(page, 1)


def delete_database(path: Path) -> None:
    """Delete a file and what SQLite keeps beside it."""
    # The file itself last: a log without it would be replayed into the next one at this place.
    for suffix in (*SUFFIXES, ""):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def check_tables(name: object, connection: apsw.Connection) -> bool:
    """Return whether the index of words of a bank is as this release makes it.

    Raises:
        BankError: the tables of the database differ from those of a bank.
    """
    is_new = connection.pragma("user_version") == FORMAT
    words = WORDS if is_new else _WORDS_BEFORE
    if tuple(connection.execute(_COVER)) not in (_tables(words), _tables("")):
        raise BankError(f"'{name}' is not a bank: its tables are not those of one")
    return is_new


@cache
def _tables(words: str) -> tuple[object, ...]:
    with closing(connect(None)) as own:
        own.execute(TABLES + words)
        return tuple(own.execute(_COVER))


@cache
def _register_checksums() -> None:
    with closing(apsw.Connection(":memory:")) as connection:
        apsw.sqlite_extra.load(connection, "cksumvfs")


def _waiter(path: Path | None) -> Callable[[int], bool]:
    """Return a busy handler: it waits for another process, with a message."""
    since, inode = 0.0, _inode(path)

    def waits(calls: int) -> bool:
        nonlocal since
        now = time.monotonic()
        if calls == 0:
            since = now
        elif now - since > WAIT or _inode(path) != inode:
            return False
        elif calls == 20:
            logger.warning("another process is writing bank '%s'; waiting for it", path)
        time.sleep(random.uniform(0.005, 0.05) if calls else 0.001)
        return True

    return waits


def _inode(path: Path | None) -> int:
    with suppress(OSError):
        return 0 if path is None else path.stat().st_ino
    return -1


def has_moved(connection: apsw.Connection) -> bool:
    """Whether another file, or none, is now where a connection was opened."""
    moved = ctypes.c_int()
    connection.file_control("main", apsw.SQLITE_FCNTL_HAS_MOVED, ctypes.addressof(moved))
    return bool(moved.value)


@contextmanager
def database_errors(name: object) -> Iterator[None]:
    """Raise errors of SQLite as `BankError`; `name` is how messages refer to the bank.

    Raises:
        DamagedBankError: a page does not match its checksum, or the file is no database any more.
        BankError: any other error; what was being written is unchanged.
    """
    try:
        yield
    except apsw.BusyError:
        raise BankError(
            f"bank '{name}' is being written by another process; wait until it is done"
        ) from None
    except (apsw.CorruptError, apsw.NotADBError, UnicodeDecodeError) as error:
        raise damaged(name, first_line(error)) from None
    except apsw.FullError:
        raise BankError(f"the disk of bank '{name}' is full; the bank is unchanged") from None
    except apsw.TooBigError:
        raise damaged(name, f"a value has more than {LONGEST:,} bytes") from None
    except apsw.Error as error:
        if getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_DATA:
            raise damaged(name, "a page does not match its checksum") from None
        raise BankError(
            f"bank '{name}' cannot be used now ({first_line(error)}); it is unchanged"
        ) from None


def damaged(name: object, reason: str) -> DamagedBankError:
    """Return the error for a damaged bank; `name` is how it refers to it."""
    return DamagedBankError(
        f"bank '{name}' is damaged: {reason}; restore it, or keep what can be read of it with "
        "'sedem bank verify --repair'"
    )
