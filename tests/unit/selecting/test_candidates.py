"""Scores are those of the selector; in a large bank, candidates have theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sedem import Document, MemoryBank, SeDeM
from sedem.bank import blocks
from sedem.bank.keys import prepare, save_keys
from sedem.selecting import candidates as search
from sedem.selecting.plan import Request, Scores, plan_of
from sedem.selecting.select import encode_questions, select

RENT = "What is the rent?"


@pytest.fixture
def bank(model: SeDeM, documents: list[Document], monkeypatch: pytest.MonkeyPatch) -> MemoryBank:
    """A bank that is searched like a large one, with five candidates a question."""
    monkeypatch.setattr(search, "COARSE_FROM", 1)
    monkeypatch.setattr(search, "CANDIDATES", 5)
    monkeypatch.setattr(search, "CANDIDATES_ALONE", 5)
    return model.read(documents)


def scored(model: SeDeM, *requests: Request) -> list[Scores]:
    plans = [plan_of(model, request) for request in requests]
    return [found.scores for found in select(model, model.engine, plans)]


@pytest.mark.parametrize("keys", ["made", "cached", "stored"])
def test_candidates_have_exact_scores(
    keys: str, model: SeDeM, bank: MemoryBank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "SCAN", 3)
    if keys == "cached":
        prepare(bank, model.selector)
    elif keys == "stored":
        bank.save(tmp_path / "a.bank")
        bank = MemoryBank.open(tmp_path / "a.bank")
        save_keys(bank, model.selector)
    exact = model.scores(bank, RENT)
    found = scored(model, Request(bank, RENT, k=2))[0].total
    is_candidate = found > -torch.inf
    assert is_candidate.sum() == 5 < len(bank)
    torch.testing.assert_close(found[is_candidate], exact[is_candidate])
    codes = search.bank_codes(bank, model.selector)
    states, _ = encode_questions(model, model.engine, [RENT])
    query_E = model.selector.queries(states)[0].mean(0).flatten().detach()
    assert set(codes.nearest(query_E, 5).tolist()) == set(is_candidate.nonzero()[:, 0].tolist())


@pytest.mark.parametrize(
    "needs", [{"k": "all"}, {"k": 6}, {"ranking": True}, {"blocks": [0, 1]}, {"k": 2}]
)
def test_small_banks_and_requests_that_need_it_get_every_score(
    needs: dict[str, Any], model: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    if needs == {"k": 2}:
        monkeypatch.setattr(search, "COARSE_FROM", len(bank))
    found = scored(model, Request(bank, RENT, **needs))[0].total
    torch.testing.assert_close(found, model.scores(bank, RENT))


def test_blocks_with_words_of_the_question_are_candidates_too(
    model: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "CANDIDATES", 1)
    bank.append(model.read([Document("other.txt", "Nothing but Xanthippe. " * 3)]))
    by_states, by_both = scored(
        model,
        Request(bank, "Who is Xanthippe?", selection="states", k=1),
        Request(bank, "Who is Xanthippe?", selection="both", k=1),
    )
    assert (by_states.total > -torch.inf).sum() == search.CANDIDATES_ALONE == 5
    assert by_both.states is not None
    assert by_both.words is not None
    held = by_both.words.scores > 0
    is_candidate = by_both.states > -torch.inf
    assert is_candidate[held].all()
    assert (is_candidate & ~held).sum() <= search.CANDIDATES
    wanted = int(by_both.words.scores.argmax())
    assert by_both.words.matching(wanted) == ("Xanthippe",)
    exact = model.scores(bank, "Who is Xanthippe?")
    torch.testing.assert_close(by_both.states[wanted], exact[wanted])
    expected = exact[wanted] + model.config.word_weight * by_both.words.scores[wanted]
    torch.testing.assert_close(by_both.total[wanted], expected)
