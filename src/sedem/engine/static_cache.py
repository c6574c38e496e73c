"""A key-value cache of fixed size for a range of layers, written column by column.

Letters: B batch, P positions of one call, K columns, L layers, H width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sedem.backbone.masks import KeyAxis


class StaticCache:
    """Keys and values of the layers below the injection layer, or of those above it.

    The index of the next column is kept on the device, where a captured step reads it. The caller
    counts on the host whether a column is left.

    Args:
        layers: number of layers.
        rows: B.
        columns: K.
        heads: number of key heads.
        width: H.
        dtype: type of keys and values.
        device: where the tensors are.
        memory: columns before those of text, for keys and values that are copied in from outside.

    Attributes:
        bias: what later queries add to their logits on each column `[B, K]`.
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
        self.next_column = torch.zeros(1, dtype=torch.long, device=device)
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
    ) -> KeyAxis:
        """Clear the cache and make these its first columns, those of memory included.

        Args:
            positions_BP: their positions.
            valid_BP: False where a column is padding.
            block_BP: their blocks, as in `KeyAxis`; only the prefill needs them.
            bias_BP: what text adds to its logits on them; None adds nothing, here and in later
                steps.

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
        return KeyAxis(positions_BP, valid_BP, True, count, block_BP, bias_BP)

    def store_prefill(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the first columns of text; attention sees memory and them."""
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
        """Make the next column valid; `advance` moves on to the one after it.

        Args:
            positions_B1: its positions.
            biased: whether queries add `bias`.

        Returns:
            The axis of all columns.
        """
        self.positions.index_copy_(1, self.next_column, positions_B1)
        self.valid.index_fill_(1, self.next_column, True)
        bias = self.bias if biased else None
        return KeyAxis(self.positions, self.valid, True, self.positions.shape[1], bias=bias)

    def store_step(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the next column of a layer; attention sees the whole cache."""
        self.keys[layer].index_copy_(2, self.next_column, key)
        self.values[layer].index_copy_(2, self.next_column, value)
        return self.keys[layer], self.values[layer]

    def advance(self) -> None:
        """Move on to the next column, once every layer has stored this one."""
        self.next_column.add_(1)

    def copy_rows(self, other: StaticCache, rows: Tensor) -> None:
        """Continue from some rows of another cache, which has no more columns than this one."""
        columns = other.positions.shape[1]
        self.keys[:, :, :, :columns] = other.keys[:, rows]
        self.values[:, :, :, :columns] = other.values[:, rows]
        self.valid.zero_()
        self.positions[:, :columns] = other.positions[rows]
        self.valid[:, :columns] = other.valid[rows]
        self.bias.zero_()
        self.bias[:, :columns] = other.bias[rows]
        self.next_column.copy_(other.next_column)
