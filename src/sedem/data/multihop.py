"""HotpotQA, 2WikiMultiHopQA and MuSiQue: paragraph contexts with gold paragraph labels.

Each paragraph becomes a document whose first line is its title. A gold paragraph is evidence as a
whole, so all blocks of a long one are labelled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sedem.contracts import Document
from sedem.data.examples import Example, ExampleSet, distinct_names, whole
from sedem.data.files import read_records
from sedem.errors import DataError

Paragraph = tuple[str, list[str]]
"""A title and its sentences."""


def load_hotpot(path: Path, *, records: slice = slice(None)) -> ExampleSet:
    """HotpotQA, distractor setting, native or hub schema. Sentences already begin with a space."""
    return _load("hotpotqa", path, records, separator="")


def load_2wiki(path: Path, *, records: slice = slice(None)) -> ExampleSet:
    """2WikiMultiHopQA in any of its layouts. Sentences are joined by a space."""
    return _load("2wikimultihopqa", path, records, separator=" ")


def load_musique(path: Path, *, records: slice = slice(None)) -> ExampleSet:
    """MuSiQue-Ans; every alias of the answer is accepted."""
    result = ExampleSet("musique", [])
    for record in read_records(path)[records]:
        paragraphs = [(p["title"], [p["paragraph_text"]]) for p in record["paragraphs"]]
        gold = [i for i, p in enumerate(record["paragraphs"]) if p["is_supporting"]]
        answers = [record["answer"], *record.get("answer_aliases", [])]
        _add(result, record["id"], paragraphs, gold, record["question"], answers, "")
    return result


def _load(name: str, path: Path, records: slice, separator: str) -> ExampleSet:
    result = ExampleSet(name, [])
    for record in read_records(path)[records]:
        paragraphs = _paragraphs(record["context"], path)
        titles = {title for title, _ in _facts(record["supporting_facts"])}
        gold = [i for i, (title, _) in enumerate(paragraphs) if title in titles]
        _add(
            result,
            str(record.get("_id") or record["id"]),
            paragraphs,
            gold,
            record["question"],
            [record["answer"]],
            separator,
        )
    return result


def _add(
    result: ExampleSet,
    identity: str,
    paragraphs: Sequence[Paragraph],
    gold: Sequence[int],
    question: str,
    answers: Sequence[str],
    separator: str,
) -> None:
    if not paragraphs:
        result.dropped["no context"] += 1
        return
    if not gold:
        result.dropped["no gold paragraph in the context"] += 1
        return
    names = distinct_names([title for title, _ in paragraphs])
    documents = tuple(
        Document(name, f"{title}\n{separator.join(sentences).strip()}")
        for name, (title, sentences) in zip(names, paragraphs, strict=True)
    )
    evidence = tuple(whole(index, documents) for index in gold)
    distinct = tuple(dict.fromkeys(a.strip() for a in answers if a.strip()))
    result.examples.append(Example(identity, documents, question, distinct, evidence))


def _paragraphs(context: Any, path: Path) -> list[Paragraph]:
    """The four shapes of a context: JSON string, pairs, objects, or columns."""
    if isinstance(context, str):
        context = json.loads(context)
    if isinstance(context, dict):
        bodies = context.get("sentences", context.get("content"))
        if bodies is not None and "title" in context:
            return list(zip(context["title"], bodies, strict=True))
    elif isinstance(context, list):
        if all(isinstance(entry, dict) for entry in context):
            return [(e["title"], e.get("sentences", e.get("content"))) for e in context]
        return [(title, sentences) for title, sentences in context]
    raise DataError(
        f"'{path}': a context is neither pairs, objects nor columns of title and sentences"
    )


def _facts(facts: Any) -> list[tuple[str, int]]:
    if isinstance(facts, str):
        facts = json.loads(facts)
    if isinstance(facts, dict):
        return list(zip(facts["title"], facts["sent_id"], strict=True))
    return [(title, sentence) for title, sentence in facts]
