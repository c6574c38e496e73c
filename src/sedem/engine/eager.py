"""The reference engine: Hugging Face's own layers, unmerged adapters, growing caches.

Every call uses the current weights, so it serves training and models that still change. `condition`
takes selected blocks to the states of question and answer: decompress, guide, inject (section 3.3).

The encoder and the decoder are usually the same modules. Encoding switches their adapters off while
it runs, so a thread that answered meanwhile would answer without adapters. Therefore only one
thread at a time encodes or decodes, in order of request: see `device.FairLock`.

Letters: B batch, T tokens, K selected blocks, J slots per block, U restored states, P prefix
tokens, G key heads, H head width, E encoder width, D decoder width, V vocabulary, X extraction
layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sedem.engine.device import FairLock, storage_bytes
from sedem.engine.interface import AnswerInputs, Rows
from sedem.method.compressor import encode, state_mask
from sedem.method.injection import (
    GrowingCache,
    Prefilled,
    RestoredBlocks,
    keys_values,
    prefill,
    read_prefix,
    real_first,
    run_branches,
    step,
)
from sedem.modules import SedemModules

COPIES = 3
"""How often the states of a memory are in RAM at once: restored, as keys and values, and cached."""


class Eager:
    """Runs a model's own modules; see `interface.Engine`.

    Args:
        room: bytes of RAM for answers; None means what the machine has.
    """

    name = "eager"
    batch_size = 16
    ahead = False

    def __init__(self, model: SedemModules, room: int | None = None) -> None:
        self.model, self.room = model, room
        self._modules_lock = FairLock()

    def encode(self, ids_BT: Tensor) -> Tensor:
        """Return frozen states at the extraction layers `[X, B, T, E]`."""
        with self._modules_lock.in_turns(), self._modules_lock:
            return encode(self.model.encoder, ids_BT, self.model.config.extract_layers)

    def encode_questions(self, ids_BT: Tensor) -> Tensor:
        """Return the same for questions, whose ids are on the CPU."""
        ids_BT = ids_BT.to(self.model.encoder.device)
        with self._modules_lock:
            return encode(self.model.encoder, ids_BT, self.model.config.extract_layers)

    @torch.no_grad()
    def read_prefixes(self, prefixes: Sequence[Tensor]) -> list[Tensor]:
        """Return the decoder's states of prefixes at the injection layer; nothing is reused."""
        decoder, config = self.model.decoder, self.model.config
        layer, room = config.inject_layer, config.states_per_block
        with self._modules_lock:
            return [read_prefix(decoder, layer, ids_P, room) for ids_P in prefixes]

    @contextmanager
    def open_rows(self, count: int) -> Iterator[Rows]:
        """Open rows; those that join together run together."""
        yield EagerRows(self.model, count, self._modules_lock)

    def most_blocks(self) -> int | None:
        """Return how many blocks of full size one answer may use."""
        decoder, config = self.model.decoder, self.model.config
        layers = decoder.depth - config.inject_layer
        each = COPIES * 2 * layers * decoder.width * decoder.dtype.itemsize
        return None if self.room is None else self.room // (each * config.states_per_block)

    def memory(self) -> dict[str, int]:
        """Return the bytes of weights; no cache outlives its batch."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return {"weights": storage_bytes(tensors), "caches": 0, "graphs": 0, "kept": 0}

    def release(self) -> None:
        """Do nothing, because there are no idle buffers."""


class EagerRows:
    """Rows in growing caches; see `interface.Rows`.

    Args:
        turn: held while rows join and while all of them run one token, so that a thread that reads
            documents delays a token of all rows once.
    """

    def __init__(self, model: SedemModules, count: int, turn: AbstractContextManager[None]) -> None:
        self.model, self.count, self.turn = model, count, turn
        # Rows that joined together, -1 once they left, and what they share.
        self._groups: list[tuple[list[int], GrowingCache]] = []

    @torch.no_grad()
    def join(
        self, rows: Sequence[int], inputs: Sequence[AnswerInputs], limits: Sequence[int]
    ) -> Tensor:
        """Prefill some rows; `limits` have no effect, because caches grow."""
        with self.turn:
            logits_JV, cache = start_decoding(self.model, inputs)
        self._groups.append((list(rows), cache))
        return logits_JV

    @torch.no_grad()
    def branches(self, row: int, ids_SL: Tensor) -> Tensor:
        """Run several continuations of one row; return logits `[S, L, V]`."""
        rows, cache = next(group for group in self._groups if row in group[0])
        decoder, layer = self.model.decoder, self.model.config.inject_layer
        with self.turn:
            return decoder.logits(run_branches(decoder, layer, ids_SL, cache, rows.index(row)))

    def leave(self, row: int) -> None:
        """Free a row."""
        for rows, _ in self._groups:
            rows[:] = [-1 if one == row else one for one in rows]
        self._groups = [group for group in self._groups if max(group[0]) >= 0]

    @torch.no_grad()
    def step(self, ids_B: Tensor) -> Tensor:
        """Run one token of every row in use; return logits `[B, V]`."""
        decoder, inject_layer = self.model.decoder, self.model.config.inject_layer
        with self.turn:
            found = [
                (rows, decoder.logits(step(decoder, inject_layer, ids_B[rows], cache)))
                for rows, cache in self._groups
            ]
        logits_BV = found[0][1].new_zeros(self.count, found[0][1].shape[1])
        for rows, logits_JV in found:
            for row, logits_V in zip(rows, logits_JV, strict=True):
                if row >= 0:
                    logits_BV[row] = logits_V
        return logits_BV


def start_decoding(
    model: SedemModules, inputs: Sequence[AnswerInputs]
) -> tuple[Tensor, GrowingCache]:
    """Prefill a batch of rows of different lengths.

    Returns:
        Logits after the prefixes `[B, V]`, and the cache to continue from.
    """
    device, cache = model.device, GrowingCache()
    prefixes = [row.prefix for row in inputs]
    ids_BP = pad_sequence(prefixes, batch_first=True, padding_side="left").to(device)
    lengths_B1 = torch.tensor([[len(ids)] for ids in prefixes], device=device)
    valid_BP = torch.arange(ids_BP.shape[1], 0, -1, device=device) <= lengths_B1
    memory = [row.bank.memory(row.blocks).to(device, torch.float32) for row in inputs]
    slot_tokens = [row.bank.slot_tokens(row.blocks).to(device) for row in inputs]
    scores = [row.scores.to(device) for row in inputs]
    filled = condition(
        model,
        ids_BP,
        valid_BP,
        pad_sequence(memory, batch_first=True),
        pad_sequence(slot_tokens, batch_first=True),
        pad_sequence(scores, batch_first=True, padding_value=-torch.inf),
        cache,
    )
    return model.decoder.logits(filled.prefix[:, -1]), cache


def condition(
    model: SedemModules,
    ids_BP: Tensor,
    valid_BP: Tensor,
    memory_BKJD: Tensor,
    slot_tokens_BKJ: Tensor,
    scores_BK: Tensor,
    cache: GrowingCache | None = None,
) -> Prefilled:
    """Run prefixes on selected blocks, as the model's configuration specifies.

    Args:
        ids_BP: start token, question and, in training, answer; padded on the left.
        valid_BP: False where a token is padding.
        memory_BKJD: memory of the selected blocks, in the order in which the decoder sees them.
        slot_tokens_BKJ: real tokens behind each slot; 0 for all slots where there is no block.
        scores_BK: s_n of the blocks; -inf where there is no block.
        cache: an empty cache to continue decoding from; None if nothing follows, as in training.
    """
    config, decoder, (batch, blocks) = model.config, model.decoder, slot_tokens_BKJ.shape[:2]
    # A joint batch to train on nearly always is padded, and its step waits for no device.
    padded = True if cache is None else None
    restored_BKUD = model.decompressor(memory_BKJD)
    real_BKU = state_mask(slot_tokens_BKJ, model.decompressor.states_per_slot)
    restored_BUD, real_BU = restored_BKUD.flatten(1, 2), real_BKU.flatten(1)
    if config.block_context == "independent" and real_BU.any():
        # Each block alone, then the prefixes with the keys and values of all blocks.
        restored_NUD, real_NU = real_first(restored_BKUD.flatten(0, 1), real_BKU.flatten(0, 1))
        cache = cache or GrowingCache()
        found = keys_values(decoder, config.inject_layer, restored_NUD)
        for layer, pair in enumerate(found, start=config.inject_layer):
            key, value = (
                t.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3) for t in pair
            )
            cache.upper.update(key, value, layer)
        restored_BUD, real_BU, padded = None, real_NU.view(batch, -1), None
    states = real_BU.shape[1] // max(blocks, 1)
    number_U = torch.arange(blocks, device=real_BU.device).repeat_interleave(states)
    bias_BU = None
    if model.guidance is not None:
        bias_BU = model.guidance(scores_BK).repeat_interleave(states, dim=1)
    room = config.states_per_block if config.read_once else None
    return prefill(
        decoder,
        config.inject_layer,
        ids_BP,
        valid_BP,
        restored_BUD,
        real_BU,
        blocks=RestoredBlocks(number_U.expand(batch, -1), config.block_context, bias_BU, room),
        cache=cache,
        padded=padded,
    )
