"""Reading one long document into a bank in parts, so that an interrupted build can continue.

Letters: N blocks, J slots per block, D decoder width.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sedem.bank.blocks import Blocks, partition, to_blocks
from sedem.bank.store.opening import PlacedStore
from sedem.bank.store.unfinished import StoredPart, append_part, replace_part, stored_parts
from sedem.config import SedemConfig
from sedem.engine.interface import Engine
from sedem.inference.read import Progress, compress
from sedem.method.modules import SedemModules
from sedem.method.segments import Segments
from sedem.quantization import Quantized
from sedem.types import Document

logger = logging.getLogger(__name__)

PART = 100_000
"""Tokens per part, if its segments are full: about 100 MB of memory for a 1B model at C = 4."""


def read_parts(
    model: SedemModules,
    engine: Engine,
    store: PlacedStore,
    document: Document,
    segments: Segments,
    progress: Progress | None = None,
) -> None:
    """Read a document into a bank in parts, one commit each; it is complete after the last one.

    A part depends only on the document and the model, so an interrupted build gives the same memory
    as an uninterrupted one. Parts whose files are incomplete are read again, with a warning.

    Args:
        model: its encoder and compressor make the memory.
        engine: runs the encoder.
        store: the store of an existing bank.
        document: its name and text.
        segments: segments of the text.
        progress: called with the number of segments done and of all.

    Raises:
        BankError: as `append_part`.
    """
    missing = missing_parts(model.config, store, document, segments)
    done = len(segments) - sum(len(part.segments) for part in missing)
    for part in missing:

        def report(count: int, done: int = done) -> None:
            if progress is not None:
                progress(done + count, len(segments))

        memory_NJD = encode_part(model, engine, part.segments, report)
        commit_part(store, model.fingerprint(), document, part, memory_NJD)
        done += len(part.segments)


@dataclass(frozen=True)
class MissingPart:
    """A part of a long document that a bank lacks.

    Attributes:
        number: its number, from 0.
        segments: its segments.
        blocks: its blocks; `Blocks.documents` are 0.
        before: number of blocks in earlier parts.
        last: whether no part comes after it.
        again: whether the bank has the part, but with a damaged file.
    """

    number: int
    segments: Segments
    blocks: Blocks
    before: int
    last: bool
    again: bool


def missing_parts(
    config: SedemConfig, store: PlacedStore, document: Document, segments: Segments
) -> list[MissingPart]:
    """Return the parts of a document that must be read, in commit order.

    Args:
        config: the model's settings.
        store: the store of an existing bank.
        document: its name and text.
        segments: segments of the text.

    Raises:
        BankError: the catalog of the bank is damaged.
    """
    step = part_segments(config)
    parts = [segments.part(slice(at, at + step)) for at in range(0, len(segments), step)]
    cut = config.compression, config.slots_per_block
    blocks = [partition(part, 0, *cut)[0] for part in parts]
    stored = stored_parts(store, document)
    stored = stored if _fit(stored, blocks) else []
    lost = [number for number, part in enumerate(stored) if not part.whole]
    for number in lost:
        logger.warning(
            "the file of part %d of %d of %r is missing or damaged in bank '%s'; the part is read "
            "again",
            *(number + 1, len(parts), document.name, store),
        )
    return [
        MissingPart(
            number,
            parts[number],
            blocks[number],
            before=sum(map(len, blocks[:number])),
            last=number + 1 == len(parts),
            again=number < len(stored),
        )
        for number in [*lost, *range(len(stored), len(parts))]
    ]


def encode_part(
    model: SedemModules,
    engine: Engine,
    segments: Segments,
    progress: Callable[[int], None] | None = None,
) -> Quantized:
    """Return the memory `[N, J, D]` of a part of a document, in bfloat16.

    Args:
        model: its encoder and compressor make the memory.
        engine: runs the encoder.
        segments: segments of the part.
        progress: called after every batch with the number of segments done.
    """
    config = model.config
    memory_SMD = compress(model, engine, [segments], progress)
    _, memory_NJD = to_blocks(segments, memory_SMD, 0, config.compression, config.slots_per_block)
    return Quantized(memory_NJD)


def commit_part(
    store: PlacedStore,
    fingerprint: str,
    document: Document,
    part: MissingPart,
    memory_NJD: Quantized,
) -> None:
    """Write a part into a bank in one commit; the last part completes the document.

    Raises:
        BankError: as `append_part` and `replace_part`.
    """
    what = store, fingerprint, document, part.blocks, memory_NJD
    if part.again:
        replace_part(*what, part.number)
    else:
        append_part(*what, before=part.before, last=part.last)


def part_segments(config: SedemConfig) -> int:
    """Number of segments per part: whole blocks, about `PART` tokens."""
    whole = math.lcm(config.slots, config.slots_per_block) // config.slots
    return -(-PART // (config.segment_length * whole)) * whole


def _fit(stored: Sequence[StoredPart], parts: Sequence[Blocks]) -> bool:
    """Whether the stored parts are exactly the first ones, but not all of them."""
    return len(stored) < len(parts) and all(
        np.array_equal(found.blocks.starts, wanted.starts)
        and np.array_equal(found.blocks.ends, wanted.ends)
        and np.array_equal(found.blocks.slot_tokens, wanted.slot_tokens)
        for found, wanted in zip(stored, parts, strict=False)
    )
