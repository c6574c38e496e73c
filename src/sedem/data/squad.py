"""SQuAD v1.1 as a long-context set, and COVID-QA as one of long papers.

SQuAD asks about one paragraph. Here that paragraph stands among distractors, half of them from the
same article, in a seeded order; the paragraph's evidence is the span of its first answer.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

from sedem.contracts import Document
from sedem.data.examples import Evidence, Example, ExampleSet, distinct_names
from sedem.data.files import read_json
from sedem.errors import DataError


def load(
    path: Path, *, records: slice = slice(None), distractors: int = 9, seed: int = 0
) -> ExampleSet:
    """SQuAD in its native schema, each gold paragraph among distractors.

    Args:
        path: the JSON file.
        records: which articles.
        distractors: paragraphs beside the gold one; (distractors + 1) // 2 of its own article.
        seed: decides distractors and order, question by question.
    """
    articles = [article for article in _articles(path)[records] if article["paragraphs"]]
    titles = distinct_names([a.get("title") or f"article {n}" for n, a in enumerate(articles)])
    pool = [
        [
            Document(f"{title} §{p + 1}", paragraph["context"])
            for p, paragraph in enumerate(article["paragraphs"])
        ]
        for title, article in zip(titles, articles, strict=True)
    ]
    result = ExampleSet("squad", [])
    for a, article in enumerate(articles):
        for p, paragraph in enumerate(article["paragraphs"]):
            for qa in paragraph["qas"]:
                found = _answers(qa, paragraph["context"], result)
                if found is None:
                    continue
                answers, start = found
                documents, gold = _among_distractors(pool, a, p, distractors, f"{seed}:{qa['id']}")
                evidence = Evidence(gold, start, start + len(answers[0]))
                result.examples.append(
                    Example(str(qa["id"]), documents, qa["question"], answers, (evidence,))
                )
    return result


def load_papers(path: Path, *, records: slice = slice(None)) -> ExampleSet:
    """COVID-QA: one whole paper a context, its answers' spans the evidence."""
    result = ExampleSet("covidqa", [])
    for article in _articles(path)[records]:
        for paragraph in article["paragraphs"]:
            document = Document(f"paper {paragraph['document_id']}", paragraph["context"])
            for qa in paragraph["qas"]:
                found = _answers(qa, paragraph["context"], result)
                if found is None:
                    continue
                answers, start = found
                evidence = Evidence(0, start, start + len(answers[0]))
                result.examples.append(
                    Example(str(qa["id"]), (document,), qa["question"], answers, (evidence,))
                )
    return result


def _articles(path: Path) -> list[dict[str, Any]]:
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("data"), list):
        raise DataError(f"'{path}' is not in SQuAD's schema: it has no list 'data'")
    return list(content["data"])


def _answers(
    qa: dict[str, Any], context: str, result: ExampleSet
) -> tuple[tuple[str, ...], int] | None:
    """Distinct answers and where the first one stands; None, counted, if it stands nowhere."""
    if qa.get("is_impossible") or not qa["answers"]:
        result.dropped["unanswerable"] += 1
        return None
    first = qa["answers"][0]["text"].strip()
    start = _locate(first, qa["answers"][0]["answer_start"], context, result.noted)
    if start is None:
        result.dropped["answer not in its context"] += 1
        return None
    distinct = dict.fromkeys(answer["text"].strip() for answer in qa["answers"])
    return tuple(answer for answer in distinct if answer), start


def _locate(text: str, given: int, context: str, noted: Counter[str]) -> int | None:
    """Where an answer stands; published offsets are off by a little in COVID-QA."""
    if not text:
        return None
    if context.startswith(text, given):
        return given
    places = []
    at = context.find(text)
    while at >= 0:
        places.append(at)
        at = context.find(text, at + 1)
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
