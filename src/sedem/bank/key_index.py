"""The selector's keys of a bank's blocks: derived data, cached in memory, stored on disk or remade.

A question is compared with keys. Making them costs far more than comparing, so they are cached
for the next question where they fit. `prepare` caches any number of them; `save_keys` stores them
beside the shards. Keys belong to one selector: those of another are ignored and made again.

Letters: N blocks, J slots of a block, R heads, H width of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sedem.bank.blocks import scan_ranges
from sedem.bank.memory_bank import MemoryBank
from sedem.bank.scores import key_scores
from sedem.bank.store.local import LocalStore
from sedem.bank.store.shard import Shard, checksum, read_quantized, write_quantized
from sedem.errors import BankError
from sedem.method.selector import Selector
from sedem.quantization import BFLOAT16, DTYPES, Quantized, check_dtype, join, quantize

logger = logging.getLogger(__name__)

CACHE_BYTES = 2**30
"""Bytes of keys that are cached after a question without `prepare`. On a GPU a share of its free
memory counts, if that is more. Larger banks need `prepare` or `save_keys`."""
GPU_SHARE = 4
"""Keys may take one part in so many of a GPU's free memory: they exist twice while they are joined,
and decoding needs room beside them."""

FOLDER = "keys"
KEYS, SELECTOR, CRC = "keys", "selector", "crc32"


@dataclass
class KeyIndex:
    """The keys of one bank, as far as they have been made.

    Attributes:
        selector: digest of the selector that made them.
        version: of the bank that they belong to.
        padding: which of the bank's N * J slots are padding, in order.
        stored: keys on disk by piece of the bank, mapped, for all rows of its shard.
        cached: keys of all blocks `[N, J, R, H]` in RAM or on a GPU.
        pooled: means of keys for the coarse search, and which of them are padding.
    """

    selector: str
    version: int
    padding: Tensor
    stored: dict[int, Quantized]
    cached: Quantized | None = None
    pooled: tuple[Quantized, Tensor] | None = None

    def padding_of(self, indices: range, slots: int) -> Tensor:
        """Which slots of some blocks are padding, counted within them."""
        bounds = torch.tensor([indices.start, indices.stop]) * slots
        first, last = torch.searchsorted(self.padding, bounds).tolist()
        return self.padding[first:last] - indices.start * slots


_INDEXES: WeakKeyDictionary[MemoryBank, KeyIndex] = WeakKeyDictionary()


def key_index(bank: MemoryBank, selector: Selector) -> KeyIndex:
    """The index of a bank for a selector; its keys are made when they are first needed."""
    digest = selector.digest()
    index = _INDEXES.get(bank)
    if index is None or (index.selector, index.version) != (digest, bank.version):
        padded = bank.slot_tokens(range(len(bank))).flatten() == 0
        padding = padded.nonzero()[:, 0]
        index = _INDEXES[bank] = KeyIndex(digest, bank.version, padding, _stored(bank, digest))
    return index


def forget_keys(bank: MemoryBank) -> None:
    """Drop the index of a bank; the next question makes it again."""
    _INDEXES.pop(bank, None)


def cache_dtype(device: torch.device) -> torch.dtype:
    """The type of cached keys: what their device multiplies fastest."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def cache_limit(device: torch.device) -> int:
    """Bytes of keys that are cached on a device without `prepare`."""
    if device.type == "cpu":
        return CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return max(CACHE_BYTES, free // GPU_SHARE)


@torch.no_grad()
def key_parts(bank: MemoryBank, selector: Selector) -> Iterator[tuple[range, Quantized]]:
    """The keys `[n, J, R, H]` of all blocks in order, part by part, and which blocks they are of.

    They are cached for the next question where they fit into `cache_limit`.
    """
    keys = key_index(bank, selector)
    device = selector.w_key.weight.device
    if keys.cached is not None:
        keys.cached = keys.cached.to(device)
        yield range(len(bank)), keys.cached
        return
    slots = len(bank) * len(bank.blocks[0].slot_tokens)
    kind = cache_dtype(device)
    fits = slots * selector.w_key.out_features * kind.itemsize <= cache_limit(device)
    parts = []
    for indices in _runs(bank, keys, range(len(bank))):
        part = _keys(bank, selector, keys, indices).to(device)
        if fits:
            part = Quantized(part.dequantize().to(kind))
            parts.append(part)
        yield indices, part
    if fits:
        keys.cached = join(parts)


@torch.no_grad()
def keys_of(bank: MemoryBank, selector: Selector, indices: Sequence[int]) -> Quantized:
    """The keys `[n, J, R, H]` of some blocks, in the order asked for."""
    keys = key_index(bank, selector)
    if keys.cached is not None:
        return keys.cached[list(indices)]
    device = selector.w_key.weight.device
    parts = [_keys(bank, selector, keys, run).to(device) for run in _runs(bank, keys, indices)]
    # Made anew or stored: they may be of two types.
    return Quantized(torch.cat([part.dequantize().float() for part in parts]))


@torch.no_grad()
def bank_scores(
    bank: MemoryBank, selector: Selector, query_BQRH: Tensor, query_mask_BQ: Tensor
) -> Tensor:
    """Exact scores `[B, N]` of every block of a bank for some questions.

    Args:
        bank: is asked.
        selector: of the model that is asked.
        query_BQRH: unit vectors, one a question token and head.
        query_mask_BQ: False where a question token is padding.
    """
    keys, slots = key_index(bank, selector), len(bank.blocks[0].slot_tokens)
    scores = [
        key_scores(query_BQRH, query_mask_BQ, part, keys.padding_of(indices, slots))
        for indices, part in key_parts(bank, selector)
    ]
    return torch.cat(scores, 1)


@torch.no_grad()
def prepare(bank: MemoryBank, selector: Selector, dtype: str | None = BFLOAT16) -> None:
    """Make a bank's keys now and hold them where the selector is, however large they are.

    Args:
        bank: whose.
        selector: of the model that is to be asked; on a GPU the keys are cached there.
        dtype: "bfloat16", "int8" or "fp8"; None means float32, as they are made.

    Raises:
        ConfigError: there is no such type.
        BankError: the bank is empty or damaged.
    """
    if dtype is not None:
        check_dtype(dtype)
    if not len(bank):
        raise BankError("the bank holds no documents, so there are no keys to make")
    # The cached keys may be rounded already.
    key_index(bank, selector).cached = None
    parts = (part for _, part in key_parts(bank, selector))
    cached = [Quantized(p.dequantize().float()) if dtype is None else p.cast(dtype) for p in parts]
    key_index(bank, selector).cached = join(cached)


@torch.no_grad()
def save_keys(bank: MemoryBank, selector: Selector, dtype: str = BFLOAT16) -> int:
    """Keep keys beside the shards of a bank on disk; what is appended later has none until then.

    Args:
        bank: lies on disk.
        selector: of the model that is to be asked.
        dtype: "bfloat16", "int8" or "fp8".

    Returns:
        Bytes of the keys; those that are there already are left as they are.

    Raises:
        BankError: the bank is only in RAM, damaged, or being written by another process.
        ConfigError: there is no such type.
    """
    check_dtype(dtype)
    if bank.path is None:
        raise BankError("the bank is only in RAM; save it before its keys")
    (bank.path / FOLDER).mkdir(exist_ok=True)
    store = LocalStore(bank.path)
    with store.writing():
        for shard in store.open().pieces:
            assert isinstance(shard, Shard)
            kept = _read(_beside(shard), selector.digest())
            if kept is None or kept.values.dtype != DTYPES[dtype]:
                _write(shard, selector, dtype)
    forget_keys(bank)
    return stored_bytes(bank.path)


def stored_bytes(folder: Path) -> int:
    """Bytes of the keys that are kept beside the shards of a bank."""
    return sum(file.stat().st_size for file in (folder / FOLDER).glob("*.safetensors"))


def _write(shard: Shard, selector: Selector, dtype: str) -> None:
    memory_NJD = shard.whole()
    parts = [
        quantize(_project(selector, memory_NJD[some.start : some.stop]), dtype)
        for some in scan_ranges(len(memory_NJD))
    ]
    keys = join(parts).to(torch.device("cpu"))
    about = {SELECTOR: selector.digest(), CRC: str(checksum(keys))}
    path = _beside(shard)
    write_quantized(path.parent, path.name, KEYS, keys, about)


def _project(selector: Selector, memory_NJD: Quantized) -> Tensor:
    return selector.keys(memory_NJD.dequantize().to(selector.w_key.weight))


def _keys(
    bank: MemoryBank, selector: Selector, keys: KeyIndex, indices: Sequence[int]
) -> Quantized:
    piece = bank.places[indices[0]][0]
    if piece not in keys.stored:
        return Quantized(_project(selector, bank.stored(indices)))
    shard = bank.pieces[piece]
    assert isinstance(shard, Shard)
    return keys.stored[piece][[shard.rows[bank.places[index][1]] for index in indices]]


def _runs(bank: MemoryBank, keys: KeyIndex, indices: Sequence[int]) -> Iterator[Any]:
    """Blocks in the order given, at most `SCAN` together, of one piece where keys are stored."""

    def home(index: int) -> int | None:
        piece = bank.places[index][0]
        return piece if piece in keys.stored else None

    start = 0
    for _, run in groupby(indices, home):
        stop = start + sum(1 for _ in run)
        for some in scan_ranges(stop - start):
            yield indices[start + some.start : start + some.stop]
        start = stop


def _stored(bank: MemoryBank, digest: str) -> dict[int, Quantized]:
    found = {}
    for number, piece in enumerate(bank.pieces):
        if isinstance(piece, Shard):
            keys = _read(_beside(piece), digest)
            if keys is not None:
                found[number] = keys
    return found


def _beside(shard: Shard) -> Path:
    return shard.path.parent.parent / FOLDER / shard.path.name


def _read(path: Path, digest: str) -> Quantized | None:
    """Stored keys; None without any, or where they cannot be used, which is said."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = file.metadata() or {}
            if about.get(SELECTOR) != digest:
                logger.warning("keys '%s' are of another selector; they are made anew", path)
                return None
            keys = read_quantized(file, KEYS)
    except (SafetensorError, OSError) as error:
        logger.warning("keys '%s' are damaged (%s); they are made anew", path, error)
        return None
    if about.get(CRC) != str(checksum(keys)):
        logger.warning("keys '%s' are damaged (their checksum differs); they are made anew", path)
        return None
    return keys
