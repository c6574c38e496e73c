"""A step starts all of its work without reading a number from the device."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from unit.training.blocks import block_dataset, collator

from sedem import SeDeM
from sedem.data.examples import ExampleSet
from sedem.training.stage1 import Stage1, Stage1Losses
from sedem.training.stage2 import Stage2, Stage2Losses

READING = {"_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal"}
"""Operations whose result the host needs before it can go on."""
INDEXING = {"index", "index_put", "index_put_"}


class Waits(TorchDispatchMode):
    """Notes operations for which the host would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in INDEXING else ()
        masks = any(one is not None and one.dtype == torch.bool for one in indices)
        if name in READING or masks:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_what_waits_is_noted() -> None:
    ones = torch.ones(3)
    with Waits() as waits:
        bool(ones.any()), ones.sum().item(), ones[ones > 0], ones * ones[torch.tensor([0, 2])][0]
    assert waits.found == ["_local_scalar_dense", "_local_scalar_dense", "index"]


def test_a_step_of_stage_1_waits_for_nothing(model: SeDeM) -> None:
    stage = Stage1(model, Stage1Losses())
    ids = torch.randint(2, 258, (3, 21))
    with Waits() as waits:
        stage(ids[:, :16], ids[:, 16:])["loss"].backward()
    assert waits.found == []


def test_a_step_of_stage_2_waits_for_nothing(model: SeDeM, examples: ExampleSet) -> None:
    model.decoder.add_lora(2, 4)
    dataset = block_dataset(model, examples)
    stage = Stage2(model, Stage2Losses(reconstruct=0.1), collator(dataset))
    batch = stage.collate(dataset.items)
    with Waits() as waits:
        stage(**batch)["loss"].backward()
        stage.tokens(batch)
    assert waits.found == []
