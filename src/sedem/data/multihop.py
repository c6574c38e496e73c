"""HotpotQA, 2WikiMultiHopQA and MuSiQue: paragraph contexts with gold paragraph labels.

Each paragraph becomes a document whose first line is its title. A gold paragraph is evidence as a
whole, so all blocks of a long one are labelled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sedem.data.examples import (
    NO_CONTEXT,
    Example,
    ExampleSet,
    distinct_answers,
    distinct_names,
    whole,
)
from sedem.data.record_validation import entries, text, within
from sedem.data.records import Record, Records
from sedem.errors import DataError
from sedem.types import Document, check_unicode

NO_SENTENCE = "supporting fact past the last sentence"
NO_PARAGRAPH = "supporting fact on a paragraph outside the context"
EMPTY = "empty paragraph left out"


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of a context; a body that was not split into sentences is one string."""

    title: str
    body: str | list[str]

    def text(self, separator: str) -> str:
        """Title and sentences."""
        body = self.body if isinstance(self.body, str) else separator.join(self.body)
        return f"{self.title}\n{body}"


@dataclass(frozen=True)
class Question:
    """One record, whatever layout it came in.

    Attributes:
        identity: its name.
        text: what is asked.
        answers: the answer and its aliases.
        paragraphs: the context.
        gold: which of them are labelled.
        notes: what is odd about the labels.
    """

    identity: str
    text: str
    answers: list[str]
    paragraphs: list[Paragraph]
    gold: list[int]
    notes: list[str]


def read_hotpot(records: Records) -> ExampleSet:
    """HotpotQA, distractor setting, native or hub schema. Sentences already begin with a space."""
    return _read("hotpotqa", records, parse, separator="")


def read_2wiki(records: Records) -> ExampleSet:
    """2WikiMultiHopQA in any of its layouts. Sentences are joined by a space."""
    return _read("2wikimultihopqa", records, parse, separator=" ")


def read_musique(records: Records) -> ExampleSet:
    """MuSiQue-Ans; every alias of the answer is accepted."""
    return _read("musique", records, _parse_musique, separator="")


def rows(records: Records) -> Records:
    """Questions one at a time; a table {column: {row label: value}} is cut into its rows."""
    for place, record in records:
        if not isinstance(record.get("question"), dict):
            yield place, record
            continue
        with within(place):
            labels = list(record["question"])
            table = {column: dict(values) for column, values in record.items()}
        for label in labels:
            row = {column: values[label] for column, values in table.items() if label in values}
            yield f"{place}, row {label}", row


def usable(
    records: Records, parse: Callable[[str, Record], Question], result: ExampleSet
) -> Iterator[tuple[str, Question]]:
    """Questions with a context and a gold paragraph in it; the others are counted.

    Args:
        records: the set.
        parse: reads one of them.
        result: where it is counted what is left out or odd.
    """
    for place, record in records:
        with within(place):
            question = parse(place, record)
        if not question.paragraphs:
            result.drop(NO_CONTEXT, question.identity)
        elif not question.gold:
            result.drop("no gold paragraph in the context", question.identity)
        elif result.wants(question.identity, question.text, question.answers):
            result.noted.update(question.notes)
            yield place, question


def parse(place: str, record: Record) -> Question:
    """A record of HotpotQA or 2WikiMultiHopQA.

    Raises:
        DataError: with the record and the field.
    """
    identity = str(record.get("_id") or record["id"])
    check_unicode(identity, f"{place}, field 'id'")
    place = f"{place} (id '{identity}')"
    with within(place, "context"):
        given = _paragraphs(record["context"])
        paragraphs = [p for p in given if p.text("").strip()]
    with within(place, "supporting_facts"):
        facts = _facts(record["supporting_facts"])
    titles = {title for title, _ in facts}
    notes = [EMPTY] if len(paragraphs) < len(given) else []
    if titles - {p.title for p in paragraphs}:
        notes.append(NO_PARAGRAPH)
    if not all(_has_sentence(paragraphs, title, sentence) for title, sentence in facts):
        notes.append(NO_SENTENCE)
    return Question(
        identity,
        text(record, "question", place, blank=True),
        [text(record, "answer", place, blank=True)],
        paragraphs,
        [i for i, p in enumerate(paragraphs) if p.title in titles],
        notes,
    )


def _read(
    name: str, records: Records, parse: Callable[[str, Record], Question], separator: str
) -> ExampleSet:
    result = ExampleSet(name, [])
    for place, question in usable(records, parse, result):
        names = distinct_names([paragraph.title for paragraph in question.paragraphs])
        with within(place):
            documents = tuple(
                Document(name, _joined(paragraph, separator))
                for name, paragraph in zip(names, question.paragraphs, strict=True)
            )
            evidence = tuple(whole(index, documents) for index in question.gold)
            answers = distinct_answers(question.answers)
            result.examples.append(
                Example(question.identity, documents, question.text, answers, evidence)
            )
    return result


def _joined(paragraph: Paragraph, separator: str) -> str:
    title, _, body = paragraph.text(separator).partition("\n")
    return f"{title}\n{body.strip()}"


def _parse_musique(place: str, record: Record) -> Question:
    identity = text(record, "id", place)
    place = f"{place} (id '{identity}')"
    paragraphs: list[Paragraph] = []
    gold: list[int] = []
    for number, entry in enumerate(entries(record, "paragraphs", place)):
        where = f"{place}, field 'paragraphs[{number}]'"
        title, body = (text(entry, f, where, blank=True) for f in ("title", "paragraph_text"))
        with within(where, "is_supporting"):
            supports = entry["is_supporting"]
        if f"{title}{body}".strip():
            gold += [len(paragraphs)] if supports else []
            paragraphs.append(Paragraph(title, body))
    aliases = entries(record, "answer_aliases", place) if record.get("answer_aliases") else []
    if not all(isinstance(alias, str) for alias in aliases):
        raise DataError(f"{place}, field 'answer_aliases': a list of strings is needed")
    answers = [text(record, "answer", place, blank=True), *aliases]
    notes = [EMPTY] if len(paragraphs) < len(record["paragraphs"]) else []
    question = text(record, "question", place, blank=True)
    return Question(identity, question, answers, paragraphs, gold, notes)


def _paragraphs(context: Any) -> list[Paragraph]:
    """The four shapes of a context: JSON string, pairs, objects, or columns."""
    if isinstance(context, str):
        context = json.loads(context)
    pairs: list[tuple[Any, Any]] | None = None
    if isinstance(context, dict):
        bodies = context.get("sentences", context.get("content"))
        if bodies is not None and "title" in context:
            pairs = list(zip(context["title"], bodies, strict=True))
    elif isinstance(context, list):
        if all(isinstance(entry, dict) for entry in context):
            pairs = [
                (e["title"], e["sentences"] if "sentences" in e else e["content"]) for e in context
            ]
        else:
            pairs = [(title, body) for title, body in context]
    if pairs is None:
        raise ValueError("neither pairs, objects nor columns of title and sentences")
    for title, body in pairs:
        sentences = [body] if isinstance(body, str) else body
        if not isinstance(title, str) or not all(isinstance(s, str) for s in sentences):
            raise ValueError("titles and sentences must be strings")
        for words in (title, *sentences):
            check_unicode(words, f"paragraph '{title}'")
    return [Paragraph(t, b if isinstance(b, str) else list(b)) for t, b in pairs]


def _facts(facts: Any) -> list[tuple[str, int]]:
    """The four shapes of supporting facts: JSON string, pairs, objects, or columns."""
    if isinstance(facts, str):
        facts = json.loads(facts)
    if isinstance(facts, dict):
        facts = list(zip(facts["title"], facts["sent_id"], strict=True))
    pairs = [(f["title"], f["sent_id"]) if isinstance(f, dict) else f for f in facts]
    found = [(title, sentence) for title, sentence in pairs]
    if not all(isinstance(title, str) and isinstance(at, int) for title, at in found):
        raise ValueError("pairs of a title and the number of a sentence are needed")
    return found


def _has_sentence(paragraphs: list[Paragraph], title: str, sentence: int) -> bool:
    """Titles repeat: one paragraph of that title is enough. An unsplit body cannot tell."""
    bodies = [p.body for p in paragraphs if p.title == title]
    return not bodies or any(isinstance(b, str) or 0 <= sentence < len(b) for b in bodies)
