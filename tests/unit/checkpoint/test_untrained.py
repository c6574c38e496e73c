from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import DEPTH, LEASE
from torch import Tensor
from transformers import DynamicCache

from sedem import Decoding, Document, SeDeM
from sedem.backbone.loading import open_backbone
from sedem.backbone.prompts import question_ids
from sedem.checkpoint.folder import write
from sedem.checkpoint.untrained import untrained
from sedem.errors import ConfigError
from sedem.method.compressor import encode
from sedem.method.injection import keys_values
from sedem.modules import SedemModules
from sedem_lab.training.stage1 import Stage1, Stage1Losses

T = 16


def made(name: str, **settings: Any) -> SedemModules:
    return untrained(SedemModules, open_backbone(name), **settings)


@pytest.fixture
def model(tiny_folder: Callable[..., str], tmp_path: Path) -> SeDeM:
    """Written and opened again, in float32, where equal means equal."""
    parts = made(tiny_folder(), segment_length=T)
    write(tmp_path / "untrained", parts.config, parts.parts(), parts.decoder)
    return SeDeM.from_pretrained(tmp_path / "untrained", engine="eager")


def tokens(rows: int) -> Tensor:
    return torch.randint(2, 258, (rows, T), generator=torch.Generator().manual_seed(0))


def states(model: SeDeM, ids_ST: Tensor) -> Tensor:
    return encode(model.encoder, ids_ST, [DEPTH // 2])[0]


def restored(model: SeDeM, states_STE: Tensor, mask_ST: Tensor) -> Tensor:
    return model.decompressor(model.compressor(model.mixture(states_STE[None]), mask_ST))


@torch.no_grad()
def test_restored_states_are_the_states_that_were_read(model: SeDeM) -> None:
    states_STE = states(model, tokens(3))
    mask_ST = torch.arange(T) < torch.tensor([[T], [T - 5], [1]])
    restored_STD = restored(model, states_STE, mask_ST)
    assert torch.equal(restored_STD[mask_ST], states_STE[mask_ST])


@torch.no_grad()
def test_a_bank_holds_the_states_rounded_to_its_type(model: SeDeM) -> None:
    bank = model.read([Document("lease.txt", LEASE)])
    ids_1T = torch.tensor([model.encoder.token_ids(LEASE)[:T]])
    (slots_TD,) = bank.memory([0])
    assert slots_TD.dtype == torch.bfloat16
    assert torch.equal(model.decompressor(slots_TD), states(model, ids_1T)[0].bfloat16())


@torch.no_grad()
def test_layers_above_compute_for_a_block_what_they_compute_for_its_text(model: SeDeM) -> None:
    backbone, layer, ids_ST = model.decoder, model.config.inject_layer, tokens(2)
    mask_ST = torch.ones_like(ids_ST, dtype=torch.bool)
    found = keys_values(backbone, layer, restored(model, states(model, ids_ST), mask_ST))
    start_S1 = torch.full((2, 1), backbone.bos_token_id)
    cache = DynamicCache()
    backbone.model(torch.cat([start_S1, ids_ST], dim=1), past_key_values=cache)
    assert len(found) == DEPTH - layer
    for (key, value), expected in zip(found, cache.layers[layer:], strict=True):
        torch.testing.assert_close(key, expected.keys[:, :, 1:], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(value, expected.values[:, :, 1:], rtol=1e-5, atol=1e-5)


def test_the_selector_is_tied_and_a_backbone_has_one_untrained_model(model: SeDeM) -> None:
    selector = model.selector
    assert torch.equal(selector.w_query.weight, selector.w_key.weight)
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    again = made(model.encoder.name, segment_length=T)
    assert torch.equal(torch.rand(1), expected), "the caller's random numbers do not change"
    assert again.selector.digest() == selector.digest()
    assert again.fingerprint() == model.fingerprint()
    assert not model.decoder.has_lora and not list(model.decompressor.parameters())
    assert model.guidance is not None and float(model.guidance.tau) == 1.0


@torch.no_grad()
def test_training_can_start_from_it_and_finds_no_error_of_restored_states(model: SeDeM) -> None:
    stage = Stage1(model, Stage1Losses(regress=1.0))
    text = {"context": tokens(2), "continuation": tokens(2)}
    stage.calibrate(text)
    parts = stage(**text)
    assert float(parts["regress"]) == 0.0
    assert bool(torch.isfinite(parts["loss"]))


def test_a_layer_with_layers_before_and_after_it_can_be_chosen(
    tiny_folder: Callable[..., str],
) -> None:
    config = made(tiny_folder(), layer=1, segment_length=T, k="auto").config
    assert (config.extract_layers, config.inject_layer, config.k) == ((1,), 1, "auto")
    for layer in (0, DEPTH, -1):
        words = rf"layer is {layer}, but .* has {DEPTH} layers; give a layer from 1 to {DEPTH - 1}"
        with pytest.raises(ConfigError, match=words):
            made(tiny_folder(), layer=layer)


def test_answers_in_a_chat_end_with_a_turn(
    chat_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = made(chat_folder, segment_length=T)
    write(tmp_path / "chat", parts.config, parts.parts(), parts.decoder)
    model = SeDeM.from_pretrained(tmp_path / "chat", engine="eager")
    bank = model.read([Document("lease.txt", LEASE)])
    # The decoder writes the end of a turn and nothing else.
    monkeypatch.setattr(model.decoder, "logits", lambda hidden: torch.eye(260)[[259]])
    question = "What is the rent?"
    in_chat = model.answer(bank, question, decoding=Decoding(4))
    assert (in_chat.text, in_chat.finish_reason) == ("", "end")
    model.config = model.config.with_changes(chat_template=False)
    plain = model.answer(bank, question, decoding=Decoding(4))
    assert plain.finish_reason == "length"
    assert in_chat.conditioning is not None and plain.conditioning is not None
    lengths = [len(question_ids(model.decoder, question, chat=chat)) for chat in (True, False)]
    assert in_chat.conditioning - plain.conditioning == lengths[0] - lengths[1]
