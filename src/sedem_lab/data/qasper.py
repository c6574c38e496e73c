"""QASPER: questions about whole papers; evidence paragraphs are located in the paper's text.

The option `drop` selects the questions to leave out. They are counted:

- "no-text-evidence" (default): questions that every annotator calls unanswerable, and questions
  without evidence in the text of the paper (evidence in figures and tables begins with
  "FLOAT SELECTED").
- "unanswerable": only the former; a question without evidence in the text has no labels.
- "none": no questions; annotators who call a question unanswerable then answer "Unanswerable".

SeDeM reports 2,322 and 945 questions, fewer than the set has, without saying which it leaves out.
"""

from __future__ import annotations

from typing import Annotated, Literal

from sedem.errors import DataError
from sedem.types import Document
from sedem_lab.data.examples import NO_CONTEXT, Evidence, Example, ExampleSet, distinct_answers
from sedem_lab.data.records import (
    FilledText,
    FromColumns,
    RecordModel,
    Records,
    Text,
    with_id,
    within,
)

Drop = Literal["no-text-evidence", "unanswerable", "none"]

FLOAT = "FLOAT SELECTED"
UNANSWERABLE = "Unanswerable"
"""The answer to an unanswerable question, as worded by the set's own scorer."""


class _Section(RecordModel):
    section_name: Text | None
    paragraphs: list[Text]


class _Annotation(RecordModel):
    """The answer of one annotator."""

    unanswerable: bool
    extractive_spans: list[Text] | None
    free_form_answer: Text | None
    yes_no: bool | None
    evidence: list[Text] | None = None

    def answer(self) -> str | None:
        """The answer: empty if the question is unanswerable, None if the annotation is empty."""
        if self.unanswerable:
            return ""
        if self.extractive_spans:
            return ", ".join(self.extractive_spans)
        if self.free_form_answer:
            return self.free_form_answer
        if self.yes_no is None:
            return None
        return "Yes" if self.yes_no else "No"


class _AnnotationEntry(RecordModel):
    answer: _Annotation


class _QasperQuestion(RecordModel):
    question: Text
    answers: Annotated[list[_AnnotationEntry], FromColumns]


class _QasperPaper(RecordModel):
    id: FilledText
    title: Text | None = None
    abstract: Text | None = None
    full_text: Annotated[list[_Section], FromColumns]
    qas: Annotated[list[_QasperQuestion], FromColumns]

    def text(self) -> str:
        """Abstract, headings and paragraphs, separated by blank lines."""
        parts = [self.abstract or ""]
        for section in self.full_text:
            parts += [section.section_name or "", *section.paragraphs]
        return "\n\n".join(part.strip() for part in parts if part.strip())


def read(records: Records, *, drop: Drop = "no-text-evidence") -> ExampleSet:
    """QASPER, with one paper per record."""
    result = ExampleSet("qasper", [])
    for place, record in records:
        place = with_id(place, record)
        paper = _QasperPaper.from_record(record, place)
        text = paper.text()
        if not text:
            for number in range(len(paper.qas)):
                result.drop(NO_CONTEXT, f"{paper.id}-{number}")
            continue
        with within(place):
            document = Document(paper.title or paper.id, text)
        for number, question in enumerate(paper.qas):
            with within(f"{place}, question {number}"):
                _add_question(result, f"{paper.id}-{number}", document, question, drop)
    return result


def papers(records: Records) -> Records:
    """Papers one at a time, from the hub's rows or from the release's {paper id: paper}."""
    for place, record in records:
        if "full_text" in record:
            yield place, record
            continue
        for identity, paper in record.items():
            if not isinstance(paper, dict):
                raise DataError(f"{place}, field '{identity}': a paper must be a JSON object")
            yield place, {"id": identity, **paper}


def _add_question(
    result: ExampleSet, identity: str, document: Document, question: _QasperQuestion, drop: Drop
) -> None:
    """Add an example, or count why it is dropped."""
    annotations = [entry.answer for entry in question.answers]
    given = [(a, answer) for a in annotations if (answer := a.answer()) is not None]
    if not given:
        result.drop("no answer", identity)
        return
    answers = [answer for _, answer in given]
    quotes = {
        quote.strip()
        for annotation, _ in given
        for quote in annotation.evidence or []
        if quote.strip() and not quote.startswith(FLOAT)
    }
    places = [(document.text.find(quote), len(quote)) for quote in sorted(quotes)]
    spans = tuple(Evidence(0, start, start + size) for start, size in places if start >= 0)
    reason = ""
    if not any(answers):
        reason = "unanswerable"
    elif not spans:
        reason = "no evidence in the text"
    if reason and (drop == "no-text-evidence" or drop == reason):
        result.drop(reason, identity)
        return
    if drop == "none":
        answers = [answer or UNANSWERABLE for answer in answers]
    if not result.wants(identity, question.question, answers):
        return
    if reason:
        result.noted[f"{reason}, kept"] += 1
    if len(given) < len(annotations):
        result.noted["annotation without an answer left out"] += 1
    if spans and len(spans) < len(quotes):
        result.noted["evidence not found again"] += 1
    result.examples.append(
        Example(identity, (document,), question.question, distinct_answers(answers), spans)
    )
