"""The page of the report: a table between two marks, from the committed result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from campaign import cases_of, details, summary, with_table
from load.campaigns import CAMPAIGNS

REPORT = Path(__file__).with_name("report.json")
PAGE = Path(__file__).parents[2] / "docs" / "load.md"
NOT_RUN = "Not run as a whole yet: it needs a machine that does nothing else."


def write_page() -> None:
    """Write the table of the committed result into the page."""
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def rendered(page: str) -> str:
    """The page with its table renewed."""
    report = json.loads(REPORT.read_text(encoding="utf-8")) if REPORT.exists() else None
    return with_table(page, "load", NOT_RUN if report is None else _table(report))


def _table(report: dict[str, Any]) -> str:
    lines = ["| load | requests | missed | minutes | what is shown |", "|---|---|---|---|---|"]
    for name, found in report["campaigns"].items():
        total, minutes = cases_of(found), found["seconds"] / 60
        wrong, meaning = len(found["wrong"]), CAMPAIGNS[name].meaning
        lines.append(f"| {name} | {total:,} | {wrong} | {minutes:.1f} | {meaning} |")
    listed = [f"- {name}: {details(found)}" for name, found in report["campaigns"].items()]
    return "\n".join([*lines, "", *listed, "", summary(report)])
