"""What attention sees: the columns of a range of layers, their positions and their padding.

Letters: B batch, P positions of one call, K keys seen so far, G key heads, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


class KeyValues(Protocol):
    """Where a range of layers puts its keys and values, as in Hugging Face's caches."""

    def update(self, key: Tensor, value: Tensor, layer: int, /) -> tuple[Tensor, Tensor]:
        """Take a layer's new keys and values `[B, G, P, H]`; return those to attend to."""
        ...


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
            block see only text and their own block. Below -1 are branches: alternative texts, each
            hidden from the others. None if every position sees all earlier ones.
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

    def extended(
        self, positions_BP: Tensor, valid_BP: Tensor, branch_BP: Tensor | None = None
    ) -> KeyAxis:
        """Return the axis with new columns of text at its end.

        Args:
            branch_BP: the branch of each column, below -1; None if there is only one text.
        """
        block, bias = self.block, self.bias
        if block is None and branch_BP is not None:
            block = torch.full_like(self.positions, -1)
        if block is not None:
            new_BP = torch.full_like(positions_BP, -1) if branch_BP is None else branch_BP
            block = torch.cat([block, new_BP], dim=1)
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

    def row(self, index: int) -> KeyAxis:
        """Return the columns of one row."""
        own = slice(index, index + 1)
        return replace(
            self,
            positions=self.positions[own],
            valid=self.valid[own],
            block=None if self.block is None else self.block[own],
            bias=None if self.bias is None else self.bias[own],
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
        # Compared, not subtracted: differences of a long context would take eight times as much.
        seen_BPK = positions_BP[:, :, None] >= self.positions[:, None, :]
        if window is not None:
            seen_BPK &= (positions_BP - window)[:, :, None] < self.positions[:, None, :]
        if self.block is not None and block_BP is not None:
            own_BPK = block_BP[:, :, None] == self.block[:, None, :]
            of_text_B1K, of_memory_B1K = (self.block == -1)[:, None], (self.block >= 0)[:, None]
            is_text_BP1 = (block_BP < 0)[:, :, None]
            seen_BPK &= own_BPK | of_text_B1K | (is_text_BP1 & of_memory_B1K)
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
