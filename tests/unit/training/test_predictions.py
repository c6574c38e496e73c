"""Losses a few positions at a time hold fewer logits; `test_gradients.py` has their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sedem.method.losses import IGNORED
from sedem_lab.training.predictions import Predictions

WIDTH, VOCABULARY, ROWS, POSITIONS = 6, 50, 3, 7
LABELS = torch.randint(0, VOCABULARY, (ROWS, POSITIONS), generator=torch.Generator().manual_seed(3))
LABELS[0, :4] = LABELS[2] = IGNORED


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that an operation has made."""

    size = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.size = max([self.size, *made])
        return result


def next_tokens(own: Predictions, teacher: Predictions) -> Tensor:
    return own.next_token_loss(LABELS)


def distillation(own: Predictions, teacher: Predictions) -> Tensor:
    return own.distillation_loss(teacher, LABELS != IGNORED, temperature=1.7)


def run(loss: Callable[[Predictions, Predictions], Tensor], at_once: int | None) -> int:
    """Numbers in the largest tensor that a loss and its gradients make."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)).double()
    states, teacher = torch.randn(2, ROWS, POSITIONS, WIDTH, dtype=torch.double)
    states.requires_grad_(True)
    with Largest() as largest:
        loss(Predictions(head, states, at_once), Predictions(head, teacher, at_once)).backward()
    return largest.size


@pytest.mark.parametrize("loss", [next_tokens, distillation])
def test_no_tensor_holds_the_logits_of_more_positions(
    loss: Callable[[Predictions, Predictions], Tensor],
) -> None:
    assert run(loss, None) == ROWS * POSITIONS * VOCABULARY
    # The head's own weight and its gradient stay.
    assert run(loss, 4) == max(4, WIDTH) * VOCABULARY


def test_a_batch_without_labels_has_no_loss() -> None:
    states = torch.randn(1, 2, WIDTH, requires_grad=True)
    head = nn.Linear(WIDTH, VOCABULARY)
    labels = torch.full((1, 2), IGNORED)
    assert Predictions(head, states, 4).next_token_loss(labels) == 0
