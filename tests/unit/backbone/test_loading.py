"""A backbone is opened whole, light for fused engines, or with experts as the hub has them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save_tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from sedem import Document, SeDeM, SedemConfig
from sedem.backbone.loading import (
    LightBackbone,
    LightConfig,
    open_backbone,
    open_light,
)
from sedem.backbone.tokenizer import LightTokenizer
from sedem.engine.static import open_engine
from sedem.errors import CheckpointError, ConfigError
from sedem.tensors import INT8_FILE, quantize_int8

CHECKPOINTS = Path(__file__).parents[3] / "checkpoints"
ASK = """
import sys
from sedem.cli.main import app
try:
    app(["ask", sys.argv[1], "What is the rent?", "-m", sys.argv[2]])
except SystemExit as end:
    assert not end.code
print(*sys.modules)
"""
HEAVY = {
    "accelerate", "datasets", "httpx", "huggingface_hub", "jinja2", "matplotlib", "pandas", "peft",
    "scipy", "sklearn", "sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor",
    "transformers",
}  # fmt: skip


@pytest.fixture(params=["int8", "plain"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path, config: SedemConfig) -> Path:
    """A checkpoint with adapters and a backbone of int8 rows, or of plain weights, inside."""
    backbone = tmp_path / "backbone"
    save_tiny(backbone, head_dim=8)
    if request.param == "int8":
        weights = load_file(backbone / "model.safetensors")
        (backbone / "model.safetensors").unlink()
        save_file(quantize_int8(weights), backbone / INT8_FILE)
    opened = open_backbone(str(backbone))
    torch.manual_seed(1)
    model = SeDeM(config, opened, opened).eval()
    opened.add_lora(config.lora_rank, config.lora_alpha)
    for factor in opened.lora_parameters():
        torch.nn.init.normal_(factor, std=0.05)
    model.save_pretrained(tmp_path / "model", with_backbone=True)
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_answers_with_the_same_bits(
    checkpoint: Path, documents: list[Document], dtype: torch.dtype
) -> None:
    full = SeDeM.from_pretrained(checkpoint, dtype=dtype, device="cpu", engine="eager")
    full.engine = open_engine("static", full)
    light = SeDeM.from_pretrained(checkpoint, dtype=dtype, device="cpu")
    assert type(light.decoder) is LightBackbone and type(full.decoder) is not LightBackbone
    assert type(light.decoder.tokenizer) is LightTokenizer
    assert light.fingerprint() == full.fingerprint()
    for mine, theirs in zip(light.engine.decoder.layers, full.engine.decoder.layers, strict=True):
        for matrix in ("qkv", "out", "gate_up", "down"):
            assert torch.equal(getattr(mine, matrix), getattr(theirs, matrix))
    banks = [model.read(documents) for model in (light, full)]
    assert torch.equal(*(bank.memory(range(len(bank))) for bank in banks))
    mine, theirs = (
        m.answer(b, "What is the rent?") for m, b in zip((light, full), banks, strict=True)
    )
    assert (mine.text, mine.citations) == (theirs.text, theirs.citations)


def imported(script: str, *arguments: Path) -> set[str]:
    """What a script has imported, by the last line that it prints."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_asking_imports_neither_transformers_nor_a_client_of_the_hub(
    checkpoint: Path, tmp_path: Path, documents: list[Document]
) -> None:
    SeDeM.from_pretrained(checkpoint).read(documents).save(tmp_path / "bank")
    loaded = imported(ASK, tmp_path / "bank", checkpoint)
    assert {"torch", "sedem.model"} <= loaded
    assert not loaded & HEAVY


def test_it_chats_as_transformers_would(chat_folder: str) -> None:
    light, full = (open_backbone(chat_folder, light=light) for light in (True, False))
    assert type(light) is LightBackbone
    assert light.tokenizer.chat_template == full.tokenizer.chat_template
    assert light.chat == full.chat


SCHEDULE = """
import sys
from sedem import MemoryBank, SeDeM
from sedem.selecting.plan import Request
model = SeDeM.from_pretrained(sys.argv[2])
bank = MemoryBank.open(sys.argv[1])
with model.scheduler() as scheduler:
    scheduler.submit(Request(bank, "What is the rent?")).result()
    print(*sys.modules)
"""


def test_a_scheduler_imports_what_sampling_needs_before_its_first_answer(
    checkpoint: Path, tmp_path: Path, documents: list[Document]
) -> None:
    SeDeM.from_pretrained(checkpoint).read(documents).save(tmp_path / "bank")
    loaded = imported(SCHEDULE, tmp_path / "bank", checkpoint)
    assert "transformers.generation.logits_process" in loaded


def test_what_needs_the_layers_one_by_one_is_refused(checkpoint: Path) -> None:
    backbone = SeDeM.from_pretrained(checkpoint).decoder
    for call in (backbone.run, backbone.without_lora, backbone.compile_layers):
        with pytest.raises(ConfigError, match="opened without transformers' layers"):
            call()
    for options in ({"engine": "eager"}, {"attention": "eager"}):
        assert type(SeDeM.from_pretrained(checkpoint, **options).decoder) is not LightBackbone


def test_it_is_saved_as_transformers_would(checkpoint: Path, tmp_path: Path) -> None:
    for engine in ("eager", "static"):
        SeDeM.from_pretrained(checkpoint, engine=engine).save_pretrained(tmp_path / engine)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        mine, theirs = (tmp_path / engine / "adapter" / file for engine in ("static", "eager"))
        assert mine.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("model_type", "qwen3"),
        ("rope_parameters", {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}),
        ("auto_map", {"AutoConfig": "code.Config"}),
        ("num_hidden_layers", 10**6),
        ("logits_scaling", 2.0),
        ("hidden_act", "gelu"),
    ],
)
def test_another_layout_is_left_to_transformers(
    checkpoint: Path, entry: str, value: object
) -> None:
    file = checkpoint / "backbone" / "config.json"
    assert open_light(file.parent, torch.float32, "sdpa") is not None
    file.write_text(json.dumps({**json.loads(file.read_text()), entry: value}))
    assert open_light(file.parent, torch.float32, "sdpa") is None


def test_the_shipped_backbone_can_be_opened_light() -> None:
    folder = CHECKPOINTS / "sedem-nano" / "backbone"
    LightConfig.model_validate(json.loads((folder / "config.json").read_text()))


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
