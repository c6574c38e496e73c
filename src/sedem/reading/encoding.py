"""Encoding: documents -> segments -> hidden states -> memory -> blocks of a bank.

Reading needs no question. Adapters are off and no gradients are computed.

Letters: S segments, T tokens, M slots per segment, N blocks, J slots per block, D decoder width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import torch
from torch import Tensor

from sedem.bank.blocks import Blocks, to_blocks
from sedem.engine.interface import Engine
from sedem.method.compressor import slot_tokens
from sedem.method.segments import Segments, segment_text
from sedem.modules import SedemModules
from sedem.tensors import Quantized
from sedem.types import Document

BATCHES = {"cpu": 8, "cuda": 32}
"""Segments encoded together, by device; the states of more would exceed a CPU's caches."""

Progress = Callable[[int, int], None]
"""Called with how much is done and how much there is, in segments or in characters."""

Rows = tuple[Tensor, Tensor, Tensor]
"""Numbers `[S]`, ids `[S, T]` and lengths `[S]` of some segments."""


@torch.no_grad()
def encode(
    model: SedemModules,
    engine: Engine,
    documents: Sequence[Document],
    progress: Progress | None = None,
) -> tuple[Blocks, Quantized]:
    """Read documents together, whose short segments share batches.

    Args:
        progress: called after every batch, once all documents are cut, with numbers of segments.

    Returns:
        The blocks of all documents, whose `documents` are indices of the given ones, and their
        memory `[N, J, D]`.

    Raises:
        DataError: one has no tokens.
    """
    config = model.config
    segments: list[Segments] = []
    with Cutter(model, documents) as cutter:

        def kept() -> Iterator[Segments]:
            for part in cutter:
                segments.append(part)
                yield part

        def report(done: int) -> None:
            if progress is not None and (count := cutter.count) is not None:
                progress(done, count)

        memory_SMD = compress(model, engine, kept(), report)
    blocks, memories = [], []
    for index, (part, memory) in enumerate(
        zip(segments, memory_SMD.split([len(s) for s in segments]), strict=True)
    ):
        rows, memory_NJD = to_blocks(
            part, memory, index, config.compression, config.slots_per_block
        )
        blocks.append(rows)
        memories.append(memory_NJD)
    return Blocks.join(blocks), Quantized(torch.cat(memories))


def compress(
    model: SedemModules,
    engine: Engine,
    parts: Iterable[Segments],
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Encode and compress segments of similar length together, so that padding costs little.

    Full segments are encoded as soon as they fill a batch; all others wait for the last part. The
    batches therefore depend only on the segments.

    Args:
        parts: segments, grouped by document or by part of a document.

    Returns:
        Memory `[S, M, D]` in bfloat16 on the CPU, as a bank stores it. It is copied in one go,
        because a copy per batch would wait for that batch.
    """
    encoded: list[tuple[Tensor, Tensor]] = []
    done = 0
    for rows_B, ids_BT, lengths_B in _batches(parts, model.config.segment_length, model.device):
        encoded.append((rows_B, _compress(model, engine, ids_BT, lengths_B)))
        done += len(rows_B)
        if progress is not None:
            progress(done)
    shape = done, model.config.slots, model.decoder.width
    memory_SMD = torch.zeros(shape, dtype=torch.bfloat16, device=model.device)
    for rows_B, memory_BMD in encoded:
        memory_SMD[rows_B.to(model.device), : memory_BMD.shape[1]] = memory_BMD
    return memory_SMD.cpu()


def _batches(parts: Iterable[Segments], length: int, device: torch.device) -> Iterator[Rows]:
    """Yield the batches that `batches` gives, each as soon as its segments have come."""
    size, seen, ready = BATCHES[device.type], 0, 0
    full: list[Rows] = []
    others: list[Rows] = []
    for part in parts:
        numbers_S = torch.arange(seen, seen + len(part))
        is_full_S = part.lengths == length
        rows = numbers_S, part.ids, part.lengths
        full.append(_chosen(rows, is_full_S))
        others.append(_chosen(rows, ~is_full_S))
        seen, ready = seen + len(part), ready + len(full[-1][0])
        if ready >= size:
            joined, whole = _joined(full), ready - ready % size
            for first in range(0, whole, size):
                yield _chosen(joined, slice(first, first + size))
            full, ready = [_chosen(joined, slice(whole, None))], ready - whole
    last = _joined(full + others)
    for batch_B in batches(last[2], device):
        if len(batch_B):
            yield _chosen(last, batch_B)


def _chosen(rows: Rows, which: Tensor | slice) -> Rows:
    numbers_S, ids_ST, lengths_S = rows
    return numbers_S[which], ids_ST[which], lengths_S[which]


def _joined(rows: Sequence[Rows]) -> Rows:
    numbers, ids, lengths = zip(*rows, strict=True)
    return torch.cat(numbers), torch.cat(ids), torch.cat(lengths)


def _compress(model: SedemModules, engine: Engine, ids_BT: Tensor, lengths_B: Tensor) -> Tensor:
    """Memory `[B, M, D]` of a batch on its device, with M of its longest segment."""
    compression = model.config.compression
    longest = -(-int(lengths_B.max()) // compression) * compression
    mask_BT = torch.arange(longest) < lengths_B[:, None]
    states = engine.encode(ids_BT[:, :longest].to(model.encoder.device))
    mask_BT = mask_BT.to(states.device)
    memory_BMD = model.compressor(model.mixture(states.float()), mask_BT)
    # Zero, so that a bank's bytes do not depend on which segments were encoded together.
    padding_BM1 = (slot_tokens(mask_BT, compression) == 0)[..., None]
    return memory_BMD.masked_fill(padding_BM1, 0.0).to(torch.bfloat16)


def batches(lengths_S: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """Return the indices of the segments in each batch, the longest segments first."""
    return lengths_S.argsort(descending=True, stable=True).split(BATCHES[device.type])


class Cutter:
    """Cuts documents one after the other in a background thread, while others are encoded.

    Iterating gives the segments of each document in order, and raises its error, if any. Leaving
    the context drops documents that have not been cut.
    """

    def __init__(self, model: SedemModules, documents: Sequence[Document]) -> None:
        self._thread = ThreadPoolExecutor(1, "sedem-cutter")
        self._parts = [self._thread.submit(segments_of, model, one) for one in documents]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[Segments]:
        return (part.result() for part in self._parts)

    @property
    def count(self) -> int | None:
        """Total number of segments; None while documents are being cut."""
        if not self._parts[-1].done():
            return None
        return sum(len(part.result()) for part in self._parts)


def segments_of(model: SedemModules, document: Document) -> Segments:
    """Cut a document as a model reads it.

    Raises:
        DataError: it has no tokens.
    """
    config = model.config
    cut = config.segment_length, config.segmentation, config.segment_shift
    return segment_text(document.text, model.encoder, *cut)
