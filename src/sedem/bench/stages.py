"""Time of building a bank by stage (segments, encoder, compressor), in a separate pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sedem.engine.device import Clock
from sedem.method.segments import segment_text
from sedem.model import SeDeM
from sedem.types import Document


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
