"""Twenty steps of each stage on the tiny model must reproduce the recorded losses.

If a change is meant to alter training, record the losses again and review the difference in git:

    WRITE_GOLDEN=1 python -m pytest tests/golden/test_golden.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from unit.training.runs import one_thread

from sedem import SedemConfig
from sedem_lab.training.recipe import DataSource, Optimization, RunSettings, TextSource
from sedem_lab.training.stage1 import Stage1Losses
from sedem_lab.training.stage2 import Stage2Losses
from sedem_lab.training.stages import (
    Stage1Recipe,
    Stage2Data,
    Stage2Recipe,
    train_stage1,
    train_stage2,
)

HERE = Path(__file__).parent
FIXTURES = HERE.parent / "fixtures"
NAMES = ("loss", "context", "distill", "answer", "select", "reconstruct", "regress", "recall")

# On one machine, runs are equal to the last bit. Kernels of other processors sum in another order;
# over twenty steps of float32, that difference grows to a few millionths.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """The number of threads also changes the order of sums."""
    with one_thread():
        yield


def shared(config: SedemConfig, folder: Path, rates: dict[str, float]) -> dict[str, Any]:
    return {
        "model": config,
        "optimization": Optimization(
            learning_rates=rates,
            steps=20,
            batch_size=4,
            warmup=2,
            weight_decay=0.01,
            bf16=False,
            backbone_dtype="float32",
            seed=3,
        ),
        "run": RunSettings(output=str(folder / "run"), log_every=1),
        "data_root": str(FIXTURES),
        "cache": str(folder / "cache"),
    }


def read_losses(folder: Path) -> list[dict[str, float]]:
    """Loss and its parts at each step of a run."""
    log = json.loads((folder / "run" / "training.json").read_text())["log"]
    lines = [line for line in log if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 21))
    return [{name: line[name] for name in NAMES if name in line} for line in lines]


def compare(found: list[dict[str, float]], path: Path) -> None:
    if os.environ.get("WRITE_GOLDEN"):
        lines = [" ".join(f"{name}={value!r}" for name, value in row.items()) for row in found]
        path.write_text("".join(f"{line}\n" for line in lines))
        pytest.skip(f"{path.name} was written")
    expected = [
        {name: float(value) for name, value in (entry.split("=") for entry in line.split())}
        for line in path.read_text().splitlines()
    ]
    assert len(found) == len(expected) == 20
    for step, (row, wanted) in enumerate(zip(found, expected, strict=True), start=1):
        assert row == pytest.approx(wanted, rel=TOLERANCE), f"step {step}"


def test_stage_1_reproduces_its_losses(config: SedemConfig, tmp_path: Path) -> None:
    recipe = Stage1Recipe(
        text=TextSource(path="articles.jsonl", continuation=8),
        losses=Stage1Losses(regress=0.5, regress_first=0.25, recall=0.5, distill_temperature=2.0),
        **shared(config, tmp_path, {"compressor": 1e-3, "decompressor": 2e-3}),
    )
    train_stage1(recipe)
    compare(read_losses(tmp_path), HERE / "stage1.txt")


def test_stage_2_reproduces_its_losses(config: SedemConfig, tmp_path: Path) -> None:
    rates = {"compressor": 1e-3, "decompressor": 2e-3, "selector": 1e-3, "lora": 1e-3}
    recipe = Stage2Recipe(
        data=Stage2Data(
            training=(DataSource(path="squad.json", options={"distractors": 3}),),
            max_blocks=12,
            budgets=(1, 2, 3),
            answer_limit=200,
        ),
        losses=Stage2Losses(normalize_scores=True),
        **shared(config.with_changes(block_slots=8), tmp_path, rates),
    )
    train_stage2(recipe)
    compare(read_losses(tmp_path), HERE / "stage2.txt")
