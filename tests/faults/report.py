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
    lines = ["| fault | cases | wrong | what is shown |", "|---|---|---|---|"]
    details = []
    for name, found in report["campaigns"].items():
        total = sum(found["cases"].values())
        wrong, meaning = len(found["wrong"]), CAMPAIGNS[name].meaning
        lines.append(f"| {name} | {total:,} {found['unit']} | {wrong} | {meaning} |")
        parts = [f"{kind} {count:,}" for kind, count in found["cases"].items()]
        parts += [f"{what}: {count:,}" for what, count in found["counts"].items()]
        details.append(f"- {name}: {', '.join(parts)}")
    machine, versions = report["machine"], report["versions"]
    told = ", ".join(f"{name} {number}" for name, number in versions.items())
    made = (
        f"Made on {machine['processor']}, {machine['system']}; Python {machine['python']}, {told}."
    )
    return "\n".join([*lines, "", *details, "", made])
