"""The fast engine: fused layers, merged adapters, static caches and, on a GPU, captured graphs.

Answers run together in one batch: rows join, finished rows leave, long answers get more room.
`open_engine` opens this engine or the reference.

Letters: B batch or rows, J rows that join, T tokens, P prefix tokens, D decoder width, E encoder
width, V vocabulary, X extraction layers, S branches, L tokens of each.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from sedem.backbone.decoder import FAMILIES, Backbone
from sedem.bank.memory_bank import BankReader
from sedem.engine.batch import Batches, BatchSize, DeviceLock, StaticBatch, buffers_of
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
from sedem.engine.fused import FusedEncoder, FusedLayer, fuse_modules
from sedem.engine.interface import AnswerInputs, Engine, Rows
from sedem.engine.kept import BlockWalk, Kept, KeptBudget, Progress
from sedem.errors import ConfigError
from sedem.method.injection import run_branches
from sedem.modules import SedemModules

logger = logging.getLogger(__name__)

ENGINES = ("auto", "eager", "static", "graphs", "int8")
MAX_QUESTION_BUFFERS = 32
"""Number of question batch sizes whose buffers are kept."""
FIRST_STEPS = 64
"""Answer tokens that the first batch has room for; longer answers move to a larger batch."""
COLUMNS = 64
"""Rounding unit of prefix columns and slots of rows that join, for few moves and few graphs."""


class QuestionBuffers:
    """Fixed buffers in which questions of at most a given number and length are encoded.

    Attributes:
        ids: token ids `[B, T]`, zero where a question has ended.
        states: their states `[X, B, T, E]`.
        buffers: all tensors.
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
        self.buffers = [self.ids, self.states]
        self._graph = graph
        self._replay = Replay(self.buffers, graph=graph, pool=pool)

    def encode(self, ids_BT: Tensor) -> Tensor:
        """Return a copy of the states `[X, B, T, E]` of questions that fit into the buffers."""
        rows, tokens = ids_BT.shape
        self.upload.begin()
        ids = self.upload.host["ids"].zero_()
        ids[:rows, :tokens] = ids_BT
        self.upload.send()
        # Only a graph always has the same shape. Otherwise, padding is not run.
        width = self.ids.shape[1] if self._graph else tokens
        for run in self._replay.runs():
            with run:
                self.states[:, :, :width] = self.encoder.states(self.ids[:, :width])
        return self.states[:, :rows, :tokens].clone()


class StaticRows:
    """Rows that share a running batch, and move to another one when it fits them better.

    Callers know a row by its number, which never changes. Moves change its place in the batch. A
    row of a very long memory has a batch to itself, see `Batches.exceeds`. One thread uses them.

    Args:
        lock: reserves the device; not held while others may go on.

    Attributes:
        batch: the shared batch that runs now; None before the first row.
        places: the place of each row in the shared batch.
        needs: the size that each of these rows needs, as a batch of one row.
        wide: the batches of rows with a very long memory.
    """

    def __init__(self, batches: Batches, count: int, lock: DeviceLock) -> None:
        self.batches, self.count, self.lock = batches, count, lock
        self.batch: StaticBatch | None = None
        self.places: dict[int, int] = {}
        self.needs: dict[int, BatchSize] = {}
        self.wide: dict[int, StaticBatch] = {}
        self._max_steps: dict[int, int] = {}
        # The row at each place and the place of each row, on the device; 0 where there is none.
        self._row_of = self._place_of = torch.zeros(0, dtype=torch.long)

    @torch.no_grad()
    def join(
        self, rows: Sequence[int], inputs: Sequence[AnswerInputs], limits: Sequence[int]
    ) -> Tensor:
        """Prefill some rows; see `interface.Rows.join`."""
        slots = [self.batches.slots_of(one) for one in inputs]
        wide = any(map(self.batches.exceeds, slots))
        if wide and len(rows) > 1:
            with ExitStack() as joining:
                logits = []
                for row, one, limit in zip(rows, inputs, limits, strict=True):
                    logits.append(self.join([row], [one], [limit])[0])
                    joining.callback(self.leave, row)
                joining.pop_all()
            return torch.stack(logits)

        # They start in the batch that then runs them or, if others run, in one of their own, from
        # which they are copied.
        beside = bool(self.places) and not wide
        if not beside and not wide:
            self._give_back()
        steps = 0 if beside else max(limits)
        size = BatchSize(
            rows=round_up(len(inputs), 1),
            prefix=round_up(max(len(row.prefix) for row in inputs), 8),
            slots=round_up(max(slots), 16),
            steps=round_up(steps if wide else min(steps, FIRST_STEPS), 16),
        )
        with self.lock():
            batch = self.batches.take(size)
        try:
            batch.prefill(inputs, self.lock)
        except BaseException:
            with self.lock():
                self.batches.give_back(batch)
            raise
        with self.lock():
            if beside:
                return self._copied(batch, rows, limits)
            if wide:
                self.wide[rows[0]] = batch
            else:
                self.needs = dict.fromkeys(rows, replace(size, rows=1))
                self._max_steps = dict(zip(rows, limits, strict=True))
                self._place(rows, batch)
            return batch.logits[: len(rows)].clone()

    def _copied(self, prefilled: StaticBatch, rows: Sequence[int], limits: Sequence[int]) -> Tensor:
        """Copy prefilled rows into the running batch."""
        try:
            # Rounded up, for few moves and few graphs.
            need = replace(
                prefilled.size,
                rows=1,
                prefix=round_up(prefilled.size.prefix, COLUMNS),
                slots=round_up(prefilled.size.slots, COLUMNS),
            )
            steps = (round_up(min(limit, FIRST_STEPS), 16) for limit in limits)
            needs = {row: replace(need, steps=n) for row, n in zip(rows, steps, strict=True)}
            self._fit({**self.needs, **needs})
            assert self.batch is not None
            free = set(range(self.batch.size.rows)) - set(self.places.values())
            places = dict(zip(rows, sorted(free), strict=False))
            try:
                self.batch.copy_rows(
                    prefilled, dict(zip(places.values(), range(len(rows)), strict=True))
                )
            except BaseException:
                for place in places.values():  # they stay free
                    self.batch.clear(slice(place, place + 1))
                raise
            logits_JV = prefilled.logits[: len(rows)].clone()
        finally:
            self.batches.give_back(prefilled)
        for row, place in places.items():
            # A copy from the host would wait for the device.
            self._row_of[place].fill_(row)
            self._place_of[row].fill_(place)
        self.places |= places
        self.needs |= needs
        self._max_steps |= zip(rows, limits, strict=True)
        return logits_JV

    def leave(self, row: int) -> None:
        """Free a row."""
        with self.lock():
            if row in self.wide:
                self.batches.give_back(self.wide.pop(row))
                return
            assert self.batch is not None
            place = self.places.pop(row)
            del self.needs[row], self._max_steps[row]
            self.batch.clear(slice(place, place + 1))

    @torch.no_grad()
    def branches(self, row: int, ids_SL: Tensor) -> Tensor:
        """Run several continuations of a row; return logits `[S, L, V]`."""
        batch, decoder = self.wide.get(row, self.batch), self.batches.decoder
        place, layer = self.places.get(row, 0), decoder.config.inject_layer
        assert batch is not None
        with self.lock():
            return decoder.logits(run_branches(decoder, layer, ids_SL, batch, place))

    @torch.no_grad()
    def step(self, ids_B: Tensor) -> Tensor:
        """Run one token of every row in use.

        Returns:
            Logits `[B, V]`; those of other rows are undefined.

        Raises:
            ConfigError: an answer is longer than its limit.
        """
        wide: dict[int, Tensor] = {}
        for row, alone in self.wide.items():
            with self.lock():
                alone.step(ids_B[row : row + 1])
                wide[row] = alone.logits[0].clone()
        if self.places:
            with self.lock():
                assert self.batch is not None
                # Each row has the room that its next step needs; steps double once they are used.
                needs = dict[int, BatchSize]()
                for row, place in self.places.items():
                    need, most = self.needs[row], self._max_steps[row]
                    if self.batch.text[place] >= need.prefix + need.steps:
                        if need.steps >= most:
                            raise ConfigError(
                                f"an answer is longer than {most} steps; start it with more"
                            )
                        need = replace(need, steps=round_up(min(most, 2 * need.steps), 16))
                    needs[row] = need
                self._fit(needs, grown=True)
                self.batch.step(ids_B[self._row_of])
                logits_BV = self.batch.logits[self._place_of]
        else:
            logits_BV = next(iter(wide.values())).expand(self.count, -1).clone()
        for row, logits_V in wide.items():
            logits_BV[row] = logits_V
        return logits_BV

    def close(self) -> None:
        """Free all rows."""
        self._give_back()
        while self.wide:
            self.leave(next(iter(self.wide)))

    def _give_back(self) -> None:
        with self.lock():
            if self.batch is not None:
                self.batches.give_back(self.batch)
            self.batch, self.places = None, {}

    def _fit(self, needs: dict[int, BatchSize], *, grown: bool = False) -> None:
        """Move to another batch if these rows do not fit, or if half the size is enough.

        If that fails, the rows stay where they are.
        """
        self.needs.update((row, needs[row]) for row in self.places)
        needed = BatchSize(
            rows=round_up(len(needs), 1),
            prefix=max(need.prefix for need in needs.values()),
            slots=max(need.slots for need in needs.values()),
            steps=max(need.steps for need in needs.values()),
        )
        running = self.batch
        if running is not None:
            old, per_slot = running.size, self.batches.decoder.states_per_slot
            if not old.holds(needed):
                # Twice the rows at once, so that a burst of questions causes few moves.
                more = needed.rows > old.rows
                rows = max(needed.rows, min(self.count, 2 * old.rows)) if more else old.rows
                needed = replace(needed, rows=rows)
            elif 2 * needed.columns(per_slot) > old.columns(per_slot):
                return
        new = self.batches.take(needed, grown=grown)
        try:
            new.clear(slice(None))
            if running is not None:
                new.copy_rows(running, dict(enumerate(self.places.values())))
            self._place([*self.places], new)
        except BaseException:
            self.batches.give_back(new)
            raise
        if running is not None:
            self.batches.give_back(running)

    def _place(self, rows: Sequence[int], batch: StaticBatch) -> None:
        """Assign rows to the first places of a batch."""
        row_of, place_of = [0] * batch.size.rows, [0] * self.count
        for place, row in enumerate(rows):
            row_of[place], place_of[row] = row, place
        device = batch.logits.device
        self._row_of = torch.tensor(row_of, device=device)
        self._place_of = torch.tensor(place_of, device=device)
        self.batch, self.places = batch, {row: place for place, row in enumerate(rows)}


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
            return [self.kept.read(ids_P) for ids_P in prefixes]

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
                sizes = bank.restored_sizes(group, self.decoder.states_per_slot)
                for block, states in zip(group, sizes, strict=True):
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
            self.batches.release()

    @contextmanager
    def device_lock(self) -> Iterator[None]:
        """Reserve the buffers and their GPU for this thread, and choose attention kernels."""
        device = self.model.device
        with device_lock(device), self._buffers_lock, attention_backends(device):
            yield

    @property
    def answer_lock(self) -> DeviceLock:
        """What reserves the device for a piece of work that uses no buffers of other threads."""
        return nullcontext if self._beside else self.device_lock

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
) -> Engine:
    """Open an engine for a model; all but "eager" need a model that no longer changes or moves.

    Args:
        name: "eager" is the reference; "static" has fused layers and static caches; "graphs"
            also captures them as CUDA graphs; "int8" is "static" with the decoder's matrices
            rounded in decoding steps on a CPU, see `int8`; "auto" is "graphs" on a GPU and
            "static" elsewhere or if graphs cannot be captured, and "eager" for a layout that the
            others are not proven equal on.
        model: its weights are fused and adapters merged, unless the engine is "eager".
        attention: how the backbones were opened; "eager" attention needs engine "eager".
        budget: limits on kept keys and values of independent blocks; "eager" keeps none.

    Raises:
        ConfigError: there is no such engine, or it cannot run this model.
    """
    if name not in ENGINES:
        raise ConfigError(f"engine is '{name}'; it can be {', '.join(ENGINES)}")
    on_gpu = model.device.type == "cuda"
    if name == "int8" and model.device.type != "cpu":
        raise ConfigError(
            f"engine 'int8' is for a CPU, the model is on '{model.device}'; use 'auto'"
        )
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
        from sedem.engine.eager import Eager  # the default engine does not need it

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
    return Static(model, graphs=name == "graphs", int8=name == "int8", budget=budget)
