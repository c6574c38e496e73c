"""From selected blocks to the span of their text that answers a question, or several of them.

The decoder reads the beginnings of some spans in one pass, all after the same memory and question,
which gives the probability of every span that begins there. If it would go on with "and" or a comma
after the best one, the search begins again after these words.

Letters: S beginnings, L tokens of each, C candidate spans, K selected blocks, F features, V
vocabulary.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sedem.answering.decoding import Decoding, Transcript, log_probabilities
from sedem.backbone.prompts import end_ids
from sedem.bank.memory_bank import BankReader
from sedem.engine.device import in_pieces
from sedem.engine.interface import Rows
from sedem.folding import asked_words, folded, shown, words_of
from sedem.guidance.spans import (
    LEAST,
    SpanScorer,
    borders_of,
    matches_of,
    span_features,
    total_weight,
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
_BLANK_LINE = re.compile(r"\n\s*\n")
_CHOICE = re.compile(
    r"\b(?:or|and|both|between|oder|und|ou|et|o|y|e)\b|[,;、，或和]|还是", re.IGNORECASE
)
"""How a question names what to choose from: then its own words may be the answer."""


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
        """The words that a span may begin with, and where it may end."""
        return borders_of(self.text, words_of(self.text))

    @property
    def beginnings(self) -> list[tuple[int, int]]:
        """The words that a span may begin with in the block."""
        return [word for word in self.borders[0] if word[0] in self.inside]

    @cached_property
    def sentences(self) -> list[int]:
        """Where its sentences begin, and where the text ends."""
        return sentences_of(self.text)

    @property
    def ends(self) -> set[int]:
        """Where a span may end."""
        return self.borders[1]


Start = tuple[int, int]
"""Index of a document, and a character of it."""
Place = tuple[int, int, int]
"""Index of a document, first character of a span in it, character after the span."""


@dataclass(frozen=True)
class Beginning:
    """A place where a span may begin.

    Attributes:
        at: its character in the passage.
        end: the character after its first word.
        log_first: log-probability of its first token.
        gap: how far that is behind the likeliest token.
    """

    passage: Passage
    at: int
    end: int
    log_first: float
    gap: float

    @property
    def start(self) -> Start:
        """Where it stands."""
        return self.passage.document, self.passage.start + self.at


@dataclass(frozen=True)
class Candidate:
    """A span to compare with others.

    Attributes:
        end: the character after it in the passage.
        tokens: number of its tokens.
        likelihood: log-probability of these tokens and, unless it is open, of the end after them.
        joiner: what the decoder would rather go on with than end, of `JOINERS`; else None.
    """

    beginning: Beginning
    end: int
    tokens: int
    likelihood: float
    joiner: str | None = None

    @property
    def text(self) -> str:
        """The span."""
        return self.beginning.passage.text[self.beginning.at : self.end]

    @property
    def place(self) -> Place:
        """Where it stands."""
        passage = self.beginning.passage
        return passage.document, passage.start + self.beginning.at, passage.start + self.end


@dataclass(frozen=True)
class FoundSpan:
    """A span of a document that answers a question.

    Attributes:
        block: index of the selected block that it begins in.
        start: its first character in the document.
        end: the character after it.
        tokens: number of its tokens.
        likelihood: log-probability of its tokens and of the end after them.
        gap: how far its first token is behind the likeliest one, in log-probability.
        share: its share of the softmax over all spans.
        confidence: probability that it is right; None if the model gives none.
        joiner: what the decoder would go on with; None if it would end.
        next_best: the best span with other words; None if there is none.
    """

    block: int
    start: int
    end: int
    text: str
    tokens: int
    likelihood: float
    gap: float
    share: float
    confidence: float | None
    joiner: str | None = None
    next_best: str | None = None


@dataclass(frozen=True)
class Quotation:
    """The spans of an answer, usually one."""

    spans: tuple[FoundSpan, ...]

    @property
    def text(self) -> str:
        """The spans with the words between them."""
        *first, last = self.spans
        return shown("".join([*(f"{one.text}{one.joiner} " for one in first), last.text]))

    @property
    def tokens(self) -> int:
        """Number of tokens of the spans."""
        return sum(one.tokens for one in self.spans)

    @property
    def gap(self) -> float:
        """How far its first token is behind the likeliest one, in log-probability."""
        return self.spans[0].gap

    @property
    def likelihood(self) -> float:
        """Log-probability of its tokens."""
        return sum(one.likelihood for one in self.spans)

    @property
    def share(self) -> float:
        """The share of its first span in the softmax over all spans."""
        return self.spans[0].share

    @property
    def confidence(self) -> float | None:
        """Probability that the least certain span is right; None if the model gives none."""
        given = [one.confidence for one in self.spans if one.confidence is not None]
        return min(given, default=None)

    def within(self, block: int) -> tuple[tuple[int, int], ...]:
        """Where its spans from a block stand in the document, in order."""
        return tuple(sorted((one.start, one.end) for one in self.spans if one.block == block))


class SpanSearch:
    """The search for the spans that answer one prepared question.

    Args:
        rows: the engine's rows, in one of which the question was just prefilled.
        limit: token limit of the answer, with its end.
        logits_V: logits after the prefix.
        passages: where spans may stand; None means the selected blocks.
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
            blocks = in_pieces(selection.ranked)
            passages = [read_passage(plan.bank, block, before) for block in blocks]
        self.passages = passages
        chat = model.config.chat_template or plan.prompt is not None
        self.lead, self.ends = ("" if chat else " "), end_ids(model.decoder, chat=chat)
        self.joiners = [model.decoder.token_ids(one)[0] for one in JOINERS]
        self.said: list[int] = []
        self.found: list[FoundSpan] = []
        words = selection.scores.words
        question = (
            {word.text: 1.0 for word in asked_words(plan.question) if word.otherwise != ()}
            if words is None
            else {word.text: word.weight for word in words.words if len(word.blocks)}
        )
        self.weight = sum(question.values()) or 1.0
        offers = _CHOICE.search(plan.question) is not None
        self.asked = set[str]() if offers else set(folded(plan.question).split())
        self.matches = {one: matches_of(one.text, question) for one in in_pieces(passages)}
        scores_K = selection.scores.total[selection.ranked]
        tokens = max(1, len(model.encoder.token_ids(plan.question)))
        # Forced blocks of a large bank may have no scores.
        behind_K = torch.nan_to_num((scores_K - scores_K[:1]) / tokens, 0.0, 0.0, 0.0)
        self.behind = dict(zip(selection.ranked, behind_K.tolist(), strict=True))

    @property
    def longest(self) -> int:
        """Most tokens of the next span."""
        return min(LONGEST, self.limit - 1 - len(self.said))

    def quote(self, spans: Sequence[Candidate]) -> Quotation | None:
        """Find the best of some spans, and those that the decoder would go on with."""
        span, found = self.best(spans), self.found
        while span is not None:
            found.append(span)
            if span.joiner is None or len(found) == MOST:
                break
            text = f"{Quotation(tuple(found)).text}{span.joiner}"
            self.said = self.model.decoder.token_ids(self.lead + text)
            if self.longest < 1:
                break
            said_1L = torch.tensor([self.said], device=self.log_V.device)
            logits_SLV = self.rows.branches(self.row, said_1L)
            self.log_V = logits_SLV[0, -1].float().log_softmax(-1)
            span = self.best([one for one in self.candidates() if not self._is_said(one.text)])
        return Quotation(tuple(found)) if found else None

    def best(self, spans: Sequence[Candidate]) -> FoundSpan | None:
        """Return the best of some spans, to go on with; None if there is none."""
        if not spans:
            return None
        scorer, features_CF = self.compared(spans)
        best, features = scorer.best(features_CF)
        span, passage = spans[best], spans[best].beginning.passage
        order = scorer(features_CF).argsort(descending=True).tolist()
        others = (spans[index].text for index in order)
        apart = (shown(one) for one in others if one not in span.text and span.text not in one)
        # More is named only if the decoder would say that.
        if self.found and span.beginning.gap > float(scorer.gap):
            return None
        return FoundSpan(
            passage.block,
            passage.start + span.beginning.at,
            passage.start + span.end,
            span.text,
            span.tokens,
            span.likelihood,
            span.beginning.gap,
            float(features[0].exp()),
            float(scorer.certainty(features)) if self.model.config.spans else None,
            span.joiner,
            next(apart, None),
        )

    def compared(self, spans: Sequence[Candidate]) -> tuple[SpanScorer, Tensor]:
        """Return what chooses among spans, and their features `[C, F]`."""
        return self.model.spans, self.features(spans)

    def located(self, text: str, confidence: float | None) -> Quotation | None:
        """Return where a text stands in the passages, as an answer; None if it does not."""
        for passage in self.passages:
            for start, _ in passage.beginnings:
                end = start + len(text)
                if text and passage.text.startswith(text, start) and end in passage.ends:
                    first, last = passage.start + start, passage.start + end
                    tokens = len(self.model.decoder.token_ids(self.lead + text))
                    found = FoundSpan(
                        passage.block, first, last, text, tokens, 0.0, 0.0, 1.0, confidence
                    )
                    return Quotation((found,))
        return None

    def _is_said(self, text: str) -> bool:
        return any(one.text in text or text in one.text for one in self.found)

    def candidates(self) -> list[Candidate]:
        """Return the spans that the decoder has read to their end."""
        return self.search(BEGINNINGS)

    def search(self, most: int, also: Collection[Start] = ()) -> list[Candidate]:
        """Return the spans that the decoder has read to their end.

        Args:
            most: the most beginnings to read.
            also: places where others begin.
        """
        beginnings = self._beginnings() if self.longest else []
        if not beginnings:
            return []
        # Of all words, those that the decoder would most like to begin with are read on.
        first = [Candidate(o, o.end, 1, max(o.log_first, LEAST)) for o in in_pieces(beginnings)]
        begun = self.ordered(first)
        chosen = _distinct(begun, LOOK_AHEAD * CHARACTERS)[:most]
        known = {one.beginning.start for one in chosen}
        chosen += [o for o in begun if o.beginning.start in also and o.beginning.start not in known]
        found, unfinished = self._read([one.beginning for one in chosen], LOOK_AHEAD)
        # Of these, the few that could become the best are read to the end.
        if self.longest > LOOK_AHEAD and unfinished:
            least = max(self.scores(found).tolist(), default=-math.inf)
            scored = zip(unfinished, self.scores(unfinished).tolist(), strict=True)
            longer = [one for one, score in scored if score > least]
            further = [one.beginning for one in self.ordered(longer)[:FURTHER]]
            if further:
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
        chosen = [one for one in self._beginnings() if one.start in starts]
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

    def _beginnings(self) -> list[Beginning]:
        """Every word of the passages that is inside the selected blocks."""
        places = [(one, *word) for one in in_pieces(self.passages) for word in one.beginnings]
        words = [self._after_said(one.text[at:end]) for one, at, end in in_pieces(places)]
        if not words:
            return []
        distinct = list(dict.fromkeys(words))
        tokens = self.model.decoder.tokenize(distinct)["input_ids"]
        first = self.log_V[[ids[0] for ids in tokens]]
        both = zip(first.tolist(), (self.log_V.max() - first).tolist(), strict=True)
        known = dict(zip(distinct, both, strict=True))
        pairs = in_pieces(zip(places, words, strict=True))
        return [Beginning(*place, *known[word]) for place, word in pairs]

    def scores(self, spans: Sequence[Candidate]) -> Tensor:
        """Score spans `[C]`."""
        if not spans:
            return torch.zeros(0)
        return self.model.spans(self.features(spans)).cpu()

    def features(self, spans: Sequence[Candidate]) -> Tensor:
        """Return the features of spans `[C, F]`."""
        columns = (
            [one.likelihood for one in spans],
            [float(one.tokens) for one in spans],
            [self.behind[one.beginning.passage.block] for one in spans],
            [self._words_beside(one) for one in in_pieces(spans)],
        )
        return span_features(*map(torch.tensor, columns))

    def _words_beside(self, span: Candidate) -> float:
        """Share of the question's words in the rest of a span's sentence."""
        passage, start, end = span.beginning.passage, span.beginning.at, span.end
        number = bisect_right(passage.sentences, start)
        first, last = passage.sentences[number - 1], max(end, passage.sentences[number])
        found = total_weight(
            match
            for match in self.matches[passage]
            if first <= match.start < match.end <= last
            and not start <= match.start < match.end <= end
        )
        return found / self.weight

    def named_rows(self) -> list[Candidate]:
        """Return the first words of the rows of tables with most of the question's words."""
        shares: dict[Candidate, float] = {}
        for passage in in_pieces(self.passages):
            for begin, end in passage.beginnings:
                number = bisect_right(passage.sentences, begin)
                first, last = passage.sentences[number - 1 : number + 1]
                if not passage.text[first:begin].strip() and is_row(passage.text[first:last]):
                    matches = self.matches[passage]
                    share = total_weight(one for one in matches if first <= one.start < last)
                    shares[Candidate(Beginning(passage, begin, end, LEAST, 0.0), end, 1, LEAST)] = (
                        share
                    )
        most = max(shares.values(), default=0.0)
        return [one for one, share in shares.items() if 0 < share == most][:ROWS]

    def ordered(self, spans: Sequence[Candidate]) -> list[Candidate]:
        """Order spans by score, the best first."""
        order = self.scores(spans).sort(descending=True, stable=True).indices
        return [spans[index] for index in order.tolist()]

    def _read(
        self, beginnings: Sequence[Beginning], length: int
    ) -> tuple[list[Candidate], list[Candidate]]:
        """Read so many tokens from some beginnings.

        Returns:
            The spans that may end there, and the beginnings whose span may be longer.
        """
        length = min(length, self.longest)
        texts = [
            _BLANK_LINE.split(b.passage.text[b.at :][: length * CHARACTERS], maxsplit=1)[0]
            for b in beginnings
        ]
        tokenized = self.model.decoder.tokenize(
            [self._after_said(text) for text in texts], offsets=True
        )
        rows = [ids[:length] for ids in tokenized["input_ids"]]
        ids_SL = pad_sequence([torch.tensor(ids) for ids in rows], batch_first=True)
        ids_SL = ids_SL.to(self.log_V.device)
        log_SLV = self._after(ids_SL).float().log_softmax(-1)
        end_SL = log_SLV[..., self.ends].logsumexp(-1).clamp_min(LEAST).cpu()
        joiner_SL, kind_SL = (one.cpu() for one in log_SLV[..., self.joiners].max(-1))
        next_SL = log_SLV[:, :-1].gather(-1, ids_SL[:, 1:, None])[..., 0]
        own_SL = torch.cat([self.log_V[ids_SL[:, :1]], next_SL], 1).clamp_min(LEAST).cumsum(1).cpu()
        found, unfinished = [], []
        for row, beginning in enumerate(beginnings):
            lead = len(self._after_said(""))
            offsets = [max(0, end - lead) for _, end in tokenized["offset_mapping"][row]]
            for number in range(len(rows[row])):
                end, after = offsets[number], offsets[number + 1 : number + 2]
                own = own_SL[row, number].item()
                place = beginning.at + end
                whole = after != [end]  # a character may have several tokens
                if whole and place > beginning.at and place in beginning.passage.ends:
                    end = end_SL[row, number].item()
                    goes_on = joiner_SL[row, number].item() > end
                    joiner = JOINERS[int(kind_SL[row, number])] if goes_on else None
                    found.append(Candidate(beginning, place, number + 1, own + end, joiner))
                if number + 1 == length and after:
                    unfinished.append(Candidate(beginning, place, length, own))
        return found, unfinished

    def _after_said(self, text: str) -> str:
        """Return text as the decoder would go on with it."""
        return f" {text}" if self.said else self.lead + text

    def _after(self, ids_SL: Tensor) -> Tensor:
        """Logits after each token `[S, L, V]` of continuations of what is said."""
        said_L = torch.tensor(self.said, dtype=ids_SL.dtype, device=ids_SL.device)
        ids_SP = torch.cat([said_L.expand(len(ids_SL), -1), ids_SL], 1)
        return self.rows.branches(self.row, ids_SP)[:, len(self.said) :]


def read_passage(bank: BankReader, block: int, before: int) -> Passage:
    """Read the text of a block, with so many characters before it, and what follows it."""
    [row], documents = bank.rows([block]), bank.documents
    start = max(0, row.start - before)
    end = min(row.end + LONGEST * CHARACTERS, documents.characters(row.document))
    text = documents.text(row.document, start, end)
    inside = range(row.start - start, row.end - start)
    return Passage(block, row.document, start, inside, text)


def _distinct(spans: Sequence[Candidate], length: int) -> list[Candidate]:
    """Keep the first of those that go on with the same text."""
    kept: dict[str, Candidate] = {}
    for one in in_pieces(spans):
        kept.setdefault(one.beginning.passage.text[one.beginning.at :][:length], one)
    return list(kept.values())
