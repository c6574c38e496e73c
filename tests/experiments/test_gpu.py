"""The script for an hour on a GPU: interrupted and resumed on a CPU, at a tiny size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from experiments.gpu import LOG, app
from experiments.system.gpu_scale import CANDIDATE, GPU, gpu_scale
from experiments.system.gpu_steps import Work, steps
from experiments.system.scales import NANO, ROOT
from experiments.system.variants import equal_budget
from sedem.baselines.registry import TRAINED
from sedem.training.recipe import read_entries

FIXTURES = ROOT / "tests" / "fixtures"


def call(out: Path, *options: str, data: Path = FIXTURES) -> Result:
    entries = ["--out", str(out), "--data", str(data), "--device", "cpu", "--smoke", *options]
    return CliRunner().invoke(app, entries)


def test_a_call_goes_on_where_one_that_was_stopped_or_failed_ended(tmp_path: Path) -> None:
    only = ("--only", "train stage1-regress")
    stopped = call(tmp_path, *only, "--minutes", "0.005")
    assert stopped.exit_code == 75, stopped.output
    assert "0 of 1 steps are done\ngive the same command again" in stopped.output

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
    assert all(line.startswith("missing") for line in listed[1:])

    other = call(tmp_path, *only, "--budget", "0.5")
    assert other.exit_code == 1 and "other settings" in other.output


@pytest.mark.slow
def test_every_step_runs_at_a_tiny_size(tmp_path: Path) -> None:
    done = call(tmp_path, "--minutes", "60")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "runs/smoke" / CANDIDATE[-1] / "final").is_dir()


def test_a_machine_without_a_gpu_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.output.startswith("this machine has no GPU") and "--device cpu" in result.output
    assert not (tmp_path / "out").exists()


def test_the_steps_are_tests_parity_bench_the_candidate_and_the_study(tmp_path: Path) -> None:
    names = [step.name for step in steps(Work(tmp_path, FIXTURES, 1.0, False, "cuda"))]
    assert names[:2] == ["tests marked gpu", "parity of engines"]
    assert names[2].startswith("bench.llama")
    first = names.index(f"train {CANDIDATE[0]}")
    end = first + len(CANDIDATE)
    assert all("llama" in name for name in names[2:first])
    assert names[first:end] == [f"train {name}" for name in CANDIDATE]
    rest = names[end:]
    assert all(any(n.startswith(f"equal-c{c}.") for n in rest) for c in (1, 2, 4))
    assert all(any(n.startswith(f"{method}.") for n in rest) for method in TRAINED)


@pytest.mark.parametrize("stage", ["text", "questions"])
def test_every_method_has_fifty_times_the_examples_of_nano(stage: str) -> None:
    def examples(overrides: tuple[str, ...]) -> int:
        own = read_entries(NANO.baseline_recipe("icae", stage, "nano"), overrides)["optimization"]
        count: int = own["steps"] * own["batch_size"] * own["accumulation"]
        return count

    assert examples(GPU.baselines[stage]) == 50 * examples(())
    own = equal_budget(GPU, 2)
    trained = own.stage1 if stage == "text" else own.stage2
    assert examples(trained) == examples(GPU.baselines[stage])
    assert examples(gpu_scale(0.1).baselines[stage]) == 5 * examples(())
