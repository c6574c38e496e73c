"""Run all campaigns of faults, as `make test-faults` does: `python -m faults [FACTOR]`."""

from __future__ import annotations

import argparse
import json
import logging
import sqlite3
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from faults.campaigns import CAMPAIGNS
from faults.report import REPORT, write_page

from sedem.provenance import provenance


def main() -> int:
    """Run the campaigns one after the other; 1 if anything went wrong."""
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument(
        "factor", type=float, nargs="?", default=1, help="how much longer: 20 is the long form"
    )
    parser.add_argument("--only", choices=CAMPAIGNS, help="one campaign alone")
    parser.add_argument("--seed", type=int, default=0, help="other cases")
    parser.add_argument("--report", action="store_true", help="write the report and its page")
    chosen = parser.parse_args()
    logging.disable(logging.WARNING)
    figures = {}
    for name, campaign in CAMPAIGNS.items():
        if chosen.only in (None, name):
            figures[name] = _run(name, round(campaign.points * chosen.factor), chosen.seed)
    if chosen.report:
        versions = {"SQLite": sqlite3.sqlite_version, "safetensors": version("safetensors")}
        about = {"factor": chosen.factor, "machine": provenance()["machine"], "versions": versions}
        report = {**about, "campaigns": figures}
        REPORT.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        write_page()
    return any(one["wrong"] for one in figures.values())


def _run(name: str, points: int, seed: int) -> dict[str, object]:
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result = CAMPAIGNS[name].run(points, Path(folder), seed)
    seconds = round(time.monotonic() - started)
    print(
        f"{name}: {result.cases.total():,} {result.unit}, {len(result.wrong)} wrong, {seconds} s",
        flush=True,
    )
    for sentence in result.wrong:
        print(f"  {sentence}", file=sys.stderr, flush=True)
    return {
        "unit": result.unit,
        "cases": dict(result.cases),
        "counts": dict(result.counts),
        "wrong": result.wrong,
        "seconds": seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
