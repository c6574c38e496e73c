from __future__ import annotations

from pathlib import Path

from sedem_lab.data import reports
from sedem_lab.data.question_sets import open_examples


def test_a_report_is_a_question_about_all_of_it(fixtures: Path) -> None:
    found = open_examples(fixtures / "govreport.jsonl").examples
    assert [example.question for example in found] == ["Summarize the report."] * 2
    assert "31 of them need repairs" in found[0].documents[0].text
    assert found[0].answers[0].startswith("Of 214 bridges") and not found[0].evidence


def test_reports_and_summaries_without_text_are_counted() -> None:
    given = (("a", " ", "Nothing."), ("b", "A bridge.", " "), ("c", "A bridge.", "Bridge."))
    records = [dict(zip(("id", "report", "summary"), one, strict=True)) for one in given]
    found = reports.read(("here", record) for record in records)
    assert [example.id for example in found.examples] == ["c"]
    assert sum(found.dropped.values()) == 2
