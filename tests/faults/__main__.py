"""Run all campaigns of faults, as `make test-faults` does: `python -m faults [FACTOR]`."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import version

import apsw
from faults.campaigns import REPORT

if __name__ == "__main__":
    logging.disable(logging.WARNING)
    versions = {"SQLite": apsw.sqlite_lib_version(), "safetensors": version("safetensors")}
    sys.exit(REPORT.run(__doc__ or "", lambda name: {"versions": versions}))
