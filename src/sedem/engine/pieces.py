"""Memory of any number of independent blocks, attended to in pieces that stay where they are.

Letters: R rows that share their blocks, F query heads, G key heads, P positions, C columns per
piece, U restored states per row, L layers above injection, H head width, K blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sedem.engine.interface import BlockSource
from sedem.engine.kept import Kept
from sedem.engine.scratch import Scratch
from sedem.guidance.piecewise import attend_piece, join
from sedem.quantization import Quantized

COLUMNS = 2048
"""Columns per piece, if no block is longer: keys and values of one layer fit a CPU's cache."""
LOGITS = 2**24
"""Logits computed at once: 64 MB in float32."""


@dataclass(frozen=True)
class Piece:
    """Some blocks, side by side.

    Attributes:
        entries: keys and values `[L, 2, G, U, H]` of each block, on any device.
        positions: position of each column within its block `[C]`.
    """

    entries: Sequence[Quantized]
    positions: Tensor

    def load(self, layer: int, device: torch.device) -> Tensor:
        """Return keys and values `[2, G, C, H]` of a layer, on a device."""
        parts = [entry[layer] for entry in self.entries]
        if len({(part.values.device, part.values.dtype) for part in parts}) > 1:
            return torch.cat([part.to(device).dequantize() for part in parts], dim=2)
        # Joined on their own device, so that a piece is copied to a GPU at once.
        scales = [part.scales for part in parts if part.scales is not None]
        joined = torch.cat([part.values for part in parts], dim=2)
        return (
            Quantized(joined, torch.cat(scales, dim=2) if scales else None).to(device).dequantize()
        )


@dataclass(frozen=True)
class PieceMemory:
    """The blocks of some rows of a batch; a piece is loaded once for all of them.

    Attributes:
        rows: the rows.
        pieces: their blocks.
        bias: added to the logits of each row on each column `[R, U]`; None adds nothing.
    """

    rows: list[int]
    pieces: Sequence[Piece]
    bias: Tensor | None

    def attend(
        self, layer: int, query_RFPH: Tensor, positions_RP: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Attend to all blocks; see `guidance.piecewise.attend_piece`.

        Args:
            layer: number of the layer, counted from the injection.
            query_RFPH: queries of these rows.
            positions_RP: their positions.
            window: number of positions that the layer attends to; None for all earlier ones.
        """
        at_once = max(1, LOGITS // (len(self.rows) * query_RFPH.shape[1] * COLUMNS))
        results: list[tuple[Tensor, Tensor]] = []
        queries = list(
            zip(query_RFPH.split(at_once, 2), positions_RP.split(at_once, 1), strict=True)
        )
        column = 0
        for piece in self.pieces:
            columns = slice(column, column + len(piece.positions))
            column = columns.stop
            bias_RC = None if self.bias is None else self.bias[:, columns]
            key, value = piece.load(layer, query_RFPH.device)
            parts = [
                attend_piece(query, key, value, _added(positions, piece, bias_RC, window))
                for query, positions in queries
            ]
            joined = torch.cat([p[0] for p in parts], 2), torch.cat([p[1] for p in parts], 2)
            results = [joined if not results else join(*zip(results[0], joined, strict=True))]
        return results[0]

    def kept_rows(self, rows: Mapping[int, int]) -> PieceMemory | None:
        """Return the memory for another batch whose rows continue some of these.

        Args:
            rows: the row of this batch for each row of the other that continues one.
        """
        place = {row: index for index, row in enumerate(self.rows)}
        moved = {new: place[old] for new, old in rows.items() if old in place}
        if not moved:
            return None
        bias = None if self.bias is None else self.bias[list(moved.values())]
        return replace(self, rows=list(moved), bias=bias)


def cut(entries: Sequence[Quantized], device: torch.device) -> Iterator[Piece]:
    """Group blocks into pieces of at most `COLUMNS` columns and at least one block."""
    group: list[Quantized] = []
    columns = 0
    for entry in entries:
        length = entry.values.shape[-2]
        if group and columns + length > COLUMNS:
            yield _piece(group, device)
            group, columns = [], 0
        group.append(entry)
        columns += length
    if group:
        yield _piece(group, device)


def hold(kept: Kept, bank: BlockSource, blocks: Sequence[int]) -> list[Quantized]:
    """Return keys and values of any number of blocks, without exceeding the budget.

    Blocks that are neither kept nor on disk are computed. They are kept while there is room, and
    then written to a temporary file.

    Args:
        kept: keeps them.
        bank: their bank.
        blocks: their indices, each once.
    """
    found = kept.find(bank, blocks)
    missing = [block for block in blocks if block not in found]
    room = [level.limit for level in kept.levels]
    for number, entry in found.values():
        if number is not None:
            room[number] -= entry.nbytes
    # The place of each missing block is chosen before it is computed.
    places: dict[int, int | None] = {}
    beyond = 0
    for block, states in zip(missing, kept.walk.sizes(bank, missing), strict=True):
        size = kept.entry_bytes(states)
        places[block] = next((n for n, free in enumerate(room) if size <= free), None)
        if (number := places[block]) is None:
            beyond += size
        else:
            room[number] -= size
    scratch = Scratch(beyond) if beyond else None
    entries = {block: entry for block, (_, entry) in found.items()}
    written = []
    for block, entry in kept.compute(bank, missing):
        number = places[block]
        if number is None:
            assert scratch is not None
            scratch.add(entry)
            written.append(block)
        else:
            entries[block] = kept.keep(number, bank, block, entry)
    if scratch is not None:
        entries |= zip(written, scratch.entries(), strict=True)
    return [entries[block] for block in blocks]


def _piece(entries: Sequence[Quantized], device: torch.device) -> Piece:
    positions = [torch.arange(1, entry.values.shape[-2] + 1) for entry in entries]
    return Piece(list(entries), torch.cat(positions).to(device))


def _added(
    positions_RP: Tensor, piece: Piece, bias_RC: Tensor | None, window: int | None
) -> Tensor:
    """Term added to the logits `[R, P, C]`: the bias, and -inf for columns that are not visible."""
    back_RPC = positions_RP[:, :, None] - piece.positions
    hidden_RPC = back_RPC < 0
    if window is not None:
        hidden_RPC |= back_RPC >= window
    zeros = torch.zeros((), device=back_RPC.device)
    added = zeros if bias_RC is None else bias_RC.float()[:, None]
    return added.expand(back_RPC.shape).masked_fill(hidden_RPC, -torch.inf)
