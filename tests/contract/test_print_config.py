"""`sedem train --print-config` prints the complete recipe and trains nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from commands import error_of, sedem, succeeds

from sedem_lab.baselines.registry import TRAINED

RECIPES = Path(__file__).parents[2] / "recipes"
BY_COMMAND = {
    "stage1": "paper/llama-3.2-1b-to-3b/stage1.yaml",
    "stage2": "paper/llama-3.2-3b/stage2-musique.yaml",
    **{name: f"paper/llama-3.2-3b/{name}-questions.yaml" for name in TRAINED},
}


@pytest.mark.parametrize("command", BY_COMMAND)
def test_the_complete_recipe_is_printed_and_nothing_trained(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", command, "--print-config", "--config"]
    changes = ["--set", "optimization.seed=7", "--set", "run.output=here"]
    shown = succeeds(*words, RECIPES / BY_COMMAND[command], *changes)
    assert list(tmp_path.iterdir()) == []
    entries = yaml.safe_load(shown)
    assert "base" not in entries
    # Overrides, defaults, and a value inherited over two files.
    assert entries["optimization"]["seed"] == 7
    assert entries["run"]["output"] == "here"
    assert entries["optimization"]["bf16"] is True
    assert entries["run"]["workers"] == (4 if command.startswith("stage") else 0)
    backbone = entries["model"].get("decoder") or entries["model"].get("backbone")
    assert (backbone or entries["model"]["encoder"]) == "meta-llama/Llama-3.2-3B"
    # The output is itself the same recipe.
    (tmp_path / "printed.yaml").write_text(shown)
    assert succeeds(*words, "printed.yaml") == shown


@pytest.mark.parametrize("command", ["stage1", "stage2", "icae"])
def test_an_invalid_recipe_is_not_printed(command: str) -> None:
    path = str(RECIPES / BY_COMMAND[command])
    words = ["train", command, "--config", path, "--print-config", "--set", "run.kep=1"]
    assert f"{path}: run: unknown key 'kep'; did you mean 'keep'?" in error_of(*words)


def test_a_shipped_recipe_is_named_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command, name in (("stage1", "nano/stage1"), ("icae", "nano/icae-text")):
        words = ["train", command, "--print-config"]
        named = succeeds(*words, "--recipe", name)
        assert named == succeeds(*words, "--config", RECIPES / f"{name}.yaml")
    # A backbone is an option, or a folder of the name.
    words = ["train", "stage1", "--print-config", "--recipe"]
    chosen = succeeds(*words, "paper/stage1", "--backbone", "llama-3.2-3b")
    assert chosen == succeeds(*words, "paper/llama-3.2-3b/stage1")
    assert "encoder: meta-llama/Llama-3.2-3B" in chosen
    listed = succeeds("train", "--list")
    assert "sedem train stage1 --recipe nano/stage1" in listed
    assert "sedem train beacon --recipe paper/beacon-text" in listed
    assert "llama-3.2-1b, llama-3.2-3b" in listed
    assert "_base" not in listed


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--recipe", "nano/stage1", "--config", "stage1.yaml"],
        ["--backbone", "llama-3.2-3b", "--config", "stage1.yaml"],
    ],
    ids=["neither", "both", "file"],
)
def test_a_training_needs_exactly_one_recipe(words: list[str]) -> None:
    result = sedem("train", "stage1", *words)
    assert result.exit_code == 2
    assert "give either --recipe NAME" in " ".join(result.output.split())
