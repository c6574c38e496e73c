"""Keys and values that a bank has on disk, and the fingerprint of the decoder that computed them.

Letters: L layers above injection, G key heads, U states per block, H head width.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sedem.bank.kept import KeptFile, kept_bytes
from sedem.bank.memory_bank import BankReader
from sedem.engine.interface import BlockSource
from sedem.errors import BankError
from sedem.modules import SedemModules
from sedem.quantization import Quantized

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredBlocks:
    """The stored keys and values of one bank.

    Attributes:
        file: the file beside the bank.
        bank: the bank.
    """

    file: KeptFile
    bank: BankReader

    def entry(self, block: int, states: int) -> Quantized | None:
        """Return keys and values `[L, 2, G, U, H]` of a block; None if there are none.

        Args:
            block: its index.
            states: U.
        """
        return self.file.entry(self.bank.stored([block])[0], states)


def stored_blocks(
    bank: BlockSource, decoder: Callable[[], str], shape: tuple[int, int, int]
) -> StoredBlocks | None:
    """Open the stored keys and values of a bank; None if it has none that can be used.

    Args:
        bank: the bank.
        decoder: returns `decoder_fingerprint`; called only if the bank has some.
        shape: L, G and H.
    """
    if not isinstance(bank, BankReader) or bank.path is None or not kept_bytes(bank.path):
        return None
    try:
        return StoredBlocks(KeptFile(bank.path, decoder(), shape), bank)
    except BankError as error:
        logger.warning("%s; keys and values are computed again", error)
        return None


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
