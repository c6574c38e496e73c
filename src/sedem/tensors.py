"""Tensors as they are stored: vectors in bfloat16, int8 or fp8, and weights in safetensors files.

A vector of int8 or fp8, and a row of a matrix in int8, has one scale.

Letters: D vector width.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sedem.errors import CheckpointError, ConfigError, first_line
from sedem.untrusted import check_file

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
WEIGHTS_FILE = "model.safetensors"
INT8_FILE = "model.int8.safetensors"
PIECE = 2**24
"""Values that one thread hashes at a time."""


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
        """Convert the vectors to another type; return the same object if they have it already."""
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
    """Return the name of a type of stored vectors, if there is one."""
    if dtype not in DTYPES:
        raise ConfigError(f"vectors cannot be stored as '{dtype}'; use {', '.join(DTYPES)}")
    return dtype


# Weights


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors to a file with the permissions of any new file.

    safetensors makes files readable only by their owner, so others could not open a shared folder.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata)
    path.chmod(mode)


def quantize_int8(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Round matrices to int8 rows; vectors stay as they are.

    Returns:
        Weights by name, and for each matrix `<name>.scale`, one absmax / 127 per row in float32.
    """
    quantized: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() != 2:
            quantized[name] = weight
            continue
        rows = quantize(weight, "int8")
        assert rows.scales is not None
        quantized[name], quantized[f"{name}.scale"] = rows.values, rows.scales
    return quantized


def dequantize_int8(
    quantized: Mapping[str, Tensor], dtype: torch.dtype, source: str = "the file"
) -> dict[str, Tensor]:
    """The inverse of `quantize_int8` up to its rounding."""
    weights: dict[str, Tensor] = {}
    for name, tensor in quantized.items():
        matrix = quantized.get(name.removesuffix(".scale"))
        if name.endswith(".scale") and matrix is not None and matrix.dtype == torch.int8:
            continue
        if tensor.dtype == torch.int8:
            scale = quantized.get(f"{name}.scale")
            if scale is None:
                raise CheckpointError(
                    f"'{source}': '{name}' is int8 but has no '{name}.scale'; fetch it again"
                )
            tensor = tensor * scale[:, None]  # in float32, without a copy of the rows
        weights[name] = tensor.to(dtype)
    return weights


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        CheckpointError: the file is missing, not a regular file, truncated or not safetensors.
    """
    try:
        check_file(path, CheckpointError)
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"'{path}' is missing; the checkpoint is incomplete") from None
    # A value type that torch does not have raises a KeyError.
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"'{path}' is truncated or not a safetensors file ({first_line(error)}); fetch it again"
        ) from None


def check_weights(expected: Mapping[str, Tensor], given: Mapping[str, Tensor], source: str) -> None:
    """Refuse weights that are missing, extra or of another shape, so that none stays random.

    Raises:
        CheckpointError: they differ; the message has the first name and both shapes.
    """
    missing = sorted(expected.keys() - given.keys())
    extra = sorted(given.keys() - expected.keys())
    if missing or extra:
        raise CheckpointError(
            f"'{source}' does not fit: {len(missing)} weights are missing"
            f"{f' (such as {missing[0]})' if missing else ''} and {len(extra)} are not known"
            f"{f' (such as {extra[0]})' if extra else ''}; it was made for another configuration"
        )
    for name, weight in expected.items():
        if weight.shape != given[name].shape:
            raise CheckpointError(
                f"'{source}' does not fit: {name} has shape {list(given[name].shape)}, "
                f"{list(weight.shape)} is needed"
            )


def weights_digest(
    weights: Mapping[str, Tensor], text: str = "", dtype: torch.dtype | None = None
) -> str:
    """Hash of every value of a set of weights; it does not depend on where their files are.

    Pieces of the tensors are hashed in parallel, with one thread per core.

    Args:
        dtype: type that values are rounded to first; None hashes every byte as it is.
    """
    digest = hashlib.sha256(text.encode())
    names = sorted(weights)
    pieces = [weights[name].detach().flatten().split(PIECE) for name in names]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        found = [threads.map(partial(_sha256, dtype=dtype), of) for of in pieces]
        for name, digests in zip(names, found, strict=True):
            digest.update(name.encode())
            for piece in digests:
                digest.update(piece)
    return digest.hexdigest()


def _sha256(values: Tensor, dtype: torch.dtype | None) -> bytes:
    """Hash of the bytes of values."""
    own = values.to(device="cpu", dtype=dtype).contiguous()
    return hashlib.sha256(own.view(torch.uint8).numpy().data).digest()
