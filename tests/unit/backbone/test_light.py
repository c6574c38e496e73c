"""A backbone that is opened light is the same one, with less imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import save_tiny
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from sedem import Document, SeDeM, SedemConfig
from sedem.backbone.light import (
    LightBackbone,
    LightConfig,
    LightTokenizer,
    open_light,
    open_light_tokenizer,
)
from sedem.backbone.loading import open_backbone
from sedem.backbone.safetensors import INT8_FILE, quantize_int8
from sedem.engine.static import open_engine
from sedem.errors import CheckpointError, ConfigError

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


def test_asking_imports_neither_transformers_nor_a_client_of_the_hub(
    checkpoint: Path, tmp_path: Path, documents: list[Document]
) -> None:
    SeDeM.from_pretrained(checkpoint).read(documents).save(tmp_path / "bank")
    command = [sys.executable, "-c", ASK, str(tmp_path / "bank"), str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.splitlines()[-1].split())
    assert {"torch", "sedem.model"} <= loaded
    assert not loaded & HEAVY


TEXTS = [
    "The rent is 900 euros.\n\n\tIt is due on day 1.",
    "<|begin_of_text|> in a text is text, <|end_of_text|>too",
    "na\u00efve \u4f60\u597d \U0001f600\u200d\U0001f525 e\u0301 \x00 \u202e",
    "",
    "  ",
]


def test_its_tokenizer_cuts_and_decodes_as_that_of_transformers() -> None:
    folder = CHECKPOINTS / "sedem-nano" / "backbone"
    light, full = open_light_tokenizer(folder), AutoTokenizer.from_pretrained(str(folder))
    assert light is not None
    options = {
        "add_special_tokens": False,
        "return_attention_mask": False,
        "split_special_tokens": True,
        "verbose": False,
    }
    mine = light(TEXTS, return_offsets_mapping=True, **options)
    theirs = full(TEXTS, return_offsets_mapping=True, **options)
    assert mine == dict(theirs)
    assert [e.ids for e in mine.encodings] == [e.ids for e in theirs.encodings]
    ends = [light.bos_token_id, light.eos_token_id]
    assert ends == [full.bos_token_id, full.eos_token_id]
    for ids in mine["input_ids"]:
        for skip in (False, True):
            framed = [ends[0], *ids, ends[1]]
            assert light.decode(framed, skip_special_tokens=skip) == full.decode(
                framed, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("added_tokens.json", "{}"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", '{"tokenizer_class": "LlamaTokenizer"}'),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "TokenizersBackend", "bos_token": "<new>", "eos_token": "<new>"}',
        ),
    ],
)
def test_another_tokenizer_is_left_to_transformers(checkpoint: Path, name: str, text: str) -> None:
    folder = checkpoint / "backbone"
    assert open_light_tokenizer(folder) is not None
    (folder / name).write_text(text)
    assert open_light_tokenizer(folder) is None


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
    command = [sys.executable, "-c", SCHEDULE, str(tmp_path / "bank"), str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "transformers.generation.logits_process" in done.stdout.split()


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


def test_damaged_weights_are_named(checkpoint: Path) -> None:
    folder = checkpoint / "backbone"
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    del weights[name]
    weights.pop(f"{name}.scale", None)
    save_file(weights, file)
    with pytest.raises(CheckpointError, match="1 weights are missing"):
        open_light(folder, torch.float32, "sdpa")


def test_the_shipped_backbone_can_be_opened_light() -> None:
    folder = CHECKPOINTS / "sedem-nano" / "backbone"
    LightConfig.model_validate(json.loads((folder / "config.json").read_text()))
