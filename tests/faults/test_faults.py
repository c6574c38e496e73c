"""A sample of the faults that `make test-faults` makes in thousands; that it finds any."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
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


@pytest.fixture(scope="module")
def fresh() -> Iterator[Executor]:
    """A process of its own, whose forks are traced.

    Other tests leave threads that watch banks. A fork of theirs would wait forever for a lock of
    SQLite that such a thread held.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_a_sample_of_each_campaign_finds_nothing_wrong(
    name: str, tmp_path: Path, fresh: Executor
) -> None:
    campaign = CAMPAIGNS[name]
    if not campaign.works:
        pytest.skip("processes are traced on Linux on x86-64 alone")
    if campaign.traces:
        result = fresh.submit(campaign.run, campaign.sample, tmp_path, 0).result(timeout=240)
    else:
        result = campaign.run(campaign.sample, tmp_path, 0)
    assert result.wrong == []
    assert result.cases.total() >= campaign.sample


def cut_without_synced_folders(folder: Path) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable_files, "sync_folder", lambda _: None)
        patch.setattr(crashes, "OPERATIONS", {"create": OPERATIONS["create"]})
        return crashes.power_cuts(30, folder).wrong


@traced
def test_power_cuts_lose_a_bank_whose_folder_is_not_synced(tmp_path: Path, fresh: Executor) -> None:
    wrong = fresh.submit(cut_without_synced_folders, tmp_path).result(timeout=240)
    assert wrong
    assert all("found None" in sentence for sentence in wrong)


def cut_without_synced_banks(folder: Path) -> list[str]:
    real = file.connect

    def careless(*arguments: Any, **options: Any) -> Any:
        connection = real(*arguments, **options)
        connection.execute("PRAGMA synchronous = OFF")
        return connection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "connect", careless)
        patch.setattr(crashes, "OPERATIONS", {"append": OPERATIONS["append"]})
        return crashes.power_cuts(12, folder).wrong


@traced
def test_power_cuts_damage_a_bank_that_is_not_synced(tmp_path: Path, fresh: Executor) -> None:
    assert fresh.submit(cut_without_synced_banks, tmp_path).result(timeout=240)


@pytest.mark.parametrize("report", [REPORT, attacks.REPORT, scale.REPORT], ids=lambda r: r.name)
def test_the_page_shows_the_committed_report(report: Report) -> None:
    page = report.page.read_text(encoding="utf-8")
    assert report.rendered(page) == page
    assert all(one.meaning and one.points for one in report.campaigns.values())
