"""One training kept in one folder: checkpoints, logs, the final model and its provenance."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import TrainingArguments, set_seed
from transformers.integrations import TensorBoardCallback

from sedem.errors import ConfigError
from sedem.provenance import provenance
from sedem.training.recipe import Optimization, Recipe, RunSettings, as_yaml, read_entries
from sedem.training.trainer import SedemTrainer, checkpoints, last_whole_checkpoint

RECIPE_FILE = "recipe.yaml"
SUMMARY_FILE = "training.json"
FINAL = "final"


class Saved(Protocol):
    """A model that can be written as a checkpoint."""

    def save_pretrained(self, folder: Path) -> None:
        """Write it."""
        ...


def begin(recipe: Recipe) -> Path:
    """Start a run: claim its output folder, write the recipe there, and seed random numbers.

    A run that left no checkpoint, such as one whose data could not be found, does not claim its
    folder.

    Returns:
        The output folder.

    Raises:
        ConfigError: it holds a run with other settings.
    """
    output = Path(recipe.run.output)
    kept = output / RECIPE_FILE
    begun = (output / FINAL).is_dir() or bool(checkpoints(output))
    if begun and kept.is_file() and read_entries(kept) != recipe.to_dict():
        raise ConfigError(
            f"'{output}' holds a run with other settings (compare '{kept}'); "
            "set run.output to another folder, or remove this one"
        )
    output.mkdir(parents=True, exist_ok=True)
    kept.write_text(as_yaml(recipe), encoding="utf-8")
    set_seed(recipe.optimization.seed)
    return output


def placement(optimization: Optimization) -> dict[str, Any]:
    """The `dtype` and `device` that a run opens its backbones with."""
    return {
        "dtype": getattr(torch, optimization.backbone_dtype),
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }


def check_start(given: Any, kept: Any, free: AbstractSet[str], checkpoint: str) -> None:
    """Check that a checkpoint has the settings of the recipe that starts from it.

    Args:
        given: `model` of the recipe.
        kept: the same of the checkpoint.
        free: settings that may differ.
        checkpoint: its folder, for the message.

    Raises:
        ConfigError: a setting differs that may not.
    """
    for name, value in vars(given).items():
        if name not in free and value != getattr(kept, name):
            raise ConfigError(
                f"model.{name} is {value} in the recipe, checkpoint '{checkpoint}' has "
                f"{getattr(kept, name)}"
            )


def fit(
    stage: nn.Module,
    model: Saved,
    recipe: Recipe,
    output: Path,
    training: Dataset[Any],
    evaluation: Dataset[Any] | None,
    *,
    noted: Mapping[str, Any] | None = None,
    best: bool = False,
) -> Path:
    """Train, evaluate, and write the final checkpoint and training.json.

    Args:
        stage: a `Trainable`.
        model: what the final checkpoint is of.
        recipe: everything that was set.
        output: folder of the run, claimed.
        training: what it learns from.
        evaluation: whose losses are followed.
        noted: what is to be known of the data, for training.json.
        best: where losses are evaluated on the way (`run.eval_every`), the final checkpoint has the
            evaluated weights of the lowest one; otherwise it has the last.

    Returns:
        Folder of the final checkpoint.
    """
    optimization, run = recipe.optimization, recipe.run
    trainer = SedemTrainer(
        stage,
        optimization.learning_rates,
        _arguments(optimization, run, output, evaluation is not None, best),
        run.keep,
        train_dataset=training,
        eval_dataset=evaluation,
        callbacks=[_tensorboard(output)],
    )
    checkpoint = last_whole_checkpoint(output)
    started = time.time()
    # The trainer prints its log lines to stdout, which belongs to results.
    with redirect_stdout(sys.stderr):
        trainer.run(checkpoint)
        metrics = trainer.settle() if evaluation is not None else {}
    final = output / FINAL
    model.save_pretrained(final)
    summary = {
        "recipe": recipe.to_dict(),
        "steps": trainer.state.global_step,
        "final_step": metrics.get("step", trainer.state.global_step),
        "examples_seen": trainer.state.global_step
        * optimization.batch_size
        * optimization.accumulation,
        "tokens_seen": trainer.state.num_input_tokens_seen,
        "data": dict(noted or {}),
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


def _tensorboard(output: Path) -> TensorBoardCallback:
    # Left to itself it writes to the working directory when a finished run is only evaluated.
    callback = TensorBoardCallback()
    callback.logging_dir = str(output / "tensorboard")
    return callback


def _arguments(
    optimization: Optimization, run: RunSettings, output: Path, evaluates: bool, best: bool
) -> TrainingArguments:
    on_the_way = evaluates and run.eval_every > 0
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
        eval_strategy="steps" if on_the_way else "no",
        eval_steps=run.eval_every or None,
        metric_for_best_model="loss" if on_the_way and best else None,
        dataloader_num_workers=run.workers,
        remove_unused_columns=False,
        report_to=[],
        label_names=[],
    )
