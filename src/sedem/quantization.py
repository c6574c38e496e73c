"""Stored vectors: bfloat16, or int8 and fp8 with one scale per vector.

Letters: D vector width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sedem.errors import ConfigError

BFLOAT16 = "bfloat16"
DTYPES = {
    BFLOAT16: torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
"""Types in which a bank can store slots and keys, by name."""

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_SMALLEST = 1e-12
_SCALE_BYTES = 4


@dataclass(frozen=True)
class Quantized:
    """Stored vectors, with one scale each if their type needs it.

    Attributes:
        values: `[..., D]`.
        scales: factors of the vectors `[...]` in float32; None for a type that needs none.
    """

    values: Tensor
    scales: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Quantized:
        """Select vectors by an index of their leading dimensions."""
        return Quantized(self.values[index], None if self.scales is None else self.scales[index])

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def raw(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8] | None]:
        """Bytes of values and scales; arrays that share the memory of contiguous CPU tensors."""
        values, scales = (
            None if tensor is None else tensor.contiguous().view(torch.uint8).numpy()
            for tensor in (self.values, self.scales)
        )
        assert values is not None
        return values, scales

    def dequantize(self) -> Tensor:
        """The vectors `[..., D]`, in float32 if they have scales, else as they are stored."""
        if self.scales is None:
            return self.values
        return self.values.float() * self.scales[..., None]

    def is_finite(self) -> bool:
        """Whether no value is infinite or not a number."""
        fp8 = self.values.dtype == torch.float8_e4m3fn
        tensors = [self.values.float() if fp8 else self.values, self.scales]
        # The least and the largest: NaN is both. `isfinite` takes thirty times as long.
        return all(
            bool(torch.stack(tensor.aminmax()).isfinite().all())
            for tensor in tensors
            if tensor is not None and tensor.is_floating_point() and tensor.numel()
        )

    def cast(self, dtype: str) -> Quantized:
        """Convert the vectors to another type; return the same object if they have it already.

        Raises:
            ConfigError: there is no such type.
        """
        if self.values.dtype == DTYPES[check_dtype(dtype)]:
            return self
        return quantize(self.dequantize(), dtype)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Quantized:
        """Copy to a device, without waiting if `non_blocking` and from pinned memory."""
        scales = self.scales
        if scales is not None:
            scales = scales.to(device, non_blocking=non_blocking)
        return Quantized(self.values.to(device, non_blocking=non_blocking), scales)


def quantize(vectors: Tensor, dtype: str) -> Quantized:
    """Round vectors to a type; the largest value of each maps to the largest of the type.

    Args:
        vectors: `[..., D]`.
        dtype: a name in `DTYPES`.

    Raises:
        ConfigError: there is no such type.
    """
    torch_dtype = DTYPES[check_dtype(dtype)]
    if torch_dtype not in _LARGEST:
        return Quantized(vectors.to(torch_dtype))
    exact = vectors.float()
    # Clamped, so that a vector of zeros, such as a slot of padding, stays zero.
    scales = exact.abs().amax(-1).clamp_min(_SMALLEST) / _LARGEST[torch_dtype]
    units = exact / scales[..., None]
    if torch_dtype == torch.int8:
        units = units.round()
    return Quantized(units.to(torch_dtype), scales)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Quantized:
    """Return room for vectors `[..., D]`."""
    scales = torch.empty(shape[:-1]) if dtype in _LARGEST else None
    return Quantized(torch.empty(shape, dtype=dtype), scales)


def join(parts: Sequence[Quantized]) -> Quantized:
    """Concatenate vectors of one type along the first dimension."""
    scales = [part.scales for part in parts if part.scales is not None]
    return Quantized(torch.cat([p.values for p in parts]), torch.cat(scales) if scales else None)


def vector_bytes(width: int, dtype: str) -> int:
    """Bytes of one vector of `width` values, including its scale."""
    torch_dtype = DTYPES[dtype]
    return width * torch_dtype.itemsize + (_SCALE_BYTES if torch_dtype in _LARGEST else 0)


def check_dtype(dtype: str) -> str:
    """Return the name of a type of stored vectors, if there is one.

    Raises:
        ConfigError: there is no such type; the message lists the types.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"vectors cannot be stored as '{dtype}'; use {', '.join(DTYPES)}")
    return dtype
