"""What a run at paper scale needs before it starts: weights, sets, disk and hours of GPUs.

Hours are FLOPs, counted as `sedem cost` counts them, over what a GPU sustains. A question has the
mean length of its set, and every answer its limit. A trained baseline, whose FLOPs of training are
not counted, counts as one reading of its context and answer through every layer, forward and
backward; a method whose FLOPs of an answer are not counted, as an answer of the full context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from experiments.system import paper
from experiments.system.cells import Cell, answer_tokens, trainings
from experiments.system.models import Planned
from experiments.system.scales import Scale
from experiments.system.tables import Study
from sedem.bench.training_cost import TFLOPS, Assumed, examples_of_run, shape_of, training_cost
from sedem.durable_files import bytes_text
from sedem.evaluation.baseline_cost import COUNTED, baseline_flops, baseline_parameters
from sedem.evaluation.cost import (
    PRESETS,
    Workload,
    answer_flops,
    backward_flops,
    cost,
    head_flops,
    layer_flops,
    shape_file,
)
from sedem.training.baseline import BaselineRecipe

QUESTION = Workload.question
LICENCE = "Llama 3.2 Community License; accept it on the hub and log in (`hf auth login`)"
SETS = {
    "hotpotqa": ("hotpotqa/hotpot_qa", "CC BY-SA 4.0"),
    "2wiki": ("xanhho/2WikiMultihopQA", "Apache-2.0"),
    "musique": ("dgslibisey/MuSiQue", "CC BY 4.0"),
    "qasper": ("allenai/qasper", "CC BY 4.0"),
}
"""Repository and licence of each set; text is streamed from the repository that a recipe names."""
COPIES = 3
"""Numbers per trained parameter in a checkpoint that a run resumes from: AdamW has two more."""
FLOAT32, TOKEN = 4, 4


def print_needs(studies: Iterable[Study], scale: Scale, data: Path, again: str) -> None:
    """Print what the cells of studies need; a run counts for the first study that needs it.

    Args:
        again: the command that was given, without `--dry-run`.
    """
    runs: dict[Path, Planned] = {}
    seen: set[Cell] = set()
    shown = Table("table", "cells", "runs", "training, h", "answers, h")
    totals = [0, 0, 0.0, 0.0]
    for study in studies:
        cells = [cell for cell in study.cells(scale) if cell not in seen]
        seen |= set(cells)
        found: dict[Path, Planned] = {}
        for cell in cells:
            found |= trainings(cell, scale, data)
        new = {folder: run for folder, run in found.items() if folder not in runs}
        runs |= new
        trained = sum(_hours(_training(run)) for run in new.values())
        answered = sum(_hours(_answers(cell, scale)) for cell in cells)
        row = [len(cells), len(new), trained, answered]
        totals = [total + own for total, own in zip(totals, row, strict=True)]
        if cells:
            shown.add_row(study.name, *_row(row))
    shown.add_section()
    shown.add_row("all", *_row(totals))
    Console().print(shown)
    for line in _facts(runs, seen, scale):
        typer.echo(line)
    typer.echo(f"GPU hours at {TFLOPS:g} TFLOP/s (40 % of an H100); measured times not counted")
    typer.echo(f"one GPU: {again}")
    launch = '"$(sedem train --launch-file eight-gpus)"'
    typer.echo(f"eight: accelerate launch --config_file {launch} {again.removeprefix('python ')}")


@lru_cache
def _cost(name: str, workload: Workload | None = None) -> dict[str, Any]:
    return cost(name, workload)


def _parameters(name: str) -> dict[str, Any]:
    """The parameters of SeDeM on a public backbone or a preset."""
    found: dict[str, Any] = _cost(name.rpartition("/")[2].lower())["parameters"]
    return found


def _row(row: list[Any]) -> list[str]:
    return [f"{row[0]:,}", f"{row[1]:,}", f"{row[2]:,.1f}", f"{row[3]:,.1f}"]


def _hours(flops: float) -> float:
    return flops / (TFLOPS * 1e12) / 3600


def _facts(runs: dict[Path, Planned], cells: Iterable[Cell], scale: Scale) -> Iterator[str]:
    """Weights, sets and disk."""
    shapes = {name for run in runs.values() for name in _backbones(run)}
    for name in sorted(shapes):
        size = _parameters(name)["backbone"]
        yield f"weights: {name}, {size / 1e9:.2f}B, {bytes_text(2 * size)}; {LICENCE}"
    for key in dict.fromkeys(_set_of(cell, scale) for cell in cells):
        if key in SETS:
            counts = paper.row("tab:dataset_appendix_details", key)
            repository, licence = SETS[key]
            yield f"set: {repository}, {counts['train']:,} and {counts['val']:,}; {licence}"
    texts = {
        (source.path, source.tokens or 0)
        for run in runs.values()
        if (source := getattr(run.recipe, "text", None))
    }
    for path in sorted({path for path, _ in texts}):
        yield f"text: {path}, streamed"
    checkpoints = sum(_bytes(run) for run in runs.values())
    tokens = TOKEN * sum(count for _, count in texts)
    weights = sum(2 * _parameters(n)["backbone"] for n in shapes)
    yield (
        f"disk: {bytes_text(checkpoints)} of checkpoints, {bytes_text(tokens)} of tokens, "
        f"{bytes_text(weights)} of weights"
    )


def _set_of(cell: Cell, scale: Scale) -> str:
    """The set of the paper that a cell's questions come from."""
    asked = {**scale.sets, **scale.held_out}.get(cell.questions)
    sources = {"2wikimultihopqa": "2wiki"}
    return sources.get(asked.source, asked.source) if asked else ""


def _backbones(run: Planned) -> list[str]:
    model = run.recipe.model
    if isinstance(run.recipe, BaselineRecipe):
        return [model.backbone]
    return [model.encoder, *([model.decoder] if model.decoder else [])]


def _mean_length(path: str) -> int:
    """The mean length of a set's contexts, as the paper gives it."""
    key = {"2wikimultihopqa": "2wiki"}.get(path, path)
    return int(paper.row("tab:datasets", key)["avg_len_tokens"])


def _training(run: Planned) -> float:
    """The FLOPs of a run."""
    recipe = run.recipe
    mixture = getattr(recipe, "data", None)
    source = mixture.training[0].path if mixture else ""
    context = _mean_length(source) if source else 0
    if not isinstance(recipe, BaselineRecipe):
        assumed = Assumed(workload=Workload(context=context or Workload.context))
        return training_cost(run.path, run.overrides, assumed)["flops"]["total"]
    shape, (_, examples) = shape_of(recipe.model.backbone), examples_of_run(recipe, Assumed())
    if recipe.text is not None:
        read, scored = recipe.text.context, recipe.text.continuation
    else:
        assert recipe.data is not None
        read, scored = min(context, recipe.data.context_limit or context), Workload.answer
    tokens = read + scored
    layers = shape.num_hidden_layers * (layer_flops(shape, tokens) + backward_flops(shape, tokens))
    return examples * (layers + 2 * scored * head_flops(shape))


def _answers(cell: Cell, scale: Scale) -> float:
    """The FLOPs of the answers of a cell; 0 if it has none."""
    key = _set_of(cell, scale)
    if cell.measure not in ("answers", "budgets") or key not in SETS or cell.variant is None:
        return 0.0
    asked = scale.sets[cell.questions]
    questions = int(paper.row("tab:dataset_appendix_details", key)["val"])
    questions = min(questions, cell.limit or asked.limit or questions)
    context = asked.options.get("length") or _mean_length(asked.source)
    backbone = cell.variant.backbone or scale.backbones[0]
    k = cell.k or asked.k
    workload = Workload(
        context,
        QUESTION,
        answer_tokens(cell, scale),
        k if isinstance(k, int) else -(-context // 128),
    )
    if cell.method == "sedem":
        each = _cost(backbone, workload)["flops"]["total"]
    elif cell.method in COUNTED:
        found = baseline_flops(cell.method, backbone, workload=workload)
        each = found["total"]
    else:
        shape = shape_file(PRESETS[backbone][2])
        each = answer_flops(shape, context + QUESTION, 0, workload.answer)
    return float(questions * each)


def _bytes(run: Planned) -> int:
    """Bytes of a run's checkpoints: the final one, and those that it resumes from."""
    recipe = run.recipe
    if isinstance(recipe, BaselineRecipe):
        shape = recipe.model.backbone.rpartition("/")[2].lower()
        trained = baseline_parameters(recipe.method, shape, recipe.model)["total"]
    else:
        preset = "-to-".join(
            dict.fromkeys(
                name.rpartition("llama-3.2-")[2] for name in map(str.lower, _backbones(run))
            )
        )
        parts = _parameters(f"llama-3.2-{preset}")
        trained = parts["total"] if run.trained == "stage2" else parts["total"] - parts["lora"]
    return FLOAT32 * trained * (1 + COPIES * recipe.run.keep)
