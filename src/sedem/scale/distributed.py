"""Answer the questions of a server on many machines, with engine and selector replicas.

The answers that a lost replica was decoding are lost with it. Questions of which no text was sent
are retried on another replica; the others end with an error. A retried question runs on the same
version of the bank, so the blocks that were already sent stay valid.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from sedem.answering.decoding import GREEDY, Decoding
from sedem.answering.reply import AsyncReply, Event, Selected, failure
from sedem.answering.requests import Request
from sedem.answering.scheduler import Pace
from sedem.bank.memory_bank import BankReader, Snapshot
from sedem.errors import CancelledError, ConfigError, QueueFullError, SedemError, UnavailableError
from sedem.scale.answering import Asked
from sedem.scale.partitions import Found
from sedem.scale.selecting import Wanted
from sedem.scale.versions import Version, Versions
from sedem.types import Answer

logger = logging.getLogger(__name__)

SECONDS = 120.0
"""How long a question is retried on other replicas; Ray restarts a lost one in about 10 to 30."""
PAUSE = 0.2
"""Seconds before a question is retried: it takes a moment until the loss of a replica is known."""
PREPARE_SECONDS = 600.0
"""How long replicas may take to make the keys of a version; one that takes longer makes them for
its first question."""


def put(snapshot: Snapshot) -> Any:
    """Put the snapshot of a version into Ray's object store, as its place or its bytes."""
    import ray

    return ray.put(snapshot)


def fetch(reference: Any) -> Snapshot:
    """Return the snapshot of a version from Ray's object store."""
    import ray

    snapshot: Snapshot = ray.get(reference)
    return snapshot


def is_lost(error: BaseException) -> bool:
    """Whether an error means that a replica was lost or cannot be reached."""
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.exceptions import RayServeException

    lost = isinstance(error, RayError) and not isinstance(error, RayTaskError)
    return lost or isinstance(error, RayServeException)


def raised(value: Any) -> Any:
    """Return what a replica sent, or raise it if it is an error."""
    if isinstance(value, Exception):
        raise value
    return value


class Attempts:
    """Decides when to retry and when to give up.

    Args:
        seconds: seconds after which no further attempt is made.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self._until = time.monotonic() + seconds

    def left(self, error: BaseException) -> bool:
        """Whether to retry after an error."""
        return is_lost(error) and time.monotonic() < self._until


class AskPart:
    """Asks one part of the selectors, and another replica of it if one is lost.

    Args:
        handle: handle of the part's deployment.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def __call__(self, wanted: Wanted) -> Found:
        """Return the best blocks of the part.

        Raises:
            UnavailableError: no replica of the part answers.
            SedemError: the bank cannot be read.
        """
        attempts = Attempts()
        while True:
            try:
                found: Found = raised(await self._handle.find.remote(wanted))
                return found
            except Exception as error:
                if not attempts.left(error):
                    raise failure(error) from error
            await asyncio.sleep(PAUSE)


def prepare_on(handle: Any, version: Version, until: float) -> None:
    """Make the replicas of one deployment open a version; waits until one of them has done so.

    Args:
        handle: handle of the deployment.
        version: the version.
        until: deadline by `time.monotonic`; after it, the first question opens the version.

    Raises:
        SedemError: a replica cannot read the bank.
    """
    while (left := until - time.monotonic()) > 0:
        values: list[Any] = []
        try:
            pending = handle.broadcast("prepare", version)
            values = pending.results(timeout_s=left, return_exceptions=True)
        except TimeoutError:
            break
        except Exception as error:
            # While a server starts, its deployments come up one by one.
            if not is_lost(error):
                raise
        for value in values:
            if isinstance(value, SedemError):
                raise value
        if None in values:
            return
        time.sleep(PAUSE)
    logger.warning("no replica has prepared version %d in time", version.number)


class Distributed:
    """Answers questions on the replicas of a Ray Serve application; an `Answerer`.

    Args:
        engines: handle of the engines' deployment.
        parts: handles of the selectors' deployments, one for each part.
        rows: maximum concurrent answers, on all engines together.
        waiting: maximum number of questions that wait.
    """

    def __init__(self, engines: Any, parts: list[Any], *, rows: int, waiting: int) -> None:
        self.rows, self.limit = rows, rows + waiting
        self._engines, self._parts = engines, parts
        self._streams = engines.options(stream=True)
        self._versions = Versions(put)
        self._live: set[asyncio.Task[None]] = set()
        self._pace = Pace()
        self._begun = 0
        self._closed = False

    @property
    def waiting(self) -> int:
        """How many questions wait for a row or for their blocks."""
        return len(self._live) - self._begun

    @property
    def running(self) -> int:
        """How many answers are being generated."""
        return self._begun

    def prepare(self, bank: Snapshot) -> None:
        """Make every replica open a version and every part make its keys; waits for one of each.

        A replica that is lost meanwhile opens the version at its first question.

        Raises:
            SedemError: the bank cannot be read by a replica.
        """
        version, until = self._versions.of(bank), time.monotonic() + PREPARE_SECONDS
        handles = [*self._parts, self._engines]
        with ThreadPoolExecutor(len(handles)) as threads:
            for done in [threads.submit(prepare_on, one, version, until) for one in handles]:
                done.result()
        logger.info("version %d of %s is ready on every part", version.number, version.bank)

    def require_room(self) -> None:
        """Refuse now what `stream` would refuse; as in `Scheduler.require_room`."""
        if len(self._live) >= self.limit:
            raise QueueFullError(
                f"{self.limit} questions are waiting or being answered; ask again later",
                self._pace.seconds(self.limit - self.rows),
            )

    def stream(self, request: Request, decoding: Decoding = GREEDY) -> AsyncReply:
        """Answer a question; as in `Scheduler.stream`."""
        if self._closed:
            raise UnavailableError("the server is closing; ask again later")
        self.require_room()
        if not self._live:
            self._pace.restart()
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()
        task = loop.create_task(self._answer(request, decoding, events.put_nowait))
        self._live.add(task)
        task.add_done_callback(self._ended)

        def cancel() -> None:
            # A reply may be dropped by any thread, and after its loop has ended.
            if not task.done() and not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)

        return AsyncReply(cancel, events)

    def scores(self, bank: BankReader, question: str) -> Tensor:
        """Return the score of every block; as in `SeDeM.scores`."""
        version = self._versions.of(bank.snapshot())
        attempts = Attempts()
        while True:
            try:
                scores_N: Tensor = raised(self._engines.scores.remote(version, question).result())
                return scores_N
            except Exception as error:
                if not attempts.left(error):
                    raise failure(error) from error
            time.sleep(PAUSE)

    def drain(self) -> None:
        """Accept no more questions and let answers finish."""
        self._closed = True

    def close(self, *, at_once: bool = False) -> None:
        """Accept no more questions; with `at_once`, cancel the running ones."""
        self._closed = True
        if at_once:
            for task in [*self._live]:
                loop = task.get_loop()
                if not loop.is_closed():
                    loop.call_soon_threadsafe(task.cancel)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._live.discard(task)
        self._pace.left()

    async def _answer(
        self, request: Request, decoding: Decoding, send: Callable[[Event], None]
    ) -> None:
        """Send the events of an answer, trying as many replicas as it takes."""
        try:
            version = await asyncio.to_thread(self._versions.of, request.bank.snapshot())
            # `request` is held to the end: its version lives as long as its snapshot.
            await self._attempts(Asked.of(version, request, decoding), send)
        except asyncio.CancelledError:
            send(CancelledError("the question was cancelled"))
            raise
        except Exception as error:
            send(failure(error))

    async def _attempts(self, asked: Asked, send: Callable[[Event], None]) -> None:
        attempts, sent = Attempts(), Sent(send)
        try:
            while True:
                try:
                    await self._attempt(asked, sent)
                    return
                except Exception as error:
                    if not is_lost(error):
                        raise
                    if sent.text:
                        raise UnavailableError(
                            "the machine that was answering is lost; the answer ends here, ask "
                            "again for all of it"
                        ) from error
                    if not attempts.left(error):
                        raise UnavailableError(
                            "no machine that answers can be reached; ask again later"
                        ) from error
                await asyncio.sleep(PAUSE)
        finally:
            self._begun -= sent.blocks

    async def _attempt(self, asked: Asked, sent: Sent) -> None:
        """Pass on the events of one replica."""
        events = self._streams.events.remote(asked)
        try:
            async for event in events:
                if isinstance(event, Selected) and not sent.blocks:
                    self._begun += 1
                sent.take(event)
            if not sent.ended:
                raise UnavailableError("the engine ended an answer before its end; ask again")
        finally:
            events.cancel()


class Sent:
    """What has been sent to the client of an answer.

    Args:
        send: sends an event to the client.

    Attributes:
        blocks: whether the blocks of the answer were sent.
        text: whether any of its text was sent.
        ended: whether the last event was sent.
    """

    def __init__(self, send: Callable[[Event], None]) -> None:
        self._send = send
        self.blocks = self.text = self.ended = False

    def take(self, event: Event) -> None:
        """Send an event, unless a lost replica already sent it."""
        if isinstance(event, Selected):
            if self.blocks:
                return
            self.blocks = True
        self.text |= isinstance(event, str)
        self.ended |= isinstance(event, Answer | Exception)
        self._send(event)


def check_counts(**counts: int) -> None:
    """Refuse numbers below one.

    Raises:
        ConfigError: a number is.
    """
    for name, number in counts.items():
        if number < 1:
            raise ConfigError(f"{name} is {number}; it must be at least 1")
