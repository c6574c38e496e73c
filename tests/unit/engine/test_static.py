"""The static engine: fixed buffers, rows that come and go, room for answers, memory, errors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Thread
from typing import Any
from weakref import ref

import pytest
import torch
from answers import engine_of, inputs_for, joined, opened
from conftest import LEASE, POSITIONS, RECIPE
from torch import Tensor

from sedem import Decoding, Document, MemoryBank, SeDeM, SedemConfig
from sedem.backbone.loading import open_backbone
from sedem.engine import batch as engine_batch
from sedem.engine import device, fused, static
from sedem.engine.batch import BatchSize, StaticBatch, needed_bytes
from sedem.engine.device import Replay, pool_bytes, resident_bytes, round_up, watched
from sedem.engine.eager import Eager
from sedem.engine.interface import AnswerInputs
from sedem.engine.kept import LEAST_FOR_REQUESTS, KeptBudget, half_of_memory
from sedem.engine.static import FIRST_STEPS, Static, StaticRows, open_engine
from sedem.errors import ConfigError, NoRoomError
from sedem.selecting import plan as plans
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
    replay = Replay([given, result])

    def double() -> None:
        for run in replay.runs():
            with run:
                torch.mul(given, 2, out=result)

    given.fill_(4)
    double()
    assert result.tolist() == [8, 8, 8]
    given.set_(torch.ones(3))  # type: ignore[call-overload]
    with pytest.raises(AssertionError, match="moved"):
        double()


class Graph:
    """Stands for a captured graph, and notes in which streams work has run."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1


def test_a_graph_is_captured_once_after_a_rehearsal_and_then_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inside, waits = list[str](), list[str]()

    @contextmanager
    def entered(name: str) -> Iterator[None]:
        inside.append(name)
        try:
            yield
        finally:
            inside.pop()

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            waits.append(f"{self.name} for {other.name}")

    monkeypatch.setattr(device, "side_stream", lambda: Stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream("own"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: entered(stream.name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **settings: entered("graph"))
    count, where = torch.zeros(()), list[list[str]]()
    replay = Replay([count], [count], graph=True)

    def work(*, failing: bool = False) -> None:
        for run in replay.runs():
            with run:
                where.append([*inside])
                count.add_(1)
                if failing and inside == ["graph"]:
                    raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="memory"):
        work(failing=True)
    assert not replay._captured
    for _ in range(3):
        work()
    assert where == [["side"], ["graph"]] * 2
    assert waits == ["side for own", "own for side"] * 2
    assert isinstance(replay._captured, Graph) and replay._captured.replays == 3
    assert count == 2  # each rehearsal was undone; a real capture runs nothing


def test_a_rehearsed_step_changes_no_answer(fast: SeDeM, bank: MemoryBank) -> None:
    rows = starts(fast, bank, 2)
    tokens = torch.tensor([50, 60])
    seen = []
    for rehearsed in (False, True):
        with joined(fast.engine, rows, 8) as (_, running):
            (batch,) = engine_of(fast).batches.active
            if rehearsed:
                with batch.step_replay.rehearsal():
                    batch.step(tokens)
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
    batch = StaticBatch(engine_of(fast).decoder, BatchSize(rows=1, prefix=48, slots=16, steps=2))
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
            if model is fast:  # to the end of its last batch
                with pytest.raises(ConfigError, match=f"longer than {limit} steps"):
                    for ids in tokens:
                        running.step(ids)
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-4)
    assert {batch.size.steps for batch in engine_of(fast).batches.idle} == {64, 128, 160}


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
    monkeypatch.setattr("sedem.engine.batch.IDLE_BYTES", 0)
    for k in (1, 3, 8):
        fast.answer(bank, QUESTIONS[0], k=k, decoding=Decoding(2))
    (batch,) = engine_of(fast).batches.idle
    assert batch.size.slots == 32


def test_memory_counts_batches_and_question_buffers_which_a_release_frees_at_once(
    fast: SeDeM, bank: MemoryBank
) -> None:
    engine = engine_of(fast)
    assert engine.memory()["caches"] == 0
    fast.answer(bank, QUESTIONS[0], decoding=Decoding(2))
    idle = [*engine.batches.idle, *engine._question_buffers.values()]
    assert engine.memory()["caches"] == size([b for one in idle for b in one.buffers])
    freed = [ref(buffers) for buffers in idle]
    del idle
    gc.disable()  # so that only unreferenced objects are freed
    try:
        engine.release()
        assert [reference() for reference in freed] == [None, None]
        assert engine.memory()["caches"] == 0
    finally:
        gc.enable()


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


@pytest.mark.parametrize(
    ("name", "settings", "sentence"),
    [
        ("turbo", {}, "engine is 'turbo'; it can be auto, eager"),
        ("graphs", {}, "needs a CUDA device, the model is on 'cpu'"),
        ("static", {"attention": "eager"}, "'static' has no eager attention"),
        ("int8", {"attention": "eager"}, "'int8' has no eager attention"),
    ],
)
def test_an_engine_that_cannot_run_a_model_is_refused(
    name: str, settings: dict[str, str], sentence: str, slow: SeDeM
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        open_engine(name, slow, **settings)


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
    assert open_engine("auto", slow, "eager").name == "eager"
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
    engine_of(model)._beside = False  # as on a GPU, where the choice counts
    model.answer(model.read(DOCUMENTS), QUESTIONS[:2], decoding=Decoding(3))
    assert calls and all(calls)
    assert not chosen


# Rows that come and go: each has the logits that it has alone, whoever runs beside it


MIXED = ["Pets?", "What is the rent?", "How long is notice? " * 6]
ROWS = 3


def read(model: SeDeM) -> MemoryBank:
    return model.read(DOCUMENTS)


def start_at(model: SeDeM, bank: MemoryBank, question: str, k: int, turn: int = 0) -> AnswerInputs:
    request = Request(bank, question, k) if k else Request(bank, question, blocks=[])
    return inputs_for(model, request, turn)


class Asked:
    """A question of random K and length, the tokens it is given, and when it leaves."""

    def __init__(self, model: SeDeM, bank: MemoryBank, random: Random) -> None:
        k = random.choice([0, 1, 2, 9])
        self.start = start_at(model, bank, random.choice(MIXED), k, random.randrange(9))
        self.limit = random.choice([1, 3, 12, 40])
        self.leaves = random.choice([self.limit, self.limit, random.randrange(self.limit + 1)])
        self.tokens = [random.randrange(2, 258) for _ in range(self.leaves)]
        self.logits: list[Tensor] = []


def run_alone(model: SeDeM, asked: Asked) -> Tensor:
    with joined(model.engine, [asked.start], asked.limit) as (logits, rows):
        return torch.stack(
            [logits[0], *(rows.step(torch.tensor([token]))[0] for token in asked.tokens)]
        )


def run_together(model: SeDeM, questions: list[Asked], random: Random) -> None:
    """Let questions join free rows at random times, until all have left."""
    waiting, live = list(questions), dict[int, Asked]()
    with model.engine.open_rows(ROWS) as rows:
        while waiting or live:
            free = [row for row in range(ROWS) if row not in live]
            if waiting and free and (not live or random.random() < 0.4):
                count = random.randint(1, min(len(free), len(waiting)))
                joining = dict(zip(random.sample(free, count), waiting[:count], strict=True))
                del waiting[:count]
                starts = [asked.start for asked in joining.values()]
                limits = [asked.limit for asked in joining.values()]
                logits_JV = rows.join(list(joining), starts, limits)
                for asked, logits_V in zip(joining.values(), logits_JV, strict=True):
                    asked.logits.append(logits_V.clone())
                live |= joining
            for row in [row for row, asked in live.items() if len(asked.logits) > asked.leaves]:
                rows.leave(row)
                del live[row]
            if live:
                tokens = torch.full((ROWS,), 7)
                for row, asked in live.items():
                    tokens[row] = asked.tokens[len(asked.logits) - 1]
                logits_BV = rows.step(tokens)
                assert logits_BV.isfinite().all()
                for row, asked in live.items():
                    asked.logits.append(logits_BV[row].clone())


CONTINUATIONS = [[5, 9, 11, 4], [5, 9, 12, 4], [30, 31, 32, 33]]


@pytest.mark.parametrize("engine", ["eager", "static"])
@pytest.mark.parametrize("context", ["joint", "separate", "independent"])
@pytest.mark.parametrize("guidance", [False, True])
def test_branches_have_the_logits_of_each_continuation_alone(
    context: str, guidance: bool, engine: str, config: SedemConfig
) -> None:
    changes: dict[str, object] = {"block_context": context, "guidance": guidance}
    slow, model = (opened(config, name, **changes) for name in ("eager", engine))
    bank = read(slow)
    asked = [
        start_at(slow, bank, question, k) for question, k in zip(MIXED, (2, 0, 9), strict=True)
    ]
    with model.engine.open_rows(ROWS) as rows:
        rows.join([2, 0], asked[:2], [8, 8])
        rows.join([1], asked[2:], [8])
        rows.step(torch.tensor([7, 7, 7]))
        found = {row: rows.branches(row, torch.tensor(CONTINUATIONS)) for row in (0, 1, 2)}
        after = rows.step(torch.tensor([8, 8, 8]))
    for row, start in zip((2, 0, 1), asked, strict=True):
        for branch, tokens in enumerate(CONTINUATIONS):
            with joined(slow.engine, [start], 8) as (_, alone):
                alone.step(torch.tensor([7]))
                expected = [alone.step(torch.tensor([token]))[0] for token in tokens]
            torch.testing.assert_close(
                found[row][branch], torch.stack(expected), rtol=1e-4, atol=1e-4
            )
        with joined(slow.engine, [start], 8) as (_, alone):
            alone.step(torch.tensor([7]))
            expected_V = alone.step(torch.tensor([8]))[0]
        torch.testing.assert_close(after[row], expected_V, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("engine", "context", "guidance", "wide"),
    [
        ("static", "joint", False, None),
        ("static", "joint", True, None),
        ("static", "independent", False, None),
        ("static", "independent", True, None),
        ("static", "independent", False, 20),  # some rows have a batch of their own
        ("eager", "joint", False, None),
    ],
)
def test_rows_that_come_and_go_have_the_logits_of_each_alone(
    engine: str,
    context: str,
    guidance: bool,
    wide: int | None,
    config: SedemConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes: dict[str, object] = {"block_context": context, "guidance": guidance}
    slow, fast = (opened(config, name, **changes) for name in ("eager", engine))
    bank, random = read(slow), Random(f"{context} {guidance} {wide}")
    questions = [Asked(slow, bank, random) for _ in range(7)]
    if wide is not None:
        monkeypatch.setattr(engine_batch, "WIDE", wide)
        batches = engine_of(fast).batches
        slots = [batches.slots_of(asked.start) for asked in questions]
        assert {batches.exceeds(count) for count in slots} == {True, False}
    run_together(fast, questions, random)
    for asked in questions:
        actual = torch.stack(asked.logits)
        torch.testing.assert_close(actual, run_alone(slow, asked), rtol=1e-3, atol=1e-4)
    assert not isinstance(fast.engine, Static) or not fast.engine.batches.active


def test_a_row_that_left_is_empty_and_taken_again_while_the_others_stay(
    fast: SeDeM, bank: MemoryBank
) -> None:
    starts = [start_at(fast, bank, question, 2) for question in MIXED]
    tokens = torch.tensor([50, 60, 70])
    with fast.engine.open_rows(3) as rows:
        for row, start in enumerate(starts):
            rows.join([row], [start], [20])
        rows.step(tokens)
        (batch,) = engine_of(fast).batches.active
        rows.leave(1)
        rows.step(tokens)
        assert engine_of(fast).batches.active == [batch]
        empty = next(place for place in range(batch.size.rows) if place not in batch.text)
        assert batch.used.tolist() == [int(place != empty) for place in range(len(batch.used))]
        for cache in (batch.lower, batch.upper):
            assert cache.next_column[empty] == 0
        rows.join([1], [starts[1]], [20])
        assert engine_of(fast).batches.active == [batch]
        assert empty in batch.text


@pytest.mark.parametrize("context", ["joint", "independent"])
def test_a_row_keeps_nothing_of_the_one_before_it(context: str, config: SedemConfig) -> None:
    changes: dict[str, object] = {"block_context": context, "guidance": True}
    slow, fast = (opened(config, name, **changes) for name in ("eager", "static"))
    bank = read(slow)
    large, small = (start_at(slow, bank, MIXED[0], k) for k in (9, 1))
    tokens = torch.randint(2, 258, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    with fast.engine.open_rows(2) as rows:
        for row in (0, 1):
            rows.join([row], [large], [40])
        (batch,) = engine_of(fast).batches.active
        rows.leave(1)
        seen = [rows.join([1], [small], [40])[0]]
        assert engine_of(fast).batches.active == [batch]
        for token in tokens:
            seen.append(rows.step(torch.tensor([7, token]))[1].clone())
    asked = Asked(slow, bank, Random(0))
    asked.start, asked.limit, asked.tokens = small, 40, tokens
    torch.testing.assert_close(torch.stack(seen), run_alone(slow, asked), rtol=1e-3, atol=1e-4)


def test_the_batch_has_room_for_the_rows_that_run_and_little_more(
    fast: SeDeM, bank: MemoryBank
) -> None:
    small, large = (start_at(fast, bank, MIXED[0], k) for k in (1, len(bank)))
    tokens = torch.zeros(8, dtype=torch.long)
    with fast.engine.open_rows(8) as rows:
        sizes = []
        for row in range(6):
            rows.join([row], [small], [9])
            sizes.append(engine_of(fast).batches.active[0].size.rows)
        assert sizes == [1, 2, 4, 4, 8, 8]
        rows.join([6], [large], [9])
        assert engine_of(fast).batches.active[0].size.slots == 128
        for row in range(3):
            rows.leave(row)
        rows.step(tokens)
        assert engine_of(fast).batches.active[0].size.rows == 4
        rows.leave(6)
        rows.step(tokens)
        assert engine_of(fast).batches.active[0].size.slots == 64
    assert not engine_of(fast).batches.active


def test_a_prefill_that_fails_leaves_the_other_rows_as_they_are(
    fast: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, tokens = start_at(fast, bank, MIXED[0], 2), torch.tensor([50, 60])

    def run(*, failing: bool) -> list[Tensor]:
        with fast.engine.open_rows(2) as rows:
            seen = [rows.join([0], [start], [9])[0], rows.step(tokens)[0].clone()]
            if failing:
                with monkeypatch.context() as patch:
                    patch.setattr("sedem.engine.batch.StaticBatch.prefill", fail)
                    with pytest.raises(RuntimeError, match="memory"):
                        rows.join([1], [start], [9])
            return [*seen, rows.step(tokens)[0].clone()]

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    assert all(map(torch.equal, run(failing=False), run(failing=True)))
    assert not engine_of(fast).batches.active


@pytest.mark.parametrize("place", ["StaticBatch.clear", "StaticBatch.copy_rows"])
@pytest.mark.parametrize("moving", ["join", "step"])
def test_a_move_that_fails_leaves_the_rows_where_they_are(
    moving: str, place: str, fast: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, tokens = start_at(fast, bank, MIXED[0], 2), torch.tensor([50, 60])
    steps = FIRST_STEPS + 2 if moving == "step" else 1

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    def run(*, failing: bool) -> list[Tensor]:
        with fast.engine.open_rows(2) as rows:
            seen = [rows.join([0], [start], [2 * FIRST_STEPS])[0]]
            for _ in range(steps):
                if failing:
                    before = [*engine_of(fast).batches.active]
                    with monkeypatch.context() as patch, suppress(RuntimeError):
                        patch.setattr(f"sedem.engine.batch.{place}", fail)
                        if moving == "join":
                            rows.join([1], [start], [9])
                        else:
                            seen.append(rows.step(tokens)[0].clone())
                            continue
                    assert engine_of(fast).batches.active == before
                seen.append(rows.step(tokens)[0].clone())
            if moving == "join":
                seen.append(rows.join([1], [start], [9])[0])
                seen.append(rows.step(tokens)[0].clone())
        assert not engine_of(fast).batches.active
        return seen

    whole, broken = run(failing=False), run(failing=True)
    assert len(whole) == len(broken)
    assert all(map(torch.equal, whole, broken))


def test_a_row_that_could_not_be_copied_is_empty(
    fast: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, real = start_at(fast, bank, MIXED[0], 2), StaticBatch.copy_rows

    def fail_at_the_end(*arguments: Any) -> None:
        real(*arguments)
        raise RuntimeError("out of memory")

    with fast.engine.open_rows(2) as rows:
        for row in (0, 1):
            rows.join([row], [start], [9])
        rows.leave(1)
        (batch,) = engine_of(fast).batches.active
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="memory"):
            patch.setattr(StaticBatch, "copy_rows", fail_at_the_end)
            rows.join([1], [start], [9])
        assert engine_of(fast).batches.active == [batch]
        assert (len(batch.text), int(batch.used.sum())) == (1, 1)
        rows.join([1], [start], [9])
        assert (len(batch.text), int(batch.used.sum())) == (2, 2)


# Any K


def test_k_goes_beyond_the_positions_of_the_decoder(
    config: SedemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "WIDE", 4000)
    wide, step = set[int](), StaticRows.step
    monkeypatch.setattr(StaticRows, "step", lambda r, ids: wide.add(len(r.wide)) or step(r, ids))
    model, eager = (opened(config, n, block_context="independent") for n in ("static", "eager"))
    bank = model.read([Document(f"{n}.txt", f"{LEASE} {n:02}") for n in range(30)])
    limit = Decoding(4)
    questions = MIXED[:2]
    answers = model.answer(bank, questions, k="all", decoding=limit)
    assert {answer.k for answer in answers} == {len(bank)} == {510}
    assert answers[0].conditioning > 7900 > POSITIONS
    expected = eager.answer(bank, questions, k="all", decoding=limit)
    assert [a.text for a in answers] == [a.text for a in expected]
    # Only one answer with so much memory runs at a time, and its buffers are freed.
    assert wide == {1} and not engine_of(model).batches.idle
    joint = opened(config, "static", block_context="joint")
    with pytest.raises(ConfigError, match=r"selected states.*use k of at most \d\d"):
        joint.answer(bank, MIXED[0], k="all", decoding=limit)
    with pytest.raises(ConfigError, match=r"16 states of the longest block, .*ask something"):
        model.answer(bank, MIXED[0], k="all", decoding=Decoding(POSITIONS))


def test_memory_that_has_no_room_is_rejected_before_it_is_allocated(
    config: SedemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(config, "static", block_context="independent")
    bank = read(model)
    monkeypatch.setattr(engine_batch, "free_bytes", lambda _: 7)
    with pytest.raises(ConfigError, match=r"need [\d,]+ bytes of memory, 7 are free; use a sm"):
        model.answer(bank, MIXED[0], k="all")
    assert not engine_of(model).batches.active


@pytest.mark.parametrize("guidance", [False, True])
def test_a_very_long_memory_is_attended_to_in_pieces_with_the_same_result(
    guidance: bool, config: SedemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(config, "static", block_context="independent", guidance=guidance)
    inputs, tokens = start_at(model, read(model), MIXED[2], 9), torch.arange(2, 42).view(4, 10)

    def run() -> list[Tensor]:
        with joined(model.engine, [inputs], 3) as (first, rows):
            return [first, rows.branches(0, tokens), rows.step(torch.tensor([50]))]

    whole, pieces = run(), list[tuple[int, int]]()
    monkeypatch.setattr("sedem.engine.fused.WIDE", 20)
    with watched(lambda done, total: pieces.append((done, total))):
        assert all(map(torch.equal, whole, run()))
    assert [one for one in pieces if one[1]] == [(done, 9) for done in range(1, 10)]
    assert len(pieces) > 9 + 3 * len(engine_of(model).decoder.layers)


@pytest.mark.parametrize("blocks", [40, 300, 1500])
def test_memory_tells_how_many_blocks_fit(
    blocks: int, config: SedemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_batch, "WIDE", 20)
    model = opened(config, "static", block_context="independent")
    batches, states = engine_of(model).batches, config.states_per_block
    assert batches.most_blocks() is None
    slots = blocks * states // engine_of(model).decoder.states_per_slot
    size = BatchSize(1, engine_batch.USUAL_PREFIX, round_up(slots, 16), 0)
    batches.limit = needed_bytes(engine_of(model).decoder, size) * 8 // 7 + 8
    most = batches.most_blocks()
    assert most is not None and blocks <= most < 1.15 * blocks + 16
    batches.give_back(batches.take(size))
    with pytest.raises(ConfigError, match=rf"need [\d,]+ bytes .* enough for {most:,} blocks; use"):
        batches.take(replace(size, slots=2 * size.slots))
    batches.limit -= 64
    with pytest.raises(ConfigError, match=r"[\d,]+ are allowed, which is enough for"):
        batches.take(size)
    assert not batches.active


def test_a_new_batch_takes_the_place_of_idle_ones_then_of_what_is_kept(
    config: SedemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(config, "static", block_context="independent")
    engine, bank = engine_of(model), read(model)
    model.answer(bank, MIXED[0], k=9)
    batches, kept = engine.batches, engine.kept
    assert batches.idle and kept.nbytes
    needed = needed_bytes(engine.decoder, BatchSize(2, 64, 64, 64))
    batches.limit = needed + kept.nbytes // 2
    batch = batches.take(BatchSize(2, 64, 64, 64))
    assert batches.idle == [] and 0 < kept.nbytes <= batches.limit - needed
    with pytest.raises(NoRoomError, match=r"other answers use [\d,]+ of [\d,]+; ask again later"):
        batches.take(BatchSize(2, 64, 64, 64))
    # What runs cannot wait when it grows.
    grown = batches.take(BatchSize(2, 64, 64, 64), grown=True)
    assert kept.nbytes == 0
    batches.give_back(grown)
    batches.give_back(batch)
    assert not batches.active and batches.idle
    model.answer(bank, MIXED[0], k=1)
    assert kept.nbytes


def test_memory_is_what_the_open_model_leaves() -> None:
    taken = resident_bytes()
    room = KeptBudget(memory=8 * taken + LEAST_FOR_REQUESTS).room()
    assert room is not None and 5.5 * taken < room < 7.5 * taken
    with pytest.raises(ConfigError, match="and requests need some"):
        KeptBudget(memory=taken + LEAST_FOR_REQUESTS // 2).room()
    assert KeptBudget().room() is None
    with pytest.raises(ConfigError, match=r"the open model takes [\d,]+ .* give more than [\d,]+"):
        KeptBudget(memory=taken // 2).room()
    half = half_of_memory()
    assert half is None or half > taken


@pytest.mark.parametrize("engine", ["static", "eager"])
def test_the_order_of_independent_blocks_decides_nothing(engine: str, config: SedemConfig) -> None:
    model = opened(config, engine, block_context="independent", guidance=True)
    bank = read(model)
    inputs = start_at(model, bank, MIXED[1], 9)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(5))
    blocks = [inputs.blocks[place] for place in order]
    shuffled = replace(inputs, blocks=blocks, scores=inputs.scores[order])
    with joined(model.engine, [inputs, shuffled], 3) as (first, rows):
        later = rows.step(torch.tensor([50, 50]))
    for logits in (first, later):
        torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=5e-5)
