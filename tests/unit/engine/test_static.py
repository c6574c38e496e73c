"""The static engine on its own: fixed buffers, dropped rows, room for answers, memory, errors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any
from weakref import ref

import pytest
import torch
from answers import engine_of, inputs_for, joined, opened
from conftest import LEASE, RECIPE
from torch import Tensor

from sedem import Decoding, Document, MemoryBank, SeDeM, SedemConfig
from sedem.backbone.loading import open_backbone
from sedem.engine import fused, static
from sedem.engine.batch import Bucket, StaticBatch
from sedem.engine.device import Replay, pool_bytes, round_up
from sedem.engine.eager import Eager
from sedem.engine.interface import AnswerInputs
from sedem.engine.rows import FIRST_STEPS
from sedem.engine.static import Static, open_engine
from sedem.errors import ConfigError
from sedem.selecting.plan import Request

QUESTIONS = ["What is the rent?", "How many eggs?", "Pets?", "Who may leave?", "Plums?"]
DOCUMENTS = [Document("lease.txt", LEASE), Document("recipe.txt", RECIPE)]


@pytest.fixture
def slow(config: SedemConfig) -> SeDeM:
    return opened(config, lora=True)


@pytest.fixture
def fast(config: SedemConfig) -> SeDeM:
    return opened(config, "static", lora=True)


@pytest.fixture
def bank(slow: SeDeM) -> MemoryBank:
    return slow.read(DOCUMENTS)


def starts(model: SeDeM, bank: MemoryBank, rows: int, k: int = 2) -> list[AnswerInputs]:
    requests = (Request(bank, QUESTIONS[row % len(QUESTIONS)], k) for row in range(rows))
    return [inputs_for(model, request, row) for row, request in enumerate(requests)]


# Replays


def test_a_moved_buffer_is_detected_without_a_gpu() -> None:
    given, result = torch.ones(3), torch.zeros(3)

    def double() -> None:
        torch.mul(given, 2, out=result)

    replay = Replay([given, result])
    given.fill_(4)
    replay(double)
    assert result.tolist() == [8, 8, 8]
    given.set_(torch.ones(3))  # type: ignore[call-overload]
    with pytest.raises(AssertionError, match="moved"):
        replay(double)


def test_a_rehearsed_step_changes_no_answer(fast: SeDeM, bank: MemoryBank) -> None:
    rows = starts(fast, bank, 2)
    tokens = torch.tensor([50, 60])
    seen = []
    for rehearsed in (False, True):
        with joined(fast.engine, rows, 8) as (_, running):
            (batch,) = engine_of(fast).batches.active
            if rehearsed:
                batch.ids.copy_(tokens)
                batch._replay_step.rehearse(batch._run_step)
            seen.append([running.step(tokens) for _ in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


# Batches


def test_bucket_sizes_are_few_and_large_enough() -> None:
    sizes = {round_up(count, 1) for count in range(1, 65)}
    assert sizes == {*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64}
    assert all(count <= round_up(count, 16) < 1.25 * count + 16 for count in range(2000))
    assert round_up(0, 16) == 0


def test_buffers_stay_in_place_and_keep_nothing_of_the_last_question(
    slow: SeDeM, fast: SeDeM, bank: MemoryBank
) -> None:
    first, other = "What is the rent?", "What is a plum?!?"
    fast.answer(bank, first)
    (batch,) = engine_of(fast).batches.idle
    before = [buffer.data_ptr() for buffer in batch.buffers]
    assert fast.answer(bank, other).text == slow.answer(bank, other).text
    assert engine_of(fast).batches.idle == [batch]
    assert [buffer.data_ptr() for buffer in batch.buffers] == before


def test_a_step_in_a_full_batch_is_refused_before_anything_runs(
    fast: SeDeM, bank: MemoryBank
) -> None:
    batch = StaticBatch(engine_of(fast).decoder, Bucket(rows=1, prefix=48, slots=16, steps=2))
    batch.prefill(starts(fast, bank, 1))
    token = torch.tensor([50])
    batch.step(token)
    batch.step(token)
    before = [buffer.clone() for buffer in batch.buffers]
    with pytest.raises(ConfigError, match="filled its room for 2 tokens after its prefix"):
        batch.step(token)
    assert all(torch.equal(a, b) for a, b in zip(before, batch.buffers, strict=True))


def test_a_long_answer_moves_to_a_larger_batch(slow: SeDeM, fast: SeDeM, bank: MemoryBank) -> None:
    limit = 2 * FIRST_STEPS + 20
    tokens = torch.randint(2, 258, (limit - 1, 2), generator=torch.Generator().manual_seed(0))
    rows = starts(slow, bank, 2)
    logits = []
    for model in (slow, fast):
        with joined(model.engine, rows, limit) as (_, running):
            logits.append(torch.stack([running.step(ids) for ids in tokens]))
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)
    assert {batch.bucket.steps for batch in engine_of(fast).batches.idle} == {64, 128, 160}


def test_sampled_answers_equal_those_of_the_reference(
    slow: SeDeM, fast: SeDeM, bank: MemoryBank
) -> None:
    decoding = Decoding(12, temperature=0.7, top_k=20, top_p=0.9, seed=5)
    expected = slow.answer(bank, QUESTIONS, decoding=decoding)
    answers = fast.answer(bank, QUESTIONS, decoding=decoding)
    assert [a.text for a in answers] == [a.text for a in expected]


def test_two_streams_are_independent_and_return_their_batches(
    slow: SeDeM, fast: SeDeM, bank: MemoryBank
) -> None:
    first, second = (fast.stream(bank, q, decoding=Decoding(9)) for q in QUESTIONS[:2])
    for _ in range(3):
        next(first)
        next(second)
    assert len(engine_of(fast).batches.active) == 2
    list(first)
    del second
    assert first.answer is not None
    assert first.answer.text == slow.answer(bank, QUESTIONS[0], decoding=Decoding(9)).text
    assert not engine_of(fast).batches.active


def test_threads_share_an_engine(slow: SeDeM, fast: SeDeM, bank: MemoryBank) -> None:
    expected = [slow.answer(bank, q, decoding=Decoding(6)).text for q in QUESTIONS]
    given: dict[int, str] = {}

    def ask(number: int) -> None:
        given[number] = fast.answer(bank, QUESTIONS[number], decoding=Decoding(6)).text

    threads = [Thread(target=ask, args=(number,)) for number in range(len(QUESTIONS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [given[number] for number in range(len(QUESTIONS))] == expected


# Memory


def size(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def test_no_weight_is_kept_twice(slow: SeDeM, fast: SeDeM) -> None:
    own = size([*slow.parameters(), *slow.buffers()])
    layers = slow.decoder.model.get_decoder().layers[: slow.config.extract_layer]
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    beside = size([getattr(la.self_attn, n).base_layer.weight for la in layers for n in names])
    # The encoder's attention is kept beside the merged one; no other weight has a copy.
    assert slow.engine.memory()["weights"] == own
    assert fast.engine.memory()["weights"] == own + beside


def test_without_adapters_encoder_and_decoder_share_every_weight(config: SedemConfig) -> None:
    backbone = open_backbone(config.encoder)
    model = SeDeM(config.with_changes(lora_rank=0), backbone, backbone).requires_grad_(False)
    own = model.engine.memory()["weights"]
    model.engine = open_engine("static", model)
    assert model.engine.memory()["weights"] == own


def test_memory_counts_batches_and_question_buffers(fast: SeDeM, bank: MemoryBank) -> None:
    assert fast.engine.memory()["caches"] == 0
    fast.answer(bank, QUESTIONS[0], decoding=Decoding(4))
    engine = engine_of(fast)
    (batch,), (questions,) = engine.batches.idle, engine._question_buffers.values()
    assert fast.engine.memory()["caches"] == size([*batch.buffers, *questions.buffers])


def test_memory_of_graphs_is_that_of_their_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 1},
        {"segment_pool_id": (0, 7), "total_size": 20},
        {"segment_pool_id": (0, 7), "total_size": 300},
        {"segment_pool_id": (0, 8), "total_size": 4000},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert pool_bytes((0, 7)) == 320


def test_idle_batches_above_the_limit_are_freed(
    fast: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sedem.engine.rows.IDLE_BYTES", 0)
    for k in (1, 3, 8):
        fast.answer(bank, QUESTIONS[0], k=k, decoding=Decoding(2))
    (batch,) = engine_of(fast).batches.idle
    assert batch.bucket.slots == 32


def test_released_buffers_are_freed_at_once(fast: SeDeM, bank: MemoryBank) -> None:
    fast.answer(bank, QUESTIONS[0], decoding=Decoding(2))
    engine = engine_of(fast)
    idle = [*engine.batches.idle, *engine._question_buffers.values()]
    freed = [ref(buffers) for buffers in idle]
    del idle
    gc.disable()  # so that only unreferenced objects are freed
    try:
        engine.release()
        assert [reference() for reference in freed] == [None, None]
        assert engine.memory()["caches"] == 0
    finally:
        gc.enable()


def test_a_failed_prefill_returns_its_batch(
    fast: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(batch: StaticBatch) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(StaticBatch, "_run_prefill", fail)
        with pytest.raises(RuntimeError, match="memory"):
            fast.answer(bank, QUESTIONS[0], decoding=Decoding(2))
    assert not engine_of(fast).batches.active


def test_a_separate_encoder_keeps_the_layers_it_needs(
    config: SedemConfig, tiny_folder: Callable[..., str]
) -> None:
    encoder = tiny_folder("qwen2", depth=6, seed=3, tie_word_embeddings=False)
    decoder = config.encoder
    crossed = config.with_changes(encoder=encoder, decoder=decoder)
    slow, fast = (opened(crossed, lora=True) for _ in range(2))
    gone = [*fast.encoder.model.get_decoder().layers[3:].parameters()]
    gone.append(fast.encoder.model.get_output_embeddings().weight)
    fast.engine = open_engine("static", fast)
    own = size([*slow.parameters(), *slow.buffers()])
    assert fast.engine.memory()["weights"] == own - size(gone)
    bank = slow.read(DOCUMENTS)
    expected = slow.answer(bank, QUESTIONS)
    answers = fast.answer(fast.read(DOCUMENTS), QUESTIONS)
    for ours, theirs in zip(answers, expected, strict=True):
        assert ours.text == theirs.text
        assert [c.text for c in ours.citations] == [c.text for c in theirs.citations]


# The modules whose weights were fused


def test_the_modules_keep_working(slow: SeDeM, fast: SeDeM, bank: MemoryBank) -> None:
    expected = slow.answer(bank, QUESTIONS)
    fast.engine = Eager(fast)
    assert [a.text for a in fast.answer(fast.read(DOCUMENTS), QUESTIONS)] == [
        a.text for a in expected
    ]


def test_merged_layers_refuse_to_run_without_adapters(fast: SeDeM) -> None:
    decoder, positions = fast.decoder, torch.arange(3)[None]
    hidden = decoder.embed(torch.tensor([[5, 6, 7]]))
    with decoder.without_lora():
        decoder.run(hidden, 0, 3, positions)
        with pytest.raises(ConfigError, match=r"layer 4 .* merged from layer 4 on"):
            decoder.run(hidden, 0, 4, positions)
    decoder.run(hidden, 0, 4, positions)


def test_a_model_that_was_moved_or_cast_is_refused(fast: SeDeM, bank: MemoryBank) -> None:
    fast.decoder.model.to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"bfloat16 on 'cpu' after .*float32 on 'cpu'"):
        fast.answer(bank, QUESTIONS[0])


# Opening an engine


def test_engines_are_opened_by_name_and_unknown_ones_refused(slow: SeDeM) -> None:
    assert open_engine("eager", slow).name == "eager"
    assert open_engine("auto", slow, "eager").name == "eager"
    with pytest.raises(ConfigError, match="engine is 'turbo'; it can be auto, eager"):
        open_engine("turbo", slow)
    with pytest.raises(ConfigError, match="needs a CUDA device, the model is on 'cpu'"):
        open_engine("graphs", slow)
    with pytest.raises(ConfigError, match="'static' has no eager attention"):
        open_engine("static", slow, "eager")


def test_rotary_positions_that_cannot_be_captured_are_refused(
    config: SedemConfig, tiny_folder: Callable[..., str]
) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = opened(config, encoder=tiny_folder(rope_parameters=rope))
    with pytest.raises(ConfigError, match="rotary positions that depend on the length"):
        Static(model, graphs=True)


def test_a_checkpoint_opens_with_every_engine_and_is_saved_the_same(
    slow: SeDeM, bank: MemoryBank, tmp_path: Path
) -> None:
    slow.save_pretrained(tmp_path / "first")
    expected = [answer.text for answer in slow.answer(bank, QUESTIONS)]
    for name, engine in (("auto", "static"), ("static", "static"), ("eager", "eager")):
        opened = SeDeM.from_pretrained(tmp_path / "first", device="cpu", engine=name)
        assert opened.engine.name == engine
        assert [answer.text for answer in opened.answer(bank, QUESTIONS)] == expected
        opened.save_pretrained(tmp_path / name)
        for file in ("sedem.safetensors", "adapter/adapter_model.safetensors"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "first" / file).read_bytes()


@pytest.mark.parametrize("context", ["joint", "independent"])
def test_attention_runs_with_the_chosen_kernels_alone(
    context: str, config: SedemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, calls, attend = [], [], fused.attend

    @contextmanager
    def backends(device: torch.device) -> Iterator[None]:
        chosen.append(device)
        yield
        chosen.pop()

    def attended(*given: Any) -> Tensor:
        calls.append(list(chosen))
        return attend(*given)

    monkeypatch.setattr(static, "attention_backends", backends)
    monkeypatch.setattr(fused, "attend", attended)
    model = opened(config, "static", lora=True, block_context=context)
    model.answer(model.read(DOCUMENTS), QUESTIONS[:2], decoding=Decoding(3))
    assert calls and all(calls)
    assert not chosen
