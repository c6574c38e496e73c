"""Losses of given answers and texts, and ranks of slots: finer than scores for small models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from experiments.system.answers import BUDGETS
from experiments.system.cells import Cell, checkpoint_of, examples_of
from experiments.system.models import budget, run_of_stage
from experiments.system.scales import Scale
from sedem import Document, SeDeM
from sedem.answering.decoding import context_prompt
from sedem.baselines.icae import ICAE
from sedem.data.corpus import TokenizedCorpus
from sedem.data.examples import Example, ExampleSet
from sedem.data.windows import Windows
from sedem.evaluation.continuation import continuation_losses
from sedem.evaluation.metrics import summarize
from sedem.evaluation.rank import block_slots, normalized_effective_rank
from sedem.method.selector import resolve_budget
from sedem.provenance import provenance
from sedem.training.block_batch import BlockCollator, frozen_states
from sedem.training.block_dataset import BlockDataset
from sedem.training.recipe import load_recipe
from sedem.training.stage2 import Stage2, Stage2Losses
from sedem.training.stages import Stage1Recipe


def memory(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Losses on held-out windows from memory alone, after stage 1 and before any adapter.

    By target (continuation, recall) and condition: mean, interval and number of windows.
    """
    assert cell.variant is not None
    folder = run_of_stage(cell.variant, scale, "stage1", data) / "final"
    recipe = load_recipe(Stage1Recipe, folder.parent / "recipe.yaml")
    source = recipe.text
    model = _open(folder, recipe.optimization.backbone_dtype)
    path = Path(recipe.data_root) / source.path
    corpus = TokenizedCorpus.open(path, model.encoder, Path(recipe.cache), source.exclude_titles)
    held_out = range(len(corpus) - source.held_out, len(corpus))
    lengths = model.config.segment_length, source.continuation
    windows = Windows(corpus, *lengths, 0, held_out, source.evaluation_windows)
    losses = continuation_losses(model, windows, lambda done, total: None)
    return {**losses, **provenance(), "training": budget(folder)}


def loss(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Loss per token of the first reference, with the evidence among the K blocks.

    `answer_loss` has mean, interval and number of examples, `mixture` the weights of the extraction
    layers. The other blocks of an example are sampled.
    """
    variant, folder = cell.variant, checkpoint_of(cell, scale, data)
    assert variant is not None
    model = _open(folder, scale.dtype)
    dataset = _dataset(model, examples_of(cell, scale, data))
    count = variant.k or 2
    k, blocks = ("all", "all") if variant.every_block else (count, count + 2)
    given, selected = (resolve_budget(n, dataset.most_blocks) for n in (blocks, k))
    stage = _stage2(model, dataset, "gold", max_blocks=given, budgets=[selected])
    with torch.no_grad():
        values = [float(stage(**stage.collate([item]))["answer"]) for item in dataset.items]
    weights = model.mixture.weights().tolist()
    mixture = dict(zip(map(str, model.config.extract_layers), weights, strict=True))
    found = {"answer_loss": summarize(values, digits=4), "mixture": mixture}
    return {**found, **provenance(), "training": budget(folder)}


def by_budget(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """The same loss given the selector's K best blocks, at several K over the same states.

    `budgets` has mean, interval and number of examples by K, `change` the same of the paired
    differences to the first K, `losses` those of single examples, and `recall` the share of
    examples with evidence among the K best blocks, in percent.
    """
    folder = checkpoint_of(cell, scale, data)
    model = _open(folder, cell.dtype or scale.dtype)
    dataset = _dataset(model, examples_of(cell, scale, data))
    budgets = [k for k in BUDGETS if isinstance(k, int)]
    most = max(len(item.blocks) for item in dataset.items)
    stage = _stage2(model, dataset, "selected", max_blocks=most, budgets=budgets)
    losses: dict[int, list[float]] = {k: [] for k in budgets}
    recalled: dict[int, list[float]] = {k: [] for k in budgets}
    with torch.no_grad():
        for item in dataset.items:
            batch = stage.collate([item])
            # Documents and questions are read once.
            batch["states"], batch["question_states"] = frozen_states(
                batch, model.encoder, model.config.extract_layers
            )
            for k in budgets:
                parts = stage(**{**batch, "budget": k})
                losses[k].append(float(parts["answer"]))
                recalled[k].append(100 * float(parts["recall"]))
    first = losses[budgets[0]]
    changes = {
        k: [one - other for one, other in zip(found, first, strict=True)]
        for k, found in losses.items()
    }
    return {
        "budgets": {str(k): summarize(found, digits=4) for k, found in losses.items()},
        "change": {str(k): summarize(found, digits=4) for k, found in changes.items()},
        "losses": {str(k): [round(loss, 4) for loss in found] for k, found in losses.items()},
        "recall": {str(k): summarize(found) for k, found in recalled.items()},
        "tau": None if model.guidance is None else float(model.guidance.tau.detach()),
        **provenance(),
        "training": budget(folder),
    }


def rank(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Normalized effective rank of memory slots, in percent of their number.

    Each text is read once. `effective_rank` has mean, interval and number of blocks (of ICAE:
    segments).
    """
    folder, examples = checkpoint_of(cell, scale, data), examples_of(cell, scale, data)
    dtype = getattr(torch, scale.dtype)
    if cell.method != "icae":
        model = _open(folder, scale.dtype)
        texts = dict.fromkeys(d.text for example in examples for d in example.documents)
        documents = [Document(str(number), text) for number, text in enumerate(texts)]
        ranks = normalized_effective_rank(block_slots(model, documents))
        return {"effective_rank": ranks} | provenance()
    reader = ICAE.from_pretrained(folder, dtype=dtype).eval()
    contexts = dict.fromkeys(context_prompt([d.text for d in e.documents]) for e in examples)
    with torch.no_grad():
        ranks = normalized_effective_rank(
            slots_MD.float()
            for context in contexts
            for slots_MD in reader.compress(reader.backbone.token_ids(context)).content.states
        )
    return {"effective_rank": ranks} | provenance()


def _open(checkpoint: Path, dtype: str) -> SeDeM:
    return SeDeM.from_pretrained(checkpoint, dtype=getattr(torch, dtype), engine="eager")


def _dataset(model: SeDeM, examples: list[Example]) -> BlockDataset:
    dataset = BlockDataset(model, answer_limit=128)
    dataset.add(ExampleSet("questions", examples), "evidence")
    return dataset


def _stage2(model: SeDeM, dataset: BlockDataset, conditioning: str, **blocks: Any) -> Stage2:
    collator = BlockCollator(dataset, seed=0, cache=None, **blocks)
    return Stage2(model, Stage2Losses(reconstruct=0.0, conditioning=conditioning), collator).eval()
