"""SQuAD v1.1 as a long-context set, and COVID-QA as one of long papers.

SQuAD asks about one paragraph. Here that paragraph stands among distractors, half of them from the
same article, in a seeded order; the paragraph's evidence is the span of its first answer.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

from sedem.data.examples import (
    NO_CONTEXT,
    Evidence,
    Example,
    ExampleSet,
    distinct_answers,
    distinct_names,
)
from sedem.data.record_validation import at_least, entries, number, text, within
from sedem.data.records import Record, Records
from sedem.errors import DataError
from sedem.types import Document, check_unicode


def read(records: Records, *, distractors: int = 9, seed: int = 0) -> ExampleSet:
    """SQuAD, each gold paragraph among distractors.

    Args:
        records: its articles.
        distractors: paragraphs beside the gold one; (distractors + 1) // 2 of its own article.
        seed: decides distractors and order, question by question.

    Raises:
        ConfigError: there cannot be so many distractors.
    """
    at_least(0, distractors=distractors)
    result = ExampleSet("squad", [])
    every = [(place, article, _with_text(article, place, result)) for place, article in records]
    articles = [(place, article, held) for place, article, held in every if held]
    titles = distinct_names(
        [str(a.get("title") or f"article {n}") for n, (_, a, _) in enumerate(articles)]
    )
    pool = []
    for title, (place, _, held) in zip(titles, articles, strict=True):
        with within(place):
            pool.append([Document(f"{title} §{n}", p["context"]) for n, p in held.items()])
    for a, (place, _, held) in enumerate(articles):
        for p, paragraph in enumerate(held.values()):
            for identity, question, answers, start in _questions(paragraph, place, result):
                documents, gold = _among_distractors(pool, a, p, distractors, f"{seed}:{identity}")
                evidence = Evidence(gold, start, start + len(answers[0]))
                result.examples.append(Example(identity, documents, question, answers, (evidence,)))
    return result


def read_papers(records: Records) -> ExampleSet:
    """COVID-QA: one whole paper a context, its answers' spans the evidence."""
    result = ExampleSet("covidqa", [])
    for place, article in records:
        for paragraph in _with_text(article, place, result).values():
            with within(place):
                document = Document(f"paper {paragraph['document_id']}", paragraph["context"])
            for identity, question, answers, start in _questions(paragraph, place, result):
                evidence = Evidence(0, start, start + len(answers[0]))
                result.examples.append(
                    Example(identity, (document,), question, answers, (evidence,))
                )
    return result


def articles(records: Records) -> Records:
    """Articles one at a time: from the native object, or from the hub's flat rows.

    Rows that follow each other with one title (or document number) are an article, those with one
    context a paragraph.
    """
    gathered: Record = {}
    first = ""
    for place, record in records:
        if "context" in record and "question" in record:
            if gathered and gathered["title"] != _title(record):
                yield first, gathered
                gathered = {}
            if not gathered:
                first, gathered = place, {"title": _title(record), "paragraphs": []}
            _take_row(gathered["paragraphs"], record, place)
        elif "paragraphs" in record:
            yield place, record
        elif isinstance(record.get("data"), list):
            for count, article in enumerate(record["data"], start=1):
                yield f"{place}, article {count}", article
        else:
            raise DataError(
                f"{place} is not in SQuAD's schema: it has no list 'data' and is no question"
            )
    if gathered:
        yield first, gathered


def _title(row: Record) -> Any:
    return row.get("title", row.get("document_id"))


def _take_row(paragraphs: list[Record], row: Record, place: str) -> None:
    """A flat row as the native schema has it: the last paragraph's, or the first of a new one."""
    with within(place, "answers"):
        answers = row["answers"]
        if isinstance(answers, dict):
            columns = zip(answers["text"], answers["answer_start"], strict=True)
            answers = [{"text": words, "answer_start": start} for words, start in columns]
    if not paragraphs or paragraphs[-1]["context"] != row["context"]:
        paragraphs.append({**row, "qas": []})
    paragraphs[-1]["qas"].append({**row, "answers": answers})


def _with_text(article: Record, place: str, result: ExampleSet) -> dict[int, Record]:
    """Paragraphs of an article by their numbers; the questions of empty ones are counted."""
    held = {}
    for count, paragraph in enumerate(entries(article, "paragraphs", place), start=1):
        if text(paragraph, "context", place, blank=True).strip():
            held[count] = paragraph
            continue
        for qa in entries(paragraph, "qas", place):
            result.drop(NO_CONTEXT, _identity(qa, place))
    return held


def _questions(
    paragraph: Record, place: str, result: ExampleSet
) -> Iterator[tuple[str, str, tuple[str, ...], int]]:
    """Usable questions of a paragraph: id, question, answers, where the first of them stands."""
    for qa in entries(paragraph, "qas", place):
        identity = _identity(qa, place)
        where = f"{place}, question '{identity}'"
        question = text(qa, "question", where, blank=True)
        found = _answers(qa, identity, paragraph["context"], where, result)
        if found is not None and result.wants(identity, question, found[0]):
            yield identity, question, *found


def _identity(qa: Record, place: str) -> str:
    with within(place):
        identity = str(qa["id"])
    check_unicode(identity, f"{place}, field 'id'")
    return identity


def _answers(
    qa: Record, identity: str, context: str, place: str, result: ExampleSet
) -> tuple[tuple[str, ...], int] | None:
    """Distinct answers and where the first one stands; None, counted, if it stands nowhere."""
    answers = entries(qa, "answers", place)
    if qa.get("is_impossible") or not answers:
        result.drop("unanswerable", identity)
        return None
    texts = [text(answer, "text", f"{place}, field 'answers'", blank=True) for answer in answers]
    given = number(answers[0], "answer_start", f"{place}, field 'answers'")
    start = _locate(texts[0].strip(), given, context, result.noted)
    if start is None:
        result.drop("answer not in its context", identity)
        return None
    return distinct_answers(texts), start


def _locate(words: str, given: int, context: str, noted: Counter[str]) -> int | None:
    """Where an answer stands; published offsets are off by a little in COVID-QA."""
    if not words:
        return None
    if context.startswith(words, given):
        return given
    places = []
    at = context.find(words)
    while at >= 0:
        places.append(at)
        at = context.find(words, at + 1)
    if not places:
        return None
    noted["answer offset repaired"] += 1
    return min(places, key=lambda place: abs(place - given))


def _among_distractors(
    pool: list[list[Document]], article: int, paragraph: int, distractors: int, seed: str
) -> tuple[tuple[Document, ...], int]:
    rng = random.Random(seed)
    gold = pool[article][paragraph]
    near = [d for p, d in enumerate(pool[article]) if p != paragraph]
    chosen = rng.sample(near, min((distractors + 1) // 2, len(near)))
    far = sum(map(len, pool)) - len(pool[article])
    wanted = min(distractors, len(chosen) + far)
    while len(chosen) < wanted:
        other = rng.randrange(len(pool))
        document = rng.choice(pool[other])
        if other != article and document not in chosen:
            chosen.append(document)
    context = [gold, *chosen]
    rng.shuffle(context)
    return tuple(context), context.index(gold)
