"""Questions that come one after another: the answers of each alone, in turn, and its errors too."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Iterator
from random import Random
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from answers import QUESTIONS, RENT, SHORT, assert_same_sources, engine_of, opened
from conftest import LEASE, RECIPE

from sedem import Answer, Decoding, Document, MemoryBank, SeDeM, SedemConfig
from sedem.answering import running
from sedem.answering import scheduler as scheduler_module
from sedem.answering.running import Estimate, OpenQuestion, RunningAnswers, Watch
from sedem.answering.scheduler import MOST, USUAL, Pace
from sedem.backbone.loading import open_backbone
from sedem.engine.batch import BatchSize, StaticBatch
from sedem.engine.static import QuestionBuffers, Static, StaticRows, open_engine
from sedem.errors import (
    BankMismatchError,
    CancelledError,
    ConfigError,
    DataError,
    NoRoomError,
    QueueFullError,
    UnavailableError,
)
from sedem.guidance import Guidance
from sedem.selecting import plan as plans
from sedem.selecting.plan import Request, is_long

LONG = Decoding(max_new_tokens=60)


@pytest.fixture(params=["static", "ahead", "eager"])
def served(request: pytest.FixtureRequest, model: SeDeM) -> SeDeM:
    """A model by each way to run steps."""
    model.requires_grad_(False)
    model.engine = open_engine("eager" if request.param == "eager" else "static", model)
    model.engine.ahead = request.param == "ahead"
    return model


@pytest.fixture
def fast(model: SeDeM) -> SeDeM:
    model.requires_grad_(False)
    model.engine = open_engine("static", model)
    return model


def mixed(model: SeDeM, seed: int) -> list[tuple[Request, Decoding]]:
    """Questions to two banks, with K, limits, stop strings and sampling of their own."""
    banks = [model.read([Document("lease.txt", LEASE)]), model.read([Document("r.txt", RECIPE)])]
    random = Random(seed)
    return [
        (
            Request(random.choice(banks), random.choice(QUESTIONS), random.choice([None, 1, 7])),
            Decoding(
                random.choice([1, 5, 24]),
                temperature=random.choice([0.0, 0.0, 0.8]),
                top_p=random.choice([1.0, 0.9]),
                seed=random.randrange(9),
                stop=random.choice([(), ("e",)]),
            ),
        )
        for _ in range(9)
    ]


def assert_same(answer: Answer, alone: Answer) -> None:
    assert answer.text == alone.text
    assert answer.conditioning == alone.conditioning
    assert_same_sources(answer, alone)
    assert answer.timings.keys() == {*alone.timings, "wait_ms"}


def test_answers_equal_those_of_each_question_alone(served: SeDeM) -> None:
    asked = mixed(served, seed=1)
    with served.scheduler(rows=3) as scheduler:
        replies = [scheduler.submit(*one) for one in asked]
        answers = [reply.result() for reply in replies]
    for (request, decoding), answer in zip(asked, answers, strict=True):
        assert_same(answer, served.answer_requests([request], decoding)[0])


def test_an_event_loop_reads_pieces_and_answers(fast: SeDeM) -> None:
    asked = mixed(fast, seed=2)

    async def read(scheduler: Any, request: Request, decoding: Decoding) -> tuple[str, Answer]:
        stream = scheduler.stream(request, decoding)
        selected = await stream.selection()
        pieces = [piece async for piece in stream]
        assert stream.selected is selected
        assert selected.citations == stream.answer.citations
        assert (selected.k, selected.confidence) == (stream.answer.k, stream.answer.confidence)
        assert [piece async for piece in stream] == []
        assert (await scheduler.answer(request, decoding)).text == stream.answer.text
        return "".join(pieces), stream.answer

    async def read_all() -> list[tuple[str, Answer]]:
        with fast.scheduler(rows=4) as scheduler:
            return await asyncio.gather(*(read(scheduler, *one) for one in asked))

    for (request, decoding), (text, answer) in zip(asked, asyncio.run(read_all()), strict=True):
        assert text == answer.text
        assert_same(answer, fast.answer_requests([request], decoding)[0])


def test_a_short_answer_ends_before_a_long_one_that_began_sooner(
    fast: SeDeM, bank: MemoryBank
) -> None:
    ended = []
    with fast.scheduler(rows=2) as scheduler:
        long = scheduler.submit(Request(bank, RENT), LONG)
        next(long)
        short = [scheduler.submit(Request(bank, RENT), Decoding(2)) for _ in range(3)]
        ended = [reply.result().finish_reason for reply in short]
        assert scheduler.running == 1 and long.answer is None
        long.result()
    assert ended == ["length"] * 3


def test_a_few_waiting_questions_are_prefilled_between_two_steps(
    fast: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch, turns: Event
) -> None:
    seen, join, step = [], RunningAnswers.join, RunningAnswers.step
    monkeypatch.setattr(RunningAnswers, "join", lambda s, q: seen.append(len(q)) or join(s, q))
    monkeypatch.setattr(RunningAnswers, "step", lambda s: (seen.append("step"), step(s)))
    with fast.scheduler(rows=8) as scheduler:
        first = scheduler.submit(Request(bank, RENT), Decoding(9))
        next(first)
        replies = [scheduler.submit(Request(bank, RENT), Decoding(9)) for _ in range(6)]
        turns.set()
        for reply in (first, *replies):
            reply.result()
    assert seen[:6] == [1, "step", 4, "step", 2, "step"]


def test_an_error_reaches_only_its_question(served: SeDeM, bank: MemoryBank) -> None:
    memory = bank.stored(range(len(bank)))
    other = MemoryBank("another", bank.made_by, bank.documents, bank.blocks, memory)
    wrong = [
        (Request(bank, " "), DataError),
        (Request(bank, RENT, 0), ConfigError),
        (Request(other, RENT), BankMismatchError),
    ]
    with served.scheduler(rows=4) as scheduler:
        good = scheduler.submit(Request(bank, RENT), SHORT)
        replies = [scheduler.submit(request, SHORT) for request, _ in wrong]
        for reply, (_, error) in zip(replies, wrong, strict=True):
            with pytest.raises(error):
                reply.result()
        assert good.result().text == served.answer(bank, RENT, decoding=SHORT).text


def test_a_step_that_fails_ends_the_answers_in_it_and_no_others(
    fast: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch, turns: Event
) -> None:
    def fail(self: RunningAnswers) -> None:
        raise RuntimeError("out of memory")

    with fast.scheduler(rows=1) as scheduler:
        with monkeypatch.context() as patch:
            patch.setattr(RunningAnswers, "step", fail)
            with pytest.raises(
                UnavailableError, match=r"engine failed .* \(RuntimeError\)"
            ) as told:
                scheduler.submit(Request(bank, RENT), SHORT).result()
            assert str(told.value.__cause__) == "out of memory"
        turns.set()
        assert scheduler.submit(Request(bank, RENT), SHORT).result().text
    assert not fast.engine.batches.active  # type: ignore[attr-defined]


def test_a_cancelled_or_dropped_question_frees_its_row(
    served: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch, turns: Event
) -> None:
    steps, step = [], RunningAnswers.step
    monkeypatch.setattr(RunningAnswers, "step", lambda s: (steps.append(len(s.live)), step(s)))
    with served.scheduler(rows=1, waiting=2) as scheduler:
        running = scheduler.submit(Request(bank, RENT), LONG)
        next(running)
        waiting = scheduler.submit(Request(bank, RENT), LONG)
        dropped = scheduler.submit(Request(bank, RENT), LONG)
        assert (scheduler.waiting, scheduler.running) == (2, 1)
        with pytest.raises(QueueFullError, match="2 questions are waiting and 1 are answered"):
            scheduler.submit(Request(bank, RENT), SHORT)
        running.cancel()
        waiting.cancel()
        del dropped
        gc.collect()
        last = [scheduler.submit(Request(bank, RENT), SHORT) for _ in range(2)]
        turns.set()
        alone = served.answer(bank, RENT, decoding=SHORT).text
        assert [reply.result().text for reply in last] == [alone] * 2
        for reply in (running, waiting):
            with pytest.raises(CancelledError):
                reply.result()
    assert len(steps) < LONG.max_new_tokens


def test_a_question_that_is_cancelled_while_text_is_sent_stays_cancelled(bank: MemoryBank) -> None:
    class Raced(OpenQuestion):
        """Is cancelled by its reader between the look at `ended` and the change of it."""

        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name == "ended" and not value and not seen:
                seen.append("cancelled")
                self.cancel()
            return value

    seen: list[Any] = []
    question = Raced(Request(bank, RENT), SHORT, seen.append)
    question.send("text")
    assert question.ended
    assert isinstance(seen[1], CancelledError)


def test_a_reply_that_is_dropped_while_questions_are_taken_costs_no_other(
    fast: SeDeM, bank: MemoryBank, turns: Event
) -> None:
    class Dropping(deque[OpenQuestion]):
        def popleft(self) -> OpenQuestion:
            question = super().popleft()
            last.cancel()
            return question

    with fast.scheduler(rows=3) as scheduler:
        running = scheduler.submit(Request(bank, RENT), SHORT)
        next(running)
        first, last = (scheduler.submit(Request(bank, RENT), SHORT) for _ in range(2))
        scheduler.short.waiting = Dropping(scheduler.short.waiting)
        turns.set()
        assert running.result().text == first.result().text


def test_a_cancelled_task_cancels_its_question(fast: SeDeM, bank: MemoryBank, turns: Event) -> None:
    async def ask() -> str:
        with fast.scheduler(rows=1) as scheduler:
            stream = scheduler.stream(Request(bank, RENT), LONG)

            async def read() -> None:
                async for _ in stream:
                    pass

            task = asyncio.create_task(read())
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            turns.set()
            with pytest.raises(CancelledError):
                await read()
            return (await scheduler.answer(Request(bank, QUESTIONS[1]), SHORT)).text

    assert asyncio.run(ask()) == fast.answer(bank, QUESTIONS[1], decoding=SHORT).text


def test_closing_answers_what_was_asked_or_ends_it_at_once(
    fast: SeDeM, bank: MemoryBank, turns: Event
) -> None:
    with pytest.raises(ConfigError, match="rows is 0; it must be at least 1"):
        fast.scheduler(rows=0)
    scheduler = fast.scheduler(rows=1)
    replies = [scheduler.submit(Request(bank, RENT), SHORT) for _ in range(2)]
    turns.set()
    scheduler.close()
    assert [reply.result().text for reply in replies] == [replies[0].answer.text] * 2  # type: ignore[union-attr]
    with pytest.raises(UnavailableError, match="closed"):
        scheduler.submit(Request(bank, RENT), SHORT)
    with pytest.raises(ZeroDivisionError), fast.scheduler(rows=1) as failing:
        replies = [failing.submit(Request(bank, RENT), Decoding(400)) for _ in range(2)]
        next(replies[0])
        raise ZeroDivisionError
    for reply in replies:
        with pytest.raises(UnavailableError, match="closed before"):
            reply.result()


def test_the_blocks_of_an_answer_come_before_its_first_token(
    served: SeDeM, bank: MemoryBank, turns: Event
) -> None:
    with served.scheduler(rows=1) as scheduler:
        first = scheduler.submit(Request(bank, RENT, 3), LONG)
        assert first.selected is None
        selected = first.selection()
        assert first.selected is selected and first.answer is None
        assert first.selection() is selected
        waiting = scheduler.submit(Request(bank, RENT), SHORT)
        waiting.cancel()
        with pytest.raises(CancelledError):
            waiting.selection()
        with pytest.raises(CancelledError, match="no blocks were selected"):
            waiting.selection()
        turns.set()
        answer = first.result()
    assert selected.citations == answer.citations
    assert (selected.k, selected.confidence, selected.declined) == (3, answer.confidence, False)
    names = [bank.documents.names[index] for index in selected.documents]
    assert names == [citation.document for citation in answer.citations]


def test_a_question_that_is_tried_again_sends_its_blocks_once(
    fast: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch, turns: Event
) -> None:
    join = StaticRows.join

    def fail_together(self: StaticRows, rows: list[int], *given: Any) -> Any:
        if len(rows) > 1:
            raise RuntimeError("out of memory")
        return join(self, rows, *given)

    monkeypatch.setattr(StaticRows, "join", fail_together)
    with fast.scheduler(rows=3) as scheduler:
        running = scheduler.submit(Request(bank, RENT), SHORT)
        next(running)
        two = [scheduler.submit(Request(bank, RENT), SHORT) for _ in range(2)]
        turns.set()
        first, *rest = list(two[0]), two[1].result().text
        assert "".join(first) == rest[0]


def test_a_cancelled_question_is_in_at_most_one_more_step(
    served: SeDeM, bank: MemoryBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, step = [], RunningAnswers.step
    monkeypatch.setattr(RunningAnswers, "step", lambda s: (rows.append(len(s.live)), step(s)))
    with served.scheduler(rows=2) as scheduler:
        long = scheduler.submit(Request(bank, RENT), Decoding(60))
        cancelled = scheduler.submit(Request(bank, QUESTIONS[1]), Decoding(60))
        next(cancelled)
        cancelled.cancel()
        steps = len(rows)
        long.result()
    assert set(rows[steps + 1 :]) <= {1}
    assert len(rows) > steps + 1


def test_draining_ends_what_waits_and_finishes_what_runs(
    fast: SeDeM, bank: MemoryBank, turns: Event
) -> None:
    scheduler = fast.scheduler(rows=1)
    running = scheduler.submit(Request(bank, RENT), SHORT)
    next(running)
    waiting = scheduler.submit(Request(bank, RENT), SHORT)
    scheduler.drain()
    with pytest.raises(UnavailableError, match="closing"):
        waiting.result()
    with pytest.raises(UnavailableError, match="closed"):
        scheduler.submit(Request(bank, RENT), SHORT)
    turns.set()
    scheduler.close()
    assert running.result().text == fast.answer(bank, RENT, decoding=SHORT).text
    assert (scheduler.waiting, scheduler.running) == (0, 0)


# Questions that take long


@pytest.fixture
def independent(config: SedemConfig, monkeypatch: pytest.MonkeyPatch) -> SeDeM:
    """A model for which more than one block takes long."""
    monkeypatch.setattr(plans, "WIDE", 20)
    return opened(config, "static", block_context="independent")


class Held:
    """Holds the first long answer before a piece of its work, until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go, self.pieces = Event(), Event(), 0
        call = Watch.__call__

        def held(watch: Watch, done: int, total: int) -> None:
            self.pieces += 1
            self.reached.set()
            assert self.go.wait(60)
            call(watch, done, total)

        monkeypatch.setattr(Watch, "__call__", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    holding = Held(monkeypatch)
    yield holding
    holding.go.set()


LONG_KINDS: list[dict[str, Any]] = [{"k": "all"}, {"k": 6}, {"blocks": range(6)}]


@pytest.mark.parametrize("kind", LONG_KINDS)
def test_a_short_question_is_answered_while_a_long_one_is_prefilled(
    kind: dict[str, Any], independent: SeDeM, held: Held
) -> None:
    bank = independent.read([Document("lease.txt", LEASE)])
    alone = independent.answer(bank, RENT, k=1, decoding=SHORT)
    with independent.scheduler(rows=2) as scheduler:
        long = scheduler.submit(Request(bank, RENT, **kind), SHORT)
        assert held.reached.wait(60)
        for _ in range(3):
            assert scheduler.submit(Request(bank, RENT, 1), SHORT).result().text == alone.text
        waiting = scheduler.submit(Request(bank, RENT, **kind), SHORT)
        assert long.answer is None
        assert (scheduler.running, scheduler.waiting) == (1, 1)
        held.go.set()
        answers = [long.result(), waiting.result()]
    whole = independent.answer(bank, RENT, decoding=SHORT, **kind)
    assert [(one.text, one.conditioning) for one in answers] == [
        (whole.text, whole.conditioning)
    ] * 2
    assert held.pieces > 6


@pytest.mark.parametrize("how", ["cancel", "drop", "close"])
def test_a_long_question_ends_between_two_pieces(how: str, independent: SeDeM, held: Held) -> None:
    bank = independent.read([Document("lease.txt", LEASE)])
    scheduler = independent.scheduler(rows=2)
    long = scheduler.submit(Request(bank, RENT, "all"), SHORT)
    assert held.reached.wait(60)
    if how == "cancel":
        long.cancel()
    elif how == "drop":
        del long
        gc.collect()
    else:
        scheduler.stopped = True
    held.go.set()
    if how == "close":
        with pytest.raises(UnavailableError, match="closed before"):
            long.result()
    else:
        assert scheduler.submit(Request(bank, RENT, "all"), SHORT).result().k == len(bank)
        scheduler.close(at_once=True)
    scheduler.close(at_once=True)
    assert not engine_of(independent).batches.active


@pytest.mark.parametrize(
    ("request_", "long"),
    [
        ({"k": 1}, False),
        ({"k": 2}, True),
        ({"k": "auto"}, True),
        ({"blocks": [3]}, False),
        ({"k": 2, "condition": "text"}, False),
        ({"k": "all", "condition": "text"}, True),
        ({"k": 1, "prompt": [5] * 2000}, True),
    ],
)
def test_what_takes_long_is_known_before_blocks_are_selected(
    request_: dict[str, Any], long: bool, independent: SeDeM
) -> None:
    independent.guidance = Guidance()  # for the adaptive budget
    bank = independent.read([Document(f"{number}.txt", LEASE) for number in range(5)])
    assert is_long(independent, Request(bank, RENT, **request_)) is long


def test_a_long_question_lets_others_go_first_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], list[float]()
    clock = SimpleNamespace(
        perf_counter=lambda: now[0],
        sleep=lambda seconds: (slept.append(seconds), now.__setitem__(0, now[0] + seconds)),
    )
    monkeypatch.setattr(running, "time", clock)
    busy = [True]
    question = OpenQuestion(Request(None, RENT), SHORT, lambda _: None)  # type: ignore[arg-type]
    watch = Watch(question, others=lambda: busy[0])
    for piece, most in ((0.01, 0.09), (0.05, 0.45), (5.0, 1.0)):
        now[0] += piece
        slept.clear()
        watch(0, 0)
        assert sum(slept) == pytest.approx(most, abs=0.005)
    busy[0] = False
    now[0] += 5.0
    slept.clear()
    watch(0, 0)
    assert not slept


@pytest.mark.parametrize(("pace", "told"), [(0.5, 48.5), (0.2, 18.8), (0.05, None)])
def test_what_takes_long_is_told_before_by_the_measured_pace(
    pace: float, told: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, seen = [0.0], list[Any]()
    monkeypatch.setattr(running, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    question = OpenQuestion(Request(None, RENT), SHORT, seen.append)  # type: ignore[arg-type]
    watch = Watch(question)
    watch(0, 0)
    for done in range(1, 101):
        now[0] += pace
        watch(done, 100)
    assert [round(one.seconds, 1) for one in seen] == ([] if told is None else [told])
    now[0] += 100 * pace
    assert watch.measured() == pytest.approx(2.0)
    # The rest of the work took as long as loading: the next estimate knows.
    seen.clear()
    again = Watch(OpenQuestion(Request(None, RENT), SHORT, seen.append), watch.measured())  # type: ignore[arg-type]
    # A long wait before the first block does not count as pace.
    now[0] += 76.0
    again(1, 100)
    now[0] += 1.0
    again(11, 100)
    assert seen == [Estimate(pytest.approx(18.9), 100)]


def test_an_estimate_comes_before_the_text(independent: SeDeM, monkeypatch: Any) -> None:
    monkeypatch.setattr(running, "TELL", 0.0)
    monkeypatch.setattr(running, "MEASURED", 0.0)
    bank = independent.read([Document("lease.txt", LEASE)])

    async def read(scheduler: Any) -> list[Any]:
        stream = scheduler.stream(Request(bank, RENT, "all"), SHORT)
        await stream.selection()
        return [part async for part in stream.parts()]

    with independent.scheduler() as scheduler:
        first, *rest = asyncio.run(read(scheduler))
        reply = scheduler.submit(Request(bank, RENT, "all"), SHORT)
        assert reply.result().text == "".join(rest)
    assert isinstance(first, Estimate) and first.blocks == len(bank)
    assert reply.estimate is not None


def test_a_question_waits_until_there_is_memory(independent: SeDeM, monkeypatch: Any) -> None:
    bank = independent.read([Document("lease.txt", LEASE)])
    batches, put_off = engine_of(independent).batches, Event()
    alone = independent.answer(bank, RENT, k="all", decoding=SHORT)
    take = batches.take

    def counted(*arguments: Any, **options: Any) -> StaticBatch:
        try:
            return take(*arguments, **options)
        except NoRoomError:
            put_off.set()
            raise

    monkeypatch.setattr(batches, "take", counted)
    batches.release()
    batches.limit = 2**24
    taken = batches.take(BatchSize(4, 256, 256, 64))
    batches.limit = batches._used() + 1000  # enough for the question, but not beside these
    with independent.scheduler() as scheduler:
        reply = scheduler.submit(Request(bank, RENT, "all"), SHORT)
        assert put_off.wait(60) and reply.answer is None
        batches.limit = 2**24
        batches.give_back(taken)
        assert reply.result().text == alone.text


# The pace of the queue


@pytest.mark.parametrize(
    ("took", "count", "told"),
    [
        ([0.5] * 10, 64, 32),
        ([0.5] * 10, 1, 1),
        ([10.0] * 64 + [0.25] * 64, 64, 16),  # old times are forgotten
        ([3600.0], 64, MOST),  # nobody is sent away for long
    ],
)
def test_it_is_the_time_that_as_many_took_without_idle_time(
    took: list[float], count: int, told: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(scheduler_module.time, "monotonic", lambda: now[0])
    queue = Pace()
    for seconds in took:
        now[0] += seconds
        queue.left()
    assert queue.seconds(count) == told
    now[0] += 3600
    queue.restart()
    assert queue.seconds(64) == 1
    now[0] += 0.1
    queue.left()
    assert queue.seconds(64) == 7


# Questions that are asked ahead


LIMIT = Decoding(max_new_tokens=3)


def test_no_usual_question_needs_new_buffers_afterwards(
    config: SedemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = open_backbone(config.encoder)
    model = SeDeM(config, backbone, backbone).requires_grad_(False).eval()
    model.engine = open_engine("static", model)
    bank = model.read([Document("lease.txt", LEASE)])
    made: list[object] = []
    for kind in (StaticBatch, QuestionBuffers):
        new = kind.__init__

        def make(*arguments: Any, new: Any = new, **settings: Any) -> None:
            made.append(arguments)
            new(*arguments, **settings)

        monkeypatch.setattr(kind, "__init__", make)
    stepped, step = set[StaticBatch](), StaticBatch.step
    monkeypatch.setattr(StaticBatch, "step", lambda s, ids: stepped.add(s) or step(s, ids))
    model.rehearse(bank, decoding=LIMIT)
    assert made
    assert isinstance(model.engine, Static) and stepped == {*model.engine.batches.idle}
    made.clear()
    for letters in (1, 7, 20, USUAL):
        question = "x" * letters
        assert len(model.encoder.token_ids(question)) == letters
        model.answer(bank, question, decoding=LIMIT)
    assert not made
    model.answer(bank, "x" * 2 * USUAL, decoding=LIMIT)
    assert made
