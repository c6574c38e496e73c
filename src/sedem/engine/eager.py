"""The reference engine: Hugging Face's own layers, adapters beside the weights, growing caches.

Every call uses the current weights, so it serves training and models that still change.

Letters: B batch, T tokens, P prefix tokens, U restored states, E encoder width, D decoder width,
V vocabulary, X extraction layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from sedem.engine.device import storage_bytes
from sedem.engine.interface import Start, Step
from sedem.method.encoder import encode
from sedem.method.injection import prefill, step
from sedem.method.modules import SedemModules


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

    def encode(self, ids_BT: Tensor) -> Tensor:
        """Return frozen states at the extraction layers `[X, B, T, E]`."""
        return encode(self.model.encoder, ids_BT, self.model.config.extract_layers)

    encode_questions = encode

    @contextmanager
    def start(self, starts: Sequence[Start], limit: int) -> Iterator[tuple[Tensor, Step]]:
        """Decompress and prefill; `limit` has no effect, because the caches grow.

        Yields:
            Logits after the prefixes `[B, V]`, and the step.
        """
        device = self.model.device
        restored = [
            self.model.decompressor(start.slots.to(device, torch.float32))[start.real.to(device)]
            for start in starts
        ]
        yield start_decoding(self.model, restored, [start.prefix for start in starts])

    def memory(self) -> dict[str, int]:
        """Return the bytes of weights; no cache outlives its batch."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return {"weights": storage_bytes(tensors), "caches": 0, "graphs": 0}

    def release(self) -> None:
        """Do nothing: there are no idle buffers."""


def start_decoding(
    model: SedemModules, restored: Sequence[Tensor], prefixes: Sequence[Tensor]
) -> tuple[Tensor, Step]:
    """Prefill a batch of rows of different lengths.

    Args:
        model: the model.
        restored: restored states of each row `[U, D]`.
        prefixes: token ids of each row `[P]`.

    Returns:
        Logits after the prefixes `[B, V]`, and the step.
    """
    device = model.device
    ids_BP = pad_sequence(list(prefixes), batch_first=True, padding_side="left").to(device)
    lengths_B1 = torch.tensor([[len(ids)] for ids in prefixes], device=device)
    valid_BP = torch.arange(ids_BP.shape[1], 0, -1, device=device) <= lengths_B1
    restored_BUD = pad_sequence(list(restored), batch_first=True)
    counts_B1 = torch.tensor([[len(states)] for states in restored], device=device)
    valid_BU = torch.arange(restored_BUD.shape[1], device=device) < counts_B1
    filled = prefill(
        model.decoder,
        model.config.inject_layer,
        ids_BP,
        valid_BP,
        restored_BUD,
        valid_BU,
        placement=model.config.start_placement,
        cache=DynamicCache(),
    )
    stream = filled.stream
    assert stream is not None

    def advance(ids_B: Tensor, live: Sequence[int]) -> Tensor:
        return model.decoder.logits(step(model.decoder, model.config.inject_layer, ids_B, stream))

    return model.decoder.logits(filled.prefix[:, -1]), advance
