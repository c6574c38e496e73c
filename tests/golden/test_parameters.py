"""Numbers that the paper prints, from modules on the meta device: no weights are made."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Cache, DynamicCache

from sedem.backbone.decoder import FAMILIES, Backbone
from sedem.backbone.loading import open_backbone
from sedem.config import llama_1b
from sedem.errors import ConfigError
from sedem.evaluation import cost as costs
from sedem.evaluation.cost import Workload, cost, layer_flops

WIDTHS = {"llama-3.2-1b": 2048, "llama-3.2-3b": 3072}

# Table "SeDeM parameters active at inference" (tab:ours_inference_params), in millions, and the
# totals of the text around it.
PRINTED = {
    "llama-3.2-1b": {
        "compressor": 4.21,
        "decompressor": 20.99,
        "selector": 8.40,
        "lora": 13.63,
        "total": 47.22,
        "percent": 3.82,
        "backbone": 1.236,
    },
    "llama-3.2-3b": {
        "compressor": 9.46,
        "decompressor": 47.21,
        "selector": 18.89,
        "lora": 36.70,
        "total": 112.25,
        "percent": 3.49,
        "backbone": 3.213,
    },
}
# Table "inference parameter overhead" (tab:inference_parameter_overhead): the same without LoRA.
PRINTED_PERCENT_WITHOUT_LORA = {"llama-3.2-1b": 2.72, "llama-3.2-3b": 2.35}


@cache
def parameters(preset: str) -> dict[str, Any]:
    return cost(preset)["parameters"]


def millions(count: int) -> float:
    return round(count / 1e6, 2)


@pytest.mark.parametrize("preset", PRINTED)
def test_parameters_are_as_many_as_the_paper_prints(preset: str) -> None:
    counts, printed = parameters(preset), PRINTED[preset]
    for part in ("decompressor", "selector", "lora"):
        assert millions(counts[part]) == printed[part]
    # The compressor is W_in and nothing else.
    assert counts["compressor"] == WIDTHS[preset] ** 2
    assert round(counts["backbone"] / 1e9, 3) == printed["backbone"]
    assert counts["percent"] == printed["percent"]
    parts = ("compressor", "decompressor", "selector", "lora")
    assert counts["total"] == sum(counts[part] for part in parts)
    without_lora = 100 * (counts["total"] - counts["lora"]) / counts["backbone"]
    assert round(without_lora, 2) == PRINTED_PERCENT_WITHOUT_LORA[preset]


def test_the_papers_compressor_has_six_or_seven_widths_more_than_its_equation() -> None:
    """Which multiples of d would make the printed compressors and totals of both backbones right.

    W_in alone does not; nothing in the paper says what the rest is.
    """
    fitting = []
    for multiple in range(12):
        fits = True
        for preset, d in WIDTHS.items():
            counts = parameters(preset)
            compressor = d * d + multiple * d
            others = counts["decompressor"] + counts["selector"] + counts["lora"]
            fits &= millions(compressor) == PRINTED[preset]["compressor"]
            fits &= millions(compressor + others) == PRINTED[preset]["total"]
        if fits:
            fitting.append(multiple)
    assert fitting == [6, 7]


def test_two_backbones_cost_a_projection_between_their_widths() -> None:
    counts = parameters("llama-3.2-1b-to-3b")
    assert counts["compressor"] == 2048 * 3072
    assert counts["decompressor"] == parameters("llama-3.2-3b")["decompressor"]
    assert counts["lora"] == parameters("llama-3.2-3b")["lora"]
    assert counts["selector"] == 2048 * 3072 + 3072 * 3072 + 2 * 2048 + 2 * 3072


def test_an_unknown_backbone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is not known; give llama-3\.2-1b, llama-3\.2-3b"):
        cost(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match="layout 'gpt2'; costs are counted for llama"):
        cost(str(tmp_path))


# FLOPs


@pytest.fixture(params=FAMILIES)
def eager(request: pytest.FixtureRequest, tiny_folder: Callable[..., str]) -> Backbone:
    """With eager attention, whose two products the counter sees as they are.

    A head wider than D / heads, so that both must be told apart.
    """
    return open_backbone(tiny_folder(request.param, head_dim=16), attention="eager")


def run_layers(backbone: Backbone, layers: int, first: int, count: int, cached: Cache) -> int:
    """FLOPs of the first layers over tokens from `first` on; the earlier ones are cached."""
    decoder = backbone.model.get_decoder()
    positions = torch.arange(first, first + count)[None]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        hidden = backbone.embed(torch.zeros(1, count, dtype=torch.long))
        rope = decoder.rotary_emb(hidden, position_ids=positions)
        for layer in decoder.layers[:layers]:
            hidden = layer(
                hidden,
                position_ids=positions,
                past_key_values=cached,
                use_cache=True,
                position_embeddings=rope,
            )
    return counter.get_total_flops()


def counted(backbone: Backbone, tokens: int, before: int = 0) -> int:
    """FLOPs of one layer over some tokens that follow others: two layers less one.

    The difference leaves out what all layers share, the rotary angles.
    """
    totals = []
    for layers in (1, 2):
        cached = DynamicCache()
        if before:
            run_layers(backbone, layers, 0, before, cached)
        totals.append(run_layers(backbone, layers, before, tokens, cached))
    return totals[1] - totals[0]


def attention_flops(backbone: Backbone, pairs: int) -> int:
    """Scores and values of that many pairs of a token and one that it looks at, all heads."""
    config = backbone.model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * 2 * pairs * head * config.num_attention_heads


@pytest.mark.parametrize("before", [0, 1, 9])
def test_one_decoded_token_costs_exactly_what_is_counted(eager: Backbone, before: int) -> None:
    """One token looks at every key, so the formula and the counter mean the same attention."""
    assert layer_flops(eager.model.config, 1, before) == counted(eager, 1, before)


@pytest.mark.parametrize(("tokens", "before"), [(2, 0), (7, 0), (5, 6)])
def test_the_projections_of_a_prefill_cost_exactly_what_is_counted(
    eager: Backbone, tokens: int, before: int
) -> None:
    """The formula counts the causal triangle, eager attention computes the whole rectangle."""
    triangle = sum(before + at + 1 for at in range(tokens))
    rectangle = tokens * (before + tokens)
    formula = layer_flops(eager.model.config, tokens, before) - attention_flops(eager, triangle)
    assert formula == counted(eager, tokens, before) - attention_flops(eager, rectangle)
    assert formula > 0


def test_flops_grow_with_tokens_as_the_formula_says_for_the_papers_layer() -> None:
    """A Llama-3.2-1B layer written out: 60.8M weights, two FLOPs each, and attention."""
    flops = cost("llama-3.2-1b", Workload(context=128, question=30, answer=1, k=1))["flops"]
    weights = 2048 * 2048 * 2 + 2048 * 512 * 2 + 3 * 2048 * 8192
    seen = sum(at + 1 for at in range(129))
    assert flops["read"] == 14 * (2 * 129 * weights + 4 * seen * 2048) + 2 * 32 * 2048 * 2048


@pytest.mark.parametrize(("own", "counted"), [("all", 2048 // 128), ("auto", 5), (3, 3)])
def test_a_model_is_counted_with_its_own_k(
    own: int | str, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = llama_1b(k=own, auto_max=5, guidance=True)
    shape = "llama-3.2-1b"
    monkeypatch.setitem(costs.PRESETS, "own", (lambda: config, shape, shape))
    assert cost("own")["flops"]["assumptions"]["k"] == counted


def test_every_stage_is_counted() -> None:
    few, many = (cost("llama-3.2-1b", Workload(k=k))["flops"] for k in (2, 8))
    assert few["read"] == many["read"]
    assert few["select"] == many["select"]
    assert many["restore"] == 4 * few["restore"]
    assert many["prefill"] > few["prefill"]
    stages = ("read", "select", "restore", "prefill", "decode")
    assert few["total"] == sum(few[stage] for stage in stages)
    # A slot becomes C states: two products a slot, of d x d and d x Cd.
    assert few["restore"] == 2 * 32 * 2 * (2048 * 2048 + 2048 * 4 * 2048)
