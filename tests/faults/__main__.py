"""Run all campaigns of faults, as `make test-faults` does: `python -m faults [FACTOR]`."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import version
from typing import Any

import apsw
from campaign import keep, run_campaigns
from faults.campaigns import CAMPAIGNS, REPORT, write_page

from sedem.provenance import provenance


def main() -> int:
    """Run the campaigns one after the other; 1 if anything went wrong."""
    logging.disable(logging.WARNING)
    return run_campaigns(
        CAMPAIGNS, _write_report, program="python -m faults", description=__doc__ or "", long=20
    )


def _write_report(name: str, figures: dict[str, Any]) -> None:
    versions = {"SQLite": apsw.sqlite_lib_version(), "safetensors": version("safetensors")}
    figures["run"] |= {"machine": provenance()["machine"], "versions": versions}
    keep(REPORT, name, figures, CAMPAIGNS)
    write_page()


if __name__ == "__main__":
    sys.exit(main())
