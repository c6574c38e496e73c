from __future__ import annotations

import math

import pytest
import torch

from sedem.backbone.decoder import Backbone
from sedem.method.encoder import LayerMixture, encode, states_at

IDS_ST = torch.randint(2, 258, (3, 10), generator=torch.Generator().manual_seed(0))


def test_the_start_token_stands_in_front_and_its_state_is_dropped(backbone: Backbone) -> None:
    states = states_at(backbone, IDS_ST, [2])[2]
    assert states.shape == (3, 11, backbone.width)
    assert torch.equal(encode(backbone, IDS_ST, [2])[0], states[:, 1:])
    ids = torch.cat([torch.full((3, 1), backbone.bos_token_id), IDS_ST], dim=1)
    with torch.no_grad():
        whole = backbone.model(ids, output_hidden_states=True).hidden_states[2]
    assert torch.equal(states, whole)


def test_every_state_depends_on_the_start_token(backbone: Backbone) -> None:
    before = encode(backbone, IDS_ST, [2])
    backbone.bos_token_id = 5
    assert (encode(backbone, IDS_ST, [2]) != before).any(-1).all()


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


def test_padding_on_the_right_never_reaches_real_tokens(backbone: Backbone) -> None:
    padded = IDS_ST.clone()
    padded[0, 6:] = 0
    other = padded.clone()
    other[0, 6:] = 77
    first, second = encode(backbone, padded, [3]), encode(backbone, other, [3])
    assert torch.equal(first[:, 0, :6], second[:, 0, :6])
    assert torch.equal(first[:, 1:], second[:, 1:])
    torch.testing.assert_close(first[:, :1, :6], encode(backbone, IDS_ST[:1, :6], [3]))


def test_adapters_are_off_while_encoding_and_on_again_afterwards(backbone: Backbone) -> None:
    frozen_STE = encode(backbone, IDS_ST, [2])[0]
    backbone.add_lora(4, 8)
    for parameter in backbone.lora_parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    assert torch.equal(encode(backbone, IDS_ST, [2])[0], frozen_STE)
    adapted_STE = states_at(backbone, IDS_ST, [2])[2][:, 1:]
    assert (adapted_STE != frozen_STE).any(-1).all()


def test_encoding_is_not_differentiated(backbone: Backbone) -> None:
    backbone.requires_grad_(True)
    assert not encode(backbone, IDS_ST, [2]).requires_grad


def test_one_layer_needs_no_mixture() -> None:
    states_XSTE = torch.randn(1, 2, 3, 4)
    mixture = LayerMixture(1, learned=True)
    assert torch.equal(mixture(states_XSTE), states_XSTE[0])
    assert list(mixture.parameters()) == []


def naive_mixture(states_XSTE: torch.Tensor, logits: list[float]) -> torch.Tensor:
    total = sum(math.exp(value) for value in logits)
    mixed = torch.zeros_like(states_XSTE[0])
    for s in range(mixed.shape[0]):
        for t in range(mixed.shape[1]):
            for e in range(mixed.shape[2]):
                for layer, value in enumerate(logits):
                    mixed[s, t, e] += math.exp(value) / total * states_XSTE[layer, s, t, e]
    return mixed


def test_a_uniform_mixture_is_the_mean_and_has_no_parameter() -> None:
    states_XSTE = torch.randn(3, 2, 2, 4)
    mixture = LayerMixture(3, learned=False)
    torch.testing.assert_close(mixture(states_XSTE), naive_mixture(states_XSTE, [0.0] * 3))
    assert list(mixture.parameters()) == []


def test_a_learned_mixture_weighs_layers_by_a_softmax_and_starts_uniform() -> None:
    states_XSTE = torch.randn(4, 2, 2, 4)
    mixture = LayerMixture(4, learned=True)
    assert mixture.weights().tolist() == pytest.approx([0.25] * 4)
    logits = [0.3, -1.0, 2.0, 0.0]
    assert mixture.logits is not None
    mixture.logits.data = torch.tensor(logits)
    torch.testing.assert_close(mixture(states_XSTE), naive_mixture(states_XSTE, logits))
    mixture(states_XSTE).sum().backward()
    assert mixture.logits.grad is not None
    assert mixture.logits.grad.ne(0).any()
