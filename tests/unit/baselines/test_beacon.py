"""Activation Beacon against numbers of the official code, and invariants on any backbone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from unit.baselines.conftest import SMALL, make, tokens

from sedem import Document
from sedem.backbone.decoder import FAMILIES, Backbone
from sedem_lab.baselines.beacon import ActivationBeacon, BeaconConfig
from sedem_lab.training.baseline import TextTraining
from sedem_lab.training.targets import targets


@pytest.fixture
def reader(tiny_folder: Callable[..., str]) -> Any:
    return make("beacon", tiny_folder())


class Official:
    """A reader with the weights of the fixture: two layers, windows of 8."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self.numbers = load_file(path)
        shape = LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
            bos_token_id=0,
            eos_token_id=1,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            attn_implementation="sdpa",
        )
        model = LlamaForCausalLM(shape)
        weights = {
            name.removeprefix("weights."): weight
            for name, weight in self.numbers.items()
            if name.startswith("weights.")
        }
        frozen = {name: weight for name, weight in weights.items() if "beacon" not in name}
        model.load_state_dict(frozen)
        config = BeaconConfig(backbone="none", window=8, ratios=(4,))
        self.reader = ActivationBeacon(config, Backbone(model, tokenizer, "none")).eval()
        own = {"token.weight": weights["model.beacon_embed_tokens.weight"]}
        for layer in range(2):
            for name in "qkv":
                official = f"model.layers.{layer}.self_attn.beacon_{name}_proj.weight"
                own[f"{name}.{layer}.weight"] = weights[official]
        self.reader.parts().load_state_dict(own)


@pytest.fixture
def official(fixtures: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> Official:
    # The fixture has fewer embeddings than a tokenizer has bytes, and no text is read.
    monkeypatch.setattr(Backbone, "check_ids", lambda *_: None)
    return Official(fixtures / "beacon-official.safetensors", backbone.tokenizer)


def test_text_loss_and_gradients_match_the_official_code(
    official: Official, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, numbers = official.reader, official.numbers
    # Windows of 8, 8, 8 and 6 tokens; the official run used these ratios in turn.
    monkeypatch.setattr(reader, "_draw_ratios", lambda ids, windows: [4, 2, 4][:windows])
    text = numbers["text"][None]
    loss = reader.text_loss(text[:, 1:20], text[:, 20:])["loss"]
    torch.testing.assert_close(loss, numbers["text.loss"], rtol=1e-5, atol=1e-5)
    parts: Any = reader.parts()
    trained = {
        "token": parts["token"].weight,
        "k0": parts["k"][0].weight,
        "v1": parts["v"][1].weight,
    }
    gradients = torch.autograd.grad(loss, list(trained.values()))
    for name, gradient in zip(trained, gradients, strict=True):
        wanted = numbers[f"gradient.{name}"]
        torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_memory_logits_and_question_loss_match_the_official_code(official: Official) -> None:
    reader, numbers = official.reader, official.numbers
    stream = numbers["question"].tolist()
    context, prompt, answer = stream[1:18], [0, *stream[18:20]], stream[20:]
    loss = reader.question_loss([torch.tensor(context)], **targets([(prompt, answer)]))["loss"]
    torch.testing.assert_close(loss, numbers["question.loss"], rtol=1e-5, atol=1e-5)
    compressed = reader.compress(context).content
    assert compressed.shape == (2, 2, 1, 1 + 2 * 2 + 2, 8)
    for layer in range(2):
        values = numbers[f"question.values.{layer}"].bfloat16()
        torch.testing.assert_close(compressed[layer, 1, :, :5], values, rtol=1e-2, atol=1e-2)
        keys = rotated(reader, numbers[f"question.keys.{layer}"])
        torch.testing.assert_close(compressed[layer, 0, :, :5].float(), keys, rtol=2e-2, atol=2e-2)
    filled = reader.prefill([compressed.float()], [17], [prompt])
    wanted = numbers["question.logits"][3]
    # The stored memory was rounded to bfloat16.
    torch.testing.assert_close(filled.logits[0], wanted, rtol=0.05, atol=0.05)


def rotated(reader: ActivationBeacon, keys_HKE: Tensor) -> Tensor:
    """Rotate keys to positions 0, 1, 2 ...; the official code caches them unrotated."""
    half = keys_HKE.shape[-1] // 2
    angles = torch.arange(keys_HKE.shape[1])[:, None] / 10000 ** (torch.arange(half) / half)
    first, second = keys_HKE.split(half, dim=-1)
    parts = [first * angles.cos() - second * angles.sin()]
    parts.append(second * angles.cos() + first * angles.sin())
    return torch.cat(parts, dim=-1)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_logits_match_the_training_loss_and_memory_only_earlier_windows(
    family: str, tiny_folder: Callable[..., str]
) -> None:
    reader = make("beacon", tiny_folder(family))
    contexts = tokens(15, 50, 7, 40)
    prompt = [reader.backbone.bos_token_id, 5, 6, 7]
    labels = targets([(prompt, [9])] * 4)
    contents = [reader.compress(context.tolist()).content for context in contexts]
    filled = reader.prefill(contents, [len(c) for c in contexts], [prompt] * 4)
    loss = reader.question_loss(contexts, **labels)["loss"]
    expected = F.cross_entropy(filled.logits, torch.full((4,), 9))
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=2e-2)
    ids = tokens(47)[0].tolist()
    one, other = (reader.compress(own).content for own in (ids, [*ids[:15], *[7] * 16, *ids[31:]]))
    assert one.shape[3] == 1 + 3 * 4
    assert torch.equal(one[..., :5, :], other[..., :5, :])
    assert not torch.equal(one[..., 5:, :], other[..., 5:, :])


@torch.no_grad()
def test_without_a_full_window_the_backbone_reads_plain_text(reader: ActivationBeacon) -> None:
    context, prompt = [5, 6, 7, 8], [0, 9, 10]
    compressed = reader.compress(context)
    assert compressed.notes == (
        "the context has 4 tokens, fewer than a window of 16, so nothing of it was compressed",
    )
    filled = reader.prefill([compressed.content], [4], [prompt])
    plain = reader.backbone.model(torch.tensor([[0, *context, *prompt[1:]]])).logits[0, -1]
    torch.testing.assert_close(filled.logits[0], plain, rtol=5e-2, atol=5e-2)
    answer = reader.answer(reader.read([Document("a", "Rent: 900")]), "Rent?")
    assert "so nothing of it was compressed" in answer.cut[0]


@torch.no_grad()
def test_untrained_beacons_act_as_ordinary_tokens(
    tiny_folder: Callable[..., str], backbone: Backbone
) -> None:
    """Before training, a beacon is the end token read by the frozen weights."""
    config = BeaconConfig(backbone="none", **SMALL["beacon"])
    reader = ActivationBeacon(config, backbone).eval()
    ids = torch.randint(2, 250, (1, 16))
    states, cached = reader._compress_window(ids, torch.tensor([True]), reader._empty_cache(1), 4)
    mixed = torch.cat([ids.view(1, 4, 4), torch.full((1, 4, 1), backbone.eos_token_id)], 2).view(
        1, 20
    )
    output = backbone.model(mixed, output_hidden_states=True)
    logits = backbone.logits(states)
    plain = output.logits.view(1, 4, 5, -1)[:, :, :4].flatten(1, 2)
    torch.testing.assert_close(logits, plain, rtol=1e-4, atol=1e-4)
    assert [keys.shape[2] for keys, _ in cached.layers] == [5] * backbone.depth
    # The hooks have been removed.
    assert torch.equal(backbone.model(mixed).logits, output.logits)


def test_ratios_are_drawn_only_in_training_and_seeded_by_the_text(reader: ActivationBeacon) -> None:
    one, two = torch.arange(5, 20), torch.arange(6, 21)
    assert reader.eval()._draw_ratios(one, 3) == [4, 4, 4]
    reader.train()
    drawn = reader._draw_ratios(one, 12)
    assert drawn == reader._draw_ratios(one, 12) and set(drawn) == {2, 4, 8}
    assert drawn != reader._draw_ratios(two, 12)
    # 512 positions hold 61 windows at two tokens a beacon, not 100.
    assert set(reader._draw_ratios(one, 100)) == {4, 8}


def test_a_context_shorter_than_a_window_trains_nothing(reader: ActivationBeacon) -> None:
    stage = TextTraining(reader).train()
    batch = targets([([0, 5, 6], [8, 9, 1])])
    loss = reader.question_loss([torch.arange(2, 12)], **batch)["loss"]
    loss.backward()
    assert loss > 0
    assert not any(p.grad is not None and p.grad.any() for p in stage.parameters())
