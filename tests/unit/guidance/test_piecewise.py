"""Attention in pieces equals attention at once, and what the formulas say, written out."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from sedem.guidance.piecewise import attend_piece, join

ROWS, HEADS, KEY_HEADS, POSITIONS, COLUMNS, WIDTH = 2, 4, 2, 3, 11, 8


@pytest.fixture
def tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query = torch.randn(ROWS, HEADS, POSITIONS, WIDTH)
    key, value = torch.randn(2, ROWS, KEY_HEADS, COLUMNS, WIDTH)
    added = torch.randn(ROWS, POSITIONS, COLUMNS).masked_fill(
        torch.rand(ROWS, POSITIONS, COLUMNS) < 0.3, -torch.inf
    )
    added[0, 0] = 0
    return query, key, value, added


def written_out(query: Tensor, key: Tensor, value: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    mixed = torch.zeros(query.shape, dtype=torch.float64)
    log_sums = torch.full(query.shape[:3], -math.inf, dtype=torch.float64)
    for row in range(ROWS):
        for head in range(HEADS):
            for position in range(POSITIONS):
                source = head // (HEADS // KEY_HEADS)
                total = 0.0
                for column in range(key.shape[2]):
                    product = float(
                        query[row, head, position].double() @ key[row, source, column].double()
                    )
                    logit = product / math.sqrt(WIDTH) + float(added[row, position, column])
                    total += math.exp(logit)
                    mixed[row, head, position] += math.exp(logit) * value[row, source, column]
                if total:
                    mixed[row, head, position] /= total
                    log_sums[row, head, position] = math.log(total)
    return mixed, log_sums


def test_a_piece_is_what_the_formula_says(tensors: tuple[Tensor, ...]) -> None:
    for found, expected in zip(attend_piece(*tensors), written_out(*tensors), strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cuts", [[5], [1, 4, 9], list(range(1, COLUMNS))])
def test_joined_pieces_are_the_whole(cuts: list[int], tensors: tuple[Tensor, ...]) -> None:
    query, key, value, added = tensors
    expected = attend_piece(*tensors)
    bounds = [0, *cuts, COLUMNS]
    parts = [
        attend_piece(query, key[:, :, a:b], value[:, :, a:b], added[..., a:b])
        for a, b in pairwise(bounds)
    ]
    at_once = join(*zip(*parts, strict=True))
    one_by_one = parts[0]
    for part in parts[1:]:
        one_by_one = join(*zip(one_by_one, part, strict=True))
    for found in (at_once, one_by_one):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_shared_keys_are_those_of_each_row(tensors: tuple[Tensor, ...]) -> None:
    query, key, value, added = tensors
    shared = key[0], value[0]
    repeated = [tensor.expand(ROWS, -1, -1, -1) for tensor in shared]
    for ours, theirs in zip(
        attend_piece(query, *shared, added), attend_piece(query, *repeated, added), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_a_piece_that_is_hidden_counts_for_nothing(tensors: tuple[Tensor, ...]) -> None:
    query, key, value, _ = tensors
    hidden = attend_piece(query, key, value, torch.full((ROWS, POSITIONS, COLUMNS), -torch.inf))
    assert hidden[0].eq(0).all() and hidden[1].eq(-torch.inf).all()
    seen = attend_piece(query, key, value)
    for ours, theirs in zip(join(*zip(hidden, seen, strict=True)), seen, strict=True):
        assert torch.equal(ours, theirs)
    nothing = join(*zip(hidden, hidden, strict=True))
    assert nothing[0].eq(0).all() and nothing[1].eq(-torch.inf).all()


def test_large_logits_do_not_overflow(tensors: tuple[Tensor, ...]) -> None:
    query, key, value, _ = tensors
    mixed, log_sums = attend_piece(query * 1e3, key * 1e3, value)
    assert mixed.isfinite().all() and log_sums.isfinite().all()
