"""A bank needs nothing of its store but the protocol: here with a store that is a few lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from sedem import Document, MemoryBank, SeDeM
from sedem.bank.blocks import Blocks, InMemory
from sedem.bank.documents import InMemoryDocuments
from sedem.bank.store.interface import Contents, Meta, Store, check_fingerprint
from sedem.bank.store.local import LocalStore
from sedem.errors import BankError, BankMismatchError
from sedem.quantization import Quantized

EXTRA = Document("note.md", "The cellar key hangs behind the door; the meter is read in March.")


class ListStore:
    """Keeps the documents, blocks and memory of each commit."""

    def __init__(self) -> None:
        self.meta: Meta | None = None
        self.commits: list[tuple[list[Document], Blocks, InMemory]] = []

    @contextmanager
    def creating(self, meta: Meta) -> Iterator[Store]:
        unfinished = ListStore()
        unfinished.meta = meta
        yield unfinished
        self.meta, self.commits = meta, unfinished.commits

    def append(
        self, fingerprint: str, documents: Sequence[Document], blocks: Blocks, memory_NJD: Quantized
    ) -> None:
        assert self.meta is not None
        check_fingerprint("a list", self.meta.fingerprint, fingerprint)
        piece = InMemory(memory_NJD.cast(self.meta.dtype))
        self.commits.append((list(documents), blocks, piece))

    def remove(self, name: str) -> None:
        raise BankError(f"a list never forgets '{name}'")

    def open(self, known: Contents | None = None) -> Contents:
        assert self.meta is not None
        documents: list[Document] = []
        blocks = []
        for named, rows, _ in self.commits:
            blocks.append(rows.of_documents(rows.documents + len(documents)))
            documents += named
        pieces = [piece for _, _, piece in self.commits]
        places = [(p, row) for p, piece in enumerate(pieces) for row in range(len(piece))]
        return Contents(
            self.meta,
            InMemoryDocuments(documents),
            Blocks.join(blocks),
            pieces,
            np.array(places, np.int64).reshape(-1, 2),
        )

    def verify(self) -> list[str]:
        return []


def assert_same(bank: MemoryBank, other: MemoryBank) -> None:
    assert (bank.documents, bank.blocks) == (other.documents, other.blocks)
    assert (bank.fingerprint, bank.made_by, bank.dtype) == (
        other.fingerprint,
        other.made_by,
        other.dtype,
    )
    blocks = range(len(bank))
    assert torch.equal(bank.memory(blocks), other.memory(blocks))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_bank_in_any_store_is_the_bank_on_local_disk(
    dtype: str, model: SeDeM, documents: list[Document], tmp_path: Path
) -> None:
    in_lists, on_disk = model.read(documents), model.read(documents)
    store = ListStore()
    in_lists.save_to(store, dtype)
    on_disk.save(tmp_path / "a.bank", dtype)
    assert in_lists.path is None
    for bank in (in_lists, on_disk):
        bank.append(model.read([EXTRA]))
    assert len(store.commits) == 2
    assert_same(in_lists, on_disk)
    assert_same(MemoryBank.open_from(store), MemoryBank.open_from(LocalStore(tmp_path / "a.bank")))
    question = "Where is the key?"
    assert torch.equal(model.scores(in_lists, question), model.scores(on_disk, question))
    assert model.answer(in_lists, question).text == model.answer(on_disk, question).text


def test_errors_of_a_store_reach_the_caller_and_leave_the_bank_as_it_was(
    model: SeDeM, documents: list[Document]
) -> None:
    bank = model.read(documents)
    bank.save_to(ListStore())
    with pytest.raises(BankError, match=r"never forgets 'lease\.txt'"):
        bank.remove("lease.txt")
    other = model.read([EXTRA])
    foreign = MemoryBank("0" * 64, other.made_by, other.documents, other.blocks, other.pieces)
    with pytest.raises(BankMismatchError):
        bank.append(foreign)
    assert bank.documents == documents
