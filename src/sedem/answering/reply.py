"""A question in a scheduler, and the reply that its reader holds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from sedem.answering.decoding import Decoding
from sedem.answering.requests import Request
from sedem.errors import CancelledError, SedemError, UnavailableError
from sedem.types import Answer, Citation


@dataclass(frozen=True)
class Selected:
    """What is known of an answer before its first token; the whole answer repeats it.

    Attributes:
        citations: the spans that condition the answer, best first.
        documents: index of the document of each citation.
        confidence: as in `Answer`.
        declined: whether the question is declined as unanswerable.
    """

    citations: tuple[Citation, ...]
    documents: tuple[int, ...]
    confidence: float | None
    declined: bool

    @property
    def k(self) -> int:
        """Number of blocks used."""
        return len(self.citations)


Event = Selected | str | Answer | Exception
"""The blocks of an answer, then pieces of text, then the last event: the whole answer, or the error
that replaces it. An error may also come alone."""


class Question:
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
        elif not isinstance(event, str):
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
        answer: the whole answer once it was read; None before.
    """

    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel
        self.selected: Selected | None = None
        self.answer: Answer | None = None
        self._over = False

    def __del__(self) -> None:
        self.cancel()

    def _piece(self, event: Event) -> str | None:
        """Take an event; return None for the last one and empty text for the blocks."""
        if isinstance(event, str):
            return event
        if isinstance(event, Selected):
            self.selected = event
            return ""
        self._over = True
        if isinstance(event, Exception):
            raise failure(event)
        self.answer = event
        return None

    def _known(self) -> Selected:
        if self.selected is None:
            raise CancelledError("the reply was read to its end and no blocks were selected")
        return self.selected


class ThreadReply(Reply, Iterator[str]):
    """A reply that is read by a thread, piece by piece or at once.

    Args:
        next_event: returns the next event, when it is there.
    """

    def __init__(self, cancel: Callable[[], None], next_event: Callable[[], Event]) -> None:
        super().__init__(cancel)
        self._next_event = next_event

    def __next__(self) -> str:
        while (piece := self._next()) == "":
            pass
        if piece is None:
            raise StopIteration
        return piece

    def selection(self) -> Selected:
        """Wait for the blocks of the answer, before its text."""
        if self.selected is None:
            self._next()
        return self._known()

    def _next(self) -> str | None:
        return None if self._over else self._piece(self._next_event())

    def result(self) -> Answer:
        """Wait for the whole answer."""
        for _ in self:
            pass
        if self.answer is None:
            raise CancelledError("the reply was read to its end and has no answer")
        return self.answer


class AsyncReply(Reply, AsyncIterator[str]):
    """A reply that is read in an event loop.

    Args:
        events: events that are not read yet.
    """

    def __init__(self, cancel: Callable[[], None], events: asyncio.Queue[Event]) -> None:
        super().__init__(cancel)
        self._events = events

    async def __anext__(self) -> str:
        while (piece := await self._next()) == "":
            pass
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def selection(self) -> Selected:
        """Wait for the blocks of the answer, before its text."""
        if self.selected is None:
            await self._next()
        return self._known()

    async def _next(self) -> str | None:
        try:
            return None if self._over else self._piece(await self._events.get())
        except asyncio.CancelledError:
            self.cancel()
            raise


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
