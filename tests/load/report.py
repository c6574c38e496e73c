"""The page of the report: a table between two marks, from the committed result."""

from __future__ import annotations

from pathlib import Path

from campaign import entries_of, table, with_table
from load.campaigns import CAMPAIGNS

REPORT = Path(__file__).with_name("report.json")
PAGE = Path(__file__).parents[2] / "experiments" / "load.md"


def write_page() -> None:
    """Write the table of the committed result into the page."""
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def rendered(page: str) -> str:
    """The page with its table renewed."""
    return with_table(page, "load", table("load", entries_of(REPORT), CAMPAIGNS))
