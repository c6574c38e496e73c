"""Two-depth decoding of one batch, in buffers of fixed size.

This is `method.injection` with static tensors instead of growing ones. Rows of one prefill are
padded on the right to end in one column. Columns are then in reading order, so that causal
attention needs no mask. A mask is needed only in two cases: above injection, for separate or guided
blocks, where memory has the first columns; and for windows shorter than the text. Each row's answer
continues in its own next column. There, positions decide which keys a query sees, so a row can move
to any batch that has room for it.

`independent_batch` has the batch for independent blocks.

Letters: B rows, P prefix columns, W slots per row, U restored states per row, D width, V
vocabulary, K blocks per row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sedem.engine.cuda_graphs import Pool, Replay
from sedem.engine.decoder import FusedDecoder
from sedem.engine.interface import Start
from sedem.engine.layers import Attention, biases_of, in_reading_order, run_layers
from sedem.engine.split_keys import attend_in_parts, pays, split_biases, whole_parts
from sedem.engine.static_cache import StaticCache
from sedem.engine.upload import Shape, Upload, fill, fill_lengths
from sedem.errors import ConfigError
from sedem.method.injection import positions
from sedem.method.pooling import state_mask


@dataclass(frozen=True)
class Bucket:
    """The size of a batch.

    Attributes:
        rows: B.
        prefix: P.
        slots: W; room for W * C restored states.
        steps: number of tokens that can be run after the prefix.
        pieces: whether memory stays outside the buffers and is attended to in pieces.
    """

    rows: int
    prefix: int
    slots: int
    steps: int
    pieces: bool = False

    def holds(self, other: Bucket) -> bool:
        """Whether the rows of a batch of another size fit."""
        return self.pieces == other.pieces and all(
            own >= theirs
            for own, theirs in (
                (self.rows, other.rows),
                (self.prefix, other.prefix),
                (self.slots, other.slots),
                (self.steps, other.steps),
            )
        )


class StaticBatch:
    """The buffers of one batch, and the prefill and step that run in them.

    Args:
        decoder: the decoder.
        bucket: the size of the buffers.
        graph: whether to capture prefill and step as CUDA graphs.
        pool: memory that graphs share.
        split: whether a step may attend to the parts of a long memory in parallel.

    Attributes:
        split: whether it does.
        upload: holds all host inputs of a prefill, `slots` to `prefix_valid`.
        slots: memory of each row `[B, W, D]`.
        real: True where a restored state stands for a real token `[B, U]`.
        scores: score of each state's block `[B, U]`; -inf where there is none.
        number: number of each state's block among those of its row `[B, U]`.
        prefix: token ids, padded on the right `[B, P]`.
        prefix_valid: False where the prefix is padding.
        ids: the tokens of a step `[B]`.
        next_position: position of the next token `[B]`.
        logits: after the prefill or the last step `[B, V]`.
        lower: cache of the layers below injection.
        upper: cache of the layers above it.
        used: 1 for a row in use, 0 for an empty one `[B]`. An empty row also runs, but no other row
            sees it.
        text: number of text columns that each row in use has filled, counted on the host.
    """

    def __init__(
        self,
        decoder: FusedDecoder,
        bucket: Bucket,
        *,
        graph: bool = False,
        pool: Pool = None,
        split: bool = False,
    ) -> None:
        self.decoder = decoder
        self.bucket = bucket
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
        first, columns = decoder.layers[0], bucket.prefix + bucket.steps
        self.split = split and pays(rows, states + columns, first.key_heads, first.head_width)
        self.lower, self.upper = self._make_caches(columns, states)
        state = [self.next_position, *self.lower.state, *self.upper.state]
        self._replay_prefill = Replay(self.buffers, graph=graph, pool=pool)
        self._replay_step = Replay(self.buffers, state, graph=graph, pool=pool)

    @property
    def buffers(self) -> list[Tensor]:
        """All tensors."""
        caches = [*self.lower.buffers, *self.upper.buffers]
        own = [self.upload.buffer, self.ids, self.next_position, self.used, self.logits]
        return [*own, *caches]

    @property
    def steps_left(self) -> int:
        """Number of steps that still fit."""
        room = self.bucket.prefix + self.bucket.steps
        return room - max(self.text.values(), default=0)

    def prefill(self, starts: Sequence[Start]) -> None:
        """Start new answers in the first rows; the others are empty."""
        rows = [*starts, *([starts[0]] * (self.bucket.rows - len(starts)))]
        prefixes = [start.prefix for start in rows]
        self.upload.begin()
        host = self.upload.host
        fill(host["prefix"], prefixes)
        fill_lengths(host["prefix_valid"], [len(ids) for ids in prefixes])
        self._load_memory(rows)
        self.upload.send()
        self._replay_prefill(self._run_prefill)
        self.used.fill_(1)
        self.text = dict.fromkeys(range(len(starts)), self.bucket.prefix)
        self.clear(slice(len(starts), self.bucket.rows))

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

    def copy_rows(self, other: StaticBatch, rows: Mapping[int, int]) -> None:
        """Continue rows of another batch.

        Args:
            other: a batch whose rows fit into this one.
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

    def finish(self) -> None:
        """Release what is not in the buffers, once the answers are done."""

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
        above = whole_parts(states + columns) if self.split else states + columns
        return (
            StaticCache(len(decoder.lower), rows, columns, *shape),
            StaticCache(len(decoder.upper), rows, above, *shape),
        )

    def _load_memory(self, rows: Sequence[Start]) -> None:
        """Put the memory of each row into the upload to the device."""
        host, per_slot = self.upload.host, self.decoder.states_per_slot
        real = [state_mask(start.bank.slot_tokens(start.blocks), per_slot) for start in rows]
        fill(host["slots"], [s.bank.memory(s.blocks).float().flatten(0, 1) for s in rows])
        fill(host["real"], [real_KU.flatten() for real_KU in real])
        self._load_blocks(rows, [[real_KU.shape[1]] * len(real_KU) for real_KU in real])

    def _load_blocks(self, rows: Sequence[Start], sizes: Sequence[Sequence[int]]) -> None:
        """Load the block number and score of each state, where they matter.

        Args:
            rows: the start of each row.
            sizes: number of states of each block of each row.
        """
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

    def _attention(self, positions_BP: Tensor) -> Attention | None:
        """Attention used above injection instead of `layers.attend`; None for `attend`.

        Args:
            positions_BP: positions of the queries.
        """
        return None

    def _run_step(self) -> None:
        decoder = self.decoder.steps or self.decoder
        position_B1 = self.next_position[:, None]
        valid_B1 = torch.ones_like(position_B1, dtype=torch.bool)
        hidden_B1D = decoder.embed(self.ids[:, None])
        rope = decoder.rope(hidden_B1D, position_B1)
        for layers, cache in ((decoder.lower, self.lower), (decoder.upper, self.upper)):
            biased = decoder.guide is not None and bool(self.bucket.slots) and cache is self.upper
            axis = cache.extend(position_B1, biased=biased)
            biases = biases_of(layers, axis, position_B1, valid_B1, hidden_B1D.dtype)
            attention = self._attention(position_B1) if cache is self.upper else None
            if self.split and cache is self.upper:
                biases = split_biases(biases, layers[0].key_heads)
                attention = attend_in_parts
            hidden_B1D = run_layers(
                layers, hidden_B1D, rope, biases, cache.store_step, attention=attention
            )
            cache.advance(self.used)
        self.logits.copy_(decoder.logits(hidden_B1D[:, 0]))
        self.next_position.add_(self.used)
