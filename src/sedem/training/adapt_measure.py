"""What `sedem adapt` measures on held-out documents, before and after training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset
from tqdm.auto import tqdm
from transformers import set_seed

from sedem.data.windows import Windows
from sedem.model import SeDeM
from sedem.training.block_batch import BlockCollator
from sedem.training.block_dataset import BlockDataset
from sedem.training.recipe import Mixture
from sedem.training.sources import read_mixture
from sedem.training.stage1 import Stage1
from sedem.training.stage1_losses import Stage1Losses
from sedem.training.stage2 import Stage2, Stage2Losses
from sedem.training.stages import Stage1Recipe, Stage2Recipe, open_model, windows_of

Scores = dict[str, float]


def held_out_scores(
    first: Stage1Recipe, second: Stage2Recipe, start: str | None, what: str
) -> Scores:
    """Losses on held-out windows and questions, and recall of the blocks with the answers.

    Args:
        first: recipe of stage 1; gives the windows.
        second: recipe of stage 2; gives the questions.
        start: the checkpoint to measure; None means the new parts that stage 1 would start from.
        what: label of the progress bars.

    Returns:
        "text loss": per token after a window, from the memory of the window. "answer loss": per
        token of the answer, from the selector's k best blocks, with the model's default k.
        "recall@k": percentage of questions with the answer in one of these blocks.
    """
    set_seed(first.optimization.seed)
    model = open_model(first.model, first.optimization, start).eval()
    return {**_text(model, first, what), **_questions(model, second, what)}


def _text(model: SeDeM, recipe: Stage1Recipe, what: str) -> Scores:
    """Loss on held-out windows."""
    _, windows = windows_of(recipe, model.encoder)
    assert windows is not None  # a recipe of `adapt` always holds some out
    stage = Stage1(model, Stage1Losses(distill=0.0, reconstruct=0.0)).eval()
    found = _means(stage, windows, ("context",), recipe.optimization.batch_size, f"{what}, text")
    return {"text loss": found["context"]}


def _questions(model: SeDeM, recipe: Stage2Recipe, what: str) -> Scores:
    """Loss of the answers to held-out questions, and recall."""
    dataset = BlockDataset(model, recipe.data.answer_limit, cache=Path(recipe.cache))
    mixture = Mixture(training=recipe.data.evaluation)
    read_mixture(dataset, mixture, Path(recipe.data_root), selects=True)
    # If a block boundary splits an answer, no block contains it, so there is nothing to find.
    found = [index for index in range(len(dataset)) if any(dataset[index].evidence)]
    k = recipe.model.k if isinstance(recipe.model.k, int) else recipe.model.auto_max
    collator = BlockCollator(
        dataset,
        max_blocks=dataset.most_blocks,
        budgets=(k,),
        seed=recipe.optimization.seed,
        cache=None,
    )
    losses = Stage2Losses(reconstruct=0.0, conditioning="selected")
    stage = Stage2(model, losses, collator).eval()
    items, size = Subset(dataset, found), recipe.optimization.batch_size
    means = _means(stage, items, ("answer", "recall"), size, f"{what}, questions")
    return {"answer loss": means["answer"], f"recall@{k}": 100 * means["recall"]}


@torch.no_grad()
def _means(
    stage: Stage1 | Stage2,
    items: Windows | Subset[Any],
    names: Sequence[str],
    size: int,
    what: str,
) -> Scores:
    """Means of the loss parts over items.

    Args:
        stage: computes the losses.
        items: items of the stage's dataset.
        names: names of the loss parts.
        size: batch size.
        what: label of the progress bar.
    """
    totals = dict.fromkeys(names, 0.0)
    with tqdm(total=len(items), desc=what) as bar:
        for start in range(0, len(items), size):
            chosen: list[Any] = [
                items[index] for index in range(start, min(start + size, len(items)))
            ]
            moved = {
                name: value.to(stage.model.device) if isinstance(value, Tensor) else value
                for name, value in stage.collate(chosen).items()
            }
            parts = stage(**moved)
            for name in names:
                totals[name] += len(chosen) * float(parts[name])
            bar.update(len(chosen))
    return {name: total / len(items) for name, total in totals.items()}
