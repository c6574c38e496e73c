"""LongMemEval (Wu et al., 2025): questions about conversations that a user had with an assistant.

Each session becomes a document, whose first line is its date. Evidence is the turns that are marked
as having the answer, or all of an answer's session if none is. Questions that cannot be answered,
whose ids end in "_abs", have no evidence to find, so they are dropped. The date of a question is
not read.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from sedem.errors import DataError
from sedem.types import Document
from sedem_lab.data.examples import (
    NO_CONTEXT,
    Evidence,
    Example,
    ExampleSet,
    distinct_names,
    whole,
)
from sedem_lab.data.records import Id, RecordModel, Records, Text, with_id, within

ABSTAINS = "question that cannot be answered"
NO_SESSION = "answer session outside of the history"
EMPTY = "empty session left out"


class _Turn(RecordModel):
    role: Text
    content: Text
    has_answer: bool | None = None


class _LongMemEvalRecord(RecordModel):
    question_id: Id
    question: Text
    answer: Annotated[Text, BeforeValidator(lambda given: str(given))]  # some are numbers
    haystack_session_ids: list[Id]
    haystack_dates: list[Text]
    haystack_sessions: list[list[_Turn]]
    answer_session_ids: list[Id]


def read(records: Records) -> ExampleSet:
    """LongMemEval, with one question and its history per record."""
    result = ExampleSet("longmemeval", [])
    for place, record in records:
        place = with_id(place, record)
        found = _LongMemEvalRecord.from_record(record, place)
        if found.question_id.endswith("_abs"):
            result.drop(ABSTAINS, found.question_id)
            continue
        documents, evidence = list[Document](), list[Evidence]()
        missing = {*found.answer_session_ids}
        names = distinct_names(found.haystack_session_ids)
        parts = found.haystack_session_ids, names, found.haystack_dates, found.haystack_sessions
        if len({len(part) for part in parts}) > 1:
            raise DataError(f"{place}: its sessions, their ids and their dates differ in number")
        for session, name, date, turns in zip(*parts, strict=True):
            text, marked = date, list[tuple[int, int]]()
            for turn in turns:
                text += f"\n\n{turn.role}: "
                if turn.has_answer and turn.content:
                    marked.append((len(text), len(text) + len(turn.content)))
                text += turn.content
            if not any(turn.content.strip() for turn in turns):
                result.noted[EMPTY] += 1
                continue
            with within(place):
                documents.append(Document(name, text))
            if session in found.answer_session_ids:
                missing.discard(session)
                number = len(documents) - 1
                turns_with_it = [Evidence(number, *span) for span in marked]
                evidence += turns_with_it or [whole(number, documents)]
        result.noted[NO_SESSION] += len(missing)
        if not documents:
            result.drop(NO_CONTEXT, found.question_id)
        elif result.wants(found.question_id, found.question, [found.answer]):
            answers, spans = (found.answer.strip(),), tuple(evidence)
            result.examples.append(
                Example(found.question_id, tuple(documents), found.question, answers, spans)
            )
    return result
