"""The fast path: fused layers, merged adapters, static caches and, on a GPU, captured graphs.

Letters: B batch, T tokens, E encoder width, V vocabulary, X extraction layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import RLock

import torch
from torch import Tensor

from sedem.backbone.decoder import Backbone
from sedem.engine.batch import Bucket, FusedDecoder, StaticBatch
from sedem.engine.cuda_graphs import new_pool, pool_bytes
from sedem.engine.device import device_lock, storage_bytes
from sedem.engine.encoder import FusedEncoder, QuestionBuffers
from sedem.engine.fuse import adapted_layers, frozen_layers
from sedem.engine.interface import Start, Step
from sedem.engine.layers import FusedLayer
from sedem.errors import ConfigError
from sedem.method.modules import SedemModules

QUESTION_BUCKETS = 32
"""Buckets of questions whose buffers are kept."""
FREE_BYTES = 2**30
"""Bytes of idle batches that are kept for the next answers of their size."""
FIRST_STEPS = 64
"""Room for an answer to start with; a longer one moves on."""


class Static:
    """Fused layers over static buffers; threads wait for one another.

    Args:
        model: its weights are fused and merged in place, once; it must not be trained or moved.
        graphs: whether to capture encoding, prefill and step as CUDA graphs.
    """

    def __init__(self, model: SedemModules, *, graphs: bool) -> None:
        if graphs:
            for backbone in (model.encoder, model.decoder):
                _check_capturable(backbone)
        self.name = "graphs" if graphs else "static"
        self.batch_size = 64 if graphs else 16
        self.ahead = graphs
        self.model = model
        self.encoder, self.decoder = fuse_modules(model)
        self._questions: dict[tuple[int, int], QuestionBuffers] = {}
        self._free: list[StaticBatch] = []
        self._used: list[StaticBatch] = []
        self._lock = RLock()
        self._graph = graphs
        self._pool = new_pool() if graphs else None

    @torch.no_grad()
    def encode(self, ids_BT: Tensor) -> Tensor:
        """Frozen states at the extraction layers `[X, B, T, E]`, the start token's dropped."""
        with self.device_lock():
            self._check_place()
            return self.encoder.states(ids_BT)

    @torch.no_grad()
    def encode_questions(self, ids_BT: Tensor) -> Tensor:
        """The same in the buffers of a bucket."""
        size = round_up(ids_BT.shape[0], 1), round_up(ids_BT.shape[1], 8)
        with self.device_lock():
            self._check_place()
            questions = self._questions.pop(size, None) or QuestionBuffers(
                self.encoder, *size, graph=self._graph, pool=self._pool
            )
            self._questions[size] = questions
            if len(self._questions) > QUESTION_BUCKETS:
                del self._questions[next(iter(self._questions))]
            return questions.encode(ids_BT)

    @contextmanager
    def start(self, starts: Sequence[Start], limit: int) -> Iterator[tuple[Tensor, Step]]:
        """Decompress, inject and prefill: logits `[B, V]`, and what runs one token more.

        The logits are good until the next step.

        Args:
            starts: one for each row.
            limit: tokens of an answer.
        """
        with self.device_lock():
            self._check_place()
            running = RunningBatch(self, starts, limit)
        try:
            yield running.logits(), running.step
        finally:
            with self.device_lock():
                self.give_back(running.batch)

    def memory(self) -> dict[str, int]:
        """Bytes of weights, of the buffers of batches and questions, and of the graphs' pool."""
        weights = [*self.model.parameters(), *self.model.buffers(), *self._fused_tensors()]
        caches = [b for batch in (*self._free, *self._used) for b in batch.buffers]
        caches += [b for questions in self._questions.values() for b in questions.buffers]
        return {
            "weights": storage_bytes(weights),
            "caches": storage_bytes(caches),
            "graphs": pool_bytes(self._pool) if self._graph else 0,
        }

    def release(self) -> None:
        """Let go of batches and questions that nobody uses; the next batches make their own."""
        with self.device_lock():
            self._free, self._questions = [], {}
            # A pool cannot be shared again once its last graph is gone.
            self._pool = new_pool() if self._graph else None

    @contextmanager
    def device_lock(self) -> Iterator[None]:
        """Reserve these buffers, and their GPU, for this thread."""
        with device_lock(self.model.device), self._lock:
            yield

    def take(self, bucket: Bucket) -> StaticBatch:
        """An idle batch of this size; a new one if there is none."""
        batch = next((batch for batch in self._free if batch.bucket == bucket), None)
        if batch is None:
            batch = StaticBatch(self.decoder, bucket, graph=self._graph, pool=self._pool)
        else:
            self._free.remove(batch)
        self._used.append(batch)
        return batch

    def give_back(self, batch: StaticBatch) -> None:
        """Keep an idle batch for the next answers of its size, while there is room."""
        self._used.remove(batch)
        self._free.append(batch)
        while len(self._free) > 1 and _bytes(self._free) > FREE_BYTES:
            del self._free[0]

    def _fused_tensors(self) -> list[Tensor]:
        layers: list[FusedLayer] = [*self.encoder.layers, *self.decoder.layers]
        return [t for layer in layers for t in vars(layer).values() if isinstance(t, Tensor)]

    def _check_place(self) -> None:
        # Modules move their own weights, and what was fused stays behind.
        fused = self.decoder.layers[0].qkv
        if (self.model.device, self.model.decoder.dtype) != (fused.device, fused.dtype):
            raise ConfigError(
                f"the model was made {self.model.decoder.dtype} on '{self.model.device}' after its "
                f"engine was opened for {fused.dtype} on '{fused.device}'; give both to "
                "from_pretrained"
            )


class RunningBatch:
    """The answers of one `start`: finished rows leave, long answers move to a larger batch.

    Args:
        engine: whose buffers are used.
        starts: one for each row.
        limit: tokens of an answer.
    """

    def __init__(self, engine: Static, starts: Sequence[Start], limit: int) -> None:
        self.engine = engine
        self.most_steps = max(limit - 1, 1)
        bucket = Bucket(
            rows=round_up(len(starts), 1),
            prefix=round_up(max(len(start.prefix) for start in starts), 8),
            slots=round_up(max(len(start.slots) for start in starts), 16),
            steps=round_up(min(self.most_steps, FIRST_STEPS), 16),
        )
        self.rows = len(starts)
        self.places = list(range(len(starts)))
        self.batch = engine.take(bucket)
        try:
            with torch.no_grad():
                self.batch.prefill(starts)
        except BaseException:
            engine.give_back(self.batch)
            raise
        self._order: Tensor | None = None

    def logits(self) -> Tensor:
        """Logits of all rows `[B, V]`; those of finished rows are undefined."""
        count = len(self.places)
        if self._order is None:
            return self.batch.logits[:count]
        logits_BV = self.batch.logits.new_zeros(self.rows, self.batch.logits.shape[1])
        return logits_BV.index_copy_(0, self._order[:count], self.batch.logits[:count])

    @torch.no_grad()
    def step(self, ids_B: Tensor, live: Sequence[int]) -> Tensor:
        """Run one more token of the rows that are not finished.

        Args:
            ids_B: tokens of all rows.
            live: the rows that are not finished.

        Returns:
            Logits `[B, V]`, good until the next step.

        Raises:
            ConfigError: the answers are longer than was said.
        """
        with self.engine.device_lock():
            self._move(live)
            if self._order is None:
                missing = self.batch.bucket.rows - len(ids_B)
                ids_B = torch.cat([ids_B, ids_B[:1].expand(missing)])
            else:
                ids_B = ids_B[self._order]
            self.batch.step(ids_B)
            return self.logits()

    def _move(self, live: Sequence[int]) -> None:
        """Move to a batch of half the rows when enough have finished, or to one of more steps."""
        old = self.batch.bucket
        rows, steps = round_up(len(live), 1), old.steps
        if not self.batch.steps_left and steps < self.most_steps:
            steps = round_up(min(self.most_steps, 2 * steps), 16)
        if 2 * rows > old.rows and steps == old.steps:
            return
        batch = self.engine.take(replace(old, rows=rows, steps=steps))
        at = {row: place for place, row in enumerate(self.places)}
        order = [*live, *([live[0]] * (rows - len(live)))]
        device = batch.logits.device
        batch.take_over(self.batch, torch.tensor([at[row] for row in order], device=device))
        self.engine.give_back(self.batch)
        self.batch, self.places = batch, list(live)
        self._order = torch.tensor(order, device=device)


def fuse_modules(model: SedemModules) -> tuple[FusedEncoder, FusedDecoder]:
    """Encoder and decoder of a model as fused layers that share what they can."""
    config, encoder, decoder = model.config, model.encoder, model.decoder
    frozen = frozen_layers(encoder, config.extract_layer)
    reading = FusedEncoder(
        frozen,
        config.extract_layers,
        encoder.bos_token_id,
        encoder.model.get_input_embeddings().weight,
        encoder.model.get_decoder().rotary_emb,
    )
    if encoder is not decoder:
        encoder.truncate(config.extract_layer)
    answering = FusedDecoder(
        adapted_layers(decoder, frozen if encoder is decoder else ()),
        config.inject_layer,
        config.start_placement,
        model.decompressor,
        model.decompressor.states_per_slot,
        decoder.model.get_input_embeddings().weight,
        decoder.model.get_decoder().rotary_emb,
        decoder.model.get_decoder().norm,
        decoder.model.get_output_embeddings(),
    )
    return reading, answering


def round_up(count: int, unit: int) -> int:
    """The next size of a bucket, a few a doubling: 1 to 8, 10, 12, 14, 16, 20, 24, ... units."""
    units = -(-count // unit)
    stride = 1
    while units > 8 * stride:
        stride *= 2
    return -(-units // stride) * stride * unit


def _bytes(batches: Sequence[StaticBatch]) -> int:
    return storage_bytes([buffer for batch in batches for buffer in batch.buffers])


def _check_capturable(backbone: Backbone) -> None:
    kind = backbone.model.config.rope_parameters["rope_type"]
    if kind in ("dynamic", "longrope"):
        raise ConfigError(
            f"backbone '{backbone.name}' has '{kind}' rotary positions, which depend on the length "
            "of the sequence and cannot be captured; take engine 'static'"
        )
