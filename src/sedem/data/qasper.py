"""QASPER: questions on whole papers; evidence paragraphs are found again in the paper's text.

Not every question can be used. The rule has a name, `drop`; what it leaves out is counted:

- "no-text-evidence" (default): questions that every annotator calls unanswerable, and questions
  none of whose evidence is text of the paper (evidence in figures and tables begins with
  "FLOAT SELECTED").
- "unanswerable": the former alone; a question without evidence in the text has no labels.
- "none": nothing; "Unanswerable" is then the answer of annotators who say so.

SeDeM counts 2,322 and 945 questions, fewer than the set has, and does not say which it leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

from sedem.data.examples import NO_CONTEXT, Evidence, Example, ExampleSet, distinct_answers
from sedem.data.record_validation import entries, shown, text, within
from sedem.data.records import Record, Records
from sedem.errors import ConfigError
from sedem.types import Document

Drop = Literal["no-text-evidence", "unanswerable", "none"]

FLOAT = "FLOAT SELECTED"
UNANSWERABLE = "Unanswerable"
"""The answer to what a paper does not answer, in the words of the set's own scorer."""


def read(records: Records, *, drop: Drop = "no-text-evidence") -> ExampleSet:
    """QASPER, a paper a record.

    Args:
        records: the papers.
        drop: which questions are left out.

    Raises:
        ConfigError: there is no such rule.
    """
    if drop not in get_args(Drop):
        raise ConfigError(f"drop is '{drop}'; it can be {', '.join(get_args(Drop))}")
    result = ExampleSet("qasper", [])
    for place, paper in records:
        identity = text(paper, "id", place)
        place = f"{place} (id '{identity}')"
        with within(place, "full_text"):
            body = _text(paper)
        with within(place, "qas"):
            questions = list(_questions(paper["qas"]))
        if not body:
            for number in range(len(questions)):
                result.drop(NO_CONTEXT, f"{identity}-{number}")
            continue
        with within(place):
            document = Document(paper.get("title") or identity, body)
        for number, (question, answers) in enumerate(questions):
            with within(f"{place}, question {number}"):
                _take(result, f"{identity}-{number}", document, question, answers, drop)
    return result


def papers(records: Records) -> Records:
    """Papers one at a time, from the hub's rows or from the release's {paper id: paper}."""
    for place, record in records:
        if "full_text" in record:
            yield place, record
            continue
        for identity, paper in record.items():
            with within(place, identity):
                whole = {"id": identity, **dict(paper)}
            yield place, whole


def _take(
    result: ExampleSet,
    identity: str,
    document: Document,
    question: str,
    answers: list[Record],
    drop: Drop,
) -> None:
    given = [(answer, words) for answer in answers if (words := _answer(answer)) is not None]
    if not given:
        result.drop("no answer", identity)
        return
    texts = [words for _, words in given]
    quotes = {
        quote.strip()
        for answer, _ in given
        for quote in answer.get("evidence") or []
        if quote.strip() and not quote.startswith(FLOAT)
    }
    spans = _spans(sorted(quotes), document.text)
    reason = ""
    if not any(texts):
        reason = "unanswerable"
    elif not spans:
        reason = "no evidence in the text"
    if reason and (drop == "no-text-evidence" or drop == reason):
        result.drop(reason, identity)
        return
    if drop == "none":
        texts = [words or UNANSWERABLE for words in texts]
    if not result.wants(identity, question, texts):
        return
    if reason:
        result.noted[f"{reason}, kept"] += 1
    if len(given) < len(answers):
        result.noted["annotation without an answer left out"] += 1
    if spans and len(spans) < len(quotes):
        result.noted["evidence not found again"] += 1
    result.examples.append(Example(identity, (document,), question, distinct_answers(texts), spans))


def _text(paper: Record) -> str:
    sections = paper["full_text"]
    if isinstance(sections, dict):
        pairs = list(zip(sections["section_name"], sections["paragraphs"], strict=True))
    else:
        pairs = [(section["section_name"], section["paragraphs"]) for section in sections]
    parts = [paper.get("abstract") or ""]
    for name, paragraphs in pairs:
        parts += [name or "", *paragraphs]
    return "\n\n".join(part.strip() for part in parts if part.strip())


def _questions(questions: Any) -> Iterator[tuple[str, list[Record]]]:
    """Questions with their annotators' answers; columns on the hub, objects in the release."""
    if isinstance(questions, dict):
        for question, answers in zip(questions["question"], questions["answers"], strict=True):
            yield question, list(answers["answer"])
    elif isinstance(questions, list):
        for entry in questions:
            yield entry["question"], [a["answer"] for a in entries(entry, "answers", "a question")]
    else:
        raise ValueError(f"a list or columns are needed, got {shown(questions)}")


def _answer(answer: Record) -> str | None:
    """An annotator's answer; empty where the paper has none, None where the annotation is empty."""
    if answer["unanswerable"]:
        return ""
    if answer["extractive_spans"]:
        return ", ".join(answer["extractive_spans"])
    if answer["free_form_answer"]:
        return str(answer["free_form_answer"])
    if answer["yes_no"] is None:
        return None
    return "Yes" if answer["yes_no"] else "No"


def _spans(quotes: list[str], text: str) -> tuple[Evidence, ...]:
    found = [(text.find(quote), len(quote)) for quote in quotes]
    return tuple(Evidence(0, start, start + size) for start, size in found if start >= 0)
