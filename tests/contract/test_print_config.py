"""`sedem train --print-config` prints the complete recipe and trains nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from sedem.baselines.registry import TRAINED
from sedem.cli.main import app

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
    shown = CliRunner().invoke(app, [*words, str(RECIPES / BY_COMMAND[command]), *changes])
    assert shown.exit_code == 0, shown.output
    assert list(tmp_path.iterdir()) == []
    entries = yaml.safe_load(shown.stdout)
    assert "base" not in entries
    # Overrides, defaults, and a value inherited over two files.
    assert entries["optimization"]["seed"] == 7
    assert entries["run"]["output"] == "here"
    assert entries["optimization"]["bf16"] is True
    assert entries["run"]["workers"] == (4 if command.startswith("stage") else 0)
    backbone = entries["model"].get("decoder") or entries["model"].get("backbone")
    assert (backbone or entries["model"]["encoder"]) == "meta-llama/Llama-3.2-3B"
    # The output is itself the same recipe.
    (tmp_path / "printed.yaml").write_text(shown.stdout)
    again = CliRunner().invoke(app, [*words, "printed.yaml"])
    assert again.exit_code == 0, again.output
    assert again.stdout == shown.stdout


@pytest.mark.parametrize("command", ["stage1", "stage2", "icae"])
def test_an_invalid_recipe_is_not_printed(command: str) -> None:
    path = str(RECIPES / BY_COMMAND[command])
    words = ["train", command, "--config", path, "--print-config", "--set", "run.kep=1"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert f"error: {path}: run: unknown key 'kep'; did you mean 'keep'?" in result.stderr


@pytest.mark.parametrize(
    ("command", "name"), [("stage1", "nano/stage1"), ("icae", "nano/icae-text")]
)
def test_a_shipped_recipe_is_named_from_any_folder(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", command, "--print-config"]
    named = CliRunner().invoke(app, [*words, "--recipe", name])
    given = CliRunner().invoke(app, [*words, "--config", str(RECIPES / f"{name}.yaml")])
    assert named.exit_code == 0, named.output
    assert named.stdout == given.stdout


def test_a_backbone_is_an_option_or_a_folder_of_the_name() -> None:
    words = ["train", "stage1", "--print-config", "--recipe"]
    chosen = CliRunner().invoke(app, [*words, "paper/stage1", "--backbone", "llama-3.2-3b"])
    named = CliRunner().invoke(app, [*words, "paper/llama-3.2-3b/stage1"])
    assert chosen.exit_code == 0 and chosen.stdout == named.stdout
    assert "encoder: meta-llama/Llama-3.2-3B" in chosen.stdout


def test_the_shipped_recipes_are_listed_with_their_commands() -> None:
    listed = CliRunner().invoke(app, ["train", "--list"])
    assert listed.exit_code == 0, listed.output
    assert "sedem train stage1 --recipe nano/stage1" in listed.stdout
    assert "sedem train beacon --recipe paper/beacon-text" in listed.stdout
    assert "llama-3.2-1b, llama-3.2-3b" in listed.stdout
    assert "_base" not in listed.stdout


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
    result = CliRunner().invoke(app, ["train", "stage1", *words])
    assert result.exit_code == 2
    assert "give either --recipe NAME" in " ".join(result.output.split())
