"""How models learn: losses and ranks, the cost of a training stage, rates, and a probe.

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
from experiments.system.probe import ProbeSettings
from experiments.system.probe import probe as run_probe
from experiments.system.scales import Scale, recipe_exists
from experiments.system.stand_in import fitted
from sedem import Document, SeDeM
from sedem.backbone.prompts import context_prompt
from sedem.method.selector import resolve_budget
from sedem_lab.baselines.icae import ICAE
from sedem_lab.data.corpus import hub_id, read_texts
from sedem_lab.data.examples import Example, ExampleSet
from sedem_lab.evaluation.continuation import continuation_losses
from sedem_lab.evaluation.metrics import summarize
from sedem_lab.evaluation.rank import block_slots, normalized_effective_rank
from sedem_lab.training.baseline import load_baseline_recipe
from sedem_lab.training.block_batch import BlockCollator, frozen_states
from sedem_lab.training.block_dataset import BlockDataset
from sedem_lab.training.recipe import load_recipe, read_entries
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
    length = model.config.segment_length
    _, windows = open_windows(recipe.text, recipe, model.encoder, length)
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
    return {**found, "training": budget(folder)}


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
        return {"effective_rank": ranks}
    reader = ICAE.from_pretrained(folder, dtype=dtype).eval()
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


def _dataset(model: SeDeM, examples: list[Example]) -> BlockDataset:
    dataset = BlockDataset(model, answer_limit=128)
    dataset.add(ExampleSet("questions", examples), "evidence")
    return dataset


def _stage2(model: SeDeM, dataset: BlockDataset, conditioning: str, **blocks: Any) -> Stage2:
    collator = BlockCollator(dataset, seed=0, cache=None, **blocks)
    return Stage2(model, Stage2Losses(reconstruct=0.0, conditioning=conditioning), collator).eval()


# The cost of a training stage, learning rates of baselines, and a probe

ALWAYS = 3
"""Number of lowest rates that are always tried."""
PROBED = {"batch_size": 8, "held_out": 64}
PROBED_ON_STAND_INS = {"batch_size": 2, "held_out": 2, "segment_length": 32, "continuation": 16}


def training(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """The cost of a training stage."""
    assert cell.variant is not None
    folder = run_of_stage(cell.variant, scale, cell.stage, data)
    summary = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    return {"optimization": summary.pop("recipe")["optimization"], **summary}


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
        losses[rate_name(rate)] = {
            "loss": summary["evaluation"]["eval_loss"],
            "seconds": summary["seconds"],
        }
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


def steps_of(scale: Scale) -> int:
    """The steps of each run of `probe`."""
    return 2 if scale.stand_in else 20


def ends_of_grid(scale: Scale) -> tuple[tuple[int, int], tuple[int, int]]:
    """Layers with the lowest and the highest continuation loss of the depth study at nano."""
    return (scale.layer(10), scale.layer(10)), (scale.layer(14), scale.layer(16))


def probe(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Losses after a probe of both ends of the depth grid, by pair of layers, such as "4-4".

    They are under the number of steps, such as "20 steps". The text is that of the study's models.
    """
    assert cell.variant is not None
    path = scale.recipe("stage1", cell.variant.backbone or "", scale.ablation[0])
    overrides = [*scale.stage1]
    overrides += fitted(read_entries(path, overrides), scale)
    recipe = load_recipe(Stage1Recipe, path, overrides)
    steps, source = steps_of(scale), recipe.text.path
    if hub_id(source) is None:
        source = str(data / source)
    settings = ProbeSettings(
        layers=ends_of_grid(scale),
        compressions=(recipe.model.compression,),
        steps=steps,
        **(PROBED_ON_STAND_INS if scale.stand_in else PROBED),
    )
    result = run_probe(
        recipe.model.encoder,
        read_texts(source, recipe.text.exclude_titles, shard_seed=recipe.text.shard_seed),
        settings,
        scale.runs / "probe" / str(steps),
    )
    rows = {f"{row['extract_layers'][0]}-{row['inject_layer']}": row for row in result["runs"]}
    kept = {name: result[name] for name in ("settings", "ends")}
    return {f"{steps} steps": {**kept, **rows}}
