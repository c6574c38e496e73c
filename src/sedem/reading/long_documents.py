"""Reading one long document into a bank in parts, so that an interrupted build can continue.

Letters: N blocks, J slots per block, D decoder width.
"""

from __future__ import annotations

import math
from itertools import accumulate

from sedem.bank.blocks import partition, to_blocks
from sedem.bank.file import BankFile
from sedem.config import SedemConfig
from sedem.engine.interface import Engine
from sedem.method.segments import Segments
from sedem.modules import SedemModules
from sedem.quantization import Quantized
from sedem.reading.encoding import Progress, compress
from sedem.types import Document

PART = 100_000
"""Tokens per part, if its segments are full: about 100 MB of memory for a 1B model at C = 4."""


def read_parts(
    model: SedemModules,
    engine: Engine,
    file: BankFile,
    document: Document,
    segments: Segments,
    progress: Progress | None = None,
) -> None:
    """Read a document into a bank in parts, one commit each; it is complete after the last one.

    A part depends only on the document and the model, so an interrupted build gives the same memory
    as an uninterrupted one.

    Args:
        model: its encoder and compressor make the memory.
        engine: runs the encoder.
        file: the file of the bank, which exists.
        document: its name and text.
        segments: segments of the text.
        progress: called with the number of segments done and of all.

    Raises:
        BankError: as `BankFile.append_part`.
    """
    step = part_segments(model.config)
    parts = [segments.part(slice(at, at + step)) for at in range(0, len(segments), step)]
    cut = model.config.compression, model.config.slots_per_block
    blocks = [partition(part, 0, *cut)[0] for part in parts]
    before = [0, *accumulate(map(len, blocks))]
    stored = file.stored_part(document)
    first = before.index(stored) if stored in before[:-1] else 0
    done = sum(map(len, parts[:first]))
    for number in range(first, len(parts)):

        def report(count: int, done: int = done) -> None:
            if progress is not None:
                progress(done + count, len(segments))

        memory_SMD = compress(model, engine, [parts[number]], report)
        _, memory_NJD = to_blocks(parts[number], memory_SMD, 0, *cut)
        file.append_part(
            model.fingerprint(),
            document,
            blocks[number],
            Quantized(memory_NJD),
            before=before[number],
            last=number + 1 == len(parts),
        )
        done += len(parts[number])


def part_segments(config: SedemConfig) -> int:
    """Number of segments per part: whole blocks, about `PART` tokens."""
    whole = math.lcm(config.slots, config.slots_per_block) // config.slots
    return -(-PART // (config.segment_length * whole)) * whole
