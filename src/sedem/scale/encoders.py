"""The encoders of a build: workers of a Ray cluster, monitored and replaced.

If a worker dies, another one reads its pieces again. Results are returned in the order of the work,
no matter which worker finishes first.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version as version_of
from typing import Any

from sedem.bank.parts import Place
from sedem.bank.rows import Meta
from sedem.errors import ConfigError, DataError, UnavailableError, first_line
from sedem.scale.cluster import import_ray
from sedem.scale.encoder import Encoder
from sedem.scale.sources import READ_CPUS
from sedem.types import Document

logger = logging.getLogger(__name__)

AHEAD = 2
"""Pieces that a worker has at once, so that the next one is there when one is done."""
DEATHS = 4
"""Workers that die while reading one piece before it is given up."""
LOOK = 2.0
"""Seconds between two checks of the machines of the cluster."""
PATIENCE = 300.0
"""Seconds without any worker after which a build is given up."""


@dataclass(frozen=True)
class Piece:
    """A piece of a build.

    Attributes:
        documents: what one worker reads.
        done: bytes of all documents up to its end.
    """

    documents: list[Document]
    done: int

    def __str__(self) -> str:
        names = [f"'{document.name}'" for document in self.documents]
        return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


@dataclass(eq=False)
class _Job:
    """A piece in progress.

    Attributes:
        number: its place in the order.
        piece: the piece.
        deaths: how many workers died while reading it.
        bank: reference to the resulting bank.
        problem: why it cannot be read, in a sentence; empty if it can.
    """

    number: int
    piece: Piece
    deaths: int = 0
    bank: Any = None
    problem: str = ""


@dataclass(eq=False)
class _Worker:
    """An actor; `starting` refers to its start until it is ready; `jobs` are by status."""

    actor: Any
    starting: Any
    jobs: dict[Any, _Job] = field(default_factory=dict)


class Encoders:
    """The workers of a build; as many as the cluster has room for, while machines come and go.

    Args:
        checkpoint: folder or hub id of the model, which every host can open.
        meta: metadata of the banks that they make.
        place: the bank that these become parts of; None returns them.
        most: maximum workers; None means one for each GPU, or for each `cpus` CPUs where there is
            no GPU.
        cpus: CPUs of a worker.

    Raises:
        ConfigError: the cluster has no room for a worker.
    """

    def __init__(
        self,
        checkpoint: str,
        meta: Meta,
        place: Place | None,
        most: int | None = None,
        cpus: int = 1,
    ) -> None:
        self.most, self.cpus = most, cpus
        self._ray = import_ray()
        self._gpus = 0
        room = self._room()
        if room == 0:
            raise ConfigError(
                f"no host of the cluster has a GPU or {cpus} CPUs for a worker; give fewer with "
                "--worker-cpus, or start Ray there with more"
            )
        options = {"num_cpus": max(cpus - READ_CPUS, 0), "num_gpus": self._gpus}
        actor: Any = self._ray.remote(**options, scheduling_strategy="SPREAD")(Encoder)
        self._create = lambda: actor.remote(checkpoint, meta, place, cpus)
        self._workers: list[_Worker] = []
        self._waiting: deque[_Job] = deque()
        self._done: dict[int, _Job] = {}
        self._lost = 0
        self._looked = -LOOK
        self._seen = time.monotonic()

    def __enter__(self) -> Encoders:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            self._ray.kill(worker.actor)
        self._workers.clear()

    def in_order(self, pieces: Iterator[Piece]) -> Iterator[tuple[Piece, Any]]:
        """Read the pieces, and yield each with the bank that a worker made of it, in their order.

        No more pieces are taken than the workers have room for, and no more results wait than that,
        so memory is bounded. If taking a piece fails, the pieces before it are yielded before the
        error is raised.

        Raises:
            SedemError: a worker cannot open the model or read a piece, a piece has killed several
                workers, or the cluster has no worker left.
        """
        taken = given = 0
        failure: Exception | None = None
        ended = False
        while not (ended and taken == given):
            self._look()
            self._hand_out()
            if (job := self._done.pop(given, None)) is not None:
                if job.problem:
                    raise DataError(job.problem)
                if (bank := self._fetch(job)) is not None:
                    yield job.piece, bank
                    given += 1
            elif ended or self._waiting or taken - given >= self._window():
                self._wait()
            else:
                # One piece waits, so that reading continues while workers start or are busy.
                try:
                    self._waiting.append(_Job(taken, next(pieces)))
                    taken += 1
                except StopIteration:
                    ended = True
                except Exception as error:
                    failure, ended = error, True
        if failure is not None:
            raise failure

    def _window(self) -> int:
        """Pieces that may be taken but not yet yielded."""
        return 2 * AHEAD * max(len(self._workers), 1)

    def _hand_out(self) -> None:
        """Give the waiting pieces to the workers that have the least to do."""
        while self._waiting:
            ready = [w for w in self._workers if w.starting is None and len(w.jobs) < AHEAD]
            if not ready:
                return
            worker, job = min(ready, key=lambda one: len(one.jobs)), self._waiting.popleft()
            encode = worker.actor.encode.options(num_returns=2)
            status, job.bank = encode.remote(job.piece.documents)
            worker.jobs[status] = job

    def _wait(self) -> None:
        """Wait until a worker has started, finished a piece or died, or until the next check."""
        pending = {w.starting: w for w in self._workers if w.starting is not None}
        pending |= {status: w for w in self._workers for status in w.jobs}
        if not pending:
            time.sleep(LOOK / 10)
            return
        ready, _ = self._ray.wait(list(pending), timeout=LOOK)
        for reference in ready:
            worker = pending[reference]
            try:
                problem = self._ray.get(reference)
            except self._losses() as error:
                self._died(worker, error)
                return
            if reference == worker.starting:
                if problem:
                    raise ConfigError(problem)
                worker.starting, self._lost = None, 0
            else:
                job = worker.jobs.pop(reference)
                job.problem = problem
                self._done[job.number] = job

    def _fetch(self, job: _Job) -> Any:
        """Return the bank of a finished piece; None if it was lost with its machine."""
        try:
            return self._ray.get(job.bank)
        except self._losses() as error:
            logger.warning("the memory of %s is lost (%s); it is read again", job.piece, error)
            self._waiting.appendleft(job)
            return None

    def _losses(self) -> tuple[type[BaseException], ...]:
        """Return the errors that Ray raises when a worker or a machine is lost."""
        errors = self._ray.exceptions
        return (
            errors.RayActorError,
            errors.WorkerCrashedError,
            errors.ObjectLostError,
            errors.OutOfMemoryError,
        )

    def _died(self, worker: _Worker, error: BaseException) -> None:
        """Return the pieces of a dead worker to the queue."""
        self._workers.remove(worker)
        self._looked = -LOOK
        jobs = list(worker.jobs.values())
        self._lost += worker.starting is not None
        if self._lost == DEATHS:
            raise UnavailableError(
                f"{DEATHS} workers died while they opened the model ({first_line(error)}); give "
                "them more memory"
            )
        if jobs:
            logger.warning("a worker died; %s is read again", jobs[0].piece)
            jobs[0].deaths += 1
            if jobs[0].deaths == DEATHS:
                raise UnavailableError(
                    f"{DEATHS} workers died while they read {jobs[0].piece} "
                    f"({first_line(error)}); give them more memory, or leave that out"
                )
        self._waiting.extendleft(reversed(jobs))

    def _look(self) -> None:
        """Start workers where there is room; give up after a long time without one."""
        now = time.monotonic()
        if any(worker.starting is None for worker in self._workers):
            self._seen = now
        if now - self._looked < LOOK:
            return
        self._looked = now
        if now - self._seen > PATIENCE:
            raise UnavailableError(
                f"the cluster has had no worker for {PATIENCE / 60:.0f} minutes; run the same "
                "command again when its hosts are back to continue"
            )
        room = self._room()
        while len(self._workers) < (room if self.most is None else min(room, self.most)):
            actor = self._create()
            self._workers.append(_Worker(actor, actor.start.remote(version_of("sedem"))))

    def _room(self) -> int:
        """Return the number of workers that the cluster has room for."""
        hosts = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        gpus = int(sum(host.get("GPU", 0) for host in hosts))
        if gpus or self._gpus:
            self._gpus = 1
            return gpus
        return sum(int(host.get("CPU", 0) // self.cpus) for host in hosts)
