"""Two-depth decoding of one batch, in buffers of fixed size.

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

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from sedem.backbone.decoder import KeyAxis
from sedem.engine.device import (
    Pool,
    Replay,
    Upload,
    between_pieces,
    fill,
    fill_lengths,
)
from sedem.engine.fused import FusedDecoder
from sedem.engine.interface import AnswerInputs
from sedem.engine.kept import Kept, Prefixes, ReadPrefix
from sedem.errors import ConfigError
from sedem.guidance.branches import run_branches
from sedem.method.compressor import state_mask
from sedem.method.injection import Blocks, prefill, step

DeviceLock = Callable[[], AbstractContextManager[None]]
"""Reserves the device for one piece of work in buffers that only this thread uses."""


@dataclass(frozen=True)
class Bucket:
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

    def holds(self, other: Bucket) -> bool:
        """Whether the rows of a batch of another size fit."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(own >= theirs for own, theirs in pairs)


class StaticCache:
    """Keys and values of the layers below the injection layer, or of those above it.

    Rows have their own lengths: the index of each row's next column is kept on the device, where a
    captured step reads it. The caller tracks on the host whether a column is left.

    Args:
        layers: the numbers of the layers.
        biased: whether something may be added to the logits of text on columns.
        memory: number of columns before those of text, for keys and values that are copied in.

    Attributes:
        bias: added to the logits of later queries on each column `[B, K]`.
        next_column: index of the next column of each row `[B]`.
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
        self._extended = False

    @property
    def state(self) -> list[Tensor]:
        """The tensors that a step both reads and changes."""
        return [self.positions, self.valid, self.next_column]

    @property
    def buffers(self) -> list[Tensor]:
        """All tensors."""
        return [self.keys, self.values, self.bias, *self.state]

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
        """Make each row's next column valid, until `advance` moves on; return all columns."""
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

    def store_memory(self, row: int, column: int, block: Tensor) -> None:
        """Copy keys and values `[L, 2, heads, P, H]` of a block into columns of memory."""
        columns = slice(column, column + block.shape[-2])
        self.keys[:, row, :, columns] = block[:, 0]
        self.values[:, row, :, columns] = block[:, 1]

    def advance(self, used_B: Tensor) -> None:
        """Move to the next column, once every layer has stored this one.

        Args:
            used_B: 1 for a row in use. The others get 0: they write the same column again.
        """
        self.next_column.add_(used_B)

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

    Attributes:
        upload: holds all host inputs of a prefill, `slots` to `prefix_valid`.
        slots: memory of each row `[B, W, D]`.
        real: True where a restored state stands for a real token `[B, U]`.
        scores: score of each state's block `[B, U]`; -inf where there is none.
        number: number of each state's block among those of its row `[B, U]`.
        prefix: token ids, padded on the right `[B, P]`; P is that of the last prefill.
        prefix_valid: False where the prefix is padding.
        ids: the tokens of a step `[B]`.
        next_position: position of the next token `[B]`.
        logits: after the prefill or the last step `[B, V]`.
        used: 1 for a row in use, 0 for an empty one `[B]`. An empty row also runs, but no other row
            sees it.
        text: number of text columns that each row in use has filled at most, counted on the host.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        bucket: Bucket,
        *,
        graph: bool = False,
        pool: Pool = None,
    ) -> None:
        self.decoder = decoder
        self.bucket = bucket
        self._graph = graph
        self.text: dict[int, int] = {}
        device, vocabulary = decoder.device, decoder.embedding.shape[0]
        rows, states = bucket.rows, bucket.slots * decoder.states_per_slot
        width, per_prefix = decoder.embedding.shape[1], (rows, bucket.prefix)
        self.upload = Upload(
            device,
            {
                "slots": ((rows, self._own_slots(), width), torch.float32),
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
        self.prefix, self.prefix_valid = inputs["prefix"], inputs["prefix_valid"]
        self.ids = torch.zeros(rows, dtype=torch.long, device=device)
        self.next_position = torch.zeros_like(self.ids)
        self.used = torch.zeros_like(self.ids)
        self.logits = torch.zeros(rows, vocabulary, dtype=decoder.dtype, device=device)
        columns, inject_layer = bucket.prefix + bucket.steps, decoder.config.inject_layer
        self.lower = StaticCache(decoder, range(inject_layer), rows, columns)
        self.upper = StaticCache(
            decoder,
            range(inject_layer, decoder.depth),
            rows,
            states + columns,
            biased=decoder.guide is not None and bool(states),
            memory=states - self._own_slots() * decoder.states_per_slot,
        )
        state = [self.next_position, *self.lower.state, *self.upper.state]
        self._replay_prefill = Replay(self.buffers, graph=graph, pool=pool)
        self._replay_step = Replay(self.buffers, state, graph=graph, pool=pool)

    @property
    def buffers(self) -> list[Tensor]:
        """All tensors."""
        caches = [*self.lower.buffers, *self.upper.buffers]
        own = [*self.upload.device.values(), self.ids, self.next_position, self.used, self.logits]
        return [*own, *caches]

    def prefill(self, inputs: Sequence[AnswerInputs], lock: DeviceLock = nullcontext) -> None:
        """Start new answers in the first rows; the others are empty."""
        rows = [*inputs, *([inputs[0]] * (self.bucket.rows - len(inputs)))]
        prefixes = [row.prefix for row in rows]
        with lock():
            self.upload.begin()
        host = self.upload.host
        fill(host["prefix"], prefixes)
        fill_lengths(host["prefix_valid"], [len(ids) for ids in prefixes])
        self._load_memory(rows, lock)
        # Only a graph always has the same shape. Otherwise, shared padding is not run.
        width = self.bucket.prefix if self._graph else max(map(len, prefixes))
        sent = self.upload.device
        with lock():
            self.upload.send()
            self.prefix, self.prefix_valid = (
                sent[name][:, :width] for name in ("prefix", "prefix_valid")
            )
            self._replay_prefill(self._run_prefill)
            self.used.fill_(1)
            self.text = dict.fromkeys(range(self.bucket.rows), self.bucket.prefix)
            self.clear(slice(len(inputs), self.bucket.rows))

    def step(self, ids_B: Tensor) -> None:
        """Run one token `[B]` of each row.

        Raises:
            ConfigError: the batch has no room for another step.
        """
        if max(self.text.values(), default=0) == self.bucket.prefix + self.bucket.steps:
            raise ConfigError(
                f"the answer has filled its room for {self.bucket.steps} tokens after its prefix; "
                "start it with a higher limit"
            )
        self.text = {row: columns + 1 for row, columns in self.text.items()}
        self.ids.copy_(ids_B)
        self._replay_step(self._run_step)

    def branches(self, row: int, ids_SL: Tensor) -> Tensor:
        """Run several continuations of a row, none of which is stored; `guidance.branches`.

        Returns:
            Logits after each token `[S, L, V]`.
        """
        decoder = self.decoder
        states_SLD = run_branches(decoder, decoder.config.inject_layer, ids_SL, self, row)
        return decoder.logits(states_SLD)

    def begin(self, next_B: Tensor) -> None:
        """Set the position of the first token after a prefill; see `injection.Cache`."""
        self.next_position.copy_(next_B)

    def advance(self) -> None:
        """Go on to the next token of each row in use; see `injection.Cache`."""
        self.lower.advance(self.used)
        self.upper.advance(self.used)
        self.next_position.add_(self.used)

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
        for row in range(*rows.indices(self.bucket.rows)):
            self.text.pop(row, None)
        # The contents of an empty row stay. It writes its first column at every step, so that its
        # next one is never out of range.
        for counter in (self.used, self.lower.next_column, self.upper.next_column):
            counter[rows] = 0

    def _own_slots(self) -> int:
        """Number of slots per row that this batch restores itself."""
        return self.bucket.slots

    def _load_memory(self, rows: Sequence[AnswerInputs], lock: DeviceLock) -> None:
        """Put the memory of each row into the upload to the device."""
        host, per_slot = self.upload.host, self.decoder.states_per_slot
        real = [state_mask(row.bank.slot_tokens(row.blocks), per_slot) for row in rows]
        fill(host["slots"], [s.bank.memory(s.blocks).float().flatten(0, 1) for s in rows])
        fill(host["real"], [real_KU.flatten() for real_KU in real])
        self._load_blocks(rows, [[real_KU.shape[1]] * len(real_KU) for real_KU in real])

    def _load_blocks(self, rows: Sequence[AnswerInputs], sizes: Sequence[Sequence[int]]) -> None:
        """Load the block number and score of each state, where they matter."""
        if self._together:
            return
        repeats = [torch.tensor(row, dtype=torch.long) for row in sizes]
        pairs = list(zip(rows, repeats, strict=True))
        host = self.upload.host
        fill(host["number"], [torch.arange(len(r)).repeat_interleave(r) for r in repeats])
        scores = [s.scores.repeat_interleave(r) for s, r in pairs]
        fill(host["scores"], scores, padding=-torch.inf)

    @property
    def _together(self) -> bool:
        """Whether blocks are one text, as in the paper."""
        return self.decoder.guide is None and self.decoder.config.block_context == "joint"

    def _restored(self) -> Tensor | None:
        """Restored states of each row `[B, U, D]`; None if their keys and values are here."""
        return self.decoder.decompress(self.slots)

    def _below(self) -> Tensor | None:
        """States of the prefixes at the injection layer, if those layers have run."""
        return None

    def _run_prefill(self) -> None:
        decoder, blocks = self.decoder, None
        config = decoder.config
        if not self._together:
            bias_BU = decoder.guide(self.scores) if decoder.guide and self.bucket.slots else None
            room = config.states_per_block if config.read_once else None
            blocks = Blocks(self.number, config.block_context, bias_BU, room)
        filled = prefill(
            decoder,
            config.inject_layer,
            self.prefix,
            self.prefix_valid,
            self._restored(),
            self.real,
            blocks=blocks,
            cache=self,
            padded=False,
            below_BPD=self._below(),
            last=True,
        )
        self.logits.copy_(decoder.logits(filled.prefix[:, 0]))

    def _run_step(self) -> None:
        decoder = self.decoder.steps or self.decoder
        states_BD = step(decoder, decoder.config.inject_layer, self.ids, self)
        self.logits.copy_(decoder.logits(states_BD))


class IndependentBatch(StaticBatch):
    """The buffers of one batch with independent blocks; see `StaticBatch`.

    Attributes:
        read: what is already computed for the prefix of each row; empty if any is missing.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        bucket: Bucket,
        kept: Kept,
        prefixes: Prefixes,
        *,
        graph: bool = False,
        pool: Pool = None,
    ) -> None:
        self.kept, self.prefixes = kept, prefixes
        self.read: list[ReadPrefix] = []
        super().__init__(decoder, bucket, graph=graph, pool=pool)

    def _own_slots(self) -> int:
        return 0

    def _load_memory(self, rows: Sequence[AnswerInputs], lock: DeviceLock) -> None:
        """Copy the keys and values of each row's blocks into the first columns."""
        sizes = [self.kept.walk.sizes(row.bank, row.blocks) for row in rows]
        fill_lengths(self.upload.host["real"], [sum(row) for row in sizes])
        self._load_blocks(rows, sizes)
        reusable = self.decoder.config.read_once and not self._graph
        asked = [row.prefix for row in rows if row.blocks] if reusable else []
        read = [one for ids_P in asked if (one := self.prefixes.find(ids_P)) is not None]
        self.read = read if len(read) == len(rows) else []
        done, total, together = 0, sum(len(row.blocks) for row in rows), self.kept.walk.together
        for index, row in enumerate(rows):
            column = 0
            for first in range(0, len(row.blocks), together):
                # A few at a time: all of a long memory would not fit what is kept, and others
                # have the device between them.
                with lock():
                    group = row.blocks[first : first + together]
                    for block in self.kept.fetch(row.bank, group):
                        self.upper.store_memory(index, column, block)
                        column += block.shape[-2]
                done += len(group)
                between_pieces(done, total)

    def _restored(self) -> Tensor | None:
        return None

    def _below(self) -> Tensor | None:
        if not self.read:
            return None
        width = self.decoder.embedding.shape[1]
        hidden_BPD = self.read[0].hidden.new_zeros(*self.prefix.shape, width)
        for row, one in enumerate(self.read):
            columns = slice(0, len(one.hidden))
            hidden_BPD[row, columns] = one.hidden
            self.lower.keys[:, row, :, columns] = one.keys
            self.lower.values[:, row, :, columns] = one.values
        return hidden_BPD
