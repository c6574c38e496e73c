"""Memory finds, text decides: a second reading of the few sentences that memory points at. Ours.

Memory compares spans of all selected blocks at once, but has lost letters and digits. So the
decoder then reads the sentences of the best spans as text, with their neighbours, and looks for
the answer there. The spans that either reading has found are compared by both.

Letters: C candidate spans, F features, V vocabulary.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sedem.answering.decoding import Decoding, Transcript
from sedem.answering.spans import (
    BEFORE,
    Candidate,
    Passage,
    Place,
    Quotation,
    SpanSearch,
    Start,
    read_passage,
)
from sedem.backbone.prompts import with_texts
from sedem.engine.interface import AnswerInputs, Engine, Rows
from sedem.folding import words_of
from sedem.guidance.spans import (
    SpanScorer,
    is_exact,
    rival_features,
    same_stem,
    second_features,
    unsupported,
)
from sedem.method.segments import is_row
from sedem.modules import SedemModules
from sedem.selecting.plan import Prepared

TOKENS = 230
"""Most tokens of the sentences, beyond those of the best span."""
SENTENCES = 12
"""Most sentences."""
NEIGHBOURS = 1
"""Sentences to read before and after that of a span: the one before says who "he" is."""
SUGGESTED = 16
"""Most beginnings of spans that the text suggests."""
RECALLED = 8
"""Most beginnings that memory likes best, which are read as text, too."""
CHECKED = 12
"""Spans that the text likes best, which memory is asked about, too."""
UNSURE = 0.5
"""The share of the best span below which the sentences are also answered freely."""
ABOUT_ALL = re.compile(
    r"^\W*(?:(?:please|can you|could you)\W+)*(?:list|count|enumerate|summari[sz]e"
    r"|(?:name|show|find|give)\b.*\b(?:all|every|each|overview|summary))\b"
    r"|^\W*how many (?P<counted>\w+)(?: \w+)?(?: are there| do (?:i|we|you) have| exist)?"
    r"(?: (?:in total|altogether|in (?:the|these|my|all) \w+))?\W*$"
    r"|^\W*(?:what|which|who)(?: \w+)? (?:is|are|was|were|has|costs?) the"
    r" (?P<extreme>most|least|\w{2,}est)(?: \w+){0,2}\W*$"
    r"|\b(?:average|total|sum) of all\b",
    re.IGNORECASE,
)
"""How English questions ask about everything, whatever blocks are selected."""


@dataclass(frozen=True)
class Found:
    """What was found for a question.

    Attributes:
        quotation: the spans that answer it; None if it is answered in other words, or if the blocks
            have no words.
        free: the answer in other words, if it was decoded from sentences; then the row need not.
        certainty: the probability that this is right; None if the model gives none.
        alternative: the next best answer; None if there is none.
        sentences: the places that were read again as text, in order.
        positions: number of tokens that the decoder read for them.
        partly: whether the question is about everything, of which only some blocks were seen.
    """

    quotation: Quotation | None
    free: Transcript | None = None
    certainty: float | None = None
    alternative: str | None = None
    sentences: Sequence[Place] = ()
    positions: int = 0
    partly: bool = False


@torch.no_grad()
def find_quotation(
    model: SedemModules,
    engine: Engine,
    rows: Rows,
    row: int,
    prepared: Prepared,
    decoding: Decoding,
    logits_V: Tensor,
) -> Found:
    """Find the best spans for a prepared question, by one reading or by two.

    Args:
        rows: the engine's rows, in one of which the question was just prefilled.
        logits_V: logits after the prefix.
    """
    limit, about_all = decoding.max_new_tokens, ABOUT_ALL.search(prepared.plan.question)
    quotes = about_all is not None or prepared.plan.answer == "span"
    # Memory looks at every word of the blocks. If it is sure, that is the answer.
    memory, decider = SpanSearch(model, rows, row, prepared, limit, logits_V), model.second_reading
    spans = memory.ordered(memory.candidates())
    best = memory.best(spans)
    freely = best is None or best.gap > float(model.spans.gap)
    # Memory confuses the rows of a table, whose cells are alike.
    named = memory.named_rows() if spans and _is_in_row(spans[0]) else []
    sure = (
        decider is None
        or best is None
        or (not named and not freely and best.share >= float(decider.sure))
    )
    if sure or not _has_room(model, prepared, limit):
        other = None if best is None else best.next_best
        return Found(memory.quote(spans) if quotes or not freely else None, alternative=other)
    # Otherwise the text of its best sentences decides.
    assert decider is not None
    with open_text(model, engine, prepared, limit, memory, spans, named) as text:
        quotation, free, likelihood = text.quote(text.candidates()), None, 0.0
        # If it is not sure either, an answer in other words is the third candidate.
        unsure = quotation is not None and (
            quotation.share < UNSURE or quotation.gap > float(decider.gap)
        )
        if unsure and not quotes:
            free, likelihood = text.answer_freely(decoding)
    again = text.places, len(text.inputs.prefix)
    if quotation is None or free is None or is_invented(prepared, free.text):
        next_best = None if quotation is None else quotation.spans[0].next_best
        return Found(quotation, None, None, next_best, *again)
    lead = likelihood - quotation.likelihood
    features_1F = rival_features(quotation.gap, lead, quotation.share)[None]
    if float(decider.freely(features_1F)) < 0.5:
        other = quotation.spans[0].next_best if free.text == quotation.text else free.text
        return Found(quotation, None, None, other, *again)
    certainty = float(decider.free_certainty(features_1F))
    other = quotation.spans[0].next_best if free.text == quotation.text else quotation.text
    return Found(text.located(free.text, certainty), free, certainty, other, *again)


def _is_in_row(span: Candidate) -> bool:
    """Whether a span begins in the row of a table, which needs no neighbours."""
    passage, at = span.beginning.passage, span.beginning.at
    number = bisect_right(passage.sentences[:-1], at)
    return is_row(passage.text[passage.sentences[number - 1] : passage.sentences[number]])


def _has_room(model: SedemModules, prepared: Prepared, limit: int) -> bool:
    """Whether sentences fit before the question."""
    needed = model.config.states_per_block + 2 * TOKENS + len(prepared.prompt) + limit
    return needed <= model.decoder.max_positions


def words_without_source(prepared: Prepared, text: str) -> tuple[str, ...]:
    """Return the words of an answer that neither its sources nor its question have."""
    citations = prepared.citations
    # A declined answer comes from no text.
    if prepared.inputs is None or not citations:
        return ()
    names = [one.document for one in citations]
    return unsupported(text, [*names, *(one.text for one in citations), prepared.plan.question])


def is_invented(prepared: Prepared, text: str) -> bool:
    """Whether an answer has a name or a number that no source has."""
    return any(map(is_exact, words_without_source(prepared, text)))


def told_partly(prepared: Prepared, found: Found) -> Found:
    """Return what was found; for a question about everything, the sentence it was found in.

    Otherwise a number from one sentence would pass for an answer. A question is not about
    everything if the sentence itself counts or compares: "three months' notice", "Tubes: 4".
    """
    asked = ABOUT_ALL.search(prepared.plan.question)
    if asked is None or found.quotation is None:
        return found
    span = found.quotation.spans[0]
    passage = read_passage(prepared.plan.bank, span.block, BEFORE)
    at = span.start - passage.start
    number = bisect_right(passage.sentences[:-1], at)
    first, last = passage.sentences[number - 1], passage.sentences[number]
    sentence = passage.text[first : max(last, span.end - passage.start)]
    # What is counted stands after its number, or before a colon; anything else stands anywhere.
    before, after = sentence[: at - first], sentence[at - first :]
    own = after if asked["counted"] and not before.endswith(": ") else sentence
    word = next(filter(None, asked.groups()), None)
    if word is not None and any(
        same_stem(word.casefold(), own[i:j].casefold()) for i, j in words_of(own)
    ):
        return found
    start = passage.start + first + len(sentence) - len(sentence.lstrip())
    text = sentence.strip()
    span = replace(span, start=start, end=start + len(text), text=text, confidence=None)
    return replace(found, quotation=Quotation((span,)), partly=True)


@contextmanager
def open_text(
    model: SedemModules,
    engine: Engine,
    prepared: Prepared,
    limit: int,
    memory: SpanSearch,
    spans: Sequence[Candidate],
    named: Sequence[Candidate] = (),
) -> Iterator[TextSearch]:
    """Read the sentences of memory's best spans in a row of their own, to search in them.

    Args:
        spans: the spans, the best first; at least one.
        named: others whose sentences are read before theirs.
    """
    bank, chat = prepared.plan.bank, model.config.chat_template
    places = sentences_of_spans(model, [*named, *spans])
    texts = [bank.documents.text(*place) for place in places]
    ids = with_texts(model.decoder, prepared.prompt, texts, chat=chat)
    inputs = AnswerInputs(bank, [], torch.zeros(0), torch.tensor(ids))
    passages = passages_in(memory.passages, places, texts)
    with engine.open_rows(1) as rows:
        [logits_V] = rows.join([0], [inputs], [limit])
        search = TextSearch(model, rows, 0, prepared, limit, logits_V, passages)
        search.inputs, search.places, search.memory = inputs, places, memory
        search.remembered = {one.place: one.likelihood for one in spans}
        yield search


class TextSearch(SpanSearch):
    """The search in sentences that were read as text.

    Attributes:
        inputs: what the row was prefilled with.
        places: the sentences, joined where they touch, in reading order.
        memory: the search in memory.
        remembered: log-probabilities of spans by memory, the best first.
    """

    inputs: AnswerInputs
    places: Sequence[Place]
    memory: SpanSearch
    remembered: dict[Place, float]

    def candidates(self) -> list[Candidate]:
        """Return spans that begin where the text suggests, or where memory's best ones do."""
        recalled = list(dict.fromkeys((document, at) for document, at, _ in self.remembered))
        return self.search(SUGGESTED, set(recalled[:RECALLED]))

    def compared(self, spans: Sequence[Candidate]) -> tuple[SpanScorer, Tensor]:
        """Return what chooses among spans, and their features by both readings `[C, F]`."""
        # Memory is asked about the best spans that it has not looked at.
        best = [one for one in self.ordered(spans)[:CHECKED] if one.place not in self.remembered]
        also = self.memory.read({one.beginning.start for one in best})
        self.remembered |= {one.place: one.likelihood for one in also}
        memory_C = [self.remembered.get(one.place, torch.nan) for one in spans]
        gap_C = [one.beginning.gap for one in spans]
        features_CF = second_features(
            self.features(spans), torch.tensor(gap_C), torch.tensor(memory_C)
        )
        assert self.model.second_reading is not None
        return self.model.second_reading, features_CF


def sentences_of_spans(model: SedemModules, spans: Sequence[Candidate]) -> list[Place]:
    """Return the sentences of the best spans with their neighbours, joined, in reading order."""
    kept: dict[Start, int] = {}
    used = 0
    for one in spans:
        passage = one.beginning.passage
        borders = passage.sentences
        own = bisect_right(borders[:-1], one.beginning.at) - 1
        new: dict[Start, int] = {}
        # The passage may begin within a sentence, which is no neighbour then.
        around = 0 if _is_in_row(one) else NEIGHBOURS
        first = min(own, max(own - around, 0 if passage.start == 0 else 1))
        for number in range(first, min(own + around + 1, len(borders) - 1)):
            end = max(borders[number + 1], one.end if number == own else 0)
            place = passage.document, passage.start + borders[number]
            if kept.get(place, 0) < passage.start + end:
                new[place] = passage.start + end
        texts = [
            passage.text[at - passage.start : end - passage.start] for (_, at), end in new.items()
        ]
        size = sum(map(len, model.decoder.tokenize(texts)["input_ids"])) if texts else 0
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
    blocks: Sequence[Passage], places: Sequence[Place], texts: Sequence[str]
) -> list[Passage]:
    """Return the parts of places that are inside blocks, as passages to search in."""
    found = []
    for (document, start, end), text in zip(places, texts, strict=True):
        for block in blocks:
            first = max(start, block.start + block.inside.start)
            last = min(end, block.start + block.inside.stop)
            if block.document == document and first < last:
                inside = range(first - start, last - start)
                found.append(Passage(block.block, document, start, inside, text))
    return found
