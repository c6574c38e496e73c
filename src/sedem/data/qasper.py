"""QASPER: questions on whole papers; evidence paragraphs are found again in the paper's text.

A question is left out, counted by reason, when every annotator calls it unanswerable, or when none
of its evidence is text of the paper (evidence in figures and tables begins with "FLOAT SELECTED").
SeDeM counts 2,322 and 945 questions, fewer than the set has, and does not say which it leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sedem.contracts import Document
from sedem.data.examples import Evidence, Example, ExampleSet
from sedem.data.files import read_json, read_records
from sedem.errors import DataError

FLOAT = "FLOAT SELECTED"


def load(path: Path, *, records: slice = slice(None)) -> ExampleSet:
    """QASPER in its release schema (papers by id) or in the hub's (one paper a record).

    Args:
        path: the file.
        records: which papers.
    """
    result = ExampleSet("qasper", [])
    for identity, paper in list(_papers(path))[records]:
        document = Document(paper.get("title") or identity, _text(paper))
        for number, (question, answers) in enumerate(_questions(paper)):
            given = [text for answer in answers if (text := _answer(answer))]
            quotes = {
                quote.strip()
                for answer in answers
                for quote in answer.get("evidence", [])
                if quote.strip() and not quote.startswith(FLOAT)
            }
            spans = _spans(sorted(quotes), document.text)
            if not given:
                result.dropped["unanswerable"] += 1
            elif not spans:
                result.dropped["no evidence in the text"] += 1
            else:
                distinct = tuple(dict.fromkeys(given))
                name = f"{identity}-{number}"
                result.examples.append(Example(name, (document,), question, distinct, spans))
                if len(spans) < len(quotes):
                    result.noted["evidence not found again"] += 1
    return result


def _papers(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if ".jsonl" not in path.suffixes:
        content = read_json(path)
        if isinstance(content, dict) and "full_text" not in content:
            yield from content.items()
            return
    for record in read_records(path):
        yield str(record["id"]), record


def _text(paper: dict[str, Any]) -> str:
    sections = paper["full_text"]
    if isinstance(sections, dict):
        pairs = list(zip(sections["section_name"], sections["paragraphs"], strict=True))
    else:
        pairs = [(section["section_name"], section["paragraphs"]) for section in sections]
    parts = [paper.get("abstract", "")]
    for name, paragraphs in pairs:
        parts += [name or "", *paragraphs]
    return "\n\n".join(part.strip() for part in parts if part.strip())


def _questions(paper: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Questions with their annotators' answers; columns on the hub, objects in the release."""
    questions = paper["qas"]
    if isinstance(questions, dict):
        for question, answers in zip(questions["question"], questions["answers"], strict=True):
            yield question, list(answers["answer"])
    elif isinstance(questions, list):
        for entry in questions:
            yield entry["question"], [answer["answer"] for answer in entry["answers"]]
    else:
        raise DataError(f"questions are {type(questions).__name__}; a list or columns are needed")


def _answer(answer: dict[str, Any]) -> str:
    if answer["unanswerable"]:
        return ""
    if answer["extractive_spans"]:
        return ", ".join(answer["extractive_spans"])
    if answer["free_form_answer"]:
        return str(answer["free_form_answer"])
    return "Yes" if answer["yes_no"] else "No"


def _spans(quotes: list[str], text: str) -> tuple[Evidence, ...]:
    found = [(text.find(quote), len(quote)) for quote in quotes]
    return tuple(Evidence(0, start, start + size) for start, size in found if start >= 0)
