"""The paper's FLOP table: which counting gives its numbers, also where nothing is left open."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest
from transformers import AutoConfig, PretrainedConfig

from experiments.system import paper
from experiments.system.cells import Cell
from experiments.system.convention import (
    all_pairs_flops,
    convention_flops,
    counted_as_paper,
    generation_flops,
)
from experiments.system.scales import NANO
from sedem.evaluation.cost import cost

PRESETS = ("llama-3.2-1b", "llama-3.2-3b")

# Table "inference FLOPs per query": encode, decode.
ICAE = {"llama-3.2-1b": (4219.8, 868.6), "llama-3.2-3b": (12091.7, 2497.9)}
BEACON = {"llama-3.2-1b": (4219.8, 870.7), "llama-3.2-3b": (12091.7, 2503.9)}
HMT = {"llama-3.2-1b": (3418.0, 117.7), "llama-3.2-3b": (9866.4, 329.2)}
CHUNK_500 = {"llama-3.2-1b": (1014.2, 106.0), "llama-3.2-3b": (2928.5, 295.1)}
SEDEM = {"llama-3.2-1b": (2892.9, 350.7), "llama-3.2-3b": (4750.3, 1003.0)}


def shape(preset: str) -> PretrainedConfig:
    text = (files("sedem") / "shapes" / f"{preset}.json").read_text()
    return AutoConfig.for_model(**json.loads(text))


def giga(flops: int) -> float:
    return round(flops / 1e9, 1)


@pytest.mark.parametrize("preset", PRESETS)
def test_icae_is_three_segments_of_512_with_128_memory_tokens_each(preset: str) -> None:
    """1,920 tokens through all layers, every token looking at every other; no head in encoding."""
    full = shape(preset)
    encode = full.num_hidden_layers * all_pairs_flops(full, 3 * (512 + 128))
    decode = generation_flops(full, 3 * 128 + 30, 16)
    assert (giga(encode), giga(decode)) == ICAE[preset]


@pytest.mark.parametrize("preset", PRESETS)
def test_beacon_is_1536_tokens_at_ratio_4_and_a_sink_of_one(preset: str) -> None:
    full = shape(preset)
    encode = full.num_hidden_layers * all_pairs_flops(full, 1536 + 1536 // 4)
    decode = generation_flops(full, 1 + 1536 // 4 + 30, 16)
    assert giga(encode) == BEACON[preset][0]
    assert giga(decode) == pytest.approx(BEACON[preset][1], abs=0.11)


@pytest.mark.parametrize("preset", PRESETS)
def test_500x_is_one_chunk_with_4_memory_tokens(preset: str) -> None:
    full = shape(preset)
    encode = full.num_hidden_layers * all_pairs_flops(full, 504)
    assert giga(encode) == CHUNK_500[preset][0]
    assert giga(generation_flops(full, 4 + 30, 16)) == pytest.approx(CHUNK_500[preset][1], abs=0.11)


@pytest.mark.parametrize("preset", PRESETS)
def test_hmt_is_three_segments_of_512_and_recalls_nothing(preset: str) -> None:
    """Each with 32 sensory tokens and 10 memory tokens at either end, looking at itself alone."""
    full = shape(preset)
    encode = full.num_hidden_layers * 3 * all_pairs_flops(full, 10 + 32 + 512 + 10)
    assert giga(encode) == HMT[preset][0]
    decode = generation_flops(full, 10 + 30, 16)
    assert giga(decode) == pytest.approx(HMT[preset][1], abs=0.11)


@pytest.mark.parametrize("preset", PRESETS)
def test_sedem_is_14_layers_and_128_states_at_full_depth(preset: str) -> None:
    found = convention_flops(shape(preset))
    assert (giga(found["encode"]), giga(found["decode"])) == SEDEM[preset]
    assert found["total"] == found["encode"] + found["decode"]


def test_11_of_28_layers_would_give_the_3b_number_alone() -> None:
    found = {p: giga(11 * all_pairs_flops(shape(p), 1920)) for p in PRESETS}
    assert found["llama-3.2-3b"] == SEDEM["llama-3.2-3b"][0]
    assert found["llama-3.2-1b"] == SEDEM["llama-3.2-1b"][0] + 8.2


@pytest.mark.parametrize("preset", PRESETS)
def test_the_study_shows_the_convention_beside_the_paper(preset: str) -> None:
    stages = counted_as_paper(preset, cost(preset)["flops"])["flops"]["stages"]
    committed = (Cell("cost", backbone=preset).read(NANO) or {})["paper"]["flops"]["stages"]
    for stage, counted in stages.items():
        assert counted == {name: committed[stage][name] for name in ("convention", "ours")}
        where = {"method": "SeDeM", "backbone": preset.replace("llama", "Llama").replace("b", "B")}
        printed = paper.number("tab:inference_flops_query", f"{stage}_gflops", **where)
        # The total of the 3B row is 0.1 above the sum of what the counting gives.
        assert giga(counted["convention"]) == pytest.approx(printed, abs=0.11)


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_are_the_papers(preset: str) -> None:
    parameters, short = cost(preset)["parameters"], preset.split("-")[-1]
    for row in paper.rows("tab:ours_inference_params"):
        part = row["module"].lower()
        allowed = 0.025 if part in ("compressor", "total") else 0.0051
        assert parameters[part] / 1e6 == pytest.approx(row[f"{short}_m"], abs=allowed)
