"""The steps of training, without weights, against torch's count of a real step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from experiments.system.training_steps import examples_of_run, measure
from torch.utils.flop_counter import FlopCounterMode
from unit.baselines.conftest import SMALL
from unit.training.blocks import full_batch

from sedem import SeDeM, SedemConfig
from sedem.backbone.loading import open_backbone
from sedem.errors import ConfigError
from sedem_lab.baselines.registry import TRAINED, reader_class
from sedem_lab.evaluation.cost import Workload
from sedem_lab.training.baseline import BaselineRecipe, QuestionData
from sedem_lab.training.recipe import DataSource, Optimization, RunSettings, TextSource, load_recipe
from sedem_lab.training.shipped_recipes import shipped_recipe
from sedem_lab.training.stage1 import Stage1, Stage1Losses
from sedem_lab.training.stage2 import Stage2, Stage2Losses
from sedem_lab.training.stages import Stage1Recipe, Stage2Data, Stage2Recipe

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
    asked, flag = Workload(100, 7, 5), {"checkpointing": checkpointing}
    few = measure(recipe, asked, **flag)
    whole = measure(recipe, asked, whole=True, **flag)
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
