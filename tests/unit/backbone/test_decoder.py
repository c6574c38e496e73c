from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sedem.backbone.decoder import Backbone, KeyAxis, check_compiler
from sedem.backbone.loading import INT8_FILE, open_backbone
from sedem.errors import CheckpointError, ConfigError
from sedem.method.injection import GrowingColumns
from sedem.tensors import dequantize_int8, quantize_int8

IDS = torch.tensor([[0, 50, 60, 70, 80]])
POSITIONS = torch.arange(5)[None]


@pytest.fixture
def folder(tiny_folder: Callable[..., str], tmp_path: Path) -> Path:
    """A copy of the tiny Llama, for tests that damage it."""
    return Path(shutil.copytree(tiny_folder(), tmp_path / "backbone"))


def change_config(folder: Path, file: str = "config.json", **changes: object) -> None:
    entries = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**entries, **changes}))


def change_tokenizer(folder: Path, **changes: object) -> None:
    change_config(folder, "tokenizer_config.json", **changes)


def whole_run(backbone: Backbone) -> torch.Tensor:
    with torch.no_grad():
        return backbone.run(backbone.embed(IDS), 0, backbone.depth, POSITIONS)


def test_a_backbone_knows_its_shape_and_is_frozen(any_backbone: Backbone) -> None:
    assert (any_backbone.width, any_backbone.depth, any_backbone.max_positions) == (32, 4, 512)
    assert (any_backbone.bos_token_id, any_backbone.eos_token_id) == (0, 1)
    assert any_backbone.device.type == "cpu"
    assert any_backbone.dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in any_backbone.parameters())
    assert not any_backbone.model.training


@pytest.mark.parametrize("window", [None, 1, 3])
def test_positions_alone_decide_who_sees_whom(window: int | None) -> None:
    key_positions = torch.tensor([[3, 0, 1, 2, 9], [0, 0, 1, 2, 3]])
    key_valid = torch.tensor([[True] * 5, [False, True, True, True, True]])
    positions = torch.tensor([[2, 9], [0, 3]])
    valid = torch.tensor([[True, True], [False, True]])
    back = positions[:, :, None] - key_positions[:, None]
    near = (back >= 0) & (back < (window or 99))
    # A place of padding sees every key, so that its row is not empty.
    expected = key_valid[:, None] & (near | ~valid[:, :, None])
    axis = KeyAxis(key_positions, key_valid, padded=True, span=5)
    assert torch.equal(axis.visible_to(positions, valid, window), expected)


# Tokens


def test_tokens_are_those_of_plain_text_with_offsets_in_characters(any_backbone: Backbone) -> None:
    """No start token is added, and special tokens written in a text are text."""
    for text in ("<start>", "a <end> b", "<start><end>", "word", ""):
        ids = any_backbone.token_ids(text)
        assert len(ids) == len(text) and min(ids, default=2) >= 2
        assert any_backbone.tokenizer.decode(ids) == text
    encoded = any_backbone.tokenize(["aé", "b"], offsets=True)
    assert encoded["offset_mapping"] == [[(0, 1), (1, 2), (1, 2)], [(0, 1)]]


@pytest.mark.parametrize(
    ("tokenizer_bos", "config_bos", "expected"), [("<start>", 7, 0), (None, 7, 7), (None, None, 1)]
)
def test_the_start_token_is_that_of_the_tokenizer_or_the_config_or_the_end_token(
    folder: Path, tokenizer_bos: str | None, config_bos: int | None, expected: int
) -> None:
    change_tokenizer(folder, bos_token=tokenizer_bos)
    change_config(folder, bos_token_id=config_bos)
    assert open_backbone(str(folder)).bos_token_id == expected


# Opening


def no_end_token(folder: Path) -> None:
    change_tokenizer(folder, eos_token=None)
    change_config(folder, eos_token_id=None)


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (no_end_token, ConfigError, "has no end token, so no answer would end"),
        (
            lambda folder: change_config(folder, model_type="llama9"),
            ConfigError,
            r"'{folder}' cannot be opened: .*`llama9`",
        ),
        (lambda folder: (folder / "config.json").unlink(), ConfigError, "'{folder}' cannot be op"),
        (shutil.rmtree, ConfigError, "neither a local folder nor available from the hub"),
        (
            lambda folder: change_config(folder, num_hidden_layers=5),
            CheckpointError,
            r"lacks 9 weights, such as 'model\.layers\.4\.",
        ),
        (
            lambda folder: change_config(folder, intermediate_size=96),
            CheckpointError,
            r"mlp\..*shape \[.*64.*\], \[.*96.*\] is needed",
        ),
    ],
)
def test_a_folder_that_cannot_be_opened_is_refused(
    damage: Callable[[Path], object], error: type[Exception], words: str, folder: Path
) -> None:
    damage(folder)
    with pytest.raises(error, match=words.replace("{folder}", str(folder))):
        open_backbone(str(folder))


def test_an_attention_that_is_unknown_or_not_proven_is_refused(
    folder: Path, backbone: Backbone
) -> None:
    with pytest.raises(ConfigError, match="attention is 'flash'; it can be sdpa or eager"):
        open_backbone(str(folder), attention="flash")
    backbone.model.config._attn_implementation = "flex_attention"
    with pytest.raises(ConfigError, match="attention 'flex_attention'; sedem needs sdpa or eager"):
        Backbone(backbone.model, backbone.tokenizer, "other")


def test_a_tokenizer_without_offsets_is_refused(backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match="'slow' has no fast tokenizer; citations need"):
        Backbone(backbone.model, SimpleNamespace(is_fast=False), "slow")  # type: ignore[arg-type]


# The int8 form


@pytest.fixture
def int8_folder(folder: Path) -> Path:
    weights = load_file(folder / "model.safetensors")
    save_file(quantize_int8(weights), folder / INT8_FILE)
    return folder


def test_an_int8_folder_opens_as_its_rounded_weights(int8_folder: Path) -> None:
    backbone = open_backbone(str(int8_folder))
    rounded = dequantize_int8(load_file(int8_folder / INT8_FILE), torch.float32)
    (int8_folder / INT8_FILE).unlink()
    save_file(rounded, int8_folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(whole_run(backbone), whole_run(open_backbone(str(int8_folder))))


# Digests


def test_the_digest_follows_weights_and_tokenizer_but_no_type_and_no_adapter(
    tiny_folder: Callable[..., str], int8_folder: Path, backbone: Backbone
) -> None:
    first = backbone.digest
    assert open_backbone(tiny_folder(), dtype=torch.bfloat16).digest == first
    assert open_backbone(tiny_folder(), attention="eager").digest == first
    assert open_backbone(tiny_folder(seed=1)).digest != first
    rounded = open_backbone(str(int8_folder)).digest
    assert rounded != first
    assert open_backbone(str(int8_folder), dtype=torch.bfloat16).digest == rounded
    tokenizer = json.loads((int8_folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (int8_folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert open_backbone(str(int8_folder)).digest != rounded
    backbone.add_lora(2, 4)
    again = Backbone(backbone.model, backbone.tokenizer, "again")
    assert backbone.digest == first != again.digest


# Adapters


def with_random_adapters(backbone: Backbone, rank: int = 4, alpha: int = 8) -> Backbone:
    backbone.add_lora(rank, alpha)
    torch.manual_seed(0)
    for parameter in backbone.lora_parameters():
        parameter.data.normal_(std=0.2)
    return backbone


def test_only_adapters_of_q_k_v_and_o_of_every_layer_are_trained(backbone: Backbone) -> None:
    assert not backbone.has_lora
    assert backbone.lora_parameters() == []
    backbone.add_lora(4, 8)
    assert backbone.has_lora
    trained = [name for name, p in backbone.model.named_parameters() if p.requires_grad]
    assert len(trained) == len(backbone.lora_parameters()) == 4 * backbone.depth * 2
    for kind in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert sum(f".{kind}.lora_" in name for name in trained) == 2 * backbone.depth


def test_an_adapted_projection_is_w_plus_alpha_over_r_times_a_b(backbone: Backbone) -> None:
    plain = backbone.model.get_decoder().layers[1].self_attn.k_proj.weight.clone()
    with_random_adapters(backbone)
    module = backbone.model.get_decoder().layers[1].self_attn.k_proj
    lora_a, lora_b = module.lora_A["default"].weight, module.lora_B["default"].weight
    state = torch.randn(3, backbone.width)
    expected = state @ plain.T + 8 / 4 * (state @ lora_a.T @ lora_b.T)
    torch.testing.assert_close(module(state), expected)


def test_adapters_stay_float32_on_a_bfloat16_backbone(folder: Path) -> None:
    backbone = open_backbone(str(folder), dtype=torch.bfloat16)
    backbone.add_lora(4, 8)
    assert {parameter.dtype for parameter in backbone.lora_parameters()} == {torch.float32}
    assert whole_run(backbone).dtype == torch.bfloat16


def test_without_lora_may_be_nested_and_ends_with_an_error(backbone: Backbone) -> None:
    plain = whole_run(backbone)
    with_random_adapters(backbone)
    adapted = whole_run(backbone)
    with pytest.raises(RuntimeError, match="on purpose"), backbone.without_lora():
        with backbone.without_lora():
            assert torch.equal(whole_run(backbone), plain)
        assert torch.equal(whole_run(backbone), plain)
        raise RuntimeError("on purpose")
    assert torch.equal(whole_run(backbone), adapted) and not torch.equal(adapted, plain)


def test_a_machine_without_a_compiler_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(function: Any) -> Any:
        def call(*_: Any) -> None:
            raise RuntimeError("No working C++ compiler found\nTraceback: ...")

        return call

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(ConfigError) as raised:
        check_compiler("cpu", "optimization.compile")
    assert str(raised.value) == (
        "optimization.compile needs torch.compile, but nothing can be compiled on this machine "
        "(No working C++ compiler found); install a C++ compiler, or leave optimization.compile out"
    )


def test_keys_that_a_checkpointed_window_drops_are_not_kept_for_the_backward_pass(
    backbone: Backbone,
) -> None:
    backbone.add_lora(2, 4)
    backbone.checkpointing = True
    cache, dropped = GrowingColumns(), list[weakref.ref[torch.Tensor]]()
    valid = torch.ones_like(POSITIONS, dtype=torch.bool)
    axis = KeyAxis(POSITIONS, valid, padded=False, span=5)
    for positions in (POSITIONS, POSITIONS + 5):
        states = backbone.embed(IDS).requires_grad_()
        states = backbone.run(states, 0, backbone.depth, positions, valid, axis, cache)
        dropped += [weakref.ref(part) for pair in cache.stored.values() for part in pair]
        # A method that keeps a part of each window: here its last position.
        for layer, (keys, values) in cache.stored.items():
            cache.stored[layer] = keys[:, :, -1:].clone(), values[:, :, -1:].clone()
        axis = KeyAxis(POSITIONS[:, -1:], valid[:, :1], padded=False, span=1)
        axis = axis.extended(POSITIONS + 5, valid)
    del keys, values
    gc.collect()
    assert [reference() for reference in dropped] == [None] * 16
    states.sum().backward()
