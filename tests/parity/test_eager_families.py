"""Layouts that only the eager engine runs, against plain Hugging Face.

What differs from Llama is made to matter: multipliers away from 1, layers without positions,
windows and rotary bases by layer, experts, sinks in the softmax.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sedem import Decoding, Document, SeDeM, SedemConfig
from sedem.backbone.decoder import ATTENTION, EAGER_FAMILIES, SINK_FAMILIES, Backbone
from sedem.backbone.loading import open_backbone
from sedem.engine.static import open_engine
from sedem.errors import ConfigError
from sedem.guidance.independent import KeysValues, keys_values
from sedem.method.injection import GrowingCache, RestoredBlocks, prefill, step
from sedem_lab.training.stage1 import Stage1, Stage1Losses

WINDOW = 6
LAYERS = ["sliding_attention", "full_attention"] * 2
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [1],
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.4},
}
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
    "qwen3_moe": {
        **EXPERTS["qwen3_moe"],
        "norm_topk_prob": True,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
    },
    "gpt_oss": {**EXPERTS["gpt_oss"], "layer_types": LAYERS, "sliding_window": WINDOW},
}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


KINDS = [
    (f, a) for f in EAGER_FAMILIES for a in (ATTENTION[1:] if f in SINK_FAMILIES else ATTENTION)
]


@pytest.fixture(params=KINDS, ids="-".join)
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
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


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
    cache = GrowingCache()
    filled = prefill(
        opened,
        inject,
        given,
        torch.ones_like(given, dtype=torch.bool),
        nothing,
        torch.zeros(1, 0, dtype=torch.bool),
        cache=cache,
    )
    close(opened.logits(filled.prefix), expected[:, : WINDOW + 1])
    for at in range(WINDOW + 1, ids.shape[1]):
        close(opened.logits(step(opened, inject, ids[:, at], cache)), expected[:, at])


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


def test_greedy_answers_equal_hugging_face(folder: str) -> None:
    backbone = open_backbone(folder)
    ids = ids_of(2, 2 * WINDOW)
    (end,) = {backbone.model.generation_config.eos_token_id, backbone.eos_token_id}
    expected = backbone.model.generate(ids, max_new_tokens=WINDOW, do_sample=False)
    nothing = torch.zeros(2, 0, backbone.width), torch.zeros(2, 0, dtype=torch.bool)
    everything = torch.ones_like(ids, dtype=torch.bool)
    cache = GrowingCache()
    filled = prefill(backbone, 2, ids, everything, *nothing, cache=cache)
    found = [backbone.logits(filled.prefix[:, -1]).argmax(-1)]
    for _ in range(WINDOW - 1):
        found.append(backbone.logits(step(backbone, 2, found[-1], cache)).argmax(-1))
    rows = torch.stack(found, dim=1).tolist()
    for row, given in zip(rows, expected[:, ids.shape[1] :].tolist(), strict=True):
        length = given.index(end) + 1 if end in given else len(given)
        assert row[:length] == given[:length]


def test_independent_blocks_are_those_of_one_mask(opened: Backbone) -> None:
    """With biases: kept keys and values are attended to as in one pass with a mask over it all."""
    ids, states = ids_of(2, 5), torch.randn(2, 3, 4, opened.width)
    everything, real = torch.ones_like(ids, dtype=torch.bool), torch.ones(2, 12, dtype=torch.bool)
    ids[:, 0] = opened.bos_token_id
    bias = torch.tensor([[0.0, -1.0, -3.0]] * 2).repeat_interleave(4, dim=1)
    number = torch.arange(3).repeat_interleave(4).expand(2, -1)
    at_once = prefill(
        opened,
        2,
        ids,
        everything,
        states.flatten(1, 2),
        real,
        blocks=RestoredBlocks(number, "independent", bias),
    )
    cache = GrowingCache()
    for layer, pair in enumerate(keys_values(opened, 2, states.flatten(0, 1)), start=2):
        key, value = (t.unflatten(0, (2, 3)).transpose(1, 2).flatten(2, 3) for t in pair)
        cache.upper.update(key, value, layer)
    blocks = RestoredBlocks(number, "independent", bias)
    alone = prefill(opened, 2, ids, everything, None, real, blocks=blocks, cache=cache)
    close(alone.prefix, at_once.prefix)


def test_a_bias_of_log_2_counts_a_state_twice(opened: Backbone) -> None:
    """A sink is one logit more, which no bias and no number of blocks changes."""
    ids = ids_of(1, 5)
    ids[:, 0] = opened.bos_token_id
    memory = keys_values(opened, 2, torch.randn(1, 3, opened.width))
    twice = [
        (torch.cat([key, key], dim=2), torch.cat([value, value], dim=2)) for key, value in memory
    ]

    def states(kept: KeysValues, count: int, bias: float) -> torch.Tensor:
        real, cache = torch.ones(1, 3 * count, dtype=torch.bool), GrowingCache()
        number = torch.arange(count).repeat_interleave(3)[None]
        cache.upper.stored.update(enumerate(kept, start=2))
        everything = torch.ones_like(ids, dtype=torch.bool)
        blocks = RestoredBlocks(number, "independent", torch.full(real.shape, bias))
        return prefill(opened, 2, ids, everything, None, real, blocks=blocks, cache=cache).prefix

    close(states(memory, 1, math.log(2)), states(twice, 2, 0.0))
    assert not torch.allclose(states(memory, 1, 0.0), states(twice, 2, 0.0), atol=1e-4)


def test_sinks_matter(tiny_folder: Callable[..., str]) -> None:
    backbone, ids = open_backbone(tiny_folder("gpt_oss", **CHANGES["gpt_oss"])), ids_of(1, 5)
    given = backbone.model(ids).logits
    for layer in backbone.model.get_decoder().layers:
        layer.self_attn.sinks.fill_(-1e9)
    assert not torch.allclose(backbone.model(ids).logits, given, atol=1e-2)


def test_what_is_set_away_from_llama_matters(folder: str, tiny_folder: Callable[..., str]) -> None:
    """Otherwise the comparisons would also pass for a layout that ignores the settings."""
    backbone = open_backbone(folder)
    family = backbone.model.config.model_type
    if not CHANGES[family]:
        return
    ids = ids_of(1, 3 * WINDOW)
    plain = open_backbone(tiny_folder(family, **EXPERTS.get(family, {}))).model(ids).logits
    assert not torch.allclose(backbone.model(ids).logits, plain, atol=1e-2)


def test_adapters_sit_on_all_attention_matrices(folder: str) -> None:
    backbone = open_backbone(folder)
    backbone.add_lora(2, 4)
    adapted = {n.split(".")[-4] for n, _ in backbone.named_parameters() if "lora_A" in n}
    joined = backbone.model.config.model_type == "phi3"
    wanted = {"qkv_proj", "o_proj"} if joined else {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert adapted == wanted


def test_adapters_on_experts_are_refused(tiny_folder: Callable[..., str]) -> None:
    for family, missing in (("qwen3_moe", 3), ("gpt_oss", 4)):
        backbone = open_backbone(tiny_folder(family, **CHANGES[family]))
        with pytest.raises(ConfigError, match=f"on 'gate_proj', but {missing} of 4 layers have no"):
            backbone.add_lora(2, 4, ["q_proj", "gate_proj"])


def test_stage_1_learns_on_it(folder: str, config: SedemConfig) -> None:
    backbone = open_backbone(folder)
    model = SeDeM(config.with_changes(encoder=folder), backbone, backbone)
    stage, ids = Stage1(model, Stage1Losses()), ids_of(2, 20)
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
