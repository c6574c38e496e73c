"""Answering: question -> scores -> K blocks -> restored states -> answer with its citations.

Letters: B batch, N blocks, J slots of a block, K selected blocks, U restored states, Q question
tokens, P prefix tokens, E encoder width, D decoder width.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from sedem.bank.snapshot import BankReader
from sedem.engine.device import Clock, device_lock
from sedem.engine.interface import Engine, Start
from sedem.inference.generation import Decoding, Transcript, generate
from sedem.inference.prompts import UNANSWERABLE, end_ids
from sedem.inference.requests import (
    Request,
    Selection,
    check_fits,
    check_min_confidence,
    choose,
    confidences,
    encode_questions,
    pinned,
    prefix_of,
    restored_sizes,
    score_requests,
    start_of,
)
from sedem.method.modules import SedemModules
from sedem.method.selector import select
from sedem.types import Answer, Span


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
        ConfigError: K, a forced block or `min_confidence` cannot be used, or an answer has too
            many positions.
    """
    clock = Clock(model.device)
    requests = pinned(requests)
    for request in requests:
        check_min_confidence(model, request)
        request.bank.check_made_by(model.fingerprint())
    with device_lock(model.device):
        hidden_BQE, mask_BQ = encode_questions(
            model, engine, [request.question for request in requests]
        )
        clock.lap("encode_ms")
        scores = score_requests(model, requests, hidden_BQE, mask_BQ)
        known = zip(requests, scores, confidences(model, scores, mask_BQ), strict=True)
        selections = [choose(model, *one) for one in known]
        clock.lap("score_ms")
    clock.timings["select_ms"] = clock.timings["encode_ms"] + clock.timings["score_ms"]
    conditioning, starts = [], []
    for request, selection in zip(requests, selections, strict=True):
        if selection.declined:
            conditioning.append(0)
            continue
        ids_P = prefix_of(model, request, selection)
        as_memory = set(selection.memory)
        by_score = [block for block in selection.ranked if block in as_memory]
        sizes = restored_sizes(model, request.bank, by_score)
        check_fits(model, sizes, len(ids_P), decoding.max_new_tokens, len(selection.texts))
        conditioning.append(sum(sizes) + len(ids_P))
        starts.append(start_of(request.bank, selection, ids_P))
    clock.lap("gather_ms")
    declined = [selection.declined for selection in selections]
    transcripts = yield from _transcribe(model, engine, starts, declined, decoding, clock)
    clock.mark("total_ms")
    return [
        to_answer(name, *parts, clock.timings)
        for parts in zip(requests, selections, transcripts, conditioning, strict=True)
    ]


def _transcribe(
    model: SedemModules,
    engine: Engine,
    starts: Sequence[Start],
    declined: Sequence[bool],
    decoding: Decoding,
    clock: Clock,
) -> Generator[list[Transcript], None, list[Transcript]]:
    """Decode the answers of a batch; declined requests have their sentence from the beginning.

    Args:
        model: the model that answers.
        engine: its engine.
        starts: one for each request that is not declined.
        declined: which requests are.
        decoding: how answers are generated.
        clock: is given the times of prefill and first token.
    """
    tokenizer = model.decoder.tokenizer
    ends = end_ids(model.decoder, chat=model.config.chat_template)
    transcripts = [Transcript(tokenizer, ends, decoding) for _ in declined]
    for row, is_declined in enumerate(declined):
        if is_declined:
            transcripts[row].finish(UNANSWERABLE, "unanswerable")
    if not starts:
        clock.mark("ttft_ms")
        yield transcripts
        return transcripts
    decoded = [row for row, is_declined in enumerate(declined) if not is_declined]
    with engine.start(starts, decoding.max_new_tokens) as (logits_BV, advance):
        clock.lap("prefill_ms")
        for generated in generate(
            logits_BV, advance, tokenizer, ends, decoding, ahead=engine.ahead
        ):
            if "ttft_ms" not in clock.timings:
                clock.mark("ttft_ms")
            for row, transcript in zip(decoded, generated, strict=True):
                transcripts[row] = transcript
            yield transcripts
    return transcripts


def to_answer(
    name: str,
    request: Request,
    selection: Selection,
    transcript: Transcript,
    conditioning: int,
    timings: dict[str, float],
) -> Answer:
    """Make an answer with the spans that conditioned it.

    Args:
        name: name of the model that answered.
        request: the question and its bank.
        selection: the blocks that were used.
        transcript: the finished text.
        conditioning: positions that the upper layers saw before the first answer token; 0 if
            nothing was decoded.
        timings: milliseconds of the batch, by stage.
    """
    assert transcript.finish_reason is not None
    citations = tuple(
        request.bank.citation(index, rank, float(selection.scores[index]))
        for rank, index in enumerate(selection.ranked, start=1)
    )
    return Answer(
        text=transcript.text,
        citations=citations,
        k=len(citations),
        blocks=len(request.bank),
        timings=dict(timings),
        finish_reason=transcript.finish_reason,
        model=name,
        cut=transcript.cut(),
        conditioning=conditioning,
        stored_bytes=request.bank.memory_bytes,
        context_tokens=request.bank.tokens,
        confidence=selection.confidence,
        ranking=ranking(request.bank, selection.scores) if request.ranking else None,
    )


def ranking(bank: BankReader, scores_N: Tensor) -> tuple[Span, ...]:
    """Return the span behind every block of a bank, the best score first."""
    blocks = [bank.blocks[index] for index in select(scores_N, len(bank)).tolist()]
    return tuple((bank.documents.names[b.document], b.start, b.end) for b in blocks)


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
