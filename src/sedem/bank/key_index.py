"""The selector's keys of a bank's blocks: computed from memory, cached, or read from disk.

A question is compared with keys. Computing keys costs far more than comparing them, so they are
cached for the next question if they fit. `prepare` caches keys of any size; `save_keys` stores them
next to the shards. Keys belong to one selector: those of another are ignored and recomputed.

Letters: N blocks, J slots of a block, R heads, H width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from sedem.bank.blocks import scan_ranges
from sedem.bank.host_keys import HostKeys, host_limit
from sedem.bank.snapshot import BankReader, Snapshot
from sedem.bank.store.key_files import read_keys, stored_bytes, write_keys
from sedem.bank.store.local import LocalStore
from sedem.bank.store.opening import local_folder
from sedem.bank.store.shard import Shard
from sedem.bank.store.tensor_files import Vectors
from sedem.errors import BankError
from sedem.method.selector import Selector
from sedem.quantization import BFLOAT16, DTYPES, Quantized, check_dtype, join, quantize

CACHE_BYTES = 2**30
"""Bytes of keys that may be cached without `prepare`; more on a GPU that has the memory."""
GPU_SHARE = 4
"""On a GPU the limit is 1/GPU_SHARE of its free memory: keys exist twice while their parts are
joined, and decoding needs memory too."""


@dataclass
class KeyIndex:
    """The keys of one snapshot of a bank that have been computed so far.

    Attributes:
        selector: digest of the selector that made them.
        padding: indices of padding among the bank's N * J slots, in order.
        stored: memory-mapped keys on disk by piece of the bank; they cover every row of the shard.
        cached: keys of all blocks `[N, J, R, H]` on the selector's device.
        on_host: keys of all blocks in host memory, if they do not fit on the GPU; else None.
        pooled: pooled keys for the coarse search, and the indices of padding among them.
    """

    selector: str
    padding: Tensor
    stored: dict[int, Vectors]
    cached: Quantized | None = None
    on_host: HostKeys | None = None
    pooled: tuple[Quantized, Tensor] | None = None

    def padding_of(self, indices: range, slots: int) -> Tensor:
        """Indices of padding among the slots of some blocks, counted from the first of them."""
        bounds = torch.tensor([indices.start, indices.stop]) * slots
        first, last = torch.searchsorted(self.padding, bounds).tolist()
        return self.padding[first:last] - indices.start * slots


_INDEXES: WeakKeyDictionary[Snapshot, KeyIndex] = WeakKeyDictionary()


def key_index(bank: BankReader, selector: Selector) -> KeyIndex:
    """Return the index of a bank for a selector; a new one if the bank or selector changed."""
    digest, now = selector.digest(), bank.snapshot()
    index = _INDEXES.get(now)
    if index is None or index.selector != digest:
        padding = torch.from_numpy(np.flatnonzero(now.blocks.slot_tokens == 0))
        index = KeyIndex(digest, padding, _stored_keys(now, selector))
        _INDEXES[now] = index
    return index


def forget_keys(bank: BankReader) -> None:
    """Drop the index of a bank; the next question makes a new one."""
    _INDEXES.pop(bank.snapshot(), None)


def cache_dtype(device: torch.device) -> torch.dtype:
    """The type of cached keys: the fastest to multiply on their device."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def cache_limit(device: torch.device) -> int:
    """Bytes of keys that may be cached on a device without `prepare`."""
    if device.type == "cpu":
        return CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return max(CACHE_BYTES, free // GPU_SHARE)


@torch.no_grad()
def key_parts(bank: BankReader, selector: Selector) -> Iterator[tuple[range, Quantized]]:
    """Yield block indices and keys `[n, J, R, H]` of all blocks, in order and part by part.

    The keys are cached for the next question if they fit into `cache_limit` or, failing that,
    into `host_limit`.
    """
    bank = bank.snapshot()
    index = key_index(bank, selector)
    device = selector.w_key.weight.device
    if index.cached is not None:
        index.cached = index.cached.to(device)
        yield range(len(bank)), index.cached
        return
    if index.on_host is not None:
        yield from index.on_host.parts(device)
        return
    slots = len(bank) * bank.blocks.slots
    dtype = cache_dtype(device)
    size = slots * selector.w_key.out_features * dtype.itemsize
    fits = size <= cache_limit(device)
    host = HostKeys() if not fits and size <= host_limit(device) else None
    parts = []
    for start, stop in _runs(bank, index, range(len(bank))):
        part = _keys(bank, selector, index, range(start, stop)).to(device)
        if fits or host is not None:
            part = Quantized(part.dequantize().to(dtype))
        if fits:
            parts.append(part)
        elif host is not None:
            host.add(start, part)
        yield range(start, stop), part
    index.on_host = host
    if fits:
        index.cached = join(parts)


@torch.no_grad()
def keys_of(bank: BankReader, selector: Selector, blocks: Sequence[int]) -> Quantized:
    """Return the keys `[n, J, R, H]` of some blocks, in the order of `blocks`."""
    bank = bank.snapshot()
    index = key_index(bank, selector)
    if index.cached is not None:
        return index.cached[list(blocks)]
    device = selector.w_key.weight.device
    if index.on_host is not None:
        return index.on_host.take(blocks, device)
    parts = [
        _keys(bank, selector, index, blocks[start:stop]).to(device)
        for start, stop in _runs(bank, index, blocks)
    ]
    # Stored keys and keys made now may differ in type.
    return Quantized(torch.cat([part.dequantize().float() for part in parts]))


@torch.no_grad()
def prepare(bank: BankReader, selector: Selector, dtype: str | None = BFLOAT16) -> None:
    """Make a bank's keys now and cache them on the selector's device, regardless of size.

    Args:
        bank: the bank.
        selector: the selector of the model that will be asked.
        dtype: "bfloat16", "int8" or "fp8"; None keeps the keys in float32, unrounded.

    Raises:
        ConfigError: there is no such type.
        BankError: the bank is empty or damaged.
    """
    if dtype is not None:
        check_dtype(dtype)
    if not len(bank):
        raise BankError("the bank holds no documents, so there are no keys to make")
    bank = bank.snapshot()
    # Keys that are already cached may be rounded.
    index = key_index(bank, selector)
    index.cached = index.on_host = None
    parts = (part for _, part in key_parts(bank, selector))
    cached = [Quantized(p.dequantize().float()) if dtype is None else p.cast(dtype) for p in parts]
    index = key_index(bank, selector)
    index.cached, index.on_host = join(cached), None


@torch.no_grad()
def save_keys(bank: BankReader, selector: Selector, dtype: str = BFLOAT16) -> int:
    """Store a bank's keys next to its shards; existing keys of this selector and type are kept.

    Args:
        bank: a bank on local disk.
        selector: the selector of the model that will be asked.
        dtype: "bfloat16", "int8" or "fp8".

    Returns:
        Bytes of all stored keys.

    Raises:
        BankError: the bank is only in RAM, damaged, or being written by another process.
        ConfigError: there is no such type.
    """
    check_dtype(dtype)
    if bank.store is not None:
        local_folder(str(bank.store), "storing keys")
    if bank.path is None:
        raise BankError("the bank is only in RAM; save it before its keys")
    store = LocalStore(bank.path)
    with store.writing():
        for shard in store.open().pieces:
            assert isinstance(shard, Shard)
            stored = read_keys(shard, selector.digest(), _heads(selector))
            if stored is None or stored.values.dtype != DTYPES[dtype]:
                write_keys(shard, _shard_keys(shard, selector, dtype), selector.digest())
    forget_keys(bank)
    return stored_bytes(bank.path)


def _shard_keys(shard: Shard, selector: Selector, dtype: str) -> Quantized:
    memory_NJD = shard.whole()
    parts = [
        quantize(_project(selector, memory_NJD[rows.start : rows.stop]), dtype)
        for rows in scan_ranges(len(memory_NJD))
    ]
    return join(parts).to(torch.device("cpu"))


def _stored_keys(bank: BankReader, selector: Selector) -> dict[int, Vectors]:
    stored = {}
    for number, piece in enumerate(bank.pieces):
        if isinstance(piece, Shard):
            keys = read_keys(piece, selector.digest(), _heads(selector))
            if keys is not None:
                stored[number] = keys
    return stored


def _heads(selector: Selector) -> tuple[int, int]:
    return selector.heads, selector.w_key.out_features // selector.heads


def _project(selector: Selector, memory_NJD: Quantized) -> Tensor:
    return selector.keys(memory_NJD.dequantize().to(selector.w_key.weight))


def _keys(
    bank: BankReader, selector: Selector, index: KeyIndex, blocks: Sequence[int]
) -> Quantized:
    """Return keys of blocks that are all in one piece with stored keys, or in pieces without."""
    piece = int(bank.places[blocks[0], 0])
    if piece not in index.stored:
        return Quantized(_project(selector, bank.stored(blocks)))
    return index.stored[piece][bank.places[list(blocks), 1].tolist()]


def _runs(bank: BankReader, index: KeyIndex, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Split `blocks` into runs of at most `SCAN` for `_keys`; yields start and stop."""

    if not index.stored:
        yield from ((part.start, part.stop) for part in scan_ranges(len(blocks)))
        return
    # Arrays, because lists of a million numbers would take more memory than a part's keys.
    chosen = slice(blocks.start, blocks.stop) if isinstance(blocks, range) else list(blocks)
    pieces_N = bank.places[chosen, 0]
    runs_N = np.where(np.isin(pieces_N, [*index.stored]), pieces_N, -1)
    ends = (np.flatnonzero(np.diff(runs_N)) + 1).tolist()
    for start, stop in pairwise([0, *ends, len(blocks)]):
        for part in scan_ranges(stop - start):
            yield start + part.start, start + part.stop
