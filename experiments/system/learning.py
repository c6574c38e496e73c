"""How models learn: losses and ranks, the cost of a training stage, and learning rates.

Losses of given answers and texts are finer than scores for small models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from experiments.system.answers import BUDGETS
from experiments.system.cells import Cell, checkpoint_of, examples_of
from experiments.system.models import budget, run_of_stage, run_recipe
from experiments.system.scales import Scale, recipe_exists
from sedem import Document, SeDeM
from sedem.backbone.prompts import context_prompt
from sedem.method.selector import resolve_budget
from sedem_lab.baselines.icae import ICAE
from sedem_lab.data.examples import ExampleSet
from sedem_lab.evaluation.continuation import continuation_losses
from sedem_lab.evaluation.metrics import summarize
from sedem_lab.evaluation.rank import block_slots, normalized_effective_rank
from sedem_lab.training.baseline import load_baseline_recipe
from sedem_lab.training.block_batch import BlockCollator, frozen_states
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
    losses = continuation_losses(model, windows, lambda done, total: None)
    return {**losses, "training": budget(folder)}


def loss(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Loss per token of the first reference, with the evidence among the K blocks.

    `answer_loss` has mean, interval and number of examples, `mixture` the weights of the extraction
    layers. The other blocks of an example are sampled.
    """
    variant, folder = cell.variant, checkpoint_of(cell, scale, data)
    assert variant is not None
    model = _open(folder, scale.dtype)
    dataset = _dataset(model, cell, scale, data)
    count = variant.k or 2
    k, blocks = ("all", "all") if variant.every_block else (count, count + 2)
    given, selected = (resolve_budget(n, dataset.most_blocks) for n in (blocks, k))
    stage = _stage2(model, dataset, "gold", max_blocks=given, budgets=[selected])
    with torch.no_grad():
        values = [float(stage(**stage.collate([item]))["answer"]) for item in dataset.items]
    weights = model.mixture.weights().tolist()
    mixture = dict(zip(map(str, model.config.extract_layers), weights, strict=True))
    found = {"answer_loss": summarize(values, digits=4), "mixture": mixture}
    return {**found, "training": budget(folder)}


def losses(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """The same loss given the selector's K best blocks, at several K over the same states.

    `budgets` has mean, interval and number of examples by K, `change` the same of the paired
    differences to the first K, `losses` those of single examples, and `recall` the share of
    examples with evidence among the K best blocks, in percent.
    """
    folder = checkpoint_of(cell, scale, data)
    model = _open(folder, cell.dtype or scale.dtype)
    dataset = _dataset(model, cell, scale, data)
    budgets = [k for k in BUDGETS if isinstance(k, int)]
    most = max(len(item.blocks) for item in dataset.items)
    stage = _stage2(model, dataset, "selected", max_blocks=most, budgets=budgets)
    losses: dict[int, list[float]] = {k: [] for k in budgets}
    recalled: dict[int, list[float]] = {k: [] for k in budgets}
    with torch.no_grad():
        for item in dataset.items:
            batch = stage.collate([item])
            # Documents and questions are read once.
            layers = model.config.extract_layers
            batch["states"], batch["question_states"] = frozen_states(batch, model.encoder, layers)
            for k in budgets:
                parts = stage(**{**batch, "budget": k})
                losses[k].append(float(parts["answer"]))
                recalled[k].append(100 * float(parts["recall"]))
    first = losses[budgets[0]]
    changes = {k: [a - b for a, b in zip(own, first, strict=True)] for k, own in losses.items()}
    return {
        "budgets": {str(k): summarize(found, digits=4) for k, found in losses.items()},
        "change": {str(k): summarize(found, digits=4) for k, found in changes.items()},
        "losses": {str(k): [round(loss, 4) for loss in found] for k, found in losses.items()},
        "recall": {str(k): summarize(found) for k, found in recalled.items()},
        "tau": None if model.guidance is None else float(model.guidance.tau.detach()),
        "training": budget(folder),
    }


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


def _dataset(model: SeDeM, cell: Cell, scale: Scale, data: Path) -> BlockDataset:
    dataset = BlockDataset(model, answer_limit=128)
    dataset.add(ExampleSet("questions", examples_of(cell, scale, data)), "evidence")
    return dataset


def _stage2(model: SeDeM, dataset: BlockDataset, conditioning: str, **blocks: Any) -> Stage2:
    collator = BlockCollator(dataset, seed=0, cache=None, **blocks)
    return Stage2(model, Stage2Losses(reconstruct=0.0, conditioning=conditioning), collator).eval()


def training(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """The cost of a training stage."""
    assert cell.variant is not None
    folder = run_of_stage(cell.variant, scale, cell.stage, data)
    summary = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    return {"optimization": summary.pop("recipe")["optimization"], **summary}


ALWAYS = 3
"""Number of lowest rates that are always tried."""


def search(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Held-out losses of a baseline's first stage after a few steps, at several learning rates.

    The lowest rates are always tried. The next higher one is tried while the highest so far is the
    best. Every part has the same rate. The method's own loss on held-out training data is compared,
    so rates of different methods cannot be compared.
    """
    assert cell.variant is not None
    backbone, stage = cell.variant.backbone or scale.backbones[0], "text"
    path = scale.baseline_recipe(cell.method, stage, backbone)
    if not recipe_exists(path):  # not every method has a recipe on text
        stage = "questions"
        path = scale.baseline_recipe(cell.method, stage, backbone)
    losses: dict[str, dict[str, float]] = {}
    for rate in scale.rates:
        if len(losses) >= ALWAYS and best_rate({"rates": losses}) != float([*losses][-1]):
            break
        overrides = [*scale.search[stage], f"data_root={data}"]
        parts = load_baseline_recipe(cell.method, path, overrides).optimization.learning_rates
        rates = ", ".join(f"{part}: {rate:.1e}" for part in parts)
        output = scale.runs / "search" / f"{cell.method}-{rate_name(rate)}"
        overrides += [f"optimization.learning_rates={{{rates}}}", f"run.output={output}"]
        run_recipe(path, overrides, scale)
        summary = json.loads((output / "training.json").read_text(encoding="utf-8"))
        loss = summary["evaluation"]["eval_loss"]
        losses[rate_name(rate)] = {"loss": loss, "seconds": summary["seconds"]}
    return {
        "stage": stage,
        "steps": summary["steps"],
        "examples_seen": summary["examples_seen"],
        "seed": summary["recipe"]["optimization"]["seed"],
        "rates": losses,
    }


def rate_name(rate: float) -> str:
    """A rate's name in a result."""
    return f"{rate:.0e}"


def best_rate(result: dict[str, Any]) -> float:
    """The rate with the lowest loss."""
    rates = result["rates"]
    return float(min(rates, key=lambda name: rates[name]["loss"]))
