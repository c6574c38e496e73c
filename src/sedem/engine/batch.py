"""Two-depth decoding of one batch, in buffers of fixed size.

This is `method.injection` with static tensors instead of growing ones. In the layers above
injection, memory has the first columns. Prefixes are padded on the left to end in one column, and
answers continue after it. Positions, not columns, decide which keys a query sees.

Letters: B rows, P prefix columns, W slots of a row, U restored states of a row, D width, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from sedem.config import StartPlacement
from sedem.engine.cuda_graphs import Pool, Replay
from sedem.engine.interface import Start
from sedem.engine.layers import FusedLayer, biases_of, run_layers, signed_rope
from sedem.engine.static_cache import StaticCache
from sedem.errors import ConfigError
from sedem.method.injection import positions


@dataclass(frozen=True)
class FusedDecoder:
    """A decoder for inference, with the decompressor that feeds its middle layers.

    Attributes:
        layers: all layers, adapters merged.
        inject_layer: number of layers below the injection; they see only the prefix.
        start_placement: position of the start token relative to memory.
        decompress: from slots `[B, W, D]` to states `[B, U, D]`.
        states_per_slot: U / W.
        embedding: token embeddings `[V, D]`.
        rotary: module from positions to cosine and sine.
        norm: the norm after the last layer.
        head: module from states to logits.
    """

    layers: list[FusedLayer]
    inject_layer: int
    start_placement: StartPlacement
    decompress: Callable[[Tensor], Tensor]
    states_per_slot: int
    embedding: Tensor
    rotary: nn.Module
    norm: nn.Module
    head: nn.Module

    def rope(self, hidden_BPD: Tensor, positions_BP: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rotary factors of some positions."""
        return signed_rope(*self.rotary(hidden_BPD, position_ids=positions_BP))

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Return next-token logits `[B, V]` for states after the last layer."""
        return self.head(self.norm(hidden_BD))


@dataclass(frozen=True)
class Bucket:
    """The size of a batch.

    Attributes:
        rows: B.
        prefix: P.
        slots: W.
        steps: number of tokens that can be run after the prefix.
    """

    rows: int
    prefix: int
    slots: int
    steps: int


class StaticBatch:
    """The buffers of one batch, and the prefill and step that run in them.

    Args:
        decoder: the decoder.
        bucket: the size of the buffers.
        graph: whether to capture prefill and step as CUDA graphs.
        pool: memory that graphs share.

    Attributes:
        slots: memory of each row `[B, W, D]`.
        real: which restored states stand for real tokens `[B, U]`.
        prefix: token ids, padded on the left `[B, P]`.
        prefix_valid: False where the prefix is padding.
        ids: the tokens of a step `[B]`.
        next_position: position of the next token `[B]`.
        logits: after the prefill or the last step `[B, V]`.
        lower: cache of the layers below injection.
        upper: cache of the layers above it.
        steps_left: steps that fit, counted on the host.
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
        self.steps_left = 0
        device, (vocabulary, width) = decoder.embedding.device, decoder.embedding.shape
        rows, states = bucket.rows, bucket.slots * decoder.states_per_slot

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        self.slots = torch.zeros(rows, bucket.slots, width, device=device)
        self.real = integers(rows, states).bool()
        self.prefix = integers(rows, bucket.prefix)
        self.prefix_valid = integers(rows, bucket.prefix).bool()
        self.ids = integers(rows)
        self.next_position = integers(rows)
        self.logits = torch.zeros(rows, vocabulary, dtype=decoder.embedding.dtype, device=device)
        self.lower, self.upper = self._make_caches(bucket.prefix + bucket.steps, states)
        state = [self.next_position, *self.lower.state, *self.upper.state]
        self._replay_prefill = Replay(self.buffers, graph=graph, pool=pool)
        self._replay_step = Replay(self.buffers, state, graph=graph, pool=pool)

    @property
    def buffers(self) -> list[Tensor]:
        """All tensors."""
        inputs = [self.slots, self.real, self.prefix, self.prefix_valid, self.ids]
        caches = [*self.lower.buffers, *self.upper.buffers]
        return [*inputs, self.next_position, self.logits, *caches]

    def prefill(self, starts: Sequence[Start]) -> None:
        """Start new answers; rows of the bucket that are not needed repeat the first."""
        rows = [*starts, *([starts[0]] * (self.bucket.rows - len(starts)))]
        prefixes = [start.prefix for start in rows]
        _fill(self.slots, [start.slots for start in rows])
        _fill(self.real, [start.real for start in rows])
        _fill(self.prefix, prefixes, side="left")
        _fill(self.prefix_valid, [torch.ones_like(ids) for ids in prefixes], side="left")
        self._replay_prefill(self._run_prefill)
        self.steps_left = self.bucket.steps

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
        self.steps_left -= 1
        self.ids.copy_(ids_B)
        self._replay_step(self._run_step)

    def copy_rows(self, other: StaticBatch, rows: Tensor) -> None:
        """Continue from some rows of another batch.

        Args:
            other: a batch of the same prefix and slots, and of no more steps.
            rows: the row of `other` for each row of this batch.
        """
        self.lower.copy_rows(other.lower, rows)
        self.upper.copy_rows(other.upper, rows)
        self.next_position.copy_(other.next_position[rows])
        self.steps_left = self.bucket.steps - (other.bucket.steps - other.steps_left)

    def _make_caches(self, columns: int, states: int) -> tuple[StaticCache, StaticCache]:
        decoder, rows = self.decoder, self.bucket.rows
        first, below = decoder.layers[0], decoder.inject_layer
        shape = first.key_heads, first.head_width, decoder.embedding.dtype, decoder.embedding.device
        return (
            StaticCache(below, rows, columns, *shape),
            StaticCache(len(decoder.layers) - below, rows, states + columns, *shape),
        )

    def _run_prefill(self) -> None:
        decoder, below = self.decoder, self.decoder.inject_layer
        prefix_BP, memory_BU = positions(self.prefix_valid, self.real, decoder.start_placement)
        hidden_BPD = F.embedding(self.prefix, decoder.embedding)
        axis = self.lower.begin(prefix_BP, self.prefix_valid)
        hidden_BPD = run_layers(
            decoder.layers[:below],
            hidden_BPD,
            decoder.rope(hidden_BPD, prefix_BP),
            biases_of(decoder.layers[:below], axis, prefix_BP, axis.valid, hidden_BPD.dtype),
            self.lower.store_prefill,
        )
        restored_BUD = decoder.decompress(self.slots).to(hidden_BPD.dtype)
        hidden_BLD = torch.cat([restored_BUD, hidden_BPD], dim=1)
        positions_BL = torch.cat([memory_BU, prefix_BP], dim=1)
        axis = self.upper.begin(positions_BL, torch.cat([self.real, self.prefix_valid], dim=1))
        hidden_B1D = run_layers(
            decoder.layers[below:],
            hidden_BLD,
            decoder.rope(hidden_BLD, positions_BL),
            biases_of(decoder.layers[below:], axis, positions_BL, axis.valid, hidden_BLD.dtype),
            self.upper.store_prefill,
            last=1,
        )
        self.logits.copy_(decoder.logits(hidden_B1D[:, 0]))
        self.next_position.copy_(self.prefix_valid.sum(1) + self.real.sum(1))

    def _run_step(self) -> None:
        decoder, below = self.decoder, self.decoder.inject_layer
        position_B1 = self.next_position[:, None]
        valid_B1 = torch.ones_like(position_B1, dtype=torch.bool)
        hidden_B1D = F.embedding(self.ids[:, None], decoder.embedding)
        rope = decoder.rope(hidden_B1D, position_B1)
        for layers, cache in (
            (decoder.layers[:below], self.lower),
            (decoder.layers[below:], self.upper),
        ):
            axis = cache.extend(position_B1)
            biases = biases_of(layers, axis, position_B1, valid_B1, hidden_B1D.dtype)
            hidden_B1D = run_layers(layers, hidden_B1D, rope, biases, cache.store_step)
            cache.advance()
        self.logits.copy_(decoder.logits(hidden_B1D[:, 0]))
        self.next_position.add_(1)


def _fill(buffer: Tensor, rows: Sequence[Tensor], side: Literal["left", "right"] = "right") -> None:
    """Copy rows of different lengths into a buffer, padded with zeros."""
    padded = pad_sequence(list(rows), batch_first=True, padding_side=side)
    missing = buffer.shape[1] - padded.shape[1]
    buffer.zero_()
    buffer.narrow(1, missing if side == "left" else 0, padded.shape[1]).copy_(padded)
