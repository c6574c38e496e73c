"""`sedem train --print-config` prints the complete recipe and trains nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from commands import error_of, sedem, succeeds

from sedem_lab.baselines.registry import TRAINED

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = (
    "paper/llama-3.2-1b-to-3b/stage1",
    "paper/llama-3.2-3b/stage2-musique",
    *(f"paper/llama-3.2-3b/{method}-questions" for method in TRAINED),
)


@pytest.mark.parametrize("name", NAMES)
def test_the_complete_recipe_is_printed_and_nothing_trained(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "--print-config"]
    changes = ["--set", "optimization.seed=7", "--set", "run.output=here"]
    shown = succeeds(*words, RECIPES / f"{name}.yaml", *changes)
    assert list(tmp_path.iterdir()) == []
    entries = yaml.safe_load(shown)
    assert "base" not in entries
    # Overrides, defaults, and a value inherited over two files.
    assert entries["optimization"]["seed"] == 7
    assert entries["run"]["output"] == "here"
    assert entries["optimization"]["bf16"] is True
    assert entries["run"]["workers"] == (4 if "/stage" in name else 0)
    backbone = entries["model"].get("decoder") or entries["model"].get("backbone")
    assert (backbone or entries["model"]["encoder"]) == "meta-llama/Llama-3.2-3B"
    # The output is itself the same recipe.
    (tmp_path / "printed.yaml").write_text(shown)
    assert succeeds(*words, "printed.yaml") == shown


@pytest.mark.parametrize("name", NAMES[:3])
def test_an_invalid_recipe_is_not_printed(name: str) -> None:
    path = str(RECIPES / f"{name}.yaml")
    told = error_of("train", path, "--print-config", "--set", "run.kep=1")
    assert f"{path}: run: unknown key 'kep'; did you mean 'keep'?" in told


def test_a_shipped_recipe_is_named_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "--print-config"]
    for name in ("nano/stage1", "nano/icae-text", "paper/llama-3.2-3b/stage1"):
        assert succeeds(*words, name) == succeeds(*words, RECIPES / f"{name}.yaml")
    assert "encoder: meta-llama/Llama-3.2-3B" in succeeds(*words, name)
    listed = sedem("train", "--list")
    for row in ("nano/stage1 +stage1", "paper/beacon-text +beacon +llama-3.2-1b, llama-3.2-3b"):
        assert re.search(f"^{row}$", listed.stdout, re.MULTILINE)
    assert "_base" not in listed.stdout
    assert "unless named as in paper/llama-3.2-3b/stage1" in listed.stderr


def test_a_training_needs_a_recipe() -> None:
    result = sedem("train")
    assert result.exit_code == 2
    assert "give a recipe, by a name of 'sedem train --list'" in " ".join(result.output.split())
