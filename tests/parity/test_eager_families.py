"""Layouts that only the eager engine runs, against plain Hugging Face.

What differs from Llama is made to matter: multipliers away from 1, layers without positions,
windows and rotary bases by layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from sedem import Decoding, Document, SeDeM, SedemConfig
from sedem.backbone.decoder import ATTENTION, EAGER_FAMILIES, Backbone
from sedem.backbone.loading import open_backbone
from sedem.engine.open import open_engine
from sedem.errors import ConfigError
from sedem.method.injection import prefill, step
from sedem.training.stage1 import Stage1
from sedem.training.stage1_losses import Stage1Losses

WINDOW = 6
LAYERS = ["sliding_attention", "full_attention"] * 2
CHANGES: dict[str, dict[str, Any]] = {
    "olmo2": {},
    "phi3": {"partial_rotary_factor": 0.5, "sliding_window": WINDOW},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.4,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.5,
    },
    "gemma3_text": {
        "layer_types": LAYERS,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 5,
        "final_logit_softcapping": 3.0,
    },
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(params=[(f, a) for f in EAGER_FAMILIES for a in ATTENTION], ids="-".join)
def opened(request: pytest.FixtureRequest, tiny_folder: Callable[..., str]) -> Backbone:
    """A tiny backbone of each layout with each kind of attention in turn."""
    family, attention = request.param
    return open_backbone(tiny_folder(family, **CHANGES[family]), attention=attention)


@pytest.fixture(params=EAGER_FAMILIES)
def folder(request: pytest.FixtureRequest, tiny_folder: Callable[..., str]) -> str:
    return tiny_folder(request.param, **CHANGES[request.param])


def ids_of(rows: int, length: int) -> torch.Tensor:
    return torch.randint(2, 258, (rows, length), generator=torch.Generator().manual_seed(0))


def close(first: torch.Tensor, second: torch.Tensor) -> None:
    torch.testing.assert_close(first, second, rtol=1e-4, atol=3e-5)


def test_every_layer_and_the_logits_equal_hugging_face(opened: Backbone) -> None:
    ids = ids_of(2, 3 * WINDOW)
    expected = opened.model(ids, output_hidden_states=True, use_cache=False)
    positions = torch.arange(3 * WINDOW).expand(2, -1)
    for layer in range(opened.depth):
        close(opened.run(opened.embed(ids), 0, layer, positions), expected.hidden_states[layer])
    middle = opened.run(opened.embed(ids), 0, 2, positions)
    close(opened.logits(opened.run(middle, 2, opened.depth, positions)), expected.logits)


@pytest.mark.parametrize("inject", [0, 2])
def test_prefill_and_cached_steps_equal_hugging_face(opened: Backbone, inject: int) -> None:
    ids = ids_of(1, 2 * WINDOW + 3)
    expected = opened.model(ids, use_cache=False).logits
    nothing = torch.zeros(1, 0, opened.width)
    given = ids[:, : WINDOW + 1]
    filled = prefill(
        opened,
        inject,
        given,
        torch.ones_like(given, dtype=torch.bool),
        nothing,
        torch.zeros(1, 0, dtype=torch.bool),
        cache=DynamicCache(),
    )
    close(opened.logits(filled.prefix), expected[:, : WINDOW + 1])
    assert filled.stream is not None
    for at in range(WINDOW + 1, ids.shape[1]):
        close(opened.logits(step(opened, inject, ids[:, at], filled.stream)), expected[:, at])


def test_embeddings_injected_at_depth_zero_equal_the_concatenation(opened: Backbone) -> None:
    ids = ids_of(1, 12)
    ids[:, 0] = opened.bos_token_id
    expected = opened.model(ids, use_cache=False).logits
    prefix = torch.cat([ids[:, :1], ids[:, 8:]], dim=1)
    filled = prefill(
        opened,
        0,
        prefix,
        torch.ones_like(prefix, dtype=torch.bool),
        opened.embed(ids[:, 1:8]),
        torch.ones(1, 7, dtype=torch.bool),
    )
    close(opened.logits(filled.prefix), expected[:, [0, *range(8, 12)]])
    close(opened.logits(filled.restored), expected[:, 1:8])


def test_what_is_set_away_from_llama_matters(folder: str, tiny_folder: Callable[..., str]) -> None:
    """Otherwise the comparisons would also pass for a layout that ignores the settings."""
    backbone = open_backbone(folder)
    family = backbone.model.config.model_type
    if not CHANGES[family]:
        return
    ids = ids_of(1, 3 * WINDOW)
    plain = open_backbone(tiny_folder(family)).model(ids).logits
    assert not torch.allclose(backbone.model(ids).logits, plain, atol=1e-2)


def test_adapters_sit_on_all_attention_matrices(folder: str) -> None:
    backbone = open_backbone(folder)
    backbone.add_lora(2, 4)
    adapted = {n.split(".")[-4] for n, _ in backbone.named_parameters() if "lora_A" in n}
    joined = backbone.model.config.model_type == "phi3"
    wanted = {"qkv_proj", "o_proj"} if joined else {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert adapted == wanted


def test_stage_1_learns_on_it(folder: str, config: SedemConfig) -> None:
    backbone = open_backbone(folder)
    model = SeDeM(config.with_changes(encoder=folder), backbone, backbone)
    stage, ids = Stage1(model, Stage1Losses(context_at_restored=True)), ids_of(2, 20)
    with torch.enable_grad():
        stage(ids[:, :16], ids[:, 16:])["loss"].backward()
    for name, parameters in stage.parameter_groups().items():
        grads = [p.grad for p in parameters if p.grad is not None]
        assert grads and all(bool(g.isfinite().all()) for g in grads), name
        assert any(bool(g.any()) for g in grads), name


def test_the_eager_engine_answers_and_says_why_it_is_used(
    folder: str, config: SedemConfig, documents: list[Document], caplog: pytest.LogCaptureFixture
) -> None:
    backbone = open_backbone(folder)
    model = SeDeM(config.with_changes(encoder=folder), backbone, backbone).eval()
    family = backbone.model.config.model_type
    with caplog.at_level(logging.WARNING):
        model.engine = open_engine("auto", model)
    assert caplog.messages == [
        f"engine 'eager' runs this model: the fast one is unproven on {family}"
    ]
    assert model.engine.name == "eager"
    answer = model.answer(model.read(documents), "What is the rent?", decoding=Decoding(3))
    assert answer.citations
    with pytest.raises(ConfigError, match=f"engine 'static' is proven .* not on {family}; use"):
        open_engine("static", model)
