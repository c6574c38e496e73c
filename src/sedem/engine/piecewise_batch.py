"""The batch for more independent blocks than a static cache can hold.

Text has static buffers as in any batch. Memory stays where it is kept, and attention processes it
piece by piece. None of this is captured.

Letters: B rows, P positions of one call, K blocks per row, F query heads, H head width.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sedem.engine.batch import StaticBatch
from sedem.engine.independent_batch import IndependentBatch
from sedem.engine.interface import Start
from sedem.engine.layers import Attention, Bias
from sedem.engine.pieces import PieceMemory, cut, hold
from sedem.guidance.piecewise import attend_piece, join


class PiecewiseBatch(IndependentBatch):
    """The buffers of text, and the pieces that its rows attend to; see `IndependentBatch`.

    Attributes:
        memory: the blocks; rows with the same blocks share them.
    """

    memory: Sequence[PieceMemory] = ()

    def copy_rows(self, other: StaticBatch, rows: Mapping[int, int]) -> None:
        """Continue rows of another batch; see `StaticBatch.copy_rows`."""
        assert isinstance(other, PiecewiseBatch)
        super().copy_rows(other, rows)
        moved = [memory.kept_rows(rows) for memory in other.memory]
        self.memory = [memory for memory in moved if memory is not None]

    def finish(self) -> None:
        """Release the blocks."""
        self.memory = ()

    def _load_memory(self, rows: Sequence[Start]) -> None:
        """Get the blocks of each row; rows with the same blocks share them."""
        alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        sizes = [self.kept.walk.sizes(start.bank, start.blocks) for start in rows]
        longest = torch.tensor([[max(row, default=0)] for row in sizes])
        self.upload.host["longest"].copy_(longest)
        for index, start in enumerate(rows):
            if start.blocks:
                alike.setdefault((id(start.bank), tuple(start.blocks)), []).append(index)
        self.memory = [self._memory_of(group, rows, sizes[group[0]]) for group in alike.values()]

    def _memory_of(
        self, group: list[int], rows: Sequence[Start], sizes: Sequence[int]
    ) -> PieceMemory:
        decoder, bank = self.decoder, rows[group[0]].bank
        entries = hold(self.kept, bank, rows[group[0]].blocks)
        bias_RU = None
        if decoder.guide is not None:
            scores_RK = torch.stack([rows[row].scores for row in group]).to(decoder.device)
            repeats_K = torch.tensor(sizes, device=decoder.device)
            bias_RU = decoder.guide(scores_RK).repeat_interleave(repeats_K, dim=1)
        return PieceMemory(group, list(cut(entries, decoder.device)), bias_RU)

    @property
    def _span(self) -> int:
        # Memory outside the buffers can have any number of positions.
        return sys.maxsize

    def _bias(self, prefix_BP: Tensor) -> Tensor | None:
        return None

    def _attention(self, positions_BP: Tensor) -> Attention:
        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, bias: Bias) -> Tensor:
            """Attend from text to text and to the pieces `[B, P, F * H]`."""
            assert bias is not None
            mixed, log_sums = attend_piece(query, key, value, bias[:, 0])
            window = self.decoder.upper[layer].window
            # A single position is the last one of its row.
            alone = query.shape[2] == 1
            asking_BP = positions_BP.amax(1, keepdim=True) if alone else positions_BP
            for memory in self.memory:
                rows = memory.rows
                piece = memory.attend(layer, query[rows], asking_BP[rows], window)
                mixed[rows], log_sums[rows] = join(
                    (mixed[rows], piece[0]), (log_sums[rows], piece[1])
                )
            return mixed.to(query.dtype).transpose(1, 2).flatten(2)

        return attend
