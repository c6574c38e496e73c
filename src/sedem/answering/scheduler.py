"""Many readers, one model: questions wait in a queue and share the rows of a running batch.

    with model.scheduler() as scheduler:
        answer = await scheduler.answer(Request(bank, "Who signed the lease?"))
        async for piece in scheduler.stream(Request(bank, "Who may end it?"), Decoding(200)):
            ...
        reply = scheduler.submit(Request(bank, "Until when?"))   # from a thread
        for piece in reply:
            ...

Each of two threads answers one kind of question, in order of arrival. The first takes all but long
ones. In each turn it prefills at most `JOIN` waiting questions together, then runs one token of
every answer. An answer keeps its row until it ends. An answer of many tokens delays others only if
every row is taken. The second thread takes questions with a very long memory or text
(`plan.is_long`), one after the other. It steps back behind the first, but never stops.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import ceil
from queue import SimpleQueue
from threading import Condition, Lock, Thread
from types import TracebackType
from typing import Self

import torch

from sedem.answering.decoding import GREEDY, Decoding
from sedem.answering.reader import reader_events
from sedem.answering.running import (
    ROOM_SECONDS,
    CallPiece,
    Estimate,
    Event,
    OpenQuestion,
    Reply,
    RunningAnswers,
    Selected,
    ThreadReply,
    Watch,
    closed_before,
)
from sedem.bank.memory_bank import BankReader
from sedem.engine.device import step_back
from sedem.engine.interface import Engine
from sedem.errors import ConfigError, QueueFullError, UnavailableError
from sedem.guidance import Budget
from sedem.modules import SedemModules
from sedem.selecting.plan import Request, is_long
from sedem.types import Answer

_IMPORTING = Lock()
WAITING = 256
"""Default limit of waiting questions."""
JOIN = 4
"""Most questions that are prefilled together; running answers wait for one such prefill."""
LAST = 64
"""Number of recent questions that set the pace of a queue."""
MOST = 60
"""Longest wait to suggest, in seconds."""
USUAL = 60
"""Number of tokens of the longest question that is rehearsed."""
STRIDE = 4
"""Lengths are rehearsed in steps of this many tokens, half the rounding of buffers."""
WORD = "word"
"""Repeated and cut to a number of tokens."""


class Scheduler:
    """Answers questions as they come, in the rows of one running batch.

    Args:
        rows: the most answers at once; None means as many as the engine runs efficiently.
        waiting: the most questions that wait for a row; None means `WAITING`.

    Raises:
        ConfigError: `rows` or `waiting` is below 1.
    """

    def __init__(
        self,
        model: SedemModules,
        engine: Engine,
        name: str = "sedem",
        *,
        rows: int | None = None,
        waiting: int | None = None,
    ) -> None:
        self.model, self.engine, self.name = model, engine, name
        self.rows = engine.batch_size if rows is None else rows
        self.limit = WAITING if waiting is None else waiting
        for what, count in (("rows", self.rows), ("waiting", self.limit)):
            if count < 1:
                raise ConfigError(f"{what} is {count}; it must be at least 1")
        self.changed = Condition()
        self.closed = self.stopped = False
        self._read = set[OpenQuestion]()
        self.short, self._long = Lane(self, self.rows, long=False), Lane(self, 1, long=True)
        self._lanes = self.short, self._long
        for lane in self._lanes:
            lane.thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(at_once=kind is not None)

    @property
    def waiting(self) -> int:
        """Number of questions that wait for a row."""
        return sum(len(lane.waiting) for lane in self._lanes)

    @property
    def running(self) -> int:
        """Number of answers that have a row, or that a reader writes."""
        return sum(lane.running for lane in self._lanes) + len(self._read)

    def submit(self, request: Request, decoding: Decoding = GREEDY) -> ThreadReply:
        """Ask from a thread.

        Args:
            decoding: limit, sampling and stop strings of its answer.

        Returns:
            An iterator of text. Its `selection` waits for the blocks of the answer, which come
            before the text, and its `result` for the whole answer. All raise what `SeDeM.answer`
            raises for this question, or UnavailableError if the engine failed.

        Raises:
            QueueFullError: too many questions wait.
            UnavailableError: the scheduler is closed.
        """
        events = SimpleQueue[Event]()
        question = self._put(OpenQuestion(request, decoding, events.put))
        return ThreadReply(partial(self._cancel, question), iter(events.get, None))

    def stream(self, request: Request, decoding: Decoding = GREEDY) -> AsyncReply:
        """Ask from an event loop; arguments and errors as for `submit`."""
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def send(event: Event) -> None:
            # A closed loop takes no events, and nobody reads them.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(events.put_nowait, event)

        question = self._put(OpenQuestion(request, decoding, send))
        return AsyncReply(partial(self._cancel, question), events)

    async def answer(self, request: Request, decoding: Decoding = GREEDY) -> Answer:
        """Ask from an event loop and wait for the whole answer; as `stream`."""
        reply = self.stream(request, decoding)
        async for _ in reply:
            pass
        assert reply.answer is not None
        return reply.answer

    def require_room(self) -> None:
        """Raise now if `submit` would refuse a question, before any work on it.

        Raises:
            QueueFullError: too many questions wait.
        """
        if max(self.waiting, len(self._read)) >= self.limit:
            raise QueueFullError(
                f"{self.limit} questions are waiting and {self.rows} are answered at once; "
                "ask again later",
                self.short.pace.seconds(self.limit),
            )

    def drain(self) -> None:
        """Take no more questions, end those that wait with an error, and let answers finish.

        This does not block; `close` then waits for the answers.
        """
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        for lane in self._lanes:
            for question in lane.next(self.limit):
                question.send(UnavailableError("the scheduler is closing; use another one"))

    def close(self, *, at_once: bool = False) -> None:
        """Take no more questions and wait until the thread has ended; this blocks an event loop.

        Args:
            at_once: end the questions that wait or are being answered with an error, instead of
                answering them.
        """
        with self.changed:
            self.closed = True
            self.stopped |= at_once
            self.changed.notify_all()
        for lane in self._lanes:
            lane.thread.join()

    def _put(self, question: OpenQuestion) -> OpenQuestion:
        is_read = question.request.reader is not None
        lane = self._long if is_long(self.model, question.request) else self.short
        with self.changed:
            if self.closed:
                raise UnavailableError("the scheduler is closed; use another one")
            self.require_room()
            if not is_read:
                lane.waiting.append(question)
                self.changed.notify_all()
                return question
            self._read.add(question)
        # It waits for another server, so it takes no row.
        Thread(target=self._by_reader, args=(question,), daemon=True).start()
        return question

    def _by_reader(self, question: OpenQuestion) -> None:
        """Send the events of an answer that a reader writes, until nobody waits for it."""
        request, decoding = question.request, question.decoding

        def own() -> list[Answer]:
            return [self.submit(replace(request, reader=None), decoding).result()]

        try:
            for event in reader_events(self.model, self.engine, request, decoding, own):
                if question.ended or self.stopped:
                    break
                question.send(event)
            question.send(closed_before())
        except Exception as error:
            question.send(error)
        finally:
            self._read.discard(question)

    def _cancel(self, question: OpenQuestion) -> None:
        with self.changed:
            for lane in self._lanes:
                if question in lane.waiting:
                    lane.waiting.remove(question)
        question.cancel()


class Lane:
    """A queue of questions and the thread that answers them, in the rows of one batch.

    Args:
        rows: the most answers at once.
        long: whether its answers take long. Its thread steps back behind others, and looks at an
            answer between the pieces of its work.

    Attributes:
        waiting: the questions that wait for a row.
        pace: how fast they get one.
    """

    def __init__(self, scheduler: Scheduler, rows: int, *, long: bool) -> None:
        self.scheduler, self.rows, self.long = scheduler, rows, long
        self.waiting: deque[OpenQuestion] = deque()
        self.pace = Pace()
        self._answers: RunningAnswers | None = None
        # Answers that run once those have joined that are about to.
        self._joining = 0
        self._factor = 1.0
        name = "sedem-long-answers" if long else "sedem-scheduler"
        self.thread = Thread(target=self._run, name=name, daemon=True)

    @property
    def running(self) -> int:
        """Number of answers that have a row, or are about to."""
        answers = self._answers
        return max(self._joining, 0 if answers is None else len(answers.live))

    def next(self, count: int) -> list[OpenQuestion]:
        """Take at most `count` questions out of the queue, in their order."""
        taken: list[OpenQuestion] = []
        with self.scheduler.changed:
            # Checked each time: the garbage collector may drop a reply here, which cancels it.
            while self.waiting and len(taken) < count:
                question = self.waiting.popleft()
                question.wait_ms = (time.perf_counter() - question.since) * 1e3
                taken.append(question)
                self.pace.left()
        return taken

    def _run(self) -> None:
        # The imports of sampling take a second, so they happen before any answer runs. Two threads
        # that import them at once may each find half of them.
        with _IMPORTING:
            Decoding(temperature=1.0).chooser(torch.device("cpu"))
        if self.long:
            step_back()
        own = self.scheduler
        while True:
            with own.changed:
                own.changed.wait_for(lambda: self.waiting or own.closed)
                self.pace.restart()
                if not self.waiting:
                    return
            try:
                with torch.no_grad(), own.engine.open_rows(self.rows) as rows:
                    self._answers = RunningAnswers(own.model, own.engine, own.name, rows, self.rows)
                    self._serve(self._answers)
            except Exception as error:
                if self._answers is not None:
                    self._answers.end(error)
                else:
                    for question in self.next(1):
                        question.send(error)
            self._answers = None

    def _serve(self, answers: RunningAnswers) -> None:
        """Take turns until nothing waits and nothing runs."""
        own = self.scheduler
        while True:
            if own.stopped:
                answers.end(closed_before())
                for question in self.next(len(self.waiting)):
                    question.send(closed_before())
            answers.drop()
            # Some questions join; those that have no room now wait at the front of the queue.
            questions = self.next(min(JOIN, answers.free))
            if questions:
                if self.long:
                    watch = answers.watch = Watch(
                        questions[0],
                        self._factor,
                        lambda: own.stopped,
                        lambda: own.short.running > 0,
                    )
                self._joining = len(answers.live) + len(questions)
                try:
                    put_off = answers.join(questions)
                finally:
                    self._joining = 0
                if self.long and answers.live:
                    self._factor = watch.measured()
                with own.changed:
                    self.waiting.extendleft(one for one in reversed(put_off) if not one.ended)
                if put_off and not answers.live:
                    time.sleep(ROOM_SECONDS)
            # Then one token of every answer.
            if answers.free < self.rows:
                answers.step()
            elif not questions:
                return


class AsyncReply(Reply, AsyncIterator[str]):
    """A reply that is read in an event loop."""

    def __init__(self, cancel: Callable[[], None], events: asyncio.Queue[Event]) -> None:
        super().__init__(cancel)
        self._events = events

    async def __anext__(self) -> str:
        while not self._over:
            if piece := self._piece(await self._next_event()):
                return piece
        raise StopAsyncIteration

    async def parts(self) -> AsyncIterator[str | Estimate | CallPiece]:
        """Read what comes after the blocks: how long it takes if that is long, and the pieces."""
        while not self._over:
            event = await self._next_event()
            if piece := self._piece(event):
                yield piece
            elif isinstance(event, Estimate | CallPiece):
                yield event

    async def selection(self) -> Selected:
        """Wait for the blocks of the answer, before its text."""
        if self.selected is None and not self._over:
            self._piece(await self._next_event())
        return self._known()

    async def _next_event(self) -> Event:
        try:
            return await self._events.get()
        except asyncio.CancelledError:
            self.cancel()
            raise


class Pace:
    """Estimates how fast a queue drains, to tell rejected callers when to retry."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Note that the queue was idle until now."""
        self._times = deque([time.monotonic()], maxlen=LAST + 1)

    def left(self) -> None:
        """Note that a question has left the queue."""
        self._times.append(time.monotonic())

    def seconds(self, count: int) -> int:
        """Whole seconds until `count` more will have left, from 1 to `MOST`."""
        times = self._times
        passed = time.monotonic() - times[0]
        return min(max(ceil(count * passed / max(len(times) - 1, 1)), 1), MOST)


def rehearse(
    model: SedemModules, engine: Engine, name: str, bank: BankReader, k: Budget | None, limit: int
) -> None:
    """Answer questions of every usual length, each up to its second token.

    Args:
        k: number of blocks; None means the model's default.
        limit: token limit of answers, which decides how large the buffers are.
    """
    text = " ".join([WORD] * (USUAL + STRIDE))
    ends = [end for _, end in model.encoder.tokenize([text], offsets=True)["offset_mapping"][0]]
    for count in range(1, USUAL + STRIDE, STRIDE):
        question = OpenQuestion(
            Request(bank, text[: ends[count - 1]], k), Decoding(limit), lambda _: None
        )
        with torch.no_grad(), engine.open_rows(1) as rows:
            answers = RunningAnswers(model, engine, name, rows, 1)
            answers.join([question])
            answers.step()
