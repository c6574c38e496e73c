"""Backbones with experts, as the hub has them: one matrix an expert, or four bits a value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sedem.backbone.loading import open_backbone
from sedem.errors import CheckpointError

UP = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize("damage", ["no matrix", "no expert", "another shape"])
def test_an_incomplete_expert_is_refused(tmp_path: Path, damage: str) -> None:
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    save_tiny(tmp_path, "qwen3_moe", depth=2, **shape)
    weights = load_file(tmp_path / "model.safetensors")
    lost = {"no matrix": UP, "no expert": UP.removesuffix("up_proj.weight")}.get(damage, "nothing")
    kept = {name: weight for name, weight in weights.items() if not name.startswith(lost)}
    if damage == "another shape":
        kept[UP] = weights[UP][:8].clone()
    save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="fit"):
        open_backbone(str(tmp_path))


def test_experts_in_mxfp4_are_turned_into_plain_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path, "gpt_oss", depth=2, num_local_experts=4, num_experts_per_tok=2)
    packed, expected = {}, {}
    for name, weight in load_file(tmp_path / "model.safetensors").items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            packed[name] = weight
            continue
        count, wide, high = weight.shape
        blocks = torch.randint(0, 256, (count, high, wide // 32, 16), dtype=torch.uint8)
        scales = torch.full(blocks.shape[:3], 124, dtype=torch.uint8)
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
        expected[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(packed, tmp_path / "model.safetensors", {"format": "pt"})
    entries = json.loads((tmp_path / "config.json").read_text())
    entries["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    given: dict[str, Any] = {}
    read = AutoModelForCausalLM.from_pretrained

    def noting(name: str, **options: Any) -> Any:
        given.update(options)
        return read(name, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noting)
    opened = open_backbone(str(tmp_path)).model.state_dict()
    # Without it, a GPU would keep them packed.
    asked = given["quantization_config"]
    assert isinstance(asked, Mxfp4Config) and asked.dequantize
    assert len(expected) == 4
    for name, weight in expected.items():
        assert opened[name].dtype == torch.float32
        assert torch.equal(opened[name], weight), name


def test_attention_with_sinks_is_opened_as_eager(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt_oss", depth=2, num_local_experts=4, num_experts_per_tok=2)
    opened = open_backbone(str(tmp_path), attention="sdpa")
    assert opened.model.config._attn_implementation == "eager"
