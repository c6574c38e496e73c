"""Two-depth decoding of one batch, in buffers of fixed size.

This is `method.injection` with static tensors instead of growing ones. Rows of one prefill are
padded on the right to end in one column. Columns are then in reading order, so that causal
attention needs no mask. A mask is needed only in two cases: above injection, for separate or guided
blocks, where memory has the first columns; and for windows shorter than the text. Each row's answer
continues in its own next column. There, positions decide which keys a query sees, so a row can move
to any batch that has room for it.

With independent blocks, keys and values of memory are copied in, and only prefixes are run. The
equations are those of `method.injection.prefill` and `method.injection.step`.

Letters: B rows, P prefix columns or positions of one call, W slots per row, U restored states per
row, K columns or blocks per row, L layers, H head width, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sedem.backbone.masks import KeyAxis
from sedem.engine.device import (
    Pool,
    Replay,
    Shape,
    Upload,
    between_pieces,
    fill,
    fill_lengths,
)
from sedem.engine.fused import FusedDecoder, biases_of, in_reading_order, run_layers
from sedem.engine.interface import AnswerInputs
from sedem.engine.kept import Kept
from sedem.engine.prefixes import Prefixes, ReadPrefix
from sedem.errors import ConfigError
from sedem.guidance.branches import branch_columns
from sedem.guidance.independent import prefix_positions
from sedem.method.compressor import state_mask
from sedem.method.injection import positions

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

    def holds(self, other: Bucket) -> bool:
        """Whether the rows of a batch of another size fit."""
        return all(
            own >= theirs
            for own, theirs in (
                (self.rows, other.rows),
                (self.prefix, other.prefix),
                (self.slots, other.slots),
                (self.steps, other.steps),
            )
        )


class StaticCache:
    """Keys and values of the layers below the injection layer, or of those above it.

    Rows have their own lengths: the index of each row's next column is kept on the device, where a
    captured step reads it. The caller tracks on the host whether a column is left.

    Args:
        memory: number of columns before those of text, for keys and values that are copied in.

    Attributes:
        bias: added to the logits of later queries on each column `[B, K]`.
        next_column: index of the next column of each row `[B]`.
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
        memory: int = 0,
    ) -> None:
        # Zeros, because NaN in a masked column would still spoil the weighted sum of values.
        shape = (layers, rows, heads, columns, width)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.positions = torch.zeros(rows, columns, dtype=torch.long, device=device)
        self.valid = torch.zeros(rows, columns, dtype=torch.bool, device=device)
        self.bias = torch.zeros(rows, columns, device=device)
        self.next_column = torch.zeros(rows, dtype=torch.long, device=device)
        self.memory = memory

    @property
    def state(self) -> list[Tensor]:
        """The tensors that a step both reads and changes."""
        return [self.positions, self.valid, self.next_column]

    @property
    def buffers(self) -> list[Tensor]:
        """All tensors."""
        return [self.keys, self.values, self.bias, *self.state]

    def begin(
        self,
        positions_BP: Tensor,
        valid_BP: Tensor,
        block_BP: Tensor | None = None,
        bias_BP: Tensor | None = None,
        span: int | None = None,
    ) -> KeyAxis:
        """Clear the cache and make these its first columns, including those of memory.

        Args:
            valid_BP: False where a column is padding.
            block_BP: their blocks, as in `KeyAxis`; only the prefill needs them.
            bias_BP: added to the logits of text on them; None adds nothing, here and in later
                steps.
            span: the most positions from the first to the last, if columns are in reading order
                with padding last; None if they are not.

        Returns:
            The axis of these columns.
        """
        count = positions_BP.shape[1]
        self.valid.zero_()
        self.positions[:, :count] = positions_BP
        self.valid[:, :count] = valid_BP
        if bias_BP is not None:
            self.bias.zero_()
            self.bias[:, :count] = bias_BP
        self.next_column.fill_(count)
        return KeyAxis(positions_BP, valid_BP, span is None, span or count, block_BP, bias_BP)

    def store_prefill(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the first columns of text; attention sees them and memory."""
        end = self.memory + key.shape[2]
        self.keys[layer, :, :, self.memory : end] = key
        self.values[layer, :, :, self.memory : end] = value
        if not self.memory:
            return key, value
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def store_memory(self, row: int, column: int, block: Tensor) -> None:
        """Copy keys and values `[L, 2, heads, P, H]` of a block into columns of memory."""
        columns = slice(column, column + block.shape[-2])
        self.keys[:, row, :, columns] = block[:, 0]
        self.values[:, row, :, columns] = block[:, 1]

    def extend(self, positions_B1: Tensor, *, biased: bool = False) -> KeyAxis:
        """Make each row's next column valid; `advance` moves on to the one after it.

        Returns:
            The axis of all columns.
        """
        next_B1 = self.next_column[:, None]
        self.positions.scatter_(1, next_B1, positions_B1)
        self.valid.scatter_(1, next_B1, True)
        return self.axis(biased=biased)

    def axis(self, *, biased: bool) -> KeyAxis:
        """Return the axis of all columns."""
        bias = self.bias if biased else None
        return KeyAxis(self.positions, self.valid, True, self.positions.shape[1], bias=bias)

    def joined(self, row: int, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return all columns of a row and some new ones, which are not stored."""
        own = self.keys[layer, row : row + 1], self.values[layer, row : row + 1]
        return torch.cat([own[0], key], dim=2), torch.cat([own[1], value], dim=2)

    def store_step(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the next column of each row in a layer; attention sees the whole cache."""
        column = self.next_column[:, None, None, None].expand(key.shape)
        self.keys[layer].scatter_(2, column, key)
        self.values[layer].scatter_(2, column, value)
        return self.keys[layer], self.values[layer]

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
    """The buffers of one batch, and the prefill and step that run in them.

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
        self.upload = Upload(device, self._fields())
        inputs = self.upload.device
        self.slots, self.real = inputs["slots"], inputs["real"]
        self.scores, self.number = inputs["scores"], inputs["number"]
        self.prefix, self.prefix_valid = inputs["prefix"], inputs["prefix_valid"]
        self.ids = torch.zeros(rows, dtype=torch.long, device=device)
        self.next_position = torch.zeros_like(self.ids)
        self.used = torch.zeros_like(self.ids)
        self.logits = torch.zeros(rows, vocabulary, dtype=decoder.dtype, device=device)
        self.lower, self.upper = self._make_caches(bucket.prefix + bucket.steps, states)
        state = [self.next_position, *self.lower.state, *self.upper.state]
        self._replay_prefill = Replay(self.buffers, graph=graph, pool=pool)
        self._replay_step = Replay(self.buffers, state, graph=graph, pool=pool)

    @property
    def buffers(self) -> list[Tensor]:
        """All tensors."""
        caches = [*self.lower.buffers, *self.upper.buffers]
        own = [*self.upload.device.values(), self.ids, self.next_position, self.used, self.logits]
        return [*own, *caches]

    @property
    def steps_left(self) -> int:
        """Number of steps that still fit."""
        room = self.bucket.prefix + self.bucket.steps
        return room - max(self.text.values(), default=0)

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
        with lock():
            self._run_loaded(prefixes)
            self.clear(slice(len(inputs), self.bucket.rows))

    def _run_loaded(self, prefixes: Sequence[Tensor]) -> None:
        """Run the prefixes once everything is in the upload."""
        self.upload.send()
        # Only a graph always has the same shape. Otherwise, shared padding is not run.
        width = self.bucket.prefix if self._graph else max(map(len, prefixes))
        sent = self.upload.device
        self.prefix, self.prefix_valid = (
            sent[name][:, :width] for name in ("prefix", "prefix_valid")
        )
        self._replay_prefill(self._run_prefill)
        self.used.fill_(1)
        self.text = dict.fromkeys(range(self.bucket.rows), self.bucket.prefix)

    def step(self, ids_B: Tensor) -> None:
        """Run one token `[B]` of each row.

        Raises:
            ConfigError: the batch has no room for another step.
        """
        if not self.steps_left:
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
        position_1P, branch_1P = branch_columns(ids_SL, self.next_position[row : row + 1])
        valid_1P = torch.ones_like(position_1P, dtype=torch.bool)
        hidden_1PD = decoder.embed(ids_SL.reshape(1, -1))
        rope = decoder.rope(hidden_1PD, position_1P)
        for layers, cache in ((decoder.lower, self.lower), (decoder.upper, self.upper)):
            axis = cache.axis(biased=self._is_biased(cache)).row(row)
            axis = axis.extended(position_1P, valid_1P, branch_1P)
            biases = biases_of(layers, axis, position_1P, valid_1P, hidden_1PD.dtype, branch_1P)
            hidden_1PD = run_layers(layers, hidden_1PD, rope, biases, partial(cache.joined, row))
        return decoder.logits(hidden_1PD[0]).unflatten(0, ids_SL.shape)

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

    def _fields(self) -> dict[str, tuple[Shape, torch.dtype]]:
        """The inputs of a prefill."""
        rows, states = self.bucket.rows, self.bucket.slots * self.decoder.states_per_slot
        width = self.decoder.embedding.shape[1]
        return {
            "slots": ((rows, self._own_slots(), width), torch.float32),
            "real": ((rows, states), torch.bool),
            "scores": ((rows, states), torch.float32),
            "number": ((rows, states), torch.long),
            "prefix": ((rows, self.bucket.prefix), torch.long),
            "prefix_valid": ((rows, self.bucket.prefix), torch.bool),
        }

    def _own_slots(self) -> int:
        """Number of slots per row that this batch restores itself."""
        return self.bucket.slots

    def _make_caches(self, columns: int, states: int) -> tuple[StaticCache, StaticCache]:
        decoder, rows = self.decoder, self.bucket.rows
        first = decoder.layers[0]
        shape = first.key_heads, first.head_width, decoder.dtype, decoder.device
        return (
            StaticCache(len(decoder.lower), rows, columns, *shape),
            StaticCache(len(decoder.upper), rows, states + columns, *shape),
        )

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
    def _span(self) -> int:
        """The most positions from the first to the last of a prefill."""
        return self.bucket.slots * self.decoder.states_per_slot + self.bucket.prefix

    @property
    def _together(self) -> bool:
        """Whether blocks are one text, as in the paper."""
        return self.decoder.guide is None and self.decoder.config.block_context == "joint"

    def _run_prefill(self) -> None:
        """Restore states, run the prefixes, and put both together above injection."""
        decoder = self.decoder
        prefix_BP, memory_BU = positions(self.prefix_valid, self.real)
        hidden_BPD = self._run_lower(prefix_BP)
        restored_BUD = decoder.decompress(self.slots).to(hidden_BPD.dtype)
        hidden_BLD = torch.cat([restored_BUD, hidden_BPD], dim=1)
        positions_BL = torch.cat([memory_BU, prefix_BP], dim=1)
        valid_BL = torch.cat([self.real, self.prefix_valid], dim=1)
        if self._together:
            block_BL = None
            hidden_BLD, positions_BL, valid_BL = in_reading_order(
                hidden_BLD, positions_BL, valid_BL
            )
            last_B = valid_BL.sum(1) - 1
            axis = self.upper.begin(positions_BL, valid_BL, span=self._span)
        else:
            last_B = memory_BU.shape[1] + self.prefix_valid.sum(1) - 1
            block_BL = torch.cat([self.number, torch.full_like(prefix_BP, -1)], dim=1)
            apart = decoder.config.block_context != "joint"
            axis = self.upper.begin(
                positions_BL, valid_BL, block_BL if apart else None, self._bias(prefix_BP)
            )
        hidden_B1D = run_layers(
            decoder.upper,
            hidden_BLD,
            decoder.rope(hidden_BLD, positions_BL),
            biases_of(decoder.upper, axis, positions_BL, axis.valid, hidden_BLD.dtype, block_BL),
            self.upper.store_prefill,
            last_B,
        )
        self.logits.copy_(decoder.logits(hidden_B1D[:, 0]))
        self.next_position.copy_(valid_BL.sum(1))

    def _run_lower(self, prefix_BP: Tensor) -> Tensor:
        """States of the prefixes at the injection layer `[B, P, D]`."""
        decoder = self.decoder
        hidden_BPD = decoder.embed(self.prefix)
        axis = self.lower.begin(prefix_BP, self.prefix_valid, span=self._span)
        return run_layers(
            decoder.lower,
            hidden_BPD,
            decoder.rope(hidden_BPD, prefix_BP),
            biases_of(decoder.lower, axis, prefix_BP, axis.valid, hidden_BPD.dtype),
            self.lower.store_prefill,
        )

    def _bias(self, prefix_BP: Tensor) -> Tensor | None:
        """Bias of text's logits on memory and prefix `[B, U + P]`; None for no bias."""
        if self.decoder.guide is None or not self.bucket.slots:
            return None
        bias_BU = self.decoder.guide(self.scores)
        return torch.cat([bias_BU, torch.zeros_like(prefix_BP).to(bias_BU)], dim=1)

    def _is_biased(self, cache: StaticCache) -> bool:
        """Whether block scores bias the attention of text to the columns of a cache."""
        return self.decoder.guide is not None and bool(self.bucket.slots) and cache is self.upper

    def _run_step(self) -> None:
        decoder = self.decoder.steps or self.decoder
        position_B1 = self.next_position[:, None]
        valid_B1 = torch.ones_like(position_B1, dtype=torch.bool)
        hidden_B1D = decoder.embed(self.ids[:, None])
        rope = decoder.rope(hidden_B1D, position_B1)
        for layers, cache in ((decoder.lower, self.lower), (decoder.upper, self.upper)):
            axis = cache.extend(position_B1, biased=self._is_biased(cache))
            biases = biases_of(layers, axis, position_B1, valid_B1, hidden_B1D.dtype)
            hidden_B1D = run_layers(layers, hidden_B1D, rope, biases, cache.store_step)
            cache.advance(self.used)
        self.logits.copy_(decoder.logits(hidden_B1D[:, 0]))
        self.next_position.add_(self.used)


class IndependentBatch(StaticBatch):
    """The buffers of one batch with independent blocks; see `StaticBatch`.

    Attributes:
        memory_positions: position of each restored state within its block `[B, U]`, from 1.
        longest: number of states of the longest block of each row `[B, 1]`, or for which the
            prefix's positions leave room.
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

    def _load_memory(self, rows: Sequence[AnswerInputs], lock: DeviceLock) -> None:
        """Copy the keys and values of each row's blocks into the first columns."""
        sizes = [self.kept.walk.sizes(row.bank, row.blocks) for row in rows]
        host = self.upload.host
        fill_lengths(host["real"], [sum(row) for row in sizes])
        nothing = torch.zeros(0, dtype=torch.long)
        places = [torch.cat([nothing, *(torch.arange(1, n + 1) for n in row)]) for row in sizes]
        fill(host["memory_positions"], places)
        room = self.decoder.config.states_per_block if self.decoder.config.read_once else None
        longest = [max(row, default=0) if room is None or not row else room for row in sizes]
        host["longest"].copy_(torch.tensor(longest)[:, None])
        reusable = room is not None and not self._graph
        asked = [row.prefix for row in rows if row.blocks] if reusable else []
        read = [one for ids_P in asked if (one := self.prefixes.find(ids_P)) is not None]
        self.read = read if len(read) == len(rows) else []
        self._load_blocks(rows, sizes)
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

    def _run_lower(self, prefix_BP: Tensor) -> Tensor:
        if not self.read:
            return super()._run_lower(prefix_BP)
        self.lower.begin(prefix_BP, self.prefix_valid, span=self._span)
        width = self.decoder.embedding.shape[1]
        hidden_BPD = self.read[0].hidden.new_zeros(*prefix_BP.shape, width)
        for row, one in enumerate(self.read):
            columns = slice(0, len(one.hidden))
            hidden_BPD[row, columns] = one.hidden
            self.lower.keys[:, row, :, columns] = one.keys
            self.lower.values[:, row, :, columns] = one.values
        return hidden_BPD

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
        )
        self.logits.copy_(decoder.logits(hidden_B1D[:, 0]))
        self.next_position.copy_(torch.maximum(prefix_BP.amax(1), self.longest[:, 0]) + 1)
