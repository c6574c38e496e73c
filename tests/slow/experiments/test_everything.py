"""Every cell of the paper's scale on stand-ins, and every step of the GPU script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from experiments.gpu import CANDIDATE, LOG, app
from experiments.pages import STUDIES
from experiments.system.measures import measure_missing
from experiments.system.scales import PAPER, ROOT, SMOKE
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
    assert counted and int(counted[1]) == int(counted[2]) > 400
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


def test_the_study_of_small_backbones_runs_at_smoke_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cells, failed = measure_missing([STUDIES["adapt"]], SMOKE, FIXTURES)
    assert cells == 4 and not failed


def call(out: Path, *options: str, data: Path = FIXTURES) -> Result:
    entries = ["--out", str(out), "--data", str(data), "--device", "cpu", "--smoke", *options]
    return CliRunner().invoke(app, entries)


def test_a_call_goes_on_where_one_that_was_stopped_or_failed_ended(tmp_path: Path) -> None:
    only = ("--only", "train stage1-regress")
    stopped = call(tmp_path, *only, "--minutes", "0.005")
    assert stopped.exit_code == 75, stopped.output
    assert "0 of 1 steps are done\nrepeat the command to resume" in stopped.output

    failed = call(tmp_path, *only, data=tmp_path / "nowhere")
    assert failed.exit_code == 1
    assert "failed: train stage1-regress" in failed.output and "nowhere" in failed.output

    done = call(tmp_path, *only)
    assert done.exit_code == 0, done.output
    assert "1 of 1 steps are done" in done.output
    assert (tmp_path / "runs/smoke/stage1-regress/final").is_dir()
    outcomes = [json.loads(line)["outcome"] for line in (tmp_path / LOG).read_text().splitlines()]
    assert outcomes == ["stopped", "failed", "done"]

    listed = call(tmp_path, "--list").output.splitlines()
    assert listed[0].split() == ["done", "train", "stage1-regress"]
    assert listed[1].split() == ["missing", "train", "stage1"]
    assert listed[2].split() == ["waiting", "train", "stage2"]
    stuck = call(tmp_path, "--only", "train stage2", "--skip", "stage2-")
    assert stuck.exit_code == 1
    assert "waiting for a step that was not chosen: train stage2" in stuck.output

    other = call(tmp_path, *only, "--budget", "0.5")
    assert other.exit_code == 1 and "other settings" in other.output


def test_every_step_runs_at_a_tiny_size(tmp_path: Path) -> None:
    done = call(tmp_path, "--minutes", "60", "--processes", "2")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "runs/smoke" / CANDIDATE[-1] / "final").is_dir()
