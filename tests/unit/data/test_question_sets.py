from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pytest
from unit.data.conftest import Write

from sedem.errors import ConfigError, DataError
from sedem_lab.data.question_sets import SETS, open_examples, parse_records, sniff

OWN = {
    "documents": [{"name": "a", "text": "The rent is 900 euros."}],
    "question": "What is the rent?",
    "answers": ["900 euros"],
}


def test_own_questions_are_found_out_even_compressed(tmp_path: Path, write: Write) -> None:
    path = write("own.jsonl", [{"id": "lease-1", **OWN}])
    packed = tmp_path / "own.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert sniff(path) == sniff(packed) == "own"
    assert open_examples(packed).examples == open_examples(path).examples


def test_unknown_schemas_are_refused_with_the_known_ones(fixtures: Path, write: Write) -> None:
    with pytest.raises(DataError, match=r"articles\.jsonl' fit no schema; .*own, squad, covidqa"):
        sniff(fixtures / "articles.jsonl")
    with pytest.raises(DataError, match="or give JSON lines of"):
        sniff(write("empty.jsonl", ""))
    with pytest.raises(ConfigError, match=f"no schema 'sqad'; known are {', '.join(SETS)}"):
        open_examples(fixtures / "squad.json", "sqad")


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        ("squad", {"distracters": 3}, r"squad\.json' as squad: .*'distracters'"),
        ("squad", {"distractors": 2.5}, "distractors is 2.5; input should be a valid int"),
        ("squad", {"distractors": -3}, "distractors is -3; input should be greater"),
        ("ruler-qa2", {"length": 0}, "length is 0; input should be greater than 0"),
        ("ruler-qa2", {"answer_tokens": -1}, "answer_tokens is -1; input should be greater"),
        ("cloze", {"count": -1}, "count is -1; input should be greater than 0"),
        ("exact-facts", {"count": 0}, "count is 0; input should be greater than 0"),
        ("qasper", {"drop": ["none"]}, r"drop is \['none'\]; input should be 'no-text-evidence'"),
    ],
)
def test_an_option_of_another_type_or_size_is_refused(
    fixtures: Path, schema: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_examples(fixtures / "squad.json", schema, **options)


HALF = "\ud83e"
UNICODE = r"is '\ud83e'; it must be Unicode text"
ANSWER = {"text": "one", "answer_start": 0}


def paragraph(**changes: Any) -> dict[str, Any]:
    qas = [{"id": "a", "question": "What?", "answers": [ANSWER], **changes}]
    return {"data": [{"paragraphs": [{"context": "one", "qas": qas}]}]}


def hotpot(**changes: Any) -> list[dict[str, Any]]:
    record = {"_id": "a", "question": "What?", "answer": "This", "supporting_facts": [["T", 0]]}
    return [{**record, "context": [["T", ["s"]]], **changes}]


def musique(**changes: Any) -> list[dict[str, Any]]:
    paragraphs = [{"title": "T", "paragraph_text": "t", "is_supporting": True}]
    return [{"id": "a", "question": "?", "answer": "This", "paragraphs": paragraphs, **changes}]


def paper(**changes: Any) -> dict[str, Any]:
    return {"p1": {"title": "A", "abstract": "A", "full_text": [], "qas": [], **changes}}


@pytest.mark.parametrize(
    ("schema", "content", "message"),
    [
        ("squad", {"data": [{"paragraphs": [{"context": "one"}]}]}, "[0].qas: field required"),
        ("squad", {"data": ["Ada"]}, "article 1: it is 'Ada'; input should be a valid dict"),
        ("squad", {"data": [{"title": "Ada"}]}, "article 1: paragraphs: field required"),
        ("squad", paragraph(answers=[{"text": "one"}]), "answers[0].answer_start: field required"),
        ("squad", paragraph(id=HALF), f"article 1: paragraphs[0].qas[0].id {UNICODE}"),
        ("covidqa", paragraph(), "article 1: paragraphs[0].document_id: field required"),
        ("hotpotqa", [{"_id": "a"}], "entry 1 (id 'a'): question: field required"),
        ("hotpotqa", [{"question": "?"}], "entry 1: _id: field required"),
        ("hotpotqa", hotpot(supporting_facts=None), "supporting_facts is None; input should be a"),
        ("hotpotqa", hotpot(context=[["T", [1]]]), "context[0].sentences[0] is 1; input should"),
        ("hotpotqa", hotpot(question=HALF), f"(id 'a'): question {UNICODE}"),
        ("hotpotqa", hotpot(answer=HALF), f"(id 'a'): answer {UNICODE}"),
        ("hotpotqa", hotpot(_id=HALF), f"_id {UNICODE}"),
        ("ruler-qa2", hotpot(context=[["T", ["s", HALF]]]), f"context[0].sentences[1] {UNICODE}"),
        (
            "2wikimultihopqa",
            hotpot(supporting_facts=[{"title": "T"}]),
            "[0].sent_id: field required",
        ),
        ("2wikimultihopqa", hotpot(context="[broken"), "context: the text is not JSON: Expecting"),
        (
            "2wikimultihopqa",
            hotpot(context={"title": ["T", "U"], "sentences": [["s"]]}),
            "(id 'a'): context: the columns title, sentences differ in length",
        ),
        ("2wikimultihopqa", hotpot(context={"0": "T"}), "context is {'0': 'T'}; input should be"),
        ("musique", musique(paragraphs=[{"title": "T"}]), "[0].paragraph_text: field required"),
        ("musique", musique(answer=None), "entry 1 (id 'a'): answer is None; input should be a"),
        ("qasper", {"p1": {"full_text": []}}, "(id 'p1'): qas: field required"),
        ("qasper", paper(title=HALF), f"(id 'p1'): title {UNICODE}"),
        ("qasper", paper(qas=[{"question": HALF, "answers": []}]), f"qas[0].question {UNICODE}"),
        (
            "qasper",
            paper(qas=[{"question": "?", "answers": [{"answer": {}}]}]),
            "(id 'p1'): qas[0].answers[0].answer.unanswerable: field required",
        ),
        ("cloze", [{"title": "A", "text": HALF}], f"entry 1: text {UNICODE}"),
        ("cloze", [{"title": "Ada"}], "entry 1: text: field required"),
        ("cloze", [{"text": "Ada"}], "entry 1: title: field required"),
        ("cloze", [{"title": 1, "text": "Ada"}], "entry 1: title is 1; input should be a valid"),
        ("squad", {"version": "1.1"}, "line 1 is not in SQuAD's schema: it has no list"),
        ("squad", {"data": {"title": "A"}}, "line 1 is not in SQuAD's schema: it has no list"),
        ("govreport", [{"report": "A", "summary": 3}], "entry 1: summary is 3; input should be"),
    ],
)
def test_a_malformed_record_is_named_with_its_field(
    write: Write, schema: str, content: Any, message: str
) -> None:
    with pytest.raises(DataError, match=rf"odd\.json', .*{re.escape(message)}"):
        open_examples(write("odd.json", content), schema)


def test_records_are_a_slice() -> None:
    for text, kept in ((None, [0, 1, 2, 3]), ("1:", [1, 2, 3]), (":2", [0, 1]), ("-1:", [3])):
        assert [0, 1, 2, 3][parse_records(text)] == kept
    assert parse_records("1:3") == slice(1, 3)
    for text in ("", "5", "1:2:3", "a:", "1.5:"):
        with pytest.raises(ConfigError, match=f"records is '{text}'; it must be 'start:stop'"):
            parse_records(text)
