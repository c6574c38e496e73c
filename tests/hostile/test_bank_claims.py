"""A stranger's bank costs bounded time: each claim that is not true is refused, and named."""

from __future__ import annotations

import shutil
import sqlite3
import struct
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from stored_banks import META, append, change, facts

from sedem import MemoryBank
from sedem.bank.codes import CodesFile, CodeSpace, codes_path
from sedem.bank.copies import copy_bank
from sedem.bank.database import connect, stored_page_size
from sedem.bank.file import BankFile
from sedem.bank.index import score_words
from sedem.errors import BankError, DamagedBankError
from sedem.types import NAME_CHARACTERS

SECONDS = 5.0
"""How long a refusal may take on a busy machine."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.bank"
    with BankFile(path).creating(META) as file:
        append(file, 0, 1)
    return path


def use(path: Path) -> None:
    """Everything that reads a bank."""
    bank = MemoryBank.open(path)
    facts(BankFile(path))
    bank.documents.pages(0)
    bank.citation(0, 1, 0.5)
    score_words(bank, "document 0 says")


BAD_NUMBERS = """UPDATE blocks SET memory = CAST(x'{}' || substr(memory, 3) AS BLOB) WHERE id = 2"""


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        *((f"UPDATE bank SET {what} = {count}", "its table 'bank' is empty or malformed")
          for what in ("documents", "blocks", "tokens") for count in (10**9, 2**62, -1)),
        *((f"UPDATE bank SET made_by = '{value}'", "its table 'bank' is empty or malformed")
          for value in ("[" * 2**21, "[" * 999, "[]", "1")),
        *((statement, "its table 'bank' is empty or malformed")
          for statement in ("UPDATE bank SET width = 0", "DELETE FROM bank")),
        ("UPDATE bank SET blocks = 9", "4 blocks, its table 'bank' says 2 and 9"),
        ("DELETE FROM blocks WHERE id = 2", "3 blocks, its table 'bank' says 2 and 4"),
        ("DELETE FROM documents WHERE id = 2", "1 documents and 2 blocks"),
        ('UPDATE blocks SET "end" = 999 WHERE id = 2', "lies outside its text"),
        ("UPDATE blocks SET start = -1 WHERE id = 2", "lies outside its text"),
        ("UPDATE blocks SET tokens = x'00' WHERE id = 2", "another number of slots"),
        ("UPDATE blocks SET memory = x'00' WHERE id = 2", "has memory of another size"),
        ("UPDATE texts SET text = 'short'", "the text of document 0 is incomplete"),
        *((BAD_NUMBERS.format(number), "it holds infinities or NaN")
          for number in ("C07F", "807F", "80FF")),
        *((f"UPDATE documents SET name = replace(hex(zeroblob({size})), '0', 'n') WHERE id = 1",
           "the name of a document are longer than") for size in (2**14, 2**20, 25 * 10**6)),
        *((f"UPDATE documents SET pages = '{pages}' WHERE id = 1",
           "pages of a? ?document.*(lie outside|are longer)")
          for pages in (f"[0{', 1' * 2**21}]", "[0, 10000000]", "[1e400]", "[9, 3]", "[[[[")),
        *((f"UPDATE documents SET characters = {most} WHERE id = 1; "
           f'UPDATE blocks SET "end" = {end} WHERE id = 2', "is too long for its tokens")
          for most, end in ((10**5, 10**5), (2**40, 2**40), (2**62, 2**62 - 1))),
    ],
)  # fmt: skip
def test_a_claim_that_is_not_true_is_refused_in_bounded_time(
    statement: str, message: str, path: Path
) -> None:
    change(path, statement)
    began = time.monotonic()
    with pytest.raises(DamagedBankError, match=f"({message}).*restore it, or keep .*--repair"):
        use(path)
    assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize("rows", [5, 1_000, 300_000])
def test_an_index_of_words_without_blocks_is_refused(rows: int, path: Path) -> None:
    change(
        path,
        "WITH RECURSIVE n(i) AS (SELECT 100 UNION ALL SELECT i + 1 FROM n WHERE i < "
        f"{99 + rows}) INSERT INTO words (rowid, name, text) SELECT i, 'says', 'says' FROM n",
    )
    began = time.monotonic()
    with pytest.raises(DamagedBankError, match="more rows than it has blocks"):
        use(path)
    assert time.monotonic() - began < SECONDS


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE space SET mean = x'00'",
        "UPDATE space SET mean = x'0000C07F', directions = zeroblob(256)",
        "UPDATE space SET directions = x''",
        "UPDATE codes SET blocks = x'0000'",
        "DROP TABLE codes; CREATE TABLE codes (blocks, signs); INSERT INTO codes VALUES (1, 2)",
        "CREATE VIEW more AS SELECT * FROM space",
    ],
)
def test_codes_of_a_stranger_are_refused_in_a_sentence(statement: str, path: Path) -> None:
    def opened() -> CodesFile:
        return CodesFile(path, "id", "selector")

    def read() -> None:
        file = opened()
        space = file.space(lambda: CodeSpace(torch.ones(1), torch.ones(64, 1)))
        file.read(np.array([1, 2]), space.words)

    file = opened()
    space = file.space(lambda: CodeSpace(torch.ones(1), torch.ones(64, 1)))
    file.add(np.array([1, 2]), np.zeros((2, space.words), np.uint64))
    file.close()
    change(codes_path(path), statement)
    with pytest.raises(BankError, match=r"is damaged|is not a file of codes; remove it"):
        read()


def test_the_longest_name_is_read(path: Path) -> None:
    change(path, "UPDATE documents SET name = ? WHERE id = 1", values=("ä" * NAME_CHARACTERS,))
    assert MemoryBank.open(path).documents.names[0] == "ä" * NAME_CHARACTERS


# What lies beside a bank


def log_of_another_bank(path: Path) -> None:
    other = path.with_name("other.bank")
    with BankFile(other).creating(META) as file:
        append(file, 7)
    append(BankFile(other), 8)
    reader = connect(other)
    reader.execute("SELECT * FROM bank").fetchall()
    append(BankFile(other), 9)
    shutil.copy(f"{other}-wal", f"{path}-wal")
    reader.close()


def log_of_a_database(path: Path) -> None:
    other = path.with_name("other.db")
    with sqlite3.connect(other) as database:
        database.execute("PRAGMA page_size = 65536")
        database.execute("PRAGMA journal_mode = wal")
        database.execute("CREATE TABLE a (b)")
        database.commit()
        shutil.copy(f"{other}-wal", f"{path}-wal")
    database.close()


def log_of_an_earlier_copy(path: Path) -> None:
    """A backup was restored beside the log of the bank that it was made of."""
    log_of_another_bank(path)
    other = path.with_name("other.bank")
    path.unlink()
    copy_bank(other, path)


def journal_of_a_database(path: Path) -> None:
    with closing(sqlite3.connect(path.with_name("other.db"))) as database:
        database.execute("PRAGMA page_size = 65536")
        database.execute("CREATE TABLE a (b)")
        database.execute("INSERT INTO a VALUES (zeroblob(2000000))")
        database.commit()
        database.execute("PRAGMA cache_size = 1")
        database.execute("UPDATE a SET b = 1")
        shutil.copy(path.with_name("other.db-journal"), f"{path}-journal")


def journal_of_a_creation(path: Path) -> None:
    """It would empty the file: its database had no page before."""
    header = struct.pack(">8s5I", JOURNAL, 0, 1, 0, 512, 65536)
    Path(f"{path}-journal").write_bytes(header.ljust(512, b"\0"))


JOURNAL = bytes.fromhex("d9d505f920a163d7")


def journal_of(path: Path, number: int = 1, **changed: bytes) -> bytes:
    """The journal of a process that was killed while it changed how a bank is written.

    Args:
        number: of the page.
        changed: bytes of the page by their place in it, such as `at_28`.
    """
    content = path.read_bytes()
    size = stored_page_size(content)
    page = bytearray(content[:size])
    for place, given in changed.items():
        at = int(place.removeprefix("at_"))
        page[at : at + len(given)] = given
    check = sum(page[at] for at in range(size - 200, 0, -200))
    header = struct.pack(">8s5I", JOURNAL, 1, 0, len(content) // size, 512, size)
    return header.ljust(512, b"\0") + struct.pack(">I", number) + page + struct.pack(">I", check)


def journal_with_another_size(path: Path) -> None:
    Path(f"{path}-journal").write_bytes(journal_of(path, at_28=b"\0\0\0\1"))


def journal_with_another_table(path: Path) -> None:
    at = path.read_bytes().index(b"CREATE TABLE")
    Path(f"{path}-journal").write_bytes(journal_of(path, **{f"at_{at}": b"DELETE"}))


def journal_with_another_page(path: Path) -> None:
    Path(f"{path}-journal").write_bytes(journal_of(path, number=2))


BESIDE = (
    journal_with_another_size,
    journal_with_another_table,
    journal_with_another_page,
    log_of_another_bank,
    log_of_a_database,
    log_of_an_earlier_copy,
    journal_of_a_database,
    journal_of_a_creation,
)


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("is_new", [True, False])
def test_a_log_of_another_database_is_refused_and_never_replayed(
    beside: Callable[[Path], None], is_new: bool, path: Path
) -> None:
    if not is_new:
        append(BankFile(path), 2)
    beside(path)
    content = path.read_bytes()
    for work in (
        lambda: use(path),
        lambda: append(BankFile(path), 9),
        lambda: BankFile(path).exists(),
        lambda: BankFile(path).compact(),
        lambda: BankFile(path).copy_to(path.with_name("copy.bank")),
    ):
        with suppress(BankError):
            work()
    with pytest.raises(BankError, match=r"a\.bank-(wal|journal)' does not belong to the bank"):
        use(path)
    assert path.read_bytes() == content
    for suffix in ("-wal", "-journal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    use(path)


def test_a_repair_or_an_old_journal_beside_a_bank_keeps_nobody_from_it(path: Path) -> None:
    """SQLite clears the header of a journal that it keeps while it has the file for itself."""
    Path(f"{path}-journal").write_bytes(bytes(65536))
    use(path)
    append(BankFile(path), 5)
    assert "5.txt" in MemoryBank.open(path).documents.names


@pytest.mark.parametrize("mode", [b"\1\1", b"\2\2"])
@pytest.mark.parametrize("part", [100, 65536])
def test_the_own_journal_of_a_killed_repair_is_replayed(mode: bytes, part: int, path: Path) -> None:
    use(path)
    before = journal_of(path)
    Path(f"{path}-journal").write_bytes(before)
    # What it had written of the first page, with another mode and counters.
    content = path.read_bytes()
    page = content[:18] + mode + content[20:24] + b"\0\0\1\0" + content[28:]
    path.write_bytes(page[:part] + content[part:])
    use(path)
    append(BankFile(path), 5)
    assert "5.txt" in MemoryBank.open(path).documents.names
    assert not Path(f"{path}-journal").exists()


def test_a_bank_is_opened_whose_first_page_with_its_id_was_written_in_part(path: Path) -> None:
    append(BankFile(path), 2)
    reader = connect(path)
    reader.execute("SELECT * FROM bank").fetchall()
    append(BankFile(path), 3)
    id, content, log = BankFile(path).head().id.encode(), path.read_bytes(), Path(f"{path}-wal")
    kept = log.read_bytes()
    reader.close()
    path.write_bytes(content.replace(id, id[:7] + bytes(len(id) - 7)))
    log.write_bytes(kept)
    assert "3.txt" in MemoryBank.open(path).documents.names


def test_the_own_log_of_a_killed_writer_is_replayed(path: Path, tmp_path: Path) -> None:
    append(BankFile(path), *range(2, 60), characters=40_000)
    reader = connect(path)
    reader.execute("SELECT * FROM bank").fetchall()
    append(BankFile(path), 60)
    killed = tmp_path / "killed" / "a.bank"
    killed.parent.mkdir()
    for suffix in ("", "-wal"):
        shutil.copy(f"{path}{suffix}", f"{killed}{suffix}")
    reader.close()
    cut = tmp_path / "cut" / "a.bank"
    shutil.copytree(killed.parent, cut.parent)
    assert MemoryBank.open(killed).documents.names == [f"{n}.txt" for n in range(61)]
    # A power cut has lost the page with the id, so nothing was committed.
    id, log = BankFile(path).head().id.encode(), Path(f"{cut}-wal")
    log.write_bytes(log.read_bytes().replace(id, bytes(len(id))))
    assert MemoryBank.open(cut).documents.names == [f"{n}.txt" for n in range(60)]
