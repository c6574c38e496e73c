from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from sedem.checkpoint.folder import embedded
from sedem.errors import ConfigError
from sedem_lab.baselines.registry import TRAINED
from sedem_lab.training.recipe import read_entries
from sedem_lab.training.shipped_recipes import (
    backbones_of,
    launch_file,
    shipped_recipe,
    shipped_recipes,
)

ROOT = Path(__file__).parents[3]


def test_a_recipe_is_a_file_a_variant_of_one_or_either_on_a_backbone() -> None:
    recipes, names = ROOT / "recipes", shipped_recipes()
    assert shipped_recipe("nano/stage1") == names["nano/stage1"] == recipes / "nano" / "stage1.yaml"
    assert {"nano/icae-text", "paper/stage2-musique"} <= set(names)
    assert not {"nano/_base", "nano/icae", "paper/stage2", "paper/backbones/llama-3.2-1b"} & set(
        names
    )
    entries = read_entries(shipped_recipe("paper/llama-3.2-3b/stage1"))
    assert entries["model"]["encoder"] == "meta-llama/Llama-3.2-3B"
    assert entries["run"]["output"] == "runs/paper/llama-3.2-3b/stage1"
    assert read_entries(names["paper/stage1"])["model"]["encoder"] == "meta-llama/Llama-3.2-1B"


def test_every_trained_method_has_recipes_for_every_backbone() -> None:
    for method in TRAINED:
        assert f"nano/{method}-questions" in shipped_recipes()
        assert backbones_of(f"paper/{method}-questions") == ["llama-3.2-1b", "llama-3.2-3b"]
    assert len(backbones_of("paper/stage1")) == 3 and backbones_of("nano/stage1") == []


def test_a_backbone_that_a_recipe_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="names its own backbone; change it with --set"):
        shipped_recipe("nano/llama-3.2-3b/stage1")
    with pytest.raises(ConfigError, match=r"no backbone 'gemma'; there are llama-3.2-1b, llama"):
        shipped_recipe("paper/gemma/stage1")
    with pytest.raises(ConfigError, match=r"'paper/icae-text' has no backbone 'llama-3.2-1b-to"):
        shipped_recipe("paper/llama-3.2-1b-to-3b/icae-text")
    path = ROOT / "recipes" / "paper" / "llama-3.2-1b-to-3b" / "icae-text.yaml"
    with pytest.raises(ConfigError, match="is for SeDeM only, and 'icae-text' trains icae"):
        read_entries(path)


def test_an_unknown_recipe_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no recipe 'nano/stag1' .* did you mean 'nano/stage1'"):
        shipped_recipe("nano/stag1")
    for name in ("xyz", "a/b/c/d"):
        with pytest.raises(ConfigError, match="'sedem train --list' lists those that do"):
            shipped_recipe(name)


def test_accelerate_reads_launch_files_which_are_no_recipes() -> None:
    for name, kind, count in (("one-gpu", "NO", 1), ("eight-gpus", "MULTI_GPU", 8)):
        found = load_config_from_file(str(launch_file(name)))
        assert (found.distributed_type, found.num_processes) == (kind, count)
        # The recipe decides the precision; another one given here would override it.
        assert found.mixed_precision == "no"
    assert not [name for name in shipped_recipes() if name.startswith("launch/")]
    with pytest.raises(ConfigError, match=r"no launch file 'two'; there are eight-gpus, one-gpu"):
        launch_file("two")


def test_the_nano_recipes_name_a_backbone_that_ships_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, path in shipped_recipes().items():
        if name.startswith("nano/"):
            model = read_entries(path)["model"]
            assert embedded(model.get("encoder") or model["backbone"]) is not None, name
