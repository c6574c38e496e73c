"""Damage of a checkpoint is found before use, and a killed writer leaves the old or the new one."""

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

from sedem import SeDeM
from sedem.backbone import safetensors
from sedem.checkpoint import folder as checkpoint
from sedem.checkpoint import portable
from sedem.checkpoint.folder import locate, opening, seal
from sedem.checkpoint.manifest import MANIFEST
from sedem.errors import CheckpointError, ConfigError

FLIPS = 60
WEIGHTS, ADAPTER = "sedem.safetensors", "adapter/adapter_model.safetensors"


@pytest.fixture
def adapted(model: SeDeM) -> SeDeM:
    model.decoder.add_lora(model.config.lora_rank, model.config.lora_alpha)
    return model


@pytest.fixture
def saved(adapted: SeDeM, tmp_path: Path) -> Path:
    """A checkpoint with its backbone inside."""
    adapted.save_pretrained(tmp_path / "folder" / "mine", with_backbone=True)
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


def test_every_flipped_bit_is_found_before_use(saved: Path) -> None:
    draw = random.Random(0)
    files = files_of(saved)
    assert {path.name for path in files} >= {MANIFEST, "config.json", "tokenizer.json"}
    for number in range(FLIPS):
        path = files[number % len(files)]
        before = path.read_bytes()
        damaged = bytearray(before)
        damaged[draw.randrange(len(damaged))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        refused(
            saved, "is damaged|is missing|does not belong" if path.name == MANIFEST else path.name
        )
        path.write_bytes(before)
    SeDeM.from_pretrained(saved, engine="eager")


def test_every_truncated_or_missing_file_is_found_before_use(saved: Path) -> None:
    for path in files_of(saved):
        before = path.read_bytes()
        for size in (0, len(before) // 2, len(before) - 2):
            path.write_bytes(before[:size])
            refused(saved, rf"{path.name}' is damaged")
        if path.name != MANIFEST:
            path.unlink()
            refused(saved, rf"{path.name}' is missing")
        path.write_bytes(before)
    shutil.rmtree(saved / "backbone")
    refused(saved, r"backbone/.*' is missing")


@pytest.mark.parametrize("file", [WEIGHTS, ADAPTER, "backbone/added_tokens.json"])
def test_a_file_of_another_checkpoint_is_found_before_use(
    file: str, saved: Path, adapted: SeDeM, tmp_path: Path
) -> None:
    with torch.no_grad():
        for weight in (*adapted.parts().parameters(), *adapted.decoder.lora_parameters()):
            weight.add_(1)
    adapted.save_pretrained(tmp_path / "other", with_backbone=True)
    (tmp_path / "other" / "backbone" / "added_tokens.json").write_text("{}")
    shutil.copy(tmp_path / "other" / file, saved / file)
    refused(saved, rf"{file}' (is damaged|does not belong to its checkpoint)")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"files": []}', '{"files": {"a": 1}}', "[" * 9999]
)
def test_a_manifest_that_is_none_is_refused(text: str, saved: Path) -> None:
    (saved / MANIFEST).write_text(text)
    refused(saved, rf"{MANIFEST}' is damaged")


def test_a_checkpoint_without_a_manifest_opens_with_a_warning_that_says_how_to_add_one(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (saved / MANIFEST).unlink()
    SeDeM.from_pretrained(saved, engine="eager")
    [warned] = caplog.messages
    assert "has no manifest.json" in warned and f"'sedem seal {saved}' adds one" in warned
    seal(saved)
    caplog.clear()
    SeDeM.from_pretrained(saved, engine="eager")
    assert not caplog.messages


def test_a_folder_that_is_no_checkpoint_cannot_be_sealed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is not a checkpoint; it has no config\.json"):
        seal(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_card_and_other_files_of_the_owner_are_free(saved: Path) -> None:
    for name in ("README.md", "notes.txt", "adapter/.hidden"):
        (saved / name).write_text("mine")
    SeDeM.from_pretrained(saved, engine="eager")
    listed = json.loads((saved / MANIFEST).read_text())["files"]
    assert {"README.md", "notes.txt", MANIFEST}.isdisjoint(listed)


def test_a_checkpoint_that_changes_while_it_is_opened_is_refused(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="was changed while it was opened"), opening(saved):
        shutil.copy(saved / WEIGHTS, saved / "again")
        (saved / "again").replace(saved / WEIGHTS)


def test_damage_is_not_copied_into_a_checkpoint_with_one_part_more(
    saved: Path, tmp_path: Path
) -> None:
    weights = saved / "backbone" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(CheckpointError, match=r"model\.safetensors' is damaged"):
        checkpoint.copy_with_parts(saved, tmp_path / "sure", {"confidence": torch.nn.Linear(2, 1)})
    assert not (tmp_path / "sure").exists()


def test_shipped_checkpoints_are_what_their_manifests_say() -> None:
    for folder in sorted(portable.shipped_folders("checkpoints")[0].iterdir()):
        assert (folder / MANIFEST).is_file()
        checkpoint.check(folder, *checkpoint.OWN, portable.BACKBONE)


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
        patch.setattr(safetensors, "save_file", wrapped("save_file", safetensors.save_file))
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
    adapted: SeDeM, tmp_path: Path
) -> None:
    place = tmp_path / "folder" / "mine"
    adapted.save_pretrained(place)
    (place / "README.md").write_text("mine")
    (place / "runs").mkdir()
    (place / "runs" / "events").write_text("also mine")
    old = content(place)
    shutil.copytree(place, tmp_path / "old")
    with torch.no_grad():
        for weight in (*adapted.parts().parameters(), *adapted.decoder.lora_parameters()):
            weight.add_(1)
    adapted.save_pretrained(place)
    new = content(place)
    assert new["README.md"] == b"mine" and new["runs/events"] == b"also mine"
    assert all(old[name] != new[name] for name in (WEIGHTS, ADAPTER, MANIFEST))
    found = []

    def restore() -> None:
        shutil.rmtree(place.parent)
        shutil.copytree(tmp_path / "old", place)

    for last in saves(adapted, place, restore):
        left = own(locate(str(place)))
        assert left in (old, new), f"killed before {last}, call {len(found) + 1}"
        found.append(left == new)
        if len(found) % 20 == 0 or not place.exists():
            # What is left beside does not hinder the next writer, which clears it.
            adapted.save_pretrained(place)
            assert own(place) == new
            assert [path.name for path in place.parent.iterdir()] == ["mine"]
    assert found == sorted(found) and not found[0] and found[-1]
    assert len(found) > 30


def test_a_new_checkpoint_appears_whole_or_not_at_all(adapted: SeDeM, tmp_path: Path) -> None:
    place, tried = tmp_path / "a" / "b" / "mine", []
    for last in saves(adapted, place, lambda: None):
        tried.append(last)
        if place.exists():
            assert set(own(place)) >= {WEIGHTS, ADAPTER, MANIFEST}
            shutil.rmtree(tmp_path / "a")
    assert len(tried) > 20


def test_a_checkpoint_whose_writer_was_killed_between_two_names_opens_with_a_warning(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved.rename(saved.with_name(".mine.old"))
    model = SeDeM.from_pretrained(saved, engine="eager")
    assert model.name == "mine"
    assert "saving over" in caplog.text and "the previous checkpoint is opened" in caplog.text


def test_the_working_folder_is_not_replaced(
    saved: Path, adapted: SeDeM, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = content(saved)
    monkeypatch.chdir(saved)
    with pytest.raises(ConfigError, match="is the working folder"):
        adapted.save_pretrained(".")
    assert content(saved) == before


def test_a_link_to_a_checkpoint_stays_one(saved: Path, adapted: SeDeM, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(saved)
    adapted.save_pretrained(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert SeDeM.from_pretrained(tmp_path / "link", engine="eager").config.lora_rank
