"""What every method speaks: documents in, answers with their sources out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from sedem.errors import DataError


@dataclass(frozen=True)
class Document:
    """A named text. `name` is what citations show; within one bank it is unique."""

    name: str
    text: str

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise DataError("a document has an empty name; give it one, such as its file name")
        if not self.text.strip():
            raise DataError(
                f"document '{self.name}' holds no text (it is empty or only white space); "
                "leave it out or give its text"
            )
        check_unicode(self.name, "the name of a document")
        check_unicode(self.text, f"document '{self.name}'")


def check_documents(documents: Sequence[Document]) -> None:
    """Refuse documents that cannot be read together.

    Raises:
        DataError: there are none, or two have one name.
    """
    if not documents:
        raise DataError("there is nothing to read; give at least one document")
    name, count = Counter(document.name for document in documents).most_common(1)[0]
    if count > 1:
        raise DataError(f"{count} documents are named '{name}'; give each document once")


def check_tokens(found: object) -> None:
    """Refuse a text in which a tokenizer found nothing.

    Raises:
        DataError: there are no tokens.
    """
    if not found:
        raise DataError("the text has no tokens; give a document with words in it")


def check_unicode(text: str, what: str) -> None:
    """Refuse text with halves of surrogate pairs, which no file and no tokenizer can hold.

    Raises:
        DataError: with the place.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} is not Unicode text ({text[error.start]!a} at character {error.start}); "
            "decode it with its right encoding"
        ) from None


@dataclass(frozen=True)
class Citation:
    """One span that an answer was conditioned on; `text` is exactly `document_text[start:end]`.

    Attributes:
        rank: 1 for the block with the highest score, or for the first one where nothing is scored.
        document: name of the document.
        start: first character of the span.
        end: character after the span.
        score: the selector's score of the block; None where the method selects nothing and reads
            everything in order.
        text: the span.
    """

    rank: int
    document: str
    start: int
    end: int
    score: float | None
    text: str


Span = tuple[str, int, int]
"""Name of a document, first character, character after the last."""


@dataclass(frozen=True)
class Answer:
    """An answer and what it stands on.

    What it cost is None where a reader does not tell.

    Attributes:
        text: the answer, stripped of surrounding white space.
        citations: the spans that conditioned it, best first, or in order where none has a score.
        k: how many blocks were used.
        blocks: how many blocks the memory holds.
        timings: milliseconds by stage; `select_ms`, `ttft_ms` and `total_ms` are always there.
        finish_reason: "end" (the model ended it), "stop" (a stop string) or "length" (the limit).
        cut: one sentence for each thing that was left out or cut off; empty when nothing was.
        model: name of the model that answered.
        conditioning: positions that the decoder's upper layers saw before the first answer token:
            restored states and prompt, or context and prompt where all layers read text.
        stored_bytes: what the memory keeps to answer from, for all its documents.
        context_tokens: tokens of all its documents.
        ranking: every block of the memory, best first, where that was asked for; not part of the
            JSON.
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
    ranking: tuple[Span, ...] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The answer as JSON-ready values; the text goes under "answer"."""
        fields = asdict(replace(self, ranking=None))
        del fields["ranking"]
        fields["timings"] = dict(self.timings)
        return {"answer": fields.pop("text"), **fields}


class Reader(Protocol):
    """What every method of the field can do: read documents once, then answer about them.

    The boundary between the two calls is what makes times comparable: `read` and `answer` together
    are the online protocol, `answer` alone is the prebuilt one.
    """

    name: str

    def read(self, documents: Sequence[Document]) -> Any:
        """Turn documents into this method's memory; no question is needed."""
        ...

    def answer(self, memory: Any, question: str) -> Answer:
        """Answer one question about what was read."""
        ...


class StreamingReader(Reader, Protocol):
    """A reader that can also give its answer piece by piece."""

    def stream(self, memory: Any, question: str) -> Iterator[str]:
        """Yield the answer as pieces of text whose concatenation is the answer."""
        ...
