"""Attack a real server, parsers and checkpoints, as `make attack` does: `python -m hostile`."""

from __future__ import annotations

import sys

from hostile.attacks import REPORT

if __name__ == "__main__":
    sys.exit(REPORT.run(__doc__ or "", lambda name: {}))
