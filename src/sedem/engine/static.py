"""The fast engine: fused layers, merged adapters, static caches and, on a GPU, captured graphs.

`open_engine` opens it or the reference.

Letters: B batch, T tokens, E encoder width, V vocabulary, X extraction layers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from sedem.backbone.decoder import FAMILIES, Backbone
from sedem.bank.memory_bank import BankReader
from sedem.engine.device import (
    FairLock,
    Pool,
    Replay,
    Upload,
    attention_backends,
    device_lock,
    pool_bytes,
    round_up,
    storage_bytes,
)
from sedem.engine.eager import Eager
from sedem.engine.fused import FusedEncoder, FusedLayer, fuse_modules
from sedem.engine.interface import Engine, Rows
from sedem.engine.kept import BlockWalk, Kept, KeptBudget, Progress
from sedem.engine.rows import Batches, StaticRows, buffers_of
from sedem.errors import ConfigError
from sedem.modules import SedemModules

logger = logging.getLogger(__name__)

ENGINES = ("auto", "eager", "static", "graphs")
WEIGHTS = ("full", "int8")
MAX_QUESTION_BUFFERS = 32
"""Number of question batch sizes whose buffers are kept."""


class QuestionBuffers:
    """Fixed buffers in which questions of at most a given number and length are encoded.

    Attributes:
        ids: token ids `[B, T]`, zero where a question has ended.
        states: their states `[X, B, T, E]`.
    """

    def __init__(
        self,
        encoder: FusedEncoder,
        rows: int,
        tokens: int,
        *,
        graph: bool = False,
        pool: Pool = None,
    ) -> None:
        embedding, layers = encoder.embedding, len(encoder.extract_layers)
        self.encoder = encoder
        self.upload = Upload(embedding.device, {"ids": ((rows, tokens), torch.long)})
        self.ids = self.upload.device["ids"]
        self.states = embedding.new_zeros(layers, rows, tokens, embedding.shape[1])
        self._graph = graph
        self._replay_encode = Replay(self.buffers, graph=graph, pool=pool)

    @property
    def buffers(self) -> list[Tensor]:
        """All tensors."""
        return [self.ids, self.states]

    def encode(self, ids_BT: Tensor) -> Tensor:
        """Return a copy of the states `[X, B, T, E]` of questions that fit into the buffers."""
        rows, tokens = ids_BT.shape
        self.upload.begin()
        ids = self.upload.host["ids"].zero_()
        ids[:rows, :tokens] = ids_BT
        self.upload.send()
        # Only a graph always has the same shape. Otherwise, padding is not run.
        width = self.ids.shape[1] if self._graph else tokens
        self._replay_encode(lambda: self._encode(width))
        return self.states[:, :rows, :tokens].clone()

    def _encode(self, width: int) -> None:
        self.states[:, :, :width] = self.encoder.states(self.ids[:, :width])


class Static:
    """Runs fused layers in static buffers; see `interface.Engine`.

    One thread at a time uses a GPU, and the buffers that threads share. On a CPU, each thread runs
    its own answers beside the others, and the system divides the cores among them by priority.

    Args:
        model: its weights are fused and merged in place, once. It must not be trained or moved
            afterwards.
        graphs: whether to capture encoding, prefill and step as CUDA graphs.
        int8: whether steps run int8 matrices; see `int8`.

    Attributes:
        batches: the static buffers of answers, in use and idle.

    Raises:
        ConfigError: a backbone cannot be captured, or this machine cannot multiply int8.
    """

    def __init__(
        self,
        model: SedemModules,
        *,
        graphs: bool,
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
        self.name = "graphs" if graphs else "static"
        self.batch_size = 64 if graphs else 16
        self.ahead = graphs
        self.model = model
        self.encoder, self.decoder = fuse_modules(model)
        if int8:
            from sedem.engine.int8 import int8_steps

            self.decoder = int8_steps(self.decoder)
        budget = budget or KeptBudget()
        self.kept = Kept(BlockWalk(self.decoder), budget)
        on_cpu, room = model.device.type == "cpu", budget.room()
        if room is not None:
            self.kept.limit_to(room)
        limit = room if on_cpu else None
        self.batches = Batches(self.decoder, self.kept, graphs=graphs, limit=limit)
        changing = any(map(depends_on_length, (model.encoder, model.decoder)))
        self._beside = on_cpu and not changing
        self._question_buffers: dict[tuple[int, int], QuestionBuffers] = {}
        self._buffers_lock = FairLock()
        self._graphs = graphs

    @torch.no_grad()
    def encode(self, ids_BT: Tensor) -> Tensor:
        """Return frozen states at the extraction layers `[X, B, T, E]`."""
        turns = nullcontext() if self._beside else self._buffers_lock.in_turns()
        with turns, self.answer_lock():
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

    @torch.no_grad()
    def read_prefixes(self, prefixes: Sequence[Tensor]) -> list[Tensor]:
        """Return the decoder's states of prefixes at the injection layer; answers reuse them."""
        with self.device_lock():
            self._check_not_moved()
            return [self.batches.prefixes.read(ids_P) for ids_P in prefixes]

    @contextmanager
    def open_rows(self, count: int) -> Iterator[Rows]:
        """Open rows of a running batch; see `interface.Engine`."""
        with self.device_lock():
            self._check_not_moved()
        rows = StaticRows(self.batches, count, self.answer_lock)
        try:
            yield rows
        finally:
            rows.close()

    @torch.no_grad()
    def warm(
        self,
        bank: BankReader,
        blocks: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Compute keys and values of blocks, as many as the budget keeps; see `SeDeM.warm`."""
        bank = bank.snapshot()
        bank.check_made_by(self.model.fingerprint())
        wanted = list(range(len(bank)) if blocks is None else blocks)
        for block in wanted:
            if not 0 <= block < len(bank):
                raise ConfigError(f"block {block} is to be warmed, the bank has {len(bank)}")
        kept, together, ready = self.kept, self.kept.walk.together, 0
        room = sum(level.limit for level in kept.levels)
        for first in range(0, len(wanted), together):
            group, fitting = wanted[first : first + together], []
            with self.device_lock():
                for block, states in zip(group, kept.walk.sizes(bank, group), strict=True):
                    if (needed := kept.entry_bytes(states)) <= room:
                        fitting.append(block)
                        room -= needed
                kept.fetch(bank, fitting)
            ready += len(fitting)
            if progress is not None:
                progress(first + len(group), len(wanted))
        return ready

    def most_blocks(self) -> int | None:
        """Return how many blocks one answer may use; see `interface.Engine`."""
        return self.batches.most_blocks()

    def memory(self) -> dict[str, int]:
        """Return bytes by use; see `interface.Engine`."""
        from sedem.engine.int8 import step_bytes

        modules = [self.model, self.decoder.decompress]
        weights = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        layers: list[FusedLayer] = [*self.encoder.layers, *self.decoder.layers]
        weights += [t for layer in layers for t in vars(layer).values() if isinstance(t, Tensor)]
        caches = buffers_of([*self.batches.idle, *self.batches.active])
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
            self.batches.prefixes.clear()
            self.batches.release()

    @contextmanager
    def device_lock(self) -> Iterator[None]:
        """Reserve the buffers and their GPU for this thread, and choose attention kernels."""
        device = self.model.device
        with device_lock(device), self._buffers_lock, attention_backends(device):
            yield

    @contextmanager
    def answer_lock(self) -> Iterator[None]:
        """Reserve what a piece of work needs that uses no buffers of other threads."""
        if not self._beside:
            with self.device_lock():
                yield
            return
        with attention_backends(self.model.device):
            yield

    def _check_not_moved(self) -> None:
        # Moving or casting a module moves its own weights and leaves the fused ones behind.
        fused = self.decoder.layers[0].qkv
        if (self.model.device, self.model.decoder.dtype) != (fused.device, fused.dtype):
            raise ConfigError(
                f"the model was changed to {self.model.decoder.dtype} on '{self.model.device}' "
                f"after its engine was opened for {fused.dtype} on '{fused.device}'; give dtype "
                "and device to from_pretrained"
            )


def keeping_engine(engine: Engine) -> Static:
    """Return the engine if it keeps keys and values.

    Raises:
        ConfigError: it keeps none.
    """
    if not isinstance(engine, Static):
        raise ConfigError(
            f"engine '{engine.name}' keeps no keys and values; open the model with 'static' or "
            "'graphs'"
        )
    context = engine.model.config.block_context
    if context != "independent":
        raise ConfigError(
            f"block_context of this model is '{context}': keys and values of a block depend on the "
            "blocks before it and cannot be kept; that needs 'independent'"
        )
    return engine


def depends_on_length(backbone: Backbone) -> bool:
    """Whether rotary positions depend on the length of the sequence, so graphs cannot run them."""
    return backbone.model.config.rope_parameters["rope_type"] in ("dynamic", "longrope")


def open_engine(
    name: str,
    model: SedemModules,
    attention: str = "sdpa",
    budget: KeptBudget | None = None,
    weights: str = "full",
) -> Engine:
    """Open an engine for a model; all but "eager" need a model that no longer changes or moves.

    Args:
        name: "eager" is the reference; "static" has fused layers and static caches; "graphs"
            also captures them as CUDA graphs; "auto" is "graphs" on a GPU and "static" elsewhere or
            if graphs cannot be captured, and "eager" for a layout that the others are not proven
            equal on.
        model: its weights are fused and adapters merged, unless the engine is "eager".
        attention: how the backbones were opened; "eager" attention needs engine "eager".
        budget: limits on kept keys and values of independent blocks; "eager" keeps none.
        weights: "int8" rounds the decoder's matrices in decoding steps on a CPU, see `int8`; it
            needs "static", which "auto" then means.

    Raises:
        ConfigError: there is no such engine, or it cannot run this model.
    """
    if name not in ENGINES:
        raise ConfigError(f"engine is '{name}'; it can be {', '.join(ENGINES)}")
    _check_weights(weights, name, model)
    int8, on_gpu = weights == "int8", model.device.type == "cuda"
    if int8:
        name = "static"
    layouts = {b.model.config.model_type for b in (model.encoder, model.decoder)}
    unproven = ", ".join(sorted(layouts - set(FAMILIES)))
    if name == "auto":
        if unproven:
            logger.warning(
                "engine 'eager' runs this model: the fast one is unproven on %s", unproven
            )
        name = "static"
        if unproven or attention == "eager":
            name = "eager"
        elif on_gpu and not any(map(depends_on_length, (model.encoder, model.decoder))):
            name = "graphs"
    if name == "eager":
        return Eager(model, None if budget is None else budget.room())
    if unproven:
        raise ConfigError(
            f"engine '{name}' is proven equal on the layouts {', '.join(FAMILIES)}, not on "
            f"{unproven}; use engine 'eager'"
        )
    if attention == "eager":
        raise ConfigError(f"engine '{name}' has no eager attention; use engine 'eager'")
    if name == "graphs" and not on_gpu:
        raise ConfigError(
            f"engine 'graphs' needs a CUDA device, the model is on '{model.device}'; use 'static'"
        )
    return Static(model, graphs=name == "graphs", int8=int8, budget=budget)


def _check_weights(weights: str, engine: str, model: SedemModules) -> None:
    if weights not in WEIGHTS:
        raise ConfigError(f"weights are '{weights}'; they can be {', '.join(WEIGHTS)}")
    if weights == "full":
        return
    if model.device.type != "cpu":
        raise ConfigError(
            f"weights 'int8' are for a CPU, the model is on '{model.device}'; use weights 'full'"
        )
    if engine not in ("auto", "static"):
        raise ConfigError(f"weights 'int8' need engine 'static', not '{engine}'")
