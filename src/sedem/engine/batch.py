"""Two-depth decoding of one batch, in buffers of fixed size.

What `injection` does with growing tensors happens here in static ones: memory stands in the first
columns of the upper layers, prefixes end in one column, answers go on from there, and positions
decide who sees whom.

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
    """A decoder for inference, with what comes between memory and its middle layers.

    Attributes:
        layers: all of them, adapters merged.
        inject_layer: layers that see the prefix alone.
        placement: where the start token stands.
        restore: slots `[B, W, D]` to states `[B, U, D]`.
        states_per_slot: U / W.
        embedding: of tokens `[V, D]`.
        rotary: positions to cosine and sine.
        norm: the closing norm.
        head: states to logits.
    """

    layers: list[FusedLayer]
    inject_layer: int
    placement: StartPlacement
    restore: Callable[[Tensor], Tensor]
    states_per_slot: int
    embedding: Tensor
    rotary: nn.Module
    norm: nn.Module
    head: nn.Module

    def rope(self, hidden_BPD: Tensor, positions_BP: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary factors of some positions."""
        return signed_rope(*self.rotary(hidden_BPD, position_ids=positions_BP))

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """Next-token logits `[B, V]` of states after the last layer."""
        return self.head(self.norm(hidden_BD))


@dataclass(frozen=True)
class Bucket:
    """The size of a batch.

    Attributes:
        rows: B.
        prefix: P.
        slots: W.
        steps: tokens that can be run after the prefix.
    """

    rows: int
    prefix: int
    slots: int
    steps: int


class StaticBatch:
    """Buffers of one bucket, its prefill and its step, each a replay.

    Args:
        decoder: what runs.
        bucket: the size.
        graph: whether to capture prefill and step as CUDA graphs.
        pool: memory that graphs share.
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

        def whole(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        self.slots = torch.zeros(rows, bucket.slots, width, device=device)
        self.real = whole(rows, states).bool()
        self.prefix = whole(rows, bucket.prefix)
        self.prefix_valid = whole(rows, bucket.prefix).bool()
        self.ids = whole(rows)
        self.next_position = whole(rows)
        self.logits = torch.zeros(rows, vocabulary, dtype=decoder.embedding.dtype, device=device)
        self.lower, self.upper = self._caches(bucket.prefix + bucket.steps, states)
        carried = [self.next_position, *self.lower.carried, *self.upper.carried]
        self._prefill = Replay(self.buffers, graph=graph, pool=pool)
        self._step = Replay(self.buffers, carried, graph=graph, pool=pool)

    @property
    def buffers(self) -> list[Tensor]:
        """All of its tensors."""
        inputs = [self.slots, self.real, self.prefix, self.prefix_valid, self.ids]
        caches = [*self.lower.buffers, *self.upper.buffers]
        return [*inputs, self.next_position, self.logits, *caches]

    def prefill(self, starts: Sequence[Start]) -> None:
        """Start anew; rows of the bucket beyond those given repeat the first."""
        rows = [*starts, *([starts[0]] * (self.bucket.rows - len(starts)))]
        prefixes = [start.prefix for start in rows]
        _fill(self.slots, [start.slots for start in rows])
        _fill(self.real, [start.real for start in rows])
        _fill(self.prefix, prefixes, side="left")
        _fill(self.prefix_valid, [torch.ones_like(ids) for ids in prefixes], side="left")
        self._prefill(self._run_prefill)
        self.steps_left = self.bucket.steps

    def step(self, ids_B: Tensor) -> None:
        """Run one more token of each row.

        Raises:
            ConfigError: the batch is full.
        """
        if not self.steps_left:
            raise ConfigError(
                f"an answer was started with room for {self.bucket.steps} tokens after its prefix "
                "and would be longer; start it with a higher limit"
            )
        self.steps_left -= 1
        self.ids.copy_(ids_B)
        self._step(self._run_step)

    def take_over(self, other: StaticBatch, rows: Tensor) -> None:
        """Go on where some rows of another batch stand.

        Args:
            other: of the same prefix and slots, and of no more steps.
            rows: which of its rows, one for each row of this batch.
        """
        self.lower.take_over(other.lower, rows)
        self.upper.take_over(other.upper, rows)
        self.next_position.copy_(other.next_position[rows])
        self.steps_left = self.bucket.steps - (other.bucket.steps - other.steps_left)

    def _caches(self, lower: int, memory: int) -> tuple[StaticCache, StaticCache]:
        decoder, rows = self.decoder, self.bucket.rows
        first, below = decoder.layers[0], decoder.inject_layer
        shape = first.key_heads, first.head_width, decoder.embedding.dtype, decoder.embedding.device
        return (
            StaticCache(below, rows, lower, *shape),
            StaticCache(len(decoder.layers) - below, rows, memory + lower, *shape),
        )

    def _run_prefill(self) -> None:
        decoder, below = self.decoder, self.decoder.inject_layer
        prefix_BP, memory_BU = positions(self.prefix_valid, self.real, decoder.placement)
        hidden_BPD = F.embedding(self.prefix, decoder.embedding)
        axis = self.lower.begin(prefix_BP, self.prefix_valid)
        hidden_BPD = run_layers(
            decoder.layers[:below],
            hidden_BPD,
            decoder.rope(hidden_BPD, prefix_BP),
            biases_of(decoder.layers[:below], axis, prefix_BP, axis.valid, hidden_BPD.dtype),
            self.lower.keep_first,
        )
        restored_BUD = decoder.restore(self.slots).to(hidden_BPD.dtype)
        hidden_BLD = torch.cat([restored_BUD, hidden_BPD], dim=1)
        all_BL = torch.cat([memory_BU, prefix_BP], dim=1)
        axis = self.upper.begin(all_BL, torch.cat([self.real, self.prefix_valid], dim=1))
        hidden_B1D = run_layers(
            decoder.layers[below:],
            hidden_BLD,
            decoder.rope(hidden_BLD, all_BL),
            biases_of(decoder.layers[below:], axis, all_BL, axis.valid, hidden_BLD.dtype),
            self.upper.keep_first,
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
            hidden_B1D = run_layers(layers, hidden_B1D, rope, biases, cache.keep_next)
            cache.column.add_(1)
        self.logits.copy_(decoder.logits(hidden_B1D[:, 0]))
        self.next_position.add_(1)


def _fill(buffer: Tensor, rows: Sequence[Tensor], side: Literal["left", "right"] = "right") -> None:
    """Rows of different length into a buffer, zeros where they end."""
    padded = pad_sequence(list(rows), batch_first=True, padding_side=side)
    missing = buffer.shape[1] - padded.shape[1]
    buffer.zero_()
    buffer.narrow(1, missing if side == "left" else 0, padded.shape[1]).copy_(padded)
