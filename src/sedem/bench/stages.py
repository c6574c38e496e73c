"""Where the time of building a bank goes: segments, encoder, compressor; on a pass of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sedem.engine.device import Clock
from sedem.method.segments import segment_text
from sedem.model import SeDeM
from sedem.types import Document


def build_stages(model: SeDeM, documents: Sequence[Document]) -> dict[str, float]:
    """Milliseconds of building a bank, by stage.

    The compressor is clocked where it is called and segmenting by itself; the encoder is what is
    left of the whole, so moving batches to and from the device counts as encoding.
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
    compressing = _Stopwatch(clock)
    hooks = [
        model.compressor.register_forward_pre_hook(compressing.start),
        model.compressor.register_forward_hook(compressing.stop),
    ]
    clock.lap("before")
    model.read(documents)
    clock.lap("read")
    for hook in hooks:
        hook.remove()
    segment, read = clock.timings["segment_ms"], clock.timings["read"]
    return {
        "segment_ms": segment,
        "encode_ms": max(0.0, read - segment - compressing.total),
        "compress_ms": compressing.total,
    }


class _Stopwatch:
    """Adds up the time between its start and its stop, as hooks of a module."""

    def __init__(self, clock: Clock) -> None:
        self.total = 0.0
        self._clock = clock

    def start(self, *_: Any) -> None:
        self._clock.mark("start")

    def stop(self, *_: Any) -> None:
        self._clock.mark("stop")
        self.total += self._clock.timings["stop"] - self._clock.timings["start"]
