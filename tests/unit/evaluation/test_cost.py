"""FLOPs of trained baselines are those that torch counts while a tiny one reads and answers.

As in `test_flops.py`: eager attention, whose products the counter sees, and which computes the half
of a square that a causal mask hides; that half is written out here, call by call. Adapters, which
count as merged, are not attached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from unit.baselines.conftest import SMALL
from unit.evaluation.test_flops import counted

from sedem.backbone.loading import open_backbone
from sedem.errors import ConfigError
from sedem_lab.baselines.registry import reader_class
from sedem_lab.baselines.trained import TrainedReader
from sedem_lab.evaluation.cost import COUNTED, Workload, baseline_flops, baseline_parameters

HEAD, ANSWER = 16, 5

CASES = [
    # Three segments of 4 memory tokens; the last one is shorter and goes along padded.
    pytest.param("icae", 46, 7, {}, ([21, 21, 21], [21]), id="icae"),
    pytest.param("icae", 16, 7, {"memory": 2, "compression": 8}, ([19], [11]), id="icae-one"),
    # Segments of 32 tokens between 2 memory vectors, sensory tokens, recall by 16 tokens.
    pytest.param("hmt", 70, 7, {}, ([36, 20, 40], [18, 20]), id="hmt"),
    pytest.param("hmt", 63, 20, {}, ([36, 20, 40], [20, 26]), id="hmt-no-rest"),
    pytest.param("hmt", 60, 20, {}, ([36], [20, 37, 20, 26]), id="hmt-question-apart"),
    # Three memory vectors are kept of the four that two segments have.
    pytest.param("hmt", 70, 7, {"recall_context": 3}, ([36, 20, 40], [18, 20]), id="hmt-newest"),
    pytest.param("500x", 70, 7, {}, ([52], [8]), id="500x"),
    pytest.param(
        "500x", 110, 7, {"long_contexts": "windows"}, ([52, 52, 52], [8]), id="500x-windows"
    ),
    # Windows of 16 tokens and 4 beacons, then 3 tokens that fill none.
    pytest.param("beacon", 34, 7, {}, ([20, 20, 3], [7]), id="beacon"),
    pytest.param("beacon", 31, 7, {"ratio": 2}, ([24, 24], [7]), id="beacon-no-rest"),
    pytest.param("beacon", 9, 7, {}, ([10], [7]), id="beacon-no-window"),
]
"""Method, context, question, settings, and tokens of each pass of encoding and of prefill."""


def tiny(method: str, folder: str, changes: dict[str, Any]) -> TrainedReader:
    kind = reader_class(method)
    settings = {**SMALL[method], "lora_rank": 0, **changes}
    backbone = open_backbone(folder, attention="eager")
    return kind(kind.Config(backbone=folder, **settings), backbone).requires_grad_(False).eval()


def hidden_half(reader: TrainedReader, calls: list[int]) -> int:
    """Scores and values of pairs that the causal mask hides, over all layers."""
    backbone = reader.backbone
    wide = 4 * backbone.depth * backbone.model.config.num_attention_heads * HEAD
    return wide * sum(tokens * (tokens - 1) // 2 for tokens in calls)


@pytest.mark.parametrize(("method", "context", "question", "changes", "calls"), CASES)
def test_reading_and_answering(
    method: str,
    context: int,
    question: int,
    changes: dict[str, Any],
    calls: tuple[list[int], list[int]],
    tiny_folder: Callable[..., str],
) -> None:
    folder = tiny_folder("llama", head_dim=HEAD)
    reader = tiny(method, folder, changes)
    prompt = [reader.backbone.bos_token_id, *range(40, 40 + question)]
    kept: list[Any] = []

    def remember() -> None:
        kept.append(reader.compress([30 + i % 60 for i in range(context)]).content)

    def answer() -> None:
        with reader.decoding_mode():
            used = reader.context_tokens_used(context, len(prompt), ANSWER)
            filled = reader.prefill(kept, [used], [prompt])
            for _ in range(ANSWER - 1):
                filled.advance(torch.tensor([50]))

    flops = baseline_flops(
        method, folder, reader.config, Workload(context=context, question=question, answer=ANSWER)
    )
    assert flops["encode"] == counted(remember) - hidden_half(reader, calls[0])
    assert flops["decode"] == counted(answer) - hidden_half(reader, calls[1])
    assert flops["total"] == flops["encode"] + flops["decode"]


@pytest.mark.parametrize("method", COUNTED)
def test_the_defaults_are_the_papers_query_and_settings(method: str) -> None:
    assumed = baseline_flops(method, "llama-3.2-1b")["assumptions"]
    query = ("context_tokens", "question_tokens", "answer_tokens")
    assert tuple(assumed[name] for name in query) == (2048, 30, 16)
    defaults = reader_class(method).Config(backbone="")
    for name, value in assumed.items():
        assert name.startswith(("context", "question", "ans")) or value == getattr(defaults, name)


def test_500x_costs_the_same_for_every_context_and_reports_what_it_reads() -> None:
    short, long = (baseline_flops("500x", "llama-3.2-1b", None, Workload(n)) for n in (300, 9000))
    assert short["total"] == long["total"]
    assert [flops["assumptions"]["context_tokens_read"] for flops in (short, long)] == [300, 500]


def test_a_method_or_backbone_without_a_count_is_refused() -> None:
    for method, backbone, words in (
        ("rag", "llama-3.2-1b", "FLOPs of 'rag' are not counted; those of icae, hmt"),
        ("icae", "llama-9", "backbone 'llama-9' is not known"),
        ("icae", "llama-3.2-1b-to-3b", "has two backbones; give llama-3.2-1b or llama-3.2-3b"),
    ):
        with pytest.raises(ConfigError, match=words):
            baseline_flops(method, backbone)


# Parameters, against the paper's table

# Table "inference-time parameter overhead": millions as printed, by backbone.
PRINTED = {
    "icae": {"llama-3.2-1b": (0.54, 2), "llama-3.2-3b": (0.81, 2)},
    "hmt": {"llama-3.2-1b": (0.020, 3), "llama-3.2-3b": (0.031, 3)},
    "500x": {"llama-3.2-1b": (0.008, 3), "llama-3.2-3b": (0.012, 3)},
    "beacon": {"llama-3.2-1b": (100.67, 2), "llama-3.2-3b": (440.40, 2)},
}


def test_overhead_equals_the_papers_to_the_digit() -> None:
    for method, printed in PRINTED.items():
        for backbone, (millions, digits) in printed.items():
            found = baseline_parameters(method, backbone)
            assert round(found["without_lora"] / 1e6, digits) == millions


def test_trained_parameters_are_those_of_the_parts_and_the_adapters() -> None:
    icae = baseline_parameters("icae", "llama-3.2-1b")
    assert icae["parts"] == (128 + 3) * 2048
    assert icae["lora"] == 16 * 128 * ((2048 + 2048) + (2048 + 512))
    # Twice the trained table and one row: what the official code allocates.
    assert icae["without_lora"] == 2 * icae["parts"] + 2048
    assert round(icae["percent_without_lora"], 2) == 0.04
    comprexit = baseline_parameters("comprexit", "llama-3.2-1b")
    width, inner, layers = 2048, 256, 17
    squares = 4 * (width * width + width)  # two values, two layers of the projection
    narrow = 3 * (width * inner + inner) + layers * (inner + 1)
    every = squares + narrow + 3 * 2 * width + width + 1
    assert comprexit["total"] == comprexit["parts"] == every
    assert 1 < comprexit["percent_without_lora"] < 2
