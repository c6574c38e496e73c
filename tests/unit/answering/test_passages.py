"""Passages are exact, whole sentences, and no two of them share text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from conftest import LEASE, RECIPE

from sedem import Document, MemoryBank, SeDeM
from sedem.answering.decoding import Decoding
from sedem.answering.passages import LENGTH, LONGEST, REACH
from sedem.errors import BankMismatchError, ConfigError, DataError, UnknownDocumentError
from sedem.guidance import Budget

QUESTION = "What is the rent?"


def text_of(bank: MemoryBank, name: str) -> str:
    return bank.documents[bank.documents.names.index(name)].text


def test_passages_are_exact_and_share_nothing(model: SeDeM, bank: MemoryBank) -> None:
    found = model.search(bank, QUESTION, k=50, per_document=50)
    assert [one.rank for one in found] == [*range(1, len(found) + 1)]
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    # The best block is in the first one.
    scores = model.scores(bank, QUESTION)
    first, best = found[0], bank.blocks[int(scores.argmax())]
    assert first.document == bank.documents.name(best.document)
    assert first.score == pytest.approx(float(scores.max()))
    assert first.start <= best.start < best.end <= first.end
    for one in found:
        assert one.text and one.text == text_of(bank, one.document)[one.start : one.end]
    for name in bank.documents.names:
        places = sorted((one.start, one.end) for one in found if one.document == name)
        assert all(before + 1 < after for (_, before), (after, _) in pairwise(places))
    # Every block is in one of them.
    assert {(one.document, at) for one in found for at in range(one.start, one.end)} >= {
        (bank.documents.name(block.document), block.start) for block in bank.blocks
    }


def test_passages_are_whole_sentences(model: SeDeM, bank: MemoryBank) -> None:
    ends = {at + 1 for text in (LEASE, RECIPE) for at, sign in enumerate(text) if sign in ".!?🥧"}
    for one in model.search(bank, QUESTION, k=50, per_document=1):
        text = text_of(bank, one.document)
        assert one.end in ends, one.text
        assert one.start == 0 or text[: one.start].rstrip()[-1] in ".!?🥧"


def test_a_document_gives_at_most_so_many_blocks(model: SeDeM) -> None:
    text = "\n".join(f"Line {number} of this text." for number in range(60))
    bank = model.read([Document("long.txt", text), Document("short.txt", "One line.")])
    for most in (1, 2, 3):
        found = model.search(bank, QUESTION, k=50, per_document=most)
        assert 1 <= len([one for one in found if one.document == "long.txt"]) <= most
        assert "short.txt" in {one.document for one in found}
    assert len(model.search(bank, QUESTION, k=4, per_document=50)) == 4


def test_many_neighbours_become_several_passages(model: SeDeM) -> None:
    text = "\n".join(f"Line {number} of this text." for number in range(400))
    bank = model.read([Document("long.txt", text)])
    found = model.search(bank, QUESTION, k=500, per_document=1_000)
    assert max(len(one.text) for one in found) <= LONGEST
    places = sorted((one.start, one.end) for one in found)
    assert all(before <= after for (_, before), (after, _) in pairwise(places))
    assert all(one.text == text[one.start : one.end] for one in found)


def test_a_search_can_be_limited_to_documents(model: SeDeM, bank: MemoryBank) -> None:
    for documents in (["recipe.txt"], [1]):
        found = model.search(bank, QUESTION, documents=documents)
        assert {one.document for one in found} == {"recipe.txt"}
    with pytest.raises(UnknownDocumentError, match=r"no document 'cake'.*lease\.txt"):
        model.search(bank, QUESTION, documents=["cake"])


def test_a_passage_names_its_page(model: SeDeM) -> None:
    text = f"{'First page. ' * 20}\n\n{'Second page. ' * 20}"
    second = text.index("Second")
    bank = model.read([Document("two.pdf", text, (0, second))])
    found = model.search(bank, QUESTION, k=50, per_document=1)
    assert [one.page for one in found] == [1 + (one.start >= second) for one in found]


def test_a_long_block_is_narrowed_to_the_sentences_with_the_words(model: SeDeM) -> None:
    sentences = [f"Sentence number {n} says little of interest to anybody." for n in range(60)]
    sentences[40] = "The chimney is swept by Poul Ditlevsen every autumn."
    config = model.config.with_changes(block_slots=4 * 128)
    wide = SeDeM(config, model.encoder, model.decoder).eval()
    bank = wide.read([Document("long.txt", " ".join(sentences))])
    assert max(block.end - block.start for block in bank.blocks) > 2 * LENGTH
    wide.config = config.with_changes(selection="words")
    [found] = wide.search(bank, "Who sweeps the chimney?", k=1)
    assert sentences[40] in found.text and len(found.text) <= LENGTH + 2 * REACH
    assert "chimney" in found.words


def test_a_text_without_sentences_is_bounded(model: SeDeM) -> None:
    bank = model.read([Document("endless.txt", "word " * 1000)])
    [found] = model.search(bank, QUESTION, k=1, per_document=1)
    assert 0 < len(found.text) <= LENGTH


def test_an_empty_bank_has_no_passages_and_what_cannot_be_searched_is_refused(
    model: SeDeM, bank: MemoryBank
) -> None:
    for question, options, error, words in (
        (QUESTION, {"k": 0}, ConfigError, "k is 0; it must be at least 1"),
        (QUESTION, {"per_document": 0}, ConfigError, "per_document is 0"),
        (" ", {}, DataError, "the question is empty"),
        ("\ud800", {}, DataError, "not Unicode"),
    ):
        with pytest.raises(error, match=words):
            model.search(bank, question, **options)
    other = SeDeM(model.config.with_changes(compression=8), model.encoder, model.decoder)
    with pytest.raises(BankMismatchError):
        other.search(bank, QUESTION)
    bank.remove(*bank.documents.names)
    assert model.search(bank, QUESTION) == []
    with pytest.raises(DataError, match="the question is empty"):
        model.search(bank, " ")


@pytest.mark.parametrize("k", [1, 2, 3, "all"])
def test_equal_texts_are_selected_and_cited_once(model: SeDeM, k: Budget) -> None:
    once = [Document("a.txt", LEASE), Document("b.txt", RECIPE)]
    copies = [Document(name, LEASE) for name in ("c.txt", "d.txt")]
    bank, alone = model.read([once[0], copies[0], once[1], copies[1]]), model.read(once)
    settings = Decoding(max_new_tokens=1)
    found = model.answer(bank, QUESTION, k=k, decoding=settings).citations
    expected = model.answer(alone, QUESTION, k=k, decoding=settings).citations
    assert [(c.document, c.start) for c in found] == [(c.document, c.start) for c in expected]
    for one in found:
        assert one.also == (("c.txt", "d.txt") if one.document == "a.txt" else ())
    passages = model.search(bank, QUESTION, k=9)
    assert [(p.document, p.text) for p in passages] == [
        (p.document, p.text) for p in model.search(alone, QUESTION, k=9)
    ]
    # A copy that is asked for by its name is there.
    [best, *_] = model.answer(
        bank, QUESTION, k=k, documents=["d.txt", "c.txt"], decoding=settings
    ).citations
    assert best.document == "c.txt" and best.also == ("a.txt", "d.txt")
