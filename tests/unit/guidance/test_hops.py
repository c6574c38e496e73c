"""The second hop: which blocks are found once the question is read after the first one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from answers import RENT, opened, scores_by, teach
from conftest import LEASE, RECIPE

from sedem import Document, MemoryBank, SeDeM, SedemConfig
from sedem.answering.decoding import SEPARATOR
from sedem.answering.requests import Request, Selection, prepare
from sedem.bank.words import score_words
from sedem.engine.device import Clock
from sedem.guidance.hops import SecondHop, open_features, reordered
from sedem.method.encoder import encode

DOCUMENTS = [Document("lease.txt", LEASE), Document("recipe.txt", RECIPE)]


@pytest.fixture(params=["eager", "static"])
def hopping(request: pytest.FixtureRequest, config: SedemConfig) -> SeDeM:
    model = opened(config, request.param, second_hop=True, selection="both")
    assert model.second_hop is not None
    teach(model.second_hop)
    return model


def selected(model: SeDeM, bank: MemoryBank, **options: object) -> Selection:
    request = replace(Request(bank, RENT, 3), **options)  # type: ignore[arg-type]
    [prepared] = prepare(model, model.engine, [request], [4], Clock(model.device))
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
