"""A sample of the faults that `make test-faults` makes in thousands; that it finds any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from campaign import Report
from faults import crashes
from faults.campaigns import CAMPAIGNS, REPORT
from faults.operations import OPERATIONS
from faults.tracing import WORKS
from hostile import attacks
from scale import campaigns as scale

from sedem import durable_files
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
    monkeypatch.setattr(durable_files, "sync_folder", lambda _: None)
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


@pytest.mark.parametrize("report", [REPORT, attacks.REPORT, scale.REPORT], ids=lambda r: r.name)
def test_the_page_shows_the_committed_report(report: Report) -> None:
    page = report.page.read_text(encoding="utf-8")
    assert report.rendered(page) == page
    assert all(one.meaning and one.points for one in report.campaigns.values())
