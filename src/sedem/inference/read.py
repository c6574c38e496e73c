"""Reading: documents -> segments -> hidden states -> memory -> blocks of a bank.

Reading needs no question. Adapters are off and no gradients are computed.

Letters: S segments, T tokens, M slots of a segment, N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sedem.bank.blocks import BlockRow, InMemory, to_blocks
from sedem.bank.memory_bank import MemoryBank
from sedem.engine.interface import Engine
from sedem.method.modules import SedemModules
from sedem.method.pooling import slot_tokens
from sedem.method.segments import Segments, segment_text
from sedem.quantization import Quantized
from sedem.types import Document, check_documents

BATCHES = {"cpu": 8, "cuda": 32}
"""Segments encoded together, by device; the states of more exceed the caches of a CPU."""

Progress = Callable[[int, int], None]
"""Called with the number of segments done and the number of all segments."""


@torch.no_grad()
def read(
    model: SedemModules,
    engine: Engine,
    documents: Sequence[Document],
    *,
    source: str | None = None,
    progress: Progress | None = None,
) -> MemoryBank:
    """Read documents into a new bank.

    Args:
        model: its encoder and compressor make the memory.
        engine: runs the encoder.
        documents: texts with distinct names.
        source: where the model was opened from, to be recorded in the bank.
        progress: called after every batch.

    Raises:
        DataError: there are no documents, two have the same name, or one has no tokens.
    """
    check_documents(documents)
    config = model.config
    segments = [segments_of(model, document) for document in documents]
    memory_SMD = compress(
        model,
        engine,
        torch.cat([s.ids for s in segments]),
        torch.cat([s.lengths for s in segments]),
        progress,
    )
    blocks: list[BlockRow] = []
    memories = []
    for index, (part, memory) in enumerate(
        zip(segments, memory_SMD.split([len(s) for s in segments]), strict=True)
    ):
        rows, memory_NJD = to_blocks(
            part, memory, index, config.compression, config.slots_per_block
        )
        blocks += rows
        memories.append(memory_NJD)
    return MemoryBank(
        model.fingerprint(),
        {**model.made_by(), "model": source},
        list(documents),
        blocks,
        [InMemory(Quantized(torch.cat(memories)))],
    )


def segments_of(model: SedemModules, document: Document) -> Segments:
    """Cut a document as a model reads it.

    Raises:
        DataError: it has no tokens.
    """
    config = model.config
    cut = config.segment_length, config.segmentation, config.segment_shift
    return segment_text(document.text, model.encoder, *cut)


def compress(
    model: SedemModules,
    engine: Engine,
    ids_ST: Tensor,
    lengths_S: Tensor,
    progress: Progress | None = None,
) -> Tensor:
    """Encode and compress segments of similar length together, so that padding costs little.

    Args:
        model: its encoder and compressor make the memory.
        engine: runs the encoder.
        ids_ST: token ids, padded on the right.
        lengths_S: number of tokens in each segment.
        progress: called after every batch.

    Returns:
        Memory `[S, M, D]` in bfloat16 on the CPU, as a bank stores it.
    """
    slots, compression = model.config.slots, model.config.compression
    memory_SMD = torch.zeros(len(ids_ST), slots, model.decoder.width, dtype=torch.bfloat16)
    done = 0
    for batch_B in batches(lengths_S, model.device):
        longest = -(-int(lengths_S[batch_B].max()) // compression) * compression
        ids_BT = ids_ST[batch_B, :longest].to(model.encoder.device)
        mask_BT = torch.arange(longest) < lengths_S[batch_B, None]
        states = engine.encode(ids_BT)
        mask_BT = mask_BT.to(states.device)
        memory_BMD = model.compressor(model.mixture(states.float()), mask_BT)
        # Zero, so that a bank's bytes do not depend on which segments were encoded together.
        padding_BM1 = (slot_tokens(mask_BT, compression) == 0)[..., None]
        memory_BMD = memory_BMD.masked_fill(padding_BM1, 0.0)
        memory_SMD[batch_B, : memory_BMD.shape[1]] = memory_BMD.to("cpu", torch.bfloat16)
        done += len(batch_B)
        if progress is not None:
            progress(done, len(ids_ST))
    return memory_SMD


def batches(lengths_S: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """Return the indices of the segments in each batch, the longest segments first."""
    return lengths_S.argsort(descending=True, stable=True).split(BATCHES[device.type])
