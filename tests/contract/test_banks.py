"""What every bank does, in RAM, in a file, and in parts in a folder or an object store."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from object_server import ObjectServer
from stored_banks import META, OTHER, PRINT, append, facts, memory_of, text_of

from sedem import Document, MemoryBank
from sedem.bank.blocks import BlockRow, Blocks
from sedem.bank.file import BankFile
from sedem.bank.parts import Parts, Store
from sedem.errors import BankError, BankMismatchError, SedemError, UnknownDocumentError
from sedem.tensors import Quantized


@pytest.fixture(params=["RAM", "file", "folder", "object store"])
def empty(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Where a bank can be made."""
    monkeypatch.setenv("SEDEM_CACHE", str(tmp_path / "cache"))
    if request.param == "object store":
        server: ObjectServer = request.getfixturevalue("server")
        return Parts(server.place())
    if request.param == "folder":
        return Parts(tmp_path / "parts")
    return BankFile(tmp_path / "a.bank" if request.param == "file" else None)


@pytest.fixture
def store(empty: Store) -> Store:
    """A bank of documents 1 and 2, of one commit each."""
    with empty.creating(META) as file:
        append(file, 1)
    append(empty, 2)
    return empty


def names(store: Store) -> list[str]:
    return MemoryBank.open_from(store).names


def test_it_appears_when_it_is_complete_and_once(empty: Store) -> None:
    with suppress(RuntimeError), empty.creating(META):
        raise RuntimeError
    assert not empty.exists()
    with empty.creating(META) as file:
        append(file, 1)
    assert empty.exists() and empty.meta() == META and names(empty) == ["1.txt"]
    with pytest.raises(BankError, match="exists already"), empty.creating(META):
        pass


def test_documents_are_skipped_replaced_and_removed(store: Store) -> None:
    append(store, 3, 4)
    before = facts(store)
    append(store, 3, 4)
    assert [fact[:3] for fact in facts(store)] == [fact[:3] for fact in before]
    append(store, 3, version=1)
    assert names(store) == ["1.txt", "2.txt", "4.txt", "3.txt"]
    name, text, _, memory_NJD = facts(store)[3]
    assert (name, text) == ("3.txt", text_of(1003)) and torch.equal(memory_NJD, memory_of(1003))
    store.remove("1.txt", "3.txt")
    assert names(store) == ["2.txt", "4.txt"]
    store.remove("2.txt", "4.txt")
    assert names(store) == [] and store.meta() == META
    append(store, 5)
    store.compact()
    assert names(store) == ["5.txt"] and torch.equal(facts(store)[0][3], memory_of(5))


def add(store: Store, memory_NJD: torch.Tensor) -> None:
    """Append a document of one block."""
    bank = MemoryBank.open_from(store)
    rows = [BlockRow(0, 0, 1, (1, 0, 0, 0))]
    bank.append(MemoryBank(PRINT, {}, [Document("a", "b")], rows, Quantized(memory_NJD)))


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        (
            lambda store: store.remove("2.txt", "x"),
            UnknownDocumentError,
            r"has no document 'x'; it has '1\.txt', '2\.txt'",
        ),
        (
            lambda store: append(store, 3, fingerprint=OTHER),
            BankMismatchError,
            "was built by model 0123456789ab, this model is fedc",
        ),
        (
            lambda store: add(store, torch.zeros(1, 4, 9)),
            BankMismatchError,
            r"blocks of 4 slots of 8 numbers.*\(1, 4, 9\)",
        ),
        (
            lambda store: add(store, torch.full((1, 4, 8), torch.nan)),
            BankError,
            "infinities or NaN",
        ),
        (
            lambda store: add(store, torch.full((1, 4, 8), torch.inf)),
            BankError,
            "infinities or NaN",
        ),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    change: Callable[[Store], None], kind: type[SedemError], sentence: str, store: Store
) -> None:
    before = [file.head() for file in store.files()]
    with pytest.raises(kind, match=sentence):
        change(store)
    assert [file.head() for file in store.files()] == before and names(store) == ["1.txt", "2.txt"]


def test_a_reader_keeps_what_it_has_opened(store: Store) -> None:
    bank = MemoryBank.open_from(store)
    before = bank.snapshot()
    bank.reload()
    assert bank.snapshot() is before
    store.remove("1.txt")
    append(store, 3)
    assert before.documents[0] == Document("1.txt", text_of(1))
    assert torch.equal(before.memory([0, 1]), memory_of(1))
    bank.reload()
    assert bank.names == ["2.txt", "3.txt"] and len(before.documents) == 2


def test_blocks_are_read_in_any_order_and_by_another_process(store: Store) -> None:
    now = MemoryBank.open_from(store).snapshot()
    every = torch.cat([memory_of(1), memory_of(2)])
    for bank in (now, pickle.loads(pickle.dumps(now))):
        for order in ([3, 0, 0, 1], [2], []):
            assert torch.equal(bank.memory(order), every[order])
            assert bank.rows(order) == Blocks.of([bank.blocks[number] for number in order])
        assert bank.block_text(2) == text_of(2)[:9]
        with pytest.raises(IndexError, match="a bank of 4 blocks has no block 4"):
            bank.memory([0, 4])
        for wanted in bank.split(3):
            part = bank.part(wanted)
            assert part.blocks == bank.blocks[wanted.start : wanted.stop]
            assert torch.equal(part.memory(range(len(part))), every[wanted.start : wanted.stop])
