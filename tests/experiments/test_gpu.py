"""The GPU script: what it does once, how its training resumes, and what it needs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from experiments import gpu
from experiments.gpu import STAGES, app
from experiments.speed import performance
from experiments.system.scales import GPU
from sedem.engine.static import ENGINES
from sedem_lab.training.recipe import read_entries, what_trains
from sedem_lab.training.shipped_recipes import shipped_recipe

# In place of `sedem`: one whose regression hangs until there is a file "go".
FAKE = """
import pathlib, sys, time
print(*sys.argv[1:], flush=True, file=open("calls", "a"))
name = sys.argv[2].removeprefix("smol/")
if name == "stage1-regress" and not pathlib.Path("go").exists():
    time.sleep(60)
pathlib.Path("runs/smol", name).mkdir(parents=True)
pathlib.Path("runs/smol", name, "training.json").touch()
"""


def test_training_stops_when_the_time_is_over_and_the_same_command_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "SEDEM", (sys.executable, "-c", FAKE))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    command = ["--out", str(tmp_path), "--data", "data", "--set", "run.workers=1", "train"]
    stopped = CliRunner().invoke(app, [*command, "--seconds", "1"])
    assert stopped.exit_code == os.EX_TEMPFAIL and "repeat the command" in stopped.output
    (tmp_path / "go").touch()
    for _ in range(2):
        assert CliRunner().invoke(app, command).exit_code == 0
    values = f"--set data_root={Path('data').resolve()} --set run.workers=1"
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"train smol/{name} {values}" for name in ("stage1-regress", *STAGES)
    ]


def test_each_stage_of_sedem_smol_starts_from_the_previous_one() -> None:
    start = None
    for name in STAGES:
        path = shipped_recipe(f"smol/{name}")
        recipe = read_entries(path)
        assert what_trains(path) == name.split("-")[0]
        assert recipe["run"]["output"] == f"runs/smol/{name}"
        assert recipe.get("start_from") == start
        start = f"runs/smol/{name}/final"


def test_the_bench_on_a_gpu_times_llamas_shapes() -> None:
    assert {cell.backbone for cell in performance.cells(GPU)} == {"llama-3.2-1b", "llama-3.2-3b"}


def test_a_check_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(gpu.CHECKS, "parity", lambda: {"number": done.append("parity")})
    for _ in range(2):
        result = CliRunner().invoke(app, ["--out", str(tmp_path), "parity"])
        assert result.exit_code == 0, result.output
    assert done == ["parity"]


@pytest.mark.slow
def test_engines_agree() -> None:
    found = gpu.parity("cpu")["engines"]
    assert set(found) == {*ENGINES} - {"auto", "graphs"}
