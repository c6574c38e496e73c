"""Two-depth decoding of one batch, in buffers of fixed size, and the batches of an engine.

`method.injection` runs in them, with a cache that has static tensors instead of growing ones. Rows
of one prefill are padded on the right to end in one column. Columns are then in reading order, so
that causal attention needs no mask. A mask is needed only in two cases: above injection, for
separate or guided blocks, where memory has the first columns; and for windows shorter than the
text. Each row's answer continues in its own next column. There, positions decide which keys a query
sees, so a row can move to any batch that has room for it.

With independent blocks, keys and values of memory are copied in, and only prefixes are run.

Letters: B rows, P prefix columns or positions of one call, W slots per row, U restored states per
row, K columns or blocks per row, L layers, H head width, D width, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from threading import Lock

import torch
from torch import Tensor

from sedem.backbone.decoder import KeyAxis
from sedem.engine.device import (
    Pool,
    Replay,
    Upload,
    between_pieces,
    device_bytes,
    fill,
    free_bytes,
    mask_of,
    round_up,
    storage_bytes,
)
from sedem.engine.fused import FusedDecoder
from sedem.engine.interface import WIDE, AnswerInputs
from sedem.engine.kept import Kept
from sedem.errors import ConfigError, NoRoomError
from sedem.method.compressor import state_mask
from sedem.method.injection import RestoredBlocks, prefill, step

DeviceLock = Callable[[], AbstractContextManager[None]]
"""Reserves the device for one piece of work in buffers that only this thread uses."""

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


@dataclass(frozen=True)
class BatchSize:
    """The size of a batch.

    Attributes:
        slots: W; room for W * C restored states.
        steps: number of tokens that can be run after the prefix.
    """

    rows: int
    prefix: int
    slots: int
    steps: int

    def columns(self, states_per_slot: int) -> int:
        """Number of columns above injection, of all rows."""
        return self.rows * (self.slots * states_per_slot + self.prefix + self.steps)

    def holds(self, other: BatchSize) -> bool:
        """Whether the rows of a batch of another size fit."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(own >= theirs for own, theirs in pairs)


class StaticCache:
    """Keys and values of the layers below the injection layer, or of those above it.

    Rows have their own lengths: the index of each row's next column is kept on the device, where a
    captured step reads it. The caller moves on to the next column once every layer has stored this
    one, and tracks on the host whether a column is left.

    Args:
        layers: the numbers of the layers.
        biased: whether something may be added to the logits of text on columns.
        memory: number of columns before those of text, for keys and values that are copied in.

    Attributes:
        bias: added to the logits of later queries on each column `[B, K]`.
        next_column: index of the next column of each row `[B]`.
        state: the tensors that a step both reads and changes.
        buffers: all tensors.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        layers: range,
        rows: int,
        columns: int,
        *,
        biased: bool = False,
        memory: int = 0,
    ) -> None:
        layer, device = decoder.layers[0], decoder.device
        # Zeros, because NaN in a masked column would still spoil the weighted sum of values.
        shape = (len(layers), rows, layer.key_heads, columns, layer.head_width)
        self.keys = torch.zeros(shape, dtype=decoder.dtype, device=device)
        self.values = torch.zeros(shape, dtype=decoder.dtype, device=device)
        self.positions = torch.zeros(rows, columns, dtype=torch.long, device=device)
        self.valid = torch.zeros(rows, columns, dtype=torch.bool, device=device)
        self.bias = torch.zeros(rows, columns, device=device)
        self.next_column = torch.zeros(rows, dtype=torch.long, device=device)
        self.first, self.biased, self.memory = layers.start, biased, memory
        self.state = [self.positions, self.valid, self.next_column]
        self.buffers = [self.keys, self.values, self.bias, *self.state]
        self._extended = False

    @property
    def axis(self) -> KeyAxis:
        """All columns."""
        bias = self.bias if self.biased else None
        return KeyAxis(self.positions, self.valid, True, self.positions.shape[1], bias=bias)

    def begin(self, axis: KeyAxis) -> None:
        """Clear the cache and make these its first columns, including those of memory."""
        count = axis.positions.shape[1]
        self.valid.zero_()
        self.positions[:, :count] = axis.positions
        self.valid[:, :count] = axis.valid
        if axis.bias is not None:
            self.bias.zero_()
            self.bias[:, :count] = axis.bias
        self.next_column.fill_(count)
        self._extended = False

    def extend(self, positions_B1: Tensor) -> KeyAxis:
        """Make each row's next column valid; return all columns."""
        next_B1 = self.next_column[:, None]
        self.positions.scatter_(1, next_B1, positions_B1)
        self.valid.scatter_(1, next_B1, True)
        self._extended = True
        return self.axis

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Store a layer's keys and values: each row's next column, or the first ones of text.

        Returns:
            Those that attention sees: the whole cache, or the first columns and memory.
        """
        keys, values = self.of(layer)
        if self._extended:
            column = self.next_column[:, None, None, None].expand(key.shape)
            keys.scatter_(2, column, key)
            values.scatter_(2, column, value)
            return keys, values
        end = self.memory + key.shape[2]
        keys[:, :, self.memory : end] = key
        values[:, :, self.memory : end] = value
        return (keys[:, :, :end], values[:, :, :end]) if self.memory else (key, value)

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of a layer."""
        return self.keys[layer - self.first], self.values[layer - self.first]

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


class StaticBatch:
    """The buffers of one batch: the cache in which a prefill and steps run, and their inputs.

    Args:
        kept: provides the keys and values of independent blocks; None if blocks are not
            independent, and their states are restored here.

    Attributes:
        upload: holds all host inputs of a prefill, `slots` to `prefix_valid`.
        slots: memory of each row `[B, W, D]`.
        real: True where a restored state stands for a real token `[B, U]`.
        scores: score of each state's block `[B, U]`; -inf where there is none.
        number: number of each state's block among those of its row `[B, U]`.
        ids: the tokens of a step `[B]`.
        next_position: position of the next token `[B]`.
        logits: after the prefill or the last step `[B, V]`.
        used: 1 for a row in use, 0 for an empty one `[B]`. An empty row also runs, but no other row
            sees it.
        text: number of text columns that each row in use has filled at most, counted on the host.
        buffers: all tensors.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        size: BatchSize,
        kept: Kept | None = None,
        *,
        graph: bool = False,
        pool: Pool = None,
    ) -> None:
        self.decoder, self.size, self.kept, self._graph = decoder, size, kept, graph
        self.text: dict[int, int] = {}
        device, (vocabulary, width) = decoder.device, decoder.embedding.shape
        rows, states = size.rows, size.slots * decoder.states_per_slot
        slots, per_prefix = size.slots if kept is None else 0, (rows, size.prefix)
        self.upload = Upload(
            device,
            {
                "slots": ((rows, slots, width), torch.float32),
                "real": ((rows, states), torch.bool),
                "scores": ((rows, states), torch.float32),
                "number": ((rows, states), torch.long),
                "prefix": (per_prefix, torch.long),
                "prefix_valid": (per_prefix, torch.bool),
            },
        )
        inputs = self.upload.device
        self.slots, self.real = inputs["slots"], inputs["real"]
        self.scores, self.number = inputs["scores"], inputs["number"]
        self.ids = torch.zeros(rows, dtype=torch.long, device=device)
        self.next_position = torch.zeros_like(self.ids)
        self.used = torch.zeros_like(self.ids)
        self.logits = torch.zeros(rows, vocabulary, dtype=decoder.dtype, device=device)
        columns, inject_layer = size.prefix + size.steps, decoder.config.inject_layer
        self.lower = StaticCache(decoder, range(inject_layer), rows, columns)
        self.upper = StaticCache(
            decoder,
            range(inject_layer, decoder.depth),
            rows,
            states + columns,
            biased=decoder.guide is not None and bool(states),
            memory=0 if kept is None else states,
        )
        self.buffers = [*inputs.values(), self.ids, self.next_position, self.used, self.logits]
        self.buffers += [*self.lower.buffers, *self.upper.buffers]
        state = [self.next_position, *self.lower.state, *self.upper.state]
        self._prefill_replay = Replay(self.buffers, graph=graph, pool=pool)
        self.step_replay = Replay(self.buffers, state, graph=graph, pool=pool)

    def prefill(self, inputs: Sequence[AnswerInputs], lock: DeviceLock = nullcontext) -> None:
        """Start new answers in the first rows; the others are empty."""
        decoder, config, kept = self.decoder, self.decoder.config, self.kept
        host, sent = self.upload.host, self.upload.device
        rows = [*inputs, *([inputs[0]] * (self.size.rows - len(inputs)))]
        lengths = [len(row.prefix) for row in rows]
        with lock():
            self.upload.begin()
        fill(host["prefix"], [row.prefix for row in rows])
        host["prefix_valid"].numpy()[:] = mask_of(lengths, self.size.prefix)

        # The memory of each row. Independent blocks stand side by side, without their padding.
        per_slot = decoder.states_per_slot
        if kept is None:
            real = [state_mask(row.bank.slot_tokens(row.blocks), per_slot) for row in rows]
            sizes = [[real_KU.shape[1]] * len(real_KU) for real_KU in real]
            fill(host["slots"], [s.bank.memory(s.blocks).float().flatten(0, 1) for s in rows])
            fill(host["real"], [real_KU.flatten() for real_KU in real])
        else:
            sizes = [row.bank.restored_sizes(row.blocks, per_slot) for row in rows]
            host["real"].numpy()[:] = mask_of([sum(row) for row in sizes], self.real.shape[1])
            # Their keys and values, a few blocks at a time: all of a long memory would not fit what
            # is kept, and others have the device between them.
            done, total, few = 0, sum(len(row.blocks) for row in rows), kept.walk.together
            for place, own in enumerate(rows):
                column = 0
                for first in range(0, len(own.blocks), few):
                    group = own.blocks[first : first + few]
                    with lock():
                        for block in kept.fetch(own.bank, group):
                            columns = slice(column, column + block.shape[-2])
                            self.upper.keys[:, place, :, columns] = block[:, 0]
                            self.upper.values[:, place, :, columns] = block[:, 1]
                            column = columns.stop
                    done += len(group)
                    between_pieces(done, total)

        # The block and the score of each state, unless all blocks are one text, as in the paper.
        together = decoder.guide is None and config.block_context == "joint"
        if not together:
            repeats = [torch.tensor(row, dtype=torch.long) for row in sizes]
            number = [torch.arange(len(r)).repeat_interleave(r) for r in repeats]
            pairs = zip(rows, repeats, strict=True)
            fill(host["number"], number)
            fill(host["scores"], [s.scores.repeat_interleave(r) for s, r in pairs], -torch.inf)

        # Only a graph always has the same shape. Otherwise, shared padding is not run.
        width = self.size.prefix if self._graph else max(lengths)
        prefix_BP, valid_BP = (sent[name][:, :width] for name in ("prefix", "prefix_valid"))
        with lock():
            self.upload.send()
            # What a question that is read once has computed, if that is still known of all rows.
            below_BPD = None
            if kept is not None and config.read_once and not self._graph:
                keys = (tuple(row.prefix.tolist()) for row in rows if row.blocks)
                read = [one for key in keys if (one := kept.prefixes.get(key)) is not None]
                if len(read) == len(rows):
                    below_BPD = read[0].hidden.new_zeros(len(read), width, read[0].hidden.shape[1])
                    for row, one in enumerate(read):
                        columns = slice(0, len(one.hidden))
                        below_BPD[row, columns] = one.hidden
                        self.lower.keys[:, row, :, columns] = one.keys
                        self.lower.values[:, row, :, columns] = one.values
            for run in self._prefill_replay.runs():
                with run:
                    blocks = None
                    if not together:
                        guide = decoder.guide if self.size.slots else None
                        bias_BU = None if guide is None else guide(self.scores)
                        room = config.states_per_block if config.read_once else None
                        blocks = RestoredBlocks(self.number, config.block_context, bias_BU, room)
                    filled = prefill(
                        decoder,
                        config.inject_layer,
                        prefix_BP,
                        valid_BP,
                        decoder.decompress(self.slots) if kept is None else None,
                        self.real,
                        blocks=blocks,
                        cache=self,
                        padded=False,
                        below_BPD=below_BPD,
                        last=True,
                    )
                    self.logits.copy_(decoder.logits(filled.prefix[:, 0]))
            self.used.fill_(1)
            self.text = dict.fromkeys(range(self.size.rows), self.size.prefix)
            self.clear(slice(len(inputs), self.size.rows))

    def step(self, ids_B: Tensor) -> None:
        """Run one token `[B]` of each row.

        Raises:
            ConfigError: the batch has no room for another step.
        """
        if max(self.text.values(), default=0) == self.size.prefix + self.size.steps:
            raise ConfigError(
                f"the answer has filled its room for {self.size.steps} tokens after its prefix; "
                "start it with a higher limit"
            )
        self.text = {row: columns + 1 for row, columns in self.text.items()}
        self.ids.copy_(ids_B)
        decoder = self.decoder.steps or self.decoder
        for run in self.step_replay.runs():
            with run:
                states_BD = step(decoder, decoder.config.inject_layer, self.ids, self)
                self.logits.copy_(decoder.logits(states_BD))

    def begin(self, next_B: Tensor) -> None:
        """Set the position of the first token after a prefill; see `injection.Cache`."""
        self.next_position.copy_(next_B)

    def advance(self) -> None:
        """Go on to the next token of each row in use; see `injection.Cache`."""
        # An empty row stays where it is, and writes the same column again.
        for counter in (self.lower.next_column, self.upper.next_column, self.next_position):
            counter.add_(self.used)

    def copy_rows(self, other: StaticBatch, rows: Mapping[int, int]) -> None:
        """Continue rows of another batch.

        Args:
            rows: the row of `other` for each row of this batch that continues one.
        """
        for row, other_row in rows.items():
            self.lower.copy_row(row, other.lower, other_row)
            self.upper.copy_row(row, other.upper, other_row)
            self.next_position[row] = other.next_position[other_row]
            self.used[row].fill_(1)
            self.text[row] = other.text[other_row]

    def clear(self, rows: slice) -> None:
        """Make rows empty."""
        for row in range(*rows.indices(self.size.rows)):
            self.text.pop(row, None)
        # The contents of an empty row stay. It writes its first column at every step, so that its
        # next one is never out of range.
        for counter in (self.used, self.lower.next_column, self.upper.next_column):
            counter[rows] = 0


# Batches in use, and idle ones


class Batches:
    """Makes batches, and keeps idle ones for reuse; any thread may take and return them.

    Args:
        limit: bytes that batches and kept keys and values share; None means what is free.

    Attributes:
        pool: memory that graphs share; None without graphs.
        idle: batches that no answer uses, the most recently used last.
    """

    def __init__(
        self, decoder: FusedDecoder, kept: Kept, *, graphs: bool, limit: int | None = None
    ) -> None:
        self.decoder, self.kept, self.limit = decoder, kept, limit
        self.pool: Pool = torch.cuda.graph_pool_handle() if graphs else None
        self.idle: list[StaticBatch] = []
        self.active: list[StaticBatch] = []
        # The sizes of batches that are being made: their memory is spoken for.
        self._made: list[BatchSize] = []
        self._guard = Lock()
        self._graphs = graphs
        self._idle_share = device_bytes(decoder.device) // IDLE_SHARE

    @property
    def independent(self) -> bool:
        """Whether blocks are independent."""
        return self.decoder.config.block_context == "independent"

    def take(self, size: BatchSize, *, grown: bool = False) -> StaticBatch:
        """Return an idle batch of this size, or a new one if there is none.

        Args:
            grown: whether answers that run have outgrown their batch, so that they cannot wait.

        Raises:
            ConfigError: it has no room, even alone.
            NoRoomError: it has no room beside those that are in use.
        """
        with self._guard:
            batch = next((batch for batch in self.idle if batch.size == size), None)
            if batch is not None:
                self.idle.remove(batch)
                self.active.append(batch)
                return batch
            # Free idle batches, then what is kept, until a new one has room.
            if self.limit is not None:
                needed = needed_bytes(self.decoder, size)
                short = self.limit // SHORT_SHARE if self.exceeds(size.slots) else 0
                if needed > (most := self.limit - short):
                    raise ConfigError(
                        f"keys and values of the selected blocks need {needed:,} bytes of memory, "
                        f"{most:,} are allowed, which is enough for {self.most_blocks() or 0:,} "
                        "blocks; use a smaller k, or give more memory"
                    )
                while self.idle and self._used() + needed > self.limit:
                    del self.idle[0]
                used = self._used()
                if used + needed > self.limit and not grown:
                    raise NoRoomError(
                        f"keys and values of the selected blocks need {needed:,} bytes of memory, "
                        f"and other answers use {used:,} of {self.limit:,}; ask again later"
                    )
                self.kept.limit_to(self.limit - used - needed)
            self._made.append(size)
        try:
            needed, free = cache_bytes(self.decoder, size), free_bytes(self.decoder.device)
            if needed > free:
                raise ConfigError(
                    f"keys and values of the selected blocks need {needed:,} bytes of memory, "
                    f"{free:,} are free; use a smaller k"
                )
            kept = self.kept if self.independent else None
            batch = StaticBatch(self.decoder, size, kept, graph=self._graphs, pool=self.pool)
        finally:
            with self._guard:
                self._made.remove(size)
                if batch is not None:
                    self.active.append(batch)
        return batch

    def give_back(self, batch: StaticBatch) -> None:
        """Make a batch idle, unless it is wide; above the limit, the oldest idle ones are freed."""
        with self._guard:
            self.active.remove(batch)
            if not self.exceeds(batch.size.slots):
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
            size = BatchSize(1, USUAL_PREFIX, round_up(blocks * slots, 16), 0)
            return needed_bytes(self.decoder, size)

        most = self.limit - self.limit // SHORT_SHARE
        return bisect_right(range(MOST_BLOCKS), most, key=needed) - 1

    def _used(self) -> int:
        """Bytes of all batches, and of those that are being made."""
        sizes = [*self._made, *(batch.size for batch in (*self.active, *self.idle))]
        return sum(needed_bytes(self.decoder, size) for size in sizes)

    def release(self) -> None:
        """Free idle batches."""
        with self._guard:
            self.idle = []
        # A pool cannot be used again after its last graph is freed.
        self.pool = torch.cuda.graph_pool_handle() if self._graphs else None

    def exceeds(self, slots: int) -> bool:
        """Whether a row with so many slots has a batch of its own.

        Others would be padded to its memory. It is never moved: both batches would have to fit.
        """
        return self.independent and slots * self.decoder.states_per_slot > WIDE

    def slots_of(self, inputs: AnswerInputs) -> int:
        """Number of slots that a row needs in its batch."""
        if not self.independent:
            return inputs.bank.slot_tokens(inputs.blocks).numel()
        per_slot = self.decoder.states_per_slot
        return -(-sum(inputs.bank.restored_sizes(inputs.blocks, per_slot)) // per_slot)


def cache_bytes(decoder: FusedDecoder, size: BatchSize) -> int:
    """Bytes of the keys and values of a batch."""
    columns, states = size.prefix + size.steps, size.slots * decoder.states_per_slot
    each = len(decoder.layers) * columns + len(decoder.upper) * states
    first = decoder.layers[0]
    width = 2 * first.key_heads * first.head_width * decoder.dtype.itemsize
    return size.rows * each * width


def needed_bytes(decoder: FusedDecoder, size: BatchSize) -> int:
    """Bytes that a batch takes while it runs: its caches, and what one layer makes of them."""
    first = decoder.layers[0]
    copied = 2 * first.key_heads * first.head_width * decoder.dtype.itemsize
    biases = 2 * BRANCHED * decoder.dtype.itemsize
    columns = replace(size, rows=1).columns(decoder.states_per_slot)
    return cache_bytes(decoder, size) + columns * (copied + biases)


def buffers_of(batches: Iterable[StaticBatch]) -> list[Tensor]:
    """Return the tensors of several batches."""
    return [buffer for batch in batches for buffer in batch.buffers]
