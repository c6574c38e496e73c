"""In a large bank pooled keys give candidates, and candidates have their exact scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sedem import Document, MemoryBank, SeDeM
from sedem.answering.requests import Request, encode_questions, score_requests
from sedem.bank import blocks, search
from sedem.bank.keys import key_index, prepare, save_keys
from sedem.bank.search import pool_keys
from sedem.quantization import Quantized

RENT = "What is the rent?"


@pytest.fixture
def bank(model: SeDeM, documents: list[Document], monkeypatch: pytest.MonkeyPatch) -> MemoryBank:
    """A bank that is searched like a large one, with five candidates a question."""
    monkeypatch.setattr(search, "COARSE_FROM", 1)
    monkeypatch.setattr(search, "CANDIDATES", 5)
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
        prepare(bank, model.selector)
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
    again = model.read(bank.documents)
    if cached:
        prepare(again, model.selector)
    sizes = []

    def spied(keys: Quantized, padding: torch.Tensor) -> object:
        sizes.append(len(keys))
        return pool_keys(keys, padding)

    monkeypatch.setattr(blocks, "SCAN", 3)
    monkeypatch.setattr(search, "pool_keys", spied)
    (found,) = scored(model, Request(again, RENT, k=2))
    assert max(sizes) == 3 < len(again) == sum(sizes)
    torch.testing.assert_close(found, expected)
    pooled = [key_index(one, model.selector).pooled for one in (bank, again)]
    for keys, padding in pooled[1:]:  # type: ignore[misc]
        assert torch.equal(keys.values, pooled[0][0].values)  # type: ignore[index]
        assert torch.equal(padding, pooled[0][1])  # type: ignore[index]


def test_with_as_many_groups_as_slots_the_best_candidates_are_the_best_blocks(
    model: SeDeM, bank: MemoryBank
) -> None:
    exact = model.scores(bank, RENT)
    (found,) = scored(model, Request(bank, RENT, k=2))
    assert found.topk(3).indices.tolist() == exact.topk(3).indices.tolist()


@pytest.mark.parametrize(
    "needs", [{"k": "all"}, {"k": 6}, {"ranking": True}, {"blocks": [0, 1]}, {"k": 2}]
)
def test_small_banks_and_requests_that_need_it_get_every_score(
    needs: dict[str, Any], model: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    if needs == {"k": 2}:
        monkeypatch.setattr(search, "COARSE_FROM", len(bank))
    (found,) = scored(model, Request(bank, RENT, **needs))
    torch.testing.assert_close(found, model.scores(bank, RENT))


def test_pooled_keys_follow_an_append(model: SeDeM, bank: MemoryBank) -> None:
    scored(model, Request(bank, RENT, k=2))
    bank.append(model.read([Document("other.txt", "The rent is low. " * 9)]))
    (found,) = scored(model, Request(bank, RENT, k=2))
    assert len(found) == len(bank)
    answer = model.answer(bank, RENT, k=2)
    assert [c.score for c in answer.citations] == sorted(found.tolist(), reverse=True)[:2]
