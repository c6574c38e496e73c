"""Put load on a real server, as `make load` does: `python -m load [FACTOR] [--only NAME]`."""

from __future__ import annotations

import sys

from load.campaigns import CAMPAIGNS, REPORT

if __name__ == "__main__":
    sys.exit(REPORT.run(__doc__ or "", lambda name: {"settings": " ".join(CAMPAIGNS[name].flags)}))
