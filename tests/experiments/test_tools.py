"""Checkpoints are made small enough to ship."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.tools import shrink
from sedem import Document, SeDeM
from sedem.errors import ConfigError


@pytest.fixture
def adapted(tiny_checkpoint: str) -> SeDeM:
    """A model with adapters of rank 4 and alpha 8 that change its answers."""
    model = SeDeM.from_pretrained(tiny_checkpoint, engine="eager")
    torch.manual_seed(0)
    with torch.no_grad():
        for factor in model.decoder.lora_parameters():
            factor.normal_(0, 0.2)
    return model


def update(model: SeDeM) -> torch.Tensor:
    """What the adapters add to a matrix."""
    layer = model.decoder.model.get_submodule("model.layers.1.self_attn.q_proj")
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return (up @ down * layer.scaling["default"]).detach()


def test_the_loss_of_a_lower_rank_is_minimal(adapted: SeDeM, tmp_path: Path) -> None:
    before = update(adapted)
    shrink(adapted, 2)
    adapted.save_pretrained(tmp_path / "small")
    small = SeDeM.from_pretrained(tmp_path / "small", engine="eager")
    assert (small.config.lora_rank, small.config.lora_alpha) == (2, 4)
    lost = torch.linalg.matrix_norm(before - update(small))
    sizes = torch.linalg.svdvals(before)
    torch.testing.assert_close(lost, sizes[2:].square().sum().sqrt(), rtol=1e-4, atol=1e-6)


def test_the_same_rank_answers_the_same(adapted: SeDeM) -> None:
    bank = adapted.read([Document("lease", "The rent is 900 euros, due on the third. " * 2)])
    before = adapted.answer(bank, "What is the rent?")
    shrink(adapted, 4)
    assert adapted.answer(bank, "What is the rent?").text == before.text


def test_a_rank_that_would_change_the_scale_is_rejected(adapted: SeDeM) -> None:
    adapted.config = adapted.config.with_changes(lora_rank=8, lora_alpha=4)
    with pytest.raises(ConfigError, match="rank is 3, but alpha 4 of rank 8 would not stay"):
        shrink(adapted, 3)
