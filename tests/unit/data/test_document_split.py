from __future__ import annotations

import pytest

from sedem import Document
from sedem.backbone.decoder import Backbone
from sedem.data.document_questions import pieces
from sedem.data.document_split import packed, split_documents, tokens_of
from sedem.errors import DataError

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
