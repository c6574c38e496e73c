"""Weight files: safetensors only, checked name by name, and their compact int8 form."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sedem.errors import CheckpointError
from sedem.quantization import quantize


def quantize_int8(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Matrices as int8 rows beside `<name>.scale`, one float32 absmax/127 a row; vectors as is."""
    packed: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if weight.dim() != 2:
            packed[name] = weight
            continue
        rows = quantize(weight, "int8")
        assert rows.scales is not None
        packed[name], packed[f"{name}.scale"] = rows.values, rows.scales
    return packed


def dequantize_int8(
    packed: Mapping[str, Tensor], dtype: torch.dtype, source: str = "the file"
) -> dict[str, Tensor]:
    """The inverse of `quantize_int8` up to its rounding.

    Args:
        packed: rows and scales.
        dtype: of the result.
        source: where the weights are from, for the message.

    Raises:
        CheckpointError: a matrix has no scale.
    """
    weights: dict[str, Tensor] = {}
    for name, tensor in packed.items():
        matrix = packed.get(name.removesuffix(".scale"))
        if name.endswith(".scale") and matrix is not None and matrix.dtype == torch.int8:
            continue
        if tensor.dtype == torch.int8:
            scale = packed.get(f"{name}.scale")
            if scale is None:
                raise CheckpointError(
                    f"'{source}': '{name}' is int8 but has no '{name}.scale'; fetch it again"
                )
            tensor = tensor.float() * scale[:, None]
        weights[name] = tensor.to(dtype)
    return weights


def load_weights(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        CheckpointError: the file is missing, truncated or not safetensors.
    """
    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"'{path}' is missing; the checkpoint is incomplete") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"'{path}' is truncated or not a safetensors file ({error}); fetch it again"
        ) from None


def check_weights(expected: Mapping[str, Tensor], given: Mapping[str, Tensor], source: str) -> None:
    """Refuse weights that are missing, extra or of another shape; nothing is ever left random.

    Raises:
        CheckpointError: they differ, with the first name and both shapes.
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


def weights_digest(weights: Mapping[str, Tensor], also: str = "") -> str:
    """A hash that tells one set of weights from another, wherever its files lie.

    Some 4,096 evenly spaced values of each tensor count, as bfloat16, so that opening a model in
    float32 or bfloat16 makes no difference.

    Args:
        weights: tensors by name.
        also: text that is to count too.
    """
    digest = hashlib.sha256(also.encode())
    for name in sorted(weights):
        flat = weights[name].detach().flatten()
        sample = flat[:: max(1, len(flat) // 4096)].to("cpu", torch.bfloat16)
        digest.update(name.encode())
        digest.update(sample.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
