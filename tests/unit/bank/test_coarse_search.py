"""In a large bank pooled keys give candidates, and candidates have their exact scores."""

from __future__ import annotations

import pytest
import torch

from sedem import Document, MemoryBank, SeDeM
from sedem.answering.requests import Request, encode_questions
from sedem.answering.scores import score_requests
from sedem.bank import blocks, coarse_search
from sedem.bank.coarse_search import pool_keys
from sedem.bank.keys import forget_keys, key_index, prepare, save_keys
from sedem.quantization import Quantized

RENT = "What is the rent?"


@pytest.fixture
def bank(model: SeDeM, documents: list[Document], monkeypatch: pytest.MonkeyPatch) -> MemoryBank:
    """A bank that is searched like a large one, with five candidates a question."""
    monkeypatch.setattr(coarse_search, "FROM", 1)
    monkeypatch.setattr(coarse_search, "COUNT", 5)
    return model.read(documents)


def scored(model: SeDeM, *requests: Request) -> list[torch.Tensor]:
    states = encode_questions(model, model.engine, [request.question for request in requests])
    return score_requests(model, requests, *states)


def test_pooled_keys_are_means_of_real_slots_and_groups_of_padding_are_marked() -> None:
    keys = torch.randn(2, 4, 3, 5)
    pooled, empty = pool_keys(Quantized(keys), torch.tensor([3, 6, 7]), 2)
    expected = [[keys[0, :2].mean(0), keys[0, 2]], [keys[1, :2].mean(0), torch.zeros(3, 5)]]
    stacked = torch.stack([torch.stack(row) for row in expected])
    assert torch.equal(pooled.values, torch.nn.functional.normalize(stacked, dim=-1).bfloat16())
    assert empty.tolist() == [[False, False], [False, True]]


@pytest.mark.parametrize("keys", ["made", "cached", "stored"])
def test_candidates_have_their_exact_scores_and_other_blocks_none(
    keys: str, model: SeDeM, bank: MemoryBank, tmp_path: object
) -> None:
    if keys == "cached":
        prepare(bank, model.selector, None)
    elif keys == "stored":
        bank.save(f"{tmp_path}/a.bank")
        bank = MemoryBank.open(f"{tmp_path}/a.bank")
        save_keys(bank, model.selector)
    exact = model.scores(bank, RENT)
    (found,) = scored(model, Request(bank, RENT, k=2))
    is_candidate = found > -torch.inf
    assert is_candidate.sum() == 5
    torch.testing.assert_close(found[is_candidate], exact[is_candidate])


@pytest.mark.parametrize("cached", [True, False])
def test_keys_are_pooled_in_parts_whether_they_are_cached_or_not(
    cached: bool, model: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = scored(model, Request(bank, RENT, k=2))
    pooled = key_index(bank, model.selector).pooled
    forget_keys(bank)
    if cached:
        prepare(bank, model.selector, None)
    sizes = []

    def spied(keys: Quantized, padding: torch.Tensor) -> object:
        sizes.append(len(keys))
        return pool_keys(keys, padding)

    monkeypatch.setattr(blocks, "SCAN", 3)
    monkeypatch.setattr(coarse_search, "pool_keys", spied)
    (found,) = scored(model, Request(bank, RENT, k=2))
    assert max(sizes) == 3 < len(bank) == sum(sizes)
    torch.testing.assert_close(found, expected)
    again = key_index(bank, model.selector).pooled
    assert pooled is not None and again is not None
    assert torch.equal(again[0].values, pooled[0].values) and torch.equal(again[1], pooled[1])


def test_with_as_many_groups_as_slots_the_best_candidates_are_the_best_blocks(
    model: SeDeM, bank: MemoryBank
) -> None:
    exact = model.scores(bank, RENT)
    (found,) = scored(model, Request(bank, RENT, k=2))
    assert found.topk(3).indices.tolist() == exact.topk(3).indices.tolist()


@pytest.mark.parametrize(
    "request_of",
    [
        lambda bank: Request(bank, RENT, k="all"),
        lambda bank: Request(bank, RENT, k=6),
        lambda bank: Request(bank, RENT, ranking=True),
        lambda bank: Request(bank, RENT, blocks=[0, 1]),
    ],
)
def test_requests_that_need_every_score_get_every_score(
    request_of: object, model: SeDeM, bank: MemoryBank
) -> None:
    (found,) = scored(model, request_of(bank))  # type: ignore[operator]
    torch.testing.assert_close(found, model.scores(bank, RENT))


def test_a_bank_at_the_limit_is_scored_exactly(
    model: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coarse_search, "FROM", len(bank))
    (found,) = scored(model, Request(bank, RENT, k=2))
    assert torch.equal(found, model.scores(bank, RENT))


def test_pooled_keys_follow_an_append(model: SeDeM, bank: MemoryBank) -> None:
    scored(model, Request(bank, RENT, k=2))
    bank.append(model.read([Document("other.txt", "The rent is low. " * 9)]))
    (found,) = scored(model, Request(bank, RENT, k=2))
    assert len(found) == len(bank)
    answer = model.answer(bank, RENT, k=2)
    assert [c.score for c in answer.citations] == sorted(found.tolist(), reverse=True)[:2]


def test_requests_to_several_banks_get_scores_of_their_own_bank(
    model: SeDeM, documents: list[Document]
) -> None:
    one, other = model.read(documents[:1]), model.read(documents[1:])
    asked = [Request(one, RENT), Request(other, "How long?"), Request(one, "When may one leave?")]
    for request, found in zip(asked, scored(model, *asked), strict=True):
        torch.testing.assert_close(found, model.scores(request.bank, request.question))
