"""The interface that answers a server's questions, and its implementation on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from sedem.answering.decoding import GREEDY, Decoding
from sedem.answering.reply import AsyncReply
from sedem.answering.requests import Request
from sedem.answering.scheduler import Scheduler
from sedem.bank.memory_bank import BankReader, Snapshot
from sedem.serve.settings import Settings

if TYPE_CHECKING:
    from sedem.model import SeDeM


class Answerer(Protocol):
    """Answers the questions of a server.

    Attributes:
        rows: maximum number of concurrent answers.
    """

    rows: int

    @property
    def waiting(self) -> int:
        """How many questions wait for a row."""
        ...

    @property
    def running(self) -> int:
        """How many answers are being generated."""
        ...

    def prepare(self, bank: Snapshot) -> None:
        """Prepare for questions to a new version of a bank, which stays hidden until this returns.

        Called from threads; it may take long. Questions to the last version continue meanwhile.

        Raises:
            SedemError: it cannot be queried; the last version stays.
        """
        ...

    def require_room(self) -> None:
        """Refuse now what `stream` would refuse; as in `Scheduler.require_room`."""
        ...

    def stream(self, request: Request, decoding: Decoding = GREEDY) -> AsyncReply:
        """Answer a question; as in `Scheduler.stream`."""
        ...

    def scores(self, bank: BankReader, question: str) -> Tensor:
        """Return the score of every block `[N]` in float32; called from threads.

        Raises:
            SedemError: as in `SeDeM.scores`.
        """
        ...

    def drain(self) -> None:
        """Accept no more questions and let answers finish; this does not block."""
        ...

    def close(self, *, at_once: bool = False) -> None:
        """Accept no more questions and stop; this blocks.

        Args:
            at_once: end questions with an error instead of answering them.
        """
        ...


OpenAnswerer = Callable[[Settings, "SeDeM"], Answerer]
"""Opens the answerer of a server, given its settings and its model."""


class OneMachine(Scheduler):
    """Answers with the model of this process.

    Args:
        settings: how many questions are answered at once, and how many may wait.
        model: the model.
    """

    def __init__(self, settings: Settings, model: SeDeM) -> None:
        super().__init__(
            model, model.engine, model.name, rows=settings.rows, waiting=settings.waiting
        )
        self._scores = model.scores

    def prepare(self, bank: Snapshot) -> None:
        """Do nothing: the first question makes the keys."""

    def scores(self, bank: BankReader, question: str) -> Tensor:
        """Return the score of every block; as in `SeDeM.scores`."""
        return self._scores(bank, question)
