from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainingArguments
from unit.training.blocks import block_dataset, collator
from unit.training.runs import train

from sedem import SeDeM
from sedem.data.examples import ExampleSet
from sedem.errors import CheckpointError, ConfigError
from sedem.training.checkpoints import seal
from sedem.training.stage1 import Stage1, Stage1Losses
from sedem.training.stage2 import Stage2, Stage2Losses
from sedem.training.stages import Stage2Recipe
from sedem.training.trainer import TRAINED, SedemTrainer

# Weights of a checkpoint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: weights.pop("model.selector.w_key.weight"),
            r"1 weights are missing \(such as model\.selector\.w_key\.weight\) and 0 are not known",
        ),
        (
            lambda weights: weights.update(extra=torch.zeros(1)),
            r"0 weights are missing and 1 are not known \(such as extra\)",
        ),
        (
            lambda weights: weights.update({"model.compressor.w_in.weight": torch.zeros(2, 3)}),
            r"model\.compressor\.w_in\.weight has shape \[2, 3\], \[32, 32\] is needed",
        ),
    ],
)
def test_a_checkpoint_with_other_weights_is_refused(
    stopped: Stage2Recipe, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    folder = Path(stopped.run.output) / "checkpoint-4"
    weights = load_file(folder / TRAINED)
    change(weights)
    save_file(weights, folder / TRAINED)
    seal(folder)
    with pytest.raises(CheckpointError, match=message):
        train(stopped)


def test_a_checkpoint_contains_only_trained_weights(
    stopped: Stage2Recipe,
) -> None:
    names = load_file(Path(stopped.run.output) / "checkpoint-4" / TRAINED).keys()
    assert {name.split(".")[1] for name in names} == {
        "compressor",
        "decompressor",
        "selector",
        "encoder",  # one backbone is both encoder and decoder; its adapters have this name
    }
    assert all("lora_" in name for name in names if ".encoder." in name)


# The optimizer


@pytest.fixture
def arguments(tmp_path: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(tmp_path), weight_decay=0.1, use_cpu=True, report_to=[], max_steps=1
    )


def test_every_part_has_its_learning_rate_and_only_matrices_decay(
    model: SeDeM, arguments: TrainingArguments
) -> None:
    model.decoder.add_lora(2, 4)
    stage = Stage2(model, Stage2Losses(), None)
    rates = {"compressor": 1e-4, "decompressor": 2e-4, "selector": 5e-4, "lora": 3e-4}
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    found = [
        (names[id(parameter)], group["lr"], group["weight_decay"])
        for group in SedemTrainer(stage, rates, arguments).create_optimizer().param_groups
        for parameter in group["params"]
    ]
    expected = []
    for name, parameter in stage.named_parameters():
        if parameter.requires_grad:
            part = "lora" if "lora_" in name else name.split(".")[1]
            expected.append((name, rates[part], 0.1 if parameter.dim() > 1 else 0.0))
    assert sorted(found) == sorted(expected)
    assert {decay for *_, decay in found} == {0.0, 0.1}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("compresor", "decompressor"), "has compresor, decompressor, but not compressor"),
        (
            ("compressor", "decompressor", "selectr"),
            "but selectr is no part of this training; its parts are compressor, decompressor",
        ),
    ],
)
def test_parts_and_learning_rates_must_match(
    model: SeDeM, arguments: TrainingArguments, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        SedemTrainer(Stage1(model, Stage1Losses()), dict.fromkeys(names, 1e-4), arguments)
    # A part that this model lacks is a part all the same.
    stage = Stage2(model, Stage2Losses(), None)
    SedemTrainer(stage, dict.fromkeys(stage.parameter_groups(), 1e-4), arguments)


def test_a_damaged_best_checkpoint_is_not_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoint-2").mkdir()
    trainer: Any = SimpleNamespace(
        evaluate=lambda: {"eval_loss": 2.0},
        state=SimpleNamespace(best_global_step=2, best_metric=1.0),
        args=SimpleNamespace(output_dir=str(tmp_path)),
    )
    assert SedemTrainer.evaluate_and_keep_best(trainer) == {"eval_loss": 2.0}
    assert "checkpoint-2', is damaged; the last one is used" in caplog.text


# A step starts all of its work without reading a number from the device

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
