from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sedem.config import SedemConfig
from sedem.method.decompressor import Decompressor, IdentityDecompressor, build_decompressor


@pytest.fixture
def decompressor() -> Decompressor:
    torch.manual_seed(5)
    module = Decompressor(d_dec=4, compression=3, hidden=6).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
        module.spread.copy_(torch.rand(4) + 0.5)
    return module


def naive_states(slot_D: Tensor, module: Decompressor) -> Tensor:
    """The C states of one slot, by the equations of section 3.3."""
    norm = module.norm
    normed_D = (slot_D - slot_D.mean()) / (slot_D.var(correction=0) + norm.eps).sqrt()
    value_H = (normed_D * norm.weight + norm.bias) @ module.w_1.weight.T + module.w_1.bias
    active_H = 0.5 * value_H * (1 + torch.erf(value_H / math.sqrt(2)))
    states_CD = (active_H @ module.w_2.weight.T + module.w_2.bias).view(-1, len(slot_D))
    return states_CD * module.spread


def test_states_equal_the_mlp_and_stand_in_the_order_of_their_slots(
    decompressor: Decompressor,
) -> None:
    memory_KJD = torch.randn(2, 3, 4).double()
    expected = [torch.cat([naive_states(slot, decompressor) for slot in b]) for b in memory_KJD]
    torch.testing.assert_close(decompressor(memory_KJD), torch.stack(expected))


def test_calibrate_starts_at_the_mean_and_scale_of_the_sample(decompressor: Decompressor) -> None:
    states_PD = torch.randn(50, 4) * torch.tensor([100.0, 3.0, 0.5, 20.0]) + torch.arange(4.0)
    before_JCD = decompressor(torch.ones(1, 4).double()) / decompressor.spread
    bias_CD = decompressor.w_2.bias.clone().view(3, 4)
    decompressor.calibrate(states_PD)
    spread_D, mean_D = states_PD.double().std(0), states_PD.double().mean(0)
    torch.testing.assert_close(decompressor.spread, spread_D, rtol=1e-5, atol=0)
    # The old output in units of the spread, moved to the sample's mean.
    expected = (before_JCD - bias_CD) * spread_D + mean_D
    found = decompressor(torch.ones(1, 4).double())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_calibrate_survives_a_dimension_that_never_varies(decompressor: Decompressor) -> None:
    states_PD = torch.randn(20, 4)
    states_PD[:, 2] = 7.0
    decompressor.calibrate(states_PD)
    restored = decompressor(torch.randn(2, 4).double())
    assert restored.isfinite().all()
    torch.testing.assert_close(restored[:, 2], torch.full((6,), 7.0).double(), rtol=1e-4, atol=1e-3)


def test_the_spread_is_saved_and_not_trained(decompressor: Decompressor) -> None:
    assert "spread" in decompressor.state_dict()
    assert "spread" not in dict(decompressor.named_parameters())


@pytest.mark.parametrize(("hidden", "expected"), [(None, 8), (12, 12)])
def test_the_hidden_width_is_that_of_the_decoder_by_default(
    hidden: int | None, expected: int
) -> None:
    config = SedemConfig(
        encoder="-", extract_layers=(1,), inject_layer=1, decompressor_hidden=hidden
    )
    module = build_decompressor(config, 8)
    assert module.w_1.weight.shape == (expected, 8)
    assert module.w_2.weight.shape == (4 * 8, expected)


def test_the_identity_returns_its_slots_whatever_it_was_calibrated_on() -> None:
    config = SedemConfig(
        encoder="-", extract_layers=(1,), inject_layer=1, compression=1, decompressor="identity"
    )
    module = build_decompressor(config, 8)
    assert isinstance(module, IdentityDecompressor)
    states_PD = torch.randn(50, 8, generator=torch.Generator().manual_seed(0)) * 300
    module.calibrate(states_PD)
    slots_JD = torch.randn(4, 8)
    assert torch.equal(module(slots_JD), slots_JD)
    torch.testing.assert_close(module.spread, states_PD.std(0))
    assert not list(module.parameters())
