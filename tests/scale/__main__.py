"""Build and ask on several machines, and lose some: `python -m scale [FACTOR] [--only NAME]`."""

from __future__ import annotations

import logging
import os
import sys

from scale.campaigns import REPORT

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    load = os.getloadavg()[0]
    sys.exit(REPORT.run(__doc__ or "", lambda name: {"load_average": load}))
