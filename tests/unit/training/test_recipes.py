"""Every recipe of the repository runs: two steps on tiny backbones and small files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sedem import SeDeM, SedemConfig
from sedem.baselines.catalog import TRAINED
from sedem.training.recipe import DataSource, Optimization, Run, as_yaml, load_recipe
from sedem.training.run import Stage1Recipe, Stage2Recipe, train_stage1, train_stage2

RECIPES = Path(__file__).parents[3] / "recipes"
FILES = sorted(RECIPES.rglob("*.yaml"))
BASELINES = sorted(p for name in TRAINED for p in RECIPES.rglob(f"{name}-*.yaml"))
STAGE1 = [path for path in FILES if path.name.startswith("stage1")]
STAGE2 = [path for path in FILES if path.name.startswith("stage2")]

BY_SET = {
    "squad": "squad.json",
    "covidqa": "covidqa.json",
    "hotpotqa": "hotpotqa-hub.jsonl",
    "2wikimultihopqa": "2wikimultihopqa.json",
    "musique": "musique.jsonl",
    "qasper": "qasper.json",
    "exact-facts": "articles.jsonl",
    "cloze": "articles.jsonl",
}


def named(paths: list[Path]) -> dict[str, Any]:
    return {"argvalues": paths, "ids": [str(path.relative_to(RECIPES)) for path in paths]}


def small_model(config: SedemConfig, tiny_folder: Callable[..., str]) -> SedemConfig:
    """The recipe's shape on tiny backbones that have its layers; weights of adapters stay small."""
    depth = max(config.extract_layer, config.inject_layer + 1)
    decoder = None
    if config.cross_model:
        decoder = tiny_folder(width=48, depth=depth, seed=1, max_position_embeddings=4096)
    return replace(
        config,
        encoder=tiny_folder(depth=depth, max_position_embeddings=4096),
        decoder=decoder,
        decompressor_hidden=config.decompressor_hidden and 40,
        lora_rank=config.lora_rank and 2,
    )


def two_steps(optimization: Optimization) -> Optimization:
    return replace(optimization, steps=2, epochs=None, batch_size=2, accumulation=1, warmup=1)


def small_run(run: Run, folder: Path) -> Run:
    return replace(run, output=str(folder / "out"), log_every=1, save_every=2, eval_every=0)


def small_source(source: DataSource) -> DataSource:
    """The same schema, label and options on a few real records."""
    schema = source.set or next(name for name in BY_SET if source.path.startswith(name))
    options = dict(source.options)
    if "count" in options:
        options["count"] = 3
    if schema == "squad":
        options["distractors"] = 2
    return replace(source, path=BY_SET[schema], records=None, options=options)


def assert_trained(folder: Path, parts: set[str]) -> None:
    summary = json.loads((folder / "out" / "training.json").read_text())
    assert summary["steps"] == 2
    assert set(summary["trained_parameters"]) == parts
    losses = [line["loss"] for line in summary["log"] if "loss" in line]
    assert len(losses) == 2 and all(0 < loss < 1000 for loss in losses)
    SeDeM.from_pretrained(folder / "out" / "final")


def test_there_are_recipes_of_both_stages_and_every_file_is_one() -> None:
    assert STAGE1 and STAGE2
    assert sorted(STAGE1 + STAGE2 + BASELINES) == FILES


@pytest.mark.parametrize("path", **named(STAGE1))
def test_a_stage_1_recipe_trains(
    path: Path, tiny_folder: Callable[..., str], fixtures: Path, tmp_path: Path
) -> None:
    recipe = load_recipe(Stage1Recipe, path)
    assert load_recipe(Stage1Recipe, _written(recipe, tmp_path)) == recipe
    text = replace(
        recipe.text,
        path="articles.jsonl",
        held_out=min(recipe.text.held_out, 2),
        evaluation_windows=2,
    )
    train_stage1(
        replace(
            recipe,
            model=small_model(recipe.model, tiny_folder),
            text=text,
            optimization=two_steps(recipe.optimization),
            run=small_run(recipe.run, tmp_path),
            data_root=str(fixtures),
            cache=str(tmp_path / "cache"),
            start_from=None,
        )
    )
    assert_trained(tmp_path, {"compressor", "decompressor"})


@pytest.mark.parametrize("path", **named(STAGE2))
def test_a_stage_2_recipe_trains(
    path: Path, tiny_folder: Callable[..., str], fixtures: Path, tmp_path: Path
) -> None:
    recipe = load_recipe(Stage2Recipe, path)
    assert load_recipe(Stage2Recipe, _written(recipe, tmp_path)) == recipe
    data = replace(
        recipe.data,
        training=tuple(map(small_source, recipe.data.training)),
        evaluation=tuple(map(small_source, recipe.data.evaluation)),
        max_blocks=min(recipe.data.max_blocks, 6),
        answer_limit=200,
    )
    train_stage2(
        replace(
            recipe,
            model=small_model(recipe.model, tiny_folder),
            data=data,
            optimization=two_steps(recipe.optimization),
            run=small_run(recipe.run, tmp_path),
            data_root=str(fixtures),
            cache=str(tmp_path / "cache"),
            start_from=None,
        )
    )
    assert_trained(tmp_path, {"compressor", "decompressor", "selector", "lora"})


def test_a_recipe_goes_on_from_another_of_its_folder_and_of_its_shape() -> None:
    ends = {}
    for path in STAGE1:
        first = load_recipe(Stage1Recipe, path)
        ends[f"{first.run.output}/final"] = (path.parent, first.model)
    for path in STAGE2:
        second = load_recipe(Stage2Recipe, path)
        ends[f"{second.run.output}/final"] = (path.parent, second.model)
    for path in STAGE2:
        second = load_recipe(Stage2Recipe, path)
        folder, model = ends[str(second.start_from)]
        assert folder == path.parent
        free = {"k": second.model.k, "lora_rank": second.model.lora_rank}
        assert replace(model, **free, lora_alpha=second.model.lora_alpha) == second.model


def test_no_two_recipes_share_an_output_folder() -> None:
    outputs = [load_recipe(Stage1Recipe, path).run.output for path in STAGE1]
    outputs += [load_recipe(Stage2Recipe, path).run.output for path in STAGE2]
    assert len(set(outputs)) == len(outputs)


def test_the_paper_recipes_read_the_papers_text() -> None:
    paper = [load_recipe(Stage1Recipe, path) for path in STAGE1 if "paper" in path.parts]
    assert len(paper) == 3
    for recipe in paper:
        assert (recipe.text.path, recipe.text.tokens) == ("hub:DKYoon/SlimPajama-6B", 300_000_000)
        assert recipe.text.windows is None and recipe.optimization.epochs == 5


def test_the_paper_recipes_have_the_papers_numbers() -> None:
    for path in STAGE2:
        if "paper" not in path.parts:
            continue
        recipe = load_recipe(Stage2Recipe, path)
        losses, model = recipe.losses, recipe.model
        assert (losses.select, losses.margin_weight, losses.margin) == (1.0, 0.5, 2.0)
        assert (losses.selection_temperature, losses.reconstruct) == (0.07, 0.1)
        rates = recipe.optimization.learning_rates
        assert (rates["compressor"], rates["lora"], rates["selector"]) == (1e-4, 1e-4, 5e-4)
        assert (model.segment_length, model.compression) == (128, 4)
        assert (model.lora_rank, model.lora_alpha) == (64, 128)
        assert recipe.optimization.epochs == 3 and recipe.optimization.bf16


def _written(recipe: Any, folder: Path) -> Path:
    path = folder / "written.yaml"
    path.write_text(as_yaml(recipe))
    return path
