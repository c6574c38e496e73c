"""Every cell of the paper's scale on stand-ins, and the study of small backbones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.pages import STUDIES
from experiments.system import models
from experiments.system.measures import measure_missing
from experiments.system.scales import NANO, PAPER, ROOT, Questions
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


def test_the_study_of_small_backbones_runs(
    tmp_path: Path, tiny_folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    questions = Questions("SQuAD-10, held out", "squad.json", "squad", limit=2)
    small = replace(NANO, name="small", held_out={"held-out-squad": questions})
    recipe = {
        "model": {"encoder": tiny_folder(max_position_embeddings=4096)},
        "text": {"path": "articles.jsonl"},
        "data": {"training": [{"path": "squad.json", "set": "squad"}]},
    }
    monkeypatch.setattr(models, "_study_entries", lambda scale, stage: recipe)
    monkeypatch.setitem(models.ADAPTED_STEPS, "small", (2, 2))
    cells, failed = measure_missing([STUDIES["adapt"]], small, FIXTURES)
    assert cells == 4 and not failed
