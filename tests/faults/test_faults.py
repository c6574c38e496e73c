"""A sample of the faults that `make test-faults` makes in thousands; that it finds any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from campaign import entries_of
from faults import crashes, report
from faults.campaigns import CAMPAIGNS
from faults.operations import OPERATIONS
from faults.report import PAGE, rendered
from faults.tracing import WORKS

from sedem.bank import file

traced = pytest.mark.skipif(not WORKS, reason="processes are traced on Linux on x86-64 alone")


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_sample_of_each_campaign_finds_nothing_wrong(name: str, tmp_path: Path) -> None:
    campaign = CAMPAIGNS[name]
    if not campaign.works:
        pytest.skip("processes are traced on Linux on x86-64 alone")
    result = campaign.run(campaign.sample, tmp_path, 0)
    assert result.wrong == []
    assert result.cases.total() >= campaign.sample


@traced
def test_power_cuts_lose_a_bank_whose_folder_is_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "sync_folder", lambda _: None)
    monkeypatch.setattr(crashes, "OPERATIONS", {"create": OPERATIONS["create"]})
    wrong = crashes.power_cuts(30, tmp_path).wrong
    assert wrong
    assert all("found None" in sentence for sentence in wrong)


@traced
def test_power_cuts_damage_a_bank_that_is_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = file.connect

    def careless(*arguments: Any, **options: Any) -> Any:
        connection = real(*arguments, **options)
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    monkeypatch.setattr(file, "connect", careless)
    monkeypatch.setattr(crashes, "OPERATIONS", {"append": OPERATIONS["append"]})
    assert crashes.power_cuts(12, tmp_path).wrong


def test_the_page_shows_the_committed_report() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert rendered(page) == page


def test_a_report_says_how_much_was_tried_how_long_it_took_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {**next(iter(entries_of(report.REPORT).values()))["run"], "factor": 2.0}
    flips = {"cases": {"catalog": 700, "shard": 500}, "counts": {"harmless": 3}, "unit": "offsets"}
    sequences = {"cases": {"all": 34}, "counts": {}, "unit": "sequences", "wrong": []}
    flips |= {"wrong": ["byte 5 was used"], "seconds": 90, "run": run}
    made = {"campaigns": {"flips": flips, "sequences": {**sequences, "seconds": 36, "run": run}}}
    monkeypatch.setattr(report, "REPORT", tmp_path / "report.json")
    report.REPORT.write_text(json.dumps(made), encoding="utf-8")
    page = rendered("<!-- faults -->\n<!-- end -->")
    assert "| flips | 1,200 offsets | 1 | 1.5 | A bit flipped" in page
    assert "| sequences | 34 sequences | 0 | 0.6 | Any sequence" in page
    assert "\n- flips: catalog 700, shard 500, harmless: 3\n" in page
    assert "\nIn all 1,234 cases, 1 wrong, in 2.1 minutes with `FACTOR=2`, on " in page
