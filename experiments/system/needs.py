"""What a run at paper scale needs before it starts: weights, sets, disk and hours of GPUs.

Hours are FLOPs, counted without weights, over what a GPU sustains at best and at least, and the
time in which each step of an answer reads the weights. A question has the mean length of its set,
and every answer its limit. A method whose FLOPs of an answer are not counted counts as an answer of
the full context. Memory is that of a batch in which every question has the longest context of its
set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from experiments.system import paper
from experiments.system.cells import Cell, answer_tokens, trainings
from experiments.system.models import Planned
from experiments.system.scales import Scale
from experiments.system.tables import Study
from experiments.system.training_steps import examples_of_run, measure, shape_of
from sedem.durable_files import bytes_text
from sedem_lab.data.hub import HOMES
from sedem_lab.evaluation.cost import (
    COUNTED,
    PRESETS,
    Workload,
    backbone_size,
    baseline_flops,
    baseline_parameters,
    cost,
    count_parameters,
    full_context_flops,
    shape_file,
)
from sedem_lab.training.baseline import BaselineRecipe
from sedem_lab.training.memory import ROOM, Step
from sedem_lab.training.recipe import DataSource

LICENCE = "Llama 3.2 Community License; accept it on the hub and log in (`hf auth login`)"
SETS = {
    "hotpotqa": ("hotpotqa", "CC BY-SA 4.0"),
    "2wikimultihopqa": ("2wiki", "Apache-2.0"),
    "musique": ("musique", "CC BY 4.0"),
    "qasper": ("qasper", "CC BY 4.0"),
    "govreport": ("govreport", "public domain"),
}
"""Our key and the licence of each set, by its public name."""
OURS = {"govreport": {"train": 17_517, "val": 973, "avg_len_tokens": 9_000}}
"""What the paper's tables would say of a set that it lacks, by the set's card."""
WINDOWS = {"hub:UniverseTBD/arxiv-abstracts-large": 1_000_000}
"""Windows of the texts that a recipe reads to their end: an estimate."""
COPIES = 3
"""Numbers per trained parameter in a checkpoint that a run resumes from: AdamW has two more."""
TFLOPS = 400.0, 80.0
"""TFLOP/s that a GPU sustains: 40 % of an H100's 989 in bfloat16, by its data sheet, and what stage
1 of sedem-smol, a tenth of the size, was measured at on one. Its stage 2 was measured at 23."""
BANDWIDTH = 1.5e12
"""Bytes of weights that a step of an answer reads in a second: 45 % of an H100's, as measured."""
BATCH = 32
"""Answers of SeDeM at once, as `sedem eval` has them; other methods answer one by one."""
SEGMENT = 128
"""T of the main models."""
BFLOAT16, FLOAT32, TOKEN = 2, 4, 4
GIB = 2**30


def print_needs(
    studies: Iterable[Study], scale: Scale, data: Path, command: str, gpu_memory: int
) -> bool:
    """Print what the cells of studies need; a cell and a run count for the first that needs them.

    Args:
        command: the one that was given, without `--dry-run`.
        gpu_memory: bytes of a GPU.

    Returns:
        Whether every training fits such a GPU.
    """
    runs: dict[Path, Planned] = {}
    seen: set[Cell] = set()
    shown = Table("table", "cells", "runs", "training, h", "answers, h")
    totals = [0, 0, 0.0, 0.0, 0.0, 0.0]
    for study in track([*studies], "counting", console=Console(stderr=True), transient=True):
        every = study.cells(scale)
        cells = [cell for cell in every if cell not in seen]
        seen |= set(cells)
        found: dict[Path, Planned] = {}
        for cell in cells:
            found |= trainings(cell, scale, data)
        new = {folder: run for folder, run in found.items() if folder not in runs}
        runs |= new
        trained = sum(training_flops(run) for run in new.values())
        answered = [_answers(cell, scale) for cell in cells]
        of_answers = _hours(sum(flops for flops, _ in answered), sum(s for _, s in answered))
        row = [len(cells), len(new), *_hours(trained), *of_answers]
        totals = [total + own for total, own in zip(totals, row, strict=True)]
        if every:
            shown.add_row(study.name, *_row(row))
    shown.add_section()
    shown.add_row("all", *_row(totals))
    Console().print(shown)
    fits = print_memory(runs.values(), gpu_memory)
    for line in _facts(runs, seen, scale):
        typer.echo(line)
    typer.echo(
        f"GPU hours at {TFLOPS[0]:g} TFLOP/s (40 % of an H100) to {TFLOPS[1]:g} (measured on a "
        "small model); the studies of times are not counted"
    )
    typer.echo(f"one GPU: {command}")
    launch = '"$(sedem train --launch-file eight-gpus)"'
    typer.echo(f"eight: accelerate launch --config_file {launch} {command.removeprefix('python ')}")
    return fits


def _row(row: list[Any]) -> list[str]:
    cells, runs, *hours = row
    ranges = zip(hours[::2], hours[1::2], strict=True)
    return [f"{cells:,}", f"{runs:,}", *(f"{low:,.1f} to {high:,.1f}" for low, high in ranges)]


def _hours(flops: float, seconds: float = 0.0) -> list[float]:
    """Fewest and most hours of a GPU, with seconds that do not depend on its FLOP/s."""
    return [(flops / (rate * 1e12) + seconds) / 3600 for rate in TFLOPS]


def _facts(runs: dict[Path, Planned], cells: Iterable[Cell], scale: Scale) -> Iterator[str]:
    """Weights, sets and disk."""
    weights = 0
    for name in sorted({name for run in runs.values() for name in _backbones(run)}):
        size, _ = backbone_size(shape_of(name), 0, ())
        weights += BFLOAT16 * size
        yield f"weights: {name}, {size / 1e9:.2f}B, {bytes_text(BFLOAT16 * size)}; {LICENCE}"
    asked = {_source_of(cell, scale) for cell in cells}
    trained = {source.path for run in runs.values() for source in _mixed(run)}
    for source in sorted((asked | trained) & set(SETS)):
        _, licence = SETS[source]
        counts = _facts_of(source, "tab:dataset_appendix_details")
        size = f"{counts['train']:,} and {counts['val']:,} questions"
        yield f"set: {HOMES[source].repository}, {size}; {licence}"
    read = {}
    for run in runs.values():
        if text := getattr(run.recipe, "text", None):
            width = getattr(text, "context", 0) + text.continuation
            read[text.path, text.tokens] = text.tokens or WINDOWS[text.path] * width
    for path in sorted({path for path, _ in read}):
        yield f"text: {path}, streamed" + ", about 1M windows" * (path in WINDOWS)
    checkpoints, tokens = sum(map(checkpoint_bytes, runs.values())), TOKEN * sum(read.values())
    yield (
        f"disk: {bytes_text(checkpoints)} of checkpoints, {bytes_text(tokens)} of tokens, "
        f"{bytes_text(weights)} of weights"
    )


def _source_of(cell: Cell, scale: Scale) -> str:
    """The public name of the set that a cell's questions come from."""
    asked = {**scale.sets, **scale.held_out}.get(cell.questions)
    return asked.source if asked else ""


def _mixed(run: Planned) -> Sequence[DataSource]:
    """The questions that a run learns from; none if it learns from text."""
    mixture = getattr(run.recipe, "data", None)
    return mixture.training if mixture else ()


def _backbones(run: Planned) -> list[str]:
    model = run.recipe.model
    if isinstance(run.recipe, BaselineRecipe):
        return [model.backbone]
    return [model.encoder, *([model.decoder] if model.decoder else [])]


def _facts_of(source: str, table: str) -> Mapping[str, Any]:
    """What a table of the paper says of a set."""
    return OURS.get(source) or paper.row(table, SETS[source][0])


def _mean_length(source: str) -> int:
    """The mean length of a set's contexts, as the paper gives it."""
    return int(_facts_of(source, "tab:datasets")["avg_len_tokens"])


def training_flops(run: Planned) -> float:
    """The FLOPs of a run, in steps without gradient checkpointing."""
    text = getattr(run.recipe, "text", None)
    examples = examples_of_run(run.recipe, WINDOWS.get(text.path) if text else None)
    sources = [source.path for source in _mixed(run)]
    context = round(mean(map(_mean_length, sources))) if sources else 0
    rows = 1 if sources else run.recipe.optimization.batch_size
    return float(examples * measure(run.recipe, Workload(context), rows).flops / rows)


def longest_question(run: Planned) -> Workload:
    """The longest question of a run; none in a run on text, which has windows of one length."""
    if not (sources := _mixed(run)):
        return Workload(context=0)
    sets = [_facts_of(source.path, "tab:datasets") for source in sources]
    context = max(int(row["max_len_tokens"]) for row in sets)
    return Workload(context, answer=run.recipe.data.answer_limit)


def longest_step(run: Planned, gpu_memory: int) -> tuple[Step, bool]:
    """What a run's longest batch takes, and whether its layers are checkpointed, to fit."""
    question, chosen = longest_question(run), run.recipe.optimization.checkpointing
    step = measure(run.recipe, question, checkpointing=chosen is True)
    if chosen != "auto" or step.fits(gpu_memory):
        return step, chosen is True
    return measure(run.recipe, question, checkpointing=True), True


def print_memory(runs: Iterable[Planned], gpu_memory: int) -> bool:
    """Print the peak memory of each recipe; return whether all fit a GPU with so many bytes.

    Of runs that differ in their sets alone, the one with the longest contexts counts; of those that
    differ in their model, the largest.
    """
    longest: dict[tuple[str, str], Planned] = {}
    for run in runs:
        model = run.recipe.model.model_dump_json(exclude={"k"})
        key = f"{run.path.parent.name}/{run.path.stem}", model
        known = longest.setdefault(key, run)
        if longest_question(run).context > longest_question(known).context:
            longest[key] = run
    largest: dict[str, tuple[int, bool, int]] = {}
    for key in track(sorted(longest), "measuring", console=Console(stderr=True), transient=True):
        step, checkpointing = longest_step(longest[key], gpu_memory)
        found = step.peak_bytes, checkpointing, longest_question(longest[key]).context
        largest[key[0]] = max(found, largest.get(key[0], found))
    shown = Table(Column("recipe", overflow="fold"), "tokens", "peak, GiB", "checkpointing")
    for name, (peak, checkpointing, context) in largest.items():
        flag = "on" if checkpointing else "off"
        shown.add_row(name, f"{context:,}" if context else "windows", f"{peak / GIB:.1f}", flag)
    Console().print(shown)
    refused = {name: row[0] for name, row in largest.items() if row[0] > ROOM * gpu_memory}
    for name, peak in refused.items():
        typer.echo(
            f"{name} does not fit: its longest batch takes {peak / GIB:.1f} GiB, and a GPU of "
            f"{gpu_memory / GIB:g} GiB has room for {ROOM * gpu_memory / GIB:.1f}; set "
            "optimization.batch_size to less and optimization.accumulation to more"
        )
    return not refused


def _answers(cell: Cell, scale: Scale) -> tuple[float, float]:
    """The FLOPs of the answers of a cell, and the seconds in which they read weights."""
    source = _source_of(cell, scale)
    if cell.measure not in ("answers", "budgets") or source not in SETS or cell.variant is None:
        return 0.0, 0.0
    asked = scale.sets[cell.questions]
    questions = int(_facts_of(source, "tab:dataset_appendix_details")["val"])
    questions = min(questions, cell.limit or asked.limit or questions)
    context = asked.options.get("length") or _mean_length(source)
    backbone, k = cell.variant.backbone or scale.backbones[0], cell.k or asked.k
    blocks = k if isinstance(k, int) else -(-context // SEGMENT)
    tokens = answer_tokens(cell, scale)
    workload = Workload(context, Workload.question, tokens, blocks)
    steps = tokens * questions / (BATCH if cell.method == "sedem" else 1)
    seconds = steps * _weight_bytes(backbone) / BANDWIDTH
    return questions * _flops(cell.method, backbone, workload), seconds


@lru_cache
def _weight_bytes(backbone: str) -> int:
    """Bytes of the weights that answer."""
    size, _ = backbone_size(shape_file(PRESETS[backbone][2]), 0, ())
    return BFLOAT16 * size


@lru_cache(maxsize=256)
def _flops(method: str, backbone: str, workload: Workload) -> float:
    """The FLOPs of one answer."""
    if method == "sedem":
        return float(cost(backbone, workload)["flops"]["total"])
    if method in COUNTED:
        return float(baseline_flops(method, backbone, workload=workload)["total"])
    prefix = workload.context + workload.question
    return full_context_flops(shape_file(PRESETS[backbone][2]), prefix, workload.answer)


def checkpoint_bytes(run: Planned) -> int:
    """Bytes of a run's checkpoints: the final one, and those that it resumes from."""
    recipe, names = run.recipe, _backbones(run)
    if isinstance(recipe, BaselineRecipe):
        preset = names[0].rpartition("/")[2].lower()
        trained = baseline_parameters(recipe.method, preset, recipe.model)["total"]
    else:
        counts = count_parameters(recipe.model, shape_of(names[0]), shape_of(names[-1]))
        trained = counts["total"] - (counts["lora"] if run.trained == "stage1" else 0)
    return int(FLOAT32 * trained * (1 + COPIES * recipe.run.keep))
