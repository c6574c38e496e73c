"""Answers that run together: rows join, finished rows leave, long answers get more room.

Letters: B rows, J rows that join, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from sedem.engine.batch import Bucket, StaticBatch
from sedem.engine.batches import FIRST_STEPS, Batches, round_up
from sedem.engine.interface import Start
from sedem.engine.rows_apart import RowsApart
from sedem.errors import ConfigError

COLUMNS = 64
"""Rounding unit of prefix columns and slots of rows that join, for few moves and few graphs."""


class RunningBatch:
    """Rows of one static batch at a time; they move to another batch when it fits them better.

    Callers know a row by its number, which never changes. Moves change its place in the batch.

    Args:
        batches: provides the batches.
        count: B, the maximum number of rows.
        lock: reserves the buffers for one thread.

    Attributes:
        batch: the batch that runs now; None before the first row.
        places: the place of each row in use in the batch.
        needs: the size that each row in use needs, as a batch of one row.
    """

    def __init__(
        self, batches: Batches, count: int, lock: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.batches, self.count, self.lock = batches, count, lock
        self.batch: StaticBatch | None = None
        self.places: dict[int, int] = {}
        self.needs: dict[int, Bucket] = {}
        self._max_steps: dict[int, int] = {}
        # The row at each place and the place of each row, on the device; 0 where there is none.
        self._row_of = self._place_of = torch.zeros(0, dtype=torch.long)

    @torch.no_grad()
    def begin(self, starts: Sequence[Start], limit: int) -> Tensor:
        """Prefill all rows at once, directly in the batch that runs them.

        Args:
            starts: one for each row.
            limit: token limit of an answer.

        Returns:
            Logits after the prefixes `[B, V]`.
        """
        max_steps = max(limit - 1, 1)
        with self.lock():
            bucket = self.batches.bucket_of(starts, max_steps)
            self.batch = self.batches.take(bucket)
            self.batch.prefill(starts)
            rows = range(len(starts))
            self.needs = dict.fromkeys(rows, replace(bucket, rows=1))
            self._max_steps = dict.fromkeys(rows, max_steps)
            self._place({row: row for row in rows}, self.batch)
            return self.batch.logits[self._place_of]

    @torch.no_grad()
    def join(self, rows: Sequence[int], starts: Sequence[Start], limits: Sequence[int]) -> Tensor:
        """Prefill some rows in a separate batch, and copy them into the running one.

        Args:
            rows: rows that are not in use.
            starts: what the answer of each starts from.
            limits: step limit of each answer.

        Returns:
            Logits after the prefixes `[J, V]`.
        """
        with self.lock():
            prefilled = self.batches.take(self.batches.bucket_of(starts, 0))
            try:
                prefilled.prefill(starts)
                needs = {
                    row: self._need(prefilled.bucket, limit)
                    for row, limit in zip(rows, limits, strict=True)
                }
                self._fit({**self.needs, **needs})
                assert self.batch is not None
                free = set(range(self.batch.bucket.rows)) - set(self.places.values())
                places = dict(zip(rows, sorted(free), strict=False))
                self._copy(prefilled, list(places.values()))
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

    def keep(self, live: Sequence[int]) -> None:
        """Free all other rows."""
        for row in self.places.keys() - set(live):
            self.leave(row)

    @torch.no_grad()
    def step(self, ids_B: Tensor) -> Tensor:
        """Run one token of every row in use.

        Args:
            ids_B: tokens of all rows.

        Returns:
            Logits `[B, V]`; those of other rows are undefined.

        Raises:
            ConfigError: an answer is longer than its limit.
        """
        with self.lock():
            self._fit({row: self._grown(row) for row in self.places})
            assert self.batch is not None
            self.batch.step(ids_B[self._row_of])
            return self.batch.logits[self._place_of]

    def close(self) -> None:
        """Give the batch back."""
        with self.lock():
            if self.batch is not None:
                self.batches.give_back(self.batch)
            self.batch = None

    def _copy(self, prefilled: StaticBatch, places: Sequence[int]) -> None:
        """Copy the rows of another batch to free places, which stay free if that fails."""
        assert self.batch is not None
        try:
            self.batch.copy_rows(prefilled, {place: row for row, place in enumerate(places)})
        except BaseException:
            for place in places:
                self.batch.clear(slice(place, place + 1))
            raise

    def _need(self, prefilled: Bucket, limit: int) -> Bucket:
        """The size that a joining row needs, from the batch in which it was prefilled."""
        return replace(
            prefilled,
            rows=1,
            prefix=round_up(prefilled.prefix, COLUMNS),
            slots=round_up(prefilled.slots, COLUMNS),
            steps=round_up(min(limit, FIRST_STEPS), 16),
        )

    def _grown(self, row: int) -> Bucket:
        """The size that a row needs for its next step; steps up to double once they are used up."""
        assert self.batch is not None
        need, max_steps = self.needs[row], self._max_steps[row]
        if self.batch.text[self.places[row]] < need.prefix + need.steps:
            return need
        if need.steps >= max_steps:
            raise ConfigError(f"an answer is longer than {max_steps} steps; start it with more")
        return replace(need, steps=round_up(min(max_steps, 2 * need.steps), 16))

    def _fit(self, needs: dict[int, Bucket]) -> None:
        """Move to another batch if these rows do not fit, or if half the size is enough."""
        self.needs.update((row, needs[row]) for row in self.places)
        first = next(iter(needs.values()))
        needed = Bucket(
            rows=round_up(len(needs), 1),
            prefix=max(need.prefix for need in needs.values()),
            slots=max(need.slots for need in needs.values()),
            steps=max(need.steps for need in needs.values()),
            pieces=first.pieces,
        )
        if self.batch is not None:
            old = self.batch.bucket
            if not old.holds(needed):
                # Twice the rows at once, so that a burst of questions causes few moves.
                more = needed.rows > old.rows
                rows = max(needed.rows, min(self.count, 2 * old.rows)) if more else old.rows
                needed = replace(needed, rows=rows)
            elif 2 * self._size(needed) > self._size(old):
                return
        self._move(needed)

    def _size(self, bucket: Bucket) -> int:
        columns = bucket.slots * self.batches.decoder.states_per_slot + bucket.prefix + bucket.steps
        return bucket.rows * columns

    def _move(self, bucket: Bucket) -> None:
        """Continue in another batch; if that fails, the rows stay where they are."""
        old, new = self.batch, self.batches.take(bucket)
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
    """Rows that share a running batch; rows whose memory is in pieces run apart.

    Args:
        running: the batch.
        apart: runs the other rows.
    """

    def __init__(self, running: RunningBatch, apart: RowsApart) -> None:
        self.running, self.apart = running, apart

    def join(self, rows: Sequence[int], starts: Sequence[Start], limits: Sequence[int]) -> Tensor:
        """Prefill some rows; return logits after the prefixes `[J, V]`."""
        pieces = self.running.batches.bucket_of(starts, 0).pieces
        return (self.apart if pieces else self.running).join(rows, starts, limits)

    def leave(self, row: int) -> None:
        """Free a row."""
        (self.apart if row in self.apart.steps else self.running).leave(row)

    def step(self, ids_B: Tensor) -> Tensor:
        """Run one token of every row in use; return logits `[B, V]`."""
        if not self.running.places:
            return self.apart.step(ids_B)
        logits_BV = self.running.step(ids_B)
        for row, logits_V in self.apart.step_each(ids_B).items():
            logits_BV[row] = logits_V
        return logits_BV
