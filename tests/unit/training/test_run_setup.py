from __future__ import annotations

import pytest
import torch
from unit.training.runs import train

from sedem import SedemConfig
from sedem.errors import ConfigError, DataError
from sedem.training.recipe import as_yaml
from sedem.training.run_setup import backbone_options, check_start, start_run
from sedem.training.stages import Stage1Recipe, Stage2Recipe


def test_a_run_writes_its_recipe_and_seeds_random_numbers(stage1_recipe: Stage1Recipe) -> None:
    output = start_run(stage1_recipe)
    drawn = torch.rand(3)
    assert str(output) == stage1_recipe.run.output
    assert (output / "recipe.yaml").read_text() == as_yaml(stage1_recipe)
    torch.rand(5)
    start_run(stage1_recipe)
    assert torch.equal(torch.rand(3), drawn)


def with_other_steps(recipe: Stage1Recipe) -> Stage1Recipe:
    return recipe.with_changes(optimization=recipe.optimization.with_changes(steps=7))


@pytest.mark.parametrize("checkpoint", ["checkpoint-2", "final"])
def test_a_folder_with_a_checkpoint_refuses_other_settings(
    stage1_recipe: Stage1Recipe, checkpoint: str
) -> None:
    output = start_run(stage1_recipe)
    (output / checkpoint).mkdir()
    with pytest.raises(ConfigError, match=r"holds a run with other settings .*recipe\.yaml"):
        start_run(with_other_steps(stage1_recipe))
    assert (output / "recipe.yaml").read_text() == as_yaml(stage1_recipe)
    assert start_run(stage1_recipe) == output


def test_a_killed_run_refuses_other_settings(stopped: Stage2Recipe) -> None:
    other = stopped.with_changes(optimization=stopped.optimization.with_changes(steps=7))
    with pytest.raises(ConfigError, match="holds a run with other settings"):
        train(other)


def test_a_run_that_failed_before_its_first_checkpoint_frees_its_folder(
    stage1_recipe: Stage1Recipe,
) -> None:
    with pytest.raises(DataError, match=r"there is no file or folder '.*nowhere"):
        train(stage1_recipe.with_changes(data_root="nowhere"))
    output = start_run(stage1_recipe)
    assert (output / "recipe.yaml").read_text() == as_yaml(stage1_recipe)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backbones_open_in_the_type_of_the_recipe(stage1_recipe: Stage1Recipe, dtype: str) -> None:
    optimization = stage1_recipe.optimization.with_changes(backbone_dtype=dtype)
    assert backbone_options(optimization)["dtype"] == getattr(torch, dtype)


def test_a_start_may_differ_only_in_free_settings(config: SedemConfig) -> None:
    other = config.with_changes(k=7)
    check_start(other, config, {"k"}, "start")
    with pytest.raises(ConfigError, match=r"model\.k is 7 in the recipe, checkpoint 'start' has 2"):
        check_start(other, config, {"encoder"}, "start")
