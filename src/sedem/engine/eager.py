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
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sedem.engine.device import FairLock, storage_bytes
from sedem.engine.interface import AnswerInputs, Rows
from sedem.guidance import independent
from sedem.guidance.branches import run_branches
from sedem.method.compressor import state_mask
from sedem.method.encoder import encode
from sedem.method.injection import Blocks, Prefilled, Stream, prefill, step
from sedem.modules import SedemModules

if TYPE_CHECKING:
    from transformers import DynamicCache


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
        with self._modules_lock:
            return [
                independent.read_prefix(
                    decoder, config.inject_layer, ids_P, config.states_per_block
                )
                for ids_P in prefixes
            ]

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
        self._groups: list[tuple[list[int], Stream]] = []

    @torch.no_grad()
    def join(
        self, rows: Sequence[int], inputs: Sequence[AnswerInputs], limits: Sequence[int]
    ) -> Tensor:
        """Prefill some rows; `limits` have no effect, because caches grow."""
        with self.turn:
            logits_JV, stream = start_decoding(self.model, inputs)
        self._groups.append((list(rows), stream))
        return logits_JV

    @torch.no_grad()
    def branches(self, row: int, ids_SL: Tensor) -> Tensor:
        """Run several continuations of one row; return logits `[S, L, V]`."""
        rows, stream = next(group for group in self._groups if row in group[0])
        decoder, inject_layer = self.model.decoder, self.model.config.inject_layer
        with self.turn:
            alone = stream.row(rows.index(row))
            return decoder.logits(run_branches(decoder, inject_layer, ids_SL, alone))

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
                (rows, decoder.logits(step(decoder, inject_layer, ids_B[rows], stream)))
                for rows, stream in self._groups
            ]
        logits_BV = found[0][1].new_zeros(self.count, found[0][1].shape[1])
        for rows, logits_JV in found:
            for row, logits_V in zip(rows, logits_JV, strict=True):
                if row >= 0:
                    logits_BV[row] = logits_V
        return logits_BV


def start_decoding(model: SedemModules, inputs: Sequence[AnswerInputs]) -> tuple[Tensor, Stream]:
    """Prefill a batch of rows of different lengths.

    Returns:
        Logits after the prefixes `[B, V]`, and the state to continue from.
    """
    from transformers import DynamicCache

    device = model.device
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
        DynamicCache(),
    )
    assert filled.stream is not None
    return model.decoder.logits(filled.prefix[:, -1]), filled.stream


def condition(
    model: SedemModules,
    ids_BP: Tensor,
    valid_BP: Tensor,
    memory_BKJD: Tensor,
    slot_tokens_BKJ: Tensor,
    scores_BK: Tensor,
    cache: DynamicCache | None = None,
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
    config, decompressor = model.config, model.decompressor
    restored_BKUD = decompressor(memory_BKJD)
    real_BKU = state_mask(slot_tokens_BKJ, decompressor.states_per_slot)
    bias_BK = None if model.guidance is None else model.guidance(scores_BK)
    if config.block_context == "independent" and real_BKU.any():
        return _independent(model, ids_BP, valid_BP, restored_BKUD, real_BKU, bias_BK, cache)
    number_K = torch.arange(real_BKU.shape[1], device=real_BKU.device)
    states = real_BKU.shape[2]
    number_BU = number_K.repeat_interleave(states).expand(len(real_BKU), -1)
    bias_BU = None if bias_BK is None else bias_BK.repeat_interleave(states, dim=1)
    return prefill(
        model.decoder,
        config.inject_layer,
        ids_BP,
        valid_BP,
        restored_BKUD.flatten(1, 2),
        real_BKU.flatten(1),
        blocks=Blocks(number_BU, config.block_context, bias_BU),
        cache=cache,
        # A batch to train on nearly always is, and its step waits for no device.
        padded=True if cache is None else None,
    )


def real_first(restored_NUD: Tensor, real_NU: Tensor) -> tuple[Tensor, Tensor]:
    """Move the states of real tokens to the front of each block, and cut the common padding.

    Returns:
        States `[N, U, D]` and the mask of the real ones, for the longest block's U.
    """
    longest = int(real_NU.sum(1).max())
    order_NU = real_NU.long().argsort(dim=1, descending=True, stable=True)[:, :longest]
    rows_N1 = torch.arange(len(real_NU), device=real_NU.device)[:, None]
    return restored_NUD[rows_N1, order_NU], real_NU[rows_N1, order_NU]


def _independent(
    model: SedemModules,
    ids_BP: Tensor,
    valid_BP: Tensor,
    restored_BKUD: Tensor,
    real_BKU: Tensor,
    bias_BK: Tensor | None,
    cache: DynamicCache | None,
) -> Prefilled:
    """The two passes of `independent`: over each block alone, then over the prefixes."""
    batch, blocks = real_BKU.shape[:2]
    restored_NUD, real_NU = real_first(restored_BKUD.flatten(0, 1), real_BKU.flatten(0, 1))
    inject_layer = model.config.inject_layer

    def side_by_side(tensor_NGUH: Tensor) -> Tensor:
        return tensor_NGUH.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)

    memory = [
        (side_by_side(key), side_by_side(value))
        for key, value in independent.keys_values(model.decoder, inject_layer, restored_NUD)
    ]
    positions_U = torch.arange(1, real_NU.shape[1] + 1, device=real_NU.device)
    return independent.prefill(
        model.decoder,
        inject_layer,
        ids_BP,
        valid_BP,
        memory,
        positions_U.repeat(blocks).expand(batch, -1),
        real_NU.view(batch, -1),
        None if bias_BK is None else bias_BK.repeat_interleave(real_NU.shape[1], dim=1),
        cache,
        model.config.states_per_block if model.config.read_once else None,
    )
