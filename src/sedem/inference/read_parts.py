"""Reading one long document into a bank, part by part: a build that was killed goes on there.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np

from sedem.bank.blocks import Blocks, partition, to_blocks
from sedem.bank.store.local import LocalStore
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
"""Tokens of a part, if its segments are full: about 100 MB of memory for a 1B model at C = 4."""


def read_parts(
    model: SedemModules,
    engine: Engine,
    store: LocalStore,
    document: Document,
    segments: Segments,
    progress: Progress | None = None,
) -> None:
    """Read a document into a bank in parts, each one commit; it is there after the last one.

    A part depends on nothing but the document and the model, so a build that was interrupted
    anywhere gives the same memory as one that was not. Parts whose files are not whole are read
    again, with a warning.

    Args:
        model: its encoder and compressor make the memory.
        engine: runs the encoder.
        store: of the bank, which exists.
        document: its name and text.
        segments: of the text.
        progress: called with the number of segments done and of all.

    Raises:
        BankError: as `append_part`.
    """
    config = model.config
    cut = config.compression, config.slots_per_block
    step = part_segments(config)
    parts = [segments.part(slice(at, at + step)) for at in range(0, len(segments), step)]
    blocks = [Blocks.of(partition(part, 0, *cut)[0]) for part in parts]
    stored = stored_parts(store, document)
    stored = stored if _fit(stored, blocks) else []
    lost = [number for number, part in enumerate(stored) if not part.whole]
    for number in lost:
        logger.warning(
            "the file of part %d of %d of %r is missing or damaged in bank '%s'; the part is read "
            "again",
            *(number + 1, len(parts), document.name, store.folder),
        )
    missing = [*lost, *range(len(stored), len(parts))]
    done = len(segments) - sum(len(parts[number]) for number in missing)
    for number in missing:
        part = parts[number]

        def report(count: int, done: int = done) -> None:
            if progress is not None:
                progress(done + count, len(segments))

        memory_SMD = compress(model, engine, [part], report)
        _, memory_NJD = to_blocks(part, memory_SMD, 0, *cut)
        what = store, model.fingerprint(), document, blocks[number], Quantized(memory_NJD)
        if number < len(stored):
            replace_part(*what, number)
        else:
            before = sum(map(len, blocks[:number]))
            append_part(*what, before=before, last=number + 1 == len(parts))
        done += len(part)


def part_segments(config: SedemConfig) -> int:
    """Segments of a part: whole blocks, of about `PART` tokens."""
    whole = math.lcm(config.slots, config.slots_per_block) // config.slots
    return -(-PART // (config.segment_length * whole)) * whole


def _fit(stored: Sequence[StoredPart], parts: Sequence[Blocks]) -> bool:
    """Whether what is stored is exactly some of the parts, but not all of them."""
    return len(stored) < len(parts) and all(
        np.array_equal(found.blocks.starts, wanted.starts)
        and np.array_equal(found.blocks.ends, wanted.ends)
        and np.array_equal(found.blocks.slot_tokens, wanted.slot_tokens)
        for found, wanted in zip(stored, parts, strict=False)
    )
