from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizer

from sedem.backbone.decoder import FAMILIES, Backbone, check_compiler
from sedem.backbone.loading import INT8_FILE, open_backbone
from sedem.backbone.masks import KeyAxis
from sedem.backbone.safetensors import dequantize_int8, quantize_int8
from sedem.errors import CheckpointError, ConfigError

IDS = torch.tensor([[0, 50, 60, 70, 80]])
POSITIONS = torch.arange(5)[None]


@pytest.fixture
def folder(tiny_folder: Callable[..., str], tmp_path: Path) -> Path:
    """A copy of the tiny Llama, for tests that damage it."""
    return Path(shutil.copytree(tiny_folder(), tmp_path / "backbone"))


def change_config(folder: Path, **changes: object) -> None:
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**entries, **changes}))


def whole_run(backbone: Backbone) -> torch.Tensor:
    with torch.no_grad():
        return backbone.run(backbone.embed(IDS), 0, backbone.depth, POSITIONS)


def test_a_backbone_knows_its_shape(any_backbone: Backbone) -> None:
    assert (any_backbone.width, any_backbone.depth, any_backbone.max_positions) == (32, 4, 512)
    assert (any_backbone.bos_token_id, any_backbone.eos_token_id) == (0, 1)
    assert any_backbone.device.type == "cpu"
    assert any_backbone.dtype == torch.float32


def test_a_backbone_is_frozen_and_in_evaluation(any_backbone: Backbone) -> None:
    assert not any(parameter.requires_grad for parameter in any_backbone.parameters())
    assert not any_backbone.model.training


@pytest.mark.parametrize("window", [None, 1, 3])
def test_positions_alone_decide_who_sees_whom(window: int | None) -> None:
    key_positions = torch.tensor([[3, 0, 1, 2, 9], [0, 0, 1, 2, 3]])
    key_valid = torch.tensor([[True] * 5, [False, True, True, True, True]])
    positions = torch.tensor([[2, 9], [0, 3]])
    valid = torch.tensor([[True, True], [False, True]])
    expected = []
    for b in range(2):
        rows = []
        for p in range(2):
            row = []
            for k in range(5):
                back = int(positions[b, p]) - int(key_positions[b, k])
                near = back >= 0 and (window is None or back < window)
                row.append(bool(key_valid[b, k]) and (near or not bool(valid[b, p])))
            rows.append(row)
        expected.append(rows)
    axis = KeyAxis(key_positions, key_valid, padded=True, span=5)
    assert axis.visible_to(positions, valid, window).tolist() == expected


# Tokens


@pytest.mark.parametrize("text", ["<start>", "a <end> b", "<start><end>"])
def test_special_tokens_written_in_a_text_stay_plain_text(
    any_backbone: Backbone, text: str
) -> None:
    ids = any_backbone.token_ids(text)
    assert len(ids) == len(text)
    assert min(ids) >= 2
    assert any_backbone.tokenizer.decode(ids) == text


def test_no_start_token_is_added(any_backbone: Backbone) -> None:
    assert any_backbone.token_ids("") == []
    assert len(any_backbone.token_ids("word")) == 4


def test_offsets_are_characters(backbone: Backbone) -> None:
    encoded = backbone.tokenize(["aé", "b"], offsets=True)
    assert encoded["offset_mapping"] == [[(0, 1), (1, 2), (1, 2)], [(0, 1)]]


@pytest.mark.parametrize(
    ("tokenizer_bos", "config_bos", "expected"), [("<start>", 7, 0), (None, 7, 7), (None, None, 1)]
)
def test_the_start_token_is_that_of_the_tokenizer_or_the_config_or_the_end_token(
    folder: Path, tokenizer_bos: str | None, config_bos: int | None, expected: int
) -> None:
    entries = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**entries, "bos_token": tokenizer_bos})
    )
    change_config(folder, bos_token_id=config_bos)
    assert open_backbone(str(folder)).bos_token_id == expected


def test_a_backbone_without_an_end_token_is_refused(folder: Path) -> None:
    entries = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**entries, "eos_token": None}))
    change_config(folder, eos_token_id=None)
    with pytest.raises(ConfigError, match="has no end token, so no answer would end"):
        open_backbone(str(folder))


# Opening


def test_an_unsupported_layout_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=rf"layout 'gpt2'; .*{', '.join(FAMILIES)}"):
        open_backbone(str(tmp_path))


def test_a_layout_unknown_to_transformers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama9"}')
    with pytest.raises(ConfigError, match=r"cannot be opened: .*`llama9`") as caught:
        open_backbone(str(tmp_path))
    assert "neither a local folder" not in str(caught.value)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"'{tmp_path}' cannot be opened"):
        open_backbone(str(tmp_path))


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a local folder nor available from the hub"):
        open_backbone(str(tmp_path / "nothing"))


def test_an_unknown_attention_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="attention is 'flash'; it can be sdpa or eager"):
        open_backbone(str(folder), attention="flash")


def test_a_model_opened_with_another_attention_is_refused(backbone: Backbone) -> None:
    backbone.model.config._attn_implementation = "flex_attention"
    with pytest.raises(ConfigError, match="attention 'flex_attention'; sedem needs sdpa or eager"):
        Backbone(backbone.model, backbone.tokenizer, "other")


class SlowTokenizer(PreTrainedTokenizer):
    """A slow tokenizer, which has no character offsets."""

    vocab_size = 2

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "b": 1}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return self.get_vocab().get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return "ab"[index]


def test_a_tokenizer_without_offsets_is_refused(backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match="'slow' has no fast tokenizer; citations need"):
        Backbone(backbone.model, SlowTokenizer(), "slow")


def test_a_folder_without_a_tokenizer_is_refused(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=rf"tokenizer of backbone '{folder}' cannot be read"):
        open_backbone(str(folder))


def test_missing_weights_are_counted_and_named(folder: Path) -> None:
    change_config(folder, num_hidden_layers=5)
    with pytest.raises(CheckpointError, match=r"lacks 9 weights, such as 'model\.layers\.4\."):
        open_backbone(str(folder))


def test_weights_of_another_shape_are_refused_with_both_shapes(folder: Path) -> None:
    change_config(folder, intermediate_size=96)
    with pytest.raises(CheckpointError, match=r"mlp\..*shape \[.*64.*\], \[.*96.*\] is needed"):
        open_backbone(str(folder))


@pytest.mark.parametrize("kept", [0, 5, 1000, -10])
def test_truncated_weights_are_refused(folder: Path, kept: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=rf"weights of backbone '{folder}' cannot be read"):
        open_backbone(str(folder))


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"weights of backbone '{folder}' cannot be read"):
        open_backbone(str(folder))


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


@pytest.mark.parametrize("lost", ["model.embed_tokens.weight", "model.norm.weight"])
def test_an_int8_folder_that_lacks_a_weight_is_refused(int8_folder: Path, lost: str) -> None:
    weights = load_file(int8_folder / INT8_FILE)
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(lost)}
    save_file(kept, int8_folder / INT8_FILE)
    with pytest.raises(CheckpointError, match=r"weights are missing \(such as"):
        open_backbone(str(int8_folder))


def test_a_truncated_int8_file_is_refused(int8_folder: Path) -> None:
    path = int8_folder / INT8_FILE
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(CheckpointError, match="truncated"):
        open_backbone(str(int8_folder))


# Digests


def test_the_digest_is_the_same_for_both_types_and_follows_the_weights(
    tiny_folder: Callable[..., str], int8_folder: Path
) -> None:
    first = open_backbone(tiny_folder()).digest
    assert open_backbone(tiny_folder(), dtype=torch.bfloat16).digest == first
    assert open_backbone(tiny_folder(), attention="eager").digest == first
    assert open_backbone(tiny_folder(seed=1)).digest != first
    rounded = open_backbone(str(int8_folder)).digest
    assert rounded != first
    assert open_backbone(str(int8_folder), dtype=torch.bfloat16).digest == rounded


def test_the_digest_follows_the_tokenizer(folder: Path) -> None:
    first = open_backbone(str(folder)).digest
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert open_backbone(str(folder)).digest != first


def test_the_digest_does_not_follow_the_adapters(backbone: Backbone) -> None:
    first = backbone.digest
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


def test_only_adapters_of_q_k_v_and_o_of_every_layer_are_trained(
    backbone: Backbone,
) -> None:
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


def test_without_lora_may_be_nested(backbone: Backbone) -> None:
    plain = whole_run(backbone)
    with_random_adapters(backbone)
    with backbone.without_lora():
        with backbone.without_lora():
            assert torch.equal(whole_run(backbone), plain)
        assert torch.equal(whole_run(backbone), plain)
    assert not torch.equal(whole_run(backbone), plain)


def test_adapters_are_on_again_after_an_error(backbone: Backbone) -> None:
    with_random_adapters(backbone)
    adapted = whole_run(backbone)
    with pytest.raises(RuntimeError, match="on purpose"), backbone.without_lora():
        raise RuntimeError("on purpose")
    assert torch.equal(whole_run(backbone), adapted)


def test_saved_adapters_can_be_loaded(folder: Path, tmp_path: Path) -> None:
    saved = with_random_adapters(open_backbone(str(folder)))
    saved.save_lora(tmp_path / "adapter", "base")
    opened = open_backbone(str(folder))
    opened.add_lora(4, 8)
    opened.load_lora(tmp_path / "adapter")
    assert torch.equal(whole_run(opened), whole_run(saved))
    assert {file.suffix for file in (tmp_path / "adapter").iterdir()} <= {".safetensors", ".json"}
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "base"


def test_adapters_of_another_rank_are_refused_with_both_shapes(
    folder: Path, tmp_path: Path
) -> None:
    with_random_adapters(open_backbone(str(folder)), rank=4).save_lora(tmp_path / "adapter", "base")
    opened = open_backbone(str(folder))
    opened.add_lora(2, 4)
    with pytest.raises(CheckpointError, match=r"has shape \[4, 32\], \[2, 32\] is needed"):
        opened.load_lora(tmp_path / "adapter")


def test_adapters_that_lack_a_factor_are_refused(folder: Path, tmp_path: Path) -> None:
    saved = with_random_adapters(open_backbone(str(folder)))
    saved.save_lora(tmp_path / "adapter", "base")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    weights = load_file(path)
    weights.popitem()
    save_file(weights, path)
    with pytest.raises(CheckpointError, match="1 weights are missing"):
        saved.load_lora(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors' is missing"):
        saved.load_lora(tmp_path / "nothing")


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
