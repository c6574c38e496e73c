"""Who may attend to whom: the columns of a range of layers, their positions and their masks.

Letters: B batch, P positions of one call, K keys seen so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeyAxis:
    """What the cache of a range of layers holds, column by column.

    Columns need not stand in reading order: who sees whom is decided by position alone.

    Attributes:
        positions: position of each column `[B, K]`.
        valid: False where a column is padding `[B, K]`.
        padded: whether any column is padding; kept on the host so that no step waits for a device.
        span: positions from the first column's to the last's, on the host too; more than there are
            columns where the stream has positions that these layers do not see.
    """

    positions: Tensor
    valid: Tensor
    padded: bool
    span: int

    def extended(self, positions_BP: Tensor, valid_BP: Tensor) -> KeyAxis:
        """The axis with new columns at its end."""
        return KeyAxis(
            torch.cat([self.positions, positions_BP], dim=1),
            torch.cat([self.valid, valid_BP], dim=1),
            self.padded,
            self.span + positions_BP.shape[1],
        )

    def visible_to(
        self, positions_BP: Tensor, valid_BP: Tensor, window: int | None = None
    ) -> Tensor:
        """Which columns each position may attend to, `[B, P, K]`.

        A padding position sees every valid column: its output is never read, and a row with
        nothing to attend to would be NaN.
        """
        back_BPK = positions_BP[:, :, None] - self.positions[:, None, :]
        seen_BPK = back_BPK >= 0
        if window is not None:
            seen_BPK &= back_BPK < window
        return self.valid[:, None, :] & (seen_BPK | ~valid_BP[:, :, None])
