from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sedem.backbone.decoder import Backbone
from sedem.method.encoder import LayerMixture, encode

IDS_ST = torch.randint(2, 258, (3, 10), generator=torch.Generator().manual_seed(0))


def test_states_come_in_the_order_of_the_requested_layers(backbone: Backbone) -> None:
    mixed = encode(backbone, IDS_ST, [3, 1, 3])
    assert mixed.shape == (3, 3, 10, backbone.width)
    for place, layer in enumerate([3, 1, 3]):
        torch.testing.assert_close(mixed[place], encode(backbone, IDS_ST, [layer])[0])


def test_deeper_layers_are_not_run(backbone: Backbone) -> None:
    run: list[int] = []
    for index, layer in enumerate(backbone.model.get_decoder().layers):
        layer.register_forward_hook(lambda *_, index=index: run.append(index))
    encode(backbone, IDS_ST, [1, 3])
    assert run == [0, 1, 2]


def test_encoding_is_not_differentiated(backbone: Backbone) -> None:
    backbone.requires_grad_(True)
    assert not encode(backbone, IDS_ST, [2]).requires_grad


def test_reading_has_no_mask_so_that_a_gpu_takes_flash_attention(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, attention = [], functional.scaled_dot_product_attention

    def attending(*tensors: Tensor, **settings: Any) -> Tensor:
        given.append((settings.get("attn_mask"), settings["is_causal"]))
        return attention(*tensors, **settings)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attending)
    encode(backbone, IDS_ST, [3])
    assert given == [(None, True)] * 3


@pytest.mark.parametrize(
    ("learned", "logits"), [(False, [0.0] * 3), (True, [0.3, -1.0, 2.0]), (True, [0.0])]
)
def test_a_mixture_is_the_mean_or_weighs_layers_by_a_softmax(
    learned: bool, logits: list[float]
) -> None:
    states_XSTE = torch.randn(len(logits), 2, 2, 4)
    mixture = LayerMixture(len(logits), learned=learned)
    torch.testing.assert_close(mixture(states_XSTE), states_XSTE.mean(0))
    has_weights = learned and len(logits) > 1
    assert bool(list(mixture.parameters())) == has_weights
    if has_weights:
        assert mixture.logits is not None
        mixture.logits.data = torch.tensor(logits)
        assert mixture.weights().tolist() == pytest.approx(torch.tensor(logits).softmax(0).tolist())
        mixture(states_XSTE).sum().backward()
        assert mixture.logits.grad is not None and mixture.logits.grad.ne(0).any()
    weights = torch.tensor(logits).exp() / torch.tensor(logits).exp().sum()
    expected = sum(w * states_STE for w, states_STE in zip(weights, states_XSTE, strict=True))
    torch.testing.assert_close(mixture(states_XSTE), expected)
