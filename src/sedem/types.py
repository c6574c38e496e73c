"""Types that all methods share: documents, answers with citations, and the reader protocol."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from sedem.errors import DataError
from sedem.untrusted import check_unicode

NAME_CHARACTERS, MOST_PAGES = 4_096, 2**18
"""Limits of a document."""


@dataclass(frozen=True)
class Document:
    """A named text.

    Attributes:
        name: shown in citations; unique within a bank.
        text: the text to read.
        pages: first character of each page; empty if the text has no pages.
        notes: sentences on what was left out or guessed when its file was read.

    Raises:
        DataError: name or text is empty or not Unicode text, the name is too long, or the pages
            are too many or not in order.
    """

    name: str
    text: str
    pages: tuple[int, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Document:
        """Read a file of a type that `sedem build` takes; its name is the path.

        Raises:
            DataError: it is missing, a folder, or cannot be read.
        """
        # What reads files stands above what it makes, and imports its parsers.
        document: Document = import_module("sedem.reading.documents").read_document(Path(path))
        return document

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise DataError("a document has an empty name; give it one, such as its file name")
        if not self.text.strip():
            raise DataError(
                f"document '{self.name}' holds no text (it is empty or only white space); "
                "leave it out or give its text"
            )
        if len(self.name) > NAME_CHARACTERS or len(self.pages) > MOST_PAGES:
            raise DataError(
                f"document '{self.name}' has a name of {len(self.name):,} characters and "
                f"{len(self.pages):,} pages; give at most {NAME_CHARACTERS:,} and {MOST_PAGES:,}"
            )
        check_unicode(self.name, "the name of a document")
        check_unicode(self.text, f"document '{self.name}'")
        if not are_pages(self.pages, len(self.text)):
            raise DataError(
                f"the pages of document '{self.name}' are not in order; they are numbers of "
                f"characters that ascend from 0 to at most {len(self.text)}"
            )


def are_pages(pages: Sequence[int], characters: int) -> bool:
    """Whether pages start at the first character, are in order, and end within the text."""
    bounds = (0, *pages, characters)
    return not pages or (pages[0] == 0 and all(a <= b for a, b in pairwise(bounds)))


def distinct(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield documents, but refuse those that cannot be read together.

    Raises:
        DataError: there are none, or two have the same name.
    """
    names: set[str] = set()
    for document in documents:
        if document.name in names:
            raise DataError(f"2 documents are named '{document.name}'; give each document once")
        names.add(document.name)
        yield document
    if not names:
        raise DataError("there is nothing to read; give at least one document")


def check_documents(documents: Sequence[Document]) -> None:
    """Refuse documents that cannot be read together; see `distinct`."""
    for _ in distinct(documents):
        pass


def check_tokens(tokens: object) -> None:
    """Raise a DataError for a text without tokens; `tokens` is falsy if there are none."""
    if not tokens:
        raise DataError("the text has no tokens; give a document with words in it")


@dataclass(frozen=True)
class Citation:
    """A span that conditioned an answer; `text` is exactly `document_text[start:end]`, or empty.

    Attributes:
        rank: 1 for the block with the highest score, or for the first one if none has a score.
        document: name of the document.
        start: first character of the span.
        end: character after the span.
        score: what the block was selected by; None if the method reads everything in order.
        text: the span.
        page: page on which the span begins, from 1; None if the document has no pages.
        state_score: the selector's part of the score; None if it was not asked for.
        word_score: BM25 of the question's words, before its weight; None if it was not asked for.
        words: words of the question that stand in the block or its document's name, rarest first,
            without common ones.
        answer_spans: what a quoted answer takes from this span: the first character of each part in
            the document, and the character after it.
        also: other documents of the same text; a text is selected once.
    """

    rank: int
    document: str
    start: int
    end: int
    score: float | None
    text: str
    page: int | None = None
    state_score: float | None = None
    word_score: float | None = None
    words: tuple[str, ...] = ()
    answer_spans: tuple[tuple[int, int], ...] = ()
    also: tuple[str, ...] = ()


Span = tuple[str, int, int]
"""Name of a document, first character of the span, character after the span."""


@dataclass(frozen=True)
class Answer:
    """An answer, its sources and its costs; a cost that a reader does not report is None.

    Attributes:
        text: the answer, stripped of surrounding white space.
        citations: the spans that conditioned it, best first, or in order if none has a score.
        k: number of blocks that were used.
        blocks: number of blocks in the memory.
        timings: milliseconds by stage; `select_ms`, `ttft_ms` and `total_ms` are always present.
        finish_reason: "end" (the model ended it), "stop" (a stop string), "length" (the limit),
            "tool_calls" (a reader calls tools) or "unanswerable" (no evidence found; `text` says
            so, and nothing was generated).
        cut: one sentence for each part that was left out or cut off; empty if none was.
        model: name of the model that answered.
        conditioning: positions that the decoder's upper layers saw before the first answer token:
            restored states and prompt, or context and prompt if all layers read text.
        stored_bytes: bytes that the memory stores for answering, for all documents.
        context_tokens: tokens of all documents.
        confidence: probability that the evidence is in the documents; None if the method or the
            checkpoint gives none.
        answer_confidence: probability that the answer is right, if its source was found; None if
            the checkpoint gives none for such an answer.
        alternative: the next best answer, if this one is unsure and there is one.
        unsupported: names, numbers and longer words of a freely decoded answer that stand in none
            of its sources, nor in the question; empty if the method does not check.
        sentences: the spans that were read again as text, in order, before the answer was chosen;
            empty if it was chosen by the memory alone.
        reasoning: what a reader wrote for itself before the answer; empty if nothing.
        calls: calls of tools that a reader makes before it answers, as OpenAI's protocol has them;
            not part of the JSON.
        ranking: every block of the memory, best first, on request; not part of the JSON.
        answer_tokens: tokens that were generated, without the one that ends the answer; None if
            the method does not count them; not part of the JSON.
        logprobs: for each of these tokens, on request, its text and log-probability, then those of
            the likeliest tokens; None for quoted answers; not part of the JSON.
    """

    text: str
    citations: tuple[Citation, ...]
    k: int
    blocks: int
    timings: Mapping[str, float]
    finish_reason: str
    model: str
    cut: tuple[str, ...] = field(default=())
    conditioning: int | None = None
    stored_bytes: int | None = None
    context_tokens: int | None = None
    confidence: float | None = None
    answer_confidence: float | None = None
    unsupported: tuple[str, ...] = ()
    alternative: str | None = None
    sentences: tuple[Span, ...] = ()
    reasoning: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()
    ranking: tuple[Span, ...] | None = None
    answer_tokens: int | None = None
    logprobs: tuple[tuple[tuple[str, float], ...], ...] | None = None

    @property
    def certainty(self) -> str | None:
        """How likely the answer is right, whether or not its source was found, in words."""
        return certainty_of(joint(self.answer_confidence, self.confidence))

    def to_dict(self) -> dict[str, Any]:
        """The answer as values for JSON; its text has the key "answer"."""
        fields = asdict(replace(self, calls=(), ranking=None, logprobs=None))
        for name in ("calls", "ranking", "answer_tokens", "logprobs"):
            del fields[name]
        fields["timings"] = dict(self.timings)
        return {"answer": fields.pop("text"), "certainty": self.certainty, **fields}


SURE, LIKELY = 0.85, 0.5
"""The least probabilities of answers that are called sure or likely."""


def joint(answer_confidence: float | None, confidence: float | None) -> float | None:
    """Return the probability that an answer is right, given that if its source was found."""
    if answer_confidence is None or confidence is None:
        return answer_confidence
    return answer_confidence * confidence


def certainty_of(probability: float | None) -> str | None:
    """Return a probability in words: "sure", "likely" or "unsure"; None if there is none."""
    if probability is None:
        return None
    shown = round(probability, 2)  # as it stands beside the word
    return "sure" if shown >= SURE else "likely" if shown >= LIKELY else "unsure"


class DocumentReader(Protocol):
    """A method that reads documents once, then answers questions about them.

    The boundary between the two calls makes times comparable: `read` and `answer` together are the
    online protocol, `answer` alone is the prebuilt one.
    """

    name: str

    def read(self, documents: Sequence[Document]) -> Any:
        """Turn documents into this method's memory; no question is needed."""
        ...

    def answer(self, memory: Any, question: str) -> Answer:
        """Answer one question about the documents that were read."""
        ...
