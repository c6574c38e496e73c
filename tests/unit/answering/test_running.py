"""What conditions an answer, alone, in a batch and in a stream."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from answers import QUESTIONS, RENT, SHORT, assert_same_sources, build, untimed
from conftest import LEASE
from torch.utils._python_dispatch import TorchDispatchMode

from sedem import Decoding, Document, MemoryBank, SeDeM, SedemConfig
from sedem.answering.decoding import UNANSWERABLE
from sedem.backbone.decoder import Backbone
from sedem.backbone.prompts import question_ids
from sedem.engine import eager
from sedem.engine.device import Replay
from sedem.engine.static import open_engine
from sedem.errors import ConfigError, DataError
from sedem.method import selector
from sedem.selecting.plan import Request
from sedem.tensors import Quantized
from sedem_lab.baselines.full_context import FullContext


def test_padded_slots_change_neither_scores_nor_answers(model: SeDeM) -> None:
    bank = model.read([Document("a.txt", "Short."), Document("b.txt", LEASE)])
    memory = bank.memory(range(len(bank))).clone()
    padding = bank.slot_tokens(range(len(bank))) == 0
    # Noise that some question would match best if padded slots were scored.
    noise = torch.randn(int(padding.sum()), memory.shape[-1], generator=torch.manual_seed(2))
    memory[padding] = noise.to(memory.dtype)
    what = bank.fingerprint, bank.made_by, bank.documents, bank.blocks
    noisy = MemoryBank(*what, Quantized(memory))
    for question in QUESTIONS:
        assert torch.equal(model.scores(noisy, question), model.scores(bank, question))
        one, other = (model.answer(b, question, k="all", decoding=SHORT) for b in (bank, noisy))
        assert untimed(one) == untimed(other)


def test_without_blocks_the_decoder_sees_the_question_alone(model: SeDeM, bank: MemoryBank) -> None:
    answer = model.answer(bank, RENT, blocks=[], decoding=SHORT)
    assert (answer.k, answer.citations, answer.blocks) == (0, (), len(bank))
    bare = FullContext(model.decoder, SHORT)
    assert answer.text == bare.answer([], RENT).text


def test_requests_to_several_banks_with_several_budgets_are_answered_as_one_by_one(
    model: SeDeM, documents: list[Document], bank: MemoryBank
) -> None:
    lease, recipe = (model.read([document]) for document in documents)
    requests = [
        Request(bank, QUESTIONS[0], 5),
        Request(lease, QUESTIONS[3], "all"),
        Request(recipe, QUESTIONS[2], 1),
        Request(lease, QUESTIONS[1]),
        Request(recipe, QUESTIONS[0], blocks=[3, 1]),
        Request(bank, QUESTIONS[1], blocks=[]),
    ] * 4  # more than one batch
    together = model.answer_requests(requests, SHORT)
    assert [a.k for a in together] == [5, len(lease), 1, 2, 2, 0] * 4
    assert model.answer(bank, []) == []
    alone = [model.answer_requests([request], SHORT)[0] for request in requests[:6]]
    for answer, other in zip(together, alone * 4, strict=True):
        assert answer.text == other.text
        assert_same_sources(answer, other)


def test_one_bad_question_fails_the_batch(model: SeDeM, bank: MemoryBank) -> None:
    with pytest.raises(DataError, match="the question is empty"):
        model.answer(bank, [RENT, " "])


def test_too_many_states_are_refused_before_they_are_decompressed(
    model: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = model.read([Document("long.txt", LEASE * 3)])

    def unexpected(*_: object) -> None:
        pytest.fail("decompressed states that do not fit")

    monkeypatch.setattr(model.decompressor, "forward", unexpected)
    with pytest.raises(ConfigError, match="the decoder has 512"):
        model.answer(bank, RENT, k="all")


def test_an_abandoned_stream_leaves_the_model_usable(model: SeDeM, bank: MemoryBank) -> None:
    before = model.answer(bank, RENT, decoding=SHORT)
    stream = model.stream(bank, RENT, decoding=Decoding(max_new_tokens=40))
    next(stream)
    del stream
    assert torch.is_grad_enabled()
    assert untimed(model.answer(bank, RENT, decoding=SHORT)) == untimed(before)


@pytest.mark.parametrize(
    ("changes", "states"),
    [({}, [16, 6]), ({"decompressor": "none", "inject_layer": 0}, [4, 2])],
    ids=["decompressed", "direct"],
)
def test_conditioning_counts_the_prompt_and_real_states_but_no_padding(
    changes: dict[str, object], states: list[int], config: SedemConfig, backbone: Backbone
) -> None:
    model = build(config, backbone, **changes)
    # 16 tokens fill the first block, the other 6 a slot and a half of the second.
    bank = model.read([Document("a.txt", "x" * 22)])
    prompt = len(question_ids(backbone, RENT))
    for block, count in enumerate(states):
        assert model.answer(bank, RENT, blocks=[block]).conditioning == prompt + count
    answers = model.answer(bank, [RENT, "A much longer question, about pets?"], k="all")
    assert answers[0].conditioning == prompt + sum(states)


# Confidence


@pytest.fixture
def sure(config: SedemConfig, backbone: Backbone) -> SeDeM:
    """A model with a confidence that differs between the questions."""
    model = build(config, backbone, confidence=True)
    assert model.confidence is not None
    with torch.no_grad():
        model.confidence.weight.copy_(torch.tensor([30.0, 10.0, 0.0]))
        model.confidence.bias.fill_(-12.0)
    return model


def test_an_answer_tells_the_confidence_of_its_scores(
    sure: SeDeM, documents: list[Document]
) -> None:
    bank = sure.read(documents)
    answers = sure.answer(bank, QUESTIONS, decoding=SHORT)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        tokens = len(sure.encoder.token_ids(question))
        best, *rest = sorted(sure.scores(bank, question).tolist(), reverse=True)
        logit = 30 * best / tokens + 10 * (best - sum(rest[:7]) / 7) / tokens - 12
        assert answer.confidence == pytest.approx(1 / (1 + math.exp(-logit)), abs=1e-4)
        assert answer.to_dict()["confidence"] == answer.confidence
    assert len({answer.confidence for answer in answers}) == len(QUESTIONS)


def test_below_the_least_confidence_the_answer_is_that_the_documents_do_not_tell(
    sure: SeDeM, documents: list[Document]
) -> None:
    bank = sure.read(documents)
    answers = sure.answer(bank, QUESTIONS, decoding=SHORT)
    ordered = sorted(answer.confidence or 0.0 for answer in answers)
    least = ordered[2]  # a confidence that equals it is enough
    found = sure.answer(bank, QUESTIONS, decoding=SHORT, min_confidence=least)
    declined = [answer for answer in found if answer.finish_reason == "unanswerable"]
    assert len(declined) == 2
    for free, answer in zip(answers, found, strict=True):
        assert (answer.citations, answer.k) == (free.citations, free.k)
        assert answer.confidence == free.confidence
        if answer in declined:
            assert (answer.confidence or 0.0) < least
            assert (answer.text, answer.conditioning, answer.cut) == (UNANSWERABLE, 0, ())
        else:
            assert untimed(answer) == untimed(free)
    always = sure.answer(bank, QUESTIONS, decoding=SHORT, min_confidence=0)
    assert [*map(untimed, always)] == [*map(untimed, answers)]
    stream = sure.stream(bank, RENT, min_confidence=1.0)
    assert list(stream) == [UNANSWERABLE]
    assert stream.answer is not None and stream.answer.finish_reason == "unanswerable"
    # Its states need not fit.
    long = sure.read([Document("long.txt", LEASE * 3)])
    answer = sure.answer(long, RENT, k="all", min_confidence=1.0)
    assert (answer.finish_reason, answer.k) == ("unanswerable", len(long))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (" 1,240 euros\n\nQuestion: Who is the landlord?\nAnswer:", "1,240 euros"),
        (" 1,240 euros\nQuestion: Who is it?", "1,240 euros"),
        (" He asks: Question: who?", "He asks: Question: who?"),
    ],
)
def test_a_question_of_the_models_own_is_no_part_of_its_answer(
    model: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch, written: str, expected: str
) -> None:
    tokens = iter([*model.decoder.token_ids(written), model.decoder.eos_token_id])

    def chooser(decoding: Decoding, device: torch.device) -> Any:
        return lambda logits_BV: torch.tensor([next(tokens)])

    monkeypatch.setattr(Decoding, "chooser", chooser)
    decoding = Decoding(max_new_tokens=200, temperature=1.0)
    stream = model.stream(bank, RENT, decoding=decoding, answer="free")
    assert "".join(stream) == expected
    assert stream.answer is not None and stream.answer.text == expected


def test_nothing_is_decoded_for_a_declined_question(
    sure: SeDeM, documents: list[Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    bank, started, start = sure.read(documents), list[int](), eager.start_decoding
    monkeypatch.setattr(
        eager,
        "start_decoding",
        lambda model, rows: (started.append(len(rows)), start(model, rows))[1],
    )
    requests = [Request(bank, RENT, min_confidence=1.0), Request(bank, RENT)]
    declined, answered = sure.answer_requests(requests, SHORT)
    assert (declined.finish_reason, answered.text != UNANSWERABLE) == ("unanswerable", True)
    alone = sure.answer(bank, RENT, min_confidence=1.0)
    assert started == [1] and alone.text == UNANSWERABLE
    assert 0 <= alone.timings["select_ms"] <= alone.timings["ttft_ms"] <= alone.timings["total_ms"]


def test_a_model_declines_by_default_what_its_best_block_does_not_mention(
    sure: SeDeM, documents: list[Document]
) -> None:
    sure.config = sure.config.with_changes(min_confidence=0.5, selection="both", word_weight=100.0)
    assert sure.confidence is not None
    with torch.no_grad():
        sure.confidence.weight.copy_(torch.tensor([0.0, 0.0, 20.0]))
        sure.confidence.bias.fill_(-10.0)
    bank = sure.read(documents)

    def declines(question: str, **options: Any) -> bool:
        answer = sure.answer(bank, question, decoding=SHORT, **options)
        return answer.finish_reason == "unanswerable"

    foreign, named = "Quo vadis, Xerxes?", Path(documents[0].name).stem
    assert declines(foreign) and declines(foreign, k="all") and declines(named, selection="states")
    # Its words stand in the best block, the blocks are forced, or every question is answered.
    assert not declines(named) and not declines(foreign, blocks=[0])
    assert not declines(foreign, min_confidence=0.0)
    assert declines(named, min_confidence=1.0)


VIEWS = ("slice", "select", "view", "permute", "unsqueeze", "expand", "t", "transpose", "unbind")
VIEWS += ("split", "split_with_sizes", "_unsafe_view", "lift_fresh", "unflatten", "detach")
OPERATIONS = 68
"""Tensor operations from a question to its first token, outside encoding and prefill. Eight of them
check on the CPU that what is read from a bank is finite."""


class Counting(TorchDispatchMode):
    """Counts operations that are no views, unless it is paused."""

    count = 0
    paused = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.name().removeprefix("aten::").partition(".")[0]
        self.count += not self.paused and name not in VIEWS
        return function(*args, **(kwargs or {}))


def test_few_operations_stand_between_a_question_and_its_first_token(
    model: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each of them would be a launch; what is captured as a graph is one."""
    monkeypatch.setattr(selector, "_must_fit_cache", lambda _: False)
    model.engine = open_engine("static", model)
    one_token = Decoding(max_new_tokens=1)
    expected = model.answer(bank, RENT, decoding=one_token)  # makes buffers and keys
    counting, runs = Counting(), Replay.runs

    def replayed(self: Replay) -> Iterator[AbstractContextManager[Any]]:
        counting.paused = True
        yield from runs(self)
        counting.paused = False

    monkeypatch.setattr(Replay, "runs", replayed)
    with counting:
        answer = model.answer(bank, RENT, decoding=one_token)
    assert untimed(answer) == untimed(expected)
    assert 30 < counting.count <= OPERATIONS
