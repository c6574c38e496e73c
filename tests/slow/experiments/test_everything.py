"""Every study end to end at smoke scale, and every step of the GPU script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from experiments.gpu import CANDIDATE, LOG, app
from experiments.pages import STUDIES
from experiments.system import measures
from experiments.system.cells import Cell
from experiments.system.measures import measure_missing
from experiments.system.scales import ROOT, SMOKE

FIXTURES = ROOT / "tests" / "fixtures"
pytestmark = pytest.mark.slow


def test_every_study_runs_end_to_end_at_smoke_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    studies = list(STUDIES.values())
    measure_missing(studies, SMOKE, FIXTURES)
    for one in studies:
        missing = [n for n in one.numbers(SMOKE) if n.cell is not None and n.value(SMOKE) is None]
        assert not missing, f"{one.name} measured nothing for {missing[:3]}"
        picture = tmp_path / f"{one.name}.svg"
        one.plot(SMOKE, picture)
        assert picture.read_text().startswith("<?xml")
    measured: list[Cell] = []
    monkeypatch.setattr(measures, "measure", lambda cell, *rest: measured.append(cell))
    measure_missing(studies, SMOKE, FIXTURES)
    assert not measured, "a result that is there is not measured again"


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
