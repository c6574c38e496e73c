from __future__ import annotations

from collections import Counter

import pytest

from sedem import Document
from sedem.backbone.decoder import Backbone
from sedem.bank.blocks import BlockRow
from sedem.demo import DOCUMENTS
from sedem.errors import DataError
from sedem_lab.data.cloze import DOCUMENTS as CONTEXT
from sedem_lab.data.cloze import Cloze
from sedem_lab.data.document_questions import (
    LONG_PIECE,
    SHORT_PIECE,
    blanks,
    packed,
    pieces,
    questions,
    split_documents,
    tokens_of,
)
from sedem_lab.data.labels import from_answers, labelling_of

TEXTS = [Document(path.name, path.read_text("utf-8")) for path in sorted(DOCUMENTS.glob("*.txt"))]


def test_pieces_lose_only_white_space() -> None:
    for document in TEXTS:
        cut = pieces(document.text)
        assert " ".join(cut) == " ".join(document.text.split())
        assert max(map(len, cut)) <= LONG_PIECE
        assert min(map(len, cut[:-1])) >= SHORT_PIECE / 2


def test_a_piece_ends_with_a_paragraph_and_otherwise_with_a_sentence() -> None:
    paragraph = "The flat in Mill Lane is let.\n" * 8
    assert pieces(f"# Lease\n\n{paragraph}\n\n{paragraph}") == [
        " ".join(f"# Lease {paragraph}".split()),
        " ".join(paragraph.split()),
    ]
    assert all(piece.endswith("let.") for piece in pieces(paragraph * 10))
    assert pieces(" \n\n ") == []
    assert "".join(pieces("x" * (2 * LONG_PIECE))) == "x" * (2 * LONG_PIECE)


def test_what_occurs_once_is_asked_about_and_found_by_its_words() -> None:
    piece = (
        "The ship left the harbour of Danzig in June 1921 with all hands. "
        "Der Kapitän hatte am Abend vorher die Laterne aus Messing geputzt."
    )
    occurring = Counter(word.lower() for word in piece.rstrip(".").replace(".", "").split())
    occurring["messing"] = 2
    known, rare = blanks(piece, occurring)
    assert known.answer == "June 1921" and known.end
    question = "Der what am Abend vorher die Laterne aus Messing geputzt?"
    assert rare == Cloze(question, "Kapitän hatte")


def test_questions_have_their_answer_in_one_context_and_the_rest_around_it() -> None:
    made = questions(TEXTS[:2], TEXTS, count=1000)
    assert len(made.examples) > 20 and not made.noted
    for example in made.examples:
        assert len(example.documents) == CONTEXT
        texts = [document.text for document in example.documents]
        assert len(set(texts)) == CONTEXT
        [answer] = example.answers
        assert f" {answer} " not in example.question
        if labelling_of(example, "evidence") == "evidence":
            [span] = example.evidence
            assert answer in texts[span.document][span.start : span.end]
        else:
            whole = [BlockRow(i, 0, len(text), ()) for i, text in enumerate(texts)]
            assert sum(from_answers(whole, example.documents, [answer])) == 1
    kinds = Counter(bool(example.evidence) for example in made.examples)
    assert kinds[True] and kinds[False]


def test_questions_are_the_same_every_time_and_those_over_the_limit_are_counted() -> None:
    every, some = (questions(TEXTS, TEXTS, count=count) for count in (1000, 5))
    assert some.examples == every.examples[:5]
    # Few pieces make a small context.
    short = Document("short.txt", TEXTS[0].text[:2500])
    count = len(pieces(short.text))
    assert 1 < count < CONTEXT
    few = questions([short], [short], count=10).examples
    assert {len(example.documents) for example in few} == {count}
    assert some.noted == {"questions that are not used": len(every.examples) - 5}
    assert questions(TEXTS, TEXTS, count=5, seed=1).examples != some.examples


SENTENCE = "The flat in Mill Lane is let from the first of May. "


def documents(*lengths: int) -> list[Document]:
    return [Document(f"{i}.txt", SENTENCE * length) for i, length in enumerate(lengths)]


def test_a_share_of_the_documents_is_held_out() -> None:
    given = documents(*[4] * 30)
    training, held_out = split_documents(given, 0.1, seed=0)
    assert len(held_out) == 3
    assert sorted(d.name for d in [*training, *held_out]) == sorted(d.name for d in given)
    assert split_documents(given, 0.1, seed=0) == (training, held_out)
    assert split_documents(given, 0.1, seed=1)[1] != held_out


@pytest.mark.parametrize("seed", range(5))
def test_a_long_document_is_trained_on_and_a_short_one_is_not_held_out_alone(seed: int) -> None:
    training, held_out = split_documents(documents(1, 100, 30, 30), 0.1, seed)
    assert "1.txt" in {document.name for document in training}
    assert sum(len(d.text) for d in held_out) >= 0.1 * 161 * len(SENTENCE)


def test_of_a_single_document_the_last_part_is_held_out() -> None:
    [given] = documents(200)
    (training,), (held_out,) = split_documents([given], 0.1, seed=0)
    assert pieces(f"{training.text} {held_out.text}") == pieces(given.text)
    assert 0.05 < len(held_out.text) / len(given.text) < 0.2
    with pytest.raises(DataError, match=r"'0\.txt' has 52 characters, too few .* give more"):
        split_documents(documents(1), 0.1, seed=0)


def test_short_documents_are_joined_until_windows_fit(backbone: Backbone) -> None:
    given = documents(1, 1, 1, 40, 1)
    texts = packed(given, backbone, window=32)
    assert min(tokens_of(texts, backbone)) >= 4 * 32
    assert "".join(texts).replace("\n", "") == "".join(d.text for d in given)
