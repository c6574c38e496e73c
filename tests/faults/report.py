"""The page of the report: a table between two marks, from the committed result."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from faults.campaigns import CAMPAIGNS

REPORT = Path(__file__).with_name("report.json")
PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
_BLOCK = re.compile(r"(?P<mark><!-- faults -->)\n.*?<!-- end -->", re.DOTALL)


def write_page() -> None:
    """Write the table of the committed result into the page."""
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def rendered(page: str) -> str:
    """The page with its table renewed."""
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    return _BLOCK.sub(lambda block: f"{block['mark']}\n{_table(report)}\n<!-- end -->", page)


def _table(report: dict[str, Any]) -> str:
    lines = ["| fault | cases | wrong | minutes | what is shown |", "|---|---|---|---|---|"]
    details = []
    for name, found in report["campaigns"].items():
        total, minutes = _cases(found), found["seconds"] / 60
        wrong, meaning = len(found["wrong"]), CAMPAIGNS[name].meaning
        lines.append(
            f"| {name} | {total:,} {found['unit']} | {wrong} | {minutes:.1f} | {meaning} |"
        )
        parts = [f"{kind} {count:,}" for kind, count in found["cases"].items()]
        parts += [f"{what}: {count:,}" for what, count in found["counts"].items()]
        details.append(f"- {name}: {', '.join(parts)}")
    return "\n".join([*lines, "", *details, "", _summary(report)])


def _cases(found: dict[str, Any]) -> int:
    """Cases of one campaign, of all kinds."""
    return sum(found["cases"].values())


def _summary(report: dict[str, Any]) -> str:
    """How much was tried, how long it took, and on what."""
    campaigns = report["campaigns"].values()
    cases, wrong = sum(map(_cases, campaigns)), sum(len(found["wrong"]) for found in campaigns)
    minutes = sum(found["seconds"] for found in campaigns) / 60
    machine = report["machine"]
    told = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return (
        f"In all {cases:,} cases, {wrong} wrong, in {minutes:.1f} minutes with "
        f"`FACTOR={report['factor']:g}`, on {machine['processor']}, {machine['cores']} cores, "
        f"{machine['system']}; Python {machine['python']}, {told}."
    )
