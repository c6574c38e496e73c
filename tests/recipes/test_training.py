"""Every recipe of SeDeM trains, and its checkpoint answers: two steps on tiny backbones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from unit.training.small_recipes import (
    on_tiny_backbones,
    small_run,
    small_stage1,
    small_stage2,
)

from sedem import Decoding, Document, SeDeM, SedemConfig
from sedem.baselines.registry import TRAINED
from sedem.checkpoint.folder import EXTRA_ENTRIES
from sedem.training.recipe import as_yaml, load_recipe
from sedem.training.shipped_recipes import shipped_recipes
from sedem.training.stages import Stage1Recipe, Stage2Recipe, train_stage1, train_stage2

RECIPES = Path(__file__).parents[2] / "recipes"
FIXTURES = Path(__file__).parents[1] / "fixtures"
FILES = sorted(shipped_recipes().values())
BASELINES = sorted(p for name in TRAINED for p in RECIPES.rglob(f"{name}-*.yaml"))
STAGE1 = [path for path in FILES if path.name.startswith("stage1")]
STAGE2 = [path for path in FILES if path.name.startswith("stage2")]

FREE = ("k", "lora_rank", "lora_alpha", "block_context", "guidance", "condition", "confidence")
"""Settings that a recipe may change from the checkpoint that it starts from."""


def name(path: Path) -> str:
    return str(path.relative_to(RECIPES))


def distinct(small: dict[Path, Any]) -> Any:
    """One parameter for each small recipe; files that differ only in what is shrunk share it."""
    by_content = {as_yaml(recipe): (path, recipe) for path, recipe in reversed(small.items())}
    return [pytest.param(recipe, id=name(path)) for path, recipe in by_content.values()]


SMALL_STAGE1 = {path: small_stage1(load_recipe(Stage1Recipe, path)) for path in STAGE1}
SMALL_STAGE2 = {path: small_stage2(load_recipe(Stage2Recipe, path)) for path in STAGE2}


def run_in(folder: Path, recipe: Any, tiny_folder: Callable[..., str]) -> Any:
    """The small recipe with its backbones, data and output in place."""
    return recipe.with_changes(
        model=on_tiny_backbones(recipe.model, tiny_folder),
        run=small_run(recipe.run, folder),
        data_root=str(FIXTURES),
        cache=str(folder / "cache"),
    )


def assert_trained(folder: Path, parts: set[str]) -> None:
    summary = json.loads((folder / "out" / "training.json").read_text())
    assert summary["steps"] == 2
    assert set(summary["trained_parameters"]) == parts
    losses = [line["loss"] for line in summary["log"] if "loss" in line]
    assert len(losses) == 2 and all(0 < loss < 1000 for loss in losses)
    model = SeDeM.from_pretrained(folder / "out" / "final")
    if "lora" in parts:
        rent = Document("rent", "The rent is 900 euros a month.")
        answer = model.answer(model.read([rent]), "How much?", decoding=Decoding(max_new_tokens=2))
        assert answer.k == 1 and answer.finish_reason in ("end", "length")


def test_there_are_recipes_of_both_stages_and_every_file_is_one() -> None:
    assert STAGE1 and STAGE2
    assert sorted(STAGE1 + STAGE2 + BASELINES) == FILES


@pytest.mark.parametrize("path", STAGE1 + STAGE2, ids=name)
def test_a_recipe_written_out_is_the_same_recipe(path: Path, tmp_path: Path) -> None:
    kind = Stage1Recipe if path in STAGE1 else Stage2Recipe
    recipe = load_recipe(kind, path)
    (tmp_path / "written.yaml").write_text(as_yaml(recipe))
    assert load_recipe(kind, tmp_path / "written.yaml") == recipe


@pytest.mark.parametrize("recipe", distinct(SMALL_STAGE1))
def test_a_stage_1_recipe_trains(
    recipe: Stage1Recipe, tiny_folder: Callable[..., str], tmp_path: Path
) -> None:
    train_stage1(run_in(tmp_path, recipe, tiny_folder))
    assert_trained(tmp_path, {"compressor", "decompressor"})


@pytest.mark.parametrize("recipe", distinct(SMALL_STAGE2))
def test_a_stage_2_recipe_trains(
    recipe: Stage2Recipe, tiny_folder: Callable[..., str], tmp_path: Path
) -> None:
    train_stage2(run_in(tmp_path, recipe, tiny_folder))
    guidance = {"guidance"} if recipe.model.guidance else set()
    assert_trained(tmp_path, {"compressor", "decompressor", "selector", "lora", *guidance})


def test_a_recipe_starts_from_another_of_its_folder_and_shape() -> None:
    ends = {}
    for path in STAGE1:
        first = load_recipe(Stage1Recipe, path)
        ends[f"{first.run.output}/final"] = (path.parent, first.model)
    for path in STAGE2:
        second = load_recipe(Stage2Recipe, path)
        ends[f"{second.run.output}/final"] = (path.parent, second.model)
    for path in STAGE2:
        second = load_recipe(Stage2Recipe, path)
        free = {name: getattr(second.model, name) for name in FREE}
        if (shipped := RECIPES.parent / str(second.start_from)).is_dir():
            model = SedemConfig.load(shipped, extra=EXTRA_ENTRIES)
            free |= {"encoder": second.model.encoder}
        else:
            folder, model = ends[str(second.start_from)]
            assert folder == path.parent
        assert model.with_changes(**free) == second.model


def test_no_two_recipes_share_an_output_folder() -> None:
    outputs = [load_recipe(Stage1Recipe, path).run.output for path in STAGE1]
    outputs += [load_recipe(Stage2Recipe, path).run.output for path in STAGE2]
    assert len(set(outputs)) == len(outputs)
