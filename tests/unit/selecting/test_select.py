"""Which blocks a question uses, and which questions are refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import QUESTIONS, RENT, SHORT, assert_same_sources, build, untimed
from conftest import LEASE, POSITIONS

from sedem import Auto, Document, MemoryBank, SeDeM, SedemConfig
from sedem.answering.decoding import Decoding
from sedem.backbone.decoder import Backbone
from sedem.bank import blocks as bank_blocks
from sedem.bank import index
from sedem.bank.index import bank_codes
from sedem.errors import ConfigError, DataError, UnknownDocumentError
from sedem.selecting import select as search
from sedem.selecting.plan import Request, Scores, check_fits, plan_of, prepare
from sedem.selecting.select import choose, encode_questions, select, telling_tokens


def test_forcing_the_blocks_that_would_be_selected_changes_nothing(
    model: SeDeM, bank: MemoryBank
) -> None:
    best = model.scores(bank, RENT).argsort(descending=True).tolist()[:3]
    for k, blocks in (("all", range(len(bank))), (3, best)):
        selected = model.answer(bank, RENT, k=k, decoding=SHORT)
        assert untimed(selected) == untimed(
            model.answer(bank, RENT, k=1, blocks=blocks, decoding=SHORT)
        )


WITHOUT = "this model was trained without guidance"
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"question": "?" * 512}, DataError, "has 512 tokens, the model reads at most 511; ask"),
    ({"question": "?" * 10_000}, DataError, "has 10,000 tokens, the model reads at most 511"),
    ({"question": "?" * 480, "k": 1}, ConfigError, "the decoder has 512; ask something shorter"),
    ({"blocks": [0, -1]}, ConfigError, "block -1 was asked for, the bank has 29"),
    ({"blocks": [0, 29]}, ConfigError, "block 29 was asked for, the bank has 29"),
    ({"blocks": [0], "documents": [0]}, ConfigError, "both blocks and documents"),
    ({"documents": []}, ConfigError, "documents is empty; give at least one"),
    ({"documents": [2]}, ConfigError, "document 2 was asked for, the bank has 2"),
    ({"documents": [-1]}, ConfigError, "document -1 was asked for"),
    ({"documents": ["x"]}, UnknownDocumentError, "no document 'x'; it has 'lease.txt', 'recipe"),
    ({"condition": "words"}, ConfigError, "condition is 'words'; it can be memory, text, both"),
    ({"condition": "text", "k": "all"}, ConfigError, "use a smaller k, or read blocks as memory"),
    ({"k": "auto"}, ConfigError, f"k is 'auto', but {WITHOUT}"),
    ({"k": Auto(0.5, 1, 2)}, ConfigError, f"k is 'auto', but {WITHOUT}"),
    ({"answer": "quote"}, ConfigError, "answer is 'quote'; it can be free, span, auto"),
    ({"hops": 2}, ConfigError, "hops is 2, but this model has no second hop"),
    ({"hops": 3}, ConfigError, "hops is '3'; it can be 1, 2, auto"),
    ({"min_confidence": 0.5}, ConfigError, "this model gives no confidence; fit it with"),
    *(
        ({"min_confidence": x}, ConfigError, f"min_confidence is {x!r}; it must be a number from 0")
        for x in (-0.1, 1.5, True, "high", math.nan)
    ),
]


@pytest.mark.parametrize(("options", "error", "words"), REFUSED)
def test_what_cannot_be_asked_is_refused(
    options: dict[str, Any], error: type[Exception], words: str, model: SeDeM, bank: MemoryBank
) -> None:
    with pytest.raises(error, match=words):
        model.answer(bank, **{"question": RENT, **options})


def test_other_blocks_give_another_answer(model: SeDeM, bank: MemoryBank) -> None:
    texts = {model.answer(bank, RENT, blocks=[i], decoding=SHORT).text for i in range(6)}
    assert len(texts) > 1


# Budgets by need


@pytest.fixture
def guided(config: SedemConfig, backbone: Backbone) -> SeDeM:
    """A model with guidance, whose tau is small enough to tell the tiny model's blocks apart."""
    model = build(config, backbone, guidance=True, auto_max=6)
    assert model.guidance is not None
    torch.nn.init.constant_(model.guidance.log_tau, -3.0)
    return model


def test_auto_uses_the_fewest_blocks_that_have_the_mass(
    guided: SeDeM, documents: list[Document]
) -> None:
    bank, used = guided.read(documents), set()
    for question in QUESTIONS:
        best = sorted(guided.scores(bank, question).tolist(), reverse=True)[:6]
        weights = [math.exp((score - best[0]) / math.exp(-3.0)) for score in best]
        enough = [k for k in range(1, 7) if sum(weights[:k]) >= 0.95 * sum(weights)]
        answer = guided.answer(bank, question, k="auto", decoding=SHORT)
        assert answer.k == len(answer.citations) == enough[0]
        used.add(answer.k)
        fixed = guided.answer(bank, question, k=answer.k, decoding=SHORT)
        assert untimed(fixed) == untimed(answer)
    assert len(used) > 1


def test_mass_and_limits_of_auto_can_be_given_with_a_question(
    guided: SeDeM, documents: list[Document]
) -> None:
    bank = guided.read(documents)

    def used(**limits: float | int) -> int:
        return guided.answer(bank, RENT, k=Auto(**limits), decoding=SHORT).k

    assert used(mass=0.0) == 1
    assert used(mass=1.0) == 6
    assert used(mass=1.0, most=9) == 9
    assert used(mass=0.0, least=4) == 4
    assert used() == guided.answer(bank, RENT, k="auto", decoding=SHORT).k


def test_auto_may_be_the_models_own_budget(guided: SeDeM, documents: list[Document]) -> None:
    bank = guided.read(documents)
    expected = guided.answer(bank, RENT, k="auto", decoding=SHORT)
    guided.config = guided.config.with_changes(k="auto")
    assert untimed(guided.answer(bank, RENT, decoding=SHORT)) == untimed(expected)


def test_auto_scores_every_block_only_if_it_may_use_more_than_the_candidates(
    guided: SeDeM, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "COARSE_FROM", 1)
    monkeypatch.setattr(search, "CANDIDATES", 7)
    monkeypatch.setattr(search, "CANDIDATES_ALONE", 7)
    bank = guided.read(documents)

    def scored(k: Auto | str) -> int:
        [found] = select(guided, guided.engine, [plan_of(guided, Request(bank, RENT, k))])
        return int((found.scores.total > -torch.inf).sum())

    assert scored("auto") == scored(Auto(most=7)) == 7
    assert scored(Auto(most=8)) == len(bank)


def test_blocks_stand_in_document_order(model: SeDeM, bank: MemoryBank) -> None:
    scores = model.scores(bank, RENT)
    selection = choose(model, plan_of(model, Request(bank, RENT, k=6)), Scores(scores))
    assert selection.ranked == scores.argsort(descending=True).tolist()[:6]
    assert selection.ranked != sorted(selection.ranked), "in this bank the two orders must differ"
    assert selection.memory == sorted(selection.ranked)


def positions_of(error: pytest.ExceptionInfo[ConfigError]) -> dict[str, int]:
    found = re.search(
        r"(?P<states>[\d,]+) selected states, (?P<prompt>[\d,]+) prompt tokens and an answer of up "
        r"to (?P<answer>[\d,]+) tokens make (?P<sum>[\d,]+) positions, the decoder has "
        r"(?P<room>[\d,]+); use k of at most (?P<most>[\d,]+)$",
        str(error.value),
    )
    assert found is not None, str(error.value)
    return {name: int(number.replace(",", "")) for name, number in found.groupdict().items()}


@pytest.mark.parametrize(
    ("segmentation", "block_slots"), [("window", 4), ("sentence", 2), ("paragraph", 8)]
)
def test_too_many_states_are_refused_with_the_largest_k_that_fits(
    segmentation: str, block_slots: int, config: SedemConfig, backbone: Backbone
) -> None:
    model = build(config, backbone, block_slots=block_slots, segmentation=segmentation)
    text = "\n\n".join(f"{LEASE} Paragraph {n}.\n\nYes {n}." for n in range(4))
    bank = model.read([Document("long.txt", text)])
    with pytest.raises(ConfigError) as error:
        model.answer(bank, RENT, k="all", decoding=SHORT)
    found = positions_of(error)
    assert found["states"] == sum(sum(block.slot_tokens) for block in bank.blocks)
    assert found["sum"] == found["states"] + found["prompt"] + found["answer"]
    assert (found["answer"], found["room"]) == (12, POSITIONS)
    assert model.answer(bank, RENT, k=found["most"], decoding=SHORT).k == found["most"]
    with pytest.raises(ConfigError, match=f"use k of at most {found['most']}$"):
        model.answer(bank, RENT, k=found["most"] + 1, decoding=SHORT)


def test_states_prompt_and_answer_may_fill_every_position(model: SeDeM) -> None:
    check_fits(model, [300, 100], prefix=100, limit=POSITIONS - 500)
    for states, prefix, limit in (
        ([300, 101], 100, POSITIONS - 500),
        ([300, 100], 101, POSITIONS - 500),
        ([300, 100], 100, POSITIONS - 499),
    ):
        with pytest.raises(ConfigError, match="make 513 positions, the decoder has 512; use k of"):
            check_fits(model, states, prefix, limit)


@pytest.mark.parametrize(
    ("condition", "texts", "memory"),
    [("memory", [], [0, 2, 3]), ("text", [0, 2, 3], []), ("both", [3], [0, 2])],
)
def test_the_condition_says_which_blocks_are_read_as_text(
    model: SeDeM, bank: MemoryBank, condition: Any, texts: list[int], memory: list[int]
) -> None:
    scores = torch.zeros(len(bank))
    scores[[3, 0, 2]] = torch.tensor([3.0, 2.0, 1.0])
    request = Request(bank, "What is the rent?", 3, condition=condition)
    plan = plan_of(model, request)
    selection = choose(model, plan, Scores(scores))
    assert (selection.ranked, selection.texts, selection.memory) == ([3, 0, 2], texts, memory)
    prefix = model.decoder.tokenizer.decode(prepare(model, plan, selection, 3).inputs.prefix[1:])
    before = "\n\n".join(bank.block_text(index).strip() for index in texts)
    assert prefix == f"{before}\n\nQuestion: What is the rent?\nAnswer:"
    answer = model.answer_requests([request], Decoding(3))[0]
    own = choose(model, plan, Scores(model.scores(bank, request.question)))
    assert answer.k == 3
    # What the decoder saw, whatever its form.
    states = int(bank.slot_tokens(own.memory).sum()) if own.memory else 0
    assert answer.conditioning == states + len(prepare(model, plan, own, 3).inputs.prefix)


# Questions to some documents of a bank: no block of another one is used or counts


class Lead(torch.nn.Module):
    """A confidence that is a feature, so that other scores show."""

    def forward(self, features_BF: torch.Tensor) -> torch.Tensor:
        return features_BF.sum(1)


def of(bank: MemoryBank, document: int) -> list[int]:
    return [index for index, row in enumerate(bank.blocks) if row.document == document]


@pytest.mark.parametrize("document", [0, "recipe.txt"])
@pytest.mark.parametrize("k", [1, 3, "all"])
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


def test_a_large_bank_is_not_searched_for_candidates_of_other_documents(
    model: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = model.answer(bank, RENT, k=4, decoding=SHORT, documents=[1])
    monkeypatch.setattr(search, "COARSE_FROM", 1)
    monkeypatch.setattr(search, "CANDIDATES", 4)
    monkeypatch.setattr(search, "CANDIDATES_ALONE", 4)
    answer = model.answer(bank, RENT, k=4, decoding=SHORT, documents=[1])
    assert untimed(answer) == untimed(expected)


# Candidates in a large bank


@pytest.fixture
def large(model: SeDeM, documents: list[Document], monkeypatch: pytest.MonkeyPatch) -> MemoryBank:
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
    keys: str, model: SeDeM, large: MemoryBank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bank_blocks, "SCAN", 3)
    if keys == "cached":
        index.prepare(large, model.selector)
    elif keys == "stored":
        large.save(tmp_path / "a.bank")
        large = MemoryBank.open(tmp_path / "a.bank")
        index.save_keys(large, model.selector)
    exact = model.scores(large, RENT)
    found = scored(model, Request(large, RENT, k=2))[0].total
    is_candidate = found > -torch.inf
    assert is_candidate.sum() == 5 < len(large)
    torch.testing.assert_close(found[is_candidate], exact[is_candidate])
    codes = bank_codes(large, model.selector)
    states, mask_1Q = encode_questions(model, model.engine, [RENT])
    telling_1Q = telling_tokens(model, [RENT], mask_1Q)
    assert 0 < telling_1Q.sum() < mask_1Q.sum()
    query_E = model.selector.queries(states)[telling_1Q].mean(0).flatten().detach()
    assert set(codes.nearest(query_E, 5).tolist()) == set(is_candidate.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("once", [False, True])
def test_words_of_grammar_and_signs_find_no_candidates(
    once: bool, config: SedemConfig, backbone: Backbone
) -> None:
    model = build(config, backbone, read_once=once, block_context="independent")
    asked = {
        "  How high is the rent of Zoë's flat? ": "high rent Zoë s flat",
        "Wie hoch ist die Miete?": "hoch Miete",
        "日本の首都は？": "日本の首都は",
        "Who is it?": "Who is it?",
        "?": "?",
    }
    _, mask_BQ = encode_questions(model, model.engine, [*asked])
    telling_BQ = telling_tokens(model, [*asked], mask_BQ)
    assert not (telling_BQ & ~mask_BQ).any()
    for question, own_Q, kept in zip(asked, telling_BQ, asked.values(), strict=True):
        ids = model.encoder.token_ids(question.strip())
        found = [token for token, is_own in zip(ids, own_Q.tolist(), strict=False) if is_own]
        assert model.encoder.tokenizer.decode(found).replace(" ", "") == kept.replace(" ", "")


@pytest.mark.parametrize(
    "needs", [{"k": "all"}, {"k": 6}, {"ranking": True}, {"blocks": [0, 1]}, {"k": 2}]
)
def test_small_banks_and_requests_that_need_it_get_every_score(
    needs: dict[str, Any], model: SeDeM, large: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    if needs == {"k": 2}:
        monkeypatch.setattr(search, "COARSE_FROM", len(large))
    found = scored(model, Request(large, RENT, **needs))[0].total
    torch.testing.assert_close(found, model.scores(large, RENT))


def test_blocks_with_words_of_the_question_are_candidates_too(
    model: SeDeM, large: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "CANDIDATES", 1)
    large.append(model.read([Document("other.txt", "Nothing but Xanthippe. " * 3)]))
    by_states, by_both = scored(
        model,
        Request(large, "Who is Xanthippe?", selection="states", k=1),
        Request(large, "Who is Xanthippe?", selection="both", k=1),
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
    exact = model.scores(large, "Who is Xanthippe?")
    torch.testing.assert_close(by_both.states[wanted], exact[wanted])
    expected = exact[wanted] + model.config.word_weight * by_both.words.scores[wanted]
    torch.testing.assert_close(by_both.total[wanted], expected)
