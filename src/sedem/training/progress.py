"""The progress bar of a training run, with the run's name."""

from __future__ import annotations

import logging
from typing import Any

from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)


class NamedBar(ProgressCallback):
    """Shows the run's name, and the last loss unless log lines report it.

    Args:
        name: name of the run.
    """

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
