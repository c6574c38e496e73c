"""The script for an hour on a GPU: its steps, their order, and their budgets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from experiments import gpu
from experiments.gpu import (
    CANDIDATE,
    GPU,
    TIMES,
    GpuWork,
    Step,
    app,
    candidate_overrides,
    gpu_scale,
    run_missing,
    steps,
)
from experiments.system.models import equal_budget
from experiments.system.scales import NANO, ROOT
from experiments.training import equal_training
from sedem.baselines.registry import TRAINED
from sedem.training.recipe import read_entries

FIXTURES = ROOT / "tests" / "fixtures"


def test_steps_run_at_once_after_what_they_need_or_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "experiments").mkdir()
    # In place of the script: a step is a command of the shell.
    (tmp_path / "experiments" / "gpu.py").write_text(
        "import subprocess, sys\n"
        "name, command = sys.argv[2].split(': ')\n"
        "sys.exit(subprocess.run(f'{command} && touch {name}', shell=True).returncode)\n"
    )
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    os.mkfifo(tmp_path / "pipe")

    def shell(name: str, command: str, *needs: str, alone: bool = False) -> Step:
        return Step(f"{name}: {command}", print, Path(name), tuple(map(Path, needs)), alone)

    chosen = [
        shell("broken", "echo nothing; false"),
        shell("never", "true", "broken"),
        shell("first", "test ! -e writing"),
        shell("reading", "cat pipe", "first"),
        # Of a pipe, neither end can be opened without the other.
        shell("writing", "echo > pipe"),
        shell("alone", "test -e reading && test -e writing", alone=True),
    ]
    failed = run_missing(GpuWork(tmp_path, FIXTURES, 1.0, True, "cpu", 3), chosen, 1.0)
    (name,) = failed
    assert name.startswith("broken") and "nothing" in failed[name]
    left = [step.made.name for step in chosen if step.state(tmp_path) != "done"]
    assert left == ["broken", "never"]


def test_a_machine_without_a_gpu_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert result.output.startswith("this machine has no GPU") and "--device cpu" in result.output
    assert not (tmp_path / "out").exists()


def test_the_steps_are_tests_parity_bench_the_candidate_and_the_study(tmp_path: Path) -> None:
    found = steps(GpuWork(tmp_path, FIXTURES, 1.0, False, "cuda", 8))
    names = [step.name for step in found]
    assert len(set(names)) == len(names)
    before: set[Path] = set()
    for step in found:
        assert set(step.needs) <= before, f"{step.name} stands before what it needs"
        before.add(step.made)
    assert names[:2] == ["tests marked gpu", "parity of engines"]
    assert names[2].startswith("bench.llama")
    first = names.index(f"train {CANDIDATE[0]}")
    end = first + len(CANDIDATE)
    assert all("llama" in name for name in names[2:first])
    assert names[first:end] == [f"train {name}" for name in CANDIDATE]
    assert [step.alone for step in found] == [True] * first + [False] * (len(found) - first)
    rest = names[end:]
    sweep = [name for name in rest if name.startswith("budgets.")]
    assert len(sweep) == 5 and {f"shipped {name}" for name in sweep} <= set(rest)
    studied = [*TRAINED, "equal-c1", "equal-c2", "equal-c4"]
    assert {name.split(".")[0] for name in rest if name.startswith("train ")} == {
        f"train {name}" for name in studied
    }
    assert all(any(step.startswith(f"{name}.") for step in rest) for name in studied)


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


def test_every_row_is_asked_the_same_questions() -> None:
    cells = equal_training.cells(GPU)
    assert {cell.limit for cell in cells} == {None}
    assert all(GPU.sets[cell.questions].limit == 200 for cell in cells)


def test_stage_2_of_the_candidate_has_more_generated_questions() -> None:
    def entries(*overrides: str) -> dict[str, Any]:
        found: dict[str, Any] = read_entries(ROOT / "recipes/nano/stage2.yaml", overrides)
        return found

    own, longer = entries(), entries(*candidate_overrides("stage2", 1.0))

    def generated(recipe: dict[str, Any]) -> list[int]:
        sources = [source.get("options", {}) for source in recipe["data"]["training"]]
        return [options["count"] for options in sources if "count" in options]

    times = TIMES["stage2"]
    assert generated(longer) == [times * count for count in generated(own)]
    examples = [r["optimization"]["steps"] * r["optimization"]["batch_size"] for r in (own, longer)]
    assert examples[1] == times * examples[0]
