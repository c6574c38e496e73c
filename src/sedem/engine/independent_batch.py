"""The batch for independent blocks: keys and values are copied in, and only prefixes are run.

Letters: B rows, P prefix columns, U restored states per row, K blocks per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sedem.engine.batch import Bucket, StaticBatch
from sedem.engine.cuda_graphs import Pool
from sedem.engine.decoder import FusedDecoder
from sedem.engine.interface import Start
from sedem.engine.kept import Kept
from sedem.engine.layers import biases_of, run_layers
from sedem.engine.static_cache import StaticCache
from sedem.engine.upload import Shape, fill, fill_lengths
from sedem.guidance.independent import prefix_positions


class IndependentBatch(StaticBatch):
    """The buffers of one batch with independent blocks; see `StaticBatch`.

    Args:
        decoder: the decoder.
        bucket: the size of the buffers.
        kept: provides keys and values of blocks.
        graph: whether to capture prefill and step as CUDA graphs.
        pool: memory that graphs share.
        split: whether a step may attend to the parts of a long memory in parallel.

    Attributes:
        memory_positions: position of each restored state within its block `[B, U]`, from 1.
        longest: number of states of the longest block of each row `[B, 1]`.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        bucket: Bucket,
        kept: Kept,
        *,
        graph: bool = False,
        pool: Pool = None,
        split: bool = False,
    ) -> None:
        self.kept = kept
        super().__init__(decoder, bucket, graph=graph, pool=pool, split=split)
        inputs = self.upload.device
        self.memory_positions, self.longest = inputs["memory_positions"], inputs["longest"]

    def _fields(self) -> dict[str, tuple[Shape, torch.dtype]]:
        rows, states = self.bucket.rows, self.bucket.slots * self.decoder.states_per_slot
        return {
            **super()._fields(),
            "memory_positions": ((rows, states), torch.long),
            "longest": ((rows, 1), torch.long),
        }

    def _own_slots(self) -> int:
        return 0

    def _make_caches(self, columns: int, states: int) -> tuple[StaticCache, StaticCache]:
        lower, upper = super()._make_caches(columns, states)
        upper.memory = states
        return lower, upper

    def _load_memory(self, rows: Sequence[Start]) -> None:
        """Copy the keys and values of each row's blocks into the first columns."""
        sizes = [self.kept.walk.sizes(start.bank, start.blocks) for start in rows]
        host = self.upload.host
        fill_lengths(host["real"], [sum(row) for row in sizes])
        nothing = torch.zeros(0, dtype=torch.long)
        places = [torch.cat([nothing, *(torch.arange(1, n + 1) for n in row)]) for row in sizes]
        fill(host["memory_positions"], places)
        host["longest"].copy_(torch.tensor([[max(row, default=0)] for row in sizes]))
        self._load_blocks(rows, sizes)
        for index, start in enumerate(rows):
            column = 0
            for entry in self.kept.fetch(start.bank, start.blocks):
                block = entry.dequantize()
                self.upper.store_memory(index, column, block)
                column += block.shape[-2]

    def _run_prefill(self) -> None:
        """Run the prefixes; above injection they also see the columns of memory."""
        decoder = self.decoder
        prefix_BP = prefix_positions(self.prefix_valid, self.longest)
        hidden_BPD = self._run_lower(prefix_BP)
        axis = self.upper.begin(
            torch.cat([self.memory_positions, prefix_BP], dim=1),
            torch.cat([self.real, self.prefix_valid], dim=1),
            bias_BP=self._bias(prefix_BP),
        )
        hidden_B1D = run_layers(
            decoder.upper,
            hidden_BPD,
            decoder.rope(hidden_BPD, prefix_BP),
            biases_of(decoder.upper, axis, prefix_BP, self.prefix_valid, hidden_BPD.dtype),
            self.upper.store_prefill,
            self.prefix_valid.sum(1) - 1,
            attention=self._attention(prefix_BP),
        )
        self.logits.copy_(decoder.logits(hidden_B1D[:, 0]))
        self.next_position.copy_(torch.maximum(prefix_BP.amax(1), self.longest[:, 0]) + 1)
