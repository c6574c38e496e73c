"""The first walk: documents -> segments -> hidden states -> memory -> blocks of a bank.

No question is needed, adapters are off and nothing is differentiated.

Letters: S segments, T tokens, M slots of a segment, N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sedem.bank.blocks import InMemory
from sedem.bank.memory_bank import MemoryBank
from sedem.types import (Document, check_documents)
from sedem.quantization import Quantized
from sedem.method.segments import (Segments, segment_text)
from sedem.bank.blocks import BlockRow
from sedem.method.pooling import slot_tokens

if TYPE_CHECKING:
    from sedem.model import SeDeM

BATCHES = {"cpu": 8, "cuda": 32}
"""Segments encoded together; the states of more do not stay in the caches of a CPU."""

Progress = Callable[[int, int], None]
"""Called with segments done and segments in all."""


@torch.no_grad()
def read(model: SeDeM, documents: Sequence[Document], progress: Progress | None) -> MemoryBank:
    """Read documents into a new bank.

    Args:
        model: reads them.
        documents: with names that differ.
        progress: told after every batch.

    Raises:
        DataError: there are none, two have one name, or one has no tokens.
    """
    check_documents(documents)
    config = model.config
    length, how, shift = config.segment_length, config.segmentation, config.segment_shift
    segments = [segment_text(d.text, model.encoder, length, how, shift) for d in documents]
    memory_SMD = compress(
        model,
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
        {**model.made_by(), "model": model.source},
        list(documents),
        blocks,
        [InMemory(Quantized(torch.cat(memories)))],
    )


def compress(
    model: SeDeM, ids_ST: Tensor, lengths_S: Tensor, progress: Progress | None = None
) -> Tensor:
    """Memory of segments `[S, M, D]`, in bf16 on the CPU: what a bank stores.

    Segments of like length are encoded together, so that short ones cost what they hold.
    """
    slots, compression = model.config.slots, model.config.compression
    memory_SMD = torch.zeros(len(ids_ST), slots, model.decoder.width, dtype=torch.bfloat16)
    done = 0
    for batch_B in batches(lengths_S, model.device):
        longest = -(-int(lengths_S[batch_B].max()) // compression) * compression
        ids_BT = ids_ST[batch_B, :longest].to(model.encoder.device)
        mask_BT = torch.arange(longest) < lengths_S[batch_B, None]
        states = model.engine.encode(ids_BT)
        mask_BT = mask_BT.to(states.device)
        memory_BMD = model.compressor(model.mixture(states.float()), mask_BT)
        # Padding is zero whatever a segment was encoded with, for a bank's bytes depend on it.
        padding_BM1 = (slot_tokens(mask_BT, compression) == 0)[..., None]
        memory_BMD = memory_BMD.masked_fill(padding_BM1, 0.0)
        memory_SMD[batch_B, : memory_BMD.shape[1]] = memory_BMD.to("cpu", torch.bfloat16)
        done += len(batch_B)
        if progress is not None:
            progress(done, len(ids_ST))
    return memory_SMD


def batches(lengths_S: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """Segments by number as they are encoded together, the longest first."""
    return lengths_S.argsort(descending=True, stable=True).split(BATCHES[device.type])


def to_blocks(
    segments: Segments, memory_SMD: Tensor, document: int, compression: int, block_slots: int
) -> tuple[list[BlockRow], Tensor]:
    """One document's slots as blocks of N_B (section 3.2, first paragraph).

    Args:
        segments: where the slots come from.
        memory_SMD: their memory.
        document: index of the document.
        compression: C.
        block_slots: N_B; the last block of a document is padded.

    Returns:
        The blocks that hold at least one real token, and their memory `[N, J, D]`.
    """
    blocks, slots_NJ = partition(segments, document, compression, block_slots)
    flat_LD = memory_SMD.flatten(0, 1)
    padding_1D = flat_LD.new_zeros(1, flat_LD.shape[1])
    return blocks, torch.cat([flat_LD, padding_1D])[slots_NJ]


def partition(
    segments: Segments, document: int, compression: int, block_slots: int
) -> tuple[list[BlockRow], Tensor]:
    """Which slots make up each block of one document.

    Returns:
        The blocks, and the slots of each `[N, J]`, counted over all segments; -1 is padding.
    """
    tokens_L = slot_tokens(segments.mask, compression).flatten()
    missing = -len(tokens_L) % block_slots
    slots_L = torch.cat([torch.arange(len(tokens_L)), torch.full((missing,), -1)])
    slots_NJ = slots_L.unflatten(0, (-1, block_slots))
    tokens_NJ = torch.cat([tokens_L, tokens_L.new_zeros(missing)]).view_as(slots_NJ)
    mask, starts, ends = (t.flatten() for t in (segments.mask, segments.starts, segments.ends))
    width = block_slots * compression
    blocks, alive = [], []
    for index, tokens_J in enumerate(tokens_NJ.tolist()):
        span = slice(index * width, (index + 1) * width)
        real = mask[span]
        if real.any():
            start, end = starts[span][real].min(), ends[span][real].max()
            blocks.append(BlockRow(document, int(start), int(end), tuple(tokens_J)))
            alive.append(index)
    return blocks, slots_NJ[alive]
