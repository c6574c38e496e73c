"""The second walk: question -> scores -> K blocks -> restored states -> answer with its sources.

Letters: B batch, N blocks, J slots of a block, K selected blocks, U restored states, Q question
tokens, P prefix tokens, E encoder width, D decoder width.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sedem.bank.memory_bank import MemoryBank
from sedem.types import (Answer, Span, check_unicode)
from sedem.errors import ConfigError, DataError
from sedem.inference.generation import (Decoding, Transcript, generate)
from sedem.engine.interface import Start
from sedem.inference.prompts import question_ids
from sedem.inference.requests import score_requests
from sedem.method.selector import (Budget, arrange, resolve_budget, select)
from sedem.method.pooling import state_mask
from sedem.engine.device import (now, turn)

if TYPE_CHECKING:
    from sedem.model import SeDeM


@dataclass(frozen=True)
class Request:
    """One question to one bank.

    Attributes:
        bank: what to ask.
        question: what about.
        k: selection budget; None means the model's own.
        blocks: use exactly these blocks instead of selecting (training and controls).
        ranking: whether the answer is to name every block in the order of its score.
    """

    bank: MemoryBank
    question: str
    k: Budget | None = None
    blocks: Sequence[int] | None = None
    ranking: bool = False


@dataclass(frozen=True)
class Selection:
    """The blocks one question uses.

    Attributes:
        ranked: their indices, best first.
        arranged: the same in the order in which the decoder sees them.
        scores: of all blocks `[N]`.
    """

    ranked: list[int]
    arranged: list[int]
    scores: Tensor


@torch.no_grad()
def encode_questions(model: SeDeM, questions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """States of questions at the extraction layer (section 3.2), the start token's dropped.

    Returns:
        States `[B, Q, E]` and mask `[B, Q]`, padded on the right.

    Raises:
        DataError: a question is empty, no Unicode text or longer than the encoder can read.
    """
    limit = model.encoder.max_positions - 1
    rows = []
    for question in questions:
        check_unicode(question, "the question")
        ids = model.encoder.token_ids(question.strip())
        if not ids:
            raise DataError("the question is empty; ask something, such as 'Who signed the lease?'")
        if len(ids) > limit:
            raise DataError(
                f"the question has {len(ids):,} tokens, the model reads at most {limit:,}; "
                "ask something shorter and put long text into a document"
            )
        rows.append(torch.tensor(ids))
    device = model.encoder.device
    ids_BQ = pad_sequence(rows, batch_first=True).to(device)
    lengths_B1 = torch.tensor([[len(row)] for row in rows], device=device)
    mask_BQ = torch.arange(ids_BQ.shape[1], device=device) < lengths_B1
    return model.mixture(model.engine.encode_questions(ids_BQ).float()), mask_BQ


def choose(model: SeDeM, request: Request, scores_N: Tensor) -> Selection:
    """Which blocks a request uses: the selector's best K, or the forced ones.

    Raises:
        ConfigError: K or a forced block cannot be used.
    """
    if request.blocks is None:
        k = model.config.k if request.k is None else request.k
        ranked = select(scores_N, resolve_budget(k, len(scores_N)))
    else:
        if len(set(request.blocks)) < len(request.blocks):
            raise ConfigError(f"blocks {list(request.blocks)} name a block twice; name each once")
        for index in request.blocks:
            if not 0 <= index < len(scores_N):
                raise ConfigError(f"block {index} was asked for, the bank has {len(scores_N)}")
        forced = torch.tensor(list(request.blocks), dtype=torch.long, device=scores_N.device)
        ranked = forced[select(scores_N[forced], len(forced))]
    arranged = arrange(ranked, model.config.block_order)
    return Selection(ranked.tolist(), arranged.tolist(), scores_N.cpu())


def start_of(model: SeDeM, bank: MemoryBank, selection: Selection, prefix: Tensor) -> Start:
    """Where a row starts from: the memory of its blocks, what of it is real, and its prefix."""
    real_KU = state_mask(bank.slot_tokens(selection.arranged), model.decompressor.states_per_slot)
    return Start(bank.memory(selection.arranged).flatten(0, 1), real_KU.flatten(), prefix)


def restored_sizes(model: SeDeM, bank: MemoryBank, blocks: Sequence[int]) -> list[int]:
    """How many decoder states each of some blocks is restored to."""
    real_KU = state_mask(bank.slot_tokens(blocks), model.decompressor.states_per_slot)
    return real_KU.sum(1).tolist()


def check_fits(model: SeDeM, sizes: Sequence[int], prefix: int, limit: int) -> None:
    """Refuse what would run past the decoder's positions.

    Args:
        model: whose decoder.
        sizes: states of each selected block, best first.
        prefix: prompt tokens.
        limit: answer tokens.

    Raises:
        ConfigError: with all the numbers, and the largest K that fits.
    """
    room = model.decoder.max_positions
    states = sum(sizes)
    if states + prefix + limit <= room:
        return
    most = sum(total + prefix + limit <= room for total in accumulate(sizes))
    remedy = f"use k of at most {most}" if most else "ask something shorter"
    raise ConfigError(
        f"{states:,} selected states, {prefix:,} prompt tokens and an answer of up to {limit:,} "
        f"tokens make {states + prefix + limit:,} positions, the decoder has {room:,}; {remedy}"
    )


@torch.no_grad()
def respond(
    model: SeDeM, requests: Sequence[Request], decoding: Decoding
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
    with turn(model.device):
        hidden_BQE, mask_BQ = encode_questions(model, [request.question for request in requests])
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
    with model.engine.start(starts, decoding.max_new_tokens) as (logits_BV, advance):
        clock.lap("prefill_ms")
        tokenizer, eos_token_id, ahead = model.decoder.tokenizer, model.decoder.eos_token_id, model.engine.ahead
        for rows in generate(logits_BV, advance, tokenizer, eos_token_id, decoding, ahead=ahead):
            if "ttft_ms" not in clock.timings:
                clock.mark("ttft_ms")
            yield rows
    clock.mark("total_ms")
    seen = [int(start.real.sum()) + len(start.prefix) for start in starts]
    return [
        to_answer(model, *parts, clock.timings)
        for parts in zip(requests, selections, rows, seen, strict=True)
    ]


def to_answer(
    model: SeDeM,
    request: Request,
    selection: Selection,
    row: Transcript,
    seen: int,
    timings: dict[str, float],
) -> Answer:
    """An answer with the spans that conditioned it.

    Args:
        model: answered.
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
        model=model.name,
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


class Clock:
    """Milliseconds by stage; waits for the device before it is read."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.timings: dict[str, float] = {}
        self._start = self._last = now(self.device)

    def lap(self, name: str) -> None:
        """Record the time since the last lap."""
        before, self._last = self._last, now(self.device)
        self.timings[name] = (self._last - before) * 1e3

    def mark(self, name: str) -> None:
        """Record the time since the start."""
        self.timings[name] = (now(self.device) - self._start) * 1e3
