"""Keys that do not fit on a GPU: kept in pinned host memory and copied to it part by part.

Letters: N blocks, J slots of a block, R heads, H width of a head.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import torch

from sedem.quantization import Quantized, join

HOST_SHARE = 4
"""Pinned keys, which cannot be swapped out, may take 1/HOST_SHARE of the host's free memory."""


def host_limit(device: torch.device) -> int:
    """Bytes of keys that the host may keep for a device; 0 for a CPU, which is the host."""
    if device.type == "cpu":
        return 0
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // HOST_SHARE


class HostKeys:
    """The keys of consecutive blocks, in the parts in which they were made."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._parts: list[Quantized] = []

    def add(self, start: int, keys_NJRH: Quantized) -> None:
        """Keep the keys of the next blocks.

        Args:
            start: index of the first block; it follows the last block added before.
            keys_NJRH: keys on any device.
        """
        self._starts.append(start)
        self._parts.append(_pinned(keys_NJRH))

    def parts(self, device: torch.device) -> Iterator[tuple[range, Quantized]]:
        """Yield block indices and keys on a device, in order; the host does not wait for copies."""
        for start, part in zip(self._starts, self._parts, strict=True):
            yield range(start, start + len(part)), part.to(device, non_blocking=True)

    def take(self, blocks: Sequence[int], device: torch.device) -> Quantized:
        """Return the keys `[n, J, R, H]` of some blocks, in the given order, on a device."""
        found = []
        for block in blocks:
            part = bisect_right(self._starts, block) - 1
            place = block - self._starts[part]
            found.append(self._parts[part][place : place + 1])
        return join(found).to(device)


def _pinned(keys: Quantized) -> Quantized:
    if not torch.cuda.is_available():
        return keys.to(torch.device("cpu"))
    scales = None if keys.scales is None else keys.scales.cpu().pin_memory()
    return Quantized(keys.values.cpu().pin_memory(), scales)
