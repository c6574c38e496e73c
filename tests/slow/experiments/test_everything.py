"""Every cell of the paper's scale on stand-ins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.pages import STUDIES
from experiments.system.scales import PAPER, ROOT
from experiments.system.stand_in import stand_in
from experiments.system.tables import NOT_RUN

FIXTURES = ROOT / "tests" / "fixtures"
SMALL = stand_in(PAPER)
pytestmark = pytest.mark.slow


def test_every_cell_of_the_paper_runs_on_stand_ins(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "experiments", "run", "--scale", "paper", "--stand-in"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert first.returncode == 0, first.stdout
    counted = re.search(r"^(\d+) cells, (\d+) ran$", first.stdout.splitlines()[-1])
    assert counted and int(counted[1]) == int(counted[2]) > 350
    page = (tmp_path / "runs" / "paper-stand-in" / "tables.md").read_text(encoding="utf-8")
    assert NOT_RUN not in page and "not measured" not in page
    for one in STUDIES.values():
        if one.numbers(SMALL):
            assert one.title in page
    # A result that is there is not measured again.
    second = subprocess.run(
        [*command, "--at-once", "1"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert second.stdout.splitlines()[-1] == counted[0] and "measuring" not in second.stderr
