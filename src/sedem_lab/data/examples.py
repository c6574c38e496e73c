"""Examples: questions with their documents, answers and evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from sedem.errors import DataError
from sedem.types import Document
from sedem.untrusted import check_unicode

NO_CONTEXT = "no context"
"""The reason under which every set drops a question with nothing to read."""

NAMED = 3
"""Number of dropped examples that a set names for each reason."""


@dataclass(frozen=True)
class Evidence:
    """A span that supports an answer: `documents[document].text[start:end]`."""

    document: int
    start: int
    end: int

    def overlaps(self, start: int, end: int) -> bool:
        """Whether a span of the same document shares at least one character with this one."""
        return self.start < end and start < self.end


@dataclass(frozen=True)
class Example:
    """One question about some documents.

    Attributes:
        documents: the context, in order; their names are unique.
        answers: acceptable answers, at least one; the first is the training target.
        evidence: spans that support the answer; empty if none are labelled.
    """

    id: str
    documents: tuple[Document, ...]
    question: str
    answers: tuple[str, ...]
    evidence: tuple[Evidence, ...] = ()

    def __post_init__(self) -> None:
        if not self.documents:
            raise DataError(f"example '{self.id}' has no documents")
        if not self.question.strip():
            raise DataError(f"example '{self.id}' has an empty question")
        if not self.answers or not all(answer.strip() for answer in self.answers):
            raise DataError(f"example '{self.id}' has no answer, or an empty one")
        check_unicode(self.id, "the id of an example")
        check_unicode(self.question, f"the question of example '{self.id}'")
        for answer in self.answers:
            check_unicode(answer, f"an answer of example '{self.id}'")
        names = [document.name for document in self.documents]
        if len(set(names)) < len(names):
            raise DataError(f"example '{self.id}' has two documents of one name")
        for span in self.evidence:
            inside = 0 <= span.document < len(self.documents)
            length = len(self.documents[span.document].text) if inside else 0
            if not inside or not 0 <= span.start < span.end <= length:
                raise DataError(
                    f"example '{self.id}' has evidence {span.start}:{span.end} in document "
                    f"{span.document}, which has no such span"
                )


@dataclass
class ExampleSet:
    """Examples of one file or set, and what was dropped from it.

    Attributes:
        dropped: number of dropped examples by reason.
        noted: number of examples that were repaired or are unusual, by kind; they are kept.
        dropped_ids: ids of the first few dropped examples by reason.
    """

    name: str
    examples: list[Example]
    dropped: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    dropped_ids: dict[str, list[str]] = field(default_factory=dict)
    _ids: set[str] = field(default_factory=set, repr=False, compare=False)

    def drop(self, reason: str, identity: str) -> None:
        """Count an example as dropped for a reason, and keep the ids of the first few."""
        self.dropped[reason] += 1
        named = self.dropped_ids.setdefault(reason, [])
        if len(named) < NAMED:
            named.append(identity)

    def wants(self, identity: str, question: str, answers: Sequence[str]) -> bool:
        """Whether a question of a public set can be used; if not, it is dropped with a reason."""
        if identity in self._ids:
            self.drop("id given before", identity)
        elif not question.strip():
            self.drop("no question", identity)
        elif not distinct_answers(answers):
            self.drop("no answer", identity)
        else:
            self._ids.add(identity)
            return True
        return False


def distinct_answers(answers: Sequence[str]) -> tuple[str, ...]:
    """Answers without surrounding space or duplicates, in their order; empty ones are dropped."""
    return tuple(dict.fromkeys(answer.strip() for answer in answers if answer.strip()))


def distinct_names(names: Sequence[str]) -> list[str]:
    """Unique names for the documents of a context: a repeated name gets its count, "Paris (2)"."""
    distinct: list[str] = []
    for name in names:
        name = name.strip() or "untitled"
        unique, count = name, 1
        while unique in distinct:
            count += 1
            unique = f"{name} ({count})"
        distinct.append(unique)
    return distinct


def numbered_example(
    identity: str,
    document: str,
    texts: Sequence[str],
    question: str,
    answer: str,
    evidence: Sequence[tuple[str, int, int]],
) -> Example:
    """An example over distinct texts in their order; document n is named `document` and n.

    Args:
        evidence: one of the texts, and a span of it.
    """
    return Example(
        identity,
        tuple(Document(f"{document} {number}", text) for number, text in enumerate(texts, 1)),
        question,
        (answer,),
        tuple(Evidence(texts.index(text), start, end) for text, start, end in evidence),
    )


def whole(document: int, documents: Sequence[Document]) -> Evidence:
    """A whole document as evidence, for sets that label paragraphs."""
    return Evidence(document, 0, len(documents[document].text))
