"""A checkpoint from a stranger costs bounded time and memory, and leads nowhere else."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import sedem
from conftest import CHAT_TEMPLATE

from sedem import SeDeM, untrusted
from sedem.backbone import tokenizer
from sedem.backbone.decoder import Backbone
from sedem.backbone.gguf import converted, gguf_file
from sedem.backbone.loading import open_backbone
from sedem.backbone.prompts import conversation_ids
from sedem.checkpoint.folder import MANIFEST, is_checkpoint, seal
from sedem.errors import CheckpointError, ConfigError, SedemError, first_line


@pytest.fixture(autouse=True)
def for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With processes, and nothing that was tried before."""
    monkeypatch.setenv("SEDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tokenizer, "apart", untrusted.apart)


@pytest.fixture
def saved(model: SeDeM, tmp_path: Path) -> Path:
    """A checkpoint with its backbone inside."""
    model.decoder.add_lora(model.config.lora_rank, model.config.lora_alpha)
    model.save_pretrained(tmp_path / "mine", with_backbone=True)
    return tmp_path / "mine"


@pytest.fixture
def copied(tiny_folder: Callable[..., str], tmp_path: Path) -> Path:
    """A backbone of its own."""
    return Path(shutil.copytree(tiny_folder(), tmp_path / "backbone"))


def refused(open_: Callable[[], object], words: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SedemError, match=words) as caught:
        open_()
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


# Files


def pipe(path: Path) -> str:
    os.mkfifo(path)
    return "is a pipe"


def device(path: Path) -> str:
    path.symlink_to("/dev/zero")
    return "is a link that leads out of"


def sparse(path: Path) -> str:
    path.touch()
    os.truncate(path, 2**40)
    return r"has 1\.1 TB, at most 268 MB are read"


def stranger(path: Path) -> str:
    target = path.parents[1] / "secret.json"
    target.write_text("{}")
    path.symlink_to(Path("..") / target.name)
    return "is a link that leads out of"


@pytest.mark.parametrize("put", [pipe, device, sparse, stranger])
@pytest.mark.parametrize(
    "name", [MANIFEST, "config.json", "adapter/adapter_config.json", "backbone/tokenizer.json"]
)
def test_every_file_of_a_checkpoint_is_guarded(
    name: str, put: Callable[[Path], str], saved: Path
) -> None:
    path = saved / name
    path.unlink()
    words = put(path)
    if put is stranger and "/" in name:
        path.unlink()
        (saved.parent / "secret.json").touch()
        path.symlink_to("../../secret.json")
    refused(lambda: SeDeM.from_pretrained(saved), f"{path.name}' {words}")
    if name == "config.json":
        assert not is_checkpoint(str(saved))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("put", [pipe, device, sparse])
def test_every_file_of_a_backbone_is_guarded(
    name: str, put: Callable[[Path], str], copied: Path
) -> None:
    (copied / name).unlink(missing_ok=True)
    words = put(copied / name)
    refused(lambda: open_backbone(str(copied)), f"{name}' {words}")


def test_folders_and_gguf_files_lead_nowhere_else(saved: Path, tmp_path: Path) -> None:
    shutil.move(saved / "backbone", tmp_path / "elsewhere")
    (saved / "backbone").symlink_to(tmp_path / "elsewhere")
    refused(lambda: SeDeM.from_pretrained(saved), "backbone' is a link that leads out of")
    folder = tmp_path / "gguf"
    folder.mkdir()
    (folder / "m.gguf").symlink_to("/dev/zero")
    refused(lambda: gguf_file(str(folder)), "m.gguf' is a link that leads out of")
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(lambda: converted(tmp_path / "pipe.gguf", "m"), "pipe.gguf' is a pipe")


def test_links_inside_and_those_of_the_hubs_cache_are_followed(
    copied: Path, tmp_path: Path
) -> None:
    snapshot, blobs = tmp_path / "hub" / "snapshots" / "1", tmp_path / "hub" / "blobs"
    snapshot.mkdir(parents=True)
    shutil.move(copied, blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    assert open_backbone(str(snapshot)).depth


# Chat templates

LONG = "{% set s = namespace(x='words') %}{% for i in range(9999) %}"
HOSTILE_TEMPLATES = {
    "loops": ("{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3, "needs more than 4 s"),
    "grows": (LONG + "{% set s.x = s.x + s.x %}{% endfor %}", "needs more than 512 MB"),
    "writes": ("{% for a in range(99999) %}aaaa{% endfor %}", "it writes too much"),
    "overflows": ("{{ 'a' * (10 ** 30) }}", "cannot fit 'int'"),
    "recurses": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
    "types": ("{{ 1 + 'a' }}", "unsupported operand"),
    "divides": ("{{ 1 / 0 }}", "division by zero"),
}


@pytest.mark.parametrize(("template", "words"), HOSTILE_TEMPLATES.values(), ids=HOSTILE_TEMPLATES)
def test_a_hostile_template_is_one_sentence(
    template: str, words: str, chat_backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words == "needs more than 4 s":
        monkeypatch.setattr(tokenizer, "TEMPLATE_SECONDS", 4)
    chat_backbone.chat_tokenizer.chat_template = template
    refused(lambda: chat_backbone.chat, rf"the chat template of backbone .*{words}.*turn chat_temp")


def test_a_question_runs_no_template(
    chat_backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chat_backbone.chat.before

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a question ran the template")

    monkeypatch.setattr(tokenizer, "apart", never)
    turns = [("system", "Be brief."), *[("user", "Why?"), ("assistant", "So.")] * 30]
    assert len(conversation_ids(chat_backbone, [*turns, ("user", "When?")])) > 200


def test_a_template_that_writes_more_than_the_model_reads_is_refused(
    chat_backbone: Backbone,
) -> None:
    chat_backbone.chat_tokenizer.chat_template = CHAT_TEMPLATE + "a" * 600
    refused(lambda: chat_backbone.chat, r"writes 6\d\d tokens around a question, .* 512 positions")


# Tokenizers


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    file = folder / "tokenizer.json"
    entries = json.loads(file.read_text())
    change(entries)
    file.write_text(json.dumps(entries))
    return folder


def doubles(entries: dict[str, Any]) -> None:
    rule = {"type": "Replace", "pattern": {"String": "q"}, "content": "qq"}
    entries["normalizer"] = {"type": "Sequence", "normalizers": [rule] * 64}


def decodes_doubled(entries: dict[str, Any]) -> None:
    rule = {"type": "Replace", "pattern": {"String": "q"}, "content": "qq"}
    entries["decoder"] = {"type": "Sequence", "decoders": [entries["decoder"], *[rule] * 64]}


def backtracks(entries: dict[str, Any]) -> None:
    split = {"pattern": {"Regex": "(a|a)+$(a|a)+b"}, "behavior": "Isolated", "invert": False}
    slow = {"type": "Split", **split, "pattern": {"Regex": "^(([a-z])+.)+[A-Z]([a-z])+$"}}
    entries["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [slow, entries["pre_tokenizer"]],
    }


def panics(entries: dict[str, Any]) -> None:
    entries["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}


def beyond(entries: dict[str, Any]) -> None:
    entries["model"]["vocab"]["zz"] = 70_000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (doubles, "tokenizer.json makes a text more than 64 times as long"),
        (decodes_doubled, "tokenizer.json makes a text more than 64 times as long"),
        (beyond, r"has the id 70000, but there are 258 embeddings"),
    ],
)
@pytest.mark.parametrize("light", [False, True])
def test_a_hostile_tokenizer_is_one_sentence(
    change: Callable[[dict[str, Any]], None], words: str, light: bool, copied: Path
) -> None:
    refused(lambda: open_backbone(str(changed(copied, change)), light=light), words)


@pytest.mark.parametrize("change", [panics, backtracks])
def test_a_tokenizer_that_panics_or_backtracks_does_no_harm(
    change: Callable[[dict[str, Any]], None], copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "TOKENIZER_SECONDS", 10)
    try:
        open_backbone(str(changed(copied, change))).tokenize(["a" * 2000 + "!"])
    except (CheckpointError, ConfigError) as error:
        assert "\n" not in str(error)


def test_a_tokenizer_is_tried_once(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_backbone(str(copied))
    monkeypatch.setattr(tokenizer, "apart", None)
    open_backbone(str(copied))
    os.utime(copied / "tokenizer.json", ns=(1, 1))
    with pytest.raises(CheckpointError, match="not callable"):
        open_backbone(str(copied))


# Messages


def test_seal_lists_what_it_leaves_out(saved: Path) -> None:
    (saved / "backbone" / ".hidden").touch()
    (saved / "README.md").touch()
    told = sedem("seal", saved)
    assert told.exit_code == 0
    assert "left out: README.md, backbone/.hidden" in " ".join(told.stderr.split())
    os.mkfifo(saved / "pipe")
    refused(lambda: seal(saved), "pipe' is a pipe; give a file")


def test_a_message_quotes_at_most_200_characters() -> None:
    long = "x" * 1000
    for error in (ConfigError(f"'{long}' is not 'a'"), CheckpointError(f"it's '{long}'")):
        assert len(str(error)) < 250
    assert str(ConfigError(f"'a' is {long} b")) == f"'a' is {long} b"
    assert len(first_line(ValueError(long))) < 250
    # A quotation mark inside could end the quotation.
    assert len(str(ConfigError("'a' " + "x' y" * 10**6))) < 4100
