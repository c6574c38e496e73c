"""Documents cut in a thread: in order, with their errors in place, and no more than was asked."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import LEASE, RECIPE

from sedem import Document, SeDeM
from sedem.errors import DataError
from sedem.method.segments import Segments
from sedem.modules import SedemModules
from sedem.reading import encoding as cutter
from sedem.reading.encoding import Cutter, segments_of

DOCUMENTS = [Document(f"{n}.txt", text) for n, text in enumerate((LEASE, RECIPE, "x", LEASE * 3))]


def failing(model: SedemModules, document: Document) -> Segments:
    if document.name == "1.txt":
        raise DataError("the text has no tokens")
    return segments_of(model, document)


def test_segments_come_in_the_order_of_the_documents(model: SeDeM) -> None:
    with Cutter(model, DOCUMENTS) as cutting:
        found = list(cutting)
        assert cutting.count == sum(map(len, found))
    expected = [segments_of(model, document) for document in DOCUMENTS]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.ids, theirs.ids) and torch.equal(ours.ends, theirs.ends)


def test_an_error_is_raised_in_the_place_of_its_document(
    model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutter, "segments_of", failing)
    with Cutter(model, DOCUMENTS) as cutting:
        parts = iter(cutting)
        assert len(next(parts)) == len(segments_of(model, DOCUMENTS[0]))
        with pytest.raises(DataError, match="no tokens"):
            next(parts)


def test_leaving_drops_what_no_one_has_waited_for(
    model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def held(model: SedemModules, document: Document) -> Segments:
        cut.append(document.name)
        begun.set()
        assert go_on.wait(10)
        return segments_of(model, document)

    monkeypatch.setattr(cutter, "segments_of", held)
    before = threading.active_count()
    with Cutter(model, DOCUMENTS) as cutting:
        assert begun.wait(10)
        assert cutting.count is None
        threading.Timer(0.05, go_on.set).start()
    assert cut == ["0.txt"]
    assert threading.active_count() <= before + 1  # the timer
