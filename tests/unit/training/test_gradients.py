"""Which parameters each stage and each loss reaches (appendices Gradient Flow, Two-Stage)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sedem import SeDeM, SedemConfig
from sedem.backbone.decoder import Backbone
from sedem.data.examples import ExampleSet
from sedem.training.prepare import Collator, Prepared
from sedem.training.stage1 import Stage1, Stage1Losses
from sedem.training.stage2 import Stage2, Stage2Losses

COMPRESSOR = {"model.mixture.logits", "model.compressor.w_in.weight"}
DECOMPRESSOR = {
    f"model.decompressor.{name}.{kind}"
    for name in ("norm", "w_1", "w_2")
    for kind in ("weight", "bias")
}
SELECTOR = {
    "model.selector.norm_query.weight",
    "model.selector.norm_query.bias",
    "model.selector.norm_key.weight",
    "model.selector.norm_key.bias",
    "model.selector.w_query.weight",
    "model.selector.w_key.weight",
}


@pytest.fixture
def mixed(config: SedemConfig, backbone: Backbone) -> SeDeM:
    """A model with a learned mixture of layers, a part that the plain one lacks."""
    backbone.add_lora(2, 4)
    torch.manual_seed(1)
    # A fresh B is zero, and so would be every gradient of A.
    for parameter in backbone.lora_parameters():
        nn.init.normal_(parameter, std=0.1)
    shape = config.with_changes(extract_layers=(1, 3), layer_mixing="learned")
    model = SeDeM(shape, backbone, backbone)
    model.decompressor.spread.fill_(3.0)
    return model


def lora(stage: nn.Module) -> set[str]:
    return {name for name, _ in stage.named_parameters() if "lora_" in name}


def reached(stage: nn.Module, loss: Tensor) -> set[str]:
    """Names of the parameters that a loss has a gradient for."""
    stage.zero_grad()
    loss.backward(retain_graph=True)
    return {
        name
        for name, parameter in stage.named_parameters()
        if parameter.grad is not None and parameter.grad.abs().max() > 0
    }


def windows() -> dict[str, Tensor]:
    ids = torch.randint(2, 258, (3, 21), generator=torch.Generator().manual_seed(0))
    return {"context": ids[:, :16], "continuation": ids[:, 16:]}


@pytest.fixture
def stage2(mixed: SeDeM, examples: ExampleSet) -> Stage2:
    prepared = Prepared(mixed, 64)
    prepared.add(examples, "evidence")
    collator = Collator(prepared, max_blocks=100, budgets=(2,), seed=0, cache=None)
    return Stage2(mixed, Stage2Losses(conditioning="gold"), collator).train()


def test_stage_1_trains_compressor_and_decompressor_alone(mixed: SeDeM) -> None:
    stage = Stage1(mixed, Stage1Losses(regress=0.5)).train()
    found = stage(**windows())
    assert reached(stage, found["loss"]) == COMPRESSOR | DECOMPRESSOR
    trained = {name for name, p in stage.named_parameters() if p.requires_grad}
    assert trained == COMPRESSOR | DECOMPRESSOR
    # Adapters were there before; they have to stay as they are.
    assert len(lora(stage)) == 4 * 4 * 2


@pytest.mark.parametrize("part", ["context", "distill", "reconstruct", "regress"])
def test_every_loss_of_stage_1_reaches_both_parts(mixed: SeDeM, part: str) -> None:
    stage = Stage1(mixed, Stage1Losses(regress=0.5)).train()
    found = reached(stage, stage(**windows())[part])
    assert found == COMPRESSOR | DECOMPRESSOR


def test_the_first_phase_of_stage_1_reaches_both_parts(mixed: SeDeM) -> None:
    stage = Stage1(mixed, Stage1Losses(regress=0.5, regress_first=1.0)).train()
    assert reached(stage, stage(**windows())["loss"]) == COMPRESSOR | DECOMPRESSOR


def test_the_reconstruction_target_stands_still(mixed: SeDeM, stage2: Stage2) -> None:
    # Cut off the way through memory: what is left of W_in's gradient would come by the target.
    restore = mixed.decompressor.forward
    mixed.decompressor.forward = lambda memory: restore(memory.detach())  # type: ignore[method-assign]
    found = stage2(**stage2.collate(stage2.collator.prepared.items))
    assert reached(stage2, found["reconstruct"]) == DECOMPRESSOR
    stage1 = Stage1(mixed, Stage1Losses())
    assert reached(stage1, stage1(**windows())["reconstruct"]) == DECOMPRESSOR


def test_stage_2_trains_every_part_and_the_adapters_alone(stage2: Stage2) -> None:
    found = stage2(**stage2.collate(stage2.collator.prepared.items))
    expected = COMPRESSOR | DECOMPRESSOR | SELECTOR | lora(stage2)
    assert reached(stage2, found["loss"]) == expected
    assert {name for name, p in stage2.named_parameters() if p.requires_grad} == expected


def test_each_loss_of_stage_2_reaches_what_the_paper_says(stage2: Stage2) -> None:
    found = stage2(**stage2.collate(stage2.collator.prepared.items))
    assert reached(stage2, found["answer"]) == COMPRESSOR | DECOMPRESSOR | lora(stage2)
    assert reached(stage2, found["select"]) == COMPRESSOR | SELECTOR
    assert reached(stage2, found["reconstruct"]) == COMPRESSOR | DECOMPRESSOR


def test_adapters_learn_below_and_above_the_injection_layer(stage2: Stage2) -> None:
    found = stage2(**stage2.collate(stage2.collator.prepared.items))
    names = reached(stage2, found["answer"]) & lora(stage2)
    layers = {int(name.split(".layers.")[1].split(".")[0]) for name in names}
    assert layers == {0, 1, 2, 3}


def test_stage_2_works_without_adapters(model: SeDeM, examples: ExampleSet) -> None:
    prepared = Prepared(model, 64)
    prepared.add(examples, "evidence")
    collator = Collator(prepared, max_blocks=100, budgets=(2,), seed=0, cache=None)
    stage = Stage2(model, Stage2Losses(), collator)
    assert set(stage.parameter_groups()) == {"compressor", "decompressor", "selector"}
    found = reached(stage, stage(**stage.collate(prepared.items))["loss"])
    assert found == {"model.compressor.w_in.weight"} | DECOMPRESSOR | SELECTOR
