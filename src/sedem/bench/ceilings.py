"""What this machine can do at most: bytes copied and FLOPs of a matrix product, each a second.

Measured in the process that measures the methods, in the type that they run in. A ceiling is the
best of several tries: it bounds what is possible, and a try that was disturbed bounds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

TRIES = 10


@dataclass(frozen=True)
class Ceilings:
    """Most bytes and FLOPs a second that were seen.

    Attributes:
        bytes_per_s: bytes read and written by a copy.
        flops_per_s: of a square matrix product.
    """

    bytes_per_s: float
    flops_per_s: float

    def best_with(self, other: Ceilings) -> Ceilings:
        """The higher of two measurements, each for itself."""
        return Ceilings(
            max(self.bytes_per_s, other.bytes_per_s), max(self.flops_per_s, other.flops_per_s)
        )


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure copy bandwidth and matrix throughput; large enough to miss every cache."""
    large = device.type == "cuda"
    side, size = (8192, 2**31) if large else (1024, 2**27)
    return Ceilings(
        2 * size / _copy_seconds(size, device),
        2 * side**3 / _product_seconds(side, device, dtype),
    )


def _copy_seconds(size: int, device: torch.device) -> float:
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _shortest(lambda: target.copy_(source), device)


def _product_seconds(side: int, device: torch.device, dtype: torch.dtype) -> float:
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return _shortest(lambda: left @ right, device)


def _shortest(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(TRIES):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
