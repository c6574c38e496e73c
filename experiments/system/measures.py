"""How each kind of cell is measured; models that it needs are trained first."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.system.cells import Cell, results_of
from experiments.system.few_digits import few_digits
from experiments.system.forms import PAPER_FORM
from experiments.system.scales import SHIPPED, Scale
from experiments.system.training import (
    baseline_checkpoint,
    budget,
    checkpoint,
    run_of_stage,
    stage1_checkpoint,
)
from experiments.system.variants import Variant
from sedem.baselines.registry import TRAINED
from sedem.durable_files import write_text
from sedem.evaluation.registry import default_checkpoint

if TYPE_CHECKING:
    from sedem.data.examples import Example

SELECTING = ("sedem", "bm25", "rag")
"""Methods with a selection budget."""


def measure(cell: Cell, scale: Scale, data: Path, study: str, results: Path | None = None) -> None:
    """Measure a cell and keep the result in the folder of a study.

    Args:
        cell: a cell without a result.
        scale: gives sets, recipes and limits.
        data: folder that the data paths are relative to.
        study: name of the study.
        results: folder of results; None means the scale's.
    """
    result = MEASURES[cell.measure](cell, scale, data)
    path = (results or results_of(scale)) / study / f"{cell.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # On one line: indentation would be a quarter of all committed results.
    write_text(path, json.dumps(few_digits(result), separators=(",", ":")) + "\n")


def _answers(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from sedem.evaluation.command import run_evaluation
    from sedem.evaluation.config import EvaluationConfig

    questions, variant = scale.sets[cell.questions], _variant(cell)
    folder = trained(cell, scale, data)
    config = EvaluationConfig(
        method=cell.method,
        data=questions.found(data),
        checkpoint=str(folder),
        schema_name=questions.schema,
        records=questions.records,
        split=questions.split,
        options=questions.options,
        limit=cell.limit or questions.limit,
        k=questions.k if cell.k is None and cell.method in SELECTING else cell.k,
        control=cell.control,
        shift=cell.shift,
        max_new_tokens=cell.max_new_tokens or questions.max_new_tokens,
        dtype=cell.dtype or scale.dtype,
        **({"memory": cell.slots} if cell.slots else {}),
    )
    result = run_evaluation(config, out=scale.runs / "evaluation" / cell.name)
    # Checkpoint folders differ between machines; the result contains the digest of the weights.
    own = f"{cell.method}{cell.setting}" if cell.method in TRAINED else variant.name
    shipped = folder.parent == SHIPPED.parent
    result["settings"]["checkpoint"] = folder.name if shipped else own
    return {**result, "training": budget(folder)}


def _constant(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.system.constants import measure_constant

    return measure_constant(cell, scale, data)


def trained(cell: Cell, scale: Scale, data: Path) -> Path:
    """The checkpoint of a cell's method; it is trained first if it is missing."""
    variant = _variant(cell)
    trained_for = cell.trained_for or cell.questions
    if cell.method not in TRAINED:
        return checkpoint(variant, scale, trained_for, data, cell.form or PAPER_FORM)
    if cell.shipped:
        return SHIPPED.with_name(default_checkpoint(cell.method))
    return baseline_checkpoint(
        cell.method,
        scale,
        variant.backbone or scale.backbones[0],
        trained_for,
        data,
        setting=cell.setting,
        gold=cell.control == "gold" and scale.gold_trained,
    )


def _variant(cell: Cell) -> Variant:
    assert cell.variant is not None, f"{cell.name} needs a variant"
    return cell.variant


def _memory(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.system.losses import memory_losses
    from sedem.training.recipe import load_recipe
    from sedem.training.stages import Stage1Recipe

    folder = stage1_checkpoint(_variant(cell), scale, data)
    recipe = load_recipe(Stage1Recipe, folder.parent / "recipe.yaml")
    return {**memory_losses(folder, recipe), "training": budget(folder)}


def _loss(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.system.losses import answer_losses

    variant = _variant(cell)
    folder = checkpoint(variant, scale, cell.questions, data)
    count = variant.k or 2
    k, blocks = ("all", "all") if variant.every_block else (count, count + 2)
    losses = answer_losses(folder, _examples(cell, scale, data), scale.dtype, k=k, blocks=blocks)
    return {**losses, "training": budget(folder)}


def _losses_by_budget(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.system.budgets import BUDGETS
    from experiments.system.losses import losses_by_budget

    form = cell.form or PAPER_FORM
    folder = checkpoint(_variant(cell), scale, scale.ablation[0], data, form)
    budgets = [k for k in BUDGETS if isinstance(k, int)]
    dtype = cell.dtype or scale.dtype
    losses = losses_by_budget(folder, _examples(cell, scale, data), dtype, budgets)
    return {**losses, "training": budget(folder)}


def _rank(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.system.losses import icae_ranks, slot_ranks

    ranks = icae_ranks if cell.method == "icae" else slot_ranks
    return ranks(trained(cell, scale, data), _examples(cell, scale, data), scale.dtype)


def _block_recall(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.system.retrieval import block_recall

    folder = checkpoint(_variant(cell), scale, cell.questions, data)
    return block_recall(folder, _examples(cell, scale, data))


def _coarse_search(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.system.coarse_search import coarse_search

    folder = checkpoint(_variant(cell), scale, cell.questions, data)
    return coarse_search(folder, scale, cell.questions, data, cell.limit)


def _large_banks(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.large_banks import sizes
    from experiments.system.large_banks import large_banks

    assert cell.limit is not None
    return large_banks(SHIPPED, scale, cell.questions, data, cell.limit, sizes(scale.name))


def _confidence(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.system.confidence import confidence

    folder = checkpoint(_variant(cell), scale, cell.questions, data)
    return confidence(folder, scale, cell.questions, data, cell.limit)


def _budgets(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.system.budgets import answers_by_budget

    form = cell.form or PAPER_FORM
    return answers_by_budget(
        checkpoint(_variant(cell), scale, cell.questions, data, form),
        _examples(cell, scale, data),
        condition=cell.condition,
        dtype=cell.dtype or scale.dtype,
        max_new_tokens=cell.max_new_tokens or scale.sets[cell.questions].max_new_tokens,
        kept=cell.kept,
    )


def _condition_times(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.system.condition_times import condition_times

    folder = checkpoint(_variant(cell), scale, cell.questions, data)
    dtype = cell.dtype or scale.dtype
    return condition_times(folder, _examples(cell, scale, data), dtype)


def _examples(cell: Cell, scale: Scale, data: Path) -> list[Example]:
    from sedem.evaluation.run import sample

    questions = {**scale.sets, **scale.held_out}[cell.questions]
    return sample(questions.examples(data), cell.limit or questions.limit, 0)


def _cost(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.system.convention import counted_as_paper
    from sedem.evaluation.baseline_cost import baseline_cost
    from sedem.evaluation.cost import cost
    from sedem.provenance import provenance

    if cell.method in TRAINED:
        return {**baseline_cost(cell.method, cell.backbone), **provenance()}
    result = cost(cell.backbone)
    parameters = result["parameters"]
    memory = parameters["total"] - parameters["lora"]
    parameters["without_lora"] = memory
    parameters["percent_without_lora"] = 100 * memory / parameters["backbone"]
    return {**result, "paper": counted_as_paper(cell.backbone, result["flops"]), **provenance()}


def _training(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    folder = run_of_stage(_variant(cell), scale, cell.stage, data)
    summary = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    return {"optimization": summary.pop("recipe")["optimization"], **summary}


def _search(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.system.rate_search import search

    return search(cell.method, scale, _variant(cell).backbone or scale.backbones[0], data)


def _bench(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.system.bench import measure_bench

    folder = None
    if cell.variant is not None:
        folder = checkpoint(cell.variant, scale, scale.ablation[0], data)
    return measure_bench(cell.measure, scale, folder, cell.backbone, cell.name)


def _arrivals(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.arrivals import rates
    from experiments.system.arrivals import measure_arrivals
    from sedem.config import DEFAULT_MODEL
    from sedem.model import SeDeM

    smoke = cell.variant is not None
    model = SeDeM.from_pretrained(trained(cell, scale, data) if smoke else DEFAULT_MODEL)
    return measure_arrivals(model, rates(scale.name), 3 if smoke else 64, 1 if smoke else 3)


def _bank_size(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.bank_size import sizes
    from experiments.system.bank_size import measure_bank_size

    return measure_bank_size(sizes(scale.name))


def _preparation(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.system.preparation import measure_preparation
    from sedem.model import SeDeM

    model = SeDeM.from_pretrained(trained(cell, scale, data), engine="eager")
    return measure_preparation(model, _examples(cell, scale, data))


def _probe(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.system.probe import measure_probe

    return measure_probe(scale, data)


MEASURES: Mapping[str, Callable[[Cell, Scale, Path], dict[str, Any]]] = {
    "answers": _answers,
    "constant": _constant,
    "memory": _memory,
    "loss": _loss,
    "losses": _losses_by_budget,
    "rank": _rank,
    "block-recall": _block_recall,
    "coarse-search": _coarse_search,
    "large-banks": _large_banks,
    "confidence": _confidence,
    "condition-times": _condition_times,
    "budgets": _budgets,
    "cost": _cost,
    "training": _training,
    "search": _search,
    "bench": _bench,
    "batches": _bench,
    "memories": _bench,
    "kept": _bench,
    "peers": _bench,
    "arrivals": _arrivals,
    "preparation": _preparation,
    "bank-size": _bank_size,
    "probe": _probe,
}
"""How each kind of cell is measured.

- answers: the harness of `sedem eval`.
- constant: the same answer to every question, scored by the same harness.
- memory: losses on held-out windows from memory alone, after stage 1.
- loss: loss of the reference answers with the evidence among the blocks.
- losses: the same with the selector's blocks, at several K over the same states.
- rank: normalized effective rank of memory slots.
- block-recall: recall of BM25 over the blocks of SeDeM.
- coarse-search: what a first search with pooled keys misses; large-banks: the same in made banks.
- budgets: answers at several K over the same banks, with paired differences to K=1.
- condition-times: times to the first token from blocks as memory, as text and as both.
- confidence: how well scores predict whether the evidence is in the documents.
- cost: parameters and FLOPs.
- training: the cost of a training stage.
- search: held-out losses of a trained baseline at several learning rates.
- bench: times and memory of the methods; batches: questions per second; memories: times by type
  of the stored slots; kept: what is kept of blocks, and its benefit; peers: every method compared
  with full context.
- arrivals: tokens per second and times to the first token of questions at random arrival times.
- preparation: time and memory of preparing questions for stage 2.
- bank-size: time and memory of opening a bank, and of commits to it, as it grows.
- probe: losses after the short runs of `sedem probe`, by budget and layers.
"""
