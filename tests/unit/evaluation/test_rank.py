"""Effective rank against its definition written out."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from sedem import Document, SeDeM
from sedem_lab.evaluation.rank import block_slots, effective_rank, normalized_effective_rank


def naive_rank(rows: torch.Tensor) -> float:
    """Singular values as roots of the eigenvalues of M M^T, entropy term by term."""
    rows = rows.double()
    gram = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
    values = [math.sqrt(max(0.0, float(v))) for v in torch.linalg.eigvalsh(gram)]
    total, entropy = sum(values), 0.0
    for value in values:
        p = value / total
        if p > 0:
            entropy -= p * math.log(p)
    return math.exp(entropy)


def test_effective_rank_is_its_definition() -> None:
    for shape, seed in itertools.product([(1, 5), (4, 9), (9, 4), (6, 6)], range(5)):
        rows = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        assert effective_rank(rows) == pytest.approx(naive_rank(rows), rel=1e-9)
    assert effective_rank(3 * torch.eye(5, 8)) == pytest.approx(5)
    assert effective_rank(torch.ones(5, 8)) == pytest.approx(1, rel=1e-5)
    assert effective_rank(torch.zeros(3, 4)) == 0


def test_blocks_are_averaged_without_their_padding(model: SeDeM, documents: list[Document]) -> None:
    bank = model.read(documents)
    shares = []
    for index, block in enumerate(bank.blocks):
        rows = bank.memory([index])[0]
        kept = torch.stack([r for r, n in zip(rows, block.slot_tokens, strict=True) if n])
        shares.append(100 * naive_rank(kept.float()) / len(kept))
    assert any(0 in block.slot_tokens for block in bank.blocks), "no block is padded"
    found = normalized_effective_rank(block_slots(model, documents))
    assert found["mean"] == pytest.approx(sum(shares) / len(shares), abs=0.006)
    assert found["n"] == len(bank)
    assert 0 < found["mean"] <= 100
