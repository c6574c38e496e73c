"""Generated paperwork: every question has its answer in the evidence, and splits share no value."""

from __future__ import annotations

import random
import re

import pytest

from sedem.errors import DataError
from sedem_lab.data.facts import Split, split_of
from sedem_lab.data.paperwork import MAKERS, PAPERS, REAL, SMALL, make, read, templates
from sedem_lab.data.records import Records


def fillers(count: int = 9) -> Records:
    text = "\n".join(f"A real paragraph about harbour {number}. " * 12 for number in range(count))
    return iter([("here", {"title": "Harbours", "text": text})])


@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_an_answer_stands_in_the_evidence_that_the_question_asks_for(split: Split) -> None:
    found = read(fillers(), split=split, count=300).examples
    for example in found:
        assert len(example.documents) == PAPERS + REAL
        (evidence,) = example.evidence
        line = example.documents[evidence.document].text[evidence.start : evidence.end]
        assert example.answers[0] in line and "\n" not in line
        assert "{" not in example.question + line
    assert found == read(fillers(), split=split, count=300).examples


def test_every_field_is_in_every_text_and_every_question_fits() -> None:
    for kind in templates():
        fields = set(kind["fields"])
        assert set(kind["fields"].values()) <= MAKERS.keys()
        assert kind["questions"].keys() <= fields
        for text in kind["texts"]:
            assert set(re.findall(r"\{(\w+)\}", text)) == fields, kind["kind"]
        for field, questions in kind["questions"].items():
            for question in questions:
                assert set(re.findall(r"\{(\w+)\}", question)) <= fields - {field}


@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_training_and_evaluation_share_no_name_or_number(split: Split) -> None:
    rng = random.Random(0)
    for of_type in MAKERS.keys() - set(SMALL):
        values = {make(of_type, split, rng) for _ in range(200)}
        assert len(values) > 100 and {split_of(value) for value in values} == {split}, of_type


def test_too_few_paragraphs_beside_them_are_refused() -> None:
    with pytest.raises(DataError, match=f"a context needs {REAL} filler paragraphs, 2 are given"):
        read(fillers(2), count=1)


def test_the_evidence_is_where_the_field_stands_though_its_value_is_part_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = {
        "kind": "note",
        "fields": {"date": "date", "count": "count"},
        "texts": ["Made on {date}.\nSold: {count} pieces."],
        "questions": {"count": ["How many pieces were sold?"]},
    }
    monkeypatch.setattr("sedem_lab.data.paperwork.templates", lambda: [kind])
    before = 0
    for example in read(fillers(), count=300).examples:
        (evidence,) = example.evidence
        text = example.documents[evidence.document].text
        assert text[evidence.start : evidence.end] == f"Sold: {example.answers[0]} pieces."
        before += text.index(example.answers[0]) < evidence.start
    assert before > 3
