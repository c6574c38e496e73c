"""Attention masks: the columns that a range of layers sees, their positions and their padding.

Letters: B batch, P positions of one call, K keys seen so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeyAxis:
    """The columns in the cache of a range of layers.

    Columns may stand in any order: positions alone decide who sees whom.

    Attributes:
        positions: position of each column `[B, K]`.
        valid: False where a column is padding `[B, K]`.
        padded: whether any column is padding. Kept on the host, so that no step waits for a device.
        span: number of positions from the first to the last one, on the host too. Larger than the
            number of columns where the stream has positions that these layers do not see.
    """

    positions: Tensor
    valid: Tensor
    padded: bool
    span: int

    def extended(self, positions_BP: Tensor, valid_BP: Tensor) -> KeyAxis:
        """Return the axis with new columns at its end."""
        return KeyAxis(
            torch.cat([self.positions, positions_BP], dim=1),
            torch.cat([self.valid, valid_BP], dim=1),
            self.padded,
            self.span + positions_BP.shape[1],
        )

    def visible_to(
        self, positions_BP: Tensor, valid_BP: Tensor, window: int | None = None
    ) -> Tensor:
        """Which columns each position may attend to `[B, P, K]`.

        A padding position sees every valid column: its output is never read, and a row without
        anything to attend to would be NaN.

        Args:
            positions_BP: positions that attend.
            valid_BP: False where such a position is padding.
            window: how many positions a layer attends to; None for all before it.
        """
        back_BPK = positions_BP[:, :, None] - self.positions[:, None, :]
        seen_BPK = back_BPK >= 0
        if window is not None:
            seen_BPK &= back_BPK < window
        return self.valid[:, None, :] & (seen_BPK | ~valid_BP[:, :, None])
