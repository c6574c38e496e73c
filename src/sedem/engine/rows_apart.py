"""Rows that each run alone, for engines and memories that cannot share a running batch.

Letters: B rows, J rows that join, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch
from torch import Tensor

from sedem.engine.interface import Start, Step

Starter = Callable[[Sequence[Start], int], AbstractContextManager[tuple[Tensor, Step]]]
"""`Engine.start`."""


class RowsApart:
    """Rows that are separate batches; see `interface.Rows`.

    Args:
        start: starts a batch.
        count: B, the maximum number of rows.
        turn: held while rows join and while all of them run one token, so that a thread that reads
            documents delays a token of all rows once, not once for each row.

    Attributes:
        steps: the step of each row in use.
    """

    def __init__(
        self, start: Starter, count: int, turn: AbstractContextManager[None] | None = None
    ) -> None:
        self.start, self.count = start, count
        self.turn = turn or nullcontext()
        self.steps: dict[int, Step] = {}
        self._open: dict[int, ExitStack] = {}

    def join(self, rows: Sequence[int], starts: Sequence[Start], limits: Sequence[int]) -> Tensor:
        """Prefill some rows, one after the other; return logits after the prefixes `[J, V]`."""
        logits: list[Tensor] = []
        with self.turn, ExitStack() as joining:
            for row, start, limit in zip(rows, starts, limits, strict=True):
                with ExitStack() as opening:
                    opened = self.start([start], limit + 1)
                    logits_BV, self.steps[row] = opening.enter_context(opened)
                    self._open[row] = opening.pop_all()
                joining.callback(self.leave, row)
                logits.append(logits_BV[0])
            joining.pop_all()
        return torch.stack(logits)

    def leave(self, row: int) -> None:
        """Release a row."""
        del self.steps[row]
        self._open.pop(row).close()

    def step(self, ids_B: Tensor) -> Tensor:
        """Run one token of every row, one row after the other; return logits `[B, V]`."""
        logits = self.step_each(ids_B)
        undefined = next(iter(logits.values()))
        return torch.stack([logits.get(row, undefined) for row in range(self.count)])

    @torch.no_grad()
    def step_each(self, ids_B: Tensor) -> dict[int, Tensor]:
        """Do the same; return logits `[V]` by row."""
        with self.turn:
            return {row: step(ids_B[row : row + 1], [0])[0] for row, step in self.steps.items()}

    def close(self) -> None:
        """Release all rows."""
        for row in list(self.steps):
            self.leave(row)
