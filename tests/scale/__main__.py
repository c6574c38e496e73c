"""Build and ask on several machines, and lose some: `python -m scale [FACTOR] [--only NAME]`."""

from __future__ import annotations

import logging
import os
import signal
import sys
from importlib.metadata import version
from typing import Any

from campaign import keep, run_campaigns
from scale.campaigns import CAMPAIGNS
from scale.report import REPORT, write_page

from sedem.provenance import provenance

PACKAGES = ("torch", "ray", "transformers")
LONG = 5


def main() -> int:
    """Run the campaigns one after the other; 1 if anything went wrong."""
    # As Ctrl-C does, so that clusters end, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    logging.disable(logging.WARNING)
    load = os.getloadavg()[0]

    def write_report(name: str, figures: dict[str, Any]) -> None:
        about = provenance()
        figures["run"] |= {
            "machine": about["machine"],
            "versions": {package: version(package) for package in PACKAGES},
            "commit": about["commit"],
            "load_average": load,
        }
        keep(REPORT, name, figures, CAMPAIGNS)
        write_page()

    return run_campaigns(
        CAMPAIGNS, write_report, program="python -m scale", description=__doc__ or "", long=LONG
    )


if __name__ == "__main__":
    sys.exit(main())
