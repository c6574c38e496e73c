"""Two processes of `accelerate launch` run a table, are killed, and go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from experiments.system.scales import ROOT
from sedem_lab.training.checkpoints import COMPLETE
from sedem_lab.training.shipped_recipes import launch_file

pytestmark = pytest.mark.slow

COMMAND = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2"),
    *("--config_file", str(launch_file("eight-gpus")), "-m", "experiments", "run"),
    *("--scale", "paper", "--stand-in", "--only", "decoder"),
]


def test_a_table_is_trained_by_two_processes_which_resume_after_a_kill(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    runs = tmp_path / "runs" / "paper-stand-in" / "sedem-llama-3.2-1b"
    first = subprocess.Popen(COMMAND, cwd=tmp_path, env=environment, start_new_session=True)
    try:
        started = time.monotonic()
        while not (runs / "stage2-hotpotqa" / "checkpoint-1" / COMPLETE).exists():
            assert first.poll() is None and time.monotonic() < started + 300
            time.sleep(0.1)
    finally:
        # The launcher gives each of its processes a session of its own.
        for one in [*psutil.Process(first.pid).children(recursive=True), first]:
            one.kill()
        first.wait()
    assert not (runs / "stage2-hotpotqa" / "training.json").exists()

    again = subprocess.run(
        COMMAND, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    assert again.stdout.splitlines()[-1] == "12 cells, 12 ran"
    kept = {path.parent.name: json.loads(path.read_text()) for path in runs.glob("*/training.json")}
    assert {summary["processes"] for summary in kept.values()} == {2}
    assert kept["stage2-hotpotqa"]["resumed_from"].startswith("checkpoint-")
    assert kept["stage1"]["resumed_from"] is None
