"""What a run at paper scale needs, before it starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from experiments.__main__ import app
from experiments.pages import STUDIES
from experiments.system import measures, needs
from experiments.system.cells import Cell, trainings
from experiments.system.models import Planned, main_model
from experiments.system.scales import PAPER, ROOT
from sedem_lab.baselines.registry import TRAINED
from sedem_lab.training.memory import Step


def test_a_table_says_what_it_needs_and_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(app, ["run", "--scale", "paper", "--only", "transfer", "--dry-run"])
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    row = next(line for line in lines if "transfer" in line)
    assert row.split()[1:6:2] == ["transfer", "2", "4"]
    # At what a GPU sustains at best and at least.
    low, high = (float(row.split()[place]) for place in (7, 9))
    assert high == pytest.approx(5 * low, rel=0.01)
    assert "weights: meta-llama/Llama-3.2-1B, 1.24B, 2.47 GB; Llama 3.2 Community" in found.output
    assert "set: allenai/qasper, 2,322 and 945 questions; CC BY 4.0" in found.output
    # It is trained on, and not asked.
    assert "set: hotpotqa/hotpot_qa, 90,447 and 7,405 questions; CC BY-SA 4.0" in found.output
    assert "text: hub:DKYoon/SlimPajama-6B, streamed" in found.output
    assert "eight: accelerate launch --config_file" in lines[-1]
    assert not list(tmp_path.iterdir())


def test_a_table_of_cells_that_other_tables_have_is_listed() -> None:
    found = CliRunner().invoke(app, ["run", "--scale", "paper", "--only", "param", "--dry-run"])
    rows = {line.split()[1]: line.split()[3] for line in found.output.splitlines() if "│" in line}
    assert rows["parameters"] == "2" and rows["parameter_overhead"] == "8"
    found = CliRunner().invoke(
        app, ["run", "parameter_overhead", "flops", "--scale", "paper", "--dry-run"]
    )
    assert any(line.split()[1:4:2] == ["flops", "0"] for line in found.output.splitlines())


def test_a_setting_changes_every_recipe_and_its_results_record_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = replace(PAPER, changes=("run.keep=7",))
    cell = Cell(variant=main_model(PAPER), questions="hotpotqa", k=2)
    for planned in trainings(cell, scale, Path("data")).values():
        assert planned.recipe.run.keep == 7
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(measures.MEASURES, "answers", lambda *_: {"f1": 1.0})
    measures.measure(cell, scale, tmp_path, "main_qa")
    # Apart from the results and models of the recipes as they are.
    (written,) = (tmp_path / "runs" / "paper-run.keep=7").rglob("*.json")
    assert json.loads(written.read_text("utf-8"))["set"] == ["run.keep=7"]


@pytest.fixture(scope="module")
def runs() -> dict[Path, Planned]:
    """Every run of the scale."""
    cells = dict.fromkeys(cell for study in STUDIES.values() for cell in study.cells(PAPER))
    return dict(pair for cell in cells for pair in trainings(cell, PAPER, Path("data")).items())


def test_every_kind_of_recipe_of_the_scale_is_counted(runs: dict[Path, Planned]) -> None:
    assert len({run.path.name for run in runs.values()}) > 25
    kinds = {run.trained: run for run in runs.values()}
    assert {"stage1", "stage2", *TRAINED} == kinds.keys()
    for name, run in kinds.items():
        assert needs.training_flops(run) > 1e15 and needs.checkpoint_bytes(run) > 1e5, name


def test_the_runs_of_a_cell_start_from_each_other_and_are_shared() -> None:
    cell = Cell(variant=main_model(PAPER), questions="hotpotqa", k=2)
    runs = trainings(cell, PAPER, Path("data"))
    stage1, stage2 = runs.values()
    assert [run.trained for run in runs.values()] == ["stage1", "stage2"]
    assert stage2.recipe.start_from == f"{stage1.recipe.run.output}/final"
    hours = needs.training_flops(stage1) / (needs.TFLOPS[0] * 1e12) / 3600
    assert 5 < hours < 7


def test_a_recipe_that_a_gpu_has_no_room_for_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    cell = Cell(variant=main_model(PAPER), questions="hotpotqa", k=2)
    stage1, stage2 = trainings(cell, PAPER, Path("data")).values()
    assert needs.print_memory([stage1, stage2], 80 * needs.GIB)
    assert "does not fit" not in capsys.readouterr().out
    assert not needs.print_memory([stage1], 8 * needs.GIB)
    found = capsys.readouterr().out
    assert "llama-3.2-1b/stage1 does not fit: its longest batch takes" in found
    assert "a GPU of 8 GiB has room for 7.4; set optimization.batch_size to less" in found


@pytest.mark.parametrize("name", ["stage1", "stage2-hotpotqa", "full-context-tuned-questions"])
def test_the_page_shows_what_the_longest_batch_takes(name: str, runs: dict[Path, Planned]) -> None:
    own = [
        r for r in runs.values() if (r.path.parent.name, r.path.stem) == (PAPER.backbones[0], name)
    ]
    run = max(own, key=lambda run: needs.longest_question(run).context)
    step, checkpointing = needs.longest_step(run, 80 * needs.GIB)
    page = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
    size = f"{step.peak_bytes / needs.GIB:.1f}" + " *" * checkpointing
    assert row.split("|")[3].strip() == size


def test_checkpointing_is_on_where_a_step_would_not_fit_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell = Cell(variant=main_model(PAPER), questions="hotpotqa", k=2)
    run, *_ = trainings(cell, PAPER, Path("data")).values()
    sizes = {False: Step(1, 90 * needs.GIB), True: Step(2, 60 * needs.GIB)}
    monkeypatch.setattr(needs, "measure", lambda *_, checkpointing=False: sizes[checkpointing])
    assert needs.longest_step(run, 80 * needs.GIB) == (sizes[True], True)
    assert needs.longest_step(run, 141 * needs.GIB) == (sizes[False], False)


def test_no_training_of_the_paper_is_done_twice(runs: dict[Path, Planned]) -> None:
    free = {"run", "start_from"}
    recipes = [run.recipe.model_dump_json(exclude=free) for run in runs.values()]
    starts = {folder: number for number, folder in enumerate(runs)}
    started = [
        (recipe, starts.get(Path(run.recipe.start_from or "").parent))
        for recipe, run in zip(recipes, runs.values(), strict=True)
    ]
    assert len(set(started)) == len(started)


def test_the_memory_of_a_gpu_is_of_a_dry_run_and_not_of_the_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["run", "parameters", "--scale", "paper", "--gpu-memory", "1.5"]
    assert "--gpu-memory is of a dry run" in CliRunner().invoke(app, words).output
    monkeypatch.setattr("sys.argv", ["experiments", *words, "--dry-run"])
    found = CliRunner().invoke(app, [*words, "--dry-run"]).output
    assert "one GPU: python -m experiments run parameters --scale paper\n" in found


@pytest.mark.parametrize("option", ["--dry-run", "--stand-in"])
def test_only_the_paper_has_a_dry_run_and_stand_ins(option: str) -> None:
    found = CliRunner().invoke(app, ["run", option])
    assert found.exit_code == 2 and f"{option} is of the scale paper, not of nano" in found.output


@pytest.mark.parametrize("part", ["3/2", "0/2", "half"])
def test_a_part_that_is_none_is_refused(part: str) -> None:
    found = CliRunner().invoke(app, ["run", "--part", part])
    assert found.exit_code == 2 and f"part is '{part}'; it must be like 2/8" in found.output
