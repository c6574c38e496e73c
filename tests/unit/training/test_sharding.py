from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from sedem import SeDeM
from sedem.training import sharding
from sedem.training.recipe import Optimization
from sedem.training.stage1 import Stage1, Stage1Losses

SHARDED = Optimization(learning_rates={"compressor": 1e-3}, steps=1, shard_backbone=True)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of one process, which divides its layers all the same."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(sharding, "shards_backbone", lambda optimization: True)
    yield
    dist.destroy_process_group()


def windows() -> dict[str, Tensor]:
    ids = torch.randint(2, 258, (3, 21), generator=torch.Generator().manual_seed(0))
    return {"context": ids[:, :16], "continuation": ids[:, 16:]}


def divided(model: SeDeM) -> set[str]:
    return {name for name, p in model.named_parameters() if isinstance(p, DTensor)}


def test_frozen_layers_are_divided_and_what_is_trained_stays_whole(
    model: SeDeM, group: None
) -> None:
    model.decoder.add_lora(2, 4)
    names = {name for name, _ in model.named_parameters()}
    stage = Stage1(model, Stage1Losses()).train()
    expected = stage(**windows())
    expected["loss"].backward()
    wanted = {n: p.grad.clone() for n, p in stage.named_parameters() if p.grad is not None}
    stage.zero_grad()
    sharding.shard(model, SHARDED)
    frozen = {name for name in names if ".layers." in name and "lora_" not in name}
    assert divided(model) == frozen and sharding.is_sharded(stage)
    assert {name for name, _ in model.named_parameters()} == names
    averaged = sharding.averaging(stage)
    found = averaged(**windows())
    # What a layer gathers is dropped as soon as it has run.
    assert divided(model) == frozen
    found["loss"].backward()
    torch.testing.assert_close(found, expected)
    assert divided(model) == frozen
    grads = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
    torch.testing.assert_close(grads, wanted)


def test_a_process_alone_keeps_its_layers_whole(model: SeDeM) -> None:
    sharding.shard(model, SHARDED)
    assert not divided(model)
