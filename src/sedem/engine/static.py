"""The fast path: lean layers, merged adapters, static caches and, on a GPU, captured graphs.

Letters: B batch, T tokens, E encoder width, V vocabulary, X extraction layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from threading import RLock
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from sedem.engine.eager import Eager
from sedem.errors import ConfigError
from sedem.engine.fuse import (adapted_layers, frozen_layers, storage_bytes)
from sedem.engine.interface import Step
from sedem.engine.cuda_graphs import (new_pool, pool_bytes)
from sedem.engine.batch import (Bucket, Lane, FusedDecoder)
from sedem.engine.interface import Start
from sedem.engine.layers import FusedLayer
from sedem.engine.encoder import (FusedEncoder, Questions)
from sedem.engine.device import turn

if TYPE_CHECKING:
    from sedem.backbone.decoder import Backbone
    from sedem.model import SeDeM

ENGINES = ("auto", "eager", "static", "graphs")
QUESTION_BUCKETS = 32
"""Buckets of questions whose buffers are kept."""
FREE_BYTES = 2**30
"""Of lanes that nobody uses, so much is kept for the next batch of their size."""
FIRST_STEPS = 64
"""Room for an answer to start with; a longer one moves on."""


class Engine(Protocol):
    """What reading and answering run a model with.

    Attributes:
        name: "eager", "static" or "graphs".
        batch: questions that it answers well together.
        ahead: whether a step may be started before the token before it is read.
    """

    name: str
    batch: int
    ahead: bool

    def encode(self, ids_BT: Tensor) -> Tensor:
        """Frozen states at the extraction layers `[X, B, T, E]`, the start token's dropped."""
        ...

    def encode_questions(self, ids_BT: Tensor) -> Tensor:
        """The same for questions: few tokens, often."""
        ...

    def start(
        self, starts: Sequence[Start], limit: int
    ) -> AbstractContextManager[tuple[Tensor, Step]]:
        """Decompress, inject and prefill a batch, for answers of at most `limit` tokens."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes of weights, of caches, and of what captured graphs keep beside them."""
        ...

    def release(self) -> None:
        """Let go of buffers that nobody uses; the next batches make their own."""
        ...


def open_engine(name: str, model: SeDeM, attention: str = "sdpa") -> Engine:
    """The engine of a name for a model, which stays where it is and as it is from then on.

    Args:
        name: "eager" is the reference; "static" has lean layers and static caches; "graphs"
            captures them as CUDA graphs; "auto" is "graphs" on a GPU and "static" elsewhere.
        model: whose weights are fused and merged, unless the engine is "eager".
        attention: as the backbones were opened; all but "eager" have attention of their own.

    Raises:
        ConfigError: there is no such engine, or it cannot run this model.
    """
    if name not in ENGINES:
        raise ConfigError(f"engine is '{name}'; it can be {', '.join(ENGINES)}")
    on_gpu = model.device.type == "cuda"
    if name == "auto":
        name = "eager" if attention == "eager" else "graphs" if on_gpu else "static"
    if name == "eager":
        return Eager(model)
    if attention == "eager":
        raise ConfigError(f"engine '{name}' has no eager attention; take engine 'eager'")
    if name == "graphs" and not on_gpu:
        raise ConfigError(
            f"engine 'graphs' needs a CUDA device, the model is on '{model.device}'; take 'static'"
        )
    return Static(model, graphs=name == "graphs")


class Static:
    """Lean layers over static buffers; calls from several threads take turns.

    Args:
        model: its weights are fused and merged in place, once; it must not be trained or moved.
        graphs: whether to capture encoding, prefill and step as CUDA graphs.
    """

    def __init__(self, model: SeDeM, *, graphs: bool) -> None:
        if graphs:
            for backbone in (model.encoder, model.decoder):
                _check_capturable(backbone)
        self.name = "graphs" if graphs else "static"
        self.batch = 64 if graphs else 16
        self.ahead = graphs
        self.model = model
        self.encoder, self.decoder = fuse_modules(model)
        self._questions: dict[tuple[int, int], Questions] = {}
        self._free: list[Lane] = []
        self._used: list[Lane] = []
        self._lock = RLock()
        self._graph = graphs
        self._pool = new_pool() if graphs else None

    @torch.no_grad()
    def encode(self, ids_BT: Tensor) -> Tensor:
        """Frozen states at the extraction layers `[X, B, T, E]`, the start token's dropped."""
        with self.turn():
            self._check_place()
            return self.encoder.states(ids_BT)

    @torch.no_grad()
    def encode_questions(self, ids_BT: Tensor) -> Tensor:
        """The same in the buffers of a bucket."""
        size = round_up(ids_BT.shape[0], 1), round_up(ids_BT.shape[1], 8)
        with self.turn():
            self._check_place()
            questions = self._questions.pop(size, None) or Questions(
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
        with self.turn():
            self._check_place()
            run = Run(self, starts, limit)
        try:
            yield run.logits(), run.step
        finally:
            with self.turn():
                self.give_back(run.lane)

    def memory(self) -> dict[str, int]:
        """Bytes of weights, of the buffers of lanes and questions, and of the graphs' pool."""
        weights = [*self.model.parameters(), *self.model.buffers(), *self._fused_tensors()]
        caches = [b for lane in (*self._free, *self._used) for b in lane.buffers]
        caches += [b for questions in self._questions.values() for b in questions.buffers]
        return {
            "weights": storage_bytes(weights),
            "caches": storage_bytes(caches),
            "graphs": pool_bytes(self._pool) if self._graph else 0,
        }

    def release(self) -> None:
        """Let go of lanes and questions that nobody uses; the next batches make their own."""
        with self.turn():
            self._free, self._questions = [], {}
            # A pool cannot be shared again once its last graph is gone.
            self._pool = new_pool() if self._graph else None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Keep these buffers, and the GPU that they are on, to this thread."""
        with turn(self.model.device), self._lock:
            yield

    def take(self, bucket: Bucket) -> Lane:
        """A lane of this size that nobody uses."""
        lane = next((lane for lane in self._free if lane.bucket == bucket), None)
        if lane is None:
            lane = Lane(self.decoder, bucket, graph=self._graph, pool=self._pool)
        else:
            self._free.remove(lane)
        self._used.append(lane)
        return lane

    def give_back(self, lane: Lane) -> None:
        """Keep a lane for the next batch of its size, as long as there is room for it."""
        self._used.remove(lane)
        self._free.append(lane)
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


class Run:
    """One batch of answers in a lane: rows leave it when they are finished, long ones get room.

    Args:
        engine: gives the lanes.
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
        self.lane = engine.take(bucket)
        try:
            with torch.no_grad():
                self.lane.prefill(starts)
        except BaseException:
            engine.give_back(self.lane)
            raise
        self._order: Tensor | None = None

    def logits(self) -> Tensor:
        """Logits of all rows `[B, V]`; of rows that have left, whatever."""
        count = len(self.places)
        if self._order is None:
            return self.lane.logits[:count]
        logits_BV = self.lane.logits.new_zeros(self.rows, self.lane.logits.shape[1])
        return logits_BV.index_copy_(0, self._order[:count], self.lane.logits[:count])

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
        with self.engine.turn():
            self._move(live)
            if self._order is None:
                missing = self.lane.bucket.rows - len(ids_B)
                ids_B = torch.cat([ids_B, ids_B[:1].expand(missing)])
            else:
                ids_B = ids_B[self._order]
            self.lane.step(ids_B)
            return self.logits()

    def _move(self, live: Sequence[int]) -> None:
        """Into a lane of half the rows or fewer when enough have finished, or of more steps."""
        old = self.lane.bucket
        rows, steps = round_up(len(live), 1), old.steps
        if not self.lane.steps_left and steps < self.most_steps:
            steps = round_up(min(self.most_steps, 2 * steps), 16)
        if 2 * rows > old.rows and steps == old.steps:
            return
        lane = self.engine.take(replace(old, rows=rows, steps=steps))
        at = {row: place for place, row in enumerate(self.places)}
        order = [*live, *([live[0]] * (rows - len(live)))]
        device = lane.logits.device
        lane.take_over(self.lane, torch.tensor([at[row] for row in order], device=device))
        self.engine.give_back(self.lane)
        self.lane, self.places = lane, list(live)
        self._order = torch.tensor(order, device=device)


def fuse_modules(model: SeDeM) -> tuple[FusedEncoder, FusedDecoder]:
    """Encoder and decoder of a model as lean layers that share what they can."""
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


def _bytes(lanes: Sequence[Lane]) -> int:
    return storage_bytes([buffer for lane in lanes for buffer in lane.buffers])


def _check_capturable(backbone: Backbone) -> None:
    kind = backbone.model.config.rope_parameters["rope_type"]
    if kind in ("dynamic", "longrope"):
        raise ConfigError(
            f"backbone '{backbone.name}' has '{kind}' rotary positions, which depend on the length "
            "of the sequence and cannot be captured; take engine 'static'"
        )
