"""Layers whose arithmetic between attention calls is compiled into a few kernels.

On a GPU, a layer of one token consists of matrix products, which read the weights, and a dozen
small operations, each bound by its launch. torch.compile fuses norms, rotary positions, activation
and sums around the products. Attention and caches are unchanged.

Letters: B batch, P positions of one call, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sedem.engine.fused import FusedLayer

VARIANTS = 64
"""Limit of compiled forms of one function: by type, by one or more rows and positions, by sliding
window, and so on. Beyond it, torch raises an error."""


GPU_MODE = "max-autotune-no-cudagraphs"
"""On a GPU, kernels are chosen by timing. `device.Replay` captures the graphs."""


@dataclass(frozen=True)
class CompiledLayer(FusedLayer):
    """A fused layer that runs compiled functions; all layers of one shape share them.

    Attributes:
        plain: the same layer, whose methods are compiled.
    """

    plain: FusedLayer

    def project(
        self, hidden_BPD: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `FusedLayer.project`."""
        return _run(FusedLayer.project, self.plain, hidden_BPD, rope)

    def finish(self, hidden_BPD: Tensor, mixed_BPD: Tensor) -> Tensor:
        """See `FusedLayer.finish`."""
        return _run(FusedLayer.finish, self.plain, hidden_BPD, mixed_BPD)

    def finish_and_project(
        self,
        following: FusedLayer,
        hidden_BPD: Tensor,
        mixed_BPD: Tensor,
        rope: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `FusedLayer.finish_and_project`."""
        assert isinstance(following, CompiledLayer)
        between = FusedLayer.finish_and_project
        return _run(between, self.plain, following.plain, hidden_BPD, mixed_BPD, rope)


def compiled_layers(layers: Sequence[FusedLayer]) -> list[FusedLayer]:
    """Return the same layers, with the same weights, in compiled form."""
    plain = [FusedLayer(**_values(layer)) for layer in layers]
    return [CompiledLayer(**vars(layer), plain=layer) for layer in plain]


def _values(layer: FusedLayer) -> dict[str, Any]:
    """Attributes of a layer; parameters as plain tensors, so that all layers are of one type."""
    return {n: v.detach() if isinstance(v, Tensor) else v for n, v in vars(layer).items()}


_COMPILED: dict[tuple[Callable[..., Any], str | None], Callable[..., Any]] = {}


def _run(function: Callable[..., Any], layer: FusedLayer, *arguments: Any) -> Any:
    """Run a function of a layer, further layers and tensors in its compiled form."""
    form = function, GPU_MODE if layer.qkv.is_cuda else None
    for argument in arguments:
        for tensor in argument if isinstance(argument, tuple) else (argument,):
            if isinstance(tensor, Tensor):
                # One form serves every number of rows and positions above one.
                for dimension in (0, 1):
                    if tensor.shape[dimension] > 1:
                        torch._dynamo.maybe_mark_dynamic(tensor, dimension)
    if form not in _COMPILED:
        _COMPILED[form] = torch.compile(function, fullgraph=True, mode=form[1])
    with torch._dynamo.config.patch(recompile_limit=VARIANTS):
        return _COMPILED[form](layer, *arguments)
