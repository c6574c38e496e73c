"""Vectors in few bytes: bfloat16 as they are, or int8 or fp8 with one scale a vector.

Letters: D width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sedem.errors import ConfigError

BFLOAT16 = "bfloat16"
DTYPES = {
    BFLOAT16: torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
"""What a bank's slots, and keys that are kept, can be stored as."""

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SMALLEST = 1e-12
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Quantized:
    """Some vectors as they are kept.

    Attributes:
        values: `[..., D]`.
        scales: what each vector's values are multiplied by, `[...]` in float32; None where the
            values stand for themselves.
    """

    values: Tensor
    scales: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Quantized:
        """Some of the vectors, by an index of their leading dimensions."""
        return Quantized(self.values[index], None if self.scales is None else self.scales[index])

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def dequantize(self) -> Tensor:
        """The vectors `[..., D]`: as they are, or in float32 where they have scales."""
        if self.scales is None:
            return self.values
        return self.values.float() * self.scales[..., None]

    def cast(self, dtype: str) -> Quantized:
        """The same vectors stored as another type; as they are where the type is theirs already."""
        if self.values.dtype == DTYPES[check_dtype(dtype)]:
            return self
        return quantize(self.dequantize(), dtype)

    def to(self, device: torch.device) -> Quantized:
        """The same on another device."""
        scales = None if self.scales is None else self.scales.to(device)
        return Quantized(self.values.to(device), scales)


def quantize(vectors: Tensor, dtype: str) -> Quantized:
    """Round vectors `[..., D]` to a type; the largest value of each meets the type's largest.

    Raises:
        ConfigError: there is no such type.
    """
    kind = DTYPES[check_dtype(dtype)]
    if kind not in _LARGEST:
        return Quantized(vectors.to(kind))
    exact = vectors.float()
    # A vector of zeros, such as a slot of padding, stays one.
    scales = exact.abs().amax(-1).clamp_min(_SMALLEST) / _LARGEST[kind]
    units = exact / scales[..., None]
    return Quantized((units.round() if kind == torch.int8 else units).to(kind), scales)


def join(parts: Sequence[Quantized]) -> Quantized:
    """Vectors of one type, one part after the other."""
    scales = [part.scales for part in parts if part.scales is not None]
    return Quantized(torch.cat([p.values for p in parts]), torch.cat(scales) if scales else None)


def vector_bytes(width: int, dtype: str) -> int:
    """Bytes of one vector, its scale included."""
    kind = DTYPES[dtype]
    return width * kind.itemsize + (_SCALE_BYTES if kind in _LARGEST else 0)


def check_dtype(dtype: str) -> str:
    """Refuse what is no type of stored vectors.

    Raises:
        ConfigError: with the types that there are.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"vectors cannot be stored as '{dtype}'; use {', '.join(DTYPES)}")
    return dtype
