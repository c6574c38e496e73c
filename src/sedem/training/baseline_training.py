"""Adapters from baselines to the trainer: their losses on windows of text and on questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from sedem.baselines.trained import TrainedReader
from sedem.data.windows import collate_windows
from sedem.training.question_dataset import QuestionItem, collate_questions


class BaselineTraining(nn.Module):
    """Adapter from a baseline to the trainer; only its parameter groups are trained.

    Args:
        reader: the baseline to train.
    """

    def __init__(self, reader: TrainedReader) -> None:
        super().__init__()
        self.reader = reader
        self.epoch = 0
        reader.requires_grad_(False)
        for parameters in reader.parameter_groups().values():
            for parameter in parameters:
                parameter.requires_grad_(True)

    @property
    def progress(self) -> float:
        """Share of the training that is done; the reader's losses may depend on it."""
        return self.reader.progress

    @progress.setter
    def progress(self, value: float) -> None:
        """Set by the trainer before every step."""
        self.reader.progress = value

    def train(self, mode: bool = True) -> Self:
        """Set training mode; the reader decides which of its parts follow."""
        super().train(mode)
        return self

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters by the name of their learning rate."""
        return self.reader.parameter_groups()


class TextTraining(BaselineTraining):
    """Training on windows of text."""

    def collate(self, windows: list[dict[str, NDArray[np.int64]]]) -> dict[str, Tensor]:
        """Collate windows into a batch."""
        return collate_windows(windows)

    def tokens(self, batch: Mapping[str, Tensor]) -> int:
        """Number of tokens of contexts and continuations, which is the training budget.

        All tokens count, even if the method's loss does not use them all, so that the budgets of
        methods are comparable.
        """
        return batch["context"].numel() + batch["continuation"].numel()

    def forward(self, context: Tensor, continuation: Tensor) -> dict[str, Tensor]:
        """The method's losses on text."""
        return self.reader.text_loss(context, continuation)


class QuestionTraining(BaselineTraining):
    """Training on questions."""

    def collate(self, items: list[QuestionItem]) -> dict[str, Any]:
        """Collate examples into a batch."""
        return collate_questions(items)

    def tokens(self, batch: Mapping[str, Any]) -> int:
        """Number of tokens of contexts, prompts and answers."""
        return sum(map(len, batch["contexts"])) + int(batch["valid"].sum())

    def forward(
        self, contexts: Sequence[Tensor], ids: Tensor, valid: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """The method's losses on questions."""
        return self.reader.question_loss(contexts, ids, valid, labels)
