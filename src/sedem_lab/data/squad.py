"""SQuAD v1.1 as a long-context set, and COVID-QA as a set of long papers.

SQuAD asks about one paragraph. Here, that paragraph is shuffled among distractors, half of them
from the same article. The evidence is the span of the first answer.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

from sedem.config import Whole, WholeFrom0
from sedem.errors import DataError
from sedem.types import Document
from sedem_lab.data.examples import (
    NO_CONTEXT,
    Evidence,
    Example,
    ExampleSet,
    distinct_answers,
    distinct_names,
)
from sedem_lab.data.invented import Split
from sedem_lab.data.records import FromColumns, Id, Record, RecordModel, Records, Text, within
from sedem_lab.data.swapping import NOTHING, swapped


class _Answer(RecordModel):
    text: Text
    answer_start: Whole


class _SquadQuestion(RecordModel):
    id: Id
    question: Text
    answers: Annotated[list[_Answer], FromColumns]
    is_impossible: bool | None = None


class _Paragraph(RecordModel):
    context: Text
    qas: list[_SquadQuestion]


class _Article(RecordModel):
    title: Any = None
    paragraphs: list[_Paragraph]


class _PaperParagraph(_Paragraph):
    document_id: Any


class _CovidPaper(RecordModel):
    paragraphs: list[_PaperParagraph]


_P = TypeVar("_P", bound=_Paragraph)


def read(
    records: Records,
    *,
    distractors: WholeFrom0 = 9,
    seed: Whole = 0,
    swap: Literal[True, False, "train"] = False,
) -> ExampleSet:
    """SQuAD, each gold paragraph among distractors.

    Args:
        distractors: paragraphs besides the gold one; (distractors + 1) // 2 from its own article.
        swap: replace every answer by an invented one, "train" with names of the training split;
            drop questions where that is not possible.
    """
    result = ExampleSet("squad", [])
    split: Split = "train" if swap == "train" else "evaluation"
    articles: list[tuple[str, Any, dict[int, _Paragraph]]] = []
    for place, record in records:
        article = _Article.from_record(record, place)
        filled = _filled(article.paragraphs, result)
        if filled:
            articles.append((place, article.title, filled))
    titles = distinct_names(
        [str(title or f"article {n}") for n, (_, title, _) in enumerate(articles)]
    )
    pool = []
    for name, (place, _, filled) in zip(titles, articles, strict=True):
        with within(place):
            pool.append([Document(f"{name} §{n}", p.context) for n, p in filled.items()])
    for a, (_, _, filled) in enumerate(articles):
        for p, paragraph in enumerate(filled.values()):
            for identity, question, answers, start in _questions(paragraph, result):
                documents, gold = _among_distractors(pool, a, p, distractors, f"{seed}:{identity}")
                evidence = Evidence(gold, start, start + len(answers[0]))
                example = Example(identity, documents, question, answers, (evidence,))
                if (own := swapped(example, split) if swap else example) is None:
                    result.drop(NOTHING, identity)
                else:
                    result.examples.append(own)
    return result


def read_papers(records: Records) -> ExampleSet:
    """COVID-QA: the context is one whole paper, the evidence the spans of the answers."""
    result = ExampleSet("covidqa", [])
    for place, record in records:
        paper = _CovidPaper.from_record(record, place)
        for paragraph in _filled(paper.paragraphs, result).values():
            with within(place):
                document = Document(f"paper {paragraph.document_id}", paragraph.context)
            for identity, question, answers, start in _questions(paragraph, result):
                evidence = Evidence(0, start, start + len(answers[0]))
                result.examples.append(
                    Example(identity, (document,), question, answers, (evidence,))
                )
    return result


def articles(records: Records) -> Records:
    """Articles one at a time: from the native object, or from the hub's flat rows.

    Consecutive rows with the same title (or document number) form an article; those with the same
    context form a paragraph.
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
            paragraphs = gathered["paragraphs"]
            if not paragraphs or paragraphs[-1]["context"] != record["context"]:
                paragraphs.append({**record, "qas": []})
            paragraphs[-1]["qas"].append(record)
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


def _filled(paragraphs: list[_P], result: ExampleSet) -> dict[int, _P]:
    """Paragraphs with text, numbered from 1; questions about empty ones are dropped."""
    filled = {}
    for number, paragraph in enumerate(paragraphs, start=1):
        if paragraph.context.strip():
            filled[number] = paragraph
        else:
            for question in paragraph.qas:
                result.drop(NO_CONTEXT, question.id)
    return filled


def _questions(
    paragraph: _Paragraph, result: ExampleSet
) -> Iterator[tuple[str, str, tuple[str, ...], int]]:
    """Usable questions of a paragraph: id, question, distinct answers, start of the first one."""
    for given in paragraph.qas:
        if given.is_impossible or not given.answers:
            result.drop("unanswerable", given.id)
            continue
        answers = [answer.text for answer in given.answers]
        words, start = answers[0].strip(), given.answers[0].answer_start
        found = re.finditer(f"(?={re.escape(words)})", paragraph.context) if words else ()
        places = [place.start() for place in found]
        if not places:
            result.drop("answer not in its context", given.id)
            continue
        if not paragraph.context.startswith(words, start):
            # The published offsets of COVID-QA are slightly off.
            result.noted["answer offset repaired"] += 1
            _, start = min((abs(place - start), place) for place in places)
        if result.wants(given.id, given.question, answers):
            yield given.id, given.question, distinct_answers(answers), start


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
