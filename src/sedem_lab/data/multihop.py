"""HotpotQA, 2WikiMultiHopQA and MuSiQue: paragraph contexts with gold paragraph labels.

Each paragraph becomes a document whose first line is its title. A gold paragraph is evidence as a
whole, so all blocks of a long one are labelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag

from sedem.config import Whole
from sedem.errors import DataError
from sedem.types import Document
from sedem.untrusted import parse_json
from sedem_lab.data.examples import (
    NO_CONTEXT,
    Example,
    ExampleSet,
    distinct_answers,
    distinct_names,
    whole,
)
from sedem_lab.data.records import (
    FilledText,
    FromColumns,
    Id,
    Record,
    RecordModel,
    Records,
    Text,
    with_id,
    within,
)

NO_SENTENCE = "supporting fact past the last sentence"
NO_PARAGRAPH = "supporting fact on a paragraph outside the context"
EMPTY = "empty paragraph left out"


def _from_json_and_pairs(*names: str) -> BeforeValidator:
    """Accept a list of objects also as a JSON string, and its objects also as pairs."""

    def objects(given: Any) -> Any:
        if isinstance(given, str):
            try:
                given = parse_json(given, "the text", DataError)
            except DataError as error:
                raise ValueError(str(error)) from None
        if not isinstance(given, list):
            return given
        return [
            dict(zip(names, entry, strict=True))
            if isinstance(entry, list | tuple) and len(entry) == len(names)
            else entry
            for entry in given
        ]

    return BeforeValidator(objects)


class TitledParagraph(RecordModel):
    """A paragraph of a context; its sentences are a list or one unsplit string."""

    title: Text
    sentences: Annotated[
        Annotated[Text, Tag("a text")] | Annotated[list[Text], Tag("a list")],
        Discriminator(lambda given: "a text" if isinstance(given, str) else "a list"),
    ] = Field(validation_alias=AliasChoices("sentences", "content"))

    def text(self, separator: str) -> str:
        """Title and sentences."""
        parts = [self.sentences] if isinstance(self.sentences, str) else self.sentences
        return f"{self.title}\n{separator.join(parts)}"


class _Fact(RecordModel):
    title: Text
    sent_id: Whole


class _HotpotRecord(RecordModel):
    """A record of HotpotQA or 2WikiMultiHopQA, in the layout of any copy."""

    id: Id = Field(validation_alias=AliasChoices("_id", "id"))
    question: Text
    answer: Text
    context: Annotated[
        list[TitledParagraph], FromColumns, _from_json_and_pairs("title", "sentences")
    ]
    supporting_facts: Annotated[list[_Fact], FromColumns, _from_json_and_pairs("title", "sent_id")]


class _MusiqueParagraph(TitledParagraph):
    sentences: Text = Field(validation_alias="paragraph_text")
    is_supporting: Any


class _MusiqueRecord(RecordModel):
    id: FilledText
    question: Text
    answer: Text
    answer_aliases: list[Text] | None = None
    paragraphs: list[_MusiqueParagraph]


@dataclass(frozen=True)
class ParagraphQuestion:
    """A question about titled paragraphs."""

    id: str
    question: str
    answers: list[str]
    paragraphs: Sequence[TitledParagraph]
    gold: list[int]
    """Positions of the labelled paragraphs."""
    notes: list[str]
    """What is unusual about the record."""


def read_hotpot(records: Records) -> ExampleSet:
    """HotpotQA, distractor setting, native or hub schema. Sentences already begin with a space."""
    return _read("hotpotqa", records, parse, separator="")


def read_2wiki(records: Records) -> ExampleSet:
    """2WikiMultiHopQA in any of its layouts. Sentences are joined with a space."""
    return _read("2wikimultihopqa", records, parse, separator=" ")


def read_musique(records: Records) -> ExampleSet:
    """MuSiQue-Ans; every alias of the answer is accepted."""
    return _read("musique", records, _parse_musique, separator="")


def rows(records: Records) -> Records:
    """Questions one at a time; a table {column: {row label: value}} is split into its rows."""
    for place, record in records:
        if not isinstance(record.get("question"), dict):
            yield place, record
            continue
        for column, values in record.items():
            if not isinstance(values, dict):
                raise DataError(f"{place}: {column} must be a column {{row label: value}}")
        for label in record["question"]:
            row = {column: values[label] for column, values in record.items() if label in values}
            yield f"{place}, row {label}", row


def usable(
    records: Records, parse: Callable[[str, Record], ParagraphQuestion], result: ExampleSet
) -> Iterator[tuple[str, ParagraphQuestion]]:
    """Questions with a gold paragraph in their context; others are dropped and counted."""
    for place, record in records:
        question = parse(place, record)
        if not question.paragraphs:
            result.drop(NO_CONTEXT, question.id)
        elif not question.gold:
            result.drop("no gold paragraph in the context", question.id)
        elif result.wants(question.id, question.question, question.answers):
            result.noted.update(question.notes)
            yield place, question


def parse(place: str, record: Record) -> ParagraphQuestion:
    """Parse a record of HotpotQA or 2WikiMultiHopQA."""
    given = _HotpotRecord.from_record(record, with_id(place, record))
    paragraphs = [p for p in given.context if p.text("").strip()]
    titles = {fact.title for fact in given.supporting_facts}
    notes = [EMPTY] if len(paragraphs) < len(given.context) else []
    if titles - {p.title for p in paragraphs}:
        notes.append(NO_PARAGRAPH)
    if not all(_has_sentence(paragraphs, fact) for fact in given.supporting_facts):
        notes.append(NO_SENTENCE)
    gold = [i for i, p in enumerate(paragraphs) if p.title in titles]
    return ParagraphQuestion(given.id, given.question, [given.answer], paragraphs, gold, notes)


def _parse_musique(place: str, record: Record) -> ParagraphQuestion:
    given = _MusiqueRecord.from_record(record, with_id(place, record))
    paragraphs = [p for p in given.paragraphs if p.text("").strip()]
    gold = [i for i, p in enumerate(paragraphs) if p.is_supporting]
    notes = [EMPTY] if len(paragraphs) < len(given.paragraphs) else []
    answers = [given.answer, *(given.answer_aliases or [])]
    return ParagraphQuestion(given.id, given.question, answers, paragraphs, gold, notes)


def _read(
    name: str,
    records: Records,
    parse: Callable[[str, Record], ParagraphQuestion],
    separator: str,
) -> ExampleSet:
    result = ExampleSet(name, [])
    for place, question in usable(records, parse, result):
        names = distinct_names([paragraph.title for paragraph in question.paragraphs])
        with within(place):
            documents = []
            for name, paragraph in zip(names, question.paragraphs, strict=True):
                title, _, body = paragraph.text(separator).partition("\n")
                documents.append(Document(name, f"{title}\n{body.strip()}"))
            evidence = tuple(whole(index, documents) for index in question.gold)
            answers = distinct_answers(question.answers)
            result.examples.append(
                Example(question.id, tuple(documents), question.question, answers, evidence)
            )
    return result


def _has_sentence(paragraphs: Sequence[TitledParagraph], fact: _Fact) -> bool:
    """Whether a paragraph with the fact's title contains its sentence; titles may repeat.

    Also true if no paragraph has the title, or one of them was not split into sentences.
    """
    same = [p.sentences for p in paragraphs if p.title == fact.title]
    return not same or any(isinstance(s, str) or 0 <= fact.sent_id < len(s) for s in same)
