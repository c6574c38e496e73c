"""Baselines trained from recipes: resuming, evaluation, and every recipe of the repository."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import prints_json, refused, succeeds
from unit.training.runs import (
    assert_same_training,
    elsewhere,
    final_weights,
    killed_in_step,
    summary,
)

from sedem.errors import ConfigError
from sedem_lab.evaluation.command import run_evaluation
from sedem_lab.evaluation.config import EvaluationConfig
from sedem_lab.training.baseline import BaselineRecipe, load_baseline_recipe, train_baseline
from sedem_lab.training.fit import Run
from sedem_lab.training.recipe import as_yaml

RECIPES = Path(__file__).parents[3] / "recipes"

OWN = {
    "documents": [{"name": "lease", "text": "The rent is 900 euros."}],
    "question": "What is the rent?",
    "answers": ["900 euros"],
}

Make = Callable[..., BaselineRecipe]


def assert_resumes_equal(recipe: BaselineRecipe) -> None:
    whole = elsewhere(recipe, "whole")
    train_baseline(whole)
    with killed_in_step(4):
        train_baseline(recipe)
    train_baseline(recipe)
    found, wanted = summary(recipe), summary(whole)
    assert found["resumed_from"] == "checkpoint-2" and wanted["resumed_from"] is None
    assert found["tokens_seen"] == wanted["tokens_seen"] > 0
    assert_same_training(recipe, whole)


@pytest.mark.parametrize("name", ["icae", "rag"])
def test_an_interrupted_run_on_questions_resumes_with_equal_weights(
    name: str, question_recipe: Make
) -> None:
    recipe = question_recipe(name)
    # With dropout, the state of the random generators must be restored too.
    assert recipe.model.lora_dropout > 0 or name != "icae"
    assert_resumes_equal(recipe)


def test_an_interrupted_run_on_text_resumes_with_equal_weights(text_recipe: Make) -> None:
    # HMT is interrupted in its second stage.
    recipe = text_recipe("hmt")
    assert_resumes_equal(recipe)
    assert summary(recipe)["tokens_seen"] == 4 * 4 * (32 + 12)


@pytest.fixture
def rising_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the evaluation loss rise after the second step."""
    note = Run.note

    def with_rising_loss(self: Run, line: dict[str, float]) -> None:
        if "eval_loss" in line:
            line["eval_loss"] = abs(self.step - 2.0)
        note(self, line)

    monkeypatch.setattr(Run, "note", with_rising_loss)


def stopped_at(recipe: BaselineRecipe, steps: int) -> BaselineRecipe:
    """The same training with fewer steps and no evaluation."""
    changed: BaselineRecipe = elsewhere(recipe, f"{steps}", eval_every=0)
    return changed.with_changes(optimization=recipe.optimization.with_changes(steps=steps))


@pytest.mark.usefixtures("rising_loss")
def test_the_final_checkpoint_has_the_lowest_evaluation_loss_also_of_a_resumed_run(
    question_recipe: Make,
) -> None:
    recipe = question_recipe("icae")
    # With a constant schedule, steps do not depend on the length of the run.
    constant = recipe.optimization.with_changes(steps=5, schedule="constant_with_warmup")
    plain = recipe.model.with_changes(lora_dropout=0.0)
    # save_every would not save the best step, and keep allows one more checkpoint.
    run = recipe.run.with_changes(save_every=3, eval_every=1, keep=1)
    recipe = recipe.with_changes(model=plain, optimization=constant, run=run)
    with killed_in_step(4):
        train_baseline(recipe)
    runs = recipe, stopped_at(recipe, 2), stopped_at(recipe, 5)
    for one in runs:
        train_baseline(one)
    found, best, last = map(final_weights, runs)
    assert all(torch.equal(found[n], best[n]) for n in best)
    assert not all(torch.equal(found[n], last[n]) for n in last)
    result = summary(recipe)
    assert (result["resumed_from"], result["steps"], result["final_step"]) == ("checkpoint-3", 5, 2)
    assert result["evaluation"]["eval_loss"] == 0
    kept = {folder.name for folder in Path(recipe.run.output).glob("checkpoint-*")}
    assert "checkpoint-2" in kept and len(kept) == 2
    assert summary(stopped_at(recipe, 5))["final_step"] == 5
    # Running a finished recipe again changes nothing.
    train_baseline(recipe)
    assert all(torch.equal(final_weights(recipe)[n], found[n]) for n in found)


def test_from_text_to_questions_to_answers(
    text_recipe: Make, question_recipe: Make, fixtures: Path, tmp_path: Path
) -> None:
    first = train_baseline(text_recipe("icae"))
    second = train_baseline(question_recipe("icae", start_from=str(first)))
    result = json.loads((second.parent / "training.json").read_text())
    assert result["trained_parameters"] == {"parts": 7 * 32, "lora": 4 * 4 * (32 + 32 + 32 + 16)}
    assert result["data"].keys() >= {"tokens", "left_out"}
    assert result["evaluation"]["eval_loss"] > 0
    config = EvaluationConfig(
        method="icae",
        checkpoint=str(second),
        data=fixtures / "squad.json",
        options={"distractors": 1},
        limit=3,
        max_new_tokens=4,
    )
    metrics = run_evaluation(config)
    assert metrics["counts"]["not_answered"] == 0
    assert metrics["bytes_per_token"]["mean"] > 0
    gold = run_evaluation(config.with_changes(control="gold"))
    assert gold["conditioning"]["mean"] < metrics["conditioning"]["mean"]
    digests = {m["settings"]["weights_sha256"] for m in (metrics, gold)}
    assert len(digests) == 1
    for given in ({"k": 2}, {"shift": 2}, {"memory": "int8"}):
        (name,) = given
        with pytest.raises(ConfigError, match=f"but icae has no {name}; leave it out"):
            run_evaluation(config.with_changes(**given))
    with pytest.raises(ConfigError, match="control is 'wrong'"):
        run_evaluation(config.with_changes(control="wrong"))
    other = question_recipe("icae", start_from=str(first))
    changed = other.with_changes(model=other.model.with_changes(compression=2))
    with pytest.raises(ConfigError, match=r"model.compression is 2 in the recipe, checkpoint"):
        train_baseline(
            changed.with_changes(run=changed.run.with_changes(output=str(tmp_path / "else")))
        )


def test_a_recipe_that_a_baseline_cannot_use_is_rejected(
    question_recipe: Make, text_recipe: Make
) -> None:
    with pytest.raises(ConfigError, match="the recipe has both of text and data"):
        question_recipe("icae", text=text_recipe("icae").text)
    folder = RECIPES / "nano"
    for entry, message in (
        ("method=icea", "there is no method 'icea'"),
        ("method=bm25", "'bm25' is not trained; methods that are: full-context"),
        ("model.memori=3", "unknown key 'memori'; did you mean 'memory'"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_baseline_recipe(folder / "icae-text.yaml", [entry])
    for switch in ("logits_at_once=64", "compile=true", "shard_backbone=true"):
        with pytest.raises(ConfigError, match="which only stage1 and stage2 of SeDeM can do"):
            load_baseline_recipe(folder / "icae-text.yaml", [f"optimization.{switch}"])


def test_the_command_trains_and_evaluates_by_name(
    question_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = question_recipe("full-context-tuned")
    path = tmp_path / "recipe.yaml"
    path.write_text(as_yaml(recipe))
    output = tmp_path / "runs" / "nano" / "full-context-tuned-questions"
    words = (path, "--set", f"run.output={output}", "--set", "optimization.steps=1")
    monkeypatch.chdir(tmp_path)
    trained = succeeds("train", *words)
    assert trained.strip() == str(output / "final")
    refused("train", *words, "--set", "method=nothing", words="there is no method 'nothing'")
    (tmp_path / "own.jsonl").write_text(json.dumps(OWN))
    asked = ("--data", "own.jsonl", "--max-new-tokens", "3", "--json")
    metrics = prints_json("eval", "full-context-tuned", "-m", output / "final", *asked)
    assert metrics["counts"]["not_answered"] == 0
