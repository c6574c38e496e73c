"""Recipes of the trained baselines: their data, and the learning rates that were found."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.pages import STUDIES
from experiments.system.models import baseline_checkpoint, supervision
from experiments.system.scales import PAPER
from sedem_lab.baselines.registry import TRAINED
from sedem_lab.training import stages
from sedem_lab.training.baseline import BaselineRecipe, load_baseline_recipe
from sedem_lab.training.recipe import Optimization, load_recipe
from sedem_lab.training.stages import Stage2Recipe


def examples_of_a_step(optimization: Optimization) -> int:
    return optimization.batch_size * optimization.accumulation


@pytest.mark.parametrize("method", TRAINED)
def test_a_baseline_learns_at_paper_scale_what_sedem_learns_for_a_set(method: str) -> None:
    for backbone in ("llama-3.2-1b", "llama-3.2-3b"):
        path = PAPER.baseline_recipe(method, "questions", backbone)
        for key, name in (("qasper", "qasper"), ("musique", "musique"), ("hotpotqa", "hotpotqa")):
            theirs = load_recipe(Stage2Recipe, PAPER.recipe("stage2", backbone, key))
            overrides = supervision(path, PAPER.recipe("stage2", backbone, key))
            recipe = load_baseline_recipe(path, overrides)
            data = recipe.data
            assert data is not None
            # The paper gives 500xCompressor 64 tokens of question and answer.
            limit = 64 if method == "500x" else theirs.data.answer_limit
            assert data.answer_limit == limit
            (source,) = data.training
            assert source.path == name
            (followed,) = data.evaluation
            assert followed.path == name
            first = "50" if key == "qasper" else "500"
            assert (followed.records, source.records) == (f":{first}", f"{first}:")
            apart = recipe.run.eval_every * examples_of_a_step(recipe.optimization)
            wanted = theirs.run.eval_every * examples_of_a_step(theirs.optimization)
            assert apart == wanted or (method == "comprexit" and wanted / 2 < apart < wanted)
            if key == "hotpotqa":
                assert load_baseline_recipe(path).run.eval_every == recipe.run.eval_every
            if method == "rag":
                assert recipe.model.k == theirs.model.k == PAPER.sets[key].k  # type: ignore[attr-defined]
                assert data.max_paragraphs == theirs.data.max_blocks
                assert data.evidence_only == theirs.data.evidence_only
                assert recipe.new_selector == theirs.new_selector


@pytest.mark.parametrize("questions", ["hotpotqa", "qasper"])
def test_only_on_qasper_500xcompressor_reads_every_window(
    questions: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    trained: list[BaselineRecipe] = []
    monkeypatch.setattr(stages, "train_baseline", trained.append)
    final = baseline_checkpoint("500x", PAPER, "llama-3.2-1b", questions, tmp_path)
    text, recipe = trained
    assert (
        Path(recipe.run.output)
        == final.parent
        == PAPER.runs / (f"llama-3.2-1b/500x-questions-{questions}")
    )
    assert recipe.start_from == f"{text.run.output}/final"
    wanted = "windows" if questions == "qasper" else "cut"
    assert (text.model.long_contexts, recipe.model.long_contexts) == ("cut", wanted)  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", TRAINED)
def test_the_paper_scale_trains_a_baseline_for_the_papers_sets(method: str) -> None:
    asked = {
        cell.questions
        for study in STUDIES.values()
        for cell in study.cells(PAPER)
        if cell.method == method and cell.questions
    }
    if method == "comprexit":
        assert asked == {"hotpotqa", "2wiki"}
    else:
        assert asked >= {"hotpotqa", "2wiki", "musique", "qasper"}
