"""Attention masks: the columns that a range of layers sees, their positions and their padding.

Letters: B batch, P positions of one call, K keys seen so far.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeyAxis:
    """The columns in the cache of a range of layers.

    Columns may be in any order: only positions decide what sees what.

    Attributes:
        positions: position of each column `[B, K]`.
        valid: False where a column is padding `[B, K]`.
        padded: whether any column is padding that causal order does not hide; it hides padding at
            the end. Kept on the host, so that no step waits for a device.
        span: number of positions from the first to the last one, also kept on the host. It exceeds
            the number of columns if the stream has positions that these layers do not see.
        block: number of the block that each column belongs to, -1 for text `[B, K]`. Positions of a
            block see only text and their own block. None if every position sees all earlier ones.
        bias: added to the logits of text on each column `[B, K]`, 0 where there is no bias; None
            adds nothing.
    """

    positions: Tensor
    valid: Tensor
    padded: bool
    span: int
    block: Tensor | None = None
    bias: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether causal order alone decides what sees what."""
        return not self.padded and self.block is None and self.bias is None

    def extended(self, positions_BP: Tensor, valid_BP: Tensor) -> KeyAxis:
        """Return the axis with new columns of text at its end."""
        block, bias = self.block, self.bias
        if block is not None:
            block = torch.cat([block, block.new_full(positions_BP.shape, -1)], dim=1)
        if bias is not None:
            bias = torch.cat([bias, bias.new_zeros(positions_BP.shape)], dim=1)
        return replace(
            self,
            positions=torch.cat([self.positions, positions_BP], dim=1),
            valid=torch.cat([self.valid, valid_BP], dim=1),
            span=self.span + positions_BP.shape[1],
            block=block,
            bias=bias,
        )

    def visible_to(
        self,
        positions_BP: Tensor,
        valid_BP: Tensor,
        window: int | None = None,
        block_BP: Tensor | None = None,
    ) -> Tensor:
        """Which columns each position may attend to `[B, P, K]`.

        A padding position sees every valid column: its output is never read, and a row without
        anything to attend to would be NaN.

        Args:
            valid_BP: False where such a position is padding.
            window: number of positions that a layer attends to; None for all earlier ones.
            block_BP: block of each of these positions, -1 for text; None if all are text.
        """
        back_BPK = positions_BP[:, :, None] - self.positions[:, None, :]
        seen_BPK = back_BPK >= 0
        if window is not None:
            seen_BPK &= back_BPK < window
        if self.block is not None and block_BP is not None:
            own_BPK = block_BP[:, :, None] == self.block[:, None, :]
            seen_BPK &= own_BPK | (block_BP < 0)[:, :, None] | (self.block < 0)[:, None, :]
        return self.valid[:, None, :] & (seen_BPK | ~valid_BP[:, :, None])

    def added_to(
        self,
        visible_BPK: Tensor,
        dtype: torch.dtype,
        hidden: float = -torch.inf,
        block_BP: Tensor | None = None,
    ) -> Tensor:
        """Return what attention adds to its logits `[B, P, K]`.

        Args:
            hidden: value where a column is not visible.
            block_BP: as for `visible_to`.
        """
        if self.bias is None:
            added_BPK = torch.zeros(visible_BPK.shape, dtype=dtype, device=visible_BPK.device)
        else:
            added_BPK = self.bias[:, None, :].to(dtype)
            if block_BP is not None:
                added_BPK = added_BPK * (block_BP < 0)[:, :, None]
            added_BPK = added_BPK.expand(visible_BPK.shape)
        return added_BPK.masked_fill(~visible_BPK, hidden)
