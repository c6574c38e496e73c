"""The cost of training is what torch counts in one real step, and what the recipes say."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sedem import SeDeM, SedemConfig
from sedem.backbone.loading import open_backbone
from sedem.bench.training_cost import Assumed, Shapes, stage1_cost, stage2_cost, training_cost
from sedem.errors import ConfigError
from sedem.evaluation.cost import Workload
from sedem.training.recipe import DataSource, Optimization, RunSettings, TextSource
from sedem.training.shipped_recipes import shipped_recipe
from sedem.training.stage1 import Stage1, Stage1Losses
from sedem.training.stage2 import Stage2, Stage2Losses
from sedem.training.stages import Stage1Recipe, Stage2Data, Stage2Recipe

BATCH, SEGMENT, AFTER, QUESTION, ANSWER, BLOCKS = 3, 16, 8, 6, 4, 5
RATES = {"compressor": 1.0, "decompressor": 1.0, "selector": 1.0, "lora": 1.0}
SETTINGS: dict[str, Any] = {
    "optimization": Optimization(learning_rates=RATES, steps=1),
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


def shapes(model: SeDeM) -> Shapes:
    return Shapes(model.config, model.encoder.model.config, model.decoder.model.config)


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
    assert BATCH * stage1_cost(recipe, shapes(model)).flops.total() == pytest.approx(found, 0.03)


@pytest.mark.parametrize("losses", [{}, {"reconstruct": 0.0}], ids=str)
def test_flops_of_stage2_are_those_of_a_step(model: SeDeM, losses: dict[str, Any]) -> None:
    weights = Stage2Losses(**losses)
    data = Stage2Data(training=(DataSource(path="x"),), budgets=(2,))
    recipe = Stage2Recipe(model=model.config, data=data, losses=weights, **SETTINGS)
    workload = Workload(context=BLOCKS * SEGMENT, question=QUESTION, answer=ANSWER)
    model.decoder.add_lora(model.config.lora_rank, model.config.lora_alpha)
    found = counted(Stage2(model, weights, None), stage2_batch(model))
    work = stage2_cost(recipe, shapes(model), workload)
    assert BATCH * work.flops.total() == pytest.approx(found, 0.05)


def stage2_batch(model: SeDeM) -> dict[str, Any]:
    """Examples without padding, so that every position is counted."""
    slots = model.config.slots
    evidence = torch.zeros(BATCH, BLOCKS, dtype=torch.bool)
    evidence[:, 1] = True
    return {
        "segment_ids": torch.randint(2, 250, (BATCH * BLOCKS, SEGMENT)),
        "segment_mask": torch.ones(BATCH * BLOCKS, SEGMENT, dtype=torch.bool),
        "slot_index": torch.arange(BATCH * BLOCKS * slots).view(BATCH, BLOCKS, slots),
        "slot_tokens": torch.full((BATCH, BLOCKS, slots), model.config.compression),
        "blocks": torch.ones(BATCH, BLOCKS, dtype=torch.bool),
        "evidence": evidence,
        "question_ids": torch.randint(2, 250, (BATCH, QUESTION)),
        "question_mask": torch.ones(BATCH, QUESTION, dtype=torch.bool),
        "ids": torch.randint(2, 250, (BATCH, QUESTION + ANSWER)),
        "valid": torch.ones(BATCH, QUESTION + ANSWER, dtype=torch.bool),
        "labels": torch.randint(2, 250, (BATCH, ANSWER)),
        "coins": torch.rand(BATCH),
        "budget": 2,
        "condition": "memory",
        "texts": [],
    }


@cache
def cost(name: str, *overrides: str, **assumed: Any) -> dict[str, Any]:
    return training_cost(shipped_recipe(name), list(overrides), Assumed(**assumed))


def test_steps_and_hours_of_the_paper_follow_from_its_tokens() -> None:
    result = cost("paper/llama-3.2-1b/stage1")
    windows = 300_000_000 // (128 + 64)
    assert result["examples"] == 5 * windows
    assert result["steps"] == 5 * -(-windows // 64)
    assert result["hours"] == pytest.approx(result["flops"]["total"] / 400e12 / 3600)


def test_a_public_set_has_the_questions_that_its_recipe_leaves() -> None:
    lora = "model.lora_rank=0"
    result = cost("paper/llama-3.2-1b/stage2-hotpotqa", lora, tflops=200.0, gpus=8)
    assert result["examples"] == 3 * (90_447 - 500)
    assert result["hours"] == pytest.approx(result["flops"]["total"] / 1600e12 / 3600)


def test_fewer_logits_at_once_take_less_memory() -> None:
    name = "paper/llama-3.2-1b/stage1"
    full, few = cost(name)["bytes"], cost(name, "optimization.logits_at_once=256")["bytes"]
    assert few["logits"] * 16 == full["logits"]
    assert full["memory"] - few["memory"] == full["logits"] - few["logits"]


def test_divided_layers_take_less_memory_on_each_of_several_gpus() -> None:
    name, switch = "paper/llama-3.2-3b/stage1", "optimization.shard_backbone=true"
    whole = cost(name, gpus=8)["bytes"]["weights"]
    assert cost(name, switch)["bytes"]["weights"] == whole
    # Llama-3.2-3B: 28 equal layers in bfloat16 beside an embedding of 128,256 x 3,072, which is
    # the head too. A GPU holds an eighth of the layers, and the one that runs.
    embedding = 2 * 128_256 * 3072
    expected = embedding + (whole - embedding) * (1 / 8 + 1 / 28)
    assert cost(name, switch, gpus=8)["bytes"]["weights"] == pytest.approx(expected, rel=1e-4)


def test_cached_states_are_on_disk_and_not_in_the_steps() -> None:
    result = cost("nano/stage2")
    assert result["bytes"]["cache_on_disk"] > 0
    assert result["tokens"]["frozen"] == 0


def test_a_baseline_and_an_epoch_of_unknown_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="trains the baseline 'icae'"):
        cost("nano/icae-text")
    with pytest.raises(ConfigError, match="give --examples N"):
        cost("nano/stage2", "optimization.steps=null", "optimization.epochs=1")
