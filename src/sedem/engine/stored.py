"""Keys and values that a bank has on disk, and the fingerprint of the decoder that computed them.

Letters: L layers above injection, G key heads, U states per block, H head width.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sedem.bank.snapshot import BankReader
from sedem.bank.store.kept_files import KeptFile, kept_bytes, read_kept
from sedem.bank.store.shard import Shard
from sedem.engine.interface import BlockSource
from sedem.method.modules import SedemModules
from sedem.quantization import Quantized


@dataclass(frozen=True)
class StoredBlocks:
    """The mapped keys and values of one snapshot of a bank.

    Attributes:
        files: the file of each piece of the bank that has one.
        places: piece and row of each block `[N, 2]`.
    """

    files: dict[int, KeptFile]
    places: NDArray[np.int64]

    def entry(self, block: int, states: int) -> Quantized | None:
        """Return keys and values `[L, 2, G, U, H]` of a block; None if there are none.

        Args:
            block: its index.
            states: U.
        """
        piece, row = self.places[block].tolist()
        file = self.files.get(piece)
        return None if file is None else file.entry(row, states)


def stored_blocks(
    bank: BlockSource, decoder: Callable[[], str], shape: tuple[int, int, int]
) -> StoredBlocks | None:
    """Map the stored keys and values of a bank; None if it has none.

    Args:
        bank: the bank.
        decoder: returns `decoder_fingerprint`; called only if the bank has some.
        shape: L, G and H.
    """
    if not isinstance(bank, BankReader) or bank.path is None or not kept_bytes(bank.path):
        return None
    files, fingerprint = {}, decoder()
    for number, piece in enumerate(bank.pieces):
        file = read_kept(piece, fingerprint, shape) if isinstance(piece, Shard) else None
        if file is not None:
            files[number] = file
    if not files:
        return None
    return StoredBlocks(files, bank.places)


def decoder_fingerprint(model: SedemModules) -> str:
    """Hash of all that keys and values of a block depend on besides its memory.

    It covers the decoder's weights and settings, its adapters, the decompressor, the injection
    layer, and the computation type.
    """
    decoder, config = model.decoder, model.config
    settings = {
        "inject_layer": config.inject_layer,
        "lora_alpha": config.lora_alpha,
        "decompressor": config.decompressor,
        "dtype": str(decoder.dtype),
        "backbone": decoder.model.config.to_dict(),
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    digest.update(decoder.digest.encode())
    for tensor in [*decoder.lora_parameters(), *model.decompressor.state_dict().values()]:
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
