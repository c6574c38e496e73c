"""What stands behind the routes: the open model, its scheduler and its banks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from threading import Thread
from typing import TYPE_CHECKING, Annotated, Protocol

from fastapi import Depends, FastAPI
from starlette.datastructures import State
from starlette.requests import HTTPConnection
from torch import Tensor

from sedem.answering.decoding import GREEDY, Decoding
from sedem.answering.scheduler import AsyncReply, Scheduler
from sedem.bank.memory_bank import BankReader, MemoryBank, Snapshot
from sedem.endpoint import Reader
from sedem.errors import ConfigError, UnavailableError
from sedem.selecting.plan import Request
from sedem_serve.server.errors import unavailable
from sedem_serve.server.library import Library
from sedem_serve.server.logs import log
from sedem_serve.server.metrics import Metrics
from sedem_serve.server.online import OnlineBanks
from sedem_serve.server.settings import ServerSettings

if TYPE_CHECKING:
    from sedem.model import SeDeM


OPENING_SECONDS = 60.0
"""How long a request waits for the model to be opened; clients often ask as soon as they can."""
LOOK_SECONDS = 0.05
"""How often a request that waits looks whether it is open."""


class Answerer(Protocol):
    """Answers the questions of a server."""

    rows: int

    @property
    def waiting(self) -> int:
        """How many questions wait for a row."""

    @property
    def running(self) -> int:
        """How many answers are being generated."""

    def prepare(self, bank: Snapshot) -> None:
        """Prepare for questions to a new version of a bank, which stays hidden until this returns.

        Called from threads; it may take long. Questions to the last version continue meanwhile.

        Raises:
            SedemError: it cannot be queried; the last version stays.
        """

    def require_room(self) -> None:
        """Raise now if `stream` would reject a question; as in `Scheduler.require_room`."""

    def stream(self, request: Request, decoding: Decoding = GREEDY) -> AsyncReply:
        """Answer a question; as in `Scheduler.stream`."""

    def scores(self, bank: BankReader, question: str) -> Tensor:
        """Return the score of every block `[N]`, as `SeDeM.scores`; called from threads."""

    def drain(self) -> None:
        """Accept no more questions and let answers finish; this does not block."""

    def close(self, *, at_once: bool = False) -> None:
        """Accept no more questions and stop; this blocks."""


OpenAnswerer = Callable[[ServerSettings, "SeDeM"], Answerer]
"""Opens the answerer of a server, given its settings and its model."""


class OneMachine(Scheduler):
    """Answers with the model of this process."""

    def __init__(self, settings: ServerSettings, model: SeDeM) -> None:
        super().__init__(
            model, model.engine, model.name, rows=settings.rows, waiting=settings.waiting
        )
        self._scores = model.scores

    def prepare(self, bank: Snapshot) -> None:
        """Do nothing: the first question makes the keys."""

    def scores(self, bank: BankReader, question: str) -> Tensor:
        """Return the score of every block; as in `SeDeM.scores`."""
        return self._scores(bank, question)


@dataclass
class Service:
    """Everything that answers require."""

    settings: ServerSettings
    model: SeDeM
    scheduler: Answerer
    library: Library
    online: OnlineBanks
    metrics: Metrics

    @cached_property
    def reader(self) -> Reader | None:
        """What writes answers in place of the model; None if the model does."""
        url = self.settings.reader
        return None if url is None else Reader(url, self.settings.reader_model)

    def close(self) -> None:
        """Stop what is still running and close the files; this waits for the threads."""
        self.scheduler.close(at_once=True)
        self.online.close()
        self.library.close()


@dataclass
class Lifecycle:
    """The stage of the server between its start and its end.

    Attributes:
        service: None until the model is open.
        draining: whether the server is shutting down: it finishes answers and starts none.
        in_flight: requests that change or answer something and are being served.
        failed: why the model could not be opened.
    """

    service: Service | None = None
    draining: bool = False
    in_flight: int = 0
    failed: Exception | None = None

    @property
    def opens(self) -> bool:
        """Whether the model is being opened."""
        return self.service is None and self.failed is None and not self.draining

    def ready(self) -> Service:
        """Return the service, or raise an UnavailableError that says why it cannot serve now."""
        if self.draining:
            raise UnavailableError("the server is shutting down; ask again in a moment")
        if self.service is None:
            raise UnavailableError("the server is opening its model; ask again in a moment")
        return self.service


def lifecycle_of(connection: HTTPConnection) -> Lifecycle:
    """Return the state of the server of a request."""
    lifecycle: Lifecycle = connection.app.state.lifecycle
    return lifecycle


async def service_of(connection: HTTPConnection) -> Service:
    """Return the service of a request, once the model is open; a dependency of routes.

    It is a coroutine, like `key_of`: FastAPI runs plain functions in a thread, which costs more
    than refusing a request.
    """
    lifecycle = lifecycle_of(connection)
    until = time.monotonic() + OPENING_SECONDS
    while lifecycle.opens and time.monotonic() < until:
        await asyncio.sleep(LOOK_SECONDS)
    try:
        return lifecycle.ready()
    except UnavailableError as error:
        raise unavailable(str(error), retry_after=5) from None


Served = Annotated[Service, Depends(service_of)]


def open_service(state: State) -> Service:
    """Open the model, the scheduler and the banks of an application; this takes seconds."""
    settings, metrics = state.settings, state.metrics
    model = state.model or open_model(settings)
    with ExitStack() as opened:
        scheduler = state.open_answerer(settings, model)
        opened.callback(scheduler.close, at_once=True)
        library = Library(settings, model, metrics, scheduler.prepare)
        opened.callback(library.close)
        online = OnlineBanks(model, settings)

        def banks() -> list[MemoryBank]:
            return [entry.bank for entry in library.entries() if entry.bank is not None]

        # What is read when the metrics are read
        gauge, kept = metrics.gauge, getattr(model.engine, "kept", None)
        gauge("questions_waiting", "Questions that wait for a row.", lambda: scheduler.waiting)
        gauge("answers_running", "Answers that are being generated.", lambda: scheduler.running)
        gauge("rows", "Maximum answers at once.", lambda: scheduler.rows)
        gauge("online_banks", "Temporary banks of texts that came with questions.", online.__len__)
        told = "Texts that wait to be read or are being read."
        gauge("online_waiting", told, lambda: online.waiting)
        gauge("banks", "Banks that can be asked.", lambda: len(banks()))
        gauge("blocks", "Blocks of these banks.", lambda: sum(map(len, banks())))
        if kept is not None:
            gauge("kept_hits", "Blocks whose keys and values were kept.", lambda: kept.hits)
            gauge("kept_misses", "Blocks whose keys and values were computed.", lambda: kept.misses)
            gauge("kept_bytes", "Bytes of kept keys and values.", lambda: kept.nbytes)
        # Graphs for usual questions, before a client waits for an answer
        if model.engine.ahead and any(map(len, banks())):
            model.rehearse(max(banks(), key=len))
        library.start()
        opened.pop_all()
    return Service(settings, model, scheduler, library, online, metrics)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Open the service in the background and close it at the end.

    A model that a test passes in is open at once, so the first request need not wait.
    """
    state, opened = app.state, Future[Service]()
    lifecycle: Lifecycle = state.lifecycle

    def work() -> None:
        with suppress(InvalidStateError):  # cancelled meanwhile
            try:
                opened.set_result(open_service(state))
            except Exception as error:
                opened.set_exception(error)

    async def opening() -> None:
        # This thread does not keep the process alive.
        Thread(target=work, name="sedem-opening", daemon=True).start()
        try:
            lifecycle.service = await asyncio.wrap_future(opened)
        except Exception as error:
            lifecycle.failed = error
            if state.model is not None:
                raise
            state.on_failure()
        else:
            model = lifecycle.service.model
            log("ready", model=model.name, engine=model.engine.name, device=model.device)

    task = asyncio.create_task(opening())
    if state.model is not None:
        await task
    try:
        yield
    finally:
        lifecycle.draining = True
        task.cancel()
        if lifecycle.service is not None:
            await asyncio.to_thread(lifecycle.service.close)
        if state.tracer is not None:
            state.tracer.close()


def open_model(settings: ServerSettings) -> SeDeM:
    """Open the model of a server; as in `SeDeM.from_pretrained`."""
    from sedem.engine.kept import KeptBudget, half_of_memory
    from sedem.model import SeDeM

    model = SeDeM.from_pretrained(
        settings.model,
        device=settings.device,
        engine=settings.engine,
        kept=KeptBudget(memory=settings.memory or half_of_memory()),
    )
    if model.decoder.tokenizer.chat_template:
        with suppress(ConfigError):  # a question that needs it reports the reason
            _ = model.decoder.chat
    return model
