"""A checkpoint opens as it was saved, or is refused in a sentence; no weight is left random."""

from __future__ import annotations

import builtins
import io
import itertools
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import LEASE, RECIPE, byte_tokenizer, save_tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from sedem import Decoding, Document, SeDeM, SedemConfig, tensors
from sedem.backbone.decoder import ADAPTER_WEIGHTS, Backbone
from sedem.backbone.loading import INT8_FILE, open_backbone
from sedem.checkpoint import folder as checkpoint
from sedem.checkpoint.folder import MANIFEST, locate, opening, seal, shipped_folders
from sedem.errors import CheckpointError, ConfigError
from sedem.guidance import Confidence
from sedem.tensors import quantize_int8

QUESTIONS = ("What is the rent?", "How long does the pie keep?")
DOCUMENTS = (Document("lease.txt", LEASE), Document("recipe.txt", RECIPE))
SHORT = Decoding(max_new_tokens=12)
WEIGHTS, ADAPTER = "sedem.safetensors", "adapter/adapter_model.safetensors"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As HF_HUB_OFFLINE=1 does, which the hub's client reads only when it is imported."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def replies(model: SeDeM) -> list[tuple[object, ...]]:
    """Answers without their times; they depend on reading, selection and decoding."""
    bank = model.read(DOCUMENTS)
    answers = model.answer(bank, QUESTIONS, decoding=SHORT)
    return [(a.text, a.citations, a.k, a.finish_reason) for a in answers]


def reopen(folder: Path, **options: Any) -> SeDeM:
    """Open a checkpoint with the eager engine, so that equal weights give equal answers."""
    return SeDeM.from_pretrained(folder, engine="eager", **options)


def make(config: SedemConfig, encoder: Backbone, decoder: Backbone, *, lora: bool = True) -> SeDeM:
    """A model whose weights all differ from their initial values."""
    torch.manual_seed(5)
    model = SeDeM(config, encoder, decoder)
    if lora:
        decoder.add_lora(config.lora_rank, config.lora_alpha)
    with torch.no_grad():
        for weight in (*model.parts().parameters(), *decoder.lora_parameters()):
            weight.add_(torch.randn_like(weight) * 0.1)
        model.decompressor.spread.add_(torch.rand_like(model.decompressor.spread))
    return model.requires_grad_(False).eval()


@pytest.fixture
def trained(config: SedemConfig, backbone: Backbone) -> SeDeM:
    """A model with adapters, as after training."""
    return make(config, backbone, backbone)


@pytest.fixture
def saved(trained: SeDeM, tmp_path: Path) -> Path:
    """The same in a folder, without a manifest: what reads the files must find damage too."""
    trained.save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / MANIFEST).unlink()
    return tmp_path / "checkpoint"


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A backbone whose width, depth and tokenizer differ from the usual one."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["the", "rent"])
    folder = tmp_path_factory.mktemp("wide")
    save_tiny(folder, width=48, depth=6, seed=3, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    return str(folder)


# Round trips


def test_a_saved_model_reads_and_answers_as_before(trained: SeDeM, saved: Path) -> None:
    reopened = reopen(saved)
    assert replies(reopened) == replies(trained)
    assert reopened.fingerprint() == trained.fingerprint()
    assert reopened.config == trained.config
    assert reopened.name == "checkpoint"
    assert not reopened.training
    assert not any(p.requires_grad for p in reopened.parameters())
    assert {file.suffix for file in (saved / "adapter").iterdir()} == {".safetensors", ".json"}


def test_a_model_without_adapters_is_saved_without_them(
    config: SedemConfig, backbone: Backbone, tmp_path: Path
) -> None:
    model = make(config, backbone, backbone, lora=False)
    model.save_pretrained(tmp_path / "bare")
    assert sorted(p.name for p in (tmp_path / "bare").iterdir()) == [
        "config.json",
        MANIFEST,
        "sedem.safetensors",
    ]
    reopened = reopen(tmp_path / "bare")
    assert reopened.config.lora_rank == 0
    assert not reopened.decoder.has_lora
    assert replies(reopened) == replies(model) != replies(make(config, backbone, backbone))


@pytest.mark.parametrize(
    "changes",
    [
        {"compressor": "mlp"},
        {"compressor": "query"},
        {"extract_layers": (1, 3), "layer_mixing": "learned"},
        {"extract_layers": (1, 3), "layer_mixing": "uniform"},
        {"block_slots": 2, "segmentation": "paragraph"},
        {"second_hop": True, "hops": "auto"},
        {"decompressor": "none", "inject_layer": 0},
        {"decompressor_hidden": 20, "selector_heads": 2, "selector_dim": 10, "k": 3},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_every_configuration_can_be_saved_and_opened(
    changes: dict[str, object], config: SedemConfig, backbone: Backbone, tmp_path: Path
) -> None:
    model = make(config.with_changes(**changes), backbone, backbone)
    model.save_pretrained(tmp_path / "checkpoint")
    reopened = reopen(tmp_path / "checkpoint")
    assert reopened.config == model.config
    assert replies(reopened) == replies(model)


def test_a_cross_model_checkpoint_can_be_saved_and_opened(
    config: SedemConfig, backbone: Backbone, wide_folder: str, tmp_path: Path
) -> None:
    decoder = open_backbone(wide_folder)
    assert (decoder.width, decoder.depth) != (backbone.width, backbone.depth)
    assert decoder.token_ids(LEASE) != backbone.token_ids(LEASE)
    crossed = config.with_changes(decoder=wide_folder, inject_layer=4)
    model = make(crossed, backbone, decoder)
    model.save_pretrained(tmp_path / "checkpoint")
    reopened = reopen(tmp_path / "checkpoint")
    assert (reopened.encoder.width, reopened.decoder.width) == (32, 48)
    assert not reopened.encoder.has_lora
    assert replies(reopened) == replies(model)
    with pytest.raises(ConfigError, match="cannot be copied into the checkpoint; that needs one"):
        model.save_pretrained(tmp_path / "other", with_backbone=True)
    assert not (tmp_path / "other").exists()


def quantize(folder: Path) -> str:
    """Store the weights of a backbone folder as int8."""
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    save_file(quantize_int8(weights), folder / INT8_FILE)
    (folder / "model.safetensors").unlink()
    return str(folder)


def test_a_backbone_travels_inside_its_checkpoint(config: SedemConfig, tmp_path: Path) -> None:
    original = save_tiny(tmp_path / "original")
    exact = open_backbone(original)
    rounded = open_backbone(quantize(tmp_path / "original"))
    for name, weight in exact.model.state_dict().items():
        limit = weight.abs().max() / 127
        assert (rounded.model.state_dict()[name] - weight).abs().max() <= limit, name
    # An encoder that is also named as decoder stays one backbone.
    model = make(config.with_changes(encoder=original, decoder=original), rounded, rounded)
    expected = replies(model)
    model.save_pretrained(tmp_path / "whole", with_backbone=True)
    shutil.rmtree(original)
    moved = (tmp_path / "whole").rename(tmp_path / "moved")
    assert (moved / "backbone" / INT8_FILE).is_file()
    reopened = reopen(moved)
    assert reopened.encoder is reopened.decoder and reopened.config.encoder == "backbone"
    assert (replies(reopened), reopened.fingerprint()) == (expected, model.fingerprint())
    reopened.save_pretrained(tmp_path / "again")
    shutil.rmtree(moved)
    again = reopen(tmp_path / "again")
    assert replies(again) == expected
    with torch.no_grad():
        again.decompressor.w_2.bias.add_(1.0)
    again.save_pretrained(tmp_path / "again")
    assert replies(reopen(tmp_path / "again")) == replies(again)


def test_an_int8_checkpoint_is_rounded_and_much_smaller(
    trained: SeDeM, saved: Path, tmp_path: Path
) -> None:
    trained.save_pretrained(tmp_path / "small", int8=True)
    small = reopen(tmp_path / "small", device="cpu", dtype=torch.float32)
    for name, weight in trained.parts().state_dict().items():
        step = weight.abs().amax(-1, keepdim=True) / 127 if weight.dim() == 2 else 0 * weight
        given = small.parts().state_dict()[name]
        assert given.dtype == torch.float32
        assert ((given - weight).abs() <= step * 0.501).all(), name
    for a, b in zip(
        small.decoder.lora_parameters(), trained.decoder.lora_parameters(), strict=True
    ):
        assert ((a - b).abs() <= b.abs().amax(-1, keepdim=True) / 127 * 0.501).all()
    for file, share in (
        (checkpoint.WEIGHTS_FILE, 0.4),
        (f"{checkpoint.ADAPTER}/{ADAPTER_WEIGHTS}", 0.8),  # its rows have four numbers
    ):
        assert (tmp_path / "small" / file).stat().st_size < share * (saved / file).stat().st_size
    assert small.answer(small.read(DOCUMENTS), QUESTIONS[0], decoding=SHORT).citations


def test_a_checkpoint_opened_in_bfloat16_has_the_same_fingerprint(saved: Path) -> None:
    low = reopen(saved, dtype=torch.bfloat16)
    assert low.decoder.dtype == torch.bfloat16
    assert {p.dtype for p in low.parts().parameters()} == {torch.float32}
    assert low.fingerprint() == reopen(saved).fingerprint()
    assert low.answer(low.read(DOCUMENTS), QUESTIONS[0], decoding=SHORT).k == 2


# Checkpoints that travel


def test_a_backbone_in_a_relative_folder_is_found_from_any_other(
    config: SedemConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny(tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    backbone = open_backbone("models/tiny")
    model = make(config.with_changes(encoder="models/tiny"), backbone, backbone)
    model.save_pretrained("run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    reopened = reopen(Path("../run"))
    assert reopened.config.encoder == str(tmp_path / "models" / "tiny")
    assert replies(reopened) == replies(model)
    told = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert told["base_model_name_or_path"] == reopened.config.encoder


def test_a_shipped_backbone_is_stored_by_its_name(config: SedemConfig, tmp_path: Path) -> None:
    shipped = checkpoint.embedded("sedem-nano/backbone")
    assert checkpoint.portable_name(str(shipped)) == "sedem-nano/backbone"
    assert checkpoint.portable_name("sedem-nano/backbone") == "sedem-nano/backbone"
    assert checkpoint.portable_name("meta-llama/Llama-3.2-1B") == "meta-llama/Llama-3.2-1B"
    assert checkpoint.portable_name(str(tmp_path)) == str(tmp_path)
    travels = checkpoint.portable(config.with_changes(encoder="owner/name", decoder=str(shipped)))
    assert (travels.encoder, travels.decoder) == ("owner/name", "sedem-nano/backbone")


def test_an_older_checkpoint_travels_once_a_part_is_added(
    saved: Path, config: SedemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(config.encoder)
    change_config(saved, encoder=folder.name)
    monkeypatch.chdir(folder.parent)
    checkpoint.copy_with_parts(saved, saved, {"confidence": fitted()}, confidence=True)
    assert SedemConfig.load(saved, extra=checkpoint.EXTRA_ENTRIES).encoder == str(folder)


# Damage


def change_weights(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def change_config(folder: Path, **changes: object) -> None:
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**entries, **changes}))


@pytest.mark.parametrize("file", [WEIGHTS, ADAPTER])
def test_weights_that_do_not_fit_are_refused_with_what_differs(file: str, saved: Path) -> None:
    path = saved / file
    content = path.read_bytes()
    name, weight = sorted(load_file(path).items())[0]
    other = torch.zeros(*(size + 1 for size in weight.shape))
    has, needs = (str(list(t.shape)).replace("[", r"\[") for t in (other, weight))

    def refused(words: str) -> None:
        with pytest.raises(CheckpointError, match=words):
            SeDeM.from_pretrained(saved)

    change_weights(path, lambda weights: weights.update({name: other}))
    refused(rf"{name} has shape {has}, {needs} is needed")
    change_weights(path, lambda weights: weights.pop(name))
    refused(rf"{file}' does not fit: 1 weights are missing \(such as {name}\)")
    change_weights(path, lambda weights: weights.update(stranger=torch.zeros(1)))
    refused(r"1 weights are missing .*1 are not known \(such as")
    for kept in (0, 4, 100, -1):
        path.write_bytes(content[:kept])
        refused(rf"{file}' is truncated or not a safetensors file")
    path.unlink()
    refused(rf"{file}' is missing; the checkpoint is incomplete")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"segment_lenght": 16}, ConfigError, "unknown key 'segment_lenght'; did you mean"),
        ({"extract_layers": [9]}, ConfigError, "extract_layers reaches 9, encoder '.*' has 4"),
        ({"lora_rank": 8}, CheckpointError, r"has shape \[.*4.*\], \[.*8.*\] is needed"),
        ({"confidence": True}, CheckpointError, r"confidence\."),
        ({"encoder": "nowhere/at-all"}, ConfigError, "'nowhere/at-all' is neither a local folder"),
        (
            {"encoder": "/nowhere/at/all"},
            CheckpointError,
            r"needs the backbone in '/nowhere/at/all', which .* with_backbone=True",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_suit_the_files_are_refused(
    changes: dict[str, object], error: type[Exception], words: str, saved: Path
) -> None:
    change_config(saved, **changes)
    with pytest.raises(error, match=words):
        SeDeM.from_pretrained(saved)


LOST = "model.layers.1.mlp.up_proj.weight"
GPT = b'{"model_type": "gpt2"}'


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", LOST, rf"1 weights are missing \(such as {LOST}\)"),
        ("model.safetensors", b"{" * 1000, "is truncated or not a safetensors file"),
        ("model.safetensors", None, "weights of backbone '.*backbone' cannot be read"),
        ("tokenizer.json", b"{", "tokenizer of backbone '.*backbone' cannot be read"),
        ("tokenizer.json", None, "tokenizer of backbone '.*backbone' cannot be read"),
        ("config.json", b"{", r"backbone/config\.json' is not JSON"),
        ("config.json", GPT, "has the layout 'gpt2'; sedem supports llama, mistral"),
        (INT8_FILE, LOST, LOST),
        (INT8_FILE, f"{LOST}.scale", LOST),
    ],
)
def test_a_damaged_backbone_is_refused(
    name: str, content: bytes | str | None, words: str, saved: Path, tmp_path: Path
) -> None:
    folder = Path(save_tiny(tmp_path / "backbone"))
    if name == INT8_FILE:
        quantize(folder)
    if content is None:
        (folder / name).unlink()
    elif isinstance(content, bytes):
        (folder / name).write_bytes(content)
    else:
        change_weights(folder / name, lambda weights: weights.pop(content))
    change_config(saved, encoder=str(folder))
    with pytest.raises((CheckpointError, ConfigError), match=words):
        SeDeM.from_pretrained(saved)


# Names


HUB = "is neither a local folder nor available from the hub"
PATH = "is not a local folder; a finished 'sedem train' leaves one in 'final'"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no-such-checkpoint", HUB),
        ("somebody/no-such", HUB),
        ("sedem-nano/../sedem", PATH),
        ("a/b/c", PATH),
        ("../none", PATH),
        ("/nowhere", PATH),
        (__file__, "is a file; a checkpoint is a folder"),
    ],
)
def test_an_unknown_name_gives_one_sentence(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{name}' {message}") as caught:
        SeDeM.from_pretrained(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../checkpoints/sedem-nano", "sedem-nano/..", "", ".", "nobody"])
def test_only_plain_names_lead_to_shipped_checkpoints(name: str) -> None:
    assert checkpoint.embedded(name) is None


def test_a_checkpoint_from_the_hub_is_named_after_its_id(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []
    snapshot = saved.rename(saved.with_name("0123456789abcdef"))

    def download(name: str, revision: str | None = None) -> str:
        asked.append((name, revision))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model = SeDeM.from_pretrained("somebody/lease-reader", revision="v2")
    assert asked == [("somebody/lease-reader", "v2")]
    assert model.name == "lease-reader"


# Confidence


def fitted() -> Confidence:
    part = Confidence()
    with torch.no_grad():
        part.weight.copy_(torch.tensor([3.0, -2.0, 1.0]))
        part.bias.fill_(0.25)
    return part


@pytest.mark.parametrize("int8", [False, True])
def test_a_confidence_is_added_to_a_checkpoint_whose_other_weights_keep_their_bytes(
    int8: bool, trained: SeDeM, tmp_path: Path
) -> None:
    trained.save_pretrained(tmp_path / "plain", int8=int8)
    plain, sure = tmp_path / "plain", tmp_path / "sure"
    part = fitted()
    checkpoint.copy_with_parts(plain, sure, {"confidence": part}, confidence=True)
    before, after = (load_file(folder / checkpoint.WEIGHTS_FILE) for folder in (plain, sure))
    assert after.keys() - before.keys() == {"confidence.weight", "confidence.bias"}
    for name, weight in before.items():
        assert weight.dtype == after[name].dtype and torch.equal(weight, after[name])
    one, other = reopen(plain), reopen(sure)
    assert one.confidence is None and other.confidence is not None
    assert one.fingerprint() == other.fingerprint()
    assert replies(one) == replies(other)
    other.save_pretrained(tmp_path / "again", int8=int8)
    checkpoint.copy_with_parts(sure, sure, {"confidence": Confidence()}, confidence=True)
    checkpoint.copy_with_parts(sure, sure, {"confidence": part}, confidence=True)
    for folder in (sure, tmp_path / "again"):
        found = reopen(folder).confidence
        assert found is not None and torch.equal(found.weight, part.weight)
        assert torch.equal(found.bias, part.bias)
    assert not list(tmp_path.glob(".*"))


FLIPS = 60


@pytest.fixture
def sealed(trained: SeDeM, tmp_path: Path) -> Path:
    """A checkpoint with its backbone inside."""
    trained.save_pretrained(tmp_path / "folder" / "mine", with_backbone=True)
    return tmp_path / "folder" / "mine"


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files_of(folder)}


def refused(folder: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        SeDeM.from_pretrained(folder, engine="eager")
    assert f"'sedem seal {folder}'" in str(caught.value)
    assert "\n" not in str(caught.value)


# Damage


def test_every_flipped_bit_is_found_before_use(sealed: Path) -> None:
    draw = random.Random(0)
    files = files_of(sealed)
    assert {path.name for path in files} >= {MANIFEST, "config.json", "tokenizer.json"}
    for number in range(FLIPS):
        path = files[number % len(files)]
        before = path.read_bytes()
        damaged = bytearray(before)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        refused(
            sealed, "is damaged|is missing|does not belong" if path.name == MANIFEST else path.name
        )
        path.write_bytes(before)
    SeDeM.from_pretrained(sealed, engine="eager")


def test_every_truncated_or_missing_file_is_found_before_use(sealed: Path) -> None:
    for path in files_of(sealed):
        before = path.read_bytes()
        for size in (0, len(before) // 2, len(before) - 2):
            path.write_bytes(before[:size])
            refused(sealed, rf"{path.name}' is damaged")
        if path.name != MANIFEST:
            path.unlink()
            refused(sealed, rf"{path.name}' is missing")
        path.write_bytes(before)
    shutil.rmtree(sealed / "backbone")
    refused(sealed, r"backbone/.*' is missing")


@pytest.mark.parametrize("file", [WEIGHTS, ADAPTER, "backbone/added_tokens.json"])
def test_a_file_of_another_checkpoint_is_found_before_use(
    file: str, sealed: Path, trained: SeDeM, tmp_path: Path
) -> None:
    with torch.no_grad():
        for weight in (*trained.parts().parameters(), *trained.decoder.lora_parameters()):
            weight.add_(1)
    trained.save_pretrained(tmp_path / "other", with_backbone=True)
    (tmp_path / "other" / "backbone" / "added_tokens.json").write_text("{}")
    shutil.copy(tmp_path / "other" / file, sealed / file)
    refused(sealed, rf"{file}' (is damaged|does not belong to its checkpoint)")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"files": []}', '{"files": {"a": 1}}', "[" * 9999]
)
def test_a_manifest_that_is_none_is_refused(text: str, sealed: Path) -> None:
    (sealed / MANIFEST).write_text(text)
    refused(sealed, rf"{MANIFEST}' is damaged")


def test_a_checkpoint_without_a_manifest_opens_with_a_warning_that_says_how_to_add_one(
    sealed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (sealed / MANIFEST).unlink()
    SeDeM.from_pretrained(sealed, engine="eager")
    [warned] = caplog.messages
    assert "has no manifest.json" in warned and f"'sedem seal {sealed}' adds one" in warned
    seal(sealed)
    caplog.clear()
    SeDeM.from_pretrained(sealed, engine="eager")
    assert not caplog.messages


def test_a_folder_that_is_no_checkpoint_cannot_be_sealed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a checkpoint; it has no config\.json"):
        seal(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_card_and_other_files_of_the_owner_are_free(sealed: Path) -> None:
    for name in ("README.md", "notes.txt", "adapter/.hidden"):
        (sealed / name).write_text("mine")
    SeDeM.from_pretrained(sealed, engine="eager")
    listed = json.loads((sealed / MANIFEST).read_text())["files"]
    assert {"README.md", "notes.txt", MANIFEST}.isdisjoint(listed)


def test_a_checkpoint_that_changes_while_it_is_opened_is_refused(sealed: Path) -> None:
    with pytest.raises(CheckpointError, match="was changed while it was opened"), opening(sealed):
        shutil.copy(sealed / WEIGHTS, sealed / "again")
        (sealed / "again").replace(sealed / WEIGHTS)


def test_damage_is_not_copied_into_a_checkpoint_with_one_part_more(
    sealed: Path, tmp_path: Path
) -> None:
    weights = sealed / "backbone" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match=r"model\.safetensors' is damaged"):
        checkpoint.copy_with_parts(sealed, tmp_path / "sure", {"confidence": torch.nn.Linear(2, 1)})
    assert not (tmp_path / "sure").exists()


def test_shipped_checkpoints_are_what_their_manifests_say() -> None:
    for folder in sorted(shipped_folders("checkpoints")[0].iterdir()):
        assert (folder / MANIFEST).is_file()
        checkpoint.check(folder, *checkpoint.OWN, checkpoint.BACKBONE)


# Killed writers


class Killed(BaseException):
    """Ends a writer; nothing of it that changes files runs afterwards."""


@contextmanager
def killed_at(step: int) -> Iterator[list[str]]:
    """Let calls that change files end the writer from a given one on; yields the calls so far."""
    calls: list[str] = []

    def wrapped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            mode = arguments[1] if len(arguments) > 1 else options.get("mode", "r")
            if name == "open" and not set(str(mode)) & set("wax+"):
                return real(*arguments, **options)
            calls.append(name)
            if len(calls) >= step:
                raise Killed
            return real(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("mkdir", "rename", "replace", "unlink", "rmdir", "link", "fsync"):
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        patch.setattr(tensors, "save_file", wrapped("save_file", tensors.save_file))
        opened = wrapped("open", io.open)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        yield calls


def saves(model: SeDeM, place: Path, prepare: Callable[[], None]) -> Iterator[str]:
    """Save a model, killed at each step in turn and then not; yields the last call of each try."""
    for step in itertools.count(1):
        prepare()
        with killed_at(step) as calls, suppress(Killed):
            model.save_pretrained(place)
            break
        yield calls[-1]
    yield "nothing"


def own(folder: Path) -> dict[str, bytes]:
    """The content of a checkpoint, after it was checked as any opening does."""
    with opening(folder):
        return content(folder)


def test_a_writer_killed_at_any_step_leaves_the_old_or_the_new_checkpoint(
    trained: SeDeM, tmp_path: Path
) -> None:
    place = tmp_path / "folder" / "mine"
    trained.save_pretrained(place)
    (place / "README.md").write_text("mine")
    (place / "runs").mkdir()
    (place / "runs" / "events").write_text("also mine")
    old = content(place)
    shutil.copytree(place, tmp_path / "old")
    with torch.no_grad():
        for weight in (*trained.parts().parameters(), *trained.decoder.lora_parameters()):
            weight.add_(1)
    trained.save_pretrained(place)
    new = content(place)
    assert new["README.md"] == b"mine" and new["runs/events"] == b"also mine"
    assert all(old[name] != new[name] for name in (WEIGHTS, ADAPTER, MANIFEST))
    found = []

    def restore() -> None:
        shutil.rmtree(place.parent)
        shutil.copytree(tmp_path / "old", place)

    for last in saves(trained, place, restore):
        left = own(locate(str(place)))
        assert left in (old, new), f"killed before {last}, call {len(found) + 1}"
        found.append(left == new)
        if len(found) % 20 == 0 or not place.exists():
            # What is left beside does not hinder the next writer, which clears it.
            trained.save_pretrained(place)
            assert own(place) == new
            assert [path.name for path in place.parent.iterdir()] == ["mine"]
    assert found == sorted(found) and not found[0] and found[-1]
    assert len(found) > 30


def test_a_new_checkpoint_appears_whole_or_not_at_all(trained: SeDeM, tmp_path: Path) -> None:
    place, tried = tmp_path / "a" / "b" / "mine", []
    for last in saves(trained, place, lambda: None):
        tried.append(last)
        if place.exists():
            assert set(own(place)) >= {WEIGHTS, ADAPTER, MANIFEST}
            shutil.rmtree(tmp_path / "a")
    assert len(tried) > 20


def test_a_checkpoint_whose_writer_was_killed_between_two_names_opens_with_a_warning(
    sealed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sealed.rename(sealed.with_name(".mine.old"))
    model = SeDeM.from_pretrained(sealed, engine="eager")
    assert model.name == "mine"
    assert "saving over" in caplog.text and "the previous checkpoint is opened" in caplog.text


def test_the_working_folder_is_not_replaced(
    sealed: Path, trained: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(sealed)
    monkeypatch.chdir(sealed)
    with pytest.raises(ConfigError, match="is the working folder"):
        trained.save_pretrained(".")
    assert content(sealed) == before


def test_a_link_to_a_checkpoint_stays_one(sealed: Path, trained: SeDeM, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(sealed)
    trained.save_pretrained(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert SeDeM.from_pretrained(tmp_path / "link", engine="eager").config.lora_rank
