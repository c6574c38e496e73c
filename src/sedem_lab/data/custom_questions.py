"""Custom questions: JSON lines of {documents, question, answers, evidence?}.

    {"id": "lease-1",
     "documents": [{"name": "lease.txt", "text": "The rent is 900 euros. ..."}],
     "question": "What is the rent?",
     "answers": ["900 euros"],
     "evidence": [{"document": "lease.txt", "start": 0, "end": 22}]}

`id` and `evidence` may be left out or null. Without evidence, training treats the blocks that
contain an answer string as positive (`labels.labelling_of`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field

from sedem.config import Whole
from sedem.errors import DataError
from sedem.types import Document
from sedem_lab.data.examples import Evidence, Example, ExampleSet
from sedem_lab.data.records import FilledText, Id, RecordModel, Records, within


def _not_by_name(documents: Any) -> Any:
    if isinstance(documents, dict):
        raise ValueError(
            "a list of objects {name, text} is needed, this is one object; its keys cannot be the "
            "names"
        )
    return documents


class _DocumentFields(RecordModel):
    name: FilledText
    text: FilledText


class _EvidenceFields(RecordModel):
    document: FilledText
    start: Whole
    end: Whole


class _Line(RecordModel):
    """One line of a file."""

    model_config = ConfigDict(extra="forbid")

    id: Id | None = None
    documents: Annotated[list[_DocumentFields], Field(min_length=1), BeforeValidator(_not_by_name)]
    question: FilledText
    answers: Annotated[list[FilledText], Field(min_length=1)]
    evidence: list[_EvidenceFields] | None = None


def read(records: Records) -> ExampleSet:
    """Read custom questions; every field is checked.

    Raises:
        DataError: a line is malformed, or two lines have the same id; names line and field.
    """
    result = ExampleSet("own", [])
    places: dict[str, str] = {}
    for place, entry in records:
        question = _Line.from_record(entry, place)
        with within(place):
            documents = tuple(Document(given.name, given.text) for given in question.documents)
            indices = {document.name: index for index, document in enumerate(documents)}
            evidence = []
            for i, span in enumerate(question.evidence or []):
                if span.document not in indices:
                    raise DataError(
                        f"evidence[{i}].document is '{span.document}'; give the name of a document"
                    )
                evidence.append(Evidence(indices[span.document], span.start, span.end))
            # A default id includes the file, because shards repeat line numbers.
            identity = Path(place).name.replace("'", "") if question.id is None else question.id
            answers = tuple(question.answers)
            example = Example(identity, documents, question.question, answers, tuple(evidence))
        if example.id in places:
            raise DataError(
                f"{place}: the id '{example.id}' is also that of {places[example.id]}; "
                "give different ids, or none"
            )
        places[example.id] = place
        result.examples.append(example)
    return result


def to_entry(example: Example) -> dict[str, Any]:
    """An example as the JSON object of one line that `read` accepts."""
    return {
        "id": example.id,
        "documents": [{"name": d.name, "text": d.text} for d in example.documents],
        "question": example.question,
        "answers": list(example.answers),
        "evidence": [
            {"document": example.documents[e.document].name, "start": e.start, "end": e.end}
            for e in example.evidence
        ],
    }
