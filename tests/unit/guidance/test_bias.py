from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sedem.guidance.bias import Guidance, guidance_bias

SCORES = st.lists(st.floats(-20, 20), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(SCORES, min_size=1, max_size=3), tau=st.floats(0.1, 10))
def test_the_bias_of_a_block_is_how_far_it_scored_behind_the_best_over_tau(
    rows: list[list[float]], tau: float
) -> None:
    width = max(map(len, rows))
    scores = torch.tensor([[*row, *[-math.inf] * (width - len(row))] for row in rows])
    bias = guidance_bias(scores, tau)
    for row, found in zip(rows, bias.tolist(), strict=True):
        expected = [(s - max(row)) / tau for s in row] + [0.0] * (width - len(row))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_tau_is_trained_and_stays_positive() -> None:
    guidance = Guidance(tau=0.5)
    assert guidance.tau.item() == pytest.approx(0.5)
    optimizer = torch.optim.SGD(guidance.parameters(), lr=3.0)
    guidance(torch.tensor([[1.0, 3.0]])).sum().backward()
    optimizer.step()
    assert 0 < guidance.tau.item() < math.inf
    assert guidance.tau.item() != pytest.approx(0.5)


def test_the_gradient_of_a_place_without_a_block_is_zero() -> None:
    scores = torch.tensor([[2.0, 1.0, -math.inf]], requires_grad=True)
    guidance = Guidance()
    guidance(scores).square().sum().backward()
    assert scores.grad is not None
    # The best block is the reference of the other: d/ds of (s_1 - s_0)^2.
    assert scores.grad.tolist() == [[2.0, -2.0, 0.0]]
    assert guidance.log_tau.grad is not None and guidance.log_tau.grad.isfinite()
