from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.tensor import DTensor
from unit.training.blocks import windows
from unit.training.runs import train

from sedem import SeDeM
from sedem.errors import ConfigError, DataError
from sedem_lab.training import run_setup
from sedem_lab.training.recipe import Optimization, as_yaml
from sedem_lab.training.run_setup import (
    backbone_options,
    share_of_batches,
    start_run,
)
from sedem_lab.training.stage1 import Stage1, Stage1Losses
from sedem_lab.training.stages import Stage1Recipe


def test_a_resumed_run_may_change_what_no_weight_depends_on(stage1_recipe: Stage1Recipe) -> None:
    output = start_run(stage1_recipe)
    (output / "checkpoint-2").mkdir()
    harmless = {"log_every": 7, "save_every": 9, "keep": 5, "workers": 1}
    spelled = f"{output.parent}/./{output.name}/"
    run = stage1_recipe.run.with_changes(output=spelled, **harmless)
    other = stage1_recipe.with_changes(run=run, cache="elsewhere")
    assert start_run(other) == output
    assert (output / "recipe.yaml").read_text() == as_yaml(other)
    moved = output.rename(output.with_name("moved"))
    start_run(other.with_changes(run=run.with_changes(output=str(moved))))
    written = (moved / "recipe.yaml").read_text()
    (moved / "checkpoint-2").rename(moved / "final")
    faster = stage1_recipe.optimization.with_changes(learning_rates={"compressor": 0.1})
    message = (
        r"other settings \(optimization\.learning_rates\.compressor was 0\.001, is 0\.1, "
        r"optimization\.learning_rates\.decompressor was 0\.002, is None; compare '.*recipe\.yaml'"
    )
    with pytest.raises(ConfigError, match=message):
        start_run(
            stage1_recipe.with_changes(
                optimization=faster, run=run.with_changes(output=str(moved), eval_every=3)
            )
        )
    assert (moved / "recipe.yaml").read_text() == written


def test_a_new_setting_had_its_default_and_one_that_is_no_more_another(
    stage1_recipe: Stage1Recipe,
) -> None:
    output = start_run(stage1_recipe)
    (output / "checkpoint-2").mkdir()
    older = yaml.safe_load((output / "recipe.yaml").read_text())
    del older["optimization"]["warmup_ratio"]
    (output / "recipe.yaml").write_text(yaml.safe_dump(older))
    assert start_run(stage1_recipe) == output
    (output / "recipe.yaml").write_text(yaml.safe_dump(older))
    slow = stage1_recipe.optimization.with_changes(warmup_ratio=0.5)
    with pytest.raises(ConfigError, match=r"optimization\.warmup_ratio was None, is 0\.5"):
        start_run(stage1_recipe.with_changes(optimization=slow))
    older["optimization"]["forgotten"] = 3
    (output / "recipe.yaml").write_text(yaml.safe_dump(older))
    with pytest.raises(ConfigError, match=r"optimization\.forgotten was 3, is None"):
        start_run(stage1_recipe)


def test_processes_share_the_batches_of_a_step(stage1_recipe: Stage1Recipe) -> None:
    optimization = stage1_recipe.optimization.with_changes(accumulation=6)
    assert [share_of_batches(optimization, count) for count in (1, 2, 3, 6)] == [6, 3, 2, 1]
    message = (
        r"optimization\.accumulation is 6, but 4 processes share .* make it a multiple of 4 and "
        r"optimization\.batch_size as much smaller"
    )
    with pytest.raises(ConfigError, match=message):
        share_of_batches(optimization, 4)


def test_a_process_opens_its_backbones_on_its_own_device(
    stage1_recipe: Stage1Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert str(backbone_options(stage1_recipe.optimization)["device"]) == "cpu"
    third = SimpleNamespace(device=torch.device("cuda", 3))
    monkeypatch.setattr(run_setup, "processes", lambda: third)
    assert str(backbone_options(stage1_recipe.optimization)["device"]) == "cuda:3"


def test_a_run_that_failed_before_its_first_checkpoint_frees_its_folder(
    stage1_recipe: Stage1Recipe,
) -> None:
    with pytest.raises(DataError, match=r"there is no file or folder '.*nowhere"):
        train(stage1_recipe.with_changes(data_root="nowhere"))
    output = start_run(stage1_recipe)
    assert (output / "recipe.yaml").read_text() == as_yaml(stage1_recipe)


# Divided layers

SHARDED = Optimization(learning_rates={"compressor": 1e-3}, steps=1, shard_backbone=True)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of one process, which divides its layers all the same."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(run_setup, "shards_backbone", lambda optimization: True)
    yield
    dist.destroy_process_group()


def divided(model: SeDeM) -> set[str]:
    return {name for name, p in model.named_parameters() if isinstance(p, DTensor)}


def test_frozen_layers_are_divided_and_what_is_trained_stays_whole(
    model: SeDeM, group: None
) -> None:
    model.decoder.add_lora(2, 4)
    names = {name for name, _ in model.named_parameters()}
    stage = Stage1(model, Stage1Losses()).train()
    expected = stage(**windows(3))
    expected["loss"].backward()
    wanted = {n: p.grad.clone() for n, p in stage.named_parameters() if p.grad is not None}
    stage.zero_grad()
    run_setup.shard(model, SHARDED)
    frozen = {name for name in names if ".layers." in name and "lora_" not in name}
    assert divided(model) == frozen and run_setup.divided(stage)
    assert {name for name, _ in model.named_parameters()} == names
    averaged = run_setup.averaging(stage)
    found = averaged(**windows(3))
    # What a layer gathers is dropped as soon as it has run.
    assert divided(model) == frozen
    found["loss"].backward()
    torch.testing.assert_close(found, expected)
    assert divided(model) == frozen
    grads = {n: p.grad for n, p in stage.named_parameters() if p.grad is not None}
    torch.testing.assert_close(grads, wanted)


def test_a_process_alone_keeps_its_layers_whole(model: SeDeM) -> None:
    run_setup.shard(model, SHARDED)
    assert not divided(model)
