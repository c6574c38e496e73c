"""A file of derived data beside a bank: it may be deleted at any time."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import apsw

from sedem.bank.database import (
    SUFFIXES,
    check_no_link,
    connect,
    database_errors,
    empty_log,
    free_space,
    has_tables,
    prepare_empty,
    query,
)
from sedem.errors import BankError, DamagedBankError

logger = logging.getLogger(__name__)


class DerivedFile:
    """A SQLite file beside a bank; threads may share it.

    Args:
        path: the file.
        what: its content, for messages.
        application: `application_id` of such files.
        tables: the statements that create its tables.
        row_bytes: size of its rows.
        create: create the file if it does not exist.

    Raises:
        BankError: the file is damaged, cannot be written, or is something else.
    """

    def __init__(
        self, path: Path, what: str, application: int, tables: str, row_bytes: int, create: bool
    ) -> None:
        self.path = path
        self._lock = threading.Lock()
        other = BankError(f"'{path}' is not a file of {what}; remove it")
        check_no_link(path)
        with database_errors(path):
            self._connection = connect(path.parent.resolve() / path.name, create=create)
        weakref.finalize(self, self._connection.close)
        with self.using() as connection:
            # A killed process may have left a file without a table.
            if create and not has_tables(connection):
                prepare_empty(connection, row_bytes)
                with connection:
                    connection.execute(f"PRAGMA application_id = {application}; {tables}")
            if create:
                # Derived data need not survive a power cut, but must not be damaged by one.
                connection.pragma("journal_mode", "wal")
                connection.execute("PRAGMA synchronous = NORMAL")
            found = query(connection, "SELECT sql FROM sqlite_master WHERE sql NOT NULL")
            stated = "\n" + "".join(f"{sql};\n" for (sql,) in found)
            if connection.pragma("application_id") != application or stated != tables:
                raise other

    @contextmanager
    def using(self) -> Iterator[apsw.Connection]:
        """Yield the connection to one thread at a time."""
        with self._lock, database_errors(self.path):
            yield self._connection

    @contextmanager
    def deleting(self) -> Iterator[apsw.Connection]:
        """Delete rows in a transaction, so that nothing of them stays in the file or its log."""
        with self.using() as connection:
            with connection:
                yield connection
                free_space(connection)
            empty_log(self.path, connection)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


def delete_from(
    path: Path, what: str, application: int, tables: str, rows: Callable[[apsw.Connection], object]
) -> None:
    """Delete rows of a file of derived data, if there is one; arguments as in `DerivedFile`.

    A damaged or malformed file is deleted as a whole. One that is something else stays.

    Args:
        rows: deletes them.
    """
    if not path.is_file():
        return
    try:
        with (
            closing(DerivedFile(path, what, application, tables, 0, create=False)) as file,
            file.deleting() as connection,
        ):
            rows(connection)
    except (DamagedBankError, ValueError):
        for suffix in (*SUFFIXES, ""):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
    except BankError as error:
        logger.warning("%s; it may hold what was removed from its bank", error)
