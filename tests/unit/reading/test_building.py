"""Building a bank from a stream of documents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import LEASE, RECIPE

from sedem import Document, MemoryBank, SeDeM
from sedem.errors import DataError
from sedem.reading import building
from sedem.reading.building import build_bank

TEXTS = {"lease.txt": LEASE, "recipe.md": RECIPE, "note.txt": "The key hangs behind the door."}
DOCUMENTS = [Document(*entry) for entry in TEXTS.items()]


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    return tmp_path / "a.bank"


def names(bank: Path) -> list[str]:
    return [*MemoryBank.open(bank).documents.names]


def test_documents_are_taken_when_the_ones_before_are_committed(
    model: SeDeM, bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "COMMIT", 1)
    found: list[list[str]] = []

    def stream() -> Iterator[Document]:
        for document in DOCUMENTS:
            found.append(names(bank) if bank.exists() else [])
            yield document

    report = build_bank(model, model.engine, bank, stream())
    assert (report.added, report.replaced, report.unchanged, report.documents) == (3, 0, 0, 3)
    assert found == [[*TEXTS][:count] for count in range(3)]


def test_what_was_taken_before_an_error_is_committed(model: SeDeM, bank: Path) -> None:
    def stream() -> Iterator[Document]:
        yield from DOCUMENTS[:2]
        raise DataError("the third file is damaged")

    with pytest.raises(DataError, match="the third file"):
        build_bank(model, model.engine, bank, stream())
    assert names(bank) == [*TEXTS][:2]
    with pytest.raises(DataError, match=r"2 documents are named 'note\.txt'"):
        build_bank(model, model.engine, bank, [*DOCUMENTS, DOCUMENTS[2]])
    assert names(bank) == [*TEXTS]


def test_progress_counts_the_sizes_of_all_documents_and_never_decreases(
    model: SeDeM, bank: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_bank(model, model.engine, bank, DOCUMENTS[:1])
    monkeypatch.setattr(building, "COMMIT", 1)
    seen: list[int] = []
    sizes = {"lease.txt": 7, "recipe.md": 500, "note.txt": 30}
    build_bank(model, model.engine, bank, DOCUMENTS, seen.append, size=lambda one: sizes[one.name])
    assert seen == sorted(seen)
    assert (seen[0] > 7, seen[-1]) == (True, 537)


def test_a_stream_without_documents_is_refused(model: SeDeM, bank: Path) -> None:
    with pytest.raises(DataError, match="there is nothing to read"):
        build_bank(model, model.engine, bank, iter(()))
    assert not bank.exists()
