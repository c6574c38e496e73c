"""The selector's keys of a bank's blocks: derived data, held in RAM, kept on disk or made anew.

Keys are what a question is compared with. Making them costs far more than comparing, so they are
held for the next question where they fit; `prepare` holds any number, `save_keys` keeps them beside
the shards. They belong to one selector: those of another are passed over and made anew.

Letters: N blocks, J slots of a block, R heads, H width of a head.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sedem.bank import memory_bank as banks
from sedem.bank.store import local as store
from sedem.bank.memory_bank import MemoryBank
from sedem.errors import BankError
from sedem.quantization import (BFLOAT16, DTYPES, Quantized, check_dtype, join, quantize)
from sedem.method.selector import Selector
from sedem.bank.scores import key_scores
from sedem.bank.store.shard import (Shard, checksum, read_quantized, write_quantized)

logger = logging.getLogger(__name__)

HELD = 2**30
"""Bytes of keys that are held after a question without being asked for; on a GPU a share of what is
free, if that is more. Above, `prepare` or `save_keys` is needed."""
SHARE = 4
"""One part in so many of a GPU's free memory is for keys: they are there twice while they are
joined, and what answers needs room beside them."""

FOLDER = "keys"
KEYS, SELECTOR, CRC = "keys", "selector", "crc32"


@dataclass
class Keys:
    """What is known of the keys of a bank.

    Attributes:
        selector: digest of the selector that made them.
        padding: which of the bank's N * J slots are padding, in order.
        stored: keys on disk by piece of the bank, mapped, for all rows of its shard.
        held: keys of all blocks `[N, J, R, H]` in RAM or on a GPU.
        pooled: what candidates are looked for with, and which of it is padding.
    """

    selector: str
    padding: Tensor
    stored: dict[int, Quantized]
    held: Quantized | None = None
    pooled: tuple[Quantized, Tensor] | None = None

    def padding_of(self, indices: range, slots: int) -> Tensor:
        """Which slots of some blocks are padding, counted within them."""
        bounds = torch.tensor([indices.start, indices.stop]) * slots
        first, last = torch.searchsorted(self.padding, bounds).tolist()
        return self.padding[first:last] - indices.start * slots


def known_keys(bank: MemoryBank, selector: Selector) -> Keys:
    """What is known of a bank's keys; nothing is made yet."""
    digest = selector.digest()
    if bank.keys is None or bank.keys.selector != digest:
        padded = bank.slot_tokens(range(len(bank))).flatten() == 0
        bank.keys = Keys(digest, padded.nonzero()[:, 0], _stored(bank, digest))
    return bank.keys


def held_type(device: torch.device) -> torch.dtype:
    """What keys are held as without being asked for: what their device multiplies best."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def held_limit(device: torch.device) -> int:
    """Bytes of keys that are held on a device without being asked for."""
    if device.type == "cpu":
        return HELD
    free, _ = torch.cuda.mem_get_info(device)
    return max(HELD, free // SHARE)


@torch.no_grad()
def key_parts(bank: MemoryBank, selector: Selector) -> Iterator[tuple[range, Quantized]]:
    """The keys `[n, J, R, H]` of all blocks in order, part by part, and which blocks they are of.

    They are held for the next time where they fit into `held_limit`.
    """
    keys = known_keys(bank, selector)
    device = selector.w_key.weight.device
    if keys.held is not None:
        keys.held = keys.held.to(device)
        yield range(len(bank)), keys.held
        return
    slots = len(bank) * len(bank.blocks[0].slot_tokens)
    kind = held_type(device)
    fits = slots * selector.w_key.out_features * kind.itemsize <= held_limit(device)
    parts = []
    for indices in _runs(bank, keys, range(len(bank))):
        part = _keys(bank, selector, keys, indices).to(device)
        if fits:
            part = Quantized(part.dequantize().to(kind))
            parts.append(part)
        yield indices, part
    if fits:
        keys.held = join(parts)


@torch.no_grad()
def keys_of(bank: MemoryBank, selector: Selector, indices: Sequence[int]) -> Quantized:
    """The keys `[n, J, R, H]` of some blocks, in the order asked for."""
    keys = known_keys(bank, selector)
    if keys.held is not None:
        return keys.held[list(indices)]
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
    keys, slots = known_keys(bank, selector), len(bank.blocks[0].slot_tokens)
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
        selector: of the model that is to be asked; on a GPU the keys are held there.
        dtype: "bfloat16", "int8" or "fp8"; None means float32, as they are made.

    Raises:
        ConfigError: there is no such type.
        BankError: the bank is empty or damaged.
    """
    if dtype is not None:
        check_dtype(dtype)
    if not len(bank):
        raise BankError("the bank holds no documents, so there are no keys to make")
    # What is held may be rounded already.
    known_keys(bank, selector).held = None
    parts = (part for _, part in key_parts(bank, selector))
    held = [Quantized(p.dequantize().float()) if dtype is None else p.cast(dtype) for p in parts]
    known_keys(bank, selector).held = join(held)


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
    with store.writing(bank.path):
        for shard in store.load(bank.path).shards:
            kept = _read(_beside(shard), selector.digest())
            if kept is None or kept.values.dtype != DTYPES[dtype]:
                _write(shard, selector, dtype)
    bank.keys = None
    return stored_bytes(bank.path)


def stored_bytes(folder: Path) -> int:
    """Bytes of the keys that are kept beside the shards of a bank."""
    return sum(file.stat().st_size for file in (folder / FOLDER).glob("*.safetensors"))


def _write(shard: Shard, selector: Selector, dtype: str) -> None:
    memory_NJD = shard.whole()
    parts = [
        quantize(_project(selector, memory_NJD[start : start + banks.SCAN]), dtype)
        for start in range(0, len(memory_NJD), banks.SCAN)
    ]
    keys = join(parts).to(torch.device("cpu"))
    about = {SELECTOR: selector.digest(), CRC: str(checksum(keys))}
    path = _beside(shard)
    write_quantized(path.parent, path.name, KEYS, keys, about)


def _project(selector: Selector, memory_NJD: Quantized) -> Tensor:
    return selector.keys(memory_NJD.dequantize().to(selector.w_key.weight))


def _keys(bank: MemoryBank, selector: Selector, keys: Keys, indices: Sequence[int]) -> Quantized:
    piece = bank.places[indices[0]][0]
    if piece not in keys.stored:
        return Quantized(_project(selector, bank.stored(indices)))
    shard = bank.pieces[piece]
    assert isinstance(shard, Shard)
    return keys.stored[piece][[shard.rows[bank.places[index][1]] for index in indices]]


def _runs(bank: MemoryBank, keys: Keys, indices: Sequence[int]) -> Iterator[Any]:
    """Blocks in the order given, at most `SCAN` together, of one piece where keys are stored."""

    def home(index: int) -> int | None:
        piece = bank.places[index][0]
        return piece if piece in keys.stored else None

    start = 0
    for _, run in groupby(indices, home):
        stop = start + sum(1 for _ in run)
        for first in range(start, stop, banks.SCAN):
            yield indices[first : min(first + banks.SCAN, stop)]
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
