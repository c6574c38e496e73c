"""Stored keys: the selector's keys of each shard, in a separate file.

Keys are derived data and not part of the bank: the folder may be deleted at any time. A file that
cannot be used is ignored with a warning, because its keys can be computed from memory.

Letters: N rows of a shard, J slots of a block, R heads, H width of a head.
"""

from __future__ import annotations

import logging
from pathlib import Path

from safetensors import SafetensorError

from sedem.bank.store.shard import SCALES, Shard, checksum, write_quantized
from sedem.bank.store.tensor_files import Vectors, open_tensors, read_vectors
from sedem.quantization import Quantized

logger = logging.getLogger(__name__)

FOLDER = "keys"
KEYS, SELECTOR, CRC = "keys", "selector", "crc32"


def write_keys(shard: Shard, keys_NJRH: Quantized, selector: str) -> None:
    """Write the keys of every row of a shard.

    Args:
        shard: the shard.
        keys_NJRH: its keys, on the CPU.
        selector: digest of the selector that made them.
    """
    path = _path(shard)
    path.parent.mkdir(exist_ok=True)
    metadata = {SELECTOR: selector, CRC: str(checksum(keys_NJRH))}
    write_quantized(path, KEYS, keys_NJRH, metadata)


def read_keys(shard: Shard, selector: str, heads: tuple[int, int]) -> Vectors | None:
    """Read the keys of every row of a shard `[N, J, R, H]`.

    Args:
        shard: the shard.
        selector: digest of the selector that is used.
        heads: its R and H.

    Returns:
        The keys; None if there are none or, with a warning, if they cannot be used.
    """
    path = _path(shard)
    if not path.is_file():
        return None
    try:
        with open_tensors(path) as file:
            metadata = file.metadata() or {}
            if metadata.get(SELECTOR) != selector:
                logger.warning("keys '%s' are of another selector; they are made again", path)
                return None
            keys = read_vectors(file, KEYS, SCALES)
    except (SafetensorError, OSError) as error:
        logger.warning("keys '%s' are damaged (%s); they are made again", path, error)
        return None
    if metadata.get(CRC) != str(checksum(keys)):
        logger.warning("keys '%s' are damaged (their checksum differs); they are made again", path)
        return None
    shape = (shard.block_shape[0], *heads)
    if keys.values.shape != (len(shard), *shape):
        logger.warning("keys '%s' do not fit their shard; they are made again", path)
        return None
    return keys


def stored_bytes(folder: Path) -> int:
    """Total bytes of the key files of the bank in a folder."""
    return sum(file.stat().st_size for file in (folder / FOLDER).glob("*.safetensors"))


def _path(shard: Shard) -> Path:
    return shard.path.parent.parent / FOLDER / shard.path.name
