"""Keys and values of a range of layers in tensors of fixed size, column by column.

Letters: B batch, P positions of one call, K columns, H width of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sedem.backbone.masks import KeyAxis


class StaticCache:
    """The cache of the layers below the injection layer, or of those above it.

    Which column is next is kept on the device, so that a captured step finds it there; whether
    there is one left is for the caller to know, on the host.

    Args:
        layers: how many layers.
        rows: B.
        columns: K.
        heads: key heads.
        width: H.
        dtype: of keys and values.
        device: where.
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
    ) -> None:
        # Zeros, for a masked column of not-a-number would still spoil the sum over values.
        shape = (layers, rows, heads, columns, width)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.positions = torch.zeros(rows, columns, dtype=torch.long, device=device)
        self.valid = torch.zeros(rows, columns, dtype=torch.bool, device=device)
        self.column = torch.zeros(1, dtype=torch.long, device=device)

    @property
    def carried(self) -> list[Tensor]:
        """What a step reads and changes."""
        return [self.positions, self.valid, self.column]

    @property
    def buffers(self) -> list[Tensor]:
        """All of its tensors."""
        return [self.keys, self.values, *self.carried]

    def begin(self, positions_BP: Tensor, valid_BP: Tensor) -> KeyAxis:
        """Start anew with these columns, the only ones that count."""
        count = positions_BP.shape[1]
        self.valid.zero_()
        self.positions[:, :count] = positions_BP
        self.valid[:, :count] = valid_BP
        self.column.fill_(count)
        return KeyAxis(positions_BP, valid_BP, padded=True, span=count)

    def keep_first(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the first columns of a layer; they alone are attended to."""
        count = key.shape[2]
        self.keys[layer, :, :, :count] = key
        self.values[layer, :, :, :count] = value
        return key, value

    def extend(self, positions_B1: Tensor) -> KeyAxis:
        """Take one more column in."""
        self.positions.index_copy_(1, self.column, positions_B1)
        self.valid.index_fill_(1, self.column, True)
        return KeyAxis(self.positions, self.valid, padded=True, span=self.positions.shape[1])

    def keep_next(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the column that `extend` took in; the whole cache is attended to."""
        self.keys[layer].index_copy_(2, self.column, key)
        self.values[layer].index_copy_(2, self.column, value)
        return self.keys[layer], self.values[layer]

    def take_over(self, other: StaticCache, rows: Tensor) -> None:
        """Go on where some rows of a cache of no more columns stand."""
        columns = other.positions.shape[1]
        self.keys[:, :, :, :columns] = other.keys[:, rows]
        self.values[:, :, :, :columns] = other.values[:, rows]
        self.valid.zero_()
        self.positions[:, :columns] = other.positions[rows]
        self.valid[:, :columns] = other.valid[rows]
        self.column.copy_(other.column)
