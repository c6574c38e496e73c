from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sedem.errors import DataError
from sedem_lab.data import longmemeval
from sedem_lab.data.question_sets import open_examples

RECORD: dict[str, Any] = {
    "question_id": "q1",
    "question_type": "single-session-user",
    "question": "What did I name my boat?",
    "question_date": "2023/06/01 (Thu) 10:00",
    "answer": "Skua",
    "haystack_session_ids": ["s1", "s2", "s1"],
    "haystack_dates": [
        "2023/05/20 (Sat) 02:21",
        "2023/05/21 (Sun) 12:00",
        "2023/05/22 (Mon) 08:00",
    ],
    "haystack_sessions": [
        [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Hi."}],
        [
            {"role": "user", "content": "I named my boat Skua.", "has_answer": True},
            {"role": "assistant", "content": "A good name."},
        ],
        [{"role": "user", "content": " "}],
    ],
    "answer_session_ids": ["s2"],
}


def read(*records: dict[str, Any]) -> Any:
    return longmemeval.read((f"entry {n}", record) for n, record in enumerate(records))


def test_each_session_is_a_document_and_the_marked_turn_is_evidence(tmp_path: Path) -> None:
    (tmp_path / "oracle.json").write_text(json.dumps([RECORD]))
    found = open_examples(tmp_path / "oracle.json")
    (example,) = found.examples
    assert [document.name for document in example.documents] == ["s1", "s2"]
    assert example.documents[0].text == "2023/05/20 (Sat) 02:21\n\nuser: Hello.\n\nassistant: Hi."
    (span,) = example.evidence
    assert example.documents[span.document].text[span.start : span.end] == "I named my boat Skua."
    assert example.answers == ("Skua",) and found.noted[longmemeval.EMPTY] == 1


def test_without_a_marked_turn_the_whole_session_is_evidence() -> None:
    record = {**RECORD, "answer": 3, "answer_session_ids": ["s1", "s9"]}
    found = read(record)
    (example,) = found.examples
    (span,) = example.evidence
    assert (span.start, span.end) == (0, len(example.documents[0].text))
    assert example.answers == ("3",) and found.noted[longmemeval.NO_SESSION] == 1


def test_what_cannot_be_evaluated_is_counted() -> None:
    found = read(
        {**RECORD, "question_id": "q2_abs"},
        {**RECORD, "haystack_session_ids": [], "haystack_dates": [], "haystack_sessions": []},
    )
    assert not found.examples and sum(found.dropped.values()) == 2


@pytest.mark.parametrize("changes", [{"haystack_dates": []}, {"haystack_sessions": "none"}])
def test_another_layout_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="entry 0"):
        read({**RECORD, **changes})
