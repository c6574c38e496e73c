"""The replicas of a server on many machines: the HTTP application, engines, and parts of the keys.

The HTTP application sends every question to an engine. The engine encodes it, asks every part for
the scores of its blocks, selects, and decodes the answer in its running batch. Scores of all parts
together are those of one machine.

A question names a version of its bank. Replicas get it as Ray's object: of a stored bank its place
and the number of the version, of a bank in RAM its bytes. Every replica opens exactly this version,
no matter what was written to the bank since; a replica that Ray has just restarted opens it again.

Letters: Q question tokens, E encoder width, N blocks, n blocks of one part.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from uuid import uuid4
from weakref import WeakKeyDictionary

import numpy as np
import torch
from fastapi import FastAPI
from numpy.typing import NDArray
from torch import Tensor

from sedem.answering.decoding import GREEDY, Decoding
from sedem.answering.running import Estimate, Event, Selected, failure
from sedem.answering.scheduler import AsyncReply, Pace
from sedem.bank import index
from sedem.bank.file import BankFile
from sedem.bank.memory_bank import BankReader, Snapshot
from sedem.engine.device import Clock
from sedem.errors import CancelledError, QueueFullError, SedemError, UnavailableError
from sedem.method.selector import Selector
from sedem.selecting.plan import Request, Selection, plan_of
from sedem.selecting.select import score_questions, select
from sedem.types import Answer
from sedem_serve.server import logs
from sedem_serve.server.app import create_app
from sedem_serve.server.keys import KeyRing
from sedem_serve.server.service import open_model
from sedem_serve.server.settings import ServerSettings

if TYPE_CHECKING:
    from sedem.model import SeDeM

T = TypeVar("T")
KEPT = 64
"""Versions that a replica keeps open, of them the last two of each bank."""
PREPARE_SECONDS = 600.0
"""How long replicas may take to make the keys of a version."""
POLL_SECONDS = 0.1
RETRY_SECONDS = 120.0
"""How long a question is asked again; Ray restarts a replica in 10 to 30 seconds."""
RETRY_PAUSE = 1.0
"""Seconds before it is, until the loss of a replica is known."""


@dataclass(frozen=True)
class Version:
    """One version of a bank.

    Attributes:
        id: unique among all versions of all banks.
        bank: the same for all versions of one bank.
        stored: whether every replica opens it at its place. Its blocks are then scored by parts.
            Banks in RAM are small, and one engine answers from them alone.
        snapshot: reference to Ray's object.
    """

    id: str
    bank: str
    stored: bool
    snapshot: Any


class OpenVersions(Generic[T]):
    """What one replica has made from snapshots of versions; threads may share it."""

    def __init__(self, make: Callable[[Snapshot], T]) -> None:
        self._make = make
        self._open: OrderedDict[str, tuple[str, T]] = OrderedDict()
        self._lock, self._making = threading.Lock(), threading.Lock()

    def get(self, version: Version) -> T:
        """Return what was made from a version; this takes long the first time.

        Raises:
            UnavailableError: the process that handed it out has ended.
            BankError: another bank is at its place now.
        """
        # Others are not waited for: questions to them continue.
        if (found := self._look(version)) is not None:
            return found
        # One at a time: two would take the memory of both.
        with self._making:
            if (found := self._look(version)) is not None:
                return found
            made = self._make(_fetch(version))
            with self._lock:
                self._open[version.id] = version.bank, made
                same = [id for id, (bank, _) in self._open.items() if bank == version.bank]
                for id in [*same[:-2], *[*self._open][:-KEPT]]:
                    self._open.pop(id, None)
            return made

    def _look(self, version: Version) -> T | None:
        with self._lock:
            if version.id not in self._open:
                return None
            self._open.move_to_end(version.id)
            return self._open[version.id][1]


def _fetch(version: Version) -> Snapshot:
    import ray

    try:
        snapshot: Snapshot = ray.get(version.snapshot)
    except Exception as error:
        raise UnavailableError(
            "a version of the bank is lost with the process that served it; ask again"
        ) from error
    for view in snapshot.views:
        view.file.check_holds(view.head)
    return snapshot


class LostError(UnavailableError):
    """A replica was lost while it worked on a question."""


def told(error: BaseException) -> SedemError:
    """Return the error to tell a client: that of a replica, or `LostError`."""
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.exceptions import RayServeException

    if isinstance(error, RayTaskError):
        error = error.cause
    elif isinstance(error, RayError | RayServeException):
        lost = LostError("a machine that was answering is lost; ask again")
        lost.__cause__ = error
        return lost
    return failure(error if isinstance(error, Exception) else RuntimeError(str(error)))


class SelectorReplica:
    """The keys of one part of each bank; `part` counts from 0."""

    def __init__(self, settings: ServerSettings, part: int, parts: int) -> None:
        # Nothing else of the model is kept.
        self._selector = open_model(settings).selector
        self._part, self._parts = part, parts
        self._versions = OpenVersions(self._open)
        # One question at a time, as on one machine: products of several would round differently.
        self._scoring = threading.Lock()

    def _open(self, bank: Snapshot) -> Snapshot:
        part = bank.part(bank.split(self._parts)[self._part])
        if len(part):
            # Of any size: keeping them is the purpose of this process.
            index.prepare(part, self._selector)
        return part

    async def prepare(self, version: Version) -> None:
        """Make the keys of this part of a version."""
        await asyncio.to_thread(self._versions.get, version)

    async def scores(
        self,
        version: Version,
        query_QRH: NDArray[np.float32],
        every: bool,
        also: NDArray[np.int64],
        telling_Q: NDArray[np.bool_] | None,
    ) -> NDArray[np.float32]:
        """Return the score of each block of this part `[n]`.

        Args:
            every: as in `score_questions`.
            also: more candidates, as indices into the whole bank.
            telling_Q: the tokens that find candidates by codes; None means all.
        """

        @torch.no_grad()
        def score() -> NDArray[np.float32]:
            part = self._versions.get(version)
            if not len(part):
                return np.zeros(0, np.float32)
            query_1QRH = torch.tensor(query_QRH, device=self._selector.w_key.weight.device)[None]
            mask_1Q = torch.ones(query_1QRH.shape[:2], dtype=torch.bool)
            own = also[(also >= part.held.start) & (also < part.held.stop)] - part.held.start
            with self._scoring:
                telling_1Q = None if telling_Q is None else torch.tensor(telling_Q)[None]
                wanted: Any = {"every": every, "also": [torch.from_numpy(own)]}
                wanted["telling_BQ"] = telling_1Q
                found = score_questions(self._selector, part, query_1QRH, mask_1Q, **wanted)
            scores_n: NDArray[np.float32] = found[0].numpy()
            return scores_n

        return await asyncio.to_thread(score)


class EngineReplica:
    """Answers questions in the rows of one running batch.

    Args:
        parts: handles of the selectors' deployments, in order.
    """

    def __init__(self, settings: ServerSettings, *parts: Any) -> None:
        self.model: SeDeM = open_model(settings)
        self._parts = parts
        self._versions = OpenVersions[Snapshot](lambda snapshot: snapshot)
        self._scheduler = self.model.scheduler(rows=settings.rows, waiting=settings.waiting)

    async def prepare(self, version: Version) -> None:
        """Open a version."""
        await asyncio.to_thread(self._versions.get, version)

    async def events(
        self, version: Version, request: Request, decoding: Decoding
    ) -> AsyncGenerator[Event, None]:
        """Answer a question about a version; the request has no bank.

        Yields:
            The blocks of the answer, how long it takes if that is long, its text in pieces, then
            the complete answer or the error. Closing the generator cancels the question.
        """
        since, times = time.perf_counter(), dict[str, float]()
        try:
            request = replace(request, bank=await asyncio.to_thread(self._versions.get, version))
            if version.stored:
                selected, times = await self._select(version, request)
                request = replace(request, selected=selected)
            reply = self._scheduler.stream(request, decoding)
            try:
                yield await reply.selection()
                async for part in reply.parts():
                    yield part
                answer = reply.answer
                assert answer is not None
                if times:
                    # They start when the question arrived, not when its blocks were selected.
                    before = (time.perf_counter() - since) * 1e3 - answer.timings["total_ms"]
                    named = ("wait_ms", "ttft_ms", "total_ms")
                    later = {name: answer.timings[name] + before for name in named}
                    selecting = {**times, "select_ms": sum(times.values())}
                    answer = replace(answer, timings={**answer.timings, **selecting, **later})
                yield answer
            finally:
                reply.cancel()
        except Exception as error:
            yield told(error)

    async def scores(self, version: Version, question: str) -> Tensor:
        """Return the score of every block `[N]`, as `SeDeM.scores` does."""
        bank = await asyncio.to_thread(self._versions.get, version)
        if not version.stored:
            return await asyncio.to_thread(self.model.scores, bank, question)
        request = Request(bank, question, ranking=True, hops=1)
        return (await self._select(version, request))[0].scores.total

    async def _select(
        self, version: Version, request: Request
    ) -> tuple[Selection, dict[str, float]]:
        """Select the blocks of a request by the scores of all parts; return the times, too."""
        loop, model = asyncio.get_running_loop(), self.model

        async def asked(*wanted: Any) -> list[NDArray[np.float32]]:
            return await asyncio.gather(*(part.scores.remote(*wanted) for part in self._parts))

        def scoring(
            selector: Selector,
            bank: BankReader,
            query_1QRH: Tensor,
            mask_1Q: Tensor,
            every: bool,
            also: Sequence[Tensor],
            telling_1Q: Tensor | None,
        ) -> Tensor:
            telling_Q = None if telling_1Q is None else telling_1Q[0].numpy()
            wanted = version, query_1QRH[0].cpu().numpy(), every, also[0].numpy(), telling_Q
            # If a part fails, the question fails.
            found = asyncio.run_coroutine_threadsafe(asked(*wanted), loop).result()
            return torch.from_numpy(np.concatenate(found))[None]

        clock = Clock(model.device, time.perf_counter())
        plans = [plan_of(model, request)]
        [selection] = await asyncio.to_thread(select, model, model.engine, plans, clock, scoring)
        return selection, clock.timings


class Distributed:
    """Answers questions on the replicas of a Ray Serve application; an `Answerer`.

    A question whose replica is lost before any text was sent is asked again; afterwards, and after
    `RETRY_SECONDS`, it fails with a `LostError`. Ray restarts the replica meanwhile.

    Args:
        engines: handle of the engines' deployment.
        parts: handles of the selectors' deployments, one for each part.
        rows, waiting: as of a scheduler, for all engines together.
    """

    def __init__(self, engines: Any, parts: list[Any], *, rows: int, waiting: int) -> None:
        self.rows, self.limit = rows, rows + waiting
        self._engines, self._parts = engines, parts
        self._versions: WeakKeyDictionary[Snapshot, Version] = WeakKeyDictionary()
        self._lock = threading.Lock()
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

    def version_of(self, snapshot: Snapshot) -> Version:
        """Return the version of a snapshot, which lives as long as the snapshot."""
        import ray

        with self._lock:
            if (known := self._versions.get(snapshot)) is None:
                store, id = snapshot.store, uuid4().hex
                stored = not isinstance(store, BankFile) or store.path is not None
                known = Version(id, str(store) if stored else id, stored, ray.put(snapshot))
                self._versions[snapshot] = known
            return known

    def prepare(self, bank: Snapshot) -> None:
        """Make every part make the keys of a version; waits for one replica of each deployment."""
        version, handles = self.version_of(bank), [*self._parts, self._engines]
        try:
            for pending in [handle.prepare.remote(version) for handle in handles]:
                pending.result(timeout_s=PREPARE_SECONDS)
            for pending in [handle.broadcast("prepare", version) for handle in handles]:
                # Replicas that are lost meanwhile open the version at their first question.
                pending.results(timeout_s=PREPARE_SECONDS, return_exceptions=True)
        except Exception as error:
            raise told(error) from error

    def require_room(self) -> None:
        """Raise now if `stream` would reject a question; see `Scheduler.require_room`."""
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

        def ended(task: asyncio.Task[None]) -> None:
            self._live.discard(task)
            self._pace.left()

        def cancel() -> None:
            # A reply may be dropped by any thread, and after its loop has ended.
            if not task.done() and not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)

        task.add_done_callback(ended)
        return AsyncReply(cancel, events)

    def scores(self, bank: BankReader, question: str) -> Tensor:
        """Return the score of every block; as in `SeDeM.scores`."""
        version = self.version_of(bank.snapshot())
        try:
            scores_N: Tensor = self._engines.scores.remote(version, question).result()
            return scores_N
        except Exception as error:
            raise told(error) from error

    def drain(self) -> None:
        """Accept no more questions and let answers finish."""
        self._closed = True

    def close(self, *, at_once: bool = False) -> None:
        """Accept no more questions; with `at_once`, cancel the running ones."""
        self._closed = True
        for task in [*self._live] if at_once else ():
            loop = task.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(task.cancel)

    async def _answer(
        self, request: Request, decoding: Decoding, send: Callable[[Event], None]
    ) -> None:
        """Send the events of an answer, each once, from as many replicas as it takes."""
        pending, begun, text = None, False, False
        until = time.monotonic() + RETRY_SECONDS
        last: Event = ""
        try:
            # `snapshot` is held to the end: its version lives as long.
            snapshot = request.bank.snapshot()
            version = await asyncio.to_thread(self.version_of, snapshot)
            sent: Any = replace(request, bank=None)  # type: ignore[arg-type]
            while True:
                pending = self._engines.options(stream=True).events.remote(version, sent, decoding)
                try:
                    async for last in pending:
                        if isinstance(last, LostError):
                            raise last
                        if isinstance(last, Selected):
                            if begun:
                                continue
                            begun = True
                            self._begun += 1
                        elif not isinstance(last, Estimate):
                            text = True
                        send(last)
                    break
                except Exception as error:
                    lost = isinstance(told(error), LostError)
                    if text or not lost or time.monotonic() > until:
                        raise
                pending.cancel()
                await asyncio.sleep(RETRY_PAUSE)
            if not isinstance(last, Answer | Exception):
                raise UnavailableError("the engine ended an answer before its end; ask again")
        except asyncio.CancelledError:
            send(CancelledError("the question was cancelled"))
            raise
        except Exception as error:
            send(told(error))
        finally:
            self._begun -= begun
            if pending is not None:
                pending.cancel()


class Ingress:
    """The HTTP application, whose questions are answered by the other replicas.

    Args:
        engines: number of engines.
        handles: handles of the engines' deployment, then of the selectors' deployments.
    """

    def __init__(
        self, settings: ServerSettings, keys: KeyRing, engines: int, *handles: Any
    ) -> None:
        self._settings, self._keys = settings, keys
        self._engines, self._handles = engines, handles

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Make the application; the model is opened in the background."""
        logs.configure(self._settings.log_format, log_text=self._settings.log_text)

        def answerer(settings: ServerSettings, model: SeDeM) -> Distributed:
            rows, waiting = settings.rows or model.engine.batch_size, settings.waiting
            (engines, *parts), count = self._handles, self._engines
            return Distributed(engines, parts, rows=rows * count, waiting=waiting * count)

        self._app = create_app(self._settings, keys=self._keys, open_answerer=answerer)
        return self._app

    async def opened(self) -> SedemError | None:
        """Wait until questions can be answered; returns an error if they cannot."""
        lifecycle = self._app.state.lifecycle
        while lifecycle.service is None and lifecycle.failed is None:
            await asyncio.sleep(POLL_SECONDS)
        return None if lifecycle.failed is None else failure(lifecycle.failed)

    async def change_keys(self, keys: KeyRing) -> None:
        """Use other keys from now on."""
        self._app.state.keys = keys
