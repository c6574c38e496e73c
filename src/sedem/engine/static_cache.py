"""A key-value cache of fixed size for a range of layers, written column by column.

Letters: B batch, P positions of one call, K columns, L layers, H head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sedem.backbone.masks import KeyAxis


class StaticCache:
    """Keys and values of the layers below the injection layer, or of those above it.

    Rows have their own lengths: the index of each row's next column is kept on the device, where a
    captured step reads it. The caller tracks on the host whether a column is left.

    Args:
        layers: number of layers.
        rows: B.
        columns: K.
        heads: number of key heads.
        width: H.
        dtype: type of keys and values.
        device: where the tensors are.
        memory: number of columns before those of text, for keys and values that are copied in.

    Attributes:
        bias: added to the logits of later queries on each column `[B, K]`.
        next_column: index of the next column of each row `[B]`.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        columns: int,
        heads: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        memory: int = 0,
    ) -> None:
        # Zeros, because NaN in a masked column would still spoil the weighted sum of values.
        shape = (layers, rows, heads, columns, width)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.positions = torch.zeros(rows, columns, dtype=torch.long, device=device)
        self.valid = torch.zeros(rows, columns, dtype=torch.bool, device=device)
        self.bias = torch.zeros(rows, columns, device=device)
        self.next_column = torch.zeros(rows, dtype=torch.long, device=device)
        self.memory = memory

    @property
    def state(self) -> list[Tensor]:
        """The tensors that a step both reads and changes."""
        return [self.positions, self.valid, self.next_column]

    @property
    def buffers(self) -> list[Tensor]:
        """All tensors."""
        return [self.keys, self.values, self.bias, *self.state]

    def begin(
        self,
        positions_BP: Tensor,
        valid_BP: Tensor,
        block_BP: Tensor | None = None,
        bias_BP: Tensor | None = None,
        span: int | None = None,
    ) -> KeyAxis:
        """Clear the cache and make these its first columns, including those of memory.

        Args:
            positions_BP: their positions.
            valid_BP: False where a column is padding.
            block_BP: their blocks, as in `KeyAxis`; only the prefill needs them.
            bias_BP: added to the logits of text on them; None adds nothing, here and in later
                steps.
            span: the most positions from the first to the last, if columns are in reading order
                with padding last; None if they are not.

        Returns:
            The axis of these columns.
        """
        count = positions_BP.shape[1]
        self.valid.zero_()
        self.positions[:, :count] = positions_BP
        self.valid[:, :count] = valid_BP
        if bias_BP is not None:
            self.bias.zero_()
            self.bias[:, :count] = bias_BP
        self.next_column.fill_(count)
        return KeyAxis(positions_BP, valid_BP, span is None, span or count, block_BP, bias_BP)

    def store_prefill(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the first columns of text; attention sees them and memory."""
        end = self.memory + key.shape[2]
        self.keys[layer, :, :, self.memory : end] = key
        self.values[layer, :, :, self.memory : end] = value
        if not self.memory:
            return key, value
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def store_memory(self, row: int, column: int, block: Tensor) -> None:
        """Copy keys and values `[L, 2, heads, P, H]` of a block into columns of memory.

        Args:
            row: the row.
            column: the first of the columns.
            block: keys and values of every layer.
        """
        columns = slice(column, column + block.shape[-2])
        self.keys[:, row, :, columns] = block[:, 0]
        self.values[:, row, :, columns] = block[:, 1]

    def extend(self, positions_B1: Tensor, *, biased: bool = False) -> KeyAxis:
        """Make each row's next column valid; `advance` moves on to the one after it.

        Args:
            positions_B1: its positions.
            biased: whether queries add `bias`.

        Returns:
            The axis of all columns.
        """
        next_B1 = self.next_column[:, None]
        self.positions.scatter_(1, next_B1, positions_B1)
        self.valid.scatter_(1, next_B1, True)
        bias = self.bias if biased else None
        return KeyAxis(self.positions, self.valid, True, self.positions.shape[1], bias=bias)

    def store_step(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the next column of each row in a layer; attention sees the whole cache."""
        column = self.next_column[:, None, None, None].expand(key.shape)
        self.keys[layer].scatter_(2, column, key)
        self.values[layer].scatter_(2, column, value)
        return self.keys[layer], self.values[layer]

    def advance(self, used_B: Tensor) -> None:
        """Move to the next column, once every layer has stored this one.

        Args:
            used_B: 1 for a row in use. The others get 0: they write the same column again.
        """
        self.next_column.add_(used_B)

    def copy_row(self, row: int, other: StaticCache, other_row: int) -> None:
        """Continue a row of another cache, whose filled columns fit into this one."""
        count = min(self.positions.shape[1], other.positions.shape[1])
        for own, theirs in ((self.keys, other.keys), (self.values, other.values)):
            own[:, row, :, :count] = theirs[:, other_row, :, :count]
        self.valid[row].zero_()
        self.bias[row].zero_()
        for own, theirs in (
            (self.positions, other.positions),
            (self.valid, other.valid),
            (self.bias, other.bias),
        ):
            own[row, :count] = theirs[other_row, :count]
        self.next_column[row] = other.next_column[other_row]
