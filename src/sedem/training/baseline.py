"""Training a baseline from a recipe, on text or on questions, by the same trainer as SeDeM."""

from __future__ import annotations

import logging
from pathlib import Path

from torch.utils.data import Subset

from sedem.baselines.registry import reader_class
from sedem.baselines.trained import TrainedReader
from sedem.errors import ConfigError
from sedem.training.baseline_recipe import BaselineRecipe, open_reader
from sedem.training.baseline_training import QuestionTraining, TextTraining
from sedem.training.fit import begin, fit
from sedem.training.questions import QuestionItem, Questions
from sedem.training.rag import train_rag
from sedem.training.run import open_windows, read_mixture

logger = logging.getLogger(__name__)


def train_baseline(recipe: BaselineRecipe) -> Path:
    """Run a recipe to its end, from its last whole checkpoint if there is one.

    Returns:
        Folder of the final checkpoint.

    Raises:
        ConfigError: the output folder holds a run with other settings.
    """
    output = begin(recipe)
    if reader_class(recipe.method).has_selection_budget:
        return train_rag(recipe, output)
    reader = open_reader(recipe)
    _refuse_picking(recipe)
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
    questions, training, evaluation = _open_questions(reader, recipe)
    return fit(
        QuestionTraining(reader),
        reader,
        recipe,
        output,
        training,
        evaluation,
        noted={"left_out": dict(questions.dropped), **questions.cut},
        best=True,
    )


def _refuse_picking(recipe: BaselineRecipe) -> None:
    """Refuse settings that only a method has that picks paragraphs."""
    if (recipe.data and recipe.data.cache_states) or recipe.losses is not None:
        raise ConfigError(
            f"losses and data.cache_states are for a method that picks paragraphs, "
            f"'{recipe.method}' reads them all; leave them out"
        )


def _open_questions(
    reader: TrainedReader, recipe: BaselineRecipe
) -> tuple[Questions, Subset[QuestionItem], Subset[QuestionItem] | None]:
    """All examples, those to train on and those that are followed."""
    assert recipe.data is not None
    chosen = recipe.data
    questions = Questions(
        reader,
        chosen.answer_limit,
        chosen.documents,
        chosen.context_limit,
        chosen.max_paragraphs,
        recipe.optimization.seed,
    )
    training, evaluation = read_mixture(questions, chosen, Path(recipe.data_root))
    if not len(training):
        raise ConfigError(
            f"no question of data.training can be used ({dict(questions.dropped)} were left out)"
        )
    logger.info("contexts: %s", dict(questions.cut))
    return questions, training, evaluation
