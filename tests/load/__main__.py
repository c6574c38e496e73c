"""Put load on a real server, as `make load` does: `python -m load [FACTOR] [--only NAME]`."""

from __future__ import annotations

import signal
import sys
from importlib.metadata import version
from typing import Any

from campaign import keep, run_campaigns
from load.campaigns import CAMPAIGNS, LONG
from load.report import REPORT, write_page

from sedem.provenance import provenance

PACKAGES = ("torch", "fastapi", "uvicorn", "httpx", "schemathesis")


def main() -> int:
    """Run the campaigns one after the other; 1 if anything went wrong."""
    # As Ctrl-C does, so that the server ends, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return run_campaigns(
        CAMPAIGNS, _write_report, program="python -m load", description=__doc__ or "", long=LONG
    )


def _write_report(name: str, figures: dict[str, Any]) -> None:
    about = provenance()
    figures["run"] |= {
        "machine": about["machine"],
        "versions": {package: version(package) for package in PACKAGES},
        "commit": about["commit"],
        "settings": " ".join(CAMPAIGNS[name].flags),
    }
    keep(REPORT, name, figures, CAMPAIGNS)
    write_page()


if __name__ == "__main__":
    sys.exit(main())
