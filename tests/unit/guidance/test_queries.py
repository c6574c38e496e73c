"""Questions that are read once: by the decoder's lower layers, whose states also select."""

from __future__ import annotations

import pytest
import torch
from answers import RENT, engine_of, inputs_for, joined, opened, scores_by, teach
from conftest import LEASE, RECIPE

from sedem import Decoding, Document, MemoryBank, SeDeM, SedemConfig
from sedem.answering.decoding import located_question, question_ids
from sedem.answering.requests import Request, encode_questions, prepare
from sedem.engine.batch import IndependentBatch
from sedem.engine.device import Clock
from sedem.engine.kept import MOST
from sedem.errors import ConfigError, DataError

DOCUMENTS = [Document("lease.txt", LEASE), Document("recipe.txt", RECIPE)]
SETTINGS = {"block_context": "independent", "guidance": True, "read_once": True}


def read_once(config: SedemConfig, engine: str) -> SeDeM:
    model = opened(config, engine, lora=True, **SETTINGS)
    assert model.read_once is not None
    teach(model.read_once)
    return model


@pytest.fixture(params=["eager", "static"])
def model(request: pytest.FixtureRequest, config: SedemConfig) -> SeDeM:
    return read_once(config, request.param)


@pytest.fixture
def bank(model: SeDeM) -> MemoryBank:
    return model.read(DOCUMENTS)


def test_scores_come_from_the_decoders_states_of_the_question(
    model: SeDeM, bank: MemoryBank
) -> None:
    part, config, decoder = model.read_once, model.config, model.decoder
    assert part is not None
    ids, own = located_question(decoder, RENT)
    assert ids == question_ids(decoder, RENT)
    # The start token is at 0, the question after a full block.
    positions = [0, *range(config.segment_length + 1, config.segment_length + len(ids))]
    hidden_1PD = decoder.embed(torch.tensor([ids]))
    hidden_1PD = decoder.run(hidden_1PD, 0, config.inject_layer, torch.tensor([positions]))
    hidden_QD = hidden_1PD[0, own]
    expected_N = scores_by(model, bank, part, hidden_QD)
    torch.testing.assert_close(model.scores(bank, RENT), expected_N, rtol=1e-4, atol=1e-4)


def test_an_answer_reuses_what_was_computed_and_stays_the_same(
    config: SedemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = read_once(config, "eager"), read_once(config, "static")
    bank, decoding = slow.read(DOCUMENTS), Decoding(6)
    questions = [RENT, "How many eggs?"]
    expected = [slow.answer(bank, question, k=2, decoding=decoding) for question in questions]
    reused: list[int] = []
    run = IndependentBatch._below

    def counted(batch: IndependentBatch) -> torch.Tensor | None:
        reused.append(len(batch.read))
        return run(batch)

    monkeypatch.setattr(IndependentBatch, "_below", counted)
    requests = [Request(bank, question, 2) for question in questions]
    together = fast.answer_requests(requests, decoding)
    assert reused == [2]
    assert [one.text for one in together] == [one.text for one in expected]
    for options in ({"blocks": []}, {"k": 2, "condition": "text"}):
        answers = [one.answer(bank, RENT, decoding=decoding, **options) for one in (slow, fast)]
        assert answers[0].text == answers[1].text
    assert reused == [2, 0, 0]
    monkeypatch.setattr(engine_of(fast).batches.prefixes, "find", lambda ids_P: None)
    again = fast.answer(bank, RENT, k=2, decoding=decoding)
    assert again.text == expected[0].text and reused[-1] == 0


def test_an_engine_follows_the_configuration_of_its_model(config: SedemConfig) -> None:
    model = read_once(config, "static")
    bank = model.read([Document("a.txt", "900 euros.")])  # shorter than a full block
    once, part, settings = logits_of(model, bank), model.read_once, model.config
    model.read_once, model.config = None, settings.with_changes(read_once=False)
    twice = logits_of(model, bank)
    assert not torch.allclose(twice, once, atol=1e-3)
    slow = read_once(config, "eager")
    slow.read_once, slow.config = None, model.config
    torch.testing.assert_close(twice, logits_of(slow, bank), rtol=1e-4, atol=1e-4)
    model.read_once, model.config = part, settings
    torch.testing.assert_close(logits_of(model, bank), once)


def logits_of(model: SeDeM, bank: MemoryBank) -> torch.Tensor:
    """Logits after a question that has been scored."""
    model.scores(bank, RENT)
    with joined(model.engine, [inputs_for(model, Request(bank, RENT, 1))], 1) as (logits_BV, _):
        return logits_BV


def test_only_the_last_prefixes_are_kept(config: SedemConfig) -> None:
    model = read_once(config, "static")
    prefixes = engine_of(model).batches.prefixes
    rows = [torch.tensor([1, number]) for number in range(2, MOST + 4)]
    model.engine.read_prefixes(rows)
    assert [prefixes.find(ids) is None for ids in rows] == [True] * 2 + [False] * MOST
    model.engine.release()
    assert prefixes.find(rows[-1]) is None


@pytest.mark.parametrize(
    "question", ["  Who is Zoë Ünal?\n", "日本の首都は？", "Question: Answer:", "?"]
)
def test_the_own_tokens_of_a_question_spell_it(model: SeDeM, question: str) -> None:
    decoder = model.decoder
    ids, place = located_question(decoder, question)
    assert ids == question_ids(decoder, question)
    own = ids[place]
    assert decoder.tokenizer.decode(own).strip() == question.strip()
    hidden_1QE, mask_1Q = encode_questions(model, model.engine, [question])
    assert hidden_1QE.shape[1] == len(own) == int(mask_1Q.sum())


def test_a_question_that_is_empty_or_leaves_no_room_for_a_block_is_refused(
    model: SeDeM, bank: MemoryBank
) -> None:
    with pytest.raises(DataError, match="the question is empty"):
        model.answer(bank, " ")
    ids, own = located_question(model.decoder, RENT)
    around = len(ids) - len(ids[own])
    room = model.decoder.max_positions - model.config.segment_length - around
    with pytest.raises(DataError, match=f"the model reads at most {room:,}"):
        model.answer(bank, "why " * room)


def test_a_question_counts_with_room_for_a_full_block(model: SeDeM) -> None:
    short = model.read([Document("a.txt", "900 euros.")])
    request = Request(short, RENT, 1)
    limit = model.decoder.max_positions - model.config.segment_length
    prompt = len(question_ids(model.decoder, RENT))
    clock = Clock(model.device)
    prepare(model, model.engine, [request], [limit - prompt], clock)
    with pytest.raises(ConfigError, match="positions, the decoder has"):
        prepare(model, model.engine, [request], [limit - prompt + 1], clock)


def test_it_needs_independent_blocks_and_one_backbone(config: SedemConfig) -> None:
    with pytest.raises(ConfigError, match="needs independent blocks and one backbone"):
        config.with_changes(block_context="joint", read_once=True)
    with pytest.raises(ConfigError, match="needs independent blocks and one backbone"):
        config.with_changes(**SETTINGS, decoder="another")
