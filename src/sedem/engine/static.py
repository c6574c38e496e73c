"""The fast engine: fused layers, merged adapters, static caches and, on a GPU, captured graphs.

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
from sedem.engine.batch import Bucket, StaticBatch
from sedem.engine.block_walk import BlockWalk
from sedem.engine.cuda_graphs import new_pool, pool_bytes
from sedem.engine.decoder import FusedDecoder
from sedem.engine.device import device_lock, storage_bytes
from sedem.engine.encoder import FusedEncoder, QuestionBuffers
from sedem.engine.fuse import adapted_layers, frozen_layers
from sedem.engine.independent_batch import IndependentBatch
from sedem.engine.interface import Start, Step
from sedem.engine.kept import Kept, KeptBudget
from sedem.engine.layers import FusedLayer
from sedem.engine.piecewise_batch import PiecewiseBatch
from sedem.engine.stored import decoder_fingerprint
from sedem.errors import ConfigError
from sedem.method.modules import SedemModules

MAX_QUESTION_BUFFERS = 32
"""Sizes of question batches whose buffers are kept."""
IDLE_BYTES = 2**30
"""Bytes of idle batches that are kept for later answers of their size."""
FIRST_STEPS = 64
"""Tokens of an answer that its first batch has room for; longer answers move to a larger one."""

MAX_COLUMNS = 4096
"""Restored states of a row that a static cache holds; more independent blocks stay outside."""


class Static:
    """Runs fused layers in static buffers, one thread at a time; see `interface.Engine`.

    Args:
        model: its weights are fused and merged in place, once. It must not be trained or moved
            afterwards.
        graphs: whether to capture encoding, prefill and step as CUDA graphs.
        budget: how many keys and values of independent blocks are kept.

    Attributes:
        kept: keys and values of independent blocks.

    Raises:
        ConfigError: a backbone cannot be captured.
    """

    def __init__(
        self, model: SedemModules, *, graphs: bool, budget: KeptBudget | None = None
    ) -> None:
        if graphs:
            for backbone in (model.encoder, model.decoder):
                _check_capturable(backbone)
        self.name = "graphs" if graphs else "static"
        self.batch_size = 64 if graphs else 16
        self.ahead = graphs
        self.model = model
        self.encoder, self.decoder = fuse_modules(model)
        self.kept = Kept(
            BlockWalk(self.decoder),
            budget or KeptBudget(),
            lambda: decoder_fingerprint(model),
        )
        self._question_buffers: dict[tuple[int, int], QuestionBuffers] = {}
        self._idle_batches: list[StaticBatch] = []
        self._active_batches: list[StaticBatch] = []
        self._buffers_lock = RLock()
        self._graphs = graphs
        self._pool = new_pool() if graphs else None

    @torch.no_grad()
    def encode(self, ids_BT: Tensor) -> Tensor:
        """Return frozen states at the extraction layers `[X, B, T, E]`."""
        with self.device_lock():
            self._check_not_moved()
            return self.encoder.states(ids_BT)

    @torch.no_grad()
    def encode_questions(self, ids_BT: Tensor) -> Tensor:
        """Return the same, computed in the buffers of the next larger size."""
        size = round_up(ids_BT.shape[0], 1), round_up(ids_BT.shape[1], 8)
        with self.device_lock():
            self._check_not_moved()
            buffers = self._question_buffers.pop(size, None) or QuestionBuffers(
                self.encoder, *size, graph=self._graphs, pool=self._pool
            )
            # Put last, so that the first is the one that was not used for the longest time.
            self._question_buffers[size] = buffers
            if len(self._question_buffers) > MAX_QUESTION_BUFFERS:
                del self._question_buffers[next(iter(self._question_buffers))]
            return buffers.encode(ids_BT)

    @contextmanager
    def start(self, starts: Sequence[Start], limit: int) -> Iterator[tuple[Tensor, Step]]:
        """Decompress, inject and prefill a batch.

        Args:
            starts: one for each row.
            limit: the most tokens of an answer.

        Yields:
            Logits after the prefixes `[B, V]`, valid until the first step, and the step.
        """
        with self.device_lock():
            self._check_not_moved()
            running = RunningBatch(self, starts, limit)
        try:
            yield running.logits(), running.step
        finally:
            with self.device_lock():
                self.return_batch(running.batch)

    def memory(self) -> dict[str, int]:
        """Return bytes by what they are for; see `interface.Engine`."""
        weights = [*self.model.parameters(), *self.model.buffers(), *self._fused_tensors()]
        batches = [*self._idle_batches, *self._active_batches]
        caches = [b for batch in batches for b in batch.buffers]
        caches += [b for questions in self._question_buffers.values() for b in questions.buffers]
        return {
            "weights": storage_bytes(weights),
            "caches": storage_bytes(caches),
            "graphs": pool_bytes(self._pool) if self._graphs else 0,
            "kept": self.kept.nbytes,
        }

    def release(self) -> None:
        """Free what no batch uses; see `interface.Engine`."""
        with self.device_lock():
            self.kept.clear()
            self._idle_batches, self._question_buffers = [], {}
            # A pool cannot be used again after its last graph is freed.
            self._pool = new_pool() if self._graphs else None

    @contextmanager
    def device_lock(self) -> Iterator[None]:
        """Reserve the buffers and their GPU for this thread."""
        with device_lock(self.model.device), self._buffers_lock:
            yield

    def take_batch(self, bucket: Bucket) -> StaticBatch:
        """Return an idle batch of this size, or a new one if there is none."""
        batch = next((batch for batch in self._idle_batches if batch.bucket == bucket), None)
        if batch is None:
            batch = self._new_batch(bucket)
        else:
            self._idle_batches.remove(batch)
        self._active_batches.append(batch)
        return batch

    def bucket_of(self, starts: Sequence[Start], max_steps: int) -> Bucket:
        """Return the size of the batch that some answers start in.

        Args:
            starts: one for each row.
            max_steps: the most steps of an answer.
        """
        slots = round_up(max(self._slots_of(start) for start in starts), 16)
        columns = slots * self.decoder.states_per_slot
        pieces = self.model.config.block_context == "independent" and columns > MAX_COLUMNS
        return Bucket(
            rows=round_up(len(starts), 1),
            prefix=round_up(max(len(start.prefix) for start in starts), 8),
            slots=0 if pieces else slots,
            steps=round_up(min(max_steps, FIRST_STEPS), 16),
            pieces=pieces,
        )

    def return_batch(self, batch: StaticBatch) -> None:
        """Make a batch idle; the oldest idle ones are freed above `IDLE_BYTES`."""
        batch.finish()
        self._active_batches.remove(batch)
        self._idle_batches.append(batch)
        while len(self._idle_batches) > 1 and _bytes(self._idle_batches) > IDLE_BYTES:
            del self._idle_batches[0]

    def _slots_of(self, start: Start) -> int:
        """Slots of a batch that one of its rows needs."""
        if self.model.config.block_context != "independent":
            return start.bank.slot_tokens(start.blocks).numel()
        states = sum(self.kept.walk.sizes(start.bank, start.blocks))
        return -(-states // self.decoder.states_per_slot)

    def _new_batch(self, bucket: Bucket) -> StaticBatch:
        graph, pool = self._graphs, self._pool
        if bucket.pieces:
            return PiecewiseBatch(self.decoder, bucket, self.kept)
        if self.model.config.block_context == "independent":
            return IndependentBatch(self.decoder, bucket, self.kept, graph=graph, pool=pool)
        return StaticBatch(self.decoder, bucket, graph=graph, pool=pool)

    def _fused_tensors(self) -> list[Tensor]:
        layers: list[FusedLayer] = [*self.encoder.layers, *self.decoder.layers]
        return [t for layer in layers for t in vars(layer).values() if isinstance(t, Tensor)]

    def _check_not_moved(self) -> None:
        # Moving or casting a module moves its own weights and leaves the fused ones behind.
        fused = self.decoder.layers[0].qkv
        if (self.model.device, self.model.decoder.dtype) != (fused.device, fused.dtype):
            raise ConfigError(
                f"the model was changed to {self.model.decoder.dtype} on '{self.model.device}' "
                f"after its engine was opened for {fused.dtype} on '{fused.device}'; give dtype "
                "and device to from_pretrained"
            )


class RunningBatch:
    """The answers of one `start`: finished rows are dropped, long answers get a larger batch.

    Args:
        engine: provides the batches.
        starts: one for each row.
        limit: the most tokens of an answer.

    Attributes:
        batch: the batch that runs now.
        live: the rows in it, in the order of its rows; rows beyond them repeat one.
    """

    def __init__(self, engine: Static, starts: Sequence[Start], limit: int) -> None:
        self.engine = engine
        self.max_steps = max(limit - 1, 1)
        self.rows = len(starts)
        self.live = list(range(len(starts)))
        self.batch = engine.take_batch(engine.bucket_of(starts, self.max_steps))
        try:
            with torch.no_grad():
                self.batch.prefill(starts)
        except BaseException:
            engine.return_batch(self.batch)
            raise
        # The row that each row of the batch runs; None while the two are the same.
        self._row_of: Tensor | None = None

    def logits(self) -> Tensor:
        """Return the logits of all rows `[B, V]`; those of finished rows are undefined."""
        count = len(self.live)
        if self._row_of is None:
            return self.batch.logits[:count]
        logits_BV = self.batch.logits.new_zeros(self.rows, self.batch.logits.shape[1])
        return logits_BV.index_copy_(0, self._row_of[:count], self.batch.logits[:count])

    @torch.no_grad()
    def step(self, ids_B: Tensor, live: Sequence[int]) -> Tensor:
        """Run one token of the unfinished rows.

        Args:
            ids_B: tokens of all rows.
            live: the unfinished rows.

        Returns:
            Logits `[B, V]`, valid until the next step.

        Raises:
            ConfigError: the answers are longer than their limit.
        """
        with self.engine.device_lock():
            self._resize(live)
            if self._row_of is None:
                missing = self.batch.bucket.rows - len(ids_B)
                ids_B = torch.cat([ids_B, ids_B[:1].expand(missing)])
            else:
                ids_B = ids_B[self._row_of]
            self.batch.step(ids_B)
            return self.logits()

    def _resize(self, live: Sequence[int]) -> None:
        """Move to a batch of half the rows once enough have finished, or to one of more steps."""
        old = self.batch.bucket
        rows, steps = round_up(len(live), 1), old.steps
        if not self.batch.steps_left and steps < self.max_steps:
            steps = round_up(min(self.max_steps, 2 * steps), 16)
        if 2 * rows > old.rows and steps == old.steps:
            return
        batch = self.engine.take_batch(replace(old, rows=rows, steps=steps))
        old_place = {row: place for place, row in enumerate(self.live)}
        row_of = [*live, *([live[0]] * (rows - len(live)))]
        device = batch.logits.device
        old_places = torch.tensor([old_place[row] for row in row_of], device=device)
        batch.copy_rows(self.batch, old_places)
        self.engine.return_batch(self.batch)
        self.batch, self.live = batch, list(live)
        self._row_of = torch.tensor(row_of, device=device)


def fuse_modules(model: SedemModules) -> tuple[FusedEncoder, FusedDecoder]:
    """Fuse the encoder and the decoder of a model; layers share the weights that they can."""
    config, encoder, decoder = model.config, model.encoder, model.decoder
    frozen = frozen_layers(encoder, config.extract_layer)
    fused_encoder = FusedEncoder(
        frozen,
        config.extract_layers,
        encoder.bos_token_id,
        encoder.model.get_input_embeddings().weight,
        encoder.model.get_decoder().rotary_emb,
    )
    if encoder is not decoder:
        encoder.truncate(config.extract_layer)
    fused_decoder = FusedDecoder(
        config,
        adapted_layers(decoder, frozen if encoder is decoder else ()),
        decoder.bos_token_id,
        model.decompressor,
        model.decompressor.states_per_slot,
        model.guidance,
        decoder.model.get_input_embeddings().weight,
        decoder.model.get_decoder().rotary_emb,
        decoder.model.get_decoder().norm,
        decoder.model.get_output_embeddings(),
    )
    return fused_encoder, fused_decoder


def round_up(count: int, unit: int) -> int:
    """Round up to the next bucket size: 1 to 8, 10, 12, 14, 16, 20, 24, ... times `unit`."""
    units = -(-count // unit)
    stride = 1
    while units > 8 * stride:
        stride *= 2
    return -(-units // stride) * stride * unit


def _bytes(batches: Sequence[StaticBatch]) -> int:
    return storage_bytes([buffer for batch in batches for buffer in batch.buffers])


def _check_capturable(backbone: Backbone) -> None:
    rope_type = backbone.model.config.rope_parameters["rope_type"]
    if rope_type in ("dynamic", "longrope"):
        raise ConfigError(
            f"backbone '{backbone.name}' has '{rope_type}' rotary positions, which depend on "
            "the length of the sequence and cannot be captured; use engine 'static'"
        )
