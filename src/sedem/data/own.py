"""Your own questions: JSON lines of {documents, question, answers, evidence?}.

    {"id": "lease-1",
     "documents": [{"name": "lease.txt", "text": "The rent is 900 euros. ..."}],
     "question": "What is the rent?",
     "answers": ["900 euros"],
     "evidence": [{"document": "lease.txt", "start": 0, "end": 22}]}

`id` and `evidence` may be left out; without evidence, blocks that hold an answer string count.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sedem.contracts import Document
from sedem.data.examples import Evidence, Example, ExampleSet
from sedem.data.files import read_lines
from sedem.errors import DataError

_FIELDS = {"id", "documents", "question", "answers", "evidence"}


def load(path: Path, *, records: slice = slice(None)) -> ExampleSet:
    """Read a file of own questions.

    Args:
        path: the JSON lines.
        records: which of them.

    Raises:
        DataError: with the line and the field.
    """
    entries = list(read_lines(path))[records]
    return ExampleSet(path.stem, [_example(entry, path, line) for line, entry in entries])


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


def _example(entry: dict[str, Any], path: Path, line: int) -> Example:
    where = f"'{path}', line {line}"
    unknown = sorted(entry.keys() - _FIELDS)
    if unknown:
        raise DataError(f"{where}: unknown field '{unknown[0]}'; known are {', '.join(_FIELDS)}")
    documents = tuple(
        Document(
            _text(document, "name", f"{where}, field 'documents[{i}]'"),
            _text(document, "text", f"{where}, field 'documents[{i}]'"),
        )
        for i, document in enumerate(_list(entry, "documents", where))
    )
    names = {document.name: index for index, document in enumerate(documents)}
    evidence = []
    for i, span in enumerate(_list(entry, "evidence", where) if "evidence" in entry else []):
        place = f"{where}, field 'evidence[{i}]'"
        name = _text(span, "document", place)
        if name not in names:
            raise DataError(f"{place}: no document is named '{name}'")
        start, end = _number(span, "start", place), _number(span, "end", place)
        evidence.append(Evidence(names[name], start, end))
    answers = _list(entry, "answers", where)
    if not all(isinstance(answer, str) for answer in answers):
        raise DataError(f"{where}, field 'answers': a list of strings is needed")
    try:
        return Example(
            str(entry.get("id", f"line {line}")),
            documents,
            _text(entry, "question", where),
            tuple(answers),
            tuple(evidence),
        )
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _list(entry: Any, field: str, where: str) -> list[Any]:
    value = entry.get(field) if isinstance(entry, dict) else None
    if not isinstance(value, list) or (not value and field != "evidence"):
        raise DataError(f"{where}, field '{field}': a list with at least one entry is needed")
    return value


def _text(entry: Any, field: str, where: str) -> str:
    value = entry.get(field) if isinstance(entry, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}, field '{field}': a non-empty string is needed, got {value!r}")
    return value


def _number(entry: Any, field: str, where: str) -> int:
    value = entry.get(field) if isinstance(entry, dict) else None
    if isinstance(value, bool) or not isinstance(value, int):
        raise DataError(f"{where}, field '{field}': a whole number is needed, got {value!r}")
    return value
