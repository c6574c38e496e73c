"""An engine replica: encodes a question, asks the selectors, merges, and decodes the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sedem.answering.decoding import Decoding
from sedem.answering.reply import Event, failure
from sedem.answering.requests import (
    Request,
    check_min_confidence,
    choose,
    confidences,
    encode_questions,
)
from sedem.answering.scheduler import WAITING, Scheduler
from sedem.answering.scores import document_indexes
from sedem.bank.memory_bank import Snapshot
from sedem.engine.device import device_lock
from sedem.errors import BankError
from sedem.scale.partitions import Found, merge, needed
from sedem.scale.selecting import Wanted
from sedem.scale.versions import OpenVersions, Version
from sedem.types import Answer

if TYPE_CHECKING:
    from sedem.model import SeDeM

Ask = Callable[[Wanted], Awaitable[Found]]
"""Asks one part of the selectors."""


@dataclass(frozen=True)
class Asked:
    """A question to be sent to an engine.

    Attributes:
        version: version of the bank that it is answered from.
        request: the question, without its bank.
        decoding: how the answer is generated.
    """

    version: Version
    request: Request
    decoding: Decoding

    @classmethod
    def of(cls, version: Version, request: Request, decoding: Decoding) -> Asked:
        """Pack a question."""
        return cls(version, replace(request, bank=None), decoding)  # type: ignore[arg-type]


class EngineReplica:
    """Answers questions in the rows of one running batch.

    Args:
        model: the model.
        parts: functions that ask each part of the selectors, in order.
        fetch: returns the snapshot of a version.
        rows: maximum concurrent answers; None means as many as suit the engine.
        waiting: maximum number of questions that wait for a row.
    """

    def __init__(
        self,
        model: SeDeM,
        parts: Sequence[Ask],
        fetch: Callable[[Any], Snapshot],
        *,
        rows: int | None = None,
        waiting: int = WAITING,
    ) -> None:
        self.model, self.parts = model, parts
        self.versions = OpenVersions[Snapshot](fetch, lambda snapshot: snapshot)
        self.scheduler = Scheduler(model, model.engine, model.name, rows=rows, waiting=waiting)

    def prepare(self, version: Version) -> None:
        """Open a version of a bank."""
        self.versions.get(version)

    async def events(self, asked: Asked) -> AsyncGenerator[Event, None]:
        """Answer a question.

        Yields:
            The blocks of the answer, its text in pieces, then the complete answer or the error.
            Closing the generator cancels the question.
        """
        since = time.perf_counter()
        try:
            bank = await asyncio.to_thread(self.versions.get, asked.version)
            request = replace(asked.request, bank=bank)
            times: dict[str, float] = {}
            if asked.version.stored:
                request, times = await self.selected(request, asked.version)
            reply = self.scheduler.stream(request, asked.decoding)
            try:
                yield await reply.selection()
                async for piece in reply:
                    yield piece
                assert reply.answer is not None
                yield with_times(reply.answer, times, since)
            finally:
                reply.cancel()
        except Exception as error:
            yield failure(error)

    async def selected(
        self, request: Request, version: Version
    ) -> tuple[Request, dict[str, float]]:
        """Return a request with the blocks that the parts select, and the times this took.

        Raises:
            SedemError: as in `SeDeM.answer`.
        """
        model, bank = self.model, request.bank
        check_min_confidence(model, request)
        bank.check_made_by(model.fingerprint())
        begun = time.perf_counter()
        hidden_BQE, mask_BQ = await asyncio.to_thread(self._encode, request.question)
        encoded = time.perf_counter()
        if not len(bank):
            raise BankError("the bank holds no documents; add some with 'sedem build BANK FILE...'")
        count = needed(model, request)
        documents = request.documents
        indexes = None if documents is None else tuple(document_indexes(bank, documents))
        wanted = Wanted(version, hidden_BQE[0].cpu().numpy(), count, indexes)
        scores_N = (await self._ask(wanted)).spread(len(bank))
        (confidence,) = confidences(model, [scores_N], mask_BQ)
        selection = choose(model, request, scores_N, confidence)
        times = {
            "encode_ms": (encoded - begun) * 1e3,
            "score_ms": (time.perf_counter() - encoded) * 1e3,
        }
        return replace(request, selection=selection), times

    async def scores(self, version: Version, question: str) -> Tensor:
        """Return the score of every block `[N]` in float32.

        Raises:
            SedemError: as in `SeDeM.scores`.
        """
        bank = await asyncio.to_thread(self.versions.get, version)
        if not version.stored:
            return await asyncio.to_thread(self.model.scores, bank, question)
        bank.check_made_by(self.model.fingerprint())
        states = await asyncio.to_thread(self._encode, question)
        found = await self._ask(Wanted(version, states[0][0].cpu().numpy(), None, None))
        return found.spread(len(bank))

    def close(self) -> None:
        """End all questions with an error."""
        self.scheduler.close(at_once=True)

    def _encode(self, question: str) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), device_lock(self.model.device):
            return encode_questions(self.model, self.model.engine, [question])

    async def _ask(self, wanted: Wanted) -> Found:
        """Ask all parts at once and merge the results; if a part fails, the question fails."""
        return merge(await asyncio.gather(*(ask(wanted) for ask in self.parts)), wanted.count)


def with_times(answer: Answer, times: dict[str, float], since: float) -> Answer:
    """Return an answer whose times start when its question reached the engine.

    Args:
        answer: the answer; its own times start when its blocks were selected.
        times: times of encoding and scoring; empty if the answer includes them.
        since: when the question arrived, by `time.perf_counter`.
    """
    if not times:
        return answer
    total = (time.perf_counter() - since) * 1e3
    before = total - answer.timings["total_ms"]
    later = {name: answer.timings[name] + before for name in ("wait_ms", "ttft_ms")}
    selected = {**times, "select_ms": sum(times.values())}
    return replace(answer, timings={**answer.timings, **later, **selected, "total_ms": total})
