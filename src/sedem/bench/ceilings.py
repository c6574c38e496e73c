"""Measured ceilings of this machine: memory bandwidth and matrix throughput.

They are measured in the process that measures the methods, in the same data type. A ceiling is the
best of several tries, because a disturbed try is not an upper bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

TRIES = 10


@dataclass(frozen=True)
class Ceilings:
    """Highest measured speeds.

    Attributes:
        bytes_per_s: bytes per second that a copy reads and writes.
        flops_per_s: FLOPs per second of a square matrix product.
    """

    bytes_per_s: float
    flops_per_s: float

    def best_with(self, other: Ceilings) -> Ceilings:
        """The higher value of each ceiling."""
        return Ceilings(
            max(self.bytes_per_s, other.bytes_per_s), max(self.flops_per_s, other.flops_per_s)
        )


def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure copy bandwidth and matrix throughput, on arrays larger than every cache."""
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
