"""The code of a worker in a Ray cluster: it opens the model and reads what it is given.

Letters: N blocks, J slots of a block, D decoder width.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version as version_of

import numpy as np
import torch
from numpy.typing import NDArray

from sedem.bank.blocks import Blocks
from sedem.bank.store.shard import checksum
from sedem.errors import BankError, SedemError
from sedem.inference.read import read
from sedem.inference.read_parts import encode_part
from sedem.method.segments import Segments
from sedem.quantization import DTYPES, Quantized
from sedem.types import Document

Content = Sequence[Document] | Segments
"""What a worker reads: some documents, or a part of a long one."""


@dataclass(frozen=True)
class Sealed:
    """Memory that a worker sends, with its checksum.

    Attributes:
        blocks: the span behind each block; `Blocks.documents` are indices.
        dtype: name of the type of the slots.
        values: bytes of the slots `[N, J, D * bytes of a number]`.
        scales: `[N, J]`; None for a type that needs none.
        crc: CRC-32 of values and scales.
    """

    blocks: Blocks
    dtype: str
    values: NDArray[np.uint8]
    scales: NDArray[np.generic] | None
    crc: int

    @classmethod
    def of(cls, blocks: Blocks, memory_NJD: Quantized, dtype: str) -> Sealed:
        """Seal memory as the bank will store it."""
        stored = memory_NJD.cast(dtype)
        values = stored.values.contiguous().view(torch.uint8).numpy()
        scales = None if stored.scales is None else stored.scales.contiguous().numpy()
        return cls(blocks, dtype, values, scales, checksum(stored))

    def open(self) -> Quantized:
        """Return the memory `[N, J, D]`.

        Raises:
            BankError: it differs from what the worker sent.
        """
        # Copied, because arrays in Ray's store are read-only and torch wants writable ones.
        values = torch.from_numpy(self.values.copy()).view(DTYPES[self.dtype])
        scales = None if self.scales is None else torch.from_numpy(self.scales.copy())
        memory_NJD = Quantized(values, scales)
        if checksum(memory_NJD) != self.crc:
            raise BankError(
                "memory was damaged between a worker and this machine (its checksum differs); "
                "build again, and check the network and the memory of both"
            )
        return memory_NJD


class Encoder:
    """A worker: it opens the model once, and reads what it is given.

    Args:
        checkpoint: folder or hub id of the model.
        dtype: type that the bank stores slots as.
        threads: threads of torch on a CPU.
    """

    def __init__(self, checkpoint: str, dtype: str, threads: int) -> None:
        self.checkpoint, self.dtype, self.threads = checkpoint, dtype, threads

    def start(self, version: str, fingerprint: str) -> str:
        """Open the model.

        Args:
            version: version of sedem on the machine that commits.
            fingerprint: fingerprint of the model there.

        Returns:
            Why this worker cannot be used, in a sentence; empty if it can.
        """
        from sedem.backbone.bars import hide_bars
        from sedem.model import SeDeM

        host = f"host '{os.uname().nodename}' of the cluster"
        if (installed := version_of("sedem")) != version:
            return (
                f"{host} has sedem {installed}, this machine has {version}; "
                "install the same version on all"
            )
        torch.set_num_threads(self.threads)
        hide_bars()
        try:
            self.model = SeDeM.from_pretrained(self.checkpoint, light=True)
        except (SedemError, OSError) as error:
            return (
                f"{host} cannot open '{self.checkpoint}' ({error}); put it where every host "
                "sees it under the same path, or give a hub id"
            )
        if (found := self.model.fingerprint()) != fingerprint:
            return (
                f"{host} has another model at '{self.checkpoint}' ({found[:12]}) than this machine "
                f"({fingerprint[:12]}); give all hosts the same one"
            )
        return ""

    def encode(self, content: Content) -> tuple[str, Sealed | None]:
        """Read documents or a part of one.

        Returns:
            Why it cannot be read, as a sentence, empty if it can; and the memory.
        """
        try:
            if isinstance(content, Segments):
                memory_NJD = encode_part(self.model, self.model.engine, content)
                # The blocks of a part are already known where it was cut.
                return "", Sealed.of(Blocks.of([]), memory_NJD, self.dtype)
            bank = read(self.model, self.model.engine, content).snapshot()
            return "", Sealed.of(bank.blocks, bank.stored(range(len(bank))), self.dtype)
        except SedemError as error:
            return str(error), None
