"""What the layers below injection computed for prefixes that were read to select blocks.

The answer to a question then begins above injection. Only the last prefixes are kept, because an
answer soon follows. A captured graph runs the lower layers again, which costs it little.

Letters: P prefix positions, L layers below injection, G key heads, H head width, D width.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from sedem.backbone.masks import KeyAxis
from sedem.engine.fused import FusedDecoder, biases_of, run_layers
from sedem.guidance.independent import prefix_positions

MOST = 64
"""Number of prefixes that are kept."""


@dataclass(frozen=True)
class ReadPrefix:
    """What was computed for one prefix.

    Attributes:
        hidden: states at the injection layer `[P, D]`.
        keys, values: of the layers below it `[L, G, P, H]`.
    """

    hidden: Tensor
    keys: Tensor
    values: Tensor


class Prefixes:
    """Reads prefixes, and keeps the last ones."""

    def __init__(self, decoder: FusedDecoder) -> None:
        self.decoder = decoder
        self._read: OrderedDict[tuple[int, ...], ReadPrefix] = OrderedDict()

    def read(self, ids_P: Tensor) -> Tensor:
        """Return the states of a prefix at the injection layer `[P, D]`."""
        decoder = self.decoder
        ids_1P = ids_P[None].to(decoder.device)
        valid_1P = torch.ones_like(ids_1P, dtype=torch.bool)
        longest_11 = torch.full_like(ids_1P[:, :1], decoder.config.states_per_block)
        positions_1P = prefix_positions(valid_1P, longest_11)
        axis = KeyAxis(positions_1P, valid_1P, padded=False, span=int(positions_1P[0, -1]) + 1)
        stored: list[tuple[Tensor, Tensor]] = []

        def store(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            stored.append((key[0], value[0]))
            return key, value

        hidden_1PD = decoder.embed(ids_1P)
        hidden_1PD = run_layers(
            decoder.lower,
            hidden_1PD,
            decoder.rope(hidden_1PD, positions_1P),
            biases_of(decoder.lower, axis, positions_1P, valid_1P, hidden_1PD.dtype),
            store,
        )
        keys, values = (torch.stack(several) for several in zip(*stored, strict=True))
        self._read[tuple(ids_P.tolist())] = ReadPrefix(hidden_1PD[0], keys, values)
        if len(self._read) > MOST:
            self._read.popitem(last=False)
        return hidden_1PD[0]

    def find(self, ids_P: Tensor) -> ReadPrefix | None:
        """Return what was computed for a prefix; None if it was not read, or not lately."""
        return self._read.get(tuple(ids_P.tolist()))

    def clear(self) -> None:
        """Forget all prefixes."""
        self._read.clear()
