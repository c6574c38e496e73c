"""Training in one output folder: checkpoints, logs, the final model and its provenance."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import TensorBoardCallback

from sedem.checkpoint.model_card import SUMMARY_FILE
from sedem.durable_files import write_text
from sedem.provenance import provenance
from sedem.training.checkpoints import last_complete_checkpoint
from sedem.training.memory import set_checkpointing
from sedem.training.recipe import Recipe
from sedem.training.run_setup import FINAL, processes, share_of_batches
from sedem.training.trainer import SedemTrainer, Trainable

logger = logging.getLogger(__name__)


class NamedBar(ProgressCallback):
    """Shows the run's name, and the last loss unless log lines report it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Open the bar."""
        super().on_train_begin(args, state, control)
        if self.training_bar is not None:
            self.training_bar.set_description(self.name)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **options: Any
    ) -> None:
        """Advance the bar of an evaluation."""
        super().on_prediction_step(args, state, control, **options)
        if self.prediction_bar is not None:
            self.prediction_bar.set_description(f"{self.name}, evaluating", refresh=False)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Write a log line, or show the loss next to the bar if log lines are turned off."""
        if logger.isEnabledFor(logging.INFO):
            super().on_log(args, state, control, logs)
        elif self.training_bar is not None and logs and "loss" in logs:
            self.training_bar.set_postfix(loss=f"{logs['loss']:.3f}", refresh=False)


class Savable(Protocol):
    """A model that can be written as a checkpoint."""

    def save_pretrained(self, folder: Path) -> None:
        """Write the model to a folder."""
        ...


class _Steps(TrainerCallback):
    """Reports to a caller how many steps are finished."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self.progress = progress

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.progress(state.global_step)


def fit(
    stage: nn.Module,
    model: Savable,
    recipe: Recipe,
    output: Path,
    training: Dataset[Any],
    evaluation: Dataset[Any] | None,
    *,
    data_summary: Mapping[str, Any] | None = None,
    best: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Train, evaluate, and write the final checkpoint and training.json.

    Args:
        stage: a `Trainable`.
        model: the model that the final checkpoint is written from.
        output: output folder, claimed by `start_run`.
        data_summary: facts about the data for training.json, such as how much was left out.
        best: if losses are evaluated during training (`run.eval_every`), write the weights with the
            lowest evaluated loss; otherwise the last ones.
        progress: called with the number of finished steps, instead of the trainer's own bar and
            log lines; None keeps those.

    Returns:
        Folder of the final checkpoint.
    """
    set_checkpointing(stage, recipe.optimization, training)
    # By default, it writes to the working directory when a finished run is only evaluated.
    tensorboard = TensorBoardCallback()
    tensorboard.logging_dir = str(output / "tensorboard")
    trainer = SedemTrainer(
        stage,
        recipe.optimization.learning_rates,
        _arguments(recipe, output, evaluation is not None, best),
        recipe.run.keep,
        train_dataset=training,
        eval_dataset=evaluation,
        callbacks=[tensorboard],
    )
    for own_bar in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(own_bar)
    trainer.add_callback(NamedBar(output.name) if progress is None else _Steps(progress))
    own = processes()
    # The first process removes or renames damaged checkpoints before the others look for one.
    with own.main_process_first():
        checkpoint = last_complete_checkpoint(output)
    started = time.time()
    # The trainer prints its log lines to stdout, which is reserved for results.
    with redirect_stdout(sys.stderr):
        trainer.run(checkpoint)
        metrics = trainer.evaluate_and_keep_best() if evaluation is not None else {}
    final = output / FINAL
    if own.is_main_process:
        model.save_pretrained(final)
        summary = {
            "recipe": recipe.to_dict(),
            "steps": trainer.state.global_step,
            "final_step": metrics.get("step", trainer.state.global_step),
            "processes": trainer.args.world_size,
            "examples_seen": trainer.examples_seen(),
            "tokens_seen": trainer.state.num_input_tokens_seen,
            "data": dict(data_summary or {}),
            "trained_parameters": {
                name: sum(p.numel() for p in parameters)
                for name, parameters in cast(Trainable, stage).parameter_groups().items()
                if parameters
            },
            "seconds": round(time.time() - started, 1),
            "resumed_from": checkpoint.name if checkpoint else None,
            "evaluation": metrics,
            "log": trainer.state.log_history,
            **provenance(),
        }
        write_text(output / SUMMARY_FILE, json.dumps(summary, indent=1, default=str) + "\n")
    own.wait_for_everyone()
    return final


def _arguments(recipe: Recipe, output: Path, evaluates: bool, best: bool) -> TrainingArguments:
    optimization, run = recipe.optimization, recipe.run
    evaluates_during_training = evaluates and run.eval_every > 0
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=optimization.steps or -1,
        num_train_epochs=optimization.epochs or 1.0,
        per_device_train_batch_size=optimization.batch_size,
        per_device_eval_batch_size=optimization.batch_size,
        gradient_accumulation_steps=share_of_batches(optimization, processes().num_processes),
        learning_rate=max(optimization.learning_rates.values()),
        lr_scheduler_type=optimization.schedule,
        # A value below 1 means a share of all steps.
        warmup_steps=optimization.warmup_ratio or optimization.warmup,
        weight_decay=optimization.weight_decay,
        max_grad_norm=optimization.max_grad_norm,
        bf16=optimization.bf16,
        use_cpu=not torch.cuda.is_available(),
        seed=optimization.seed,
        data_seed=optimization.seed,
        logging_steps=run.log_every,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # it reads the loss of every batch, and hides what is wrong
        save_steps=run.save_every,
        eval_strategy="steps" if evaluates_during_training else "no",
        eval_steps=run.eval_every or None,
        metric_for_best_model="loss" if evaluates_during_training and best else None,
        dataloader_num_workers=run.workers,
        remove_unused_columns=False,
        report_to=[],
        label_names=[],
    )
    use_one_gpu(arguments)
    return arguments


def use_one_gpu(arguments: TrainingArguments) -> None:
    """Keep a process to its own GPU; transformers would split each batch over all visible GPUs."""
    count = arguments.n_gpu
    if count > 1:
        logger.warning(
            "%d GPUs are visible and one is used; to use all, start the command with "
            "'torchrun --nproc-per-node %d --no-python'",
            count,
            count,
        )
        arguments._n_gpu = 1
