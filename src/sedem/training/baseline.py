"""Training a baseline from a recipe, on text or on questions, with SeDeM's trainer."""

from __future__ import annotations

import logging
from pathlib import Path

from torch.utils.data import Subset

from sedem.baselines.registry import reader_class
from sedem.baselines.trained import TrainedReader
from sedem.errors import ConfigError
from sedem.training.baseline_recipe import BaselineRecipe, open_reader
from sedem.training.baseline_training import QuestionTraining, TextTraining
from sedem.training.fit import fit
from sedem.training.question_dataset import QuestionDataset, QuestionItem
from sedem.training.rag import train_rag
from sedem.training.run_setup import start_run
from sedem.training.sources import open_windows, read_mixture

logger = logging.getLogger(__name__)


def train_baseline(recipe: BaselineRecipe) -> Path:
    """Run a recipe to its end, from its last complete checkpoint if there is one.

    Returns:
        Folder of the final checkpoint.

    Raises:
        ConfigError: the output folder contains a run with other settings.
    """
    output = start_run(recipe)
    if reader_class(recipe.method).has_selection_budget:
        return train_rag(recipe, output)
    reader = open_reader(recipe)
    _refuse_selection_settings(recipe)
    if recipe.text is not None:
        windows, held_out = open_windows(
            recipe.text,
            reader.backbone,
            recipe.text.context,
            recipe.optimization.seed,
            data_root=Path(recipe.data_root),
            cache=Path(recipe.cache),
        )
        stage = TextTraining(reader)
        return fit(stage, reader, recipe, output, windows, held_out, best=True)
    dataset, training, evaluation = _open_questions(reader, recipe)
    return fit(
        QuestionTraining(reader),
        reader,
        recipe,
        output,
        training,
        evaluation,
        data_summary={"left_out": dict(dataset.dropped), **dataset.cut},
        best=True,
    )


def _refuse_selection_settings(recipe: BaselineRecipe) -> None:
    """Refuse settings that apply only to a method that picks paragraphs."""
    if (recipe.data and recipe.data.cache_states) or recipe.losses is not None:
        raise ConfigError(
            f"losses and data.cache_states apply only to methods that pick paragraphs, but "
            f"'{recipe.method}' reads all of them; remove these settings"
        )


def _open_questions(
    reader: TrainedReader, recipe: BaselineRecipe
) -> tuple[QuestionDataset, Subset[QuestionItem], Subset[QuestionItem] | None]:
    """All examples, those to train on, and those to evaluate on."""
    assert recipe.data is not None
    chosen = recipe.data
    dataset = QuestionDataset(
        reader,
        chosen.answer_limit,
        chosen.documents,
        chosen.context_limit,
        chosen.max_paragraphs,
        recipe.optimization.seed,
        cache=Path(recipe.cache),
    )
    training, evaluation = read_mixture(dataset, chosen, Path(recipe.data_root))
    if not len(training):
        raise ConfigError(
            f"no question of data.training can be used (left out: {dict(dataset.dropped)})"
        )
    logger.info("contexts: %s", dict(dataset.cut))
    return dataset, training, evaluation
