"""What a run at paper scale needs, before it starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner
from unit.baselines.conftest import SMALL
from unit.training.blocks import full_batch

from experiments.__main__ import app
from experiments.pages import STUDIES
from experiments.system import measures, needs
from experiments.system.cells import Cell, trainings
from experiments.system.models import Planned, main_model
from experiments.system.needs import examples_of_run, measure
from experiments.system.scales import PAPER, ROOT
from sedem import SeDeM, SedemConfig
from sedem.backbone.loading import open_backbone
from sedem.errors import ConfigError
from sedem_lab.baselines.registry import TRAINED, reader_class
from sedem_lab.evaluation.cost import Workload
from sedem_lab.training.baseline import BaselineRecipe, QuestionData
from sedem_lab.training.memory import Step
from sedem_lab.training.recipe import DataSource, Optimization, RunSettings, TextSource, load_recipe
from sedem_lab.training.shipped_recipes import shipped_recipe
from sedem_lab.training.stage1 import Stage1, Stage1Losses
from sedem_lab.training.stage2 import Stage2, Stage2Losses
from sedem_lab.training.stages import Stage1Recipe, Stage2Data, Stage2Recipe


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
    assert "or optimization.batch_tokens to less in a recipe that has it" in found
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


def test_the_commands_that_are_shown_have_no_memory_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["run", "parameters", "--scale", "paper", "--gpu-memory", "1.5", "--dry-run"]
    monkeypatch.setattr("sys.argv", ["experiments", *words])
    found = CliRunner().invoke(app, words).output
    assert "one GPU: python -m experiments run parameters --scale paper\n" in found


# The steps of training, without weights, against torch's count of a real step

BATCH, SEGMENT, AFTER, BLOCKS = 3, 16, 8, 5
RATES = {"compressor": 1.0, "decompressor": 1.0, "selector": 1.0, "lora": 1.0}
PLAIN = {"bf16": False, "backbone_dtype": "float32", "batch_size": BATCH, "steps": 1}
SETTINGS: dict[str, Any] = {
    "optimization": Optimization(learning_rates=RATES, **PLAIN),
    "run": RunSettings(output="x"),
}


@pytest.fixture(params=[False, True], ids=["one backbone", "two backbones"])
def model(
    request: pytest.FixtureRequest, config: SedemConfig, tiny_folder: Callable[..., str]
) -> SeDeM:
    """Wide MLPs, so that the half of attention that a causal mask hides weighs little."""
    encoder = open_backbone(tiny_folder(intermediate_size=512), attention="eager")
    decoder = encoder
    if request.param:
        folder = tiny_folder(intermediate_size=512, width=48, seed=1)
        decoder = open_backbone(folder, attention="eager")
    names = {"encoder": encoder.name, "decoder": decoder.name if request.param else None}
    return SeDeM(config.with_changes(**names), encoder, decoder)


def counted(stage: torch.nn.Module, batch: dict[str, Any]) -> int:
    stage.train()
    with FlopCounterMode(display=False) as counter:
        stage(**batch)["loss"].backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("losses", [{}, {"distill": 0.0, "reconstruct": 0.0}], ids=str)
def test_flops_of_stage1_are_those_of_a_step(model: SeDeM, losses: dict[str, Any]) -> None:
    text = TextSource(path="x", continuation=AFTER)
    weights = Stage1Losses(**losses)
    recipe = Stage1Recipe(model=model.config, text=text, losses=weights, **SETTINGS)
    batch = {
        "context": torch.randint(2, 250, (BATCH, SEGMENT)),
        "continuation": torch.randint(2, 250, (BATCH, AFTER)),
    }
    found = counted(Stage1(model, weights), batch)
    assert measure(recipe, Workload()).flops == pytest.approx(found, 0.03)


@pytest.mark.parametrize("losses", [{}, {"reconstruct": 0.0}], ids=str)
def test_flops_of_stage2_are_those_of_a_step(model: SeDeM, losses: dict[str, Any]) -> None:
    weights = Stage2Losses(**losses)
    data = Stage2Data(training=(DataSource(path="x"),), budgets=(2,))
    recipe = Stage2Recipe(model=model.config, data=data, losses=weights, **SETTINGS)
    model.decoder.add_lora(model.config.lora_rank, model.config.lora_alpha)
    found = counted(Stage2(model, weights, None), full_batch(model, BATCH, BLOCKS))
    asked = Workload(BLOCKS * SEGMENT, question=6, answer=4)
    assert measure(recipe, asked).flops == pytest.approx(found, 0.05)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("method", sorted(set(TRAINED) - {"rag"}))
def test_few_layers_say_what_a_step_of_all_takes(
    method: str, checkpointing: bool, tiny_folder: Callable[..., str]
) -> None:
    config = reader_class(method).Config(backbone=tiny_folder(depth=6), **SMALL[method])
    data = QuestionData(training=(DataSource(path="x"),))
    recipe = BaselineRecipe(method=method, model=config, data=data, **SETTINGS)
    asked = Workload(100, 7, 5)
    few = measure(recipe, asked, checkpointing=checkpointing)
    whole = needs.step_of(recipe, asked, BATCH, checkpointing)
    assert few.flops == whole.flops
    assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.05)


def recipe_of(kind: type[Any], name: str, *overrides: str) -> Any:
    return load_recipe(kind, shipped_recipe(name), list(overrides))


def test_the_examples_of_the_paper_follow_from_its_tokens_and_its_sets() -> None:
    stage1 = recipe_of(Stage1Recipe, "paper/llama-3.2-1b/stage1")
    assert examples_of_run(stage1) == 5 * (300_000_000 // (128 + 64))
    stage2 = recipe_of(Stage2Recipe, "paper/llama-3.2-1b/stage2-hotpotqa", "model.lora_rank=0")
    assert examples_of_run(stage2) == 3 * (90_447 - 500)


def test_an_epoch_of_unknown_length_is_refused() -> None:
    entries = "optimization.steps=null", "optimization.epochs=1"
    with pytest.raises(ConfigError, match="how many examples an epoch has"):
        examples_of_run(recipe_of(Stage2Recipe, "nano/stage2", *entries))
