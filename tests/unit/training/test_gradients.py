"""Which parameters each loss of each stage trains (appendices Gradient Flow, Two-Stage)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from unit.training.blocks import block_dataset, check_checkpointing, collator, windows

from sedem import SeDeM, SedemConfig
from sedem.backbone.decoder import Backbone
from sedem_lab.data.examples import ExampleSet
from sedem_lab.training.stage1 import Stage1, Stage1Losses
from sedem_lab.training.stage2 import Stage2, Stage2Losses

COMPRESSOR = {"model.mixture.logits", "model.compressor.w_in.weight"}
DECOMPRESSOR = {
    f"model.decompressor.{name}.{kind}"
    for name in ("norm", "w_1", "w_2")
    for kind in ("weight", "bias")
}
SELECTOR = {
    f"model.selector.{name}"
    for name in ("w_query.weight", "w_key.weight", "norm_query.weight", "norm_query.bias")
} | {"model.selector.norm_key.weight", "model.selector.norm_key.bias"}


@pytest.fixture
def mixed(config: SedemConfig, backbone: Backbone) -> SeDeM:
    """A model with a learned mixture of layers, which the default lacks, and adapters."""
    backbone.add_lora(2, 4)
    torch.manual_seed(1)
    # A new B is zero, which would make every gradient of A zero.
    for parameter in backbone.lora_parameters():
        nn.init.normal_(parameter, std=0.1)
    shape = config.with_changes(extract_layers=(1, 3), layer_mixing="learned")
    model = SeDeM(shape, backbone, backbone)
    model.decompressor.spread.fill_(3.0)
    return model


def lora(stage: nn.Module) -> set[str]:
    return {name for name, _ in stage.named_parameters() if "lora_" in name}


def reached(stage: nn.Module, loss: Tensor) -> set[str]:
    """Names of the parameters that a loss has a nonzero gradient for."""
    stage.zero_grad()
    loss.backward(retain_graph=True)
    return {
        name
        for name, parameter in stage.named_parameters()
        if parameter.grad is not None and parameter.grad.abs().max() > 0
    }


@pytest.fixture
def stage2(mixed: SeDeM, examples: ExampleSet) -> Stage2:
    batches = collator(block_dataset(mixed, examples))
    return Stage2(mixed, Stage2Losses(conditioning="gold"), batches).train()


def test_every_loss_of_stage_1_trains_compressor_and_decompressor(mixed: SeDeM) -> None:
    stage = Stage1(mixed, Stage1Losses(regress=0.5)).train()
    trained = {name for name, p in stage.named_parameters() if p.requires_grad}
    # The adapters exist, but stage 1 must not train them.
    assert len(lora(stage)) == 4 * 4 * 2 and trained == COMPRESSOR | DECOMPRESSOR
    found = stage(**windows(3))
    assert found.keys() == {"loss", "context", "distill", "reconstruct", "regress"}
    for loss in found.values():
        assert reached(stage, loss) == trained
    first = Stage1(mixed, Stage1Losses(regress=0.5, regress_first=1.0)).train()
    assert reached(first, first(**windows(3))["loss"]) == trained


def test_the_reconstruction_target_has_no_gradient(mixed: SeDeM, stage2: Stage2) -> None:
    # With the path through memory detached, a gradient of W_in could only come from the target.
    restore = mixed.decompressor.forward
    mixed.decompressor.forward = lambda memory: restore(memory.detach())  # type: ignore[method-assign]
    found = stage2(**stage2.collate(stage2.collator.dataset.items))
    assert reached(stage2, found["reconstruct"]) == DECOMPRESSOR
    stage1 = Stage1(mixed, Stage1Losses())
    assert reached(stage1, stage1(**windows(3))["reconstruct"]) == DECOMPRESSOR


def test_each_loss_of_stage_2_reaches_the_parts_that_the_paper_says(stage2: Stage2) -> None:
    found = stage2(**stage2.collate(stage2.collator.dataset.items))
    adapters = lora(stage2)
    # Adapters lie below and above the injection layer.
    assert {name.split(".layers.")[1][0] for name in adapters} == {"0", "1", "2", "3"}
    expected = COMPRESSOR | DECOMPRESSOR | SELECTOR | adapters
    assert reached(stage2, found["loss"]) == expected
    assert {name for name, p in stage2.named_parameters() if p.requires_grad} == expected
    assert reached(stage2, found["answer"]) == COMPRESSOR | DECOMPRESSOR | adapters
    assert reached(stage2, found["select"]) == COMPRESSOR | SELECTOR
    assert reached(stage2, found["reconstruct"]) == COMPRESSOR | DECOMPRESSOR


def test_stage_2_works_without_adapters(model: SeDeM, examples: ExampleSet) -> None:
    dataset = block_dataset(model, examples)
    stage = Stage2(model, Stage2Losses(), collator(dataset))
    groups = {name for name, parameters in stage.parameter_groups().items() if parameters}
    assert groups == {"compressor", "decompressor", "selector"}
    found = reached(stage, stage(**stage.collate(dataset.items))["loss"])
    assert found == {"model.compressor.w_in.weight"} | DECOMPRESSOR | SELECTOR


Trained = tuple[dict[str, Tensor], dict[str, Tensor]]


def trained(stage: Stage1 | Stage2, batch: dict[str, Any]) -> Trained:
    """The losses of a batch and their gradients."""
    stage.zero_grad()
    found = stage(**batch)
    found["loss"].backward()
    return found, {n: p.grad.clone() for n, p in stage.named_parameters() if p.grad is not None}


def assert_same(found: Trained, expected: Trained) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-4)


def test_few_logits_at_once_train_the_same(mixed: SeDeM, examples: ExampleSet) -> None:
    first, second = Stage1Losses(recall=0.7), Stage2Losses(conditioning="gold-then-selected")
    few = Stage1(mixed, first, logits_at_once=4)
    assert_same(trained(few, windows(3)), trained(Stage1(mixed, first), windows(3)))
    batches = collator(block_dataset(mixed, examples), budgets=(3,))
    batch = batches([batches.dataset[index] for index in range(3)])
    whole, few = (Stage2(mixed, second, batches, logits_at_once=n) for n in (None, 3))
    assert_same(trained(few, batch), trained(whole, batch))


@pytest.mark.parametrize("block_context", ["joint", "independent"])
def test_checkpointed_layers_train_the_same_and_keep_less(
    mixed: SeDeM, examples: ExampleSet, block_context: Any
) -> None:
    mixed.config = mixed.config.with_changes(block_context=block_context)
    batches = collator(block_dataset(mixed, examples), budgets=(2,))
    first = Stage1(mixed, Stage1Losses(regress=0.5, recall=0.5))
    check_checkpointing(first, mixed.decoder, lambda: trained(first, windows(3)))
    batch = batches([batches.dataset[index] for index in range(3)])
    second = Stage2(mixed, Stage2Losses(conditioning="gold-then-selected"), batches)
    check_checkpointing(second, mixed.decoder, lambda: trained(second, batch))


def test_compiled_layers_train_the_same_share_their_forms_and_keep_their_names(
    mixed: SeDeM, examples: ExampleSet
) -> None:
    """Traced by torch.compile, and run without a compiler of machine code, which takes minutes."""
    mixed.config = mixed.config.with_changes(block_context="independent")
    batches = collator(block_dataset(mixed, examples), budgets=(2,))
    batch = batches([batches.dataset[index] for index in range(3)])
    stage = Stage2(mixed, Stage2Losses(), batches).train()
    expected, names = trained(stage, batch), list(mixed.state_dict())
    counter = CompileCounter()
    torch.compiler.reset()
    mixed.decoder.compile_layers(backend=counter)
    assert list(mixed.state_dict()) == names
    assert_same(trained(stage, batch), expected)
    # Not one for each layer, of a cache that has grown by another layer.
    assert 0 < counter.frame_count < 2 * mixed.decoder.depth
