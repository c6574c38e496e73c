"""Where a server's questions are answered: on this machine, or wherever else the protocol leads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from sedem.bank.snapshot import BankReader, Snapshot
from sedem.inference.generation import Decoding
from sedem.inference.reply import AsyncReply
from sedem.inference.requests import Request
from sedem.inference.scheduler import GREEDY, Scheduler
from sedem.serve.settings import Settings

if TYPE_CHECKING:
    from sedem.model import SeDeM


class Answerer(Protocol):
    """Answers the questions of a server.

    Attributes:
        rows: the most answers at once.
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
        """Get ready for questions to a new version of a bank; nobody sees it before this returns.

        It is called by threads and may take long: questions to the last version go on meanwhile.

        Raises:
            SedemError: it cannot be asked; the last version stays.
        """
        ...

    def require_room(self) -> None:
        """Refuse now what `stream` would refuse; as `Scheduler.require_room`."""
        ...

    def stream(self, request: Request, decoding: Decoding = GREEDY) -> AsyncReply:
        """Answer a question; as `Scheduler.stream`."""
        ...

    def scores(self, bank: BankReader, question: str) -> Tensor:
        """Return the score of every block `[N]` in float32; called by threads.

        Raises:
            SedemError: as `SeDeM.scores`.
        """
        ...

    def drain(self) -> None:
        """Take no more questions and let answers finish; this does not block."""
        ...

    def close(self, *, at_once: bool = False) -> None:
        """Take no more questions and end; this blocks.

        Args:
            at_once: end questions with an error instead of answering them.
        """
        ...


OpenAnswerer = Callable[[Settings, "SeDeM"], Answerer]
"""Opens what answers the questions of a server, for its settings and its model."""


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
        """Return the score of every block; as `SeDeM.scores`."""
        return self._scores(bank, question)
