"""One measurement and its file: results/SCALE/NAME.json, with settings, machine and versions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.scales import RUNS, SHIPPED, Scale
from experiments.variants import (
    Variant,
    baseline_checkpoint,
    budget,
    checkpoint,
    stage1_checkpoint,
)
from sedem.baselines.registry import TRAINED
from sedem.evaluation.registry import default_checkpoint

RESULTS = Path(__file__).parent / "results"
SELECTING = ("sedem", "bm25", "rag")
"""Methods with a budget; of a set's own size unless a cell says otherwise."""


@dataclass(frozen=True)
class Cell:
    """What is measured.

    Attributes:
        measure: "answers" (the harness), "memory" (losses after stage 1), "loss" (of answers),
            "rank" (of memory slots), "cost" (parameters and FLOPs), "search" (a baseline's learning
            rates), "bench" (times and memory), "batches" (questions a second), "memories" (times
            by type of stored slots) or "peers" (times of every method beside full context).
        method: a name of `sedem eval --list`, for answers.
        variant: the model; methods of raw text take its backbone.
        questions: key of a set of the scale.
        trained_for: set that the model was trained for; empty means the set that is asked.
        k: selection budget; None means the set's own.
        control: which blocks SeDeM uses; with "gold" a trained baseline is given documents with
            evidence alone, in training too where the scale says so.
        setting: which of a trained baseline's recipes for questions, where it has several.
        shipped: the trained baseline that travels with sedem answers.
        shift: boundaries between segments moved by so many tokens.
        limit: questions; None means the set's own limit.
        backbone: whose cost, or the shape that is benched on random weights.
    """

    measure: str = "answers"
    method: str = "sedem"
    variant: Variant | None = None
    questions: str = ""
    trained_for: str = ""
    k: int | str | None = None
    control: str = "selected"
    setting: str = ""
    shipped: bool = False
    shift: int = 0
    limit: int | None = None
    backbone: str = ""

    @property
    def name(self) -> str:
        """Of its file."""
        parts = [
            self.measure if self.measure != "answers" else "",
            f"{self.method}{self.setting}" if self.method != "sedem" else "",
            self.variant.name if self.variant else "",
            self.backbone,
            self.questions,
            f"trained-{self.trained_for}" if self.trained_for else "",
            "" if self.k is None else f"k{self.k}",
            self.control if self.control != "selected" else "",
            "shipped" if self.shipped else "",
            f"shift{self.shift}" if self.shift else "",
            f"n{self.limit}" if self.limit else "",
        ]
        return ".".join(part for part in parts if part)

    def path(self, scale: Scale) -> Path:
        """Where its result is kept; smoke proves wiring, so nothing of it is kept for good."""
        folder = RUNS / "smoke" / "results" if scale.name == "smoke" else RESULTS / scale.name
        return folder / f"{self.name}.json"

    def read(self, scale: Scale) -> dict[str, Any] | None:
        """Its result, None if it was not measured."""
        path = self.path(scale)
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def measure(cell: Cell, scale: Scale, data: Path) -> None:
    """Measure a cell and keep the result; a cell that is there is left alone."""
    path = cell.path(scale)
    if path.is_file():
        return
    result = MEASURES[cell.measure](cell, scale, data)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def _answers(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from sedem.evaluation.command import run_evaluation

    questions = scale.sets[cell.questions]
    assert cell.variant is not None
    folder = _trained(cell, scale, data)
    k = questions.k if cell.k is None and cell.method in SELECTING else cell.k
    result = run_evaluation(
        cell.method,
        questions.found(data),
        checkpoint=str(folder),
        schema=questions.schema,
        records=questions.records,
        split=questions.split,
        options=questions.options,
        limit=cell.limit or questions.limit,
        k=k,
        control=cell.control,
        shift=cell.shift,
        max_new_tokens=questions.max_new_tokens,
        dtype=scale.dtype,
        out=RUNS / scale.name / "evaluation" / cell.name,
    )
    # Where a checkpoint lay on the machine that measured it says nothing; its digest does.
    own = f"{cell.method}{cell.setting}" if cell.method in TRAINED else cell.variant.name
    shipped = folder.parent == SHIPPED.parent
    result["settings"]["checkpoint"] = folder.name if shipped else own
    return {**result, "training": budget(folder)}


def _trained(cell: Cell, scale: Scale, data: Path) -> Path:
    """The checkpoint of a cell's method, trained first if it is not there."""
    assert cell.variant is not None
    trained_for = cell.trained_for or cell.questions
    if cell.method not in TRAINED:
        return checkpoint(cell.variant, scale, trained_for, data)
    if cell.shipped:
        return SHIPPED.with_name(default_checkpoint(cell.method))
    return baseline_checkpoint(
        cell.method,
        scale,
        cell.variant.backbone or scale.backbones[0],
        trained_for,
        data,
        setting=cell.setting,
        gold=cell.control == "gold" and scale.gold_trained,
    )


def _memory(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Losses on held-out windows from memory alone, after stage 1."""
    from experiments.losses import memory_losses
    from sedem.training.recipe import load_recipe
    from sedem.training.run import Stage1Recipe

    assert cell.variant is not None
    folder = stage1_checkpoint(cell.variant, scale, data)
    recipe = load_recipe(Stage1Recipe, folder.parent / "recipe.yaml")
    return {**memory_losses(folder, recipe), "training": budget(folder)}


def _loss(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Loss of the reference answers, selection taken out."""
    from experiments.losses import answer_losses

    assert cell.variant is not None
    folder = checkpoint(cell.variant, scale, cell.questions, data)
    examples = _examples(cell, scale, data)
    k = cell.variant.k or 2
    losses = answer_losses(folder, examples, scale.dtype, k=k, blocks=k + 2)
    return {**losses, "training": budget(folder)}


def _rank(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    """Normalized effective rank of the memory slots of a set's contexts."""
    from experiments.losses import icae_ranks, slot_ranks

    ranks = icae_ranks if cell.method == "icae" else slot_ranks
    return ranks(_trained(cell, scale, data), _examples(cell, scale, data), scale.dtype)


def _examples(cell: Cell, scale: Scale, data: Path) -> list[Any]:
    from sedem.data.question_sets import open_examples
    from sedem.evaluation.run import sample

    questions = scale.sets[cell.questions]
    examples = open_examples(
        questions.found(data),
        questions.schema,
        records=questions.records,
        split=questions.split,
        **questions.options,
    )
    return sample(examples.examples, cell.limit or questions.limit, 0)


def _cost(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from sedem.evaluation.cost import cost
    from sedem.evaluation.overhead import baseline_cost
    from sedem.provenance import provenance

    if cell.method in TRAINED:
        return {**baseline_cost(cell.method, cell.backbone), **provenance()}

    result = cost(cell.backbone)
    parameters = result["parameters"]
    memory = parameters["total"] - parameters["lora"]
    parameters["without_lora"] = memory
    parameters["percent_without_lora"] = 100 * memory / parameters["backbone"]
    return {**result, **provenance()}


def _search(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.search import search

    assert cell.variant is not None
    return search(cell.method, scale, cell.variant.backbone or scale.backbones[0], data)


def _bench(cell: Cell, scale: Scale, data: Path) -> dict[str, Any]:
    from experiments.bench import measure_bench

    folder = None if cell.variant is None else checkpoint(cell.variant, scale, "squad-10", data)
    return measure_bench(cell.measure, scale, folder, cell.backbone, cell.name)


MEASURES: Mapping[str, Callable[[Cell, Scale, Path], dict[str, Any]]] = {
    "answers": _answers,
    "memory": _memory,
    "loss": _loss,
    "rank": _rank,
    "cost": _cost,
    "search": _search,
    "bench": _bench,
    "batches": _bench,
    "memories": _bench,
    "peers": _bench,
}
