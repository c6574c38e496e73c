"""What studies time besides a method's clocks: stages of building, and scoring of large banks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from experiments.bench.floors import Ceilings, Work
from sedem.answering.requests import encode_questions
from sedem.backbone.decoder import Backbone
from sedem.bank.search import key_scores
from sedem.bench.measure import spread
from sedem.config import SedemConfig
from sedem.engine.device import Clock
from sedem.evaluation.readers import BoundSedem
from sedem.method.segments import segment_text
from sedem.model import SeDeM
from sedem.quantization import BFLOAT16, Quantized, quantize
from sedem.reading.encoding import batches
from sedem.types import Document

DISTINCT_BLOCKS = 1000
"""Number of distinct random memory blocks; a larger bank repeats them, each with its own keys."""

WARM_UP = 2


def measure_selection(
    reader: BoundSedem, blocks: int, question: str, runs: int
) -> dict[str, object]:
    """Time exact scoring of every block of a synthetic bank for one question, with prepared keys.

    Args:
        reader: the reader whose selector is measured.
        blocks: number of blocks in the bank.
        question: the question.
        runs: number of measured runs.

    Returns:
        `blocks`, `tokens` that they represent, `bytes` of the keys, `score_ms`, and the `work` from
        which the floor is computed.
    """
    model = reader.model
    keys_NJRH = synthetic_keys(model, blocks)
    no_padding = torch.zeros(0, dtype=torch.long)
    hidden_1QE, mask_1Q = encode_questions(model, model.engine, [question])
    query_1QRH = model.selector.queries(hidden_1QE)
    times = []
    for run in range(-WARM_UP, runs):
        clock = Clock(model.device)
        key_scores(query_1QRH, mask_1Q, keys_NJRH, no_padding)
        clock.lap("score_ms")
        if run >= 0:
            times.append(clock.timings["score_ms"])
    projected = model.selector.w_key.out_features
    flops = 2 * int(mask_1Q.sum()) * blocks * model.config.slots_per_block * projected
    return {
        "blocks": blocks,
        "tokens": blocks * model.config.slots_per_block * model.config.compression,
        "bytes": keys_NJRH.nbytes,
        "score_ms": spread(times),
        "work": vars(Work(flops, keys_NJRH.nbytes)),
    }


def selection_floor_ms(work: dict[str, float], ceilings: Ceilings) -> float:
    """The minimum time to score, from the `work` of `measure_selection`."""
    return 1e3 * Work(**work).seconds(ceilings)


@torch.no_grad()
def synthetic_keys(model: SeDeM, blocks: int) -> Quantized:
    """The selector's keys `[N, J, R, H]` of random memory, as `keys.prepare` keeps them."""
    generator = torch.Generator().manual_seed(0)
    drawn_NJD = torch.randn(
        min(blocks, DISTINCT_BLOCKS),
        model.config.slots_per_block,
        model.decoder.width,
        generator=generator,
    )
    keys = quantize(model.selector.keys(drawn_NJD.to(model.selector.w_key.weight)), BFLOAT16)
    return keys[torch.arange(blocks, device=keys.values.device) % len(keys)]


class EncoderLayers:
    """The first layers of a backbone as Hugging Face runs them: the reference for building a bank.

    It runs the same segments in the same batches. Tokenization, the compressor and the storage of
    the bank are left out, which favours this reference.

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


def build_stages(model: SeDeM, documents: Sequence[Document]) -> dict[str, float]:
    """Milliseconds to build a bank, by stage.

    Segmenting is timed separately, and the compressor by hooks. The encoder's time is the rest of
    the total, so it includes moving batches to and from the device.
    """
    config = model.config
    clock = Clock(model.device)
    for document in documents:
        segment_text(
            document.text,
            model.encoder,
            config.segment_length,
            config.segmentation,
            config.segment_shift,
        )
    clock.lap("segment_ms")
    compressor_time = _Stopwatch(model.device)
    hooks = [
        model.compressor.register_forward_pre_hook(compressor_time.start),
        model.compressor.register_forward_hook(compressor_time.stop),
    ]
    clock.lap("before")
    model.read(documents)
    clock.lap("read")
    for hook in hooks:
        hook.remove()
    segment, read = clock.timings["segment_ms"], clock.timings["read"]
    return {
        "segment_ms": segment,
        "encode_ms": max(0.0, read - segment - compressor_time.total),
        "compress_ms": compressor_time.total,
    }


class _Stopwatch:
    """Sums the time of a module's calls; `start` and `stop` are its forward hooks."""

    def __init__(self, device: torch.device) -> None:
        self.total = 0.0
        self._device = device

    def start(self, *_: Any) -> None:
        self._clock = Clock(self._device)

    def stop(self, *_: Any) -> None:
        self._clock.lap("call")
        self.total += self._clock.timings["call"]
