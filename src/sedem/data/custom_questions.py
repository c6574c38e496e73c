"""Your own questions: JSON lines of {documents, question, answers, evidence?}.

    {"id": "lease-1",
     "documents": [{"name": "lease.txt", "text": "The rent is 900 euros. ..."}],
     "question": "What is the rent?",
     "answers": ["900 euros"],
     "evidence": [{"document": "lease.txt", "start": 0, "end": 22}]}

`id` and `evidence` may be left out or null; without evidence, blocks that hold an answer string
count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sedem.data.examples import Evidence, Example, ExampleSet
from sedem.data.record_validation import entries, number, shown, text, within
from sedem.data.records import Record, Records
from sedem.errors import DataError
from sedem.types import Document

_FIELDS = {"id", "documents", "question", "answers", "evidence"}


def read(records: Records) -> ExampleSet:
    """Own questions, strictly.

    Args:
        records: the lines.

    Raises:
        DataError: with the line and the field; or two lines of one id.
    """
    result = ExampleSet("own", [])
    places: dict[str, str] = {}
    for place, entry in records:
        with within(place):
            example = _example(entry, place)
        if example.id in places:
            raise DataError(
                f"{place}: the id '{example.id}' is that of {places[example.id]} too; "
                "ids must differ, or be left out"
            )
        places[example.id] = place
        result.examples.append(example)
    return result


def dump(examples: Iterable[Example], path: Path) -> None:
    """Write examples in this schema, one a line."""
    with path.open("w", encoding="utf-8") as file:
        for example in examples:
            file.write(json.dumps(to_entry(example), ensure_ascii=False) + "\n")


def to_entry(example: Example) -> dict[str, Any]:
    """An example as the JSON object of one line."""
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


def _example(entry: Record, place: str) -> Example:
    unknown = sorted(entry.keys() - _FIELDS)
    if unknown:
        raise DataError(f"{place}: unknown field '{unknown[0]}'; known are {', '.join(_FIELDS)}")
    documents = tuple(
        Document(
            text(document, "name", f"{place}, field 'documents[{i}]'"),
            text(document, "text", f"{place}, field 'documents[{i}]'"),
        )
        for i, document in enumerate(_some(entry, "documents", place))
    )
    names = {document.name: index for index, document in enumerate(documents)}
    evidence = []
    given = [] if entry.get("evidence") is None else entries(entry, "evidence", place)
    for i, span in enumerate(given):
        where = f"{place}, field 'evidence[{i}]'"
        name = text(span, "document", where)
        if name not in names:
            raise DataError(f"{where}: no document is named '{name}'")
        evidence.append(
            Evidence(names[name], number(span, "start", where), number(span, "end", where))
        )
    answers = _some(entry, "answers", place)
    if not all(isinstance(answer, str) for answer in answers):
        raise DataError(f"{place}, field 'answers': a list of strings is needed")
    question = text(entry, "question", place)
    identity = _id(entry, place)
    return Example(identity, documents, question, tuple(answers), tuple(evidence))


def _id(entry: Record, place: str) -> str:
    """The id that is given, or file and line: shards of a folder have lines of one number."""
    given = entry.get("id")
    if given is None:
        return Path(place).name.replace("'", "")
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise DataError(f"{place}, field 'id': a string is needed, got {shown(given)}")
    return str(given)


def _some(entry: Record, field: str, place: str) -> list[Any]:
    if field == "documents" and isinstance(entry.get(field), dict):
        raise DataError(
            f"{place}, field 'documents': a list of objects {{name, text}} is needed, "
            "this is one object; names may not be its keys"
        )
    value = entry.get(field)
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{place}, field '{field}': a list with at least one entry is needed, "
            f"got {shown(value)}"
        )
    return value
