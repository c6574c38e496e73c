"""What the full-context reader reads, cites and refuses."""

from __future__ import annotations

import re

import pytest
from answers import RENT, SHORT, assert_cites
from conftest import LEASE, RECIPE

from sedem import Document, SeDeM
from sedem.baselines.bm25 import BM25
from sedem.baselines.full_context import FullContext
from sedem.errors import DataError


def test_full_context_reads_documents_in_their_order(model: SeDeM) -> None:
    documents = [Document("a.txt", LEASE[:100]), Document("b.txt", RECIPE[:100])]
    reader = FullContext(model.decoder, SHORT)
    one, other = (reader.answer(reader.read(d), RENT) for d in (documents, documents[::-1]))
    assert [c.document for c in one.citations] == ["a.txt", "b.txt"]
    assert [c.document for c in other.citations] == ["b.txt", "a.txt"]
    assert one.text != other.text


def test_a_question_too_long_for_raw_text_is_refused_with_the_numbers(
    model: SeDeM, documents: list[Document]
) -> None:
    for reader in (FullContext(model.decoder, SHORT), BM25(model.decoder, SHORT, 1)):
        with pytest.raises(DataError, match=r"520 tokens and an answer of up to 12 exceed the 512"):
            reader.answer(reader.read(documents), "?" * 500)


def test_only_what_was_read_is_cited(model: SeDeM) -> None:
    """Text that does not fit the positions conditioned nothing; BM25 reads it in pieces."""
    texts = {"a.txt": f"  {LEASE}\n", "b.txt": f"\n{LEASE}", "c.txt": "lost"}
    documents = [Document(name, text) for name, text in texts.items()]
    whole, pieces = FullContext(model.decoder, SHORT), BM25(model.decoder, SHORT, "all")
    answer = whole.answer(whole.read(documents), RENT)
    assert_cites(answer, documents)
    fit = int(re.search(r"first (\d+) fit", answer.cut[0]).group(1))
    cited = {c.document: c.text for c in answer.citations}
    assert cited == {"a.txt": texts["a.txt"], "b.txt": texts["b.txt"][: fit - len(LEASE) - 1]}
    assert answer.blocks == 3
    answer = pieces.answer(pieces.read(documents), RENT)
    assert_cites(answer, documents)
    fit = int(re.search(r"first (\d+) fit", answer.cut[1]).group(1))
    assert sum(len(c.text) + 2 for c in answer.citations) - 2 == fit
    assert answer.blocks == 5 > answer.k
