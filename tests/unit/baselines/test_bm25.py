"""Which paragraphs BM25 picks, and in which order they are read."""

from __future__ import annotations

import pytest
from answers import RENT, SHORT
from conftest import LEASE, RECIPE

from sedem import Document, SeDeM
from sedem.baselines.bm25 import BM25
from sedem.baselines.full_context import FullContext
from sedem.errors import ConfigError


def test_bm25_reads_the_paragraphs_that_share_words_with_the_question(model: SeDeM) -> None:
    documents = [Document(f"{n}.txt", text) for n, text in enumerate([RECIPE, LEASE, "Nothing."])]
    reader = BM25(model.decoder, SHORT, 1)
    memory = reader.read(documents)
    assert [c.document for c in reader.answer(memory, "Which deposit and rent?").citations] == [
        "1.txt"
    ]
    assert [c.document for c in reader.answer(memory, "eggs, flour, salt").citations] == ["0.txt"]
    two = BM25(model.decoder, SHORT, 2)
    assert len(two.answer(two.read(documents), "rent").citations) == 2
    for k in (99, "all"):
        many = BM25(model.decoder, SHORT, k)
        assert many.answer(many.read(documents[2:]), "rent").k == 1
    for k in (0, -1, "many"):
        none = BM25(model.decoder, SHORT, k)
        with pytest.raises(ConfigError, match=f"k is {k!r}; it must be a whole number"):
            none.answer(memory, RENT)


def test_paragraphs_are_read_in_document_order_however_they_score(model: SeDeM) -> None:
    documents = [
        Document("low.txt", "Pets need a word."),
        Document("high.txt", "The rent: rent is paid."),
        Document("other.txt", "Take two eggs."),
    ]
    question = "rent, rent or pets?"
    reader = BM25(model.decoder, SHORT, 2)
    answer = reader.answer(reader.read(documents), question)
    assert [c.document for c in answer.citations] == ["high.txt", "low.txt"]
    whole = FullContext(model.decoder, SHORT)
    in_order, by_score = (
        whole.answer(whole.read(picked), question).text
        for picked in (documents[:2], documents[1::-1])
    )
    assert answer.text == in_order != by_score
