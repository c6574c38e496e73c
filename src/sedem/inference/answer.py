"""The second walk: question -> scores -> K blocks -> restored states -> answer with its sources.

Letters: B batch, N blocks, J slots of a block, K selected blocks, U restored states, Q question
tokens, P prefix tokens, E encoder width, D decoder width.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor

from sedem.bank.memory_bank import MemoryBank
from sedem.engine.device import Clock, device_lock
from sedem.engine.interface import Engine
from sedem.inference.generation import Decoding, Transcript, generate
from sedem.inference.prompts import question_ids
from sedem.inference.requests import (
    Request,
    Selection,
    check_fits,
    choose,
    encode_questions,
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
    """Answer a batch of requests; banks, K and prompt lengths may differ between them.

    Yields:
        The growing transcripts, after each token.

    Returns:
        The answers.
    """
    clock = Clock(model.device)
    for request in requests:
        request.bank.check_made_by(model.fingerprint())
    with device_lock(model.device):
        hidden_BQE, mask_BQ = encode_questions(
            model, engine, [request.question for request in requests]
        )
        clock.lap("encode_ms")
        scores = score_requests(model, requests, hidden_BQE, mask_BQ)
        selections = [choose(model, *pair) for pair in zip(requests, scores, strict=True)]
        clock.lap("score_ms")
    clock.timings["select_ms"] = clock.timings["encode_ms"] + clock.timings["score_ms"]
    prefixes = [torch.tensor(question_ids(model.decoder, r.question)) for r in requests]
    for request, selection, ids_P in zip(requests, selections, prefixes, strict=True):
        sizes = restored_sizes(model, request.bank, selection.ranked)
        check_fits(model, sizes, len(ids_P), decoding.max_new_tokens)
    starts = [
        start_of(model, request.bank, selection, ids_P)
        for request, selection, ids_P in zip(requests, selections, prefixes, strict=True)
    ]
    clock.lap("gather_ms")
    rows: list[Transcript] = []
    with engine.start(starts, decoding.max_new_tokens) as (logits_BV, advance):
        clock.lap("prefill_ms")
        tokenizer, eos_token_id, ahead = (
            model.decoder.tokenizer,
            model.decoder.eos_token_id,
            engine.ahead,
        )
        for rows in generate(logits_BV, advance, tokenizer, eos_token_id, decoding, ahead=ahead):
            if "ttft_ms" not in clock.timings:
                clock.mark("ttft_ms")
            yield rows
    clock.mark("total_ms")
    seen = [int(start.real.sum()) + len(start.prefix) for start in starts]
    return [
        to_answer(name, *parts, clock.timings)
        for parts in zip(requests, selections, rows, seen, strict=True)
    ]


def to_answer(
    name: str,
    request: Request,
    selection: Selection,
    row: Transcript,
    seen: int,
    timings: dict[str, float],
) -> Answer:
    """An answer with the spans that conditioned it.

    Args:
        name: of the model that answered.
        request: what was asked.
        selection: the blocks that were used.
        row: what was generated.
        seen: positions that the upper layers saw before the first answer token.
        timings: of the batch.
    """
    assert row.finish_reason is not None
    citations = tuple(
        request.bank.citation(index, rank, float(selection.scores[index]))
        for rank, index in enumerate(selection.ranked, start=1)
    )
    return Answer(
        text=row.text,
        citations=citations,
        k=len(citations),
        blocks=len(request.bank),
        timings=dict(timings),
        finish_reason=row.finish_reason,
        model=name,
        cut=row.cut(),
        conditioning=seen,
        stored_bytes=request.bank.memory_bytes,
        context_tokens=request.bank.tokens,
        ranking=ranking(request.bank, selection.scores) if request.ranking else None,
    )


def ranking(bank: MemoryBank, scores_N: Tensor) -> tuple[Span, ...]:
    """The span behind every block of a bank, best first."""
    blocks = [bank.blocks[index] for index in select(scores_N, len(bank)).tolist()]
    return tuple((bank.documents[b.document].name, b.start, b.end) for b in blocks)


class AnswerStream(Iterator[str]):
    """Pieces of an answer as they become certain; `answer` holds all of it at the end."""

    def __init__(self, answering: Generator[list[Transcript], None, list[Answer]]) -> None:
        self._answering = answering
        self.answer: Answer | None = None

    def __next__(self) -> str:
        while True:
            try:
                rows = next(self._answering)
            except StopIteration as finished:
                if self.answer is None:
                    self.answer = finished.value[0]
                raise StopIteration from None
            if piece := rows[0].take():
                return piece
