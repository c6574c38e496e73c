"""Damage is found and named; a repair keeps everything that is intact, in order."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from stored_banks import META, PRINT, append, change, facts, memory_of, path_of, text_of

from sedem import Document, MemoryBank
from sedem.bank import database
from sedem.bank.blocks import BlockRow, Blocks
from sedem.bank.care import Damage, DamagedDocument, Repaired, examine, repair
from sedem.bank.database import connect, stored_page_size
from sedem.bank.file import BankFile
from sedem.errors import BankError, DataError
from sedem.tensors import Quantized

COUNT, WIDE = 40, 1024
"""Documents of the bank, and numbers per slot: blocks need many pages."""
ALL = [f"{number}.txt" for number in range(COUNT + 1) if number != 3]
"""Names of the documents of the bank."""


def add(file: BankFile, *numbers: int, characters: int = 3_000) -> None:
    append(file, *numbers, characters=characters, width=WIDE)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "a.bank"
    file = BankFile(path)
    with file.creating(replace(META, width=WIDE)):
        add(file, *range(COUNT))
    add(file, COUNT, characters=300_000)
    file.remove("3.txt")
    file.close()
    return path


@pytest.fixture
def file(made: Path, tmp_path: Path) -> BankFile:
    return BankFile(shutil.copy(made, tmp_path / "a.bank"))


def pages_of(path: Path, table: str, kind: str = "leaf") -> list[int]:
    """Numbers of the pages of a table or an index."""
    with closing(connect(path)) as connection:
        found = connection.execute(
            "SELECT pageno FROM dbstat WHERE name = ? AND pagetype = ?", (table, kind)
        ).fetchall()
        return [int(str(page)) for (page,) in found]


def flip(path: Path, page: int, place: int | None = None) -> None:
    """Change a byte of a page; by default the last one that SQLite uses."""
    content = bytearray(path.read_bytes())
    size = stored_page_size(content)
    content[(page - 1) * size + (size - 9 if place is None else place)] ^= 1
    path.write_bytes(content)


def again(bank: BankFile, lost: Sequence[DamagedDocument]) -> Iterable[str]:
    """Read documents again, like a model."""
    for one in lost:
        number = int(one.name.removesuffix(".txt"))
        assert one.text in (None, text_of(number, 300_000 if number == COUNT else 3_000))
        if one.text is not None:
            add(bank, number, characters=300_000 if number == COUNT else 3_000)
            yield one.name


def contents(file: BankFile) -> list[tuple[object, ...]]:
    """Name, text, pages, spans and memory of each document."""
    documents = MemoryBank.open_from(file).documents
    return [
        (name, text, documents[n].pages, [(r.start, r.end) for r in rows], memory.tolist())
        for n, (name, text, rows, memory) in enumerate(facts(file))
    ]


# Examining


def test_an_intact_bank_has_no_damage(file: BankFile) -> None:
    assert examine(file) == Damage([], [])
    in_ram = MemoryBank.open_from(file).cast("fp8").store
    assert isinstance(in_ram, BankFile) and examine(in_ram) == Damage([], [])
    assert repair(file) == Repaired([], [], [], [], [])
    file.close()
    assert os.listdir(path_of(file).parent) == ["a.bank"]


def test_a_free_page_is_compared_too(file: BankFile) -> None:
    add(file, 50, characters=500_000)
    free = max(pages_of(path_of(file), "texts", "overflow"))
    with file.writing() as connection:
        connection.execute("DELETE FROM texts WHERE document = (SELECT max(id) FROM documents)")
    file.close()
    flip(path_of(file), free, 999)
    assert examine(file).problems[0] == f"page {free} does not match its checksum"


@pytest.mark.parametrize(
    ("statement", "problem", "names"),
    [
        ("UPDATE bank SET tokens = 7", "its table 'bank' says 40 documents, 80 blocks", []),
        ("DELETE FROM blocks WHERE id = 4", "1 of its 2 blocks can be read", ["1.txt"]),
        ("UPDATE blocks SET number = 5 WHERE id = 4", "another number", ["1.txt"]),
        ('UPDATE blocks SET "end" = 9999 WHERE id = 4', "outside its text", ["1.txt"]),
        ("UPDATE blocks SET memory = x'00' WHERE id = 4", "another size", ["1.txt"]),
        ("UPDATE blocks SET memory = unhex(replace(hex(zeroblob(8192)), '0', 'F'))", "NaN", ALL),
        ("UPDATE blocks SET tokens = x'01' WHERE id = 4", "another size", ["1.txt"]),
        ("UPDATE blocks SET scales = x'01' WHERE id = 4", "another size", ["1.txt"]),
        ("UPDATE texts SET text = 'x' WHERE document = 2", "its text is damaged", ["1.txt"]),
        ("UPDATE documents SET pages = '[9, 3]' WHERE id = 2", "its pages lie", ["1.txt"]),
        ("UPDATE documents SET pages = '[[[' WHERE id = 2", "its pages lie", ["1.txt"]),
        ("DELETE FROM documents WHERE id = 2", "belongs to no document", []),
    ],
)
def test_rows_that_contradict_each_other_are_damage(
    statement: str, problem: str, names: list[str], file: BankFile
) -> None:
    change(path_of(file), statement)
    damage = examine(file)
    assert problem in " ".join(damage.problems)
    assert damage.documents == names
    repair(file)
    assert examine(file) == Damage([], [])


def test_a_bank_is_examined_while_it_is_written(file: BankFile) -> None:
    process = multiprocessing.get_context("fork").Process(target=_write, args=(path_of(file),))
    process.start()
    while process.is_alive():
        assert examine(file) == Damage([], [])
    assert process.exitcode == 0


def _write(path: Path) -> None:
    for number in range(60):
        add(BankFile(path), number, characters=9_000 + number)


# Repairing


@pytest.mark.parametrize(
    ("table", "kind", "dropped", "read_again"),
    [
        ("sqlite_sequence", "leaf", 0, 0),
        ("documents_name", "leaf", 0, 0),
        ("documents", "leaf", 40, 0),
        ("blocks_place", "leaf", 0, 40),
        ("sqlite_autoindex_texts_1", "leaf", 0, 0),
        ("words_data", "internal", 0, 0),
        ("words_data", "leaf", 0, 0),
        ("texts", "internal", 40, 0),
        ("blocks", "internal", 0, 40),
        ("texts", "leaf", 2, 0),
        ("texts", "overflow", 1, 0),
        ("blocks", "leaf", 0, 6),
        ("blocks", "overflow", 0, 1),
    ],
)
def test_a_damaged_page_costs_the_rows_on_it(
    table: str, kind: str, dropped: int, read_again: int, file: BankFile
) -> None:
    expected, path = contents(file), path_of(file)
    before = file.head()
    file.close()
    flip(path, pages_of(path, table, kind)[-1])
    damaged = path.read_bytes()
    done = repair(file, again)
    assert len(done.dropped) <= dropped and len(done.read_again) <= read_again
    kept = [fact for fact in expected if fact[0] not in done.dropped]
    # What was read again comes last.
    assert contents(file) == sorted(kept, key=lambda fact: fact[0] in done.read_again)
    assert examine(file) == Damage([], [])
    assert file.head().id == before.id and file.head().version > before.version
    file.close()
    assert (done.set_aside, bool(done.problems)) == (["a.bank.damaged"], True)
    assert path.with_name("a.bank.damaged").read_bytes()[4096:] == damaged[4096:]
    assert sorted(os.listdir(path.parent)) == ["a.bank", "a.bank.damaged"]


def test_without_reading_again_documents_are_dropped_and_words_are_found(file: BankFile) -> None:
    path = path_of(file)
    file.close()
    flip(path, pages_of(path, "blocks")[2])
    names = MemoryBank.open_from(file).documents.names
    file.close()
    done = repair(file)
    assert done.dropped and not done.read_again
    assert MemoryBank.open_from(file).documents.names == [n for n in names if n not in done.dropped]
    with file.reading() as connection:
        found = connection.execute("SELECT count(*) FROM words WHERE words MATCH 'document'")
        assert found.fetchall() == [(COUNT - len(done.dropped),)]
    file.close()
    flip(path, pages_of(path, "texts", "overflow")[0])
    assert repair(file).set_aside == ["a.bank.damaged.2"]


def test_a_document_that_is_being_read_is_kept(file: BankFile) -> None:
    document, path = Document("long", text_of(77, 2_000)), path_of(file)
    memory = Quantized(memory_of(77, WIDE))
    part = Blocks.of([BlockRow(0, 0, 9, (4,) * 4)])
    file.append_part(PRINT, document, part, memory[:1], before=0, last=False)
    file.close()
    flip(path, pages_of(path, "documents_name")[0])
    repair(file)
    assert file.stored_part(document) == 1
    last = Blocks.of([BlockRow(0, 9, len(document.text), (4,) * 4)])
    file.append_part(PRINT, document, last, memory[1:], before=1, last=True)
    assert contents(file)[-1][:2] == ("long", document.text)


def test_a_repair_that_cannot_be_made_changes_nothing(
    file: BankFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "WAIT", 0.2)
    path = path_of(file)
    flip(path, pages_of(path, "blocks")[0])
    damaged, other = path.read_bytes(), BankFile(path)
    assert other.head().documents == COUNT
    with pytest.raises(BankError, match="is open in another process; stop that process, and"):
        repair(file, again)
    other.close()
    file.close()

    def failing(bank: BankFile, lost: Sequence[DamagedDocument]) -> Iterable[str]:
        yield from again(bank, lost[:1])
        raise DataError("no model")

    with pytest.raises(DataError):
        repair(file, failing)
    file.close()
    assert os.listdir(path.parent) == ["a.bank"]
    assert path.read_bytes()[4096:] == damaged[4096:]
    assert repair(file, again).read_again


def test_who_waits_for_a_repair_does_not_use_the_old_file(file: BankFile) -> None:
    path = path_of(file)
    flip(path, pages_of(path, "blocks")[0])

    def slow(bank: BankFile, lost: Sequence[DamagedDocument]) -> Iterable[str]:
        for number in range(4):
            waiting.append(pool.submit(lambda: BankFile(path).remove("1.txt")))
            waiting.append(pool.submit(lambda: BankFile(path).head()))
            time.sleep(0.1 * number)
        return again(bank, lost)

    waiting: list[Future[object]] = []
    with ThreadPoolExecutor(8) as pool:
        repair(file, slow)
    for one in waiting:
        with pytest.raises(BankError, match=r"written by another process|another file is at"):
            one.result()
    assert examine(file) == Damage([], [])


@pytest.mark.parametrize(
    "damage", ["bank", "sqlite_schema", "cut between pages", "cut within a page"]
)
def test_a_bank_of_which_too_much_is_damaged_says_so(damage: str, file: BankFile) -> None:
    path = path_of(file)
    if "cut" not in damage:
        flip(path, pages_of(path, damage)[-1])
    else:
        os.truncate(path, path.stat().st_size // 8192 * 4096 + 1000 * ("within" in damage))
    content = path.read_bytes()
    assert examine(file).problems
    with pytest.raises(BankError, match=r"cannot be repaired .* restore it from a backup"):
        repair(file, again)
    assert os.listdir(path.parent) == ["a.bank"]
    assert path.read_bytes()[4096:] == content[4096:]


def test_what_is_no_bank_is_not_repaired(file: BankFile) -> None:
    flip(path_of(file), 1, 70)
    with pytest.raises(BankError, match="but not a bank"):
        repair(file, again)
