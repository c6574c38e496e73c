"""A public shape on random weights is benched as any checkpoint, and the notes say so."""

from __future__ import annotations

import json

import pytest
from transformers import AutoConfig

from sedem.bench import random_weights
from sedem.bench.command import run_bench
from sedem.bench.plan import Plan


def test_a_shape_is_benched_on_random_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AutoConfig.for_model(
        "llama", vocab_size=8192, hidden_size=32, intermediate_size=64, num_hidden_layers=16,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
        max_position_embeddings=2048, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    monkeypatch.setattr(random_weights, "shape_file", lambda name: shape)
    document = run_bench(
        Plan(
            methods=("sedem", "full-context"), contexts=(300,), runs=1, answer_tokens=3,
            device="cpu", backbone="llama-3.2-1b",
        )
    )  # fmt: skip
    assert document["settings"]["weights_sha256"] is None
    assert any("llama-3.2-1b on random weights" in note for note in document["notes"])
    assert "answers are noise" in json.dumps(document["notes"])
    for rows in document["results"].values():
        assert rows["300"]["reads_tokens"] >= 300
        assert rows["300"]["online_ttft_ms"]["median"] > 0
    # Three blocks of 32 slots of width 32 in bfloat16 for 300 tokens.
    assert document["results"]["sedem"]["300"]["stored_bytes_per_token"] == 3 * 32 * 32 * 2 / 300
