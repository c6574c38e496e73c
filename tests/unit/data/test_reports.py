from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sedem.errors import DataError
from sedem_lab.data import reports
from sedem_lab.data.question_sets import open_examples


def read(*records: dict[str, Any]) -> Any:
    return reports.read((f"entry {n}", record) for n, record in enumerate(records))


def test_a_report_is_a_question_about_all_of_it(fixtures: Path) -> None:
    found = open_examples(fixtures / "govreport.jsonl").examples
    assert [example.question for example in found] == ["Summarize the report."] * 2
    assert "31 of them need repairs" in found[0].documents[0].text
    assert found[0].answers[0].startswith("Of 214 bridges") and not found[0].evidence


def test_reports_and_summaries_without_text_are_counted() -> None:
    found = read(
        {"id": "a", "report": " ", "summary": "Nothing."},
        {"id": "b", "report": "A bridge.", "summary": " "},
        {"id": "c", "report": "A bridge.", "summary": "Bridge."},
    )
    assert [example.id for example in found.examples] == ["c"]
    assert sum(found.dropped.values()) == 2


def test_another_layout_is_refused() -> None:
    with pytest.raises(DataError, match=r"entry 0.*summary"):
        read({"report": "A bridge.", "summary": 3})
