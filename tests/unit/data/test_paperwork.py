"""Generated paperwork: every question has its answer in the evidence, and splits share no value."""

from __future__ import annotations

import random
import re

import pytest

from sedem_lab.data.invented import Split, split_of
from sedem_lab.data.paperwork import MAKERS, PAPERS, PAPERWORK, REAL, SMALL, make, templates

FILLERS = [f"A real paragraph about harbour {number}. " * 12 for number in range(9)]


@pytest.mark.parametrize("split", ["train", "evaluation"])
def test_an_answer_stands_in_the_evidence_that_the_question_asks_for(split: Split) -> None:
    for example in PAPERWORK.generate(split, 300, FILLERS).examples:
        assert len(example.documents) == PAPERS + REAL
        (evidence,) = example.evidence
        line = example.documents[evidence.document].text[evidence.start : evidence.end]
        assert example.answers[0] in line and "\n" not in line
        assert "{" not in example.question + line


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
    for example in PAPERWORK.generate("evaluation", 300, FILLERS).examples:
        (evidence,) = example.evidence
        text = example.documents[evidence.document].text
        assert text[evidence.start : evidence.end] == f"Sold: {example.answers[0]} pieces."
        before += text.index(example.answers[0]) < evidence.start
    assert before > 3
