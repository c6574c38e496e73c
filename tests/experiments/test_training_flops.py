"""The FLOPs of training are what torch counts in one real step, times what the recipes say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from experiments.system.training_flops import (
    Shapes,
    examples_of_run,
    run_flops,
    stage1_flops,
    stage2_flops,
)
from sedem import SeDeM, SedemConfig
from sedem.backbone.loading import open_backbone
from sedem.errors import ConfigError
from sedem.evaluation.cost import Workload
from sedem.training.recipe import DataSource, Optimization, RunSettings, TextSource, load_recipe
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
    assert BATCH * stage1_flops(recipe, shapes(model)) == pytest.approx(found, 0.03)


@pytest.mark.parametrize("losses", [{}, {"reconstruct": 0.0}], ids=str)
def test_flops_of_stage2_are_those_of_a_step(model: SeDeM, losses: dict[str, Any]) -> None:
    weights = Stage2Losses(**losses)
    data = Stage2Data(training=(DataSource(path="x"),), budgets=(2,))
    recipe = Stage2Recipe(model=model.config, data=data, losses=weights, **SETTINGS)
    workload = Workload(context=BLOCKS * SEGMENT, question=QUESTION, answer=ANSWER)
    model.decoder.add_lora(model.config.lora_rank, model.config.lora_alpha)
    found = counted(Stage2(model, weights, None), stage2_batch(model))
    work = stage2_flops(recipe, shapes(model), workload)
    assert BATCH * work == pytest.approx(found, 0.05)


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


def recipe_of(kind: type[Any], name: str, *overrides: str) -> Any:
    return load_recipe(kind, shipped_recipe(name), list(overrides))


def test_the_examples_of_the_paper_follow_from_its_tokens_and_its_sets() -> None:
    stage1 = recipe_of(Stage1Recipe, "paper/llama-3.2-1b/stage1")
    assert examples_of_run(stage1) == 5 * (300_000_000 // (128 + 64))
    stage2 = recipe_of(Stage2Recipe, "paper/llama-3.2-1b/stage2-hotpotqa", "model.lora_rank=0")
    assert examples_of_run(stage2) == 3 * (90_447 - 500)


def test_cached_states_are_computed_once() -> None:
    workload, of_files = Workload(), "optimization.steps=100"
    cached = recipe_of(Stage2Recipe, "nano/stage2", of_files)
    plain = recipe_of(Stage2Recipe, "nano/stage2", of_files, "data.cache_states=false")
    assert cached.data.cache_states
    assert run_flops(cached, workload) == run_flops(plain, workload)
    # Of a public set, it is known how many examples the steps read again.
    name, cache = "paper/llama-3.2-1b/stage2-hotpotqa", "data.cache_states=true"
    own = [recipe_of(Stage2Recipe, name, *more) for more in ((), (cache,))]
    assert run_flops(own[1], workload) < run_flops(own[0], workload)


def test_an_epoch_of_unknown_length_is_refused() -> None:
    entries = "optimization.steps=null", "optimization.epochs=1"
    with pytest.raises(ConfigError, match="how many examples an epoch has"):
        examples_of_run(recipe_of(Stage2Recipe, "nano/stage2", *entries))
