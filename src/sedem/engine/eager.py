"""The reference engine: Hugging Face's own layers, unmerged adapters, growing caches.

Every call uses the current weights, so it serves training and models that still change.

The encoder and the decoder are usually the same modules. Encoding switches their adapters off while
it runs, so a thread that answered meanwhile would answer without adapters. Therefore only one
thread at a time encodes or decodes, in order of request: see `FairLock`.

Letters: B batch, T tokens, P prefix tokens, E encoder width, V vocabulary, X extraction layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sedem.engine.conditioning import condition
from sedem.engine.device import storage_bytes
from sedem.engine.fair_lock import FairLock
from sedem.engine.interface import Rows, Start, Step
from sedem.engine.rows_apart import RowsApart
from sedem.method.encoder import encode
from sedem.method.injection import step as inject_step
from sedem.modules import SedemModules


class Eager:
    """Runs a model's own modules; see `interface.Engine`.

    Args:
        model: the model.
    """

    name = "eager"
    batch_size = 16
    ahead = False

    def __init__(self, model: SedemModules) -> None:
        self.model = model
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

    @contextmanager
    def start(self, starts: Sequence[Start], limit: int) -> Iterator[tuple[Tensor, Step]]:
        """Decompress and prefill; `limit` has no effect, because the caches grow.

        Yields:
            Logits after the prefixes `[B, V]`, and the step.
        """
        with self._modules_lock:
            logits_BV, advance = start_decoding(self.model, starts)

        def step(ids_B: Tensor, live: Sequence[int]) -> Tensor:
            with self._modules_lock:
                return advance(ids_B, live)

        yield logits_BV, step

    @contextmanager
    def open_rows(self, count: int) -> Iterator[Rows]:
        """Open rows that each run alone."""
        rows = RowsApart(self.start, count, self._modules_lock)
        try:
            yield rows
        finally:
            rows.close()

    def memory(self) -> dict[str, int]:
        """Return the bytes of weights; no cache outlives its batch."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return {"weights": storage_bytes(tensors), "caches": 0, "graphs": 0, "kept": 0}

    def release(self) -> None:
        """Do nothing, because there are no idle buffers."""


def start_decoding(model: SedemModules, starts: Sequence[Start]) -> tuple[Tensor, Step]:
    """Prefill a batch of rows of different lengths.

    Args:
        model: the model.
        starts: one for each row.

    Returns:
        Logits after the prefixes `[B, V]`, and the step.
    """
    from transformers import DynamicCache

    device = model.device
    prefixes = [start.prefix for start in starts]
    ids_BP = pad_sequence(prefixes, batch_first=True, padding_side="left").to(device)
    lengths_B1 = torch.tensor([[len(ids)] for ids in prefixes], device=device)
    valid_BP = torch.arange(ids_BP.shape[1], 0, -1, device=device) <= lengths_B1
    memory = [start.bank.memory(start.blocks).to(device, torch.float32) for start in starts]
    slot_tokens = [start.bank.slot_tokens(start.blocks).to(device) for start in starts]
    scores = [start.scores.to(device) for start in starts]
    filled = condition(
        model,
        ids_BP,
        valid_BP,
        pad_sequence(memory, batch_first=True),
        pad_sequence(slot_tokens, batch_first=True),
        pad_sequence(scores, batch_first=True, padding_value=-torch.inf),
        DynamicCache(),
    )
    stream = filled.stream
    assert stream is not None

    def advance(ids_B: Tensor, live: Sequence[int]) -> Tensor:
        return model.decoder.logits(
            inject_step(model.decoder, model.config.inject_layer, ids_B, stream)
        )

    return model.decoder.logits(filled.prefix[:, -1]), advance
