"""From requests to the inputs of their answers, and from transcripts to answers with citations.

Question -> scores -> K blocks -> restored states -> answer: `running` does the last two steps.

Letters: B batch, N blocks, Q question tokens, P prefix tokens, E encoder width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sedem.answering.decoding import Transcript
from sedem.answering.prompts import question_ids
from sedem.answering.requests import (
    Request,
    Selection,
    check_fits,
    check_min_confidence,
    choose,
    confidences,
    count_candidates,
    encode_questions,
    inputs_of,
    pinned,
    prefix_of,
    restored_sizes,
)
from sedem.answering.scores import score_requests
from sedem.bank.memory_bank import BankReader
from sedem.engine.device import Clock, device_lock
from sedem.engine.interface import AnswerInputs, Engine
from sedem.method.selector import select
from sedem.modules import SedemModules
from sedem.types import Answer, Citation, Span


@dataclass(frozen=True)
class Prepared:
    """A request whose blocks are selected.

    Attributes:
        request: the question and its bank, as the bank was when the question was encoded.
        inputs: the inputs of the answer; None if the request is declined.
        conditioning: number of positions that the upper layers see before the first answer token; 0
            if the answer is declined.
    """

    request: Request
    selection: Selection
    inputs: AnswerInputs | None
    conditioning: int

    @cached_property
    def citations(self) -> tuple[Citation, ...]:
        """The spans behind the selected blocks, best first."""
        bank, selection = self.request.bank, self.selection
        return tuple(
            bank.citation(index, rank, float(selection.scores[index]))
            for rank, index in enumerate(selection.ranked, start=1)
        )


@torch.no_grad()
def prepare(
    model: SedemModules,
    engine: Engine,
    requests: Sequence[Request],
    limits: Sequence[int],
    clock: Clock,
) -> list[Prepared]:
    """Encode questions, then score and select blocks of their banks; nothing is decoded yet.

    Args:
        clock: records the time of each stage.

    Raises:
        BankMismatchError: another model made a bank.
        DataError: a question is empty or too long.
        ConfigError: K, a forced block, a document or `min_confidence` cannot be used, or an answer
            has too many positions.
        UnknownDocumentError: a bank has no document of a requested name.
    """
    requests = pinned(requests)
    for request in requests:
        check_min_confidence(model, request)
        request.bank.check_made_by(model.fingerprint())
    with device_lock(model.device):
        to_select = [request for request in requests if request.selection is None]
        states = None
        if to_select:
            states = encode_questions(model, engine, [one.question for one in to_select])
        clock.lap("encode_ms")
        # Tokenized while a GPU encodes the questions.
        chat = model.config.chat_template
        prompts = [question_ids(model.decoder, request.question, chat=chat) for request in requests]
        scores = [] if states is None else score_requests(model, to_select, *states)
        sure = [] if states is None else confidences(model, scores, states[1])
        known = zip(to_select, scores, sure, strict=True)
        selected = iter([choose(model, *one) for one in known])
        selections = [request.selection or next(selected) for request in requests]
        clock.lap("score_ms")
    rows = zip(requests, selections, prompts, limits, strict=True)
    prepared = [_inputs(model, *row) for row in rows]
    clock.lap("gather_ms")
    return prepared


def _inputs(
    model: SedemModules, request: Request, selection: Selection, prompt: Sequence[int], limit: int
) -> Prepared:
    if selection.declined:
        return Prepared(request, selection, None, 0)
    ids_P = prefix_of(model, request, selection, prompt)
    as_memory = set(selection.memory)
    by_score = [block for block in selection.ranked if block in as_memory]
    sizes = restored_sizes(model, request.bank, by_score)
    check_fits(model, sizes, len(ids_P), limit, len(selection.texts))
    inputs = inputs_of(request.bank, selection, ids_P)
    return Prepared(request, selection, inputs, sum(sizes) + len(ids_P))


def to_answer(
    name: str, prepared: Prepared, transcript: Transcript, timings: dict[str, float]
) -> Answer:
    """Make an answer with the spans that conditioned it.

    Args:
        name: name of the model that answered.
    """
    request, selection = prepared.request, prepared.selection
    assert transcript.finish_reason is not None
    return Answer(
        text=transcript.text,
        citations=prepared.citations,
        k=len(prepared.citations),
        blocks=len(request.bank),
        timings=dict(timings),
        finish_reason=transcript.finish_reason,
        model=name,
        cut=transcript.cut(),
        conditioning=prepared.conditioning,
        stored_bytes=request.bank.memory_bytes,
        context_tokens=request.bank.tokens,
        confidence=selection.confidence,
        ranking=ranking(request.bank, selection.scores) if request.ranking else None,
        answer_tokens=len(transcript.ids),
    )


def ranking(bank: BankReader, scores_N: Tensor) -> tuple[Span, ...]:
    """Return the span behind every block that could be selected, best score first."""
    ranked = select(scores_N, count_candidates(scores_N)).tolist()
    blocks = [bank.blocks[index] for index in ranked]
    return tuple((bank.documents.name(b.document), b.start, b.end) for b in blocks)
