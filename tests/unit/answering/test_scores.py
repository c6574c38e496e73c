"""Questions to some documents of a bank: no block of another one is used or counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from answers import QUESTIONS, RENT, SHORT, assert_same_sources, build, untimed

from sedem import Auto, Document, MemoryBank, SeDeM, SedemConfig
from sedem.answering.requests import Request
from sedem.backbone.decoder import Backbone
from sedem.bank import search
from sedem.errors import ConfigError, UnknownDocumentError


class Lead(torch.nn.Module):
    """A confidence that is a feature, so that other scores show."""

    def forward(self, features_BF: torch.Tensor) -> torch.Tensor:
        return features_BF.sum(1)


def of(bank: MemoryBank, document: int) -> list[int]:
    return [index for index, row in enumerate(bank.blocks) if row.document == document]


@pytest.mark.parametrize("document", [0, 1, "lease.txt", "recipe.txt"])
@pytest.mark.parametrize("k", [1, 3, 29, "all"])
def test_one_document_of_two_answers_as_a_bank_of_its_own(
    document: int | str, k: int | str, model: SeDeM, documents: list[Document], bank: MemoryBank
) -> None:
    model.confidence = Lead()  # type: ignore[assignment]
    (own,) = (d for i, d in enumerate(documents) if document in (i, d.name))
    alone = model.read([own])
    for question in QUESTIONS:
        answer = model.answer(bank, question, k=k, decoding=SHORT, documents=[document])
        expected = model.answer(alone, question, k=k, decoding=SHORT)
        assert answer.text == expected.text
        assert answer.k == expected.k <= len(alone)
        assert answer.confidence == pytest.approx(expected.confidence, abs=1e-5)
        assert_same_sources(replace(answer, blocks=expected.blocks), expected)


def test_all_documents_by_name_and_index_are_no_restriction(model: SeDeM, bank: MemoryBank) -> None:
    expected = untimed(model.answer(bank, RENT, k=5, decoding=SHORT))
    for documents in ([0, 1], ["recipe.txt", 0], [1, 1, 0, "lease.txt"], None):
        answer = model.answer(bank, RENT, k=5, decoding=SHORT, documents=documents)
        assert untimed(answer) == expected


def test_auto_takes_no_more_than_there_are(
    config: SedemConfig, backbone: Backbone, documents: list[Document]
) -> None:
    model = build(config, backbone, guidance=True, auto_max=40)
    bank = model.read(documents)
    whole = Auto(mass=1.0, least=40)
    for document in (0, 1):
        answer = model.answer(bank, RENT, k=whole, decoding=SHORT, documents=[document])
        assert answer.k == len(of(bank, document))
        assert {c.document for c in answer.citations} == {documents[document].name}


def test_a_ranking_lists_the_blocks_of_these_documents(model: SeDeM, bank: MemoryBank) -> None:
    (answer,) = model.answer_requests([Request(bank, RENT, 1, ranking=True, documents=[1])], SHORT)
    assert answer.ranking is not None
    assert len(answer.ranking) == len(of(bank, 1))
    assert {name for name, _, _ in answer.ranking} == {"recipe.txt"}


def test_a_batch_may_ask_documents_of_each_question_its_own(model: SeDeM, bank: MemoryBank) -> None:
    requests = [Request(bank, RENT, 2, documents=d) for d in ([0], None, [1])]
    together = model.answer_requests(requests, SHORT)
    for request, answer in zip(requests, together, strict=True):
        (alone,) = model.answer_requests([request], SHORT)
        assert_same_sources(answer, alone)


def test_a_large_bank_is_not_searched_for_candidates_of_other_documents(
    model: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = model.answer(bank, RENT, k=4, decoding=SHORT, documents=[1])
    monkeypatch.setattr(search, "COARSE_FROM", 1)
    monkeypatch.setattr(search, "CANDIDATES", 4)
    answer = model.answer(bank, RENT, k=4, decoding=SHORT, documents=[1])
    assert untimed(answer) == untimed(expected)


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ([], ConfigError, "documents is empty; give at least one"),
        ([2], ConfigError, "document 2 was asked for, the bank has 2"),
        ([-1], ConfigError, "document -1 was asked for"),
        (["x"], UnknownDocumentError, "the bank has no document 'x'; it has lease.txt, recipe.txt"),
    ],
)
def test_documents_that_are_not_there_are_refused(
    asked: list[Any], error: type[Exception], words: str, model: SeDeM, bank: MemoryBank
) -> None:
    with pytest.raises(error, match=words):
        model.answer(bank, RENT, documents=asked)


def test_blocks_and_documents_together_are_refused(model: SeDeM, bank: MemoryBank) -> None:
    with pytest.raises(ConfigError, match="both blocks and documents"):
        model.answer(bank, RENT, blocks=[0], documents=[0])
