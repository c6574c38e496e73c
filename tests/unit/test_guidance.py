"""Scores, queries of other states, and spans: where they begin and end, and their numbers."""

from __future__ import annotations

import math
import random
import re
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from answers import RENT, engine_of, inputs_for, joined, opened, prepared_for, scores_by, teach
from conftest import LEASE, RECIPE
from hypothesis import given, settings
from hypothesis import strategies as st

from sedem import Decoding, Document, MemoryBank, SeDeM, SedemConfig
from sedem.backbone.prompts import SEPARATOR, located_question, question_ids
from sedem.bank.index import score_words
from sedem.engine import batch as engine_batch
from sedem.engine.kept import MOST
from sedem.errors import ConfigError, DataError
from sedem.folding import words_of
from sedem.guidance import (
    GAP,
    LEAST,
    SECOND_FEATURES,
    SPAN_FEATURES,
    UNKNOWN,
    Auto,
    Confidence,
    Guidance,
    SecondHop,
    SecondReading,
    SpanScorer,
    blocks_for_mass,
    borders_of,
    confidence_features,
    matches_of,
    open_features,
    reordered,
    same_stem,
    second_features,
    span_features,
    unsupported,
    with_range,
)
from sedem.method.compressor import encode
from sedem.method.injection import Prefilled
from sedem.selecting.plan import Request, Selection
from sedem.selecting.select import encode_questions
from sedem_lab.evaluation.metrics import BINS, auroc, calibration_error


def naive_features(scores: list[float], tokens: int) -> list[float]:
    """The best score, and its distance from the mean of the next seven, per question token."""
    best, *rest = sorted((s for s in scores if s > -math.inf), reverse=True)
    rivals = rest[:7]
    lead = best - sum(rivals) / len(rivals) if rivals else 0.0
    return [best / tokens, lead / tokens]


@pytest.mark.parametrize("count", [1, 2, 5, 8, 9, 40])
@pytest.mark.parametrize("tokens", [1, 12])
def test_the_features_are_the_best_score_and_its_lead_per_token(count: int, tokens: int) -> None:
    scores = torch.randn(count, generator=torch.Generator().manual_seed(count))
    expected = naive_features(scores.tolist(), tokens)
    for covered in (None, 0.0, 0.6):
        found = confidence_features(scores, tokens, covered).tolist()
        last = UNKNOWN if covered is None else covered
        assert found == pytest.approx([*expected, last], abs=1e-6)


def test_blocks_that_are_no_candidates_change_nothing() -> None:
    scores = torch.tensor([3.0, 1.0, 2.0])
    padded = torch.cat([torch.full((20,), -torch.inf), scores])
    assert torch.equal(confidence_features(padded, 4), confidence_features(scores, 4))


def test_confidence_is_a_logistic_function_and_one_half_before_it_is_fitted() -> None:
    part = Confidence()
    assert part(torch.tensor([[0.7, 0.2, 1.0]])).item() == 0.5
    with torch.no_grad():
        part.weight.copy_(torch.tensor([2.0, -3.0, 0.1]))
        part.bias.fill_(0.5)
        (found,) = part(torch.tensor([[0.7, 0.2, 1.0]])).tolist()
    assert found == pytest.approx(1 / (1 + math.exp(-(2 * 0.7 - 3 * 0.2 + 0.1 + 0.5))))


def drawn(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Features, whether the evidence is there, and the probabilities that it was drawn with."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(count, 3, generator=generator) * torch.tensor([0.1, 0.02, 0.3]) + 0.5
    logits = features @ torch.tensor([12.0, 40.0, 2.0]) - 27.0
    chances = logits.sigmoid()
    return features, torch.rand(count, generator=generator) < chances, chances


def test_a_fit_finds_the_probabilities_that_labels_were_drawn_with() -> None:
    part = Confidence()
    part.fit(*drawn(20_000)[:2])
    features, present, chances = drawn(5_000, seed=1)
    with torch.no_grad():
        found = part(features)
    assert (found - chances).abs().max() < 0.03
    assert calibration_error(found, present) < 0.03


def test_a_fit_is_finite_where_the_features_tell_everything() -> None:
    part = Confidence()
    best_B = torch.tensor([0.1, 0.2, 0.8, 0.9])
    rest_B = torch.full((4,), 0.5)
    part.fit(torch.stack([best_B, rest_B, rest_B], 1), torch.arange(4) > 1)
    with torch.no_grad():
        found = part(torch.tensor([[0.15, 0.5, 0.5], [0.85, 0.5, 0.5]]))
    assert torch.isfinite(part.weight).all()
    assert found[0] < 0.05 and found[1] > 0.95


def test_auroc_is_the_share_of_pairs_in_order() -> None:
    rng = random.Random(0)
    for _ in range(10):
        confidence = [rng.randrange(6) / 5 for _ in range(30)]
        present = [True, False] + [rng.random() < 0.4 for _ in range(28)]
        wins = [
            1.0 if a > b else 0.5 if a == b else 0.0
            for a, is_present in zip(confidence, present, strict=True)
            if is_present
            for b, other in zip(confidence, present, strict=True)
            if not other
        ]
        found = auroc(torch.tensor(confidence), torch.tensor(present))
        assert found == pytest.approx(sum(wins) / len(wins))


@pytest.mark.parametrize("count", [BINS, 47, 3])
def test_the_calibration_error_is_the_mean_distance_of_groups(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    confidence = torch.rand(count, generator=generator)
    present = torch.rand(count, generator=generator) < confidence
    pairs = sorted(zip(confidence.tolist(), present.tolist(), strict=True))
    small, larger = divmod(count, BINS)
    total, start = 0.0, 0
    for group in range(BINS):
        size = small + (group < larger)
        part, start = pairs[start : start + size], start + size
        if part:
            total += abs(sum(p for p, _ in part) - sum(real for _, real in part))
    assert calibration_error(confidence, present) == pytest.approx(total / count)


SCORES = st.lists(st.floats(-20, 20), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(SCORES, min_size=1, max_size=3), tau=st.floats(0.1, 10))
def test_the_bias_of_a_block_is_how_far_it_scored_behind_the_best_over_tau(
    rows: list[list[float]], tau: float
) -> None:
    width = max(map(len, rows))
    scores = torch.tensor([[*row, *[-math.inf] * (width - len(row))] for row in rows])
    bias = Guidance(tau)(scores).detach()
    for row, found in zip(rows, bias.tolist(), strict=True):
        expected = [(s - max(row)) / tau for s in row] + [0.0] * (width - len(row))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_tau_is_trained_and_stays_positive() -> None:
    guidance = Guidance(tau=0.5)
    assert guidance.tau.item() == pytest.approx(0.5)
    optimizer = torch.optim.SGD(guidance.parameters(), lr=3.0)
    guidance(torch.tensor([[1.0, 3.0]])).sum().backward()
    optimizer.step()
    assert 0 < guidance.tau.item() < math.inf
    assert guidance.tau.item() != pytest.approx(0.5)


def test_the_gradient_of_a_place_without_a_block_is_zero() -> None:
    scores = torch.tensor([[2.0, 1.0, -math.inf]], requires_grad=True)
    guidance = Guidance()
    guidance(scores).square().sum().backward()
    assert scores.grad is not None
    # The best block is the reference of the other: d/ds of (s_1 - s_0)^2.
    assert scores.grad.tolist() == [[2.0, -2.0, 0.0]]
    assert guidance.log_tau.grad is not None and guidance.log_tau.grad.isfinite()


# Budgets by need


def fewest(scores: list[float], tau: float, mass: float, most: int) -> int:
    """The fewest best scores whose shares of the sum of exp(s / tau) of `most` reach a mass."""
    weights = sorted((math.exp(score / tau) for score in scores), reverse=True)[:most]
    total = 0.0
    for count, weight in enumerate(weights, start=1):
        total += weight
        if total / sum(weights) >= mass - 1e-12:
            return count
    return len(weights)


@pytest.mark.parametrize("mass", [0.0, 0.3, 0.8, 0.95, 0.999])
@pytest.mark.parametrize("tau", [0.3, 1.0, 4.0])
def test_a_budget_by_need_is_the_fewest_blocks_that_reach_the_mass(tau: float, mass: float) -> None:
    torch.manual_seed(0)
    for _ in range(20):
        scores = (3 * torch.randn(12)).tolist()
        for most in (1, 5, 12, 20):
            expected = fewest(scores, tau, mass, most)
            assert blocks_for_mass(torch.tensor(scores), tau, mass, 1, most) == expected
        limited = blocks_for_mass(torch.tensor(scores), tau, mass, 3, 5)
        assert limited == max(fewest(scores, tau, mass, 5), 3)


def test_a_budget_by_need_does_not_depend_on_how_many_bad_blocks_there_are() -> None:
    few = torch.tensor([5.0, 1.0, 0.5, 0.0])
    many = torch.cat([few, torch.full((50_000,), -torch.inf), torch.zeros(50_000)])
    assert blocks_for_mass(few, 1.0, 0.9, 1, 4) == blocks_for_mass(many, 1.0, 0.9, 1, 4) == 1


def test_an_auto_budget_takes_what_it_leaves_open_from_the_model() -> None:
    config = SedemConfig(encoder="-", extract_layers=(1,), inject_layer=1, auto_min=2, auto_max=6)
    assert Auto().filled(config) == (0.95, 2, 6)
    assert Auto(0.5, 3, 4).filled(config) == (0.5, 3, 4)
    assert Auto(most=1).filled(config) == (0.95, 1, 1)
    assert Auto(least=9).filled(config) == (0.95, 9, 9)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mass": 1.5}, r"mass is 1\.5; it must be a number from 0 to 1"),
        ({"mass": True}, "mass is True"),
        ({"mass": math.nan}, "mass is nan"),
        ({"least": 0}, "least is 0; it must be a whole number of at least 1"),
        ({"most": 2.0}, r"most is 2\.0; it must be"),
        ({"least": 4, "most": 3}, "least is 4 but most 3"),
    ],
)
def test_a_bad_auto_budget_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Auto(**settings)


# Queries of questions that are read once


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
    ids, own, _ = located_question(decoder, RENT)
    assert ids == question_ids(decoder, RENT)
    # The start token is at 0, the question after a full block.
    positions = [0, *range(config.segment_length + 1, config.segment_length + len(ids))]
    hidden_1PD = decoder.embed(torch.tensor([ids]))
    hidden_1PD = decoder.run(hidden_1PD, 0, config.inject_layer, torch.tensor([positions]))
    hidden_QD = hidden_1PD[0, own]
    expected_N = scores_by(model, bank, part, hidden_QD)
    torch.testing.assert_close(model.scores(bank, RENT), expected_N, rtol=1e-4, atol=1e-4)


class Forgetful(OrderedDict[tuple[int, ...], Any]):
    """Keeps nothing."""

    def __setitem__(self, key: tuple[int, ...], value: Any) -> None:
        pass


def test_an_answer_reuses_what_was_computed_and_stays_the_same(
    config: SedemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, fast = read_once(config, "eager"), read_once(config, "static")
    bank, decoding = slow.read(DOCUMENTS), Decoding(6)
    questions = [RENT, "How many eggs?"]
    expected = [slow.answer(bank, question, k=2, decoding=decoding) for question in questions]
    reused: list[int] = []
    run = engine_batch.prefill

    def counted(*given: Any, below_BPD: torch.Tensor | None, **settings: Any) -> Prefilled:
        reused.append(0 if below_BPD is None else len(below_BPD))
        return run(*given, below_BPD=below_BPD, **settings)

    monkeypatch.setattr(engine_batch, "prefill", counted)
    requests = [Request(bank, question, 2) for question in questions]
    together = fast.answer_requests(requests, decoding)
    assert reused == [2]
    assert [one.text for one in together] == [one.text for one in expected]
    for options in ({"blocks": []}, {"k": 2, "condition": "text"}):
        answers = [one.answer(bank, RENT, decoding=decoding, **options) for one in (slow, fast)]
        assert answers[0].text == answers[1].text
    assert reused == [2, 0, 0]
    monkeypatch.setattr(engine_of(fast).kept, "prefixes", Forgetful())
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
    prefixes = engine_of(model).kept.prefixes
    rows = [torch.tensor([1, number]) for number in range(2, MOST + 4)]
    model.engine.read_prefixes(rows)
    assert [*prefixes] == [(1, number) for number in range(4, MOST + 4)]
    model.engine.release()
    assert not prefixes


@pytest.mark.parametrize(
    "question", ["  Who is Zoë Ünal?\n", "日本の首都は？", "Question: Answer:", "?"]
)
def test_the_own_tokens_of_a_question_spell_it(model: SeDeM, question: str) -> None:
    decoder = model.decoder
    ids, place, _ = located_question(decoder, question)
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
    ids, own, _ = located_question(model.decoder, RENT)
    around = len(ids) - len(ids[own])
    room = model.decoder.max_positions - model.config.segment_length - around
    with pytest.raises(DataError, match=f"the model reads at most {room:,}"):
        model.answer(bank, "why " * room)


def test_a_question_counts_with_room_for_a_full_block(model: SeDeM) -> None:
    short = model.read([Document("a.txt", "900 euros.")])
    request = Request(short, RENT, 1)
    limit = model.decoder.max_positions - model.config.segment_length
    prompt = len(question_ids(model.decoder, RENT))
    prepared_for(model, request, limit - prompt)
    with pytest.raises(ConfigError, match="positions, the decoder has"):
        prepared_for(model, request, limit - prompt + 1)


# A second hop


@pytest.fixture(params=["eager", "static"])
def hopping(request: pytest.FixtureRequest, config: SedemConfig) -> SeDeM:
    model = opened(config, request.param, second_hop=True, selection="both")
    assert model.second_hop is not None
    teach(model.second_hop)
    return model


def selected(model: SeDeM, bank: MemoryBank, **options: object) -> Selection:
    request = replace(Request(bank, RENT, 3), **options)  # type: ignore[arg-type]
    prepared = prepared_for(model, request, 4)
    return prepared.selection


def test_the_second_hop_orders_the_others_which_keep_the_totals_of_the_first(
    hopping: SeDeM,
) -> None:
    bank, part = hopping.read(DOCUMENTS), hopping.second_hop
    assert part is not None
    once = selected(hopping, bank, hops=1).scores
    first = int(once.total.argmax())
    text = hopping.encoder.token_ids(bank.block_text(first) + SEPARATOR)
    question = hopping.encoder.token_ids(RENT)
    states = encode(hopping.encoder, torch.tensor([text + question]), hopping.config.extract_layers)
    hidden_1QE = hopping.mixture(states.float())[:, -len(question) :]
    again_N, every = scores_by(hopping, bank, part, hidden_1QE[0]), range(len(bank))
    a, b, c = part.weights.tolist()
    assert once.states is not None and once.words is not None
    named_N = score_words(bank, bank.block_text(first)).scores
    order_N = again_N + a * once.states + b * once.words.scores + c * named_N
    others = sorted((n for n in every if n != first), key=lambda n: -order_N[n])
    expected_N = once.total.clone()
    for block, total in zip(others, sorted(once.total[others].tolist(), reverse=True), strict=True):
        expected_N[block] = total
    twice = selected(hopping, bank, hops=2)
    assert torch.equal(twice.scores.total, expected_N)
    assert twice.ranked[0] == first
    assert twice.confidence == selected(hopping, bank, hops=1).confidence


def test_auto_hops_where_the_first_block_leaves_something_open(hopping: SeDeM) -> None:
    bank, part = hopping.read(DOCUMENTS), hopping.second_hop
    assert part is not None
    totals = {hops: selected(hopping, bank, hops=hops).scores.total for hops in (1, 2)}
    for bias, hops in ((-9.0, 1), (9.0, 2)):
        with torch.no_grad():
            part.open.bias.fill_(bias)
        assert torch.equal(selected(hopping, bank, hops="auto").scores.total, totals[hops])


def test_forced_blocks_blocks_by_words_and_a_single_block_have_one_hop(hopping: SeDeM) -> None:
    bank = hopping.read(DOCUMENTS)
    for options in ({"blocks": [1, 0], "k": None}, {"selection": "words"}):
        once, twice = (selected(hopping, bank, hops=hops, **options) for hops in (1, 2))
        assert once.ranked == twice.ranked and torch.equal(once.scores.total, twice.scores.total)
    single = hopping.read([Document("a.txt", "900 euros.")])
    assert len(single) == 1 and selected(hopping, single, hops=2).ranked == [0]


def test_a_second_hop_stays_within_the_requested_documents(hopping: SeDeM) -> None:
    bank = hopping.read(DOCUMENTS)
    found = selected(hopping, bank, hops=2, documents=["recipe.txt"], k="all")
    assert {bank.blocks[n].document for n in found.ranked} == {1}


def test_it_begins_with_the_queries_of_the_selector(model: SeDeM) -> None:
    part = SecondHop(model.selector)
    hidden_1QE = torch.randn(1, 3, model.encoder.width)
    assert torch.equal(part.queries(model.selector, hidden_1QE), model.selector.queries(hidden_1QE))


def test_blocks_of_other_documents_stay_out_of_both_hops() -> None:
    total_N = torch.tensor([-torch.inf, 7.0, 4.0, 5.0])
    again_N = torch.tensor([-torch.inf, 90.0, 30.0, 20.0])
    assert reordered(total_N, again_N, 1).tolist() == [-torch.inf, 7.0, 5.0, 4.0]


def test_features_say_how_much_the_first_block_covers_and_how_far_others_are_behind() -> None:
    total_N = torch.tensor([3.0, 7.0, 5.0, -torch.inf])
    states_N = torch.tensor([1.0, 4.0, 2.0, -torch.inf])
    found = open_features(total_N, states_N, 0.25, 4)
    torch.testing.assert_close(found, torch.tensor([0.25, 1.0, 0.5]))
    alone = open_features(torch.tensor([3.0]), torch.tensor([1.0]), 1.0, 4)
    torch.testing.assert_close(alone, torch.tensor([1.0, 0.25, 0.0]))


def test_a_span_ends_after_a_word_and_after_signs_that_belong_to_it() -> None:
    text = "about 7 % (or 8%) of it"
    ends = {text[:end] for end in borders_of(text, words_of(text))[1]}
    assert {"about 7", "about 7 % (or 8", "about 7 % (or 8%)"} < ends
    assert not any(one.endswith(" ") for one in ends)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("Write to dbus-security@lists.example.org, please.", "dbus-security@lists.example.org"),
        ("It is at https://example.org/a_b/c-d?e=1. There.", "https://example.org/a_b/c-d?e=1"),
        ("See (www.example.org/roses).", "www.example.org/roses"),
        ('Item: Spare tube 20" | Qty: 4', '20"'),
        ("A pipe of 1.5\u2033 fits.", "1.5\u2033"),
        # Codes and dates.
        ("The lamp is V-77, and new.", "V-77"),
        ("Shipment HK-2093 left.", "HK-2093"),
        ("It runs R2-60-70 now.", "R2-60-70"),
        ("Two F-16s flew.", "F-16s"),
        ("A COVID-19-related loss", "COVID-19"),
        ("Tel. 030/1234-56", "030/1234-56"),
        ("checked on 2026-11-29 by", "2026-11-29"),
        ("on 03/04/2024.", "03/04/2024"),
        # Ranges with a sign.
        ("A bag of 60-70 seeds.", "60-70"),
        ("from 10.30\u201312.00 in the hall", "10.30\u201312.00"),
        ("in season 1998/99", "1998/99"),
        ("the years 2008\u20132012", "2008\u20132012"),
        ("a loan at 3%\u20135%.", "3%\u20135%"),
        ("They cost $45-$52 each", "$45-$52"),
        ("kostet 45 \u20ac \u2013 52 \u20ac im Jahr", "45 \u20ac \u2013 52 \u20ac"),
        ("pages 12 - 15", "12 - 15"),
        ("open 9am-5pm", "9am-5pm"),
        ("1.200\u20131.500 Euro", "1.200\u20131.500"),
    ],
)
def test_what_is_written_as_one_is_not_divided(text: str, whole: str) -> None:
    begins, ends = borders_of(text, words_of(text))
    start = text.index(whole)
    end = start + len(whole)
    assert [first for first, _ in begins if start <= first < end] == [start]
    assert [one for one in ends if start < one <= end] == [end]


@pytest.mark.parametrize(
    "whole",
    [
        "from 45 to 52",
        "from 45 euros to 52",
        "from $9 million to $350",
        "from \u22125 to \u221212 \u00b0C",
        "from 10 a.m. to 4",
        "from 4.5% down to 3%",
        "from 1200 to 1300",
        "between 3 and 5",
        "von 45 auf 52",
        "von 13 bis 15",
        "vom 3. bis 5",
        "zwischen 80 und 120",
        "de 45 \u00e0 52",
        "entre 3 et 5",
        "de 1 200 \u00e0 1 300",
        "desde 45 hasta 52",
        "entre 3 y 5",
        "del 3 al 5",
        "da 45 a 52",
        "tra 3 e 5",
        "dalle 9 alle 12",
        "60 to 70",
        "9:00 bis 12:30",
        "3 \u00e0 5",
        "3 a 5",
    ],
)
def test_the_answer_shows_the_whole_range_of_a_number(whole: str) -> None:
    text = f"x {whole} y"
    numbers = [found.span() for found in re.finditer(r"\d[\d.]*", text)]
    for at, end in (numbers[0], numbers[-1], (2, numbers[0][1])):
        assert text[slice(*with_range(text, at, end))] == whole
    at, end = with_range(text, numbers[-1][0], len(text))
    assert text[at:end] == f"{whole} y"
    assert with_range(text, 0, 1) == (0, 1)


@pytest.mark.parametrize(
    ("text", "apart"),
    [
        ("a 10-acre farm", "10"),
        ("a 10-acre farm", "acre"),
        ("in the mid-1990s", "1990s"),
        ("from 1914 to 1918", "1914"),
        ("from 1914 to 1918", "1918"),
        ("rooms 389 to 950, and", "950"),
        ("from Ardle to 52 Quay Street", "52"),
        ("12 and 15", "12"),
    ],
)
def test_what_only_looks_alike_is_divided(text: str, apart: str) -> None:
    begins, ends = borders_of(text, words_of(text))
    assert text.index(apart) in {first for first, _ in begins}
    assert text.index(apart) + len(apart) in ends
    place = text.index(apart), text.index(apart) + len(apart)
    assert with_range(text, *place) == place


def test_a_sign_that_closes_a_quotation_is_none_of_inches() -> None:
    text = 'He said "it was 20" and left. A tube of 20" was'
    _, ends = borders_of(text, words_of(text))
    assert text.index("20") + 2 in ends
    assert text.rindex("20") + 2 not in ends


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("mayor", "mayor", True),
        ("mayor", "mayors", True),
        ("founded", "founding", True),
        ("kings", "king", True),
        ("on", "one", False),
        ("rent", "tent", False),
        ("national", "nations", True),
        ("form", "formality", False),
        ("20155", "20156", False),
    ],
)
def test_forms_of_a_word(first: str, second: str, same: bool) -> None:
    assert same_stem(first, second) == same_stem(second, first) == same


def test_matches_are_the_words_of_the_question() -> None:
    text = "The mayors of Rome. MAYOR and rent."
    found = matches_of(text, {"Mayor": 3.0, "rent": 1.5, "absent": 9.0})
    assert [(text[m.start : m.end], m.word) for m in found] == [
        ("mayors", "Mayor"), ("MAYOR", "Mayor"), ("rent", "rent"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "text", "expected"),
    [
        ("HK-2093", "HK2093, HK 2093, hk-2093, 2093", ["HK2093", "HK 2093", "hk-2093"]),
        ("1,240", "1240 or 1 240 or 1.240 but not 1, 240", ["1240", "1 240", "1.240"]),
        ("0042", "number 42 and 420", ["42"]),
        ("22 04", "22-04, 22 and 04", ["22-04"]),
        ("租赁", "该租赁合同", ["租赁"]),
    ],
)
def test_a_number_or_code_is_found_whole(word: str, text: str, expected: list[str]) -> None:
    found = matches_of(text, {word: 1.0})
    assert list(dict.fromkeys(text[m.start : m.end] for m in found)) == expected


def test_features_of_a_span() -> None:
    columns = [[-3.0], [2.0], [-0.5], [0.75]]
    (row,) = span_features(*map(torch.tensor, columns)).tolist()
    expected = [-3.0, -1.0, math.log(2.0), -0.5, 0.75]
    assert dict(zip(SPAN_FEATURES, row, strict=True)) == pytest.approx(
        dict(zip(SPAN_FEATURES, expected, strict=True))
    )


def test_before_it_is_fitted_the_scorer_compares_probabilities() -> None:
    features_SF = torch.randn(5, len(SPAN_FEATURES), generator=torch.manual_seed(0))
    assert torch.equal(SpanScorer()(features_SF), features_SF[:, 0])


def test_fitting_finds_the_feature_that_tells_right_spans() -> None:
    generator = torch.manual_seed(0)
    questions = []
    for _ in range(40):
        features_SF = torch.randn(6, len(SPAN_FEATURES), generator=generator)
        right_S = (features_SF[:, 4] == features_SF[:, 4].max()).float()
        questions.append((features_SF, right_S))
    scorer = SpanScorer()
    scorer.fit(questions)
    weight_F = scorer.weight.detach().abs()
    assert int(weight_F.argmax()) == 4 and weight_F.topk(2).values[1] < 0.3 * weight_F.max()
    chosen = [int(scorer(f).argmax()) == int(r.argmax()) for f, r in questions]
    assert sum(chosen) >= 38


@pytest.mark.parametrize("sign", [-1.0, -0.3, 1.0])
def test_a_lower_score_of_its_block_never_speaks_for_a_span(sign: float) -> None:
    generator, block = torch.manual_seed(0), SPAN_FEATURES.index("block")
    questions = []
    for _ in range(40):
        features_SF = torch.randn(6, len(SPAN_FEATURES), generator=generator)
        seen_S = features_SF[:, 4] + sign * features_SF[:, block]
        questions.append((features_SF, (seen_S == seen_S.max()).float()))
    scorer = SpanScorer()
    scorer.fit(questions)
    weight_F = scorer.weight.detach()
    assert weight_F[4] > 0
    assert weight_F[block] == 0 if sign < 0 else weight_F[block] > 0


def test_the_gap_is_the_one_with_which_answers_are_best() -> None:
    scorer = SpanScorer()
    assert scorer.gap.item() == GAP
    gaps = [0.1 * n for n in range(100)]
    near = [gap < 5 for gap in gaps]
    scorer.fit_gap(gaps, spans=[float(one) for one in near], free=[float(not one) for one in near])
    assert 4.8 <= scorer.gap.item() <= 5.0
    # Between 2 and 8 both answers are alike, so any of these gaps would do.
    spans, free = [float(gap < 8) for gap in gaps], [float(gap > 2) for gap in gaps]
    scorer.fit_gap(gaps, spans, free)
    assert 4.8 <= scorer.gap.item() <= 5.2
    scorer.fit_gap(gaps, spans=[1.0] * 100, free=[0.0] * 100)
    assert scorer.gap.item() > 9.7


def test_the_best_span_comes_with_its_share_and_its_mean_probability() -> None:
    features_SF = torch.tensor([[-4.0, -2.0, 0.0, 0.0, 1.0], [-1.0, -0.5, 0.0, 0.0, 0.0]])
    best, features = SpanScorer().best(features_SF)
    share = math.exp(-1.0) / (math.exp(-1.0) + math.exp(-4.0))
    assert best == 1
    assert features.tolist() == pytest.approx([math.log(share), -0.5])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Piet van der Wouden", ()),
        ("Piet van der Woudoud", ("Woudoud",)),
        ("1,358 euros", ("1,358", "euros")),
        ("1,385 crown", ()),
        ("no", ()),
        ("Yes", ()),
        ("Ann and Ann", ("Ann",)),
        ("He called in 2015", ("He", "2015")),
        ("1385 crowns", ()),
        ("1 385 crowns", ()),
        ("PIET van-der-Wouden", ()),
    ],
)
def test_words_that_no_source_has(answer: str, expected: tuple[str, ...]) -> None:
    sources = ["Call Piet van der Wouden.", "It costs 1,385 crowns."]
    assert unsupported(answer, sources) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Novak Olsen", ("Novak Olsen",)),
        ("Ida Olsen and Martin Novak", ()),
        ("The Martin Novak", ()),
        ("12 March 2024", ()),
        ("22 March 1984", ("22", "March 1984")),
        ("12 March 1984 Novak", ("12 March 1984 Novak",)),
        ("George Eastman", ()),
        ("Ida Novak, Olsen", ("Ida Novak",)),
        ("1984 12 Ida", ("1984 12 Ida",)),
    ],
)
def test_names_and_numbers_stand_in_a_source_as_a_whole(
    answer: str, expected: tuple[str, ...]
) -> None:
    sources = [
        "The landlord is Martin Novak. The tenant is Ida Olsen, born in 1984.",
        "Signed in March; the rent begins on March 12, 2024",
        "Eastman, George",
    ]
    assert unsupported(answer, sources) == expected


def test_a_span_that_memory_has_not_read_counts_as_its_least_likely() -> None:
    features_SF = span_features(
        torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([1.0, 3.0, 2.0]), *torch.zeros(2, 3)
    )
    memory_S = torch.tensor([-1.0, -8.0, torch.nan])
    found = second_features(features_SF, torch.tensor([0.0, 1.0, 2.0]), memory_S)
    assert found.shape == (3, len(SECOND_FEATURES))
    assert torch.equal(found[:, : len(SPAN_FEATURES)], features_SF)
    expected = [[0.0, -1.0, -0.5], [1.0, -8.0, -2.0], [2.0, -6.0, -2.0]]
    torch.testing.assert_close(found[:, len(SPAN_FEATURES) :], torch.tensor(expected))
    nothing = second_features(features_SF[:1], torch.zeros(1), torch.tensor([torch.nan]))
    torch.testing.assert_close(nothing[0, -2:], torch.tensor([2 * LEAST, LEAST]))


def test_memory_alone_is_believed_from_the_share_where_text_gains_nothing() -> None:
    shares = [0.1, 0.3, 0.5, 0.7, 0.9]
    for memory, text, expected in (
        ([0.0, 0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0], 0.5),
        ([1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0, 1.0], 0.1),
        ([1.0, 1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0], 1.0),
        # What memory loses in the middle is more than it wins below.
        ([1.0, 0.0, 0.0, 1.0, 1.0], [0.0, 1.0, 1.0, 0.0, 1.0], 0.7),
        ([1.0, 1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0, 1.0], 0.1),
    ):
        second = SecondReading()
        second.fit_sure(shares, memory, text)
        assert second.sure.item() == pytest.approx(expected)
