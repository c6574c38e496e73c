"""The static buffers of answers, by size: those in use, and idle ones for later answers."""

from __future__ import annotations

from collections.abc import Sequence

from sedem.engine.batch import Bucket, StaticBatch
from sedem.engine.cuda_graphs import new_pool
from sedem.engine.decoder import FusedDecoder
from sedem.engine.device import device_bytes, storage_bytes
from sedem.engine.independent_batch import IndependentBatch
from sedem.engine.interface import Start
from sedem.engine.kept import Kept
from sedem.engine.piecewise_batch import PiecewiseBatch

IDLE_BYTES = 2**30
"""Limit in bytes of idle batches kept for later answers of their size; higher on a large GPU."""
IDLE_SHARE = 16
"""Divisor of a GPU's memory for that limit."""
FIRST_STEPS = 64
"""Answer tokens that the first batch has room for; longer answers move to a larger batch."""

MAX_COLUMNS = 4096
"""Most restored states per row in a static cache; more independent blocks stay outside."""


class Batches:
    """Makes batches, and keeps idle ones for reuse.

    Args:
        decoder: the decoder that batches run.
        kept: keys and values of independent blocks.
        graphs: whether batches capture CUDA graphs.
        split: whether steps attend to the parts of a long memory in parallel; see `split_keys`.

    Attributes:
        pool: memory that graphs share; None without graphs.
        idle: batches that no answer uses, the most recently used last.
        active: batches that answers use.
    """

    def __init__(
        self, decoder: FusedDecoder, kept: Kept, *, graphs: bool, split: bool = False
    ) -> None:
        self.decoder, self.kept, self.split = decoder, kept, split
        self.pool = new_pool() if graphs else None
        self.idle: list[StaticBatch] = []
        self.active: list[StaticBatch] = []
        self._graphs = graphs
        self._idle_share = device_bytes(decoder.device) // IDLE_SHARE

    @property
    def independent(self) -> bool:
        """Whether blocks are independent."""
        return self.decoder.config.block_context == "independent"

    def take(self, bucket: Bucket) -> StaticBatch:
        """Return an idle batch of this size, or a new one if there is none."""
        batch = next((batch for batch in self.idle if batch.bucket == bucket), None)
        if batch is None:
            batch = self._new(bucket)
        else:
            self.idle.remove(batch)
        self.active.append(batch)
        return batch

    def give_back(self, batch: StaticBatch) -> None:
        """Make a batch idle; above the limit, the oldest idle ones are freed."""
        batch.finish()
        self.active.remove(batch)
        self.idle.append(batch)
        limit = max(IDLE_BYTES, self._idle_share)
        while len(self.idle) > 1 and _bytes(self.idle) > limit:
            del self.idle[0]

    def release(self) -> None:
        """Free idle batches."""
        self.idle = []
        # A pool cannot be used again after its last graph is freed.
        self.pool = new_pool() if self._graphs else None

    def bucket_of(self, starts: Sequence[Start], max_steps: int) -> Bucket:
        """Return the size of the batch that some answers start in.

        Args:
            starts: one for each row.
            max_steps: step limit of an answer.
        """
        slots = round_up(max(self._slots_of(start) for start in starts), 16)
        columns = slots * self.decoder.states_per_slot
        pieces = self.independent and columns > MAX_COLUMNS
        return Bucket(
            rows=round_up(len(starts), 1),
            prefix=round_up(max(len(start.prefix) for start in starts), 8),
            slots=0 if pieces else slots,
            steps=round_up(min(max_steps, FIRST_STEPS), 16),
            pieces=pieces,
        )

    def _slots_of(self, start: Start) -> int:
        """Number of slots that a row needs in its batch."""
        if not self.independent:
            return start.bank.slot_tokens(start.blocks).numel()
        states = sum(self.kept.walk.sizes(start.bank, start.blocks))
        return -(-states // self.decoder.states_per_slot)

    def _new(self, bucket: Bucket) -> StaticBatch:
        if bucket.pieces:
            return PiecewiseBatch(self.decoder, bucket, self.kept)
        graph, pool, split = self._graphs, self.pool, self.split
        if self.independent:
            return IndependentBatch(
                self.decoder, bucket, self.kept, graph=graph, pool=pool, split=split
            )
        return StaticBatch(self.decoder, bucket, graph=graph, pool=pool, split=split)


def round_up(count: int, unit: int) -> int:
    """Round up to the next bucket size: 1 to 8, 10, 12, 14, 16, 20, 24, ... times `unit`."""
    units = -(-count // unit)
    stride = 1
    while units > 8 * stride:
        stride *= 2
    return -(-units // stride) * stride * unit


def _bytes(batches: Sequence[StaticBatch]) -> int:
    return storage_bytes([buffer for batch in batches for buffer in batch.buffers])
