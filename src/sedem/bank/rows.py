"""The rows of a bank's database: statements that write documents and blocks in a transaction.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import apsw
import numpy as np
from numpy.typing import NDArray

from sedem.bank.blocks import MOST_SLOT_TOKENS, Blocks
from sedem.bank.database import FORMAT, damaged, query, renew_words
from sedem.errors import BankError
from sedem.folding import folded
from sedem.tensors import BFLOAT16, DTYPES, Quantized, vector_bytes
from sedem.types import MOST_PAGES, NAME_CHARACTERS, Document

TEXT_PIECE = 2**16
"""Characters of text per row."""
LIVE = "added NOT NULL AND removed IS NULL"
"""Condition for the documents of the newest version."""
SPAN_CHARACTERS = 1_024
"""Most characters of a span per token."""
_LIMITS = {"name": 4 * NAME_CHARACTERS, "pages": 16 * MOST_PAGES, "made_by": 2**20}
"""Most bytes of the text columns."""


@dataclass(frozen=True)
class Meta:
    """Bank-wide metadata; J is `slots` and D is `width`.

    Attributes:
        fingerprint: hash of the model that made it.
        made_by: the settings behind the fingerprint, for people.
        dtype: type of the stored slots: "bfloat16", "int8" or "fp8".
        texts: always true; banks of earlier releases may be without texts, which are refused.
        words: whether there is a word index.
    """

    fingerprint: str
    made_by: dict[str, Any]
    slots: int
    width: int
    dtype: str = BFLOAT16
    texts: Literal[True] = True
    words: bool = True


@dataclass(frozen=True)
class Head:
    """A version of a bank, and how much it holds; a copy of the file has the same id."""

    id: str
    version: int
    documents: int
    blocks: int
    tokens: int


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


def checked_spans(name: object, blocks: Blocks, characters_N: NDArray[np.int64]) -> Blocks:
    """Return blocks whose spans lie within their texts, of that many characters each.

    Raises:
        DamagedBankError: one does not, or is too long for its tokens.
    """
    outside = (blocks.starts < 0) | (blocks.starts > blocks.ends) | (blocks.ends > characters_N)
    if outside.any():
        raise damaged(name, "the span of a block lies outside its text")
    most = SPAN_CHARACTERS * blocks.slot_tokens.sum(1, dtype=np.int64)
    if (blocks.ends - blocks.starts > most).any():
        raise damaged(name, "the span of a block is too long for its tokens")
    return blocks


def checked_memory(name: object, memory: Quantized) -> Quantized:
    """Return memory or keys that are numbers; a NaN would win every question.

    Raises:
        DamagedBankError: they hold infinities or NaN.
    """
    if not memory.is_finite():
        raise damaged(name, "it holds infinities or NaN")
    return memory


def fits(head: Head, meta: Meta, size: int) -> bool:
    """Whether a file of `size` bytes has room for what it claims to hold.

    More would allocate memory that no file fills. A document has at least a digest.
    """
    return (
        meta.dtype in DTYPES
        and 1 <= meta.slots < 2**16
        and 1 <= meta.width < 2**20
        and 0 <= head.version < 2**62
        and 0 <= head.documents <= size // 64
        and 0 <= head.blocks * meta.slots * vector_bytes(meta.width, meta.dtype) <= size
        and 0 <= head.tokens <= head.blocks * meta.slots * MOST_SLOT_TOKENS
    )


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
        fits = isinstance(made_by, dict) and 1 <= slots < 2**16 and 1 <= width < 2**20
    except (TypeError, ValueError, RecursionError):
        fits = False
    if not fits:
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


def row_bytes(meta: Meta) -> int:
    """Bytes of the row of a block."""
    return meta.slots * (vector_bytes(meta.width, meta.dtype) + 1) + 40


def has_document(connection: apsw.Connection, document: Document) -> bool:
    """Whether the newest version holds a document with the same name and text."""
    statement = f"SELECT 1 FROM documents WHERE name = ? AND sha256 = ? AND {LIVE}"
    return bool(query(connection, statement, document.name, text_digest(document.text)))


def next_version(connection: apsw.Connection) -> int:
    """Count a change; returns the number of the version that it makes."""
    statement = "UPDATE bank SET version = version + 1 RETURNING version"
    return int(query(connection, statement)[0][0])


def count(connection: apsw.Connection, sign: str, document: int) -> None:
    """Add a document to the numbers of the newest version, or subtract it."""
    connection.execute(
        f"UPDATE bank SET documents = bank.documents {sign} 1, blocks = bank.blocks {sign} "
        f"one.blocks, tokens = bank.tokens {sign} one.tokens FROM documents AS one "
        "WHERE one.id = ?",
        (document,),
    )


def mark_removed(connection: apsw.Connection, name: str, version: int) -> bool:
    """Remove a document from the newest version; returns whether there is one.

    Readers of earlier versions have its rows until they are purged.
    """
    statement = f"UPDATE documents SET removed = ? WHERE name = ? AND {LIVE} RETURNING id"
    found = query(connection, statement, version, name)
    for (number,) in found:
        count(connection, "-", number)
    return bool(found)


def begin_document(connection: apsw.Connection, document: Document) -> int:
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


def insert_blocks(
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
        index_words(connection, number, document.name, text)


def index_words(connection: apsw.Connection, number: int, name: str, text: str) -> None:
    """Index the words of a document's blocks, and of its name with each."""
    blocks = query(connection, 'SELECT id, start, "end" FROM blocks WHERE document = ?', number)
    folded_name = folded(name)
    connection.executemany(
        "INSERT INTO words (rowid, name, text) VALUES (?, ?, ?)",
        ((id, folded_name, folded(text[start:end])) for id, start, end in blocks),
    )


def index_again(connection: apsw.Connection) -> None:
    """Index all words as this release folds them."""
    renew_words(connection)
    statement = "SELECT id, name FROM documents WHERE added NOT NULL"
    for number, title in query(connection, statement):
        pieces = query(
            connection, "SELECT text FROM texts WHERE document = ? ORDER BY start", number
        )
        index_words(connection, number, title, "".join(piece for (piece,) in pieces))


def show_document(connection: apsw.Connection, number: int, version: int) -> None:
    """Make a document that was being read visible in a version, in place of any of its name."""
    [(name,)] = query(connection, "SELECT name FROM documents WHERE id = ?", number)
    mark_removed(connection, name, version)
    connection.execute("UPDATE documents SET added = ? WHERE id = ?", (version, number))
    count(connection, "+", number)


def find_unfinished(connection: apsw.Connection, document: Document) -> tuple[int | None, int]:
    """Return the id of an unfinished document and its number of blocks; None and 0 without one."""
    statement = (
        "SELECT id, blocks FROM documents WHERE name = ? AND sha256 = ? AND pages = ? "
        "AND added IS NULL"
    )
    pages = json.dumps([*document.pages])
    found = query(connection, statement, document.name, text_digest(document.text), pages)
    return found[0] if found else (None, 0)


def purge(connection: apsw.Connection, condition: str, *values: object) -> list[int] | None:
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
    merge_words(connection)
    return purged


def merge_words(connection: apsw.Connection) -> None:
    """Write the index of words again without what was deleted from it.

    An index without texts only marks what is deleted, and FTS5's 'secure-delete' has no effect on
    it.
    """
    if connection.table_exists("main", "words"):
        connection.execute("INSERT INTO words (words) VALUES ('optimize')")
