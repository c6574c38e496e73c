"""A checkpoint opens as it was saved, or is refused in a sentence; no weight is left random."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import END, LEASE, RECIPE, START, save_tiny
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sedem import Decoding, Document, SeDeM, SedemConfig
from sedem.backbone.decoder import ADAPTER_WEIGHTS, Backbone
from sedem.backbone.loading import INT8_FILE, open_backbone
from sedem.backbone.safetensors import quantize_int8
from sedem.checkpoint import folder as checkpoint
from sedem.checkpoint import portable
from sedem.checkpoint.manifest import MANIFEST
from sedem.errors import CheckpointError, ConfigError
from sedem.guidance.scores import Confidence

QUESTIONS = ("What is the rent?", "How long does the pie keep?")
DOCUMENTS = (Document("lease.txt", LEASE), Document("recipe.txt", RECIPE))
SHORT = Decoding(max_new_tokens=12)


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


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A small BPE tokenizer with other ids and longer tokens than the byte tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([LEASE, RECIPE] * 3, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=START, eos_token=END, pad_token=END
    )


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A backbone whose width, depth and tokenizer differ from the usual one."""
    tokenizer = word_tokenizer()
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


def test_adapters_are_saved(trained: SeDeM, saved: Path, config: Any) -> None:
    bare = SeDeM(config, open_backbone(config.encoder), open_backbone(config.encoder))
    bare.parts().load_state_dict(trained.parts().state_dict())
    assert replies(bare.eval()) != replies(trained), "the adapters must matter for this test"
    assert sorted(p.name for p in (saved / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


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
    assert replies(reopened) == replies(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"compressor": "mlp"},
        {"compressor": "query"},
        {"extract_layers": (1, 3), "layer_mixing": "learned"},
        {"extract_layers": (1, 3), "layer_mixing": "uniform"},
        {"block_slots": 2, "segmentation": "paragraph"},
        {
            "decompressor_hidden": 20,
            "selector_heads": 2,
            "selector_dim": 10,
            "k": 3,
        },
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


def test_a_backbone_can_be_copied_into_its_checkpoint(config: SedemConfig, tmp_path: Path) -> None:
    original = save_tiny(tmp_path / "original")
    backbone = open_backbone(original)
    model = make(config.with_changes(encoder=original), backbone, backbone)
    expected = replies(model)
    model.save_pretrained(tmp_path / "whole", with_backbone=True)
    shutil.rmtree(original)
    moved = (tmp_path / "whole").rename(tmp_path / "moved")
    reopened = reopen(moved)
    assert replies(reopened) == expected
    assert reopened.config.encoder == "backbone"


def test_a_checkpoint_with_its_backbone_inside_can_be_saved_elsewhere(
    trained: SeDeM, tmp_path: Path
) -> None:
    trained.save_pretrained(tmp_path / "first", with_backbone=True)
    reopen(tmp_path / "first").save_pretrained(tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    assert replies(reopen(tmp_path / "second")) == replies(trained)


def test_a_checkpoint_with_its_backbone_inside_can_be_saved_over_itself(
    trained: SeDeM, tmp_path: Path
) -> None:
    trained.save_pretrained(tmp_path / "whole", with_backbone=True)
    reopened = reopen(tmp_path / "whole")
    with torch.no_grad():
        reopened.decompressor.w_2.bias.add_(1.0)
    reopened.save_pretrained(tmp_path / "whole")
    assert replies(reopen(tmp_path / "whole")) == replies(reopened)


def quantize(folder: Path) -> str:
    """Store the weights of a backbone folder as int8."""
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    save_file(quantize_int8(weights), folder / INT8_FILE)
    (folder / "model.safetensors").unlink()
    return str(folder)


def test_a_copied_int8_backbone_is_equal_bit_for_bit(config: SedemConfig, tmp_path: Path) -> None:
    exact = open_backbone(save_tiny(tmp_path / "original"))
    rounded = open_backbone(quantize(tmp_path / "original"))
    for name, weight in exact.model.state_dict().items():
        limit = weight.abs().max() / 127
        assert (rounded.model.state_dict()[name] - weight).abs().max() <= limit, name
    changed = config.with_changes(encoder=str(tmp_path / "original"))
    model = make(changed, rounded, rounded)
    expected = replies(model)
    model.save_pretrained(tmp_path / "whole", with_backbone=True)
    shutil.rmtree(tmp_path / "original")
    assert (tmp_path / "whole" / "backbone" / INT8_FILE).is_file()
    reopened = reopen(tmp_path / "whole")
    assert replies(reopened) == expected
    assert reopened.fingerprint() == model.fingerprint()


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
        assert torch.equal(a, b.to(torch.bfloat16).float())
    for file, share in (
        (checkpoint.WEIGHTS_FILE, 0.4),
        (f"{checkpoint.ADAPTER}/{ADAPTER_WEIGHTS}", 0.6),
    ):
        assert (tmp_path / "small" / file).stat().st_size < share * (saved / file).stat().st_size
    assert small.answer(small.read(DOCUMENTS), QUESTIONS[0], decoding=SHORT).citations


def test_saving_over_a_checkpoint_keeps_other_files_of_the_folder(
    trained: SeDeM, saved: Path
) -> None:
    (saved / "README.md").write_text("mine")
    (saved / "runs").mkdir()
    (saved / "runs" / "events").write_text("also mine")
    with torch.no_grad():
        trained.compressor.w_in.weight.mul_(1.5)
        trained.decoder.lora_parameters()[0].add_(0.5)
    trained.save_pretrained(saved)
    assert (saved / "README.md").read_text() == "mine"
    assert (saved / "runs" / "events").read_text() == "also mine"
    assert replies(reopen(saved)) == replies(trained)
    assert [p.name for p in saved.parent.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("step", ["save_tensors", "write_text"])
def test_an_unfinished_checkpoint_does_not_appear(
    step: str, trained: SeDeM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(checkpoint if step == "save_tensors" else Path, step, fail)
        with pytest.raises(KeyboardInterrupt):
            trained.save_pretrained(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()
    trained.save_pretrained(tmp_path / "checkpoint")
    assert replies(reopen(tmp_path / "checkpoint")) == replies(trained)


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


def test_both_backbones_of_a_cross_model_are_found(
    config: SedemConfig, tiny_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tiny_folder())
    monkeypatch.chdir(folder.parent)
    crossed = config.with_changes(encoder="owner/name", decoder=folder.name)
    travels = portable.portable(crossed)
    assert (travels.encoder, travels.decoder) == ("owner/name", str(folder))


def test_a_shipped_backbone_is_stored_by_its_name(tmp_path: Path) -> None:
    shipped = checkpoint.embedded("sedem-nano/backbone")
    assert portable.portable_name(str(shipped)) == "sedem-nano/backbone"
    assert portable.portable_name("sedem-nano/backbone") == "sedem-nano/backbone"
    assert portable.portable_name("meta-llama/Llama-3.2-1B") == "meta-llama/Llama-3.2-1B"
    assert portable.portable_name(str(tmp_path)) == str(tmp_path)


def test_an_older_checkpoint_travels_once_a_part_is_added(
    saved: Path, config: SedemConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(config.encoder)
    change_config(saved, encoder=folder.name)
    monkeypatch.chdir(folder.parent)
    checkpoint.copy_with_part(saved, saved, "confidence", fitted(), confidence=True)
    assert SedemConfig.load(saved, extra=checkpoint.EXTRA_ENTRIES).encoder == str(folder)


def test_an_encoder_that_is_also_named_as_decoder_stays_one_backbone(
    config: SedemConfig, backbone: Backbone, tmp_path: Path
) -> None:
    model = make(config.with_changes(decoder=config.encoder), backbone, backbone)
    model.save_pretrained(tmp_path / "whole", with_backbone=True)
    reopened = reopen(tmp_path / "whole")
    assert reopened.encoder is reopened.decoder
    assert replies(reopened) == replies(model)


# Damage


def change_weights(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


WEIGHTS = "sedem.safetensors"
ADAPTER = "adapter/adapter_model.safetensors"


@pytest.mark.parametrize("file", [WEIGHTS, ADAPTER])
def test_missing_and_extra_weights_are_counted_and_one_of_each_is_named(
    file: str, saved: Path
) -> None:
    first = sorted(load_file(saved / file))[0]
    change_weights(saved / file, lambda weights: weights.pop(first))
    with pytest.raises(
        CheckpointError, match=rf"{file}' does not fit: 1 weights are missing \(such as {first}\)"
    ):
        SeDeM.from_pretrained(saved)
    change_weights(saved / file, lambda weights: weights.update(stranger=torch.zeros(1)))
    with pytest.raises(CheckpointError, match=r"1 weights are missing .*1 are not known \(such as"):
        SeDeM.from_pretrained(saved)


@pytest.mark.parametrize("file", [WEIGHTS, ADAPTER])
def test_weights_of_another_shape_are_refused_with_both_shapes(file: str, saved: Path) -> None:
    name, weight = sorted(load_file(saved / file).items())[0]
    other = torch.zeros(*(size + 1 for size in weight.shape))
    change_weights(saved / file, lambda weights: weights.update({name: other}))
    has, needs = (str(list(t.shape)).replace("[", r"\[") for t in (other, weight))
    with pytest.raises(CheckpointError, match=rf"{name} has shape {has}, {needs} is needed"):
        SeDeM.from_pretrained(saved)


@pytest.mark.parametrize("file", [WEIGHTS, ADAPTER])
@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_weights_are_refused_by_name(kept: int, file: str, saved: Path) -> None:
    content = (saved / file).read_bytes()
    (saved / file).write_bytes(content[:kept])
    with pytest.raises(CheckpointError, match=rf"{file}' is truncated or not a safetensors file"):
        SeDeM.from_pretrained(saved)


@pytest.mark.parametrize("file", [WEIGHTS, ADAPTER])
def test_missing_weight_files_are_refused_by_name(file: str, saved: Path) -> None:
    (saved / file).unlink()
    with pytest.raises(CheckpointError, match=rf"{file}' is missing; the checkpoint is incomplete"):
        SeDeM.from_pretrained(saved)


def test_a_missing_adapter_folder_is_refused(saved: Path) -> None:
    shutil.rmtree(saved / "adapter")
    with pytest.raises(CheckpointError, match=rf"{ADAPTER}' is missing"):
        SeDeM.from_pretrained(saved)


def test_adapters_of_another_rank_are_refused(saved: Path) -> None:
    change_config(saved, lora_rank=8)
    with pytest.raises(CheckpointError, match=r"has shape \[.*4.*\], \[.*8.*\] is needed"):
        SeDeM.from_pretrained(saved)


def change_config(folder: Path, **changes: object) -> None:
    entries = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**entries, **changes}))


def test_a_folder_without_config_says_what_a_checkpoint_is(saved: Path, tmp_path: Path) -> None:
    (saved / "config.json").unlink()
    (tmp_path / "empty").mkdir()
    for folder in (saved, tmp_path / "empty"):
        with pytest.raises(
            CheckpointError, match=rf"'.*{folder.name}' has no config\.json; a sedem checkpoint is"
        ):
            SeDeM.from_pretrained(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{}", b"not json"])
def test_a_config_that_is_not_json_is_refused(content: bytes, saved: Path) -> None:
    (saved / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json' is not (JSON|UTF-8)"):
        SeDeM.from_pretrained(saved)


@pytest.mark.parametrize("content", ["[]", '"text"', "3", "{}", '{"model_type": "llama"}'])
def test_a_config_of_something_else_is_refused(content: str, saved: Path) -> None:
    (saved / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"is not a sedem configuration .*'extract_layers'"):
        SeDeM.from_pretrained(saved)


def test_the_folder_of_a_backbone_is_not_a_checkpoint(tiny_folder: Callable[..., str]) -> None:
    with pytest.raises(CheckpointError, match="is not a sedem configuration"):
        SeDeM.from_pretrained(tiny_folder())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"segment_lenght": 16}, "unknown key 'segment_lenght'; did you mean 'segment_length'"),
        ({"compressor": "conv"}, "compressor is 'conv'; it can be linear, mlp or query"),
        ({"segment_length": 18}, "segment_length 18 is not a multiple of compression 4"),
        ({"segment_length": "16"}, "segment_length is '16'; a whole number is needed"),
        ({"compression": 0}, "compression is 0; it must be above 0"),
        ({"extract_layers": []}, "extract_layers is empty; give at least one"),
        ({"extract_layers": [9]}, "extract_layers reaches 9, encoder '.*' has 4 layers"),
        ({"inject_layer": 4}, "inject_layer is 4, decoder '.*' has 4 layers"),
        ({"inject_layer": "two"}, "inject_layer is 'two'; a whole number is needed"),
        ({"selector_heads": 5}, "decoder width 32 is not a multiple of selector_heads 5"),
        ({"segment_length": 512}, "segment_length 512 and a start token exceed the 512 positions"),
        ({"block_slots": 0}, "block_slots is 0; it must be above 0"),
        ({"lora_rank": -1}, "lora_rank is -1; it must be 0 or more"),
    ],
    ids=str,
)
def test_invalid_settings_are_refused_with_a_reason(
    changes: dict[str, object], words: str, saved: Path
) -> None:
    change_config(saved, **changes)
    with pytest.raises(ConfigError, match=words):
        SeDeM.from_pretrained(saved)


def test_a_backbone_that_lacks_weights_is_refused(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "backbone"
    save_tiny(folder)
    lost = "model.layers.1.mlp.up_proj.weight"
    change_weights(folder / "model.safetensors", lambda weights: weights.pop(lost))
    change_config(saved, encoder=str(folder))
    with pytest.raises(CheckpointError, match=f"'.*backbone' lacks 1 weights, such as '{lost}'"):
        SeDeM.from_pretrained(saved)


def test_a_backbone_with_truncated_weights_is_refused(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "backbone"
    save_tiny(folder)
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:1000])
    change_config(saved, encoder=str(folder))
    with pytest.raises(CheckpointError, match=r"weights of backbone '.*backbone' cannot be read"):
        SeDeM.from_pretrained(saved)


def test_a_backbone_without_its_weights_file_is_refused(saved: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "backbone")
    (tmp_path / "backbone" / "model.safetensors").unlink()
    change_config(saved, encoder=str(tmp_path / "backbone"))
    with pytest.raises(CheckpointError, match=r"weights of backbone '.*backbone' cannot be read"):
        SeDeM.from_pretrained(saved)


@pytest.mark.parametrize("content", [None, "", "{"])
def test_a_backbone_without_a_readable_tokenizer_is_refused(
    content: str | None, saved: Path, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "backbone")
    path = tmp_path / "backbone" / "tokenizer.json"
    path.unlink() if content is None else path.write_text(content)
    change_config(saved, encoder=str(tmp_path / "backbone"))
    with pytest.raises(CheckpointError, match=r"tokenizer of backbone '.*backbone' cannot be read"):
        SeDeM.from_pretrained(saved)


def test_a_backbone_without_a_readable_config_is_refused(saved: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "backbone")
    (tmp_path / "backbone" / "config.json").write_text("{")
    change_config(saved, encoder=str(tmp_path / "backbone"))
    with pytest.raises(CheckpointError, match=r"backbone/config\.json' is not JSON"):
        SeDeM.from_pretrained(saved)


def test_an_int8_backbone_that_lacks_a_scale_or_a_row_is_refused(
    saved: Path, tmp_path: Path
) -> None:
    folder = Path(save_tiny(tmp_path / "backbone"))
    quantize(folder)
    intact = (folder / INT8_FILE).read_bytes()
    change_config(saved, encoder=str(folder))
    name = "model.layers.0.mlp.up_proj.weight"
    for lost in (name, f"{name}.scale"):
        change_weights(folder / INT8_FILE, lambda weights, lost=lost: weights.pop(lost))
        with pytest.raises(CheckpointError, match=name):
            SeDeM.from_pretrained(saved)
        (folder / INT8_FILE).write_bytes(intact)


def test_a_missing_backbone_is_named(saved: Path) -> None:
    change_config(saved, encoder="nowhere/at-all")
    with pytest.raises(ConfigError, match="backbone 'nowhere/at-all' is neither a local folder"):
        SeDeM.from_pretrained(saved)


def test_a_backbone_of_another_machine_is_named_with_what_to_do(saved: Path) -> None:
    change_config(saved, encoder="/nowhere/at/all")
    message = r"needs the backbone in '/nowhere/at/all', which .* with_backbone=True"
    with pytest.raises(CheckpointError, match=message):
        SeDeM.from_pretrained(saved)


def test_a_backbone_of_another_layout_is_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "config.json").write_text('{"model_type": "gpt2"}')
    change_config(saved, encoder=str(tmp_path / "gpt"))
    with pytest.raises(ConfigError, match="has the layout 'gpt2'; sedem supports llama, mistral"):
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
    ],
)
def test_an_unknown_name_gives_one_sentence(name: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"checkpoint '{name}' {message}") as caught:
        SeDeM.from_pretrained(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../checkpoints/sedem-nano", "sedem-nano/..", "", ".", "nobody"])
def test_only_plain_names_lead_to_shipped_checkpoints(name: str) -> None:
    assert checkpoint.embedded(name) is None


def test_a_folder_inside_a_shipped_checkpoint_has_a_name() -> None:
    folder = checkpoint.embedded("sedem-nano")
    assert folder is not None and checkpoint.embedded("sedem-nano/backbone") == folder / "backbone"


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("weights?")
    with pytest.raises(CheckpointError, match=r"model\.bin' is a file; a checkpoint is a folder"):
        SeDeM.from_pretrained(tmp_path / "model.bin")


def test_unknown_attention_is_refused(saved: Path) -> None:
    with pytest.raises(ConfigError, match="attention is 'flash'; it can be sdpa or eager"):
        SeDeM.from_pretrained(saved, attention="flash")


def test_eager_attention_answers_as_sdpa_does(saved: Path, trained: SeDeM) -> None:
    eager = replies(SeDeM.from_pretrained(saved, attention="eager"))
    assert [answer[0] for answer in eager] == [answer[0] for answer in replies(trained)]


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
        part.weight.copy_(torch.tensor([3.0, -2.0]))
        part.bias.fill_(0.25)
    return part


@pytest.mark.parametrize("int8", [False, True])
def test_a_confidence_is_added_to_a_checkpoint_whose_other_weights_keep_their_bytes(
    int8: bool, trained: SeDeM, tmp_path: Path
) -> None:
    trained.save_pretrained(tmp_path / "plain", int8=int8)
    plain, sure = tmp_path / "plain", tmp_path / "sure"
    part = fitted()
    checkpoint.copy_with_part(plain, sure, "confidence", part, confidence=True)
    before, after = (load_file(folder / checkpoint.WEIGHTS_FILE) for folder in (plain, sure))
    assert after.keys() - before.keys() == {"confidence.weight", "confidence.bias"}
    for name, weight in before.items():
        assert weight.dtype == after[name].dtype and torch.equal(weight, after[name])
    one, other = reopen(plain), reopen(sure)
    assert one.confidence is None and other.confidence is not None
    assert one.fingerprint() == other.fingerprint()
    assert replies(one) == replies(other)
    assert torch.equal(other.confidence.weight, part.weight)
    assert torch.equal(other.confidence.bias, part.bias)


def test_a_confidence_can_be_fitted_anew_in_its_own_folder(saved: Path) -> None:
    checkpoint.copy_with_part(saved, saved, "confidence", Confidence(), confidence=True)
    checkpoint.copy_with_part(saved, saved, "confidence", fitted(), confidence=True)
    part = reopen(saved).confidence
    assert part is not None and torch.equal(part.weight, fitted().weight)
    assert not list(saved.parent.glob(".*"))


def test_a_saved_model_keeps_its_confidence(saved: Path, tmp_path: Path) -> None:
    checkpoint.copy_with_part(saved, saved, "confidence", fitted(), confidence=True)
    reopen(saved).save_pretrained(tmp_path / "again", int8=True)
    part = reopen(tmp_path / "again").confidence
    assert part is not None and torch.equal(part.weight, fitted().weight)


def test_a_checkpoint_whose_confidence_is_missing_is_refused(saved: Path) -> None:
    path = saved / "config.json"
    entries = json.loads(path.read_text())
    path.write_text(json.dumps({**entries, "confidence": True}))
    with pytest.raises(CheckpointError, match=r"confidence\."):
        reopen(saved)
