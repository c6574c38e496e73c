"""The fast engine: fused layers, merged adapters, static caches and, on a GPU, captured graphs.

Letters: B batch, T tokens, E encoder width, V vocabulary, X extraction layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from sedem.backbone.decoder import Backbone
from sedem.engine.buffers import pool_bytes, round_up
from sedem.engine.compiled import compiled_layers
from sedem.engine.device import FairLock, attention_backends, device_lock, storage_bytes
from sedem.engine.fused import QuestionBuffers, fuse_modules
from sedem.engine.int8 import int8_steps, step_bytes
from sedem.engine.interface import Rows
from sedem.engine.kept import BlockWalk, Kept, KeptBudget, decoder_fingerprint
from sedem.engine.layers import FusedLayer
from sedem.engine.rows import Batches, StaticRows
from sedem.errors import ConfigError
from sedem.modules import SedemModules

MAX_QUESTION_BUFFERS = 32
"""Number of question batch sizes whose buffers are kept."""


class Static:
    """Runs fused layers in static buffers, one thread at a time; see `interface.Engine`.

    Args:
        model: its weights are fused and merged in place, once. It must not be trained or moved
            afterwards.
        graphs: whether to capture encoding, prefill and step as CUDA graphs.
        compiled: whether to compile the arithmetic of layers; see `compiled`.
        int8: whether steps run int8 matrices; see `int8`.
        budget: limits on the kept keys and values of independent blocks.

    Attributes:
        kept: keys and values of independent blocks.
        batches: the static buffers of answers, in use and idle.

    Raises:
        ConfigError: a backbone cannot be captured, or this machine cannot multiply int8.
    """

    def __init__(
        self,
        model: SedemModules,
        *,
        graphs: bool,
        compiled: bool = False,
        int8: bool = False,
        budget: KeptBudget | None = None,
    ) -> None:
        if graphs:
            for backbone in (model.encoder, model.decoder):
                if depends_on_length(backbone):
                    raise ConfigError(
                        f"backbone '{backbone.name}' has rotary positions that depend on the "
                        "length of the sequence and cannot be captured; use engine 'static'"
                    )
        self.name = "compiled" if compiled else "graphs" if graphs else "static"
        self.batch_size = 64 if graphs else 16
        self.ahead = graphs
        self.model = model
        self.encoder, self.decoder = fuse_modules(model)
        if compiled:
            layers = compiled_layers(self.encoder.layers), compiled_layers(self.decoder.layers)
            self.encoder = replace(self.encoder, layers=layers[0])
            self.decoder = replace(self.decoder, layers=layers[1])
        if int8:
            self.decoder = int8_steps(self.decoder)
        self.kept = Kept(
            BlockWalk(self.decoder),
            budget or KeptBudget(),
            lambda: decoder_fingerprint(model),
        )
        self.batches = Batches(self.decoder, self.kept, graphs=graphs)
        self._question_buffers: dict[tuple[int, int], QuestionBuffers] = {}
        self._buffers_lock = FairLock()
        self._graphs = graphs

    @torch.no_grad()
    def encode(self, ids_BT: Tensor) -> Tensor:
        """Return frozen states at the extraction layers `[X, B, T, E]`."""
        with self._buffers_lock.in_turns(), self.device_lock():
            self._check_not_moved()
            return self.encoder.states(ids_BT)

    @torch.no_grad()
    def encode_questions(self, ids_BT: Tensor) -> Tensor:
        """Return the same, computed in the buffers of the next larger size."""
        size = round_up(ids_BT.shape[0], 1), round_up(ids_BT.shape[1], 8)
        with self.device_lock():
            self._check_not_moved()
            buffers = self._question_buffers.pop(size, None) or QuestionBuffers(
                self.encoder, *size, graph=self._graphs, pool=self.batches.pool
            )
            # Put last, so that the first one is the least recently used.
            self._question_buffers[size] = buffers
            if len(self._question_buffers) > MAX_QUESTION_BUFFERS:
                del self._question_buffers[next(iter(self._question_buffers))]
            return buffers.encode(ids_BT)

    @contextmanager
    def open_rows(self, count: int) -> Iterator[Rows]:
        """Open rows of a running batch; see `interface.Engine`."""
        with self.device_lock():
            self._check_not_moved()
        rows = StaticRows(self.batches, count, self.device_lock)
        try:
            yield rows
        finally:
            rows.close()

    def memory(self) -> dict[str, int]:
        """Return bytes by use; see `interface.Engine`."""
        modules = [self.model, self.decoder.decompress]
        weights = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        weights += self._fused_tensors()
        batches = [*self.batches.idle, *self.batches.active]
        caches = [b for batch in batches for b in batch.buffers]
        caches += [b for questions in self._question_buffers.values() for b in questions.buffers]
        return {
            "weights": storage_bytes(weights) + step_bytes(self.decoder),
            "caches": storage_bytes(caches),
            "graphs": pool_bytes(self.batches.pool) if self._graphs else 0,
            "kept": self.kept.nbytes,
        }

    def release(self) -> None:
        """Free what no batch uses; see `interface.Engine`."""
        with self.device_lock():
            self.kept.clear()
            self._question_buffers = {}
            self.batches.release()

    @contextmanager
    def device_lock(self) -> Iterator[None]:
        """Reserve the buffers and their GPU for this thread, and choose attention kernels."""
        device = self.model.device
        with device_lock(device), self._buffers_lock, attention_backends(device):
            yield

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


def depends_on_length(backbone: Backbone) -> bool:
    """Whether rotary positions depend on the length of the sequence, so graphs cannot run them."""
    return backbone.model.config.rope_parameters["rope_type"] in ("dynamic", "longrope")
