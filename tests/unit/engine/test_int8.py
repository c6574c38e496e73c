"""Int8 steps: the same as with rounded matrices in float32, and nothing else is rounded."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from answers import all_logits, engine_of, inputs_for
from answers import opened as opened_by
from conftest import LEASE
from torch import Tensor, nn

from sedem import Document, SeDeM, SedemConfig
from sedem.engine import int8
from sedem.engine.fused import MATRICES, FusedLayer
from sedem.engine.int8 import Int8Matrix
from sedem.engine.interface import AnswerInputs
from sedem.engine.static import open_engine
from sedem.errors import ConfigError
from sedem.selecting.plan import Request
from sedem_lab.evaluation import readers
from sedem_lab.evaluation.config import MethodSettings

pytestmark = pytest.mark.skipif(
    not int8._multiplies_exactly(), reason="this machine cannot multiply int8 exactly"
)

QUESTIONS = ["What is the rent?", "Pets?", "Who may leave, and when?"]
TOKENS = torch.randint(2, 258, (4, 3), generator=torch.Generator().manual_seed(0))


class Naive(nn.Module):
    """Weights and states rounded as `Int8Matrix` rounds them, multiplied in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight, self.bias = rounded(weight), bias

    def forward(self, states: Tensor) -> Tensor:
        return F.linear(rounded(states), self.weight, self.bias)


class NaiveLayer(FusedLayer):
    def linear(self, name: str, states: Tensor) -> Tensor:
        return Naive(getattr(self, name), getattr(self, f"{name}_bias"))(states)


def rounded(vectors: Tensor) -> Tensor:
    scale = vectors.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return (vectors / scale).round() * scale


def opened(config: SedemConfig, engine: str) -> SeDeM:
    model = opened_by(config)
    model.engine = open_engine(engine, model)
    return model


def starts(model: SeDeM) -> list[AnswerInputs]:
    bank = model.read([Document("lease.txt", LEASE)])
    return [inputs_for(model, Request(bank, question, 2)) for question in QUESTIONS]


@pytest.mark.parametrize("shape", [(64,), (1, 1, 64), (5, 64)])
def test_a_matrix_is_its_rounded_rows(shape: tuple[int, ...]) -> None:
    weight, bias, states = torch.randn(96, 64), torch.randn(96), torch.randn(shape)
    matrix = Int8Matrix(weight, bias)
    torch.testing.assert_close(matrix(states), Naive(weight, bias)(states), rtol=1e-5, atol=1e-5)
    assert matrix.nbytes == 96 * (64 + 4 + 8)


def test_a_state_of_zeros_stays_zero_and_types_stay() -> None:
    matrix = Int8Matrix(torch.randn(96, 64), None)
    assert not matrix(torch.zeros(2, 64)).any()
    assert matrix(torch.randn(2, 64).bfloat16()).dtype == torch.bfloat16


def test_a_row_does_not_depend_on_the_others() -> None:
    matrix, states = Int8Matrix(torch.randn(96, 64), None), torch.randn(16, 64)
    states[3] *= 100
    alone = torch.stack([matrix(state) for state in states])
    assert torch.equal(matrix(states), alone)


def test_steps_are_those_of_rounded_matrices(config: SedemConfig) -> None:
    model = opened(config, "int8")
    rows = starts(model)
    actual = all_logits(model, rows, TOKENS)
    engine = engine_of(model)
    decoder = engine.decoder
    layers: list[FusedLayer] = [
        NaiveLayer(**{f.name: getattr(layer, f.name) for f in fields(FusedLayer)})
        for layer in decoder.layers
    ]
    head = Naive(decoder.head.get_parameter("weight"), None)
    engine.release()
    engine.batches.decoder = replace(decoder, steps=replace(decoder, layers=layers, head=head))
    expected = all_logits(model, rows, TOKENS)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_only_steps_are_rounded(config: SedemConfig) -> None:
    exact, fast = opened(config, "auto"), opened(config, "int8")
    rows = starts(exact)
    for one, other in zip(rows, starts(fast), strict=True):
        assert torch.equal(one.bank.memory(one.blocks), other.bank.memory(other.blocks))
    logits, fast_logits = (all_logits(model, rows, TOKENS) for model in (exact, fast))
    assert torch.equal(logits[0], fast_logits[0])
    distance = (fast_logits[1:] - logits[1:]).norm() / logits[1:].norm()
    assert 0 < distance < 0.03


def test_memory_counts_the_rows(config: SedemConfig) -> None:
    exact, fast = engine_of(opened(config, "auto")), engine_of(opened(config, "int8"))
    shapes = [getattr(layer, name).shape for layer in exact.decoder.layers for name in MATRICES]
    shapes.append(exact.decoder.head.get_parameter("weight").shape)
    rows = sum(height * (width + 4 + 8) for height, width in shapes)
    assert fast.memory()["weights"] == exact.memory()["weights"] + rows


def test_a_gpu_is_refused(model: SeDeM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model), "device", torch.device("cuda", 0))
    with pytest.raises(ConfigError, match="'int8' is for a CPU, the model is on 'cuda:0'"):
        open_engine("int8", model)


def test_a_machine_whose_sums_overflow_is_refused(
    config: SedemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = int8._product
    monkeypatch.setattr(int8, "_product", lambda *given: product(*given).clamp(max=32.0))
    with pytest.raises(ConfigError, match="needs a CPU with int8 instructions"):
        opened(config, "int8")


def test_checkpoints_commands_and_evaluations_open_with_int8(
    config: SedemConfig, tmp_path: Path
) -> None:
    opened(config, "auto").save_pretrained(tmp_path / "checkpoint")
    checkpoint = str(tmp_path / "checkpoint")
    settings = MethodSettings(checkpoint=checkpoint, device="cpu", engine="int8")
    for model in (SeDeM.from_pretrained(checkpoint, engine="int8"), readers.open_model(settings)):
        assert engine_of(model).decoder.steps is not None
