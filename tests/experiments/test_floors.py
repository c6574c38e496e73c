"""Floors against hand-written formulas: work over ceilings, stage by stage."""

from __future__ import annotations

import pytest

from experiments.system.floors import (
    Ceilings,
    Work,
    floors,
    layer_flops,
    sedem_work,
    text_work,
)
from sedem import Document, SeDeM
from sedem.answering.decoding import Decoding
from sedem.backbone.prompts import question_ids
from sedem.bank.keys import key_index

ONE = Decoding(max_new_tokens=1)


def last_layer(tokens: int, before: int = 0) -> int:
    """FLOPs of a tiny model's last layer: keys and values of all tokens, the rest of the last."""
    width, inner, heads, key_heads, head = 32, 64, 4, 2, 8
    keys_and_values = 2 * tokens * width * 2 * key_heads * head
    query_and_out = 2 * 2 * width * heads * head
    attention = 2 * 2 * (before + tokens) * heads * head
    return keys_and_values + query_and_out + attention + 2 * 3 * width * inner


def test_a_stage_takes_the_longer_of_its_flops_and_its_bytes_and_stages_add_up() -> None:
    work = {
        "read": [Work(0, 100)],
        "first": [Work(20, 10)],
        "answer": [Work(0, 10), Work(30, 0)],
        "token": [Work(1, 5)],
    }
    found = floors(work, 50, Ceilings(bytes_per_s=100.0, flops_per_s=100.0))
    assert found["online_ttft_ms"] == pytest.approx(1600)
    assert found["prebuilt_ttft_ms"] == pytest.approx(400)
    assert found["decode_tok_s"] == pytest.approx(20)
    assert found["build_tok_s"] == pytest.approx(50)
    assert floors({**work, "read": []}, 50, Ceilings(100.0, 100.0))["build_tok_s"] is None


def test_sedems_work_counts_each_weight_where_it_is_needed(
    model: SeDeM, documents: list[Document]
) -> None:
    bank = model.read(documents)
    question = "What is the rent?"
    work = sedem_work(model, model.answer(bank, question, k=2, decoding=ONE), question)
    layers = model.decoder.model.get_decoder().layers
    layer = sum(p.numel() for p in layers[0].parameters()) * 4
    head = model.decoder.model.get_output_embeddings().weight.numel() * 4
    (read,) = work["read"]
    selecting, restoring, prefill = work["answer"]
    keys = key_index(bank, model.selector).cached
    assert keys is not None
    assert read.bytes == 3 * layer + model.compressor.w_in.weight.numel() * 4
    # Keys are computed for the first question and cached.
    (first,) = work["first"]
    slots, key_weights = 4 * -(-bank.tokens // 16), model.selector.w_key.weight
    assert first.flops == 2 * slots * key_weights.numel()
    assert first.bytes == 4 * key_weights.numel() + bank.memory_bytes
    beside = sum(p.numel() for p in model.selector.parameters()) - key_weights.numel()
    # Keys count in the type of their cache.
    assert selecting.bytes == 3 * layer + 4 * beside + keys.nbytes
    assert restoring.bytes == sum(p.numel() for p in model.decompressor.parameters()) * 4
    assert prefill.bytes == 4 * layer + head
    # Two layers read the prompt, one also the states, and the last only its last position.
    prompt, states = len(question_ids(model.decoder, question)), 2 * 16
    shape = model.decoder.model.config
    layers_before = 2 * layer_flops(shape, prompt) + layer_flops(shape, states + prompt)
    assert prefill.flops == layers_before + last_layer(states + prompt) + 2 * 32 * 258
    # Two of four layers cache the states of two blocks in addition to the prompt.
    pairs = 4 * len(question_ids(model.decoder, question)) + 2 * 2 * 16
    assert work["token"][0].bytes == prefill.bytes + pairs * 2 * 2 * 8 * 4


def test_independent_blocks_run_alone(model: SeDeM, documents: list[Document]) -> None:
    model.config = model.config.with_changes(block_context="independent")
    answer = model.answer(model.read(documents), "Rent?", k=2, decoding=ONE)
    prefill = sedem_work(model, answer, "Rent?")["answer"][-1]
    shape = model.decoder.model.config
    # Each block of 16 states runs alone; its last layer gives keys and values.
    width, key_heads, head = 32, 2, 8
    block = layer_flops(shape, 16) + 2 * 16 * width * 2 * key_heads * head
    prefix = len(question_ids(model.decoder, "Rent?"))
    layers = 2 * layer_flops(shape, prefix) + layer_flops(shape, prefix, 32)
    assert prefill.flops == layers + last_layer(prefix, 32) + 2 * 32 * 258 + 2 * block


def test_a_text_readers_work_is_its_whole_prompt(model: SeDeM, documents: list[Document]) -> None:
    bank = model.read(documents)
    answer = model.answer(bank, "Rent?", k=1, decoding=ONE)
    shape = model.decoder.model.config
    head = 2 * 32 * 258
    seen, prompt = answer.conditioning, len(question_ids(model.decoder, "Rent?")) - 1
    assert seen is not None
    plain = text_work(model.decoder, answer, "Rent?", cached=False)
    cached = text_work(model.decoder, answer, "Rent?", cached=True)
    assert plain["answer"][0].flops == 3 * layer_flops(shape, seen) + last_layer(seen) + head
    assert not plain["read"]
    before = seen - prompt
    asked = 3 * layer_flops(shape, prompt, before) + last_layer(prompt, before)
    assert cached["answer"][0].flops == asked + head
    both = cached["read"][0].flops + cached["answer"][0].flops
    assert both == plain["answer"][0].flops
