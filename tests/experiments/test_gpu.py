"""The script for an hour on a GPU: interrupted and resumed on a CPU, at a tiny size."""

from __future__ import annotations

import io
import json
import os
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from experiments.gpu import app
from experiments.system.gpu_scale import (
    CANDIDATE,
    GPU,
    TIMES,
    candidate_overrides,
    gpu_scale,
)
from experiments.system.gpu_steps import steps
from experiments.system.scales import NANO, ROOT
from experiments.system.step_archive import archive
from experiments.system.step_processes import LOG, Step, Work, run_missing
from experiments.system.study import find
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

    done = call(tmp_path, *only, "--archive", str(tmp_path / "packed"))
    assert done.exit_code == 0, done.output
    assert "1 of 1 steps are done" in done.output
    assert (tmp_path / "runs/smoke/stage1-regress/final").is_dir()
    outcomes = [json.loads(line)["outcome"] for line in (tmp_path / LOG).read_text().splitlines()]
    assert outcomes == ["stopped", "failed", "done"]

    listed = call(tmp_path, "--list").output.splitlines()
    assert listed[0].split() == ["done", "train", "stage1-regress"]
    assert listed[1].split() == ["missing", "train", "stage1"]
    assert listed[2].split() == ["waiting", "train", "stage2"]
    made = ["logs/train-stage1-regress.log", "runs/smoke/stage1-regress/training.json", LOG]
    assert unpacked(tmp_path / "packed") == made

    stuck = call(tmp_path, "--only", "train stage2", "--skip", "stage2-")
    assert stuck.exit_code == 1
    assert "waiting for a step that was not chosen: train stage2" in stuck.output

    other = call(tmp_path, *only, "--budget", "0.5")
    assert other.exit_code == 1 and "other settings" in other.output


def unpacked(path: Path) -> list[str]:
    """The names in an archive of several parts."""
    parts = sorted(path.parent.glob(f"{path.name}.*"))
    content = io.BytesIO(b"".join(part.read_bytes() for part in parts))
    with tarfile.open(fileobj=content) as tar:
        return tar.getnames()


def shell(name: str, command: str, *needs: str, alone: bool = False) -> Step:
    run = partial(os.system, f"{command} && touch {name}")
    return Step(name, run, Path(name), tuple(map(Path, needs)), alone)


def test_steps_run_at_once_after_what_they_need_or_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    chosen = [
        Step("broken", partial(Path.unlink, Path("nothing")), Path("broken")),
        shell("never", "true", "broken"),
        shell("reading", "cat pipe", "first"),
        shell("first", "test ! -e writing"),
        # Of a pipe, neither end can be opened without the other.
        shell("writing", "echo > pipe"),
        shell("alone", "test -e reading && test -e writing", alone=True),
    ]
    failed = run_missing(Work(tmp_path, FIXTURES, 1.0, True, "cpu", 3), chosen, 1.0)
    assert list(failed) == ["broken"] and "nothing" in failed["broken"]
    assert {step.name for step in chosen if not step.is_done(tmp_path)} == {"broken", "never"}


def test_the_archive_has_the_last_two_checkpoints_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = Path("runs")
    for name in CANDIDATE:
        for file in ("sedem.safetensors", "backbone/model.safetensors"):
            path = tmp_path / runs / name / "final" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(100))
    packed = tmp_path / "packed"
    packed.with_name("packed.99").write_bytes(b"of an earlier call")
    monkeypatch.setattr("experiments.system.step_archive.PART", 64)
    parts = archive(tmp_path, [], runs, packed)
    assert len(parts) > 1 and all(part.stat().st_size <= 64 for part in parts)
    expected = [f"runs/{name}/final/sedem.safetensors" for name in CANDIDATE[-2:]]
    assert unpacked(packed) == sorted(expected)
    assert not packed.with_name("packed.99").exists()


@pytest.mark.slow
def test_every_step_runs_at_a_tiny_size(tmp_path: Path) -> None:
    done = call(tmp_path, "--minutes", "60", "--processes", "2")
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
    found = steps(Work(tmp_path, FIXTURES, 1.0, False, "cuda", 8))
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
    cells = find("equal_training").cells(GPU)
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
