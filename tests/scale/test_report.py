"""The page of many machines shows the committed report, and names what went wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from campaign import Result
from scale import report
from scale.campaigns import CAMPAIGNS, _told
from scale.report import PAGE, rendered
from scale.serving import Counts


def test_the_page_shows_the_committed_report() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert rendered(page) == page


def test_the_table_says_what_went_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = {"processor": "a processor", "cores": 2, "system": "Linux", "python": "3.11"}
    found = {"unit": "kills", "cases": {"workers": 3}, "counts": {"workers killed": 6}}
    run = {"factor": 1, "machine": machine, "versions": {"ray": "2.60"}, "load_average": 6.25}
    campaigns = {"workers killed": {**found, "wrong": ["differs"], "seconds": 60, "run": run}}
    monkeypatch.setattr(report, "REPORT", tmp_path / "report.json")
    report.REPORT.write_text(json.dumps({"campaigns": campaigns}), encoding="utf-8")
    page = rendered("<!-- scale -->\n<!-- end -->")
    assert "| workers killed | 3 kills | 1 | 1.0 | SIGKILL to all workers" in page
    assert "- workers killed: workers 3, workers killed: 6\n" in page
    assert "In all 3 cases, 1 wrong" in page and "ray 2.60; load 6.2 at the start." in page


def test_another_answer_is_wrong_and_a_broken_one_is_counted() -> None:
    result = Result("answers")
    _told(result, "host lost", Counts(asked=5, same=3, broken=1, wrong=1))
    assert result.wrong == ["host lost: 1 answers differ"]
    assert (result.cases["host lost"], result.counts["host lost: broken"]) == (5, 1)


def test_every_campaign_says_what_it_shows() -> None:
    assert all(one.meaning and one.points for one in CAMPAIGNS.values())
