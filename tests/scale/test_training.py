"""A training whose processes Ray starts, as docs/scale.md shows it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import save_tiny, small_config
from scale.hosts import ENVIRONMENT
from unit.training.conftest import stage1_recipe_in

from sedem_lab.training.recipe import as_yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_on_ray.py"


@pytest.mark.slow
def test_two_processes_of_a_cluster_train_one_model(tmp_path: Path) -> None:
    config = small_config(save_tiny(tmp_path / "backbone"))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(as_yaml(stage1_recipe_in(tmp_path, config)))
    words = [str(recipe), "--set", "optimization.accumulation=2"]
    run = subprocess.run(
        [sys.executable, str(EXAMPLE), "local", "2", "--cpu", *words],
        cwd=tmp_path,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert run.returncode == 0, run.stderr
    assert "trained by 2 processes" in run.stdout
    summary = json.loads((tmp_path / "stage1" / "training.json").read_text())
    assert (summary["steps"], summary["processes"]) == (6, 2)
    assert (tmp_path / "stage1" / "final" / "sedem.safetensors").is_file()
