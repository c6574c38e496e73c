"""Memory of a training step: counted without numbers, against a real step; and what it decides."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Subset
from unit.training.blocks import block_dataset, collator, full_batch

from sedem import SeDeM
from sedem.config import llama_1b, llama_3b
from sedem_lab.data.examples import ExampleSet
from sedem_lab.evaluation.cost import shape_file
from sedem_lab.evaluation.meta import backbone_of
from sedem_lab.training.memory import measure_step, set_checkpointing
from sedem_lab.training.recipe import Optimization
from sedem_lab.training.stage1 import Stage1, Stage1Losses
from sedem_lab.training.stage2 import Stage2, Stage2Losses


class Alive(TorchDispatchMode):
    """Most bytes of tensors that were made and alive at once."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.now = self.most = 0
        tensors = [*module.parameters(), *module.buffers()]
        tensors += [p.grad for p in module.parameters() if p.grad is not None]
        self.known = {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (list, tuple)) else (found,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if (key := storage._cdata) not in self.known:
                    self.known.add(key)
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self.free, key, storage.nbytes())
        return found

    def free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def cut(preset: str, dtype: torch.dtype, device: str, **changes: int) -> SeDeM:
    """A paper's model with two layers and few words."""
    shape = shape_file(preset)
    shape.update({"num_hidden_layers": 2, "vocab_size": 512, **changes})
    config = {"llama-3.2-1b": llama_1b, "llama-3.2-3b": llama_3b}[preset]()
    config = config.with_changes(extract_layers=(1,), inject_layer=1)
    backbone = backbone_of(shape, dtype)
    with torch.device("meta"):
        model = SeDeM(config, backbone, backbone)
        backbone.add_lora(config.lora_rank, config.lora_alpha)
    # Zeros are made at once, random numbers would take longer than a step.
    return model if device == "meta" else model.to_empty(device=device).apply(_zero)


def _zero(module: nn.Module) -> None:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        tensor.data = torch.zeros_like(tensor)


def stages(model: SeDeM) -> dict[str, tuple[nn.Module, dict[str, Any]]]:
    """Both stages and a batch of each."""
    context, continuation = (torch.randint(2, 500, (1, length)) for length in (128, 32))
    return {
        "stage1": (
            Stage1(model, Stage1Losses()),
            {"context": context, "continuation": continuation},
        ),
        "stage2": (Stage2(model, Stage2Losses(), None), full_batch(model, rows=1, blocks=2)),
    }


def compare(preset: str, mixed: bool, checkpointing: bool, **shape: int) -> None:
    """Bytes besides weights, their gradients and AdamW's averages are those of a real step."""
    dtype = torch.bfloat16 if mixed else torch.float32
    real, shadow = (stages(cut(preset, dtype, device, **shape)) for device in ("cpu", "meta"))
    for name, (stage, batch) in real.items():
        counted_stage, counted_batch = shadow[name]
        for one in (stage, counted_stage):
            one.train()
            one.model.decoder.checkpointing = checkpointing
        trained = [p for p in stage.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        with Alive(stage) as alive:
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = stage(**batch)["loss"]
            loss.backward()
        held = sum(p.nbytes for p in stage.parameters()) + 3 * sum(p.nbytes for p in trained)
        found = measure_step(counted_stage, counted_batch, mixed=mixed).peak_bytes
        assert found - held == pytest.approx(alive.most, rel=0.1), name


@pytest.mark.parametrize(
    ("device", "chosen", "memory", "expected"),
    [
        ("cuda", "auto", 10**6, True),
        ("cuda", "auto", 10**9, False),
        ("cuda", False, 10**6, False),
        ("cpu", "auto", 10**6, False),
        ("cpu", True, 10**9, True),
    ],
)
def test_layers_are_checkpointed_if_the_longest_batch_would_not_fit(
    device: str,
    chosen: Any,
    memory: int,
    expected: bool,
    model: SeDeM,
    examples: ExampleSet,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = SimpleNamespace(device=torch.device(device), num_processes=1)
    monkeypatch.setattr("sedem_lab.training.memory.processes", lambda: found)
    size = SimpleNamespace(total_memory=memory)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: size)
    dataset = block_dataset(model, examples)
    stage = Stage2(model, Stage2Losses(), collator(dataset))
    settings = {"learning_rates": {"lora": 1.0}, "steps": 1, "batch_size": 2, "bf16": False}
    optimization = Optimization(**settings, checkpointing=chosen)
    set_checkpointing(stage, optimization, Subset(dataset, range(1, 4)))
    assert model.decoder.checkpointing is expected


def test_the_longest_items_come_first(model: SeDeM, examples: ExampleSet) -> None:
    dataset = block_dataset(model, examples)
    width = model.config.slots_per_block * model.config.compression
    items = [dataset[index] for index in range(len(dataset))]
    read = [len(i.blocks) * width + len(i.prefix) + len(i.answer) for i in items]
    assert dataset.lengths.tolist() == read


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["llama-3.2-1b", "llama-3.2-3b"])
def test_a_step_of_the_papers_layers_takes_what_a_real_one_takes(preset: str) -> None:
    compare(preset, mixed=False, checkpointing=False)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "bfloat16"])
def test_a_step_takes_what_a_real_one_takes(mixed: bool, checkpointing: bool) -> None:
    narrow = {"hidden_size": 128, "intermediate_size": 512, "head_dim": 32, "num_hidden_layers": 6}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    compare("llama-3.2-1b", mixed, checkpointing, **narrow, **heads)
