"""ComprExIT against numbers of the official pooling and against its equations in plain loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from unit.baselines.conftest import check_question_loss, make, naive_loss, tokens

from sedem_lab.baselines.comprexit import (
    ComprExIT,
    ComprExITConfig,
    LayerFusion,
    Transport,
    transport_plan,
)

OFFICIAL = {
    "query_fusion_weights": "fusion.mixture",
    "layer_fusion_layer_embeddings": "fusion.layers",
    "layer_fusion_q_prj": "fusion.query",
    "layer_fusion_k_prj": "fusion.key",
    "layer_fusion_v_prj": "fusion.value",
    "metric_ln": "transport.metric.0",
    "metric_prj": "transport.metric.1",
    "value_ln": "transport.value.0",
    "value_prj": "transport.value.1",
    "source_mass.ln": "transport.mass.0",
    "source_mass.mass_prj": "transport.mass.1",
}
"""Our name of each official parameter."""


@pytest.fixture
def reader(tiny_folder: Callable[..., str]) -> Any:
    return make("comprexit", tiny_folder())


class Official:
    """Fusion and transport with the weights of the fixture."""

    def __init__(self, path: Path) -> None:
        self.numbers = load_file(path)
        config = ComprExITConfig(backbone="none", piece=8, window=8)
        self.fusion = LayerFusion(4, 8, 4, 0.7)
        self.transport = Transport(config, 8)
        self.transport.metric[1] = torch.nn.Linear(8, 5)
        parts = torch.nn.ModuleDict({"fusion": self.fusion, "transport": self.transport})
        weights = {}
        for name, weight in self.numbers.items():
            if name.startswith("weights."):
                (known,) = [o for o in OFFICIAL if name.startswith(f"weights.{o}")]
                weights[name.replace(f"weights.{known}", OFFICIAL[known])] = weight
        parts.load_state_dict(weights)

    def slots(self) -> tuple[Tensor, Tensor]:
        """Fused states, and the slots of two whole windows and one of five tokens."""
        fused = self.fusion(self.numbers["states"])
        windows = F.pad(fused, (0, 0, 0, 3)).unflatten(0, (3, 8))
        mask = (torch.arange(24) < 21).view(3, 8)
        real = mask.unflatten(1, (2, 4)).any(2)
        return fused, self.transport(windows, mask)[real]


def test_fusion_and_transport_match_the_official_code(fixtures: Path) -> None:
    official = Official(fixtures / "comprexit-official.safetensors")
    fused, slots = official.slots()
    torch.testing.assert_close(fused, official.numbers["fused"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slots, official.numbers["slots"], rtol=1e-4, atol=1e-5)
    sought = (slots * torch.linspace(-1, 1, slots.numel()).view_as(slots)).sum()
    trained = {
        "mass": official.transport.mass[1].weight,
        "metric": official.transport.metric[1].weight,
        "query": official.fusion.mixture,
    }
    gradients = torch.autograd.grad(sought, list(trained.values()))
    for name, gradient in zip(trained, gradients, strict=True):
        wanted = official.numbers[f"gradient.{name}"]
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-4)


def test_a_plan_has_the_given_masses() -> None:
    torch.manual_seed(0)
    source = torch.tensor([[0.5, 0.25, 0.25, 0.0], [0.1, 0.2, 0.3, 0.4]])
    target = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    plan = transport_plan(torch.rand(2, 4, 2), source, target, 0.1, 60)
    torch.testing.assert_close(plan.sum(2), source, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(plan.sum(1), target)
    # Before training, the mass is uniform over the tokens that are not padding.
    fresh = Transport(ComprExITConfig(backbone="none", piece=4, window=4, compression=2), 6)
    mask = torch.tensor([[True, True, True, False]])
    masses = fresh.masses(torch.randn(1, 4, 6), mask)
    torch.testing.assert_close(masses, mask / 3)


def naive_slots(reader: ComprExIT, ids: list[int]) -> Tensor:
    """The slots in plain loops over pieces, tokens and windows, from Hugging Face's forward."""
    parts: Any = reader.parts()
    fusion, transport, config = parts["fusion"], parts["transport"], reader.config
    slots = []
    for at in range(0, len(ids), config.piece):
        own = [reader.backbone.bos_token_id, *ids[at : at + config.piece]]
        output = reader.backbone.model(torch.tensor([own]), output_hidden_states=True)
        tokens = []
        for place in range(1, len(own)):
            states = [layer[0, place] for layer in output.hidden_states]
            mixture = fusion.mixture.softmax(0)
            query = fusion.query(sum(w * h for w, h in zip(mixture, states, strict=True)))
            keys = [fusion.key(h) + e for h, e in zip(states, fusion.layers, strict=True)]
            scores = torch.stack([query @ key for key in keys]) / config.inner**0.5
            weights = (scores / config.fusion_temperature).softmax(0)
            values = [fusion.value(h) for h in states]
            tokens.append(sum(w * v for w, v in zip(weights, values, strict=True)))
        for first in range(0, len(tokens), config.window):
            slots += naive_window(transport, torch.stack(tokens[first : first + config.window]))
    return parts["projection"](torch.stack(slots))


def naive_window(transport: Any, tokens: Tensor) -> list[Tensor]:
    """Sinkhorn's iterations without logarithms."""
    config = transport.config
    anchors = torch.stack([part.mean(0) for part in tokens.split(config.compression)])
    places = [[F.normalize(transport.metric(x), dim=-1) for x in xs] for xs in (tokens, anchors)]
    kernel = torch.stack(
        [torch.stack([((p @ a - 1) / config.entropy).exp() for a in places[1]]) for p in places[0]]
    )
    source = transport.mass(tokens)[:, 0].softmax(0) * (1 - config.floor)
    source = source + config.floor / len(tokens)
    target = torch.full((len(anchors),), 1 / len(anchors))
    right = torch.ones(len(anchors))
    for _ in range(config.iterations):
        left = source / (kernel @ right)
        right = target / (kernel.T @ left)
    plan = left[:, None] * kernel * right
    return [(plan[:, k] @ transport.value(tokens)) / target[k] for k in range(len(anchors))]


@torch.no_grad()
def test_slots_match_the_equations(reader: ComprExIT) -> None:
    for length in (3, 16, 21, 37):
        ids = tokens(length)[0].tolist()
        (slots,) = reader._encode_contexts([torch.tensor(ids)])
        assert len(slots) == -(-length // 4)
        torch.testing.assert_close(slots, naive_slots(reader, ids), rtol=1e-3, atol=1e-4)
        compressed = reader.compress(ids)
        assert torch.equal(compressed.content, slots.bfloat16())
        assert compressed.stored_bytes == 2 * slots.numel()


@torch.no_grad()
def test_losses_match_the_equations(reader: ComprExIT) -> None:
    contexts = tokens(40, 9)
    check_question_loss(reader, contexts, lambda context: naive_slots(reader, context.tolist()))
    context, after = torch.stack(tokens(20, 20)), torch.stack(tokens(7, 7))
    expected = [
        naive_loss(reader, naive_slots(reader, row.tolist()), [], target.tolist()).mean()
        for row, target in zip(context, after, strict=True)
    ]
    loss = reader.text_loss(context, after)["loss"]
    torch.testing.assert_close(loss, torch.stack(expected).mean(), rtol=1e-4, atol=1e-4)
