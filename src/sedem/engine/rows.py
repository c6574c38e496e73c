"""Answers that run together: rows join, finished rows leave, long answers get more room.

Letters: B rows, J rows that join, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from threading import Lock

import torch
from torch import Tensor

from sedem.engine.batch import Bucket, DeviceLock, IndependentBatch, StaticBatch
from sedem.engine.device import device_bytes, free_bytes, new_pool, round_up, storage_bytes
from sedem.engine.fused import FusedDecoder
from sedem.engine.interface import WIDE, AnswerInputs
from sedem.engine.kept import Kept, Prefixes
from sedem.errors import ConfigError, NoRoomError

IDLE_BYTES, IDLE_GRAPH_BYTES = 2**28, 2**30
"""Limits in bytes of idle batches kept for later answers of their size, without graphs and with
them: a graph takes long to capture again. The second is higher on a large GPU."""
IDLE_SHARE = 16
"""Divisor of a GPU's memory for that limit."""
SHORT_SHARE = 8
"""One part in so many of the memory of all caches is never taken by one very long memory, so that
others can be answered beside it."""
BRANCHED = 128
"""Most positions that one call runs after a memory."""
USUAL_PREFIX = 1024
"""Columns of a question and its answer, for the number of blocks that fit beside them."""
MOST_BLOCKS = 2**31
FIRST_STEPS = 64
"""Answer tokens that the first batch has room for; longer answers move to a larger batch."""
COLUMNS = 64
"""Rounding unit of prefix columns and slots of rows that join, for few moves and few graphs."""


class Batches:
    """Makes batches, and keeps idle ones for reuse; any thread may take and return them.

    Args:
        limit: bytes that batches and kept keys and values share; None means what is free.

    Attributes:
        pool: memory that graphs share; None without graphs.
        idle: batches that no answer uses, the most recently used last.
        prefixes: those that were read before their blocks were selected.
    """

    def __init__(
        self, decoder: FusedDecoder, kept: Kept, *, graphs: bool, limit: int | None = None
    ) -> None:
        self.decoder, self.kept, self.limit = decoder, kept, limit
        self.pool = new_pool() if graphs else None
        self.prefixes = Prefixes(decoder)
        self.idle: list[StaticBatch] = []
        self.active: list[StaticBatch] = []
        # The sizes of batches that are being made: their memory is spoken for.
        self._made: list[Bucket] = []
        self._guard = Lock()
        self._graphs = graphs
        self._idle_share = device_bytes(decoder.device) // IDLE_SHARE

    @property
    def independent(self) -> bool:
        """Whether blocks are independent."""
        return self.decoder.config.block_context == "independent"

    def take(self, bucket: Bucket, *, grown: bool = False) -> StaticBatch:
        """Return an idle batch of this size, or a new one if there is none.

        Args:
            grown: whether answers that run have outgrown their batch, so that they cannot wait.

        Raises:
            ConfigError: it has no room, even alone.
            NoRoomError: it has no room beside those that are in use.
        """
        with self._guard:
            batch = next((batch for batch in self.idle if batch.bucket == bucket), None)
            if batch is not None:
                self.idle.remove(batch)
                self.active.append(batch)
                return batch
            self._make_room(bucket, grown=grown)
            self._made.append(bucket)
        try:
            batch = self._new(bucket)
        finally:
            with self._guard:
                self._made.remove(bucket)
                if batch is not None:
                    self.active.append(batch)
        return batch

    def give_back(self, batch: StaticBatch) -> None:
        """Make a batch idle, unless it is wide; above the limit, the oldest idle ones are freed."""
        with self._guard:
            self.active.remove(batch)
            if not self._exceeds(batch.bucket.slots):
                self.idle.append(batch)
            limit = max(IDLE_GRAPH_BYTES, self._idle_share) if self._graphs else IDLE_BYTES
            while len(self.idle) > 1 and storage_bytes(buffers_of(self.idle)) > limit:
                del self.idle[0]
            if self.limit is not None:
                self.kept.limit_to(self.limit - self._used())

    def most_blocks(self) -> int | None:
        """Return how many blocks of full size one answer may use; None if memory sets no limit."""
        if self.limit is None or not self.independent:
            return None
        per_slot = self.decoder.states_per_slot
        slots = -(-self.decoder.config.states_per_block // per_slot)

        def needed(blocks: int) -> int:
            bucket = Bucket(1, USUAL_PREFIX, round_up(blocks * slots, 16), 0)
            return needed_bytes(self.decoder, bucket)

        return bisect_right(range(MOST_BLOCKS), self._most(wide=True), key=needed) - 1

    def _most(self, *, wide: bool) -> int:
        assert self.limit is not None
        return self.limit - (self.limit // SHORT_SHARE if wide else 0)

    def _used(self) -> int:
        """Bytes of all batches, and of those that are being made."""
        buckets = [*self._made, *(batch.bucket for batch in (*self.active, *self.idle))]
        return sum(needed_bytes(self.decoder, bucket) for bucket in buckets)

    def _make_room(self, bucket: Bucket, *, grown: bool) -> None:
        """Free idle batches, then what is kept, until a new batch has room."""
        if self.limit is None:
            return
        needed, most = (
            needed_bytes(self.decoder, bucket),
            self._most(wide=self._exceeds(bucket.slots)),
        )
        if needed > most:
            raise ConfigError(
                f"keys and values of the selected blocks need {needed:,} bytes of memory, {most:,} "
                f"are allowed, which is enough for {self.most_blocks() or 0:,} blocks; use a "
                "smaller k, or give more memory"
            )
        while self.idle and self._used() + needed > self.limit:
            del self.idle[0]
        used = self._used()
        if used + needed > self.limit and not grown:
            raise NoRoomError(
                f"keys and values of the selected blocks need {needed:,} bytes of memory, and "
                f"other answers use {used:,} of {self.limit:,}; ask again later"
            )
        self.kept.limit_to(self.limit - used - needed)

    def release(self) -> None:
        """Free idle batches."""
        with self._guard:
            self.idle = []
        # A pool cannot be used again after its last graph is freed.
        self.pool = new_pool() if self._graphs else None

    def bucket_of(self, inputs: Sequence[AnswerInputs], max_steps: int) -> Bucket:
        """Return the size of the batch that some answers start in."""
        slots = max(map(self._slots_of, inputs))
        # A very long memory is not moved to a larger batch: both would have to fit.
        steps = max_steps if self._exceeds(slots) else min(max_steps, FIRST_STEPS)
        return Bucket(
            rows=round_up(len(inputs), 1),
            prefix=round_up(max(len(row.prefix) for row in inputs), 8),
            slots=round_up(slots, 16),
            steps=round_up(steps, 16),
        )

    def is_wide(self, inputs: AnswerInputs) -> bool:
        """Whether a row has a batch of its own, because others would be padded to its memory."""
        return self._exceeds(self._slots_of(inputs))

    def _exceeds(self, slots: int) -> bool:
        return self.independent and slots * self.decoder.states_per_slot > WIDE

    def _slots_of(self, inputs: AnswerInputs) -> int:
        """Number of slots that a row needs in its batch."""
        if not self.independent:
            return inputs.bank.slot_tokens(inputs.blocks).numel()
        states = sum(self.kept.walk.sizes(inputs.bank, inputs.blocks))
        return -(-states // self.decoder.states_per_slot)

    def _new(self, bucket: Bucket) -> StaticBatch:
        decoder, graph, pool = self.decoder, self._graphs, self.pool
        needed, free = cache_bytes(decoder, bucket), free_bytes(decoder.device)
        if needed > free:
            raise ConfigError(
                f"keys and values of the selected blocks need {needed:,} bytes of memory, "
                f"{free:,} are free; use a smaller k"
            )
        if self.independent:
            read = self.prefixes
            return IndependentBatch(decoder, bucket, self.kept, read, graph=graph, pool=pool)
        return StaticBatch(decoder, bucket, graph=graph, pool=pool)


def cache_bytes(decoder: FusedDecoder, bucket: Bucket) -> int:
    """Bytes of the keys and values of a batch."""
    columns, states = bucket.prefix + bucket.steps, bucket.slots * decoder.states_per_slot
    each = len(decoder.layers) * columns + len(decoder.upper) * states
    first = decoder.layers[0]
    width = 2 * first.key_heads * first.head_width * decoder.dtype.itemsize
    return bucket.rows * each * width


def needed_bytes(decoder: FusedDecoder, bucket: Bucket) -> int:
    """Bytes that a batch takes while it runs: its caches, and what one layer makes of them."""
    first = decoder.layers[0]
    copied = 2 * first.key_heads * first.head_width * decoder.dtype.itemsize
    biases = 2 * BRANCHED * decoder.dtype.itemsize
    columns = replace(bucket, rows=1).columns(decoder.states_per_slot)
    return cache_bytes(decoder, bucket) + columns * (copied + biases)


def buffers_of(batches: Iterable[StaticBatch]) -> list[Tensor]:
    """Return the tensors of several batches."""
    return [buffer for batch in batches for buffer in batch.buffers]


class RunningBatch:
    """Rows of one static batch at a time; they move to another batch when it fits them better.

    Callers know a row by its number, which never changes. Moves change its place in the batch.

    One thread uses it.

    Args:
        lock: reserves the device; not held while others may go on.

    Attributes:
        batch: the batch that runs now; None before the first row.
        places: the place of each row in use in the batch.
        needs: the size that each row in use needs, as a batch of one row.
    """

    def __init__(self, batches: Batches, count: int, lock: DeviceLock) -> None:
        self.batches, self.count, self.lock = batches, count, lock
        self.batch: StaticBatch | None = None
        self.places: dict[int, int] = {}
        self.needs: dict[int, Bucket] = {}
        self._max_steps: dict[int, int] = {}
        # The row at each place and the place of each row, on the device; 0 where there is none.
        self._row_of = self._place_of = torch.zeros(0, dtype=torch.long)

    @torch.no_grad()
    def join(
        self, rows: Sequence[int], inputs: Sequence[AnswerInputs], limits: Sequence[int]
    ) -> Tensor:
        """Prefill some rows; see `interface.Rows.join`.

        If no row is in use, they are prefilled in the batch that then runs them, else in a separate
        batch, from which they are copied into the running one.
        """
        alone = not self.places
        if alone:
            self.close()
        bucket = self.batches.bucket_of(inputs, max(limits) if alone else 0)
        with self.lock():
            batch = self.batches.take(bucket)
        try:
            batch.prefill(inputs, self.lock)
        except BaseException:
            with self.lock():
                self.batches.give_back(batch)
            raise
        with self.lock():
            if not alone:
                return self._copied(batch, rows, limits)
            self.needs = dict.fromkeys(rows, replace(bucket, rows=1))
            self._max_steps = dict(zip(rows, limits, strict=True))
            self._place({row: place for place, row in enumerate(rows)}, batch)
            return batch.logits[: len(rows)].clone()

    def _copied(self, prefilled: StaticBatch, rows: Sequence[int], limits: Sequence[int]) -> Tensor:
        """Copy prefilled rows into the running batch."""
        try:
            # Rounded up, for few moves and few graphs.
            need = replace(
                prefilled.bucket,
                rows=1,
                prefix=round_up(prefilled.bucket.prefix, COLUMNS),
                slots=round_up(prefilled.bucket.slots, COLUMNS),
            )
            steps = (round_up(min(limit, FIRST_STEPS), 16) for limit in limits)
            needs = {row: replace(need, steps=n) for row, n in zip(rows, steps, strict=True)}
            self._fit({**self.needs, **needs})
            assert self.batch is not None
            free = set(range(self.batch.bucket.rows)) - set(self.places.values())
            places = dict(zip(rows, sorted(free), strict=False))
            try:
                self.batch.copy_rows(
                    prefilled, dict(zip(places.values(), range(len(rows)), strict=True))
                )
            except BaseException:
                for place in places.values():  # they stay free
                    self.batch.clear(slice(place, place + 1))
                raise
            logits_JV = prefilled.logits[: len(rows)].clone()
        finally:
            self.batches.give_back(prefilled)
        for row, place in places.items():
            # A copy from the host would wait for the device.
            self._row_of[place].fill_(row)
            self._place_of[row].fill_(place)
        self.places |= places
        self.needs |= needs
        self._max_steps |= zip(rows, limits, strict=True)
        return logits_JV

    def leave(self, row: int) -> None:
        """Free a row."""
        with self.lock():
            assert self.batch is not None
            place = self.places.pop(row)
            del self.needs[row], self._max_steps[row]
            self.batch.clear(slice(place, place + 1))

    @torch.no_grad()
    def branches(self, row: int, ids_SL: Tensor) -> Tensor:
        """Run several continuations of a row; return logits `[S, L, V]`."""
        with self.lock():
            assert self.batch is not None
            return self.batch.branches(self.places[row], ids_SL)

    @torch.no_grad()
    def step(self, ids_B: Tensor) -> Tensor:
        """Run one token of every row in use.

        Returns:
            Logits `[B, V]`; those of other rows are undefined.

        Raises:
            ConfigError: an answer is longer than its limit.
        """
        with self.lock():
            self._fit({row: self._grown(row) for row in self.places}, grown=True)
            assert self.batch is not None
            self.batch.step(ids_B[self._row_of])
            return self.batch.logits[self._place_of]

    def close(self) -> None:
        """Give the batch back."""
        with self.lock():
            if self.batch is not None:
                self.batches.give_back(self.batch)
            self.batch, self.places = None, {}

    def _grown(self, row: int) -> Bucket:
        """The size that a row needs for its next step; steps up to double once they are used up."""
        assert self.batch is not None
        need, max_steps = self.needs[row], self._max_steps[row]
        if self.batch.text[self.places[row]] < need.prefix + need.steps:
            return need
        if need.steps >= max_steps:
            raise ConfigError(f"an answer is longer than {max_steps} steps; start it with more")
        return replace(need, steps=round_up(min(max_steps, 2 * need.steps), 16))

    def _fit(self, needs: dict[int, Bucket], *, grown: bool = False) -> None:
        """Move to another batch if these rows do not fit, or if half the size is enough."""
        self.needs.update((row, needs[row]) for row in self.places)
        needed = Bucket(
            rows=round_up(len(needs), 1),
            prefix=max(need.prefix for need in needs.values()),
            slots=max(need.slots for need in needs.values()),
            steps=max(need.steps for need in needs.values()),
        )
        if self.batch is not None:
            old, per_slot = self.batch.bucket, self.batches.decoder.states_per_slot
            if not old.holds(needed):
                # Twice the rows at once, so that a burst of questions causes few moves.
                more = needed.rows > old.rows
                rows = max(needed.rows, min(self.count, 2 * old.rows)) if more else old.rows
                needed = replace(needed, rows=rows)
            elif 2 * needed.columns(per_slot) > old.columns(per_slot):
                return
        self._move(needed, grown=grown)

    def _move(self, bucket: Bucket, *, grown: bool) -> None:
        """Continue in another batch; if that fails, the rows stay where they are."""
        old, new = self.batch, self.batches.take(bucket, grown=grown)
        try:
            new.clear(slice(None))
            if old is not None:
                new.copy_rows(old, dict(enumerate(self.places.values())))
            self._place({row: place for place, row in enumerate(self.places)}, new)
        except BaseException:
            self.batches.give_back(new)
            raise
        if old is not None:
            self.batches.give_back(old)

    def _place(self, places: dict[int, int], batch: StaticBatch) -> None:
        """Assign rows to places of a batch."""
        row_of, place_of = [0] * batch.bucket.rows, [0] * self.count
        for row, place in places.items():
            row_of[place], place_of[row] = row, place
        device = batch.logits.device
        on_device = [torch.tensor(numbers, device=device) for numbers in (row_of, place_of)]
        self._row_of, self._place_of = on_device
        self.batch, self.places = batch, places


class StaticRows:
    """Rows that share a running batch, except wide ones: see `Batches.is_wide`."""

    def __init__(self, batches: Batches, count: int, lock: DeviceLock) -> None:
        self.batches, self.lock = batches, lock
        self.shared = RunningBatch(batches, count, lock)
        self.wide: dict[int, RunningBatch] = {}

    def join(
        self, rows: Sequence[int], inputs: Sequence[AnswerInputs], limits: Sequence[int]
    ) -> Tensor:
        """Prefill some rows; return logits after the prefixes `[J, V]`."""
        apart = [self.batches.is_wide(one) for one in inputs]
        if not any(apart):
            return self.shared.join(rows, inputs, limits)
        logits: list[Tensor] = []
        with ExitStack() as joining:
            for row, one, limit, is_wide in zip(rows, inputs, limits, apart, strict=True):
                place = 0 if is_wide else row
                batch = RunningBatch(self.batches, 1, self.lock) if is_wide else self.shared
                logits.append(batch.join([place], [one], [limit])[0])
                if is_wide:
                    self.wide[row] = batch
                joining.callback(self.leave, row)
            joining.pop_all()
        return torch.stack(logits)

    def branches(self, row: int, ids_SL: Tensor) -> Tensor:
        """Run several continuations of one row; return logits `[S, L, V]`."""
        if row in self.wide:
            return self.wide[row].branches(0, ids_SL)
        return self.shared.branches(row, ids_SL)

    def leave(self, row: int) -> None:
        """Free a row."""
        if row in self.wide:
            self.wide.pop(row).close()
        else:
            self.shared.leave(row)

    def step(self, ids_B: Tensor) -> Tensor:
        """Run one token of every row in use; return logits `[B, V]`."""
        wide = {row: batch.step(ids_B[row : row + 1])[0] for row, batch in self.wide.items()}
        if self.shared.places:
            logits_BV = self.shared.step(ids_B)
        else:
            logits_V = next(iter(wide.values()))
            logits_BV = logits_V.expand(self.shared.count, -1).clone()
        for row, logits_V in wide.items():
            logits_BV[row] = logits_V
        return logits_BV

    def close(self) -> None:
        """Free all rows."""
        for batch in (self.shared, *self.wide.values()):
            batch.close()
        self.wide = {}
