"""The recipes of the repository: one of each kind trains here, all of them in tests/slow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from unit.training.small_recipes import train_small

from sedem import SedemConfig
from sedem.checkpoint.folder import EXTRA_ENTRIES, locate
from sedem.config import FITTED
from sedem_lab.baselines.registry import TRAINED
from sedem_lab.training.recipe import as_yaml
from sedem_lab.training.shipped_recipes import backbones_of, shipped_recipe, shipped_recipes
from sedem_lab.training.stages import Stage1Recipe, Stage2Recipe, load_run

RECIPES = [name for name in shipped_recipes() if not backbones_of(name)]
RECIPES += [
    name.replace("/", f"/{one}/") for name in shipped_recipes() for one in backbones_of(name)
]
ONE_OF_EACH = [
    "nano/stage1-study",
    "nano/stage2-guided",
    *(f"nano/{method}-questions" for method in TRAINED),
]
FREE = (
    *("k", "lora_rank", "lora_alpha", "block_context", "guidance", "condition", "segmentation"),
    *FITTED,
)
"""Settings that a recipe may change from the checkpoint that it starts from."""


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_recipe_trains(name: str, tiny_folder: Callable[..., str], tmp_path: Path) -> None:
    train_small(name, tiny_folder, tmp_path)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_written_out_is_the_same_recipe(name: str, tmp_path: Path) -> None:
    recipe, train = load_run(shipped_recipe(name))
    (tmp_path / "written.yaml").write_text(as_yaml(recipe))
    again, trains = load_run(tmp_path / "written.yaml")
    assert (again.to_dict(), trains) == (recipe.to_dict(), train)


def test_no_two_recipes_share_an_output_folder_and_each_starts_from_another() -> None:
    recipes = [load_run(shipped_recipe(name))[0] for name in RECIPES]
    ends = {f"{recipe.run.output}/final": recipe for recipe in recipes}
    assert len(ends) == len(recipes)
    for recipe in recipes:
        if recipe.start_from is None:
            continue
        if isinstance(recipe, Stage1Recipe | Stage2Recipe):
            free = {name: getattr(recipe.model, name) for name in FREE}
            if recipe.start_from in ends:
                model = ends[recipe.start_from].model
            else:
                folder = locate(recipe.start_from)
                model = SedemConfig.load(folder, extra=EXTRA_ENTRIES)
                free |= {"encoder": recipe.model.encoder}
            assert model.with_changes(**free) == recipe.model
        else:
            first, then = dict(ends[recipe.start_from].model), dict(recipe.model)
            assert {name for name in then if then[name] != first[name]} <= recipe.model.free
