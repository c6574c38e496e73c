"""Answers that are decoded together while others join and leave, in one thread.

Letters: B rows, J rows that join, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sedem.answering.answer import Prepared, final_timings, new_transcript, prepare, to_answer
from sedem.answering.decoding import Transcript, fetch
from sedem.answering.reply import Question, Selected
from sedem.engine.device import Clock
from sedem.engine.interface import Engine, Rows
from sedem.errors import SedemError, UnavailableError
from sedem.modules import SedemModules


@dataclass
class Running:
    """One answer that is being decoded.

    Attributes:
        question: the question it answers.
        prepared: its blocks and its start.
        transcript: its text so far.
        clock: its times since the question was asked.
        stages: the times of the stages before decoding, shared by all that joined with it.
        choose: chooses tokens `[1]` from logits `[1, V]`.
    """

    question: Question
    prepared: Prepared
    transcript: Transcript
    clock: Clock
    stages: Clock
    choose: Callable[[Tensor], Tensor]


class RunningAnswers:
    """The answers in the rows of an engine.

    Args:
        model: the model that answers.
        engine: its engine.
        name: the model's name in the answers.
        rows: rows that the engine has opened.
        count: B, the number of rows.

    Attributes:
        live: the answers by row.
    """

    def __init__(
        self, model: SedemModules, engine: Engine, name: str, rows: Rows, count: int
    ) -> None:
        self.model, self.engine, self.name = model, engine, name
        self.rows, self.count = rows, count
        self.live: dict[int, Running] = {}
        self._ids_B = torch.zeros(count, dtype=torch.long, device=model.device)
        # Chosen tokens that are still being copied to the host, and the answers they belong to.
        self._unread: tuple[Callable[[], list[int]], dict[int, Running]] | None = None

    @property
    def free(self) -> int:
        """Number of free rows."""
        return self.count - len(self.live)

    def join(self, questions: Sequence[Question]) -> None:
        """Prepare and prefill some questions together, and send the beginning of each answer.

        If that fails, each is tried alone, so that an error reaches only its own question.

        Args:
            questions: at most as many as there are free rows.
        """
        try:
            self._join(questions)
        except Exception as error:
            if len(questions) == 1:
                questions[0].send(failure(error))
                return
            for question in questions:
                self.join([question])

    def _join(self, questions: Sequence[Question]) -> None:
        model, device = self.model, self.model.device
        clocks = [Clock(device, question.since) for question in questions]
        for clock in clocks:
            clock.mark("wait_ms")
        stages = Clock(device, questions[0].since)  # without `since`, it would wait for the device
        limits = [question.decoding.max_new_tokens for question in questions]
        requests = [question.request for question in questions]
        prepared = prepare(model, self.engine, requests, limits, stages)
        joined = [
            Running(
                question,
                one,
                new_transcript(model, one, question.decoding),
                clock,
                stages,
                question.decoding.chooser(device),
            )
            for question, one, clock in zip(questions, prepared, clocks, strict=True)
        ]
        for running in joined:
            running.question.send(selected(running.prepared))
        self._prefill([running for running in joined if running.prepared.start is not None])
        for running in joined:
            if running.prepared.start is None:
                with self._only_for(running):
                    running.clock.mark("ttft_ms")
                    self._send(running)

    def _prefill(self, joined: Sequence[Running]) -> None:
        free = sorted(set(range(self.count)) - self.live.keys())
        rows = dict(zip(free, joined, strict=False))
        if not rows:
            return
        starts = [running.prepared.start for running in joined if running.prepared.start]
        # With steps in advance, one step runs after the last token, before that token is read.
        limits = [running.question.decoding.max_new_tokens for running in joined]
        logits_JV = self.rows.join(list(rows), starts, limits)
        joined[0].stages.lap("prefill_ms")
        self.live |= rows
        for (row, running), logits_V in zip(rows.items(), logits_JV, strict=True):
            with self._only_for(running, row):
                token = running.choose(logits_V[None])
                self._ids_B[row] = token[0]
                running.transcript.add(int(token))
                running.clock.mark("ttft_ms")
                self._give(row)

    def step(self) -> None:
        """Run one token of every answer, and send what is new."""
        logits_BV = self.rows.step(self._ids_B)
        if self._unread is not None:
            self._read(*self._unread)
        ids_B = logits_BV.argmax(-1)
        for row, running in self.live.items():
            if running.question.decoding.temperature:
                ids_B[row] = running.choose(logits_BV[row : row + 1])[0]
        self._ids_B = ids_B
        self._unread = fetch(ids_B), dict(self.live)
        if not self.engine.ahead:
            self._read(*self._unread)

    def drop(self) -> None:
        """Free the rows of cancelled questions."""
        for row in [row for row, running in self.live.items() if running.question.ended]:
            self._leave(row)

    def end(self, error: Exception) -> None:
        """End all questions with an error."""
        for running in self.live.values():
            running.question.send(failure(error))

    def _read(self, read: Callable[[], list[int]], answers: dict[int, Running]) -> None:
        self._unread = None
        tokens = read()
        for row, running in answers.items():
            if self.live.get(row) is running:
                with self._only_for(running, row):
                    running.transcript.add(tokens[row])
                    self._give(row)

    @contextmanager
    def _only_for(self, running: Running, row: int | None = None) -> Iterator[None]:
        """Let an error reach only one question, and free its row."""
        try:
            yield
        except Exception as error:
            running.question.send(failure(error))
            if row is not None:
                self._leave(row)

    def _give(self, row: int) -> None:
        running = self.live[row]
        if running.transcript.finish_reason is not None:
            self._leave(row)
        self._send(running)

    def _send(self, running: Running) -> None:
        transcript, question = running.transcript, running.question
        if piece := transcript.take():
            question.send(piece)
        if transcript.finish_reason is not None:
            timings = final_timings(running.clock, running.stages)
            question.send(to_answer(self.name, running.prepared, transcript, timings))

    def _leave(self, row: int) -> None:
        if self.live.pop(row, None) is not None:
            self.rows.leave(row)


def selected(prepared: Prepared) -> Selected:
    """Return what is known of an answer before its first token."""
    selection, bank = prepared.selection, prepared.request.bank
    documents = tuple(bank.rows(selection.ranked).documents.tolist())
    return Selected(prepared.citations, documents, selection.confidence, selection.declined)


def failure(error: Exception) -> SedemError:
    """Return the error to send to a reader; unexpected ones become UnavailableError.

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
