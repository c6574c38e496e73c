"""Answering: question -> scores -> K blocks -> restored states -> answer with its citations.

Letters: B batch, N blocks, J slots per block, K selected blocks, U restored states, Q question
tokens, P prefix tokens, E encoder width, D decoder width.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sedem.answering.decoding import Decoding, Transcript, generate
from sedem.answering.prompts import UNANSWERABLE, end_ids, question_ids
from sedem.answering.requests import (
    Request,
    Selection,
    check_fits,
    check_min_confidence,
    choose,
    confidences,
    count_candidates,
    encode_questions,
    pinned,
    prefix_of,
    restored_sizes,
    start_of,
)
from sedem.answering.scores import score_requests
from sedem.bank.memory_bank import BankReader
from sedem.engine.device import Clock, device_lock
from sedem.engine.interface import Engine, Start
from sedem.method.selector import select
from sedem.modules import SedemModules
from sedem.types import Answer, Citation, Span


@torch.no_grad()
def respond(
    model: SedemModules,
    engine: Engine,
    requests: Sequence[Request],
    decoding: Decoding,
    name: str,
) -> Generator[list[Transcript], None, list[Answer]]:
    """Answer a batch of requests, which may differ in bank, K and length.

    Args:
        model: the model that answers.
        engine: its engine.
        requests: the questions.
        decoding: how answers are generated.
        name: the model's name in the answers.

    Yields:
        The transcripts of all requests, after each token.

    Returns:
        The answers.

    Raises:
        BankMismatchError: another model made a bank.
        DataError: a question is empty or too long.
        ConfigError: K, a forced block, a document or `min_confidence` cannot be used, or an answer
            has too many positions.
        UnknownDocumentError: a bank has no document of a requested name.
    """
    clock = Clock(model.device)
    limits = [decoding.max_new_tokens] * len(requests)
    prepared = prepare(model, engine, requests, limits, clock)
    transcripts = yield from _transcribe(model, engine, prepared, decoding, clock)
    timings = final_timings(clock)
    return [to_answer(name, *parts, timings) for parts in zip(prepared, transcripts, strict=True)]


@dataclass(frozen=True)
class Prepared:
    """A request whose blocks are selected.

    Attributes:
        request: the question and its bank, as the bank was when the question was encoded.
        selection: the blocks that are used.
        start: what the answer starts from; None if the request is declined.
        conditioning: number of positions that the upper layers see before the first answer token; 0
            if the answer is declined.
    """

    request: Request
    selection: Selection
    start: Start | None
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
        model: the model that answers.
        engine: its engine.
        requests: the questions.
        limits: token limit of each answer.
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
        selected = iter(() if states is None else _select(model, to_select, *states))
        selections = [request.selection or next(selected) for request in requests]
        clock.lap("score_ms")
    rows = zip(requests, selections, prompts, limits, strict=True)
    prepared = [_start(model, *row) for row in rows]
    clock.lap("gather_ms")
    return prepared


def _select(
    model: SedemModules, requests: Sequence[Request], hidden_BQE: Tensor, mask_BQ: Tensor
) -> list[Selection]:
    """Select the blocks of requests whose questions are encoded."""
    scores = score_requests(model, requests, hidden_BQE, mask_BQ)
    known = zip(requests, scores, confidences(model, scores, mask_BQ), strict=True)
    return [choose(model, *one) for one in known]


def _start(
    model: SedemModules, request: Request, selection: Selection, prompt: Sequence[int], limit: int
) -> Prepared:
    if selection.declined:
        return Prepared(request, selection, None, 0)
    ids_P = prefix_of(model, request, selection, prompt)
    as_memory = set(selection.memory)
    by_score = [block for block in selection.ranked if block in as_memory]
    sizes = restored_sizes(model, request.bank, by_score)
    check_fits(model, sizes, len(ids_P), limit, len(selection.texts))
    start = start_of(request.bank, selection, ids_P)
    return Prepared(request, selection, start, sum(sizes) + len(ids_P))


def final_timings(clock: Clock, stages: Clock | None = None) -> dict[str, float]:
    """Return the times of a finished answer, by stage and in total.

    Args:
        clock: times since the question was asked.
        stages: times of the stages, if another clock recorded them.
    """
    clock.mark("total_ms")
    timings = {**(stages.timings if stages else {}), **clock.timings}
    timings["select_ms"] = timings["encode_ms"] + timings["score_ms"]
    return timings


def new_transcript(model: SedemModules, prepared: Prepared, decoding: Decoding) -> Transcript:
    """Return the transcript of a request: empty, or the fixed answer if it is declined."""
    ends = end_ids(model.decoder, chat=model.config.chat_template)
    transcript = Transcript(model.decoder.tokenizer, ends, decoding)
    if prepared.start is None:
        transcript.finish(UNANSWERABLE, "unanswerable")
    return transcript


def _transcribe(
    model: SedemModules,
    engine: Engine,
    prepared: Sequence[Prepared],
    decoding: Decoding,
    clock: Clock,
) -> Generator[list[Transcript], None, list[Transcript]]:
    """Decode the answers of a batch; declined requests have their fixed answer from the start.

    Args:
        model: the model that answers.
        engine: its engine.
        prepared: the requests.
        decoding: how answers are generated.
        clock: records the times of prefill and first token.
    """
    tokenizer = model.decoder.tokenizer
    ends = end_ids(model.decoder, chat=model.config.chat_template)
    transcripts = [new_transcript(model, one, decoding) for one in prepared]
    decoded = [row for row, one in enumerate(prepared) if one.start is not None]
    starts = [one.start for one in prepared if one.start is not None]
    if not starts:
        clock.mark("ttft_ms")
        yield transcripts
        return transcripts
    with engine.start(starts, decoding.max_new_tokens) as (logits_BV, advance):
        clock.lap("prefill_ms")
        is_first = True
        for generated in generate(
            logits_BV, advance, tokenizer, ends, decoding, ahead=engine.ahead
        ):
            if is_first:
                clock.mark("ttft_ms")
                is_first = False
            for row, transcript in zip(decoded, generated, strict=True):
                transcripts[row] = transcript
            yield transcripts
    return transcripts


def to_answer(
    name: str, prepared: Prepared, transcript: Transcript, timings: dict[str, float]
) -> Answer:
    """Make an answer with the spans that conditioned it.

    Args:
        name: name of the model that answered.
        prepared: the request and its blocks.
        transcript: the finished text.
        timings: milliseconds of the batch, by stage.
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


class AnswerStream(Iterator[str]):
    """Yields an answer in pieces of text, each as soon as it can no longer change.

    Attributes:
        answer: the whole answer once the pieces are exhausted; None before.
    """

    def __init__(self, answering: Generator[list[Transcript], None, list[Answer]]) -> None:
        self._answering = answering
        self.answer: Answer | None = None

    def __next__(self) -> str:
        while True:
            try:
                transcripts = next(self._answering)
            except StopIteration as finished:
                if self.answer is None:
                    self.answer = finished.value[0]
                raise StopIteration from None
            if piece := transcripts[0].take():
                return piece
