"""From selected blocks to the span of their text that answers a question, or several of them. Ours.

The decoder reads the beginnings of some spans in one pass, all after the same memory and question,
which gives the probability of every span that begins there. If it would go on with "and" or a comma
after the best one, the search begins again after these words.

Memory finds, text decides: memory compares spans of all selected blocks at once, but has lost
letters and digits. Unless it is sure, the decoder reads the sentences of the best spans as text,
with their neighbours, and looks for the answer there. The spans that either reading has found are
compared by both.

Letters: S beginnings, L tokens of each, C candidate spans, K selected blocks, F features, V
vocabulary.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sedem.answering.decoding import Decoding, Transcript, log_probabilities
from sedem.backbone.decoder import Backbone
from sedem.backbone.prompts import end_ids, with_texts
from sedem.bank.memory_bank import BankReader
from sedem.engine.device import in_pieces
from sedem.engine.interface import AnswerInputs, Engine, Rows
from sedem.folding import asked_words, folded, shown, words_of
from sedem.guidance import (
    LEAST,
    SpanScorer,
    borders_of,
    is_exact,
    matches_of,
    rival_features,
    same_stem,
    second_features,
    span_features,
    total_weight,
    unsupported,
    with_range,
)
from sedem.method.segments import is_row, sentences_of
from sedem.modules import SedemModules
from sedem.selecting.plan import Prepared

BEGINNINGS = 32
"""Most beginnings that the decoder reads."""
LOOK_AHEAD = 4
"""Tokens of each; the best beginnings are read further."""
LONGEST = 32
"""Tokens of the longest span."""
BEFORE = 300
"""Characters before a block that a second reading takes for the sentence before a span."""
FURTHER = 2
"""Most beginnings that are read further."""
CHARACTERS = 12
"""Characters of text to take for a token; few tokens are longer."""
JOINERS = (" and", ",")
"""What may stand between the spans of one answer."""
ROWS = 3
"""Most rows of tables that are read again for the words of the question in them."""
MOST = 8
"""Most spans of one answer."""
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
_BLANK_LINE = re.compile(r"\n\s*\n")
_CHOICE = re.compile(
    r"\b(?:or|and|both|between|oder|und|ou|et|o|y|e)\b|[,;、，或和]|还是", re.IGNORECASE
)
"""How a question names what to choose from: then its own words may be the answer."""
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
class Passage:
    """The text of a selected block, and what stands around it.

    Attributes:
        block: index of the block.
        document: index of its document.
        start: first character of the text in the document.
        inside: the characters of the block itself, where spans begin.
    """

    block: int
    document: int
    start: int
    inside: range
    text: str

    @cached_property
    def borders(self) -> tuple[list[tuple[int, int]], set[int]]:
        """The words of the block that a span may begin with, and where in the text it may end."""
        words, ends = borders_of(self.text, words_of(self.text))
        return [word for word in words if word[0] in self.inside], ends

    @cached_property
    def sentences(self) -> list[int]:
        """Where its sentences begin, and where the text ends."""
        return sentences_of(self.text)


Item = TypeVar("Item")
Start = tuple[int, int]
"""Index of a document, and a character of it."""
Place = tuple[int, int, int]
"""Index of a document, first character of a span in it, character after the span."""


@dataclass(frozen=True)
class Candidate:
    """A span to compare with others, or only its beginning.

    Attributes:
        at: its first character in the passage.
        end: the character after it.
        tokens: number of its tokens.
        likelihood: log-probability of these tokens and, unless it is open, of the end after them.
        gap: how far its first token is behind the likeliest one, in log-probability.
        joiner: what the decoder would rather go on with than end, of `JOINERS`; else None.
        share: its share of the softmax over all spans, if it is the best.
        confidence: probability that it is right; None if the model gives none.
        next_best: the best span with other words; None if there is none.
    """

    passage: Passage
    at: int
    end: int
    tokens: int
    likelihood: float
    gap: float
    joiner: str | None = None
    share: float = 1.0
    confidence: float | None = None
    next_best: str | None = None

    @property
    def text(self) -> str:
        """The span."""
        return self.passage.text[self.at : self.end]

    @property
    def place(self) -> Place:
        """Where it stands."""
        start = self.passage.start
        return self.passage.document, start + self.at, start + self.end


@dataclass(frozen=True)
class Quotation:
    """The spans of an answer, usually one."""

    spans: tuple[Candidate, ...]

    @property
    def text(self) -> str:
        """The spans with the words between them."""
        *first, last = self.spans
        return shown("".join([*(f"{one.text}{one.joiner} " for one in first), last.text]))

    def within(self, block: int) -> tuple[tuple[int, int], ...]:
        """Where its spans from a block stand in the document, in order."""
        return tuple(sorted(one.place[1:] for one in self.spans if one.passage.block == block))


class SpanSearch:
    """The search for the spans that answer one prepared question.

    Args:
        rows: the engine's rows, in one of which the question was just prefilled.
        limit: token limit of the answer, with its end.
        logits_V: logits after the prefix.
        passages: where spans may stand; None means the selected blocks.

    Attributes:
        said: tokens of the spans that were found, with the words between them.
        longest: most tokens of the next span.
    """

    def __init__(
        self,
        model: SedemModules,
        rows: Rows,
        row: int,
        prepared: Prepared,
        limit: int,
        logits_V: Tensor,
        passages: Sequence[Passage] | None = None,
    ) -> None:
        self.model, self.rows, self.row, self.limit = model, rows, row, limit
        self.log_V = logits_V.float().log_softmax(-1)
        plan, selection = prepared.plan, prepared.selection
        if passages is None:
            before = 1 if model.second_reading is None else BEFORE
            ranked = _watched(selection.ranked)
            passages = [read_passage(plan.bank, block, before) for block in ranked]
        self.passages = passages
        chat = model.config.chat_template or plan.prompt is not None
        self.lead, self.ends = ("" if chat else " "), end_ids(model.decoder, chat=chat)
        self.joiners = [model.decoder.token_ids(one)[0] for one in JOINERS]
        self.said: list[int] = []
        self.longest = min(LONGEST, limit - 1)
        self.found: list[Candidate] = []
        words = selection.scores.words
        question = (
            {word.text: 1.0 for word in asked_words(plan.question) if word.otherwise != ()}
            if words is None
            else {word.text: word.weight for word in words.words if len(word.blocks)}
        )
        self.weight = sum(question.values()) or 1.0
        offers = _CHOICE.search(plan.question) is not None
        self.asked = set[str]() if offers else set(folded(plan.question).split())
        self.matches = {one: matches_of(one.text, question) for one in _watched(passages)}
        scores_K = selection.scores.total[selection.ranked]
        tokens = max(1, len(model.encoder.token_ids(plan.question)))
        # Forced blocks of a large bank may have no scores.
        behind_K = torch.nan_to_num((scores_K - scores_K[:1]) / tokens, 0.0, 0.0, 0.0)
        self.behind = dict(zip(selection.ranked, behind_K.tolist(), strict=True))

    def quote(self, spans: Sequence[Candidate]) -> Quotation | None:
        """Find the best of some spans, and those that the decoder would go on with."""
        span, found = self.best(spans), self.found
        while span is not None:
            found.append(span)
            if span.joiner is None or len(found) == MOST:
                break
            text = f"{Quotation(tuple(found)).text}{span.joiner}"
            self.said = self.model.decoder.token_ids(self.lead + text)
            self.longest = min(LONGEST, self.limit - 1 - len(self.said))
            if self.longest < 1:
                break
            said_1L = torch.tensor([self.said], device=self.log_V.device)
            logits_SLV = self.rows.branches(self.row, said_1L)
            self.log_V = logits_SLV[0, -1].float().log_softmax(-1)
            said = [one.text for one in found]
            others = [
                one
                for one in self.candidates()
                if not any(text in one.text or one.text in text for text in said)
            ]
            span = self.best(others)
        return Quotation(tuple(found)) if found else None

    def best(self, spans: Sequence[Candidate]) -> Candidate | None:
        """Return the best of some spans, to go on with; None if there is none."""
        if not spans:
            return None
        scorer, features_CF = self.compared(spans)
        best, features = scorer.best(features_CF)
        span = spans[best]
        # More is named only if the decoder would say that.
        if self.found and span.gap > float(scorer.gap):
            return None
        at, end = with_range(span.passage.text, span.at, span.end)
        span = replace(span, at=at, end=end)
        order = scorer(features_CF).argsort(descending=True).tolist()
        others = (spans[index].text for index in order)
        apart = (shown(one) for one in others if one not in span.text and span.text not in one)
        return replace(
            span,
            share=float(features[0].exp()),
            confidence=float(scorer.certainty(features)) if self.model.config.spans else None,
            next_best=next(apart, None),
        )

    def compared(self, spans: Sequence[Candidate]) -> tuple[SpanScorer, Tensor]:
        """Return what chooses among spans, and their features `[C, F]`."""
        return self.model.spans, self.features(spans)

    def located(self, text: str, confidence: float | None) -> Quotation | None:
        """Return where a text stands in the passages, as an answer; None if it does not."""
        for passage in self.passages:
            words, ends = passage.borders
            for at, _ in words:
                end = at + len(text)
                if text and passage.text.startswith(text, at) and end in ends:
                    tokens = len(self.model.decoder.token_ids(self.lead + text))
                    found = Candidate(passage, at, end, tokens, 0.0, 0.0, confidence=confidence)
                    return Quotation((found,))
        return None

    def candidates(self) -> list[Candidate]:
        """Return the spans that the decoder has read to their end."""
        return self.search(BEGINNINGS)

    def search(self, most: int, also: Collection[Start] = ()) -> list[Candidate]:
        """Return the spans that the decoder has read to their end.

        Args:
            most: the most beginnings to read.
            also: places where others begin.
        """
        # Of all words, those that the decoder would most like to begin with are read on.
        begun = self.ordered(self._beginnings()) if self.longest else []
        distinct = dict[str, Candidate]()
        for one in _watched(begun):
            ahead = one.at + LOOK_AHEAD * CHARACTERS  # the first of those that go on alike
            distinct.setdefault(one.passage.text[one.at : ahead], one)
        chosen = [*distinct.values()][:most]
        others = {*also}.difference(one.place[:2] for one in chosen)
        chosen += [one for one in begun if one.place[:2] in others]
        if not chosen:
            return []
        found, unfinished = self._read(chosen, LOOK_AHEAD)
        # Of these, the few that could become the best are read to the end.
        if self.longest > LOOK_AHEAD and unfinished:
            least = max(self.scores(found).tolist(), default=-math.inf)
            scored = zip(unfinished, self.scores(unfinished).tolist(), strict=True)
            longer = [one for one, score in scored if score > least]
            if further := self.ordered(longer)[:FURTHER]:
                found += self._read(further, self.longest)[0]
        # What was read further begins with spans that are known. What only repeats the question,
        # such as a heading, is no answer.
        return [
            one
            for one in {one.place: one for one in found}.values()
            if not self.asked.issuperset(folded(one.text).split())
        ]

    def read(self, starts: Collection[Start]) -> list[Candidate]:
        """Return the short spans that begin at some places."""
        chosen = [one for one in self._beginnings() if one.place[:2] in starts]
        return self._read(chosen, LOOK_AHEAD)[0] if chosen else []

    def answer_freely(self, decoding: Decoding) -> tuple[Transcript, float]:
        """Decode an answer in any words, in rows of which no other is in use.

        Returns:
            The answer, and its log-probability with the end after it.
        """
        decoder, choose = self.model.decoder, decoding.chooser(self.log_V.device)
        transcript, likelihood = Transcript(decoder.tokenizer, self.ends, decoding), 0.0
        logits_1V = self.log_V[None]
        while transcript.finish_reason is None:
            ids_1 = choose(logits_1V)
            likelihood += max(LEAST, float(logits_1V[0].float().log_softmax(-1)[ids_1[0]]))
            transcript.add(int(ids_1), log_probabilities(logits_1V[0], ids_1[0], decoding))
            if transcript.finish_reason is None:
                logits_1V = self.rows.step(ids_1)
        return transcript, likelihood

    def _beginnings(self) -> list[Candidate]:
        """Every word of the passages that is inside the selected blocks."""
        lead = " " if self.said else self.lead
        places = [(one, *word) for one in _watched(self.passages) for word in one.borders[0]]
        words = [lead + one.text[at:end] for one, at, end in _watched(places)]
        if not words:
            return []
        distinct = list(dict.fromkeys(words))
        tokens = self.model.decoder.tokenize(distinct)["input_ids"]
        first = self.log_V[[ids[0] for ids in tokens]]
        gaps = (self.log_V.max() - first).tolist()
        both = zip(first.clamp_min(LEAST).tolist(), gaps, strict=True)
        known = dict(zip(distinct, both, strict=True))
        pairs = _watched(zip(places, words, strict=True))
        return [Candidate(*place, 1, *known[word]) for place, word in pairs]

    def scores(self, spans: Sequence[Candidate]) -> Tensor:
        """Score spans `[C]`."""
        if not spans:
            return torch.zeros(0)
        return self.model.spans(self.features(spans)).cpu()

    def features(self, spans: Sequence[Candidate]) -> Tensor:
        """Return the features of spans `[C, F]`."""
        # The share of the question's words in the rest of each span's sentence, each counted once.
        beside = []
        for one in _watched(spans):
            sentences = one.passage.sentences
            number = bisect_right(sentences, one.at)
            first, last = sentences[number - 1], max(one.end, sentences[number])
            shared = total_weight(
                match
                for match in self.matches[one.passage]
                if first <= match.start < match.end <= last
                and not one.at <= match.start < match.end <= one.end
            )
            beside.append(shared / self.weight)
        columns = (
            [one.likelihood for one in spans],
            [float(one.tokens) for one in spans],
            [self.behind[one.passage.block] for one in spans],
            beside,
        )
        return span_features(*map(torch.tensor, columns))

    def named_rows(self) -> list[Candidate]:
        """Return the first words of the rows of tables with most of the question's words."""
        shares: dict[Candidate, float] = {}
        for passage in _watched(self.passages):
            for begin, end in passage.borders[0]:
                number = bisect_right(passage.sentences, begin)
                first, last = passage.sentences[number - 1 : number + 1]
                if not passage.text[first:begin].strip() and is_row(passage.text[first:last]):
                    one = Candidate(passage, begin, end, 1, LEAST, 0.0)
                    own = (m for m in self.matches[passage] if first <= m.start < last)
                    shares[one] = total_weight(own)
        most = max(shares.values(), default=0.0)
        return [one for one, share in shares.items() if 0 < share == most][:ROWS]

    def ordered(self, spans: Sequence[Candidate]) -> list[Candidate]:
        """Order spans by score, the best first."""
        order = self.scores(spans).sort(descending=True, stable=True).indices
        return [spans[index] for index in order.tolist()]

    def _read(
        self, beginnings: Sequence[Candidate], length: int
    ) -> tuple[list[Candidate], list[Candidate]]:
        """Read so many tokens from some beginnings.

        Returns:
            The spans that may end there, and the beginnings whose span may be longer.
        """
        length, lead = min(length, self.longest), " " if self.said else self.lead
        texts = [b.passage.text[b.at : b.at + length * CHARACTERS] for b in beginnings]
        tokenized = self.model.decoder.tokenize(
            [lead + _BLANK_LINE.split(text, maxsplit=1)[0] for text in texts], offsets=True
        )
        rows = [ids[:length] for ids in tokenized["input_ids"]]
        ids_SL = pad_sequence([torch.tensor(ids) for ids in rows], batch_first=True)
        ids_SL = ids_SL.to(self.log_V.device)
        # The logits after each token, of continuations of what is said.
        said_L = torch.tensor(self.said, dtype=ids_SL.dtype, device=ids_SL.device)
        ids_SP = torch.cat([said_L.expand(len(ids_SL), -1), ids_SL], 1)
        logits_SLV = self.rows.branches(self.row, ids_SP)[:, len(self.said) :]
        log_SLV = logits_SLV.float().log_softmax(-1)
        end_SL = log_SLV[..., self.ends].logsumexp(-1).clamp_min(LEAST).cpu()
        joiner_SL, kind_SL = (one.cpu() for one in log_SLV[..., self.joiners].max(-1))
        next_SL = log_SLV[:, :-1].gather(-1, ids_SL[:, 1:, None])[..., 0]
        own_SL = torch.cat([self.log_V[ids_SL[:, :1]], next_SL], 1).clamp_min(LEAST).cumsum(1).cpu()
        found, unfinished = [], []
        for row, one in enumerate(beginnings):
            passage, at, gap = one.passage, one.at, one.gap
            offsets = [max(0, end - len(lead)) for _, end in tokenized["offset_mapping"][row]]
            for number in range(len(rows[row])):
                end, after = offsets[number], offsets[number + 1 : number + 2]
                own = own_SL[row, number].item()
                place = at + end
                whole = after != [end]  # a character may have several tokens
                if whole and place > at and place in passage.borders[1]:
                    end = end_SL[row, number].item()
                    goes_on = joiner_SL[row, number].item() > end
                    joiner = JOINERS[int(kind_SL[row, number])] if goes_on else None
                    found.append(Candidate(passage, at, place, number + 1, own + end, gap, joiner))
                if number + 1 == length and after:
                    unfinished.append(Candidate(passage, at, place, length, own, gap))
        return found, unfinished


def _watched(items: Iterable[Item]) -> Iterator[Item]:
    """Yield items for work in Python, which whoever watches this thread may end between two."""
    for piece in in_pieces(items):
        yield from piece


def read_passage(bank: BankReader, block: int, before: int) -> Passage:
    """Read the text of a block, with so many characters before it, and what follows it."""
    [row], documents = bank.rows([block]), bank.documents
    start = max(0, row.start - before)
    end = min(row.end + LONGEST * CHARACTERS, documents.characters(row.document))
    text = documents.text(row.document, start, end)
    inside = range(row.start - start, row.end - start)
    return Passage(block, row.document, start, inside, text)


# The second reading


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
        also = self.memory.read({one.place[:2] for one in best})
        self.remembered |= {one.place: one.likelihood for one in also}
        memory_C = [self.remembered.get(one.place, torch.nan) for one in spans]
        gap_C = [one.gap for one in spans]
        features_CF = second_features(
            self.features(spans), torch.tensor(gap_C), torch.tensor(memory_C)
        )
        assert self.model.second_reading is not None
        return self.model.second_reading, features_CF


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
    places = sentences_of_spans(model.decoder, [*named, *spans])
    texts = [bank.documents.text(*place) for place in places]
    ids = with_texts(model.decoder, prepared.prompt, texts, chat=chat)
    inputs = AnswerInputs(bank, [], torch.zeros(0), torch.tensor(ids))
    # The parts of the sentences that are inside blocks.
    passages = []
    for (document, start, end), text in zip(places, texts, strict=True):
        for block in memory.passages:
            first = max(start, block.start + block.inside.start)
            last = min(end, block.start + block.inside.stop)
            if block.document == document and first < last:
                inside = range(first - start, last - start)
                passages.append(Passage(block.block, document, start, inside, text))
    with engine.open_rows(1) as rows:
        [logits_V] = rows.join([0], [inputs], [limit])
        search = TextSearch(model, rows, 0, prepared, limit, logits_V, passages)
        search.inputs, search.places, search.memory = inputs, places, memory
        search.remembered = {one.place: one.likelihood for one in spans}
        yield search


def sentences_of_spans(decoder: Backbone, spans: Sequence[Candidate]) -> list[Place]:
    """Return the sentences of the best spans with their neighbours, joined, in reading order."""
    kept: dict[Start, int] = {}
    used = 0
    for one in spans:
        passage = one.passage
        borders = passage.sentences
        own = bisect_right(borders[:-1], one.at) - 1
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
        size = sum(map(len, decoder.tokenize(texts)["input_ids"])) if texts else 0
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


def _is_in_row(span: Candidate) -> bool:
    """Whether a span begins in the row of a table, which needs no neighbours."""
    passage, at = span.passage, span.at
    number = bisect_right(passage.sentences[:-1], at)
    return is_row(passage.text[passage.sentences[number - 1] : passage.sentences[number]])


# What answers


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
    needed = model.config.states_per_block + 2 * TOKENS + len(prepared.prompt) + limit
    if sure or needed > model.decoder.max_positions:
        other = None if best is None else best.next_best
        return Found(memory.quote(spans) if quotes or not freely else None, alternative=other)
    # Otherwise the text of its best sentences decides.
    assert decider is not None
    with open_text(model, engine, prepared, limit, memory, spans, named) as text:
        quotation, free, likelihood = text.quote(text.candidates()), None, 0.0
        first = None if quotation is None else quotation.spans[0]
        # If it is not sure either, an answer in other words is the third candidate.
        unsure = first is not None and (first.share < UNSURE or first.gap > float(decider.gap))
        if unsure and not quotes:
            free, likelihood = text.answer_freely(decoding)
    again, invented = (text.places, len(text.inputs.prefix)), False
    if free is not None:
        # It has a name or a number that no source has.
        invented = any(map(is_exact, words_without_source(prepared, free.text)))
    if quotation is None or first is None or free is None or invented:
        return Found(quotation, None, None, None if first is None else first.next_best, *again)
    lead = likelihood - sum(one.likelihood for one in quotation.spans)
    features_F = rival_features(first.gap, lead, first.share)
    is_same = free.text == quotation.text
    if float(decider.freely(features_F[None])) < 0.5:
        return Found(quotation, None, None, first.next_best if is_same else free.text, *again)
    certainty = float(decider.free_certainty(features_F[None]))
    other = first.next_best if is_same else quotation.text
    return Found(text.located(free.text, certainty), free, certainty, other, *again)


def words_without_source(prepared: Prepared, text: str) -> tuple[str, ...]:
    """Return the words of an answer that neither its sources nor its question have."""
    citations = prepared.citations
    # A declined answer comes from no text.
    if prepared.inputs is None or not citations:
        return ()
    names = [one.document for one in citations]
    return unsupported(text, [*names, *(one.text for one in citations), prepared.plan.question])


def told_partly(prepared: Prepared, found: Found) -> Found:
    """Return what was found; for a question about everything, the sentence it was found in.

    Otherwise a number from one sentence would pass for an answer. A question is not about
    everything if the sentence itself counts or compares: "three months' notice", "Tubes: 4".
    """
    asked = ABOUT_ALL.search(prepared.plan.question)
    if asked is None or found.quotation is None:
        return found
    span = found.quotation.spans[0]
    passage = read_passage(prepared.plan.bank, span.passage.block, BEFORE)
    _, start, end = span.place
    at = start - passage.start
    number = bisect_right(passage.sentences[:-1], at)
    first, last = passage.sentences[number - 1], passage.sentences[number]
    sentence = passage.text[first : max(last, end - passage.start)]
    # What is counted stands after its number, or before a colon; anything else stands anywhere.
    before, after = sentence[: at - first], sentence[at - first :]
    own = after if asked["counted"] and not before.endswith(": ") else sentence
    word = next(filter(None, asked.groups()), None)
    if word is not None and any(
        same_stem(word.casefold(), own[i:j].casefold()) for i, j in words_of(own)
    ):
        return found
    at = first + len(sentence) - len(sentence.lstrip())
    whole = replace(span, passage=passage, at=at, end=at + len(sentence.strip()), confidence=None)
    return replace(found, quotation=Quotation((whole,)), partly=True)
