"""The decoder's matrices as int8 rows, for decoding steps on a CPU.

A step multiplies every matrix by one position per row, which takes at least half of its time. Rows
of int8 are a quarter the size of float32. Reading, questions and prefill use the exact matrices,
because int8 lowers answer quality there.

Letters: N output width, M input width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sedem.engine.fused import MATRICES, FusedDecoder, FusedLayer
from sedem.errors import ConfigError
from sedem.tensors import quantize

_LARGEST = 127
_TINY = torch.tensor(torch.finfo(torch.float32).tiny)
_ZERO = torch.tensor(128.0)
"""The unit of a state's zero. VNNI multiplies unsigned bytes with signed ones. For two signed ones,
oneDNN has fast kernels on some CPUs only, and on others a reference that is 300 times slower."""


class Int8Matrix(nn.Module):
    """A linear map with int8 weights, one scale per row, and states rounded on the fly.

    Each state has its own scale and sums are whole numbers, so the rows of a batch do not affect
    each other.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        rows = quantize(weight.detach(), "int8")
        assert rows.scales is not None
        self.packed = torch.ops.onednn.qlinear_prepack(rows.values, [1, weight.shape[1]])
        self.scales = rows.scales
        self.zeros = torch.zeros(len(weight), dtype=torch.long)
        self.bias = bias

    @property
    def nbytes(self) -> int:
        """Bytes of rows, scales and zero points; the bias belongs to the exact matrix."""
        return self.packed.nbytes + self.scales.nbytes + self.zeros.nbytes

    def forward(self, states: Tensor) -> Tensor:
        """Map states `[..., M]` to `[..., N]`, in their own type."""
        exact = states.float()
        largest = torch.linalg.vector_norm(exact, torch.inf, -1, keepdim=True)
        # This single call also prevents division by zero for a state of zeros.
        scale = torch.add(_TINY, largest, alpha=1 / _LARGEST)
        # A cast cuts fractions off, so that half a unit more rounds.
        units = torch.addcdiv(_ZERO + 0.5, exact, scale).to(torch.uint8)
        product = _product(units, self.packed, self.scales, self.zeros).mul_(scale)
        if self.bias is not None:
            product.add_(self.bias)
        return product.to(states.dtype)


@dataclass(frozen=True)
class Int8Layer(FusedLayer):
    """A fused layer that runs int8 matrices; it also holds the exact ones."""

    rows: dict[str, Int8Matrix]

    def linear(self, name: str, states: Tensor) -> Tensor:
        """See `FusedLayer.linear`."""
        return self.rows[name](states)


def int8_steps(decoder: FusedDecoder) -> FusedDecoder:
    """Return a decoder that runs steps with int8 matrices, and all else as before.

    Raises:
        ConfigError: this machine cannot multiply int8 exactly.
    """
    if not _multiplies_exactly():
        raise ConfigError(
            "engine 'int8' needs a CPU with int8 instructions (VNNI or newer) and torch with "
            "oneDNN; this machine multiplies int8 inexactly or not at all; use 'static'"
        )
    weight, bias = decoder.head.get_parameter("weight"), getattr(decoder.head, "bias", None)
    head = Int8Matrix(weight, bias)
    layers = list[FusedLayer]()
    for layer in decoder.layers:
        rows = {n: Int8Matrix(getattr(layer, n), getattr(layer, f"{n}_bias")) for n in MATRICES}
        layers.append(Int8Layer(**vars(layer), rows=rows))
    return replace(decoder, steps=replace(decoder, layers=layers, head=head))


def step_bytes(decoder: FusedDecoder) -> int:
    """Bytes of the matrices of steps, in addition to the exact ones."""
    if decoder.steps is None:
        return 0
    layers = [layer for layer in decoder.steps.layers if isinstance(layer, Int8Layer)]
    matrices = [decoder.steps.head, *(one for layer in layers for one in layer.rows.values())]
    return sum(matrix.nbytes for matrix in matrices if isinstance(matrix, Int8Matrix))


def _product(units: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """The product of states in units of scale 1, from 0 to 255, and packed rows, in float32."""
    # The overload by name: finding it at every call takes 15 of a product's 100 us.
    product: Tensor = torch.ops.onednn.qlinear_pointwise.default(
        units, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return product


def _multiplies_exactly() -> bool:
    """Whether sums of the largest products are exact; without VNNI, oneDNN's overflow silently."""
    try:
        rows = Int8Matrix(torch.ones(64, 64), None)
        units = torch.full((64, 64), 255, dtype=torch.uint8)
        sums = _product(units, rows.packed, rows.scales, rows.zeros)
    except (AttributeError, RuntimeError):
        return False
    return bool((sums - 64 * _LARGEST).abs().max() < 0.1)
