from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from unit.data.conftest import Write

from sedem_lab.data.examples import Example
from sedem_lab.data.question_sets import open_examples

load = partial(open_examples, schema="squad")
load_papers = partial(open_examples, schema="covidqa")


def gold_text(example: Example) -> str:
    span = example.evidence[0]
    return example.documents[span.document].text[span.start : span.end]


def article(title: str, texts: list[str]) -> dict[str, Any]:
    """An article whose every paragraph asks for its first word."""
    return {
        "title": title,
        "paragraphs": [
            {
                "context": text,
                "qas": [
                    {
                        "id": f"{title}-{number}",
                        "question": "Which word is first?",
                        "answers": [{"text": text.split()[0], "answer_start": 0}],
                    }
                ],
            }
            for number, text in enumerate(texts)
        ],
    }


def test_every_question_stands_among_ten_paragraphs_half_of_its_own_article(fixtures: Path) -> None:
    result = load(fixtures / "squad.json")
    assert len(result.examples) == 36
    assert not result.dropped and not result.noted
    for example in result.examples:
        assert len({document.text for document in example.documents}) == 10
        assert gold_text(example) == example.answers[0]
        titles = Counter(document.name.split(" §")[0] for document in example.documents)
        own = example.documents[example.evidence[0].document].name.split(" §")[0]
        assert titles[own] == 6  # the gold one and (9 + 1) // 2 others
    assert len({example.evidence[0].document for example in result.examples}) == 10


def test_a_seed_decides_distractors_and_order(fixtures: Path) -> None:
    path = fixtures / "squad.json"
    for a, b in zip(load(path).examples, load(path, seed=1).examples, strict=True):
        assert a.documents != b.documents
        assert a.question == b.question


def test_the_context_of_a_question_never_changes(fixtures: Path) -> None:
    # Published numbers were measured on these contexts, in this order.
    example = load(fixtures / "squad.json").examples[0]
    assert example.id == "56e748a200c9c71400d76f37"
    assert example.question == "What factor may make a teacher's role vary?"
    assert example.answers == ("cultures",)
    # The place published for "cultures" in its paragraph.
    assert (example.evidence[0].start, example.evidence[0].end) == (32, 40)
    assert [document.name for document in example.documents] == [
        "Teacher §6",
        "Construction §6",
        "Teacher §2",
        "Oxygen §5",
        "Teacher §4",
        "Teacher §1",
        "Teacher §5",
        "Teacher §3",
        "Construction §3",
        "Oxygen §6",
    ]


def test_records_are_articles(fixtures: Path) -> None:
    result = load(fixtures / "squad.json", records="1:3", distractors=3)
    names = {d.name.split(" §")[0] for e in result.examples for d in e.documents}
    assert names == {"Oxygen", "Construction"}
    assert all(len(e.documents) == 4 for e in result.examples)


@pytest.mark.parametrize(
    ("articles", "texts"),
    [
        ([("Ada", ["one a", "two b"]), ("Bo", ["three c"])], ["one a", "three c", "two b"]),
        ([("Ada", ["one a", "two b", "three c"])], ["one a", "three c", "two b"]),
        ([("Ada", ["one a"]), ("Bo", []), ("Cy", ["two b"])], ["one a", "two b"]),
        # Articles of one title keep their paragraphs apart.
        ([("Ada", ["one a", "two b"]), ("Ada", ["four d"])], ["four d", "one a", "two b"]),
    ],
)
def test_few_paragraphs_are_all_used(
    write: Write, articles: list[tuple[str, list[str]]], texts: list[str]
) -> None:
    content = {"data": [article(*given) for given in articles]}
    for number, entry in enumerate(content["data"]):
        for paragraph in entry["paragraphs"]:
            paragraph["qas"][0]["id"] += f" of article {number}"
    examples = load(write("few.json", content)).examples
    assert [sorted(d.text for d in e.documents) for e in examples] == [texts] * len(texts)


def test_an_empty_paragraph_is_left_out_with_its_questions(write: Write) -> None:
    content = {"data": [article("Ada", ["one a", "two b"]), article("Bo", ["three c"])]}
    blank = article("Ada", ["two b"])["paragraphs"][0] | {"context": " \n"}
    blank["qas"] = [{**blank["qas"][0], "id": f"lost-{number}"} for number in range(4)]
    whole = load(write("whole.json", content))
    content["data"][0]["paragraphs"].append(blank)
    content["data"].append({"title": "Cy", "paragraphs": [blank]})
    # It takes no number from the others.
    content["data"][0]["paragraphs"].insert(0, blank)
    result = load(write("blank.json", content))
    assert [e.answers for e in result.examples] == [e.answers for e in whole.examples]
    names = {d.name for d in result.examples[0].documents}
    assert names == {"Ada §2", "Ada §3", "Bo §1"}
    assert result.dropped == {"no context": 12}
    assert result.dropped_ids == {"no context": ["lost-0", "lost-1", "lost-2"]}
    for entry in content["data"]:
        for number, paragraph in enumerate(entry["paragraphs"]):
            paragraph["document_id"] = number
    papers = load_papers(write("papers.json", content))
    assert [e.answers for e in papers.examples] == [("one",), ("two",), ("three",)]
    assert papers.dropped == {"no context": 12}


def test_questions_without_an_answer_are_dropped_and_counted(write: Write) -> None:
    content = {"data": [article("Ada", ["one a", "two b", "three c", "four d"])]}
    first, second, third, _ = (p["qas"][0] for p in content["data"][0]["paragraphs"])
    first["is_impossible"] = True
    second["answers"] = []
    third["answers"] = [{"text": "seven", "answer_start": 0}]
    result = load(write("dropped.json", content))
    assert [example.id for example in result.examples] == ["Ada-3"]
    assert result.dropped == {"unanswerable": 2, "answer not in its context": 1}
    assert result.dropped_ids == {
        "unanswerable": ["Ada-0", "Ada-1"],
        "answer not in its context": ["Ada-2"],
    }


def test_an_offset_that_is_off_is_repaired_to_the_nearest_place(write: Write) -> None:
    content = {"data": [article("Ada", ["word a word b word"])]}
    # Answers lose white space and duplicates.
    content["data"][0]["paragraphs"][0]["qas"][0]["answers"] = [
        {"text": text, "answer_start": 9} for text in (" word", "b", "word", " ")
    ]
    result = load(write("off.json", content))
    assert result.examples[0].evidence[0].start == 7
    assert result.examples[0].answers == ("word", "b")
    assert result.noted == {"answer offset repaired": 1}


def test_papers_are_whole_contexts_with_repaired_offsets(fixtures: Path, write: Write) -> None:
    native = json.loads((fixtures / "covidqa.json").read_text(encoding="utf-8"))
    rows = [
        {**qa, "document_id": paragraph["document_id"], "context": paragraph["context"]}
        for article in native["data"]
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
    ]
    for path in (fixtures / "covidqa.json", write("rows.jsonl", rows)):
        result = open_examples(path)
        assert (result.name, result.noted) == ("covidqa", {"answer offset repaired": 4})
        assert all(gold_text(e) == e.answers[0] for e in result.examples)
        names = [e.documents[0].name for e in result.examples]
        assert names == ["paper 2684"] * 4 + ["paper 630"] * 2
        assert result.examples[4:] == open_examples(path, records="1:").examples
