"""The reference for building a bank: Hugging Face's forward of the encoder's layers.

It runs the same segments in the same batches through the same number of layers. Tokenization, the
compressor and the storage of the bank are left out, which favours this reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sedem.backbone.decoder import Backbone
from sedem.config import SedemConfig
from sedem.engine.device import Clock
from sedem.method.segments import segment_text
from sedem.reading.encoding import batches
from sedem.types import Document


class EncoderLayers:
    """The first layers of a backbone as Hugging Face runs them.

    Args:
        config: gives the number of layers and the segmentation.
        encoder: a frozen backbone without adapters; its upper layers are removed.
    """

    def __init__(self, config: SedemConfig, encoder: Backbone) -> None:
        self.config = config
        self.encoder = encoder
        self.trunk = encoder.model.get_decoder()
        self.trunk.layers = self.trunk.layers[: config.extract_layer]
        self.trunk.config.num_hidden_layers = config.extract_layer
        self.trunk.norm = nn.Identity()

    def batches(self, documents: Sequence[Document]) -> list[Tensor]:
        """Token ids in the batches of `sedem.reading.encoding`, with the start token."""
        config = self.config
        how, shift = config.segmentation, config.segment_shift
        segmented = [
            segment_text(d.text, self.encoder, config.segment_length, how, shift) for d in documents
        ]
        ids_ST = torch.cat([segments.ids for segments in segmented])
        lengths_S = torch.cat([segments.lengths for segments in segmented])
        found = []
        for batch_B in batches(lengths_S, self.encoder.device):
            ids_BT = ids_ST[batch_B, : int(lengths_S[batch_B].max())]
            start_B1 = ids_BT.new_full((len(ids_BT), 1), self.encoder.bos_token_id)
            found.append(torch.cat([start_B1, ids_BT], dim=1))
        return found

    @torch.no_grad()
    def states(self, ids_BP: Tensor) -> Tensor:
        """Hidden states of a batch after the last layer that is run `[B, P, E]`."""
        found: Tensor = self.trunk(input_ids=ids_BP.to(self.encoder.device), use_cache=False)[0]
        return found

    def run_ms(self, documents: Sequence[Document]) -> float:
        """Milliseconds of the forward over all documents, without segmentation."""
        batched = self.batches(documents)
        clock = Clock(self.encoder.device)
        for ids_BP in batched:
            self.states(ids_BP)
        clock.lap("all_ms")
        return clock.timings["all_ms"]
