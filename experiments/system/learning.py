"""How models learn: losses and ranks, the cost of a training stage, and learning rates.

Losses of given answers and texts are finer than scores for small models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from experiments.system.cells import Cell, checkpoint_of, examples_of
from experiments.system.models import run_of_stage
from experiments.system.scales import Scale
from sedem import Document, SeDeM
from sedem.backbone.prompts import context_prompt
from sedem.method.selector import resolve_budget
from sedem_lab.baselines.icae import ICAE
from sedem_lab.data.examples import ExampleSet
from sedem_lab.evaluation.continuation import continuation_losses
from sedem_lab.evaluation.metrics import summarize
from sedem_lab.evaluation.rank import block_slots, normalized_effective_rank
from sedem_lab.training.block_batch import BlockCollator
from sedem_lab.training.block_dataset import BlockDataset
from sedem_lab.training.recipe import load_recipe
from sedem_lab.training.sources import open_windows
from sedem_lab.training.stage2 import Stage2, Stage2Losses
from sedem_lab.training.stages import Stage1Recipe


def memory(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Losses on held-out windows from memory alone, after stage 1 and before any adapter.

    By target (continuation, recall) and condition: mean, interval and number of windows.
    """
    assert cell.variant is not None
    folder = run_of_stage(cell.variant, scale, "stage1", data) / "final"
    recipe = load_recipe(Stage1Recipe, folder.parent / "recipe.yaml")
    model = _open(folder, recipe.optimization.backbone_dtype)
    _, windows = open_windows(recipe.text, recipe, model.encoder, model.config.segment_length)
    assert windows is not None, f"the recipe of {folder} holds no text out"
    return continuation_losses(model, windows)


def loss(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Loss per token of the first reference, with the evidence among the K blocks.

    `answer_loss` has mean, interval and number of examples, `mixture` the weights of the extraction
    layers. The other blocks of an example are sampled.
    """
    variant, folder = cell.variant, checkpoint_of(cell, scale, data)
    assert variant is not None
    model = _open(folder, scale.dtype)
    dataset = BlockDataset(model, answer_limit=128)
    dataset.add(ExampleSet("questions", examples_of(cell, scale, data)), "evidence")
    count = variant.k or 2
    k, blocks = ("all", "all") if variant.every_block else (count, count + 2)
    given, selected = (resolve_budget(n, dataset.most_blocks) for n in (blocks, k))
    collator = BlockCollator(dataset, seed=0, cache=None, max_blocks=given, budgets=[selected])
    weights = Stage2Losses(reconstruct=0.0, conditioning="gold")
    stage = Stage2(model, weights, collator).eval()
    with torch.no_grad():
        values = [float(stage(**stage.collate([item]))["answer"]) for item in dataset.items]
    mixed = model.mixture.weights().tolist()
    mixture = dict(zip(map(str, model.config.extract_layers), mixed, strict=True))
    return {"answer_loss": summarize(values, digits=4), "mixture": mixture}


def rank(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Normalized effective rank of memory slots, in percent of their number.

    Each text is read once. `effective_rank` has mean, interval and number of blocks (of ICAE:
    segments).
    """
    folder, examples = checkpoint_of(cell, scale, data), examples_of(cell, scale, data)
    if cell.method != "icae":
        texts = dict.fromkeys(d.text for example in examples for d in example.documents)
        documents = [Document(str(number), text) for number, text in enumerate(texts)]
        slots = block_slots(_open(folder, scale.dtype), documents)
        return {"effective_rank": normalized_effective_rank(slots)}
    reader = ICAE.from_pretrained(folder, dtype=getattr(torch, scale.dtype)).eval()
    contexts = dict.fromkeys(context_prompt([d.text for d in e.documents]) for e in examples)
    with torch.no_grad():
        ranks = normalized_effective_rank(
            slots_MD.float()
            for context in contexts
            for slots_MD in reader.compress(reader.backbone.token_ids(context)).content.states
        )
    return {"effective_rank": ranks}


def _open(checkpoint: Path, dtype: str) -> SeDeM:
    return SeDeM.from_pretrained(checkpoint, dtype=getattr(torch, dtype), engine="eager")


def training(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """The cost of a training stage."""
    assert cell.variant is not None
    folder = run_of_stage(cell.variant, scale, cell.stage, data)
    summary = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    return {"optimization": summary.pop("recipe")["optimization"], **summary}
