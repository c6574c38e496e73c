"""Every recipe of the repository trains for two steps, and its checkpoint answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from recipes.test_training import ONE_OF_EACH, RECIPES
from unit.training.small_recipes import train_small

OTHERS = [name for name in RECIPES if name not in ONE_OF_EACH]


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_a_recipe_trains(name: str, tiny_folder: Callable[..., str], tmp_path: Path) -> None:
    train_small(name, tiny_folder, tmp_path)
