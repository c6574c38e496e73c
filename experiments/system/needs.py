"""What a run at paper scale needs before it starts: weights, sets, disk, memory and hours of GPUs.

Hours are FLOPs over what a GPU sustains at best and at least, and the time in which each step of an
answer reads the weights. A question has the mean length of its set, and every answer its limit. A
method whose FLOPs of an answer are not counted counts as an answer of the full context. Memory is
that of a batch in which every question has the longest context of its set. A step of each recipe
runs without numbers (`sedem_lab.evaluation.meta`), on backbones of the recipe's shapes and a batch
of the given lengths, without padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table
from torch import Tensor
from transformers import PretrainedConfig

from experiments.system import paper
from experiments.system.cells import Cell, answer_tokens, trainings
from experiments.system.models import Planned
from experiments.system.scales import Scale
from experiments.system.tables import Study
from sedem.checkpoint.folder import embedded
from sedem.config import SedemConfig
from sedem.durable_files import bytes_text
from sedem.errors import ConfigError
from sedem.method.selector import resolve_budget
from sedem_lab.baselines.registry import reader_class
from sedem_lab.data.hub import HOMES
from sedem_lab.data.question_sets import parse_records
from sedem_lab.evaluation import cost
from sedem_lab.evaluation.cost import PRESETS, Workload, backbone_size
from sedem_lab.evaluation.meta import META, backbone_of
from sedem_lab.training import baseline
from sedem_lab.training.baseline import BaselineRecipe
from sedem_lab.training.memory import ROOM, Step, checkpoint_layers, measure_step
from sedem_lab.training.recipe import DataSource
from sedem_lab.training.selection_losses import ConditionedLosses
from sedem_lab.training.stage1 import Stage1
from sedem_lab.training.stage2 import Stage2
from sedem_lab.training.stages import Stage1Recipe, Stage2Recipe
from sedem_lab.training.targets import targets

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

    def hours(flops: float, seconds: float = 0.0) -> list[float]:
        """Fewest and most hours of a GPU, with seconds that do not depend on its FLOP/s."""
        return [(flops / (rate * 1e12) + seconds) / 3600 for rate in TFLOPS]

    def add_row(name: str, cells: int, new: int, *spent: float) -> None:
        ranges = zip(spent[::2], spent[1::2], strict=True)
        shown.add_row(name, f"{cells:,}", f"{new:,}", *(f"{a:,.1f} to {b:,.1f}" for a, b in ranges))

    for study in track([*studies], "counting", console=Console(stderr=True), transient=True):
        every = study.cells(scale)
        cells = [cell for cell in every if cell not in seen]
        seen |= set(cells)
        found: dict[Path, Planned] = {}
        for cell in cells:
            found |= trainings(cell, scale, data)
        new = {folder: run for folder, run in found.items() if folder not in runs}
        runs |= new
        trained = hours(sum(map(training_flops, new.values())))
        answered = [answers_of(cell, scale) for cell in cells]
        of_answers = hours(sum(flops for flops, _ in answered), sum(s for _, s in answered))
        row = [len(cells), len(new), *trained, *of_answers]
        totals = [total + own for total, own in zip(totals, row, strict=True)]
        if every:
            add_row(study.name, *row)
    shown.add_section()
    add_row("all", *totals)
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


def _facts(runs: dict[Path, Planned], cells: Iterable[Cell], scale: Scale) -> Iterator[str]:
    """Weights, sets and disk."""
    weights = 0
    for name in sorted({name for run in runs.values() for name in _backbones(run)}):
        size, _ = backbone_size(shape_of(name), 0, ())
        weights += BFLOAT16 * size
        yield f"weights: {name}, {size / 1e9:.2f}B, {bytes_text(BFLOAT16 * size)}; {LICENCE}"
    named = {source_of(cell, scale) for cell in cells}
    named |= {source.path for run in runs.values() for source in sources_of(run)}
    for source in sorted(named & set(SETS)):
        counts = printed_of(source, "tab:dataset_appendix_details")
        size = f"{counts['train']:,} and {counts['val']:,} questions"
        yield f"set: {HOMES[source].repository}, {size}; {SETS[source][1]}"
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


def source_of(cell: Cell, scale: Scale) -> str:
    """The public name of the set that a cell's questions come from."""
    asked = scale.sets.get(cell.questions)
    return asked.source if asked else ""


def sources_of(run: Planned) -> Sequence[DataSource]:
    """The questions that a run learns from; none if it learns from text."""
    mixture = getattr(run.recipe, "data", None)
    return mixture.training if mixture else ()


def printed_of(source: str, table: str) -> Mapping[str, Any]:
    """What a table of the paper says of a set."""
    return OURS.get(source) or paper.row(table, SETS[source][0])


def _backbones(run: Planned) -> list[str]:
    model = run.recipe.model
    own = ("backbone",) if isinstance(run.recipe, BaselineRecipe) else ("encoder", "decoder")
    return [name for part in own if (name := getattr(model, part))]


# Hours and disk


def training_flops(run: Planned) -> float:
    """The FLOPs of a run, in steps without gradient checkpointing."""
    text = getattr(run.recipe, "text", None)
    examples = examples_of_run(run.recipe, WINDOWS.get(text.path) if text else None)
    lengths = [printed_of(one.path, "tab:datasets")["avg_len_tokens"] for one in sources_of(run)]
    context, rows = round(mean(lengths)) if lengths else 0, 1
    if not lengths:
        rows = run.recipe.optimization.batch_size
    return float(examples * measure(run.recipe, Workload(context), rows).flops / rows)


def examples_of_run(recipe: AnyRecipe, of_epoch: int | None = None) -> int:
    """The examples in a run's steps; `of_epoch` is those of an epoch if the recipe is silent."""
    optimization, text = recipe.optimization, getattr(recipe, "text", None)
    if optimization.steps is not None:
        return optimization.steps * optimization.batch_size * optimization.accumulation
    count = of_epoch
    if count is None and text is not None:
        length = text.context if isinstance(text, baseline.WindowSource) else 0
        if isinstance(recipe, Stage1Recipe):
            length = recipe.model.segment_length
        # An upper bound: windows never span two texts.
        read = text.tokens and text.tokens // (length + text.continuation)
        count = min((n for n in (text.windows, read) if n is not None), default=None)
    elif count is None:
        assert not isinstance(recipe, Stage1Recipe) and recipe.data is not None
        homes = [(source, HOMES.get(source.path)) for source in recipe.data.training]
        if all(home is not None and home.records for _, home in homes):  # no file
            count = 0
            for source, home in homes:
                assert home is not None
                chosen = len(range(home.records)[parse_records(source.records)])
                count += round(home.questions * chosen / home.records) * source.repeat
    if count is None or optimization.epochs is None:
        raise ConfigError("the recipe counts epochs; say in it how many examples an epoch has")
    return math.ceil(optimization.epochs * count)


def answers_of(cell: Cell, scale: Scale) -> tuple[float, float]:
    """The FLOPs of the answers of a cell, and the seconds in which they read weights."""
    source, method = source_of(cell, scale), cell.method
    if cell.measure not in ("answers", "budgets") or source not in SETS or cell.variant is None:
        return 0.0, 0.0
    asked, tokens = scale.sets[cell.questions], answer_tokens(cell, scale)
    questions = int(printed_of(source, "tab:dataset_appendix_details")["val"])
    questions = min(questions, cell.limit or asked.limit or questions)
    context = asked.options.get("length") or printed_of(source, "tab:datasets")["avg_len_tokens"]
    k = cell.k or asked.k
    blocks = k if isinstance(k, int) else -(-context // SEGMENT)
    workload = Workload(int(context), Workload.question, tokens, blocks)
    steps = tokens * questions / (BATCH if method == "sedem" else 1)
    flops, weights = _of_answer(method, cell.variant.backbone or scale.backbones[0], workload)
    return questions * flops, steps * weights / BANDWIDTH


@lru_cache(maxsize=256)
def _of_answer(method: str, backbone: str, asked: Workload) -> tuple[float, int]:
    """The FLOPs of one answer, and the bytes of the weights that answer."""
    shape = cost.shape_file(PRESETS[backbone][2])
    weights = BFLOAT16 * backbone_size(shape, 0, ())[0]
    if method == "sedem":
        return float(cost.cost(backbone, asked)["flops"]["total"]), weights
    if method in cost.COUNTED:
        return float(cost.baseline_flops(method, backbone, workload=asked)["total"]), weights
    return cost.full_context_flops(shape, asked.context + asked.question, asked.answer), weights


def checkpoint_bytes(run: Planned) -> int:
    """Bytes of a run's checkpoints: the final one, and those that it resumes from."""
    recipe, names = run.recipe, _backbones(run)
    if isinstance(recipe, BaselineRecipe):
        preset = names[0].rpartition("/")[2].lower()
        trained = cost.baseline_parameters(recipe.method, preset, recipe.model)["total"]
    else:
        counts = cost.count_parameters(recipe.model, shape_of(names[0]), shape_of(names[-1]))
        trained = counts["total"] - (counts["lora"] if run.trained == "stage1" else 0)
    return int(FLOAT32 * trained * (1 + COPIES * recipe.run.keep))


# Memory


def longest_question(run: Planned) -> Workload:
    """The longest question of a run; none in a run on text, which has windows of one length."""
    if not (sources := sources_of(run)):
        return Workload(context=0)
    longest = (printed_of(source.path, "tab:datasets")["max_len_tokens"] for source in sources)
    return Workload(max(map(int, longest)), answer=run.recipe.data.answer_limit)


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
            "optimization.batch_size to less and optimization.accumulation to more, or "
            "optimization.batch_tokens to less in a recipe that has it"
        )
    return not refused


# One step of a recipe, without weights

AnyRecipe = Stage1Recipe | Stage2Recipe | BaselineRecipe
WORDS = 1000
"""Drawn tokens are below this; every vocabulary is larger."""
FEW = 2, 3
"""Layers that a step is measured with, where it would take long with all."""


def shape_of(name: str) -> PretrainedConfig:
    """The configuration of a recipe's backbone; those of the paper are part of the package."""
    short = name.rpartition("/")[2].lower()
    if name.startswith("meta-llama/") and short in PRESETS:
        return cost.shape_file(short)
    return cost.backbone_shape(str(embedded(name) or name))


def measure(
    recipe: AnyRecipe, question: Workload, rows: int | None = None, *, checkpointing: bool = False
) -> Step:
    """What a batch takes in a recipe's training.

    A baseline runs with few layers: they are alike, and some methods read a context in a hundred
    passes.

    Args:
        question: tokens of every question; K and windows of text are the recipe's.
        rows: examples of the batch; None means the recipe's.
    """
    rows = rows or recipe.optimization.rows(question.context + question.question + question.answer)
    if not isinstance(recipe, BaselineRecipe) or recipe.method == "rag":
        return step_of(recipe, question, rows, checkpointing)
    less, more = (step_of(recipe, question, rows, checkpointing, layers) for layers in FEW)
    others = shape_of(recipe.model.backbone).num_hidden_layers - FEW[1]
    return Step(
        more.flops + others * (more.flops - less.flops),
        more.peak_bytes + others * (more.peak_bytes - less.peak_bytes),
    )


def step_of(
    recipe: AnyRecipe, asked: Workload, rows: int, checkpointing: bool, layers: int | None = None
) -> Step:
    """What a batch takes, with some layers of a baseline's backbone, or with all."""
    stage = _stage(recipe, layers)
    checkpoint_layers(stage, checkpointing)
    if isinstance(recipe, Stage2Recipe):
        batch = _block_batch(recipe.model, recipe.data, asked, rows)
    elif isinstance(stage, baseline.RAGTraining):
        batch = _block_batch(stage.reader.config.blocks, recipe.data, asked, rows)
    elif isinstance(stage, baseline.QuestionTraining):
        prompt = 1 + asked.question
        used = stage.reader.context_tokens_used(asked.context, prompt, asked.answer)
        contexts = _tokens(rows, min(used, recipe.data.context_limit or used))
        pairs = [([0] * prompt, [0] * asked.answer)] * rows
        batch = {"contexts": list(contexts), **targets(pairs)}
    else:
        text, length = recipe.text, getattr(recipe.model, "segment_length", 0)
        length = text.context if isinstance(text, baseline.WindowSource) else length
        after = _tokens(rows, text.continuation)
        batch = {"context": _tokens(rows, length), "continuation": after}
    return measure_step(stage.train(), batch, mixed=recipe.optimization.bf16)


def _stage(recipe: AnyRecipe, layers: int | None) -> Any:
    """What a recipe trains, on backbones without weights; a baseline's may have fewer layers."""
    config, own = recipe.model, recipe.optimization
    dtype = getattr(torch, own.backbone_dtype)
    if isinstance(recipe, BaselineRecipe):
        shape = shape_of(config.backbone)
        shape.num_hidden_layers = layers or shape.num_hidden_layers
        with META:
            reader = reader_class(recipe.method)(config, backbone_of(shape, dtype))
        reader.progress = 1.0
        if recipe.text is not None:
            return baseline.TextTraining(reader)
        if reader.has_selection_budget:
            return baseline.RAGTraining(reader, recipe.losses or ConditionedLosses(), None)
        return baseline.QuestionTraining(reader)
    shapes = shape_of(config.encoder), shape_of(config.decoder or config.encoder)
    model = cost.model_of(config, *shapes, dtype=dtype)
    if isinstance(recipe, Stage1Recipe):
        stage = Stage1(model, recipe.losses, own.seed, own.logits_at_once)
        stage.progress = 1.0
        return stage
    with META:
        if config.lora_rank:
            model.decoder.add_lora(config.lora_rank, config.lora_alpha)
    return Stage2(model, recipe.losses, None, own.logits_at_once)


def _tokens(rows: int, length: int) -> Tensor:
    return torch.randint(2, WORDS, (rows, length), generator=torch.Generator().manual_seed(0))


def _block_batch(config: SedemConfig, data: Any, asked: Workload, rows: int) -> dict[str, Any]:
    width = config.slots_per_block * config.compression
    most = getattr(data, "max_blocks", None) or data.max_paragraphs
    blocks = resolve_budget(most, -(-asked.context // width))
    budgets = [resolve_budget(k, blocks) for k in getattr(data, "budgets", (config.k,))]
    segments, per = rows * -(-blocks * width // config.segment_length), config.slots_per_block
    labels = torch.zeros(rows, blocks, dtype=torch.bool)
    labels[:, 0] = True
    question = _tokens(rows, asked.question)
    conditions = getattr(data, "conditions", {"memory": 1.0})
    return {
        "segment_ids": _tokens(segments, config.segment_length),
        "segment_mask": torch.ones(segments, config.segment_length, dtype=torch.bool),
        "slot_index": torch.arange(rows * blocks * per).view(rows, blocks, per),
        "slot_tokens": torch.full((rows, blocks, per), config.compression),
        "blocks": torch.ones_like(labels),
        "evidence": labels,
        "question_ids": question,
        "question_mask": torch.ones_like(question).bool(),
        "coins": torch.ones(rows),
        "budget": max(budgets),
        "condition": max(conditions, key=["memory", "both", "text"].index),
        "texts": [["x" * width] * blocks] * rows,
        **targets([([0] * (1 + asked.question), [0] * asked.answer)] * rows),
    }
