"""FLOPs are those that torch counts while a tiny model reads, selects, restores and answers.

What is left out: norms, activations, softmax, rotary angles and look-ups, which torch's counter
leaves out too, and the half of an attention square that a causal mask hides. That half is
computed by eager attention; it is written out here, and the rest is equal to the digit. Adapters
are taken as merged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sedem import Document, MemoryBank, SeDeM, SedemConfig
from sedem.backbone.loading import open_backbone
from sedem.backbone.prompts import located_question, question_ids
from sedem.engine.eager import start_decoding
from sedem.method import selector
from sedem.method.injection import GrowingCache, step
from sedem.selecting.plan import Request, Scores, plan_of, prepare
from sedem.selecting.select import choose, encode_questions, score_questions
from sedem_lab.evaluation.cost import Workload, count_flops

HEAD, SEGMENT, SEGMENTS, K, ANSWER = 16, 16, 6, 2, 5
QUESTION = "What is the rent?"


@pytest.fixture(
    params=[
        {},
        {"compression": 2, "selector_dim": 12, "decompressor_hidden": 24},
        {"compression": 1, "decompressor": "identity"},
        {"decompressor": "none", "inject_layer": 0},
    ]
)
def model(
    request: pytest.FixtureRequest, config: SedemConfig, tiny_folder: Callable[..., str]
) -> SeDeM:
    """Eager attention, whose two products the counter sees; a head wider than D / heads."""
    folder = tiny_folder("llama", head_dim=HEAD)
    backbone = open_backbone(folder, attention="eager")
    shape = config.with_changes(encoder=folder, **request.param)
    return SeDeM(shape, backbone, backbone).eval()


@pytest.fixture
def bank(model: SeDeM) -> MemoryBank:
    return model.read([Document("a.txt", "x" * (SEGMENT * SEGMENTS))])


def counted(run: Callable[[], object]) -> int:
    """FLOPs of a call, by torch's own counter."""
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def without_weights(model: SeDeM, question: int = 1) -> dict[str, Any]:
    workload = Workload(context=SEGMENT * SEGMENTS, question=question, answer=ANSWER, k=K)
    shape = model.decoder.model.config
    return count_flops(model.config, shape, shape, workload)


def hidden_half(model: SeDeM, layers: int, tokens: int) -> int:
    """Scores and values of pairs that the causal mask hides, over some layers."""
    heads = model.decoder.model.config.num_attention_heads
    return 4 * layers * heads * HEAD * (tokens * tokens - tokens * (tokens + 1) // 2)


def test_reading(model: SeDeM) -> None:
    document = Document("a.txt", "x" * (SEGMENT * SEGMENTS))
    total = counted(lambda: model.read([document]))
    beside = SEGMENTS * hidden_half(model, 3, SEGMENT + 1)
    assert without_weights(model)["read"] == total - beside


def test_selecting(model: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch) -> None:
    # Columns that only pad a small bank are left out.
    monkeypatch.setattr(selector, "COLUMNS", 1)

    def select() -> None:
        hidden_1QE, mask_1Q = encode_questions(model, model.engine, [QUESTION])
        score_questions(model.selector, bank, model.selector.queries(hidden_1QE), mask_1Q)

    tokens = len(QUESTION) + 1
    beside = hidden_half(model, 3, tokens)
    assert without_weights(model, len(QUESTION))["select"] == counted(select) - beside


def test_selecting_by_a_question_that_is_read_once(
    config: SedemConfig, tiny_folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selector, "COLUMNS", 1)
    folder = tiny_folder("llama", head_dim=HEAD)
    backbone = open_backbone(folder, attention="eager")
    shape = config.with_changes(encoder=folder, block_context="independent", read_once=True)
    model = SeDeM(shape, backbone, backbone).eval()
    bank = model.read([Document("a.txt", "x" * (SEGMENT * SEGMENTS))])
    ids, own, _ = located_question(backbone, QUESTION)

    def select() -> None:
        hidden_1QE, mask_1Q = encode_questions(model, model.engine, [QUESTION])
        score_questions(model.selector, bank, model.queries(hidden_1QE), mask_1Q)

    # The lower layers, which the answer needs anyway.
    below = counted(lambda: model.engine.read_prefixes([torch.tensor(ids)]))
    assert without_weights(model, own.stop - own.start)["select"] == counted(select) - below


def test_restoring(model: SeDeM, bank: MemoryBank) -> None:
    plan = plan_of(model, Request(bank, QUESTION, K))
    chosen = choose(model, plan, Scores(torch.arange(SEGMENTS).float()))
    slots = bank.memory(chosen.memory).float()
    assert without_weights(model)["restore"] == counted(lambda: model.decompressor(slots))


def test_prefilling_and_decoding(model: SeDeM, bank: MemoryBank) -> None:
    prefix = question_ids(model.decoder, QUESTION)
    states = K * model.config.slots * model.decompressor.states_per_slot
    plan = plan_of(model, Request(bank, QUESTION, K))
    chosen = choose(model, plan, Scores(torch.arange(SEGMENTS).float()))
    caches: list[GrowingCache] = []

    def start() -> None:
        caches.append(start_decoding(model, [prepare(model, plan, chosen, 1).inputs])[1])

    flops, lower = without_weights(model, len(prefix) - 1), model.config.inject_layer
    upper = model.decoder.depth - lower
    beside = hidden_half(model, lower, len(prefix))
    beside += hidden_half(model, upper, states + len(prefix))
    assert flops["prefill"] + flops["restore"] == counted(start) - beside

    def decode() -> None:
        for _ in range(ANSWER - 1):
            state_BD = step(model.decoder, lower, torch.tensor([5]), caches[0])
            model.decoder.logits(state_BD)

    assert flops["decode"] == counted(decode)
