"""Small forms of the campaigns of many machines, which take minutes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from scale.campaigns import CAMPAIGNS, REPORT

SLOW = {"drivers killed": 1, "hosts lost while building": 1, "hosts lost while serving": 24}
"""Cases of each campaign; the others are like tests of tests/unit/ray."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_what_is_lost_costs_nothing_that_was_committed(name: str, tmp_path: Path) -> None:
    result = CAMPAIGNS[name].run(SLOW[name], tmp_path, 0)
    if reason := result.figures.get("not run"):
        pytest.skip(reason)
    assert result.wrong == [] and result.cases.total() == SLOW[name]
    if name == "hosts lost while serving":
        assert result.counts["host lost: same"] >= SLOW[name] // 2
        assert not result.counts["host lost: refused"]


def test_the_table_says_what_went_wrong(tmp_path: Path) -> None:
    machine = {"processor": "a processor", "cores": 2, "system": "Linux", "python": "3.11"}
    found = {"unit": "kills", "cases": {"workers": 3}, "counts": {"workers killed": 6}}
    run = {"factor": 1, "machine": machine, "versions": {"ray": "2.60"}, "load_average": 6.25}
    campaigns = {"workers killed": {**found, "wrong": ["differs"], "seconds": 60, "run": run}}
    (tmp_path / "scale").mkdir()
    report = replace(REPORT, file=tmp_path / "scale" / "report.json")
    report.file.write_text(json.dumps({"campaigns": campaigns}), encoding="utf-8")
    page = report.rendered("<!-- scale -->\n<!-- end -->")
    assert "| workers killed | 3 kills | 1 | 1.0 | SIGKILL to all workers" in page
    assert "- workers killed: workers 3, workers killed: 6\n" in page
    assert "In all 3 cases, 1 wrong" in page and "ray 2.60; load 6.2 at the start." in page
