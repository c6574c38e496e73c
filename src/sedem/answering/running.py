"""The decoding loop: answers are decoded together while others join and leave, in one thread.

A question sends events; the reader of its reply gets them.

Letters: B rows, J rows that join, N blocks, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sedem.answering.decoding import UNANSWERABLE, Decoding, Transcript, fetch, log_probabilities
from sedem.answering.spans import Found, find_quotation, told_partly, words_without_source
from sedem.backbone.prompts import NEXT_QUESTION, end_ids
from sedem.engine.device import Clock, watched
from sedem.engine.interface import Engine, Rows
from sedem.errors import (
    CancelledError,
    ConfigError,
    NoRoomError,
    SedemError,
    UnavailableError,
)
from sedem.method.selector import top_k
from sedem.modules import SedemModules
from sedem.selecting.plan import Prepared, Request, is_long, plan_of, prepare
from sedem.selecting.select import count_candidates, select
from sedem.types import Answer, Citation, certainty_of, joint


@dataclass(frozen=True)
class Selected:
    """What is known of an answer before its first token; the whole answer repeats it.

    Attributes:
        citations: the spans that condition the answer, best first.
        documents: index of the document of each citation.
    """

    citations: tuple[Citation, ...]
    documents: tuple[int, ...]
    confidence: float | None
    declined: bool

    @property
    def k(self) -> int:
        """Number of blocks used."""
        return len(self.citations)


@dataclass(frozen=True)
class Estimate:
    """How long an answer will take, told before anything over `TELL` seconds.

    Attributes:
        seconds: until its first token, from now on.
        blocks: number of blocks that have to be read for it.
    """

    seconds: float
    blocks: int


@dataclass(frozen=True)
class CallPiece:
    """A piece of a call of a tool, which a reader makes in place of an answer.

    Attributes:
        delta: its fields, as OpenAI's protocol streams them.
    """

    delta: Mapping[str, Any]


Event = Selected | Estimate | str | CallPiece | Answer | Exception
"""The blocks of an answer, how long it will take if that is long, then pieces of text and of calls
of tools, then the last event: the whole answer, or the error that replaces it. An error may also
come alone."""

TELL, MEASURED = 10.0, 1.0
"""Seconds that are told before they pass, and for how long the work is measured before."""
WAITED, LONGEST_WAIT, LOOK_SECONDS = 9, 1.0, 0.002
"""After a piece, others go first for up to so many times as long as it took, in seconds at most;
how often they are looked at."""
MANY = 2
"""Blocks that may have the words of a question alike without a note that some were left out."""
ROOM_SECONDS = 0.05
"""How long to wait before asking again whether there is room."""


class OpenQuestion:
    """A request that waits or is being answered.

    Args:
        send: gives an event to the reader; called by any thread.

    Attributes:
        since: when its times start, by `time.perf_counter`.
        wait_ms: how long it waited in a queue; None if there is none.
        ended: whether the last event was sent; nothing comes after it.
    """

    def __init__(self, request: Request, decoding: Decoding, send: Callable[[Event], None]) -> None:
        self.request, self.decoding = request, decoding
        self.since = time.perf_counter()
        self.wait_ms: float | None = None
        self.selected = self.ended = False
        self._send = send

    def send(self, event: Event) -> None:
        """Give an event to the reader, unless the last one was sent."""
        if self.ended:
            return
        if isinstance(event, Selected):
            if self.selected:  # after a failed joint prefill, a question is tried again alone
                return
            self.selected = True
        elif isinstance(event, Answer | Exception):
            self.ended = True  # never back to False: a reader may cancel while text is being sent
        self._send(event)

    def cancel(self) -> None:
        """End the question; the scheduler drops it before its next step."""
        self.send(CancelledError("the question was cancelled"))


class Reply:
    """The reader's end of an answer. Dropping a reply cancels its question.

    Attributes:
        selected: the blocks of the answer once they were read; None before. They come before the
            first piece of text.
        estimate: how long it takes, once that was read; None before, and if it is not long.
        answer: the whole answer once it was read; None before.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel
        self.selected: Selected | None = None
        self.estimate: Estimate | None = None
        self.answer: Answer | None = None
        self._over = False

    def __del__(self) -> None:
        self.cancel()

    def _piece(self, event: Event) -> str:
        """Take an event; return its text, which is empty for the blocks and the last event."""
        if isinstance(event, str):
            return event
        if isinstance(event, Selected):
            self.selected = event
        elif isinstance(event, Estimate):
            self.estimate = event
        elif isinstance(event, Answer | Exception):
            self._over = True
            if isinstance(event, Exception):
                raise failure(event)
            self.answer = event
        return ""

    def _known(self) -> Selected:
        if self.selected is None:
            raise CancelledError("the reply was read to its end and no blocks were selected")
        return self.selected


class ThreadReply(Reply, Iterator[str]):
    """A reply that is read by a thread, piece by piece or at once.

    Args:
        events: the events of its question; the next one is waited for or, in the thread that
            answers, worked for.
    """

    def __init__(self, cancel: Callable[[], None], events: Iterator[Event]) -> None:
        super().__init__(cancel)
        self._events = events

    def __next__(self) -> str:
        while not self._over:
            if piece := self._piece(next(self._events)):
                return piece
        self.cancel()  # nothing more is wanted of whoever made the events
        raise StopIteration

    def selection(self) -> Selected:
        """Wait for the blocks of the answer, before its text."""
        if self.selected is None and not self._over:
            self._piece(next(self._events))
        return self._known()

    def result(self) -> Answer:
        """Wait for the whole answer."""
        for _ in self:
            pass
        if self.answer is None:
            raise CancelledError("the reply was read to its end and has no answer")
        return self.answer


def failure(error: Exception) -> SedemError:
    """Return the error to raise for a reader; unexpected ones become UnavailableError.

    Args:
        error: the error; returned as it is if it is a SedemError, else the cause of the result.
    """
    if isinstance(error, SedemError):
        return error
    unavailable = UnavailableError(
        f"the engine failed before it had the answer ({type(error).__name__}); ask again"
    )
    unavailable.__cause__ = error
    return unavailable


class Running:
    """One answer that is being decoded.

    Args:
        stages: the times of the stages before decoding, shared by all that joined with it.

    Attributes:
        clock: its times since the question was asked.
        choose: chooses tokens `[1]` from logits `[1, V]`.
        found: what was found in the text of its blocks; None if that was not looked for.
    """

    def __init__(
        self, model: SedemModules, question: OpenQuestion, prepared: Prepared, stages: Clock
    ) -> None:
        self.question, self.prepared, self.stages = question, prepared, stages
        chat = model.config.chat_template or prepared.plan.prompt is not None
        ends, also = end_ids(model.decoder, chat=chat), () if chat else (NEXT_QUESTION,)
        self.transcript = Transcript(model.decoder.tokenizer, ends, question.decoding, also)
        self.choose = question.decoding.chooser(model.device)
        self.clock = Clock(model.device, question.since)
        self.found: Found | None = None


Logprobs = dict[int, list[tuple[int, float]] | None]
"""Log-probabilities of the tokens of one step, by row."""


class Watch:
    """Looks at a long answer between two pieces of its work: lets others go first, and tells how
    long it will take.

    Args:
        factor: how many times as long as loading blocks the whole work took for the last answer.
        stopped: whether nobody may wait for this answer any more.
        others: whether other answers run, which go first for a while.
    """

    def __init__(
        self,
        question: OpenQuestion,
        factor: float = 1.0,
        stopped: Callable[[], bool] = lambda: False,
        others: Callable[[], bool] = lambda: False,
    ) -> None:
        self.question, self.factor, self.stopped, self.others = question, factor, stopped, others
        self.began = self.loaded = self._since = time.perf_counter()
        # When the first blocks had been loaded, and how many.
        self._first: tuple[float, int] | None = None
        self._told = False

    def __call__(self, done: int, total: int) -> None:
        """Look at the work, of which so much is done.

        Raises:
            CancelledError: nobody waits for the answer.
            UnavailableError: it is not to be given any more.
        """
        now = time.perf_counter()
        until = now + min(WAITED * (now - self._since), LONGEST_WAIT)
        while True:
            if self.stopped():
                raise closed_before()
            if self.question.ended:
                raise CancelledError("the question was cancelled")
            if not self.others() or time.perf_counter() >= until:
                break
            time.sleep(LOOK_SECONDS)
        self._since = time.perf_counter()
        if not done:
            return
        self.loaded = time.perf_counter()
        # What came before the first blocks, such as a wait for others, says nothing of the pace.
        since, before = self._first = self._first or (self.loaded, done)
        spent = self.loaded - since
        if self._told or spent < MEASURED or done == before:
            return
        self._told = True
        seconds = spent / (done - before) * (total * self.factor - done)
        if seconds + self.loaded - self.began > TELL:
            self.question.send(Estimate(seconds, total))

    def measured(self) -> float:
        """How many times as long as loading blocks the work took until now."""
        loading = self.loaded - self.began
        return (time.perf_counter() - self.began) / loading if loading > MEASURED else self.factor


def closed_before() -> UnavailableError:
    """Return the error of a question that a closed scheduler does not answer."""
    return UnavailableError("the scheduler was closed before it had the answer")


class RunningAnswers:
    """The answers in the rows of an engine.

    Attributes:
        watch: looks at the work between its pieces, for an answer that takes long; else None.
    """

    def __init__(
        self, model: SedemModules, engine: Engine, name: str, rows: Rows, count: int
    ) -> None:
        self.model, self.engine, self.name = model, engine, name
        self.rows, self.count = rows, count
        self.live: dict[int, Running] = {}
        self.watch: Watch | None = None
        self._ids_B = torch.zeros(count, dtype=torch.long, device=model.device)
        # Chosen tokens that are still being copied to the host, and the answers they belong to.
        self._unread: tuple[Callable[[], list[int]], dict[int, Running], Logprobs] | None = None

    @property
    def free(self) -> int:
        """Number of free rows."""
        return self.count - len(self.live)

    def join(self, questions: Sequence[OpenQuestion]) -> list[OpenQuestion]:
        """Select blocks for some questions, prefill them, and send the beginning of each answer.

        They do so together. If that fails, each is tried alone, so that an error reaches only its
        own question.

        Args:
            questions: at most as many as there are free rows.

        Returns:
            Those that have no room now, and are to join later.
        """
        model = self.model
        try:
            with watched(self.watch):
                # Without `since`, it would wait for the device.
                stages = Clock(model.device, questions[0].since)
                plans = [plan_of(model, question.request) for question in questions]
                # The blocks of all questions, unless they were selected elsewhere.
                undecided = [plan for plan in plans if plan.selected is None]
                found = iter(select(model, self.engine, undecided, stages) if undecided else [])
                joined = list[Running]()
                for question, plan in zip(questions, plans, strict=True):
                    limit = question.decoding.max_new_tokens
                    prepared = prepare(model, plan, plan.selected or next(found), limit)
                    joined.append(Running(model, question, prepared, stages))
                stages.lap("gather_ms")
                # What is known of each answer before its first token.
                for running in joined:
                    selection, bank = running.prepared.selection, running.prepared.plan.bank
                    of_blocks = tuple(bank.rows(selection.ranked).documents.tolist())
                    rest = selection.confidence, selection.declined
                    running.question.send(Selected(running.prepared.citations, of_blocks, *rest))
                # A row for each question that is not declined.
                free = sorted(set(range(self.count)) - self.live.keys())
                asked = [running for running in joined if running.prepared.inputs is not None]
                rows = dict(zip(free, asked, strict=False))
                if rows:
                    inputs = [one.prepared.inputs for one in asked if one.prepared.inputs]
                    limits = [one.question.decoding.max_new_tokens for one in asked]
                    logits_JV = self.rows.join(list(rows), inputs, limits)
                    stages.lap("prefill_ms")
                    self.live |= rows
                for place, (row, running) in enumerate(rows.items()):
                    with self._only_for(running, row):
                        self._begin(row, running, logits_JV[place])
                for running in joined:
                    if running.prepared.inputs is None:
                        with self._only_for(running):
                            running.clock.mark("ttft_ms")
                            running.transcript.finish(UNANSWERABLE, "unanswerable")
                            self._send(running)
                return []
        except NoRoomError:
            if len(questions) == 1:
                return [*questions]
        except Exception as error:
            if len(questions) == 1:
                questions[0].send(error)
                return []
        return [one for question in questions for one in self.join([question])]

    def _begin(self, row: int, running: Running, logits_V: Tensor) -> None:
        """Quote the answer to a prefilled question from its blocks, or choose its first token."""
        prepared, decoding = running.prepared, running.question.decoding
        how, found = prepared.plan.answer, None
        if how != "free":
            found = find_quotation(
                self.model, self.engine, self.rows, row, prepared, decoding, logits_V
            )
            if how == "span" and found.quotation is None:
                raise ConfigError(
                    "the answer is to be quoted, but the selected blocks have no words that fit "
                    f"into {decoding.max_new_tokens} tokens; select other blocks, raise the limit "
                    "or leave answer out"
                )
            found = running.found = told_partly(prepared, found)
        if found is not None and found.quotation is not None:
            running.transcript.finish(found.quotation.text, "end")
        elif found is not None and found.free is not None:
            running.transcript = found.free
        else:
            token = running.choose(logits_V[None])
            self._ids_B[row] = token[0]
            running.transcript.add(int(token), log_probabilities(logits_V, token[0], decoding))
        running.clock.mark("ttft_ms")
        self._send(running, row)

    def step(self) -> None:
        """Run one token of every answer, and send what is new."""
        if not self.live:
            return
        with watched(self.watch):
            logits_BV = self.rows.step(self._ids_B)
        if self._unread is not None:
            self._read(*self._unread)
        ids_B = logits_BV.argmax(-1)
        for row, running in self.live.items():
            if running.question.decoding.temperature:
                ids_B[row] = running.choose(logits_BV[row : row + 1])[0]
        self._ids_B = ids_B
        logprobs = {
            row: log_probabilities(logits_BV[row], ids_B[row], running.question.decoding)
            for row, running in self.live.items()
        }
        self._unread = fetch(ids_B), dict(self.live), logprobs
        if not self.engine.ahead:
            self._read(*self._unread)

    def drop(self) -> None:
        """Free the rows of cancelled questions."""
        for row in [row for row, running in self.live.items() if running.question.ended]:
            self._leave(row)

    def end(self, error: Exception) -> None:
        """End all questions with an error."""
        for running in self.live.values():
            running.question.send(error)

    def _read(
        self, read: Callable[[], list[int]], answers: dict[int, Running], logprobs: Logprobs
    ) -> None:
        self._unread = None
        tokens = read()
        for row, running in answers.items():
            if self.live.get(row) is running:
                with self._only_for(running, row):
                    running.transcript.add(tokens[row], logprobs[row])
                    self._send(running, row)

    @contextmanager
    def _only_for(self, running: Running, row: int | None = None) -> Iterator[None]:
        """Let an error reach only one question, and free its row."""
        try:
            yield
        except Exception as error:
            running.question.send(error)
            if row is not None:
                self._leave(row)

    def _send(self, running: Running, row: int | None = None) -> None:
        """Send what is new of an answer; a finished one leaves its row."""
        transcript, question = running.transcript, running.question
        if transcript.finish_reason is not None and row is not None:
            self._leave(row)
        if piece := transcript.take():
            question.send(piece)
        if transcript.finish_reason is not None:
            question.send(to_answer(self.name, running))

    def _leave(self, row: int) -> None:
        if self.live.pop(row, None) is not None:
            self.rows.leave(row)


@torch.no_grad()
def answer_events(
    model: SedemModules,
    engine: Engine,
    name: str,
    requests: Sequence[Request],
    decoding: Decoding,
    estimated: Callable[[Estimate], None] | None = None,
) -> Generator[tuple[int, Event], None, None]:
    """Answer requests in the calling thread; long ones one at a time, after the others.

    They may differ in bank, K and length. The first error ends all of them.

    Args:
        estimated: called at once if an answer takes long; its reader is waiting then.

    Yields:
        The events of all requests as they come, with the number of their request.
    """
    events = deque[tuple[int, Event]]()

    def receive(number: int, event: Event) -> None:
        if isinstance(event, Estimate) and estimated is not None:
            estimated(event)
        events.append((number, event))

    def received() -> Iterator[tuple[int, Event]]:
        while events:
            number, event = events.popleft()
            if isinstance(event, Exception):
                raise event
            yield number, event

    questions = [OpenQuestion(one, decoding, partial(receive, n)) for n, one in enumerate(requests)]
    short = [one for one in questions if not is_long(model, one.request)]
    groups: list[tuple[list[OpenQuestion], Watch | None]] = [(short, None)] if short else []
    groups += [([one], Watch(one)) for one in questions if one not in short]
    for group, watch in groups:
        waiting, count = deque(group), min(len(group), engine.batch_size)
        with engine.open_rows(count) as rows:
            answers = RunningAnswers(model, engine, name, rows, count)
            answers.watch = watch
            while waiting or answers.live:
                # Rows refill once half of them are free.
                if waiting and 2 * answers.free >= count:
                    joining = [waiting.popleft() for _ in range(min(answers.free, len(waiting)))]
                    for question in joining:
                        question.since = time.perf_counter()
                    put_off = answers.join(joining)
                    waiting.extendleft(reversed(put_off))
                    if put_off and not answers.live:
                        time.sleep(ROOM_SECONDS)
                    if waiting or answers.live:
                        yield from received()
                answers.step()
                if waiting or answers.live:
                    yield from received()
        # The last answer is told when its row is free.
        yield from received()


def to_answer(name: str, running: Running) -> Answer:
    """Make an answer with the spans that conditioned it."""
    prepared, transcript, clock = running.prepared, running.transcript, running.clock
    found = running.found or Found(None)
    plan, selection, quotation = prepared.plan, prepared.selection, found.quotation
    assert transcript.finish_reason is not None
    bank, ranked, scores = plan.bank, selection.ranked, selection.scores
    # Its times by stage; blocks that were selected elsewhere took none here.
    clock.mark("total_ms")
    timings = {"encode_ms": 0.0, "score_ms": 0.0} | running.stages.timings | clock.timings
    if running.question.wait_ms is not None:
        timings["wait_ms"] = running.question.wait_ms
    timings["select_ms"] = timings["encode_ms"] + timings["score_ms"]
    # Its sources: the selected blocks, with what a quotation takes from each.
    citations = prepared.citations
    if quotation is not None:
        citations = tuple(
            replace(one, answer_spans=quotation.within(block))
            for one, block in zip(citations, ranked, strict=True)
        )
    # What it leaves out: the end, or blocks of a question that asks for all of a kind, if many have
    # its words alike.
    cut = transcript.cut()
    alike = scores.words.alike() if scores.words is not None and ranked else []
    left = {*alike} - {*ranked}
    if found.partly:
        cut += (
            f"the question is about everything, and {len(citations):,} of {len(bank):,} blocks "
            "were read; this is the likeliest place",
        )
    elif left and len(alike) > max(MANY, len(ranked)):
        cut += (
            f"{len(left):,} of {len(alike):,} blocks that have the words of the question alike "
            "were left out; a larger k reads more of them",
        )
    # Its certainty: that of the least certain span.
    certainty, tokens = found.certainty, len(transcript.ids)
    if quotation is not None:
        given = [one.confidence for one in quotation.spans if one.confidence is not None]
        certainty = min(given, default=None)
        tokens = sum(one.tokens for one in quotation.spans)
    text = transcript.tokenizer.decode
    logprobs = (tuple((text([token]), p) for token, p in one) for one in transcript.logprobs)
    # The span behind every block that could be selected, best score first.
    ranking = None
    if plan.ranking:
        every = top_k(scores.total, count_candidates(scores.total)).tolist()
        blocks = [bank.blocks[index] for index in every]
        ranking = tuple((bank.documents.name(b.document), b.start, b.end) for b in blocks)
    return Answer(
        text=transcript.text,
        citations=citations,
        k=len(citations),
        blocks=len(bank),
        timings=timings,
        finish_reason=transcript.finish_reason,
        model=name,
        cut=cut,
        conditioning=prepared.conditioning + found.positions,
        stored_bytes=bank.memory_bytes,
        context_tokens=bank.tokens,
        confidence=selection.confidence,
        answer_confidence=certainty,
        unsupported=() if quotation else words_without_source(prepared, transcript.text),
        ranking=ranking,
        answer_tokens=tokens,
        logprobs=tuple(logprobs) or None,
        sentences=tuple((bank.documents.name(n), a, b) for n, a, b in found.sentences),
        alternative=found.alternative
        if certainty_of(joint(certainty, selection.confidence)) == "unsure"
        else None,
    )
