"""Read, check and write safetensors files of weights, and convert weights to int8 and back.

The sizes in a config.json are checked too, since they determine the memory that is allocated before
any weight is read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sedem.errors import CheckpointError, ConfigError, first_line
from sedem.quantization import quantize
from sedem.untrusted import check_file
from sedem.validation import WholeAbove0, WidthAbove0, explain

WEIGHTS_FILE = "model.safetensors"
INT8_FILE = "model.int8.safetensors"
PIECE = 2**24
"""Values that one thread hashes at a time."""
MOST_LAYERS = 1000
LARGEST_SIZE = 2**22
"""Limits of a backbone's layers, and of its vocabulary and the width of its MLPs."""

Layers = Annotated[WidthAbove0, Field(le=MOST_LAYERS)]
Inner = Annotated[WholeAbove0, Field(le=LARGEST_SIZE)]


class Sizes(BaseModel):
    """The sizes of any layout; a file may lack some."""

    num_hidden_layers: Layers | None = None
    hidden_size: WidthAbove0 | None = None
    intermediate_size: Inner | None = None
    vocab_size: Inner | None = None
    num_attention_heads: WidthAbove0 | None = None
    num_key_value_heads: WidthAbove0 | None = None
    head_dim: WidthAbove0 | None = None
    max_position_embeddings: WholeAbove0 | None = None


def check_sizes(entries: Any, source: str) -> None:
    """Refuse sizes that no model has.

    Raises:
        ConfigError: a size is not a whole number above 0, or is too large.
    """
    try:
        Sizes.model_validate(entries)
    except ValidationError as error:
        raise ConfigError(explain(error, f"'{source}'")) from None


def check_layers(layers: int, tensors: int, source: str) -> None:
    """Refuse more layers than there are tensors, because building them would take long.

    Raises:
        CheckpointError: there are more layers than tensors.
    """
    if layers > tensors:
        raise CheckpointError(
            f"'{source}' does not fit its config.json: that has {layers:,} layers, the weights are "
            f"{tensors:,} tensors"
        )


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
    """The inverse of `quantize_int8` up to its rounding.

    Raises:
        CheckpointError: a matrix has no scale.
    """
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


def read_whole(path: Path, dtype: torch.dtype, *, layers: int, tied: bool) -> dict[str, Tensor]:
    """Read a backbone from one file, of int8 rows or of plain weights.

    Raises:
        CheckpointError: the file cannot be read, or has fewer tensors than there are layers.
    """
    weights = load_weights(path)
    if path.name == INT8_FILE:
        weights = dequantize_int8(weights, dtype, str(path))
    else:
        weights = {name: weight.to(dtype) for name, weight in weights.items()}
    if tied and "model.embed_tokens.weight" in weights:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    check_layers(layers, len(weights), str(path))
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
