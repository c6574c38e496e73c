"""Running a recipe: open what it names, train, resume, leave a checkpoint and its provenance."""

from __future__ import annotations

import json
import logging
import time
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from sys import stderr
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset
from transformers import TrainingArguments, set_seed

from sedem.checkpoint import open_backbones
from sedem.config import SedemConfig
from sedem.data.catalog import open_examples
from sedem.data.text import Tokens, Windows
from sedem.errors import ConfigError
from sedem.model import SeDeM
from sedem.provenance import provenance
from sedem.training.prepare import Collator, Prepared
from sedem.training.recipe import DataSource, Optimization, Run, TextSource, as_yaml
from sedem.training.stage1 import Stage1, Stage1Losses
from sedem.training.stage2 import Stage2, Stage2Losses
from sedem.training.trainer import SedemTrainer, last_whole_checkpoint

logger = logging.getLogger(__name__)

RECIPE_FILE = "recipe.yaml"
SUMMARY_FILE = "training.json"
FINAL = "final"


@dataclass(frozen=True)
class Stage1Recipe:
    """Everything about a stage-1 run.

    Attributes:
        model: shape of the model.
        text: what it reads.
        optimization: how it learns.
        run: where it is kept.
        losses: weights.
        data_root: folder that data paths are relative to.
        cache: folder for tokenized text.
        start_from: checkpoint to go on from; None means fresh parts.
    """

    model: SedemConfig
    text: TextSource
    optimization: Optimization
    run: Run
    losses: Stage1Losses = field(default_factory=Stage1Losses)
    data_root: str = "data"
    cache: str = "runs/cache"
    start_from: str | None = None


def train_stage1(recipe: Stage1Recipe) -> Path:
    """Run a stage-1 recipe to its end, from its last whole checkpoint if there is one.

    Returns:
        Folder of the final checkpoint.

    Raises:
        ConfigError: the output folder holds a run with other settings.
    """
    output = claim_output(recipe.run, recipe)
    set_seed(recipe.optimization.seed)
    model = open_model(recipe.model, recipe.optimization, recipe.start_from)
    source = recipe.text
    corpus = Tokens.of(
        Path(recipe.data_root) / source.path,
        model.encoder,
        Path(recipe.cache),
        source.exclude_titles,
    )
    length, seed = recipe.model.segment_length, recipe.optimization.seed
    seen = range(len(corpus) - source.held_out)
    windows: Dataset[Any] = Windows(corpus, length, source.continuation, seed, seen)
    if source.windows is not None:
        windows = Subset(windows, range(min(source.windows, len(windows))))  # type: ignore[arg-type]
    held_out = None
    if source.held_out:
        kept = range(len(corpus) - source.held_out, len(corpus))
        all_held = Windows(corpus, length, source.continuation, 0, kept)
        held_out = Subset(all_held, range(min(source.evaluation_windows, len(all_held))))
    stage = Stage1(model, recipe.losses, recipe.optimization.seed)
    if recipe.start_from is None:
        sample = [windows[index] for index in range(min(64, len(windows)))]  # type: ignore[arg-type]
        stage.calibrate({n: t.to(model.device) for n, t in stage.collate(sample).items()})
    return fit(stage, model, recipe.optimization, recipe.run, output, windows, held_out, recipe)


@dataclass(frozen=True)
class Stage2Data:
    """Questions that stage 2 learns from.

    Attributes:
        training: the mixture.
        evaluation: examples whose losses are followed; never those of a reported evaluation.
        max_blocks: blocks of one example in a training step.
        budgets: K of a batch is drawn from these.
        answer_limit: examples with longer answers are left out, counted.
        cache_states: keep frozen states on disk; needed for speed on a CPU, too big for large sets.
    """

    training: tuple[DataSource, ...]
    evaluation: tuple[DataSource, ...] = ()
    max_blocks: int = 16
    budgets: tuple[int, ...] = (2,)
    answer_limit: int = 64
    cache_states: bool = False


@dataclass(frozen=True)
class Stage2Recipe:
    """Everything about a stage-2 run.

    Attributes:
        model: shape of the model.
        start_from: the stage-1 checkpoint; None means fresh parts.
        data: what it learns from.
        optimization: how it learns.
        run: where it is kept.
        losses: weights and conditioning.
        data_root: folder that data paths are relative to.
        cache: folder for frozen states.
    """

    model: SedemConfig
    data: Stage2Data
    optimization: Optimization
    run: Run
    start_from: str | None = None
    losses: Stage2Losses = field(default_factory=Stage2Losses)
    data_root: str = "data"
    cache: str = "runs/cache"


def train_stage2(recipe: Stage2Recipe) -> Path:
    """Run a stage-2 recipe to its end, from its last whole checkpoint if there is one.

    Returns:
        Folder of the final checkpoint.

    Raises:
        ConfigError: the output folder holds a run with other settings.
    """
    output = claim_output(recipe.run, recipe)
    set_seed(recipe.optimization.seed)
    model = open_model(recipe.model, recipe.optimization, recipe.start_from)
    if recipe.model.lora_rank and not model.decoder.has_lora:
        model.decoder.add_lora(recipe.model.lora_rank, recipe.model.lora_alpha)
    prepared = Prepared(model, recipe.data.answer_limit)
    for source in recipe.data.training:
        add_source(prepared, source, Path(recipe.data_root))
    training = Subset(prepared, range(len(prepared)))
    for source in recipe.data.evaluation:
        add_source(prepared, source, Path(recipe.data_root))
    followed = range(len(training), len(prepared))
    collator = Collator(
        prepared,
        max_blocks=recipe.data.max_blocks,
        budgets=recipe.data.budgets,
        seed=recipe.optimization.seed,
        cache=Path(recipe.cache) if recipe.data.cache_states else None,
    )
    stage = Stage2(model, recipe.losses, collator)
    evaluation = Subset(prepared, followed) if followed else None
    return fit(stage, model, recipe.optimization, recipe.run, output, training, evaluation, recipe)


def add_source(prepared: Prepared, source: DataSource, data_root: Path) -> None:
    """Read a source of a mixture and say what it gave."""
    examples = open_examples(
        data_root / source.path, source.set, records=source.records, **source.options
    )
    before = len(prepared)
    prepared.add(examples, source.label, source.repeat)
    logger.info(
        "%s: %d examples (%d in an epoch); left out: %s",
        examples.name,
        len(examples.examples),
        len(prepared) - before,
        dict(examples.dropped + prepared.dropped) or "none",
    )


def open_model(config: SedemConfig, optimization: Optimization, start_from: str | None) -> SeDeM:
    """A model to train: fresh parts on the recipe's backbones, or a checkpoint's.

    Raises:
        ConfigError: the checkpoint has another shape than the recipe.
    """
    dtype = getattr(torch, optimization.backbone_dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if start_from is None:
        encoder, decoder = open_backbones(config, dtype=dtype, device=device)
        model = SeDeM(config, encoder, decoder)
        model.parts().to(device)
        return model
    model = SeDeM.from_pretrained(start_from, dtype=dtype, device=device)
    free = {"encoder", "decoder", "lora_rank", "lora_alpha", "k", "block_order"}
    for name, value in asdict(config).items():
        if name not in free and value != asdict(model.config)[name]:
            raise ConfigError(
                f"model.{name} is {value} in the recipe, checkpoint '{start_from}' has "
                f"{asdict(model.config)[name]}"
            )
    model.config = config
    return model


def claim_output(run: Run, recipe: Any) -> Path:
    """The output folder, with the recipe in it.

    Raises:
        ConfigError: it holds a run with other settings.
    """
    output = Path(run.output)
    text = as_yaml(recipe)
    kept = output / RECIPE_FILE
    if kept.is_file() and kept.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"'{output}' holds a run with other settings (compare '{kept}'); "
            "set run.output to another folder, or remove this one"
        )
    output.mkdir(parents=True, exist_ok=True)
    kept.write_text(text, encoding="utf-8")
    return output


def fit(
    stage: nn.Module,
    model: SeDeM,
    optimization: Optimization,
    run: Run,
    output: Path,
    training: Dataset[Any],
    evaluation: Dataset[Any] | None,
    recipe: Any,
) -> Path:
    """Train, evaluate, and write the final checkpoint and training.json."""
    trainer = SedemTrainer(
        stage,
        optimization.learning_rates,
        _arguments(optimization, run, output, evaluation is not None),
        train_dataset=training,
        eval_dataset=evaluation,
    )
    checkpoint = last_whole_checkpoint(output)
    started = time.time()
    # The trainer prints its log lines to stdout, which belongs to results.
    with redirect_stdout(stderr):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        metrics = trainer.evaluate() if evaluation is not None else {}
    final = output / FINAL
    model.save_pretrained(final)
    summary = {
        "recipe": asdict(recipe),
        "steps": trainer.state.global_step,
        "examples_seen": trainer.state.global_step
        * optimization.batch_size
        * optimization.accumulation,
        "trained_parameters": {
            name: sum(p.numel() for p in parameters)
            for name, parameters in stage.parameter_groups().items()  # type: ignore[operator]
        },
        "seconds": round(time.time() - started, 1),
        "resumed_from": checkpoint.name if checkpoint else None,
        "evaluation": metrics,
        "log": trainer.state.log_history,
        **provenance(),
    }
    (output / SUMMARY_FILE).write_text(json.dumps(summary, indent=1, default=str) + "\n")
    return final


def _arguments(
    optimization: Optimization, run: Run, output: Path, evaluates: bool
) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(output),
        max_steps=optimization.steps or -1,
        num_train_epochs=optimization.epochs or 1.0,
        per_device_train_batch_size=optimization.batch_size,
        per_device_eval_batch_size=optimization.batch_size,
        gradient_accumulation_steps=optimization.accumulation,
        learning_rate=max(optimization.learning_rates.values()),
        lr_scheduler_type=optimization.schedule,
        warmup_steps=optimization.warmup,
        weight_decay=optimization.weight_decay,
        max_grad_norm=optimization.max_grad_norm,
        bf16=optimization.bf16,
        use_cpu=not torch.cuda.is_available(),
        seed=optimization.seed,
        data_seed=optimization.seed,
        logging_steps=run.log_every,
        logging_first_step=True,
        save_steps=run.save_every,
        save_total_limit=run.keep,
        eval_strategy="steps" if evaluates and run.eval_every else "no",
        eval_steps=run.eval_every or None,
        dataloader_num_workers=run.workers,
        remove_unused_columns=False,
        report_to=["tensorboard"],
        label_names=[],
    )
