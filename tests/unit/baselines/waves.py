"""Weights from a formula: the official code was run with the same ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


@torch.no_grad()
def fill(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Fill parameters in the order of their names: sin(0.0137 (k + 1) i² + k), scaled.

    Value i of parameter k is 0.2 times that, or 1 plus 0.1 times that if the name contains "norm".
    """
    for k, (name, parameter) in enumerate(sorted(named, key=lambda entry: entry[0])):
        at = torch.arange(parameter.numel(), dtype=torch.float64)
        wave = torch.sin(0.0137 * (k + 1) * at**2 + k).view_as(parameter)
        parameter.copy_(1 + 0.1 * wave if "norm" in name else 0.2 * wave)
