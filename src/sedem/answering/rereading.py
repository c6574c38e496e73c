"""Memory finds, text decides: a second reading of the few sentences that memory points at. Ours.

Memory compares spans of all selected blocks at once, but has lost letters and digits. So the
decoder then reads the sentences of the best spans as text, with their neighbours, and looks for
the answer there. The spans that either reading has found are compared by both.

Letters: C candidate spans, F features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sedem.answering.decoding import with_texts
from sedem.answering.requests import Prepared
from sedem.answering.spans import (
    Candidate,
    Passage,
    Place,
    Quotation,
    SpanSearch,
)
from sedem.bank.memory_bank import BankReader
from sedem.engine.interface import AnswerInputs, Engine, Rows
from sedem.guidance.spans import SpanScorer, second_features
from sedem.modules import SedemModules

TOKENS = 230
"""Most tokens of the sentences, beyond those of the best span."""
SENTENCES = 12
"""Most sentences."""
NEIGHBOURS = 1
"""Sentences to read before and after that of a span: the one before says who "he" is."""
RECALLED = 12
"""Spans that memory likes best, which the text is asked about, too."""
CHECKED = 16
"""Spans that the text likes best, which memory is asked about, too."""


@dataclass(frozen=True)
class Found:
    """What was found for a question.

    Attributes:
        quotation: the best spans; None if the blocks have no words.
        gap: `auto` answers in other words if the quotation's gap is larger.
        logits: logits to decode freely from `[V]`, in the row of the question.
        sentences: the places that were read again as text, in order.
        tokens: positions that this took.
    """

    quotation: Quotation | None
    gap: float
    logits: Tensor
    sentences: tuple[Place, ...] = ()
    tokens: int = 0


@torch.no_grad()
def find_quotation(
    model: SedemModules,
    engine: Engine,
    rows: Rows,
    row: int,
    prepared: Prepared,
    limit: int,
    logits_V: Tensor,
) -> Found:
    """Find the best spans for a prepared question, by one reading or by two.

    If the sentences suggest an answer in other words, the row goes on from them instead of memory.

    Args:
        rows: the engine's rows, in one of which the question was just prefilled.
        limit: token limit of the answer, with its end.
        logits_V: logits after the prefix.

    Raises:
        NoTextError: the bank does not hold the text of a block.
    """
    memory = SpanSearch(model, rows, row, prepared, limit, logits_V)
    if model.second_reading is None:
        return Found(memory.quote(), float(model.spans.gap), logits_V)
    gap = float(model.second_reading.gap)
    with open_text(model, engine, prepared, limit, memory) as text:
        if text is None:
            return Found(None, gap, logits_V)
        quotation = text.quote()
    if quotation is None or quotation.gap > gap:
        rows.leave(row)
        [logits_V] = rows.join([row], [text.inputs], [limit])
    return Found(quotation, gap, logits_V, tuple(text.places), len(text.inputs.prefix))


@contextmanager
def open_text(
    model: SedemModules, engine: Engine, prepared: Prepared, limit: int, memory: SpanSearch
) -> Iterator[TextSearch | None]:
    """Read the sentences of the spans that memory likes best, to search in them.

    Yields:
        The search in these sentences; None if there are no spans.
    """
    spans = memory.ordered(memory.candidates())
    if not spans:
        yield None
        return
    bank, chat = prepared.request.bank, model.config.chat_template
    places = sentences_of_spans(model, spans)
    texts = [bank.documents.text(*place) for place in places]
    ids = with_texts(model.decoder, prepared.prompt, texts, chat=chat)
    inputs = AnswerInputs(bank, [], torch.zeros(0), torch.tensor(ids))
    with engine.open_rows(1) as rows:
        [logits_V] = rows.join([0], [inputs], [limit])
        yield TextSearch(model, rows, prepared, limit, logits_V, inputs, places, memory, spans)


class TextSearch(SpanSearch):
    """The search in sentences that are read as text, which knows what memory thinks of each span.

    Args:
        rows: rows whose first one was just prefilled.
        inputs: what it was prefilled with.
        places: the sentences, joined where they touch.
        memory: the search in memory.
        spans: its spans, the best first.
    """

    def __init__(
        self,
        model: SedemModules,
        rows: Rows,
        prepared: Prepared,
        limit: int,
        logits_V: Tensor,
        inputs: AnswerInputs,
        places: Sequence[Place],
        memory: SpanSearch,
        spans: Sequence[Candidate],
    ) -> None:
        passages = passages_in(memory.passages, places, inputs.bank)
        super().__init__(model, rows, 0, prepared, limit, logits_V, passages)
        self.inputs, self.places = inputs, places
        self.memory, self.recalled = memory, spans[:RECALLED]
        self.remembered = {one.place: one for one in spans}

    def candidates(self) -> list[Candidate]:
        """Return the spans that the text suggests, and those that memory likes best."""
        known = {one.place: one for one in super().candidates()}
        also = [one for one in self.recalled if one.place not in known]
        return [*known.values(), *(o for o in self.read(also) if o.place not in known)]

    def compared(self, spans: Sequence[Candidate]) -> tuple[SpanScorer, Tensor]:
        """Return what chooses among spans, and their features by both readings `[C, F]`."""
        best = self.ordered(spans)[:CHECKED]
        also = self.memory.read([one for one in best if one.place not in self.remembered])
        self.remembered |= {one.place: one for one in also}
        found = [self.remembered.get(one.place) for one in spans]
        memory_C = [torch.nan if one is None else one.likelihood for one in found]
        gap_C = [one.beginning.gap for one in spans]
        features_CF = second_features(
            self.features(spans), torch.tensor(gap_C), torch.tensor(memory_C)
        )
        assert self.model.second_reading is not None
        return self.model.second_reading, features_CF


def sentences_of_spans(model: SedemModules, spans: Sequence[Candidate]) -> list[Place]:
    """Return the sentences of the best spans with their neighbours, joined, in reading order."""
    kept: dict[tuple[int, int], int] = {}
    used = 0
    for one in spans:
        passage, start = one.beginning.passage, one.beginning.at
        borders = passage.sentences
        own = max(number for number, at in enumerate(borders[:-1]) if at <= start)
        first = borders[max(0, own - NEIGHBOURS)]
        last = borders[min(len(borders) - 1, own + 1 + NEIGHBOURS)]
        pieces = [at for at in borders if first <= at < last]
        new: dict[tuple[int, int], int] = {}
        for begin, end in zip(pieces, [*pieces[1:], last], strict=True):
            if begin == borders[own]:
                end = max(end, one.end)  # a span may cross the end of its sentence
            place = passage.document, passage.start + begin
            if passage.text[begin:end].strip() and kept.get(place, 0) < passage.start + end:
                new[place] = passage.start + end
        texts = [passage.text[b - passage.start : e - passage.start] for (_, b), e in new.items()]
        size = sum(len(ids) for ids in model.decoder.tokenize(texts)["input_ids"]) if texts else 0
        if kept and used + size > TOKENS:
            break
        kept |= new
        used += size
        if len(kept) >= SENTENCES:
            break
    joined: list[Place] = []
    for (document, start), end in sorted(kept.items()):
        if joined and joined[-1][0] == document and start <= joined[-1][2]:
            joined[-1] = document, joined[-1][1], max(end, joined[-1][2])
        else:
            joined.append((document, start, end))
    return joined


def passages_in(
    blocks: Sequence[Passage], places: Sequence[Place], bank: BankReader
) -> list[Passage]:
    """Return the parts of places that are inside blocks, as passages to search in."""
    found = []
    for document, start, end in places:
        text = bank.documents.text(document, start, end)
        for block in blocks:
            first = max(start, block.start + block.inside.start)
            last = min(end, block.start + block.inside.stop)
            if block.document == document and first < last:
                inside = range(first - start, last - start)
                found.append(Passage(block.block, document, start, inside, text))
    return found
