from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from unit.data.conftest import Write

from sedem_lab.data.examples import Example
from sedem_lab.data.question_sets import open_examples

load = partial(open_examples, schema="qasper")

IDENTITY = "1909.00694"
SEED = "Method paragraph using seed lexicon"


def evidence_texts(example: Example) -> list[str]:
    return [example.documents[0].text[span.start : span.end] for span in example.evidence]


@pytest.fixture
def release(fixtures: Path) -> dict[str, Any]:
    """One paper with four questions, in the release schema."""
    return dict(json.loads((fixtures / "qasper.json").read_text(encoding="utf-8")))


def test_a_paper_and_answers_of_every_kind_are_read(fixtures: Path) -> None:
    result = load(fixtures / "qasper.json")
    document = result.examples[0].documents[0]
    assert document.name.startswith("Minimally Supervised Learning")
    # Abstract, headings and paragraphs.
    assert document.text == (
        "This is the abstract of the paper\n\nIntroduction\n\nA short paragraph\n\n"
        "Another intro paragraph\n\nRelated Work\n\nShorter paragraph\n\nProposed Method\n\n"
        f"Proposed Method ::: Polarity Function\n\n{SEED}\n\nConclusion\n\nConclusion paragraph"
    )
    assert [(e.id, e.question, e.answers) for e in result.examples] == [
        (f"{IDENTITY}-0", "What is the seed lexicon?", ("a vocabulary", "using seed lexicon")),
        (f"{IDENTITY}-1", "Are there three?", ("Yes",)),
        (f"{IDENTITY}-3", "Is this extractive?", ("Conclusion paragraph",)),
    ]
    assert [evidence_texts(example) for example in result.examples] == [[SEED]] * 3
    assert (result.dropped, result.noted) == ({"unanswerable": 1}, {})


def test_several_spans_are_one_answer(write: Write, release: dict[str, Any]) -> None:
    answer = release[IDENTITY]["qas"][3]["answers"][0]["answer"]
    answer["extractive_spans"] = ["Shorter", "paragraph"]
    release[IDENTITY]["qas"][1]["answers"][0]["answer"]["yes_no"] = False
    answers = [e.answers for e in load(write("papers.json", release)).examples]
    assert answers[1:] == [("No",), ("Shorter, paragraph",)]


def test_records_are_papers_and_one_without_a_title_goes_by_its_id(
    write: Write, release: dict[str, Any]
) -> None:
    papers = {f"paper {number}": {**release[IDENTITY], "title": ""} for number in range(3)}
    result = load(write("papers.json", papers), records="1:2")
    assert [e.id for e in result.examples] == ["paper 1-0", "paper 1-1", "paper 1-3"]
    assert {e.documents[0].name for e in result.examples} == {"paper 1"}


def test_questions_without_evidence_in_the_text_are_dropped_and_counted(
    write: Write, release: dict[str, Any]
) -> None:
    first, second, _, fourth = (qa["answers"][0]["answer"] for qa in release[IDENTITY]["qas"])
    first["evidence"] = ["FLOAT SELECTED: Table 1: Results"]
    release[IDENTITY]["qas"][0]["answers"].pop()
    second["evidence"] = ["A paragraph of another paper"]
    fourth["evidence"] = [SEED, "A paragraph of another paper", "FLOAT SELECTED: Figure 2", ""]
    result = load(write("papers.json", release))
    assert [e.id for e in result.examples] == [f"{IDENTITY}-3"]
    assert evidence_texts(result.examples[0]) == [SEED]
    assert result.dropped == {"unanswerable": 1, "no evidence in the text": 2}
    assert result.noted == {"evidence not found again": 1}


def test_an_annotation_without_an_answer_is_no_no(write: Write, release: dict[str, Any]) -> None:
    first, second, _, _ = (qa["answers"] for qa in release[IDENTITY]["qas"])
    empty = {
        "unanswerable": False,
        "extractive_spans": [],
        "free_form_answer": "",
        "yes_no": None,
        "evidence": ["Shorter paragraph"],
    }
    first.append({"answer": empty})
    second[:] = [{"answer": empty}, {"answer": empty}]
    for drop in ("no-text-evidence", "none"):
        result = load(write("papers.json", release), drop=drop)
        assert result.examples[0].answers == ("a vocabulary", "using seed lexicon")
        assert evidence_texts(result.examples[0]) == [SEED]
        assert result.dropped_ids["no answer"] == [f"{IDENTITY}-1"]
        assert result.noted["annotation without an answer left out"] == 1


def test_a_paper_without_text_is_dropped_with_its_questions(
    fixtures: Path, write: Write, release: dict[str, Any]
) -> None:
    empty = {**release[IDENTITY], "abstract": " ", "full_text": []}
    for drop in ("no-text-evidence", "none"):
        result = load(write("papers.json", {"empty": empty, **release}), drop=drop)
        assert result.examples == load(fixtures / "qasper.json", drop=drop).examples
        assert result.dropped["no context"] == 4
        assert result.dropped_ids["no context"] == ["empty-0", "empty-1", "empty-2"]


@pytest.mark.parametrize(
    ("drop", "kept", "dropped", "noted"),
    [
        ("unanswerable", [0, 1, 3], {"unanswerable": 1}, {"no evidence in the text, kept": 1}),
        ("none", [0, 1, 2, 3], {}, {"no evidence in the text, kept": 1, "unanswerable, kept": 1}),
    ],
)
def test_the_rule_of_what_is_dropped_has_a_name(
    write: Write,
    release: dict[str, Any],
    drop: str,
    kept: list[int],
    dropped: dict[str, int],
    noted: dict[str, int],
) -> None:
    release[IDENTITY]["qas"][1]["answers"][0]["answer"]["evidence"] = ["FLOAT SELECTED: Table 1"]
    result = load(write("papers.json", release), drop=drop)
    assert [e.id for e in result.examples] == [f"{IDENTITY}-{number}" for number in kept]
    assert (result.dropped, result.noted) == (dropped, noted)
    if drop == "none":
        assert result.examples[2].answers == ("Unanswerable",)
        assert [len(e.evidence) for e in result.examples] == [1, 0, 1, 1]
