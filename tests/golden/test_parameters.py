"""Numbers that the paper prints, from modules on the meta device: no weights are made."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sedem.config import llama_1b
from sedem.errors import ConfigError
from sedem_lab.evaluation import cost as costs
from sedem_lab.evaluation.cost import Workload, cost

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
