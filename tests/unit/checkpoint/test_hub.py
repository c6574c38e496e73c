"""A pushed checkpoint has all that others need to open it, and a card; nothing is sent here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import save_tiny
from huggingface_hub.errors import HFValidationError

from sedem import SeDeM, SedemConfig
from sedem.backbone.decoder import Backbone
from sedem.checkpoint import hub
from sedem.checkpoint.folder import seal
from sedem.checkpoint.hub import SUMMARY_FILE, model_card, push_folder, summary_of
from sedem.errors import CheckpointError, ConfigError

REPO = "somebody/lease-reader"


class RecordingApi:
    """Stands in for the hub: keeps what it is asked, and what it is sent."""

    calls: list[tuple[str, Any]]
    uploaded: dict[str, bytes]
    there: frozenset[str] = frozenset()

    def __init__(self, token: str | None = None) -> None:
        type(self).calls = [("token", token)]
        type(self).uploaded = {}

    def create_repo(self, repo_id: str, **options: Any) -> None:
        if "/" not in repo_id:
            raise HFValidationError(f"bad name {repo_id}\nmore about it")
        self.calls.append(("create_repo", {"repo_id": repo_id, **options}))

    def file_exists(self, repo_id: str, name: str) -> bool:
        return name in self.there

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> Any:
        self.calls.append(("upload_folder", repo_id))
        for path in sorted(Path(folder_path).rglob("*")):
            if path.is_file():
                self.uploaded[str(path.relative_to(folder_path))] = path.read_bytes()

        class Commit:
            commit_url = "https://hub.invalid/commit/1"

        return Commit()


@pytest.fixture(autouse=True)
def api(monkeypatch: pytest.MonkeyPatch) -> type[RecordingApi]:
    monkeypatch.setattr(RecordingApi, "calls", [], raising=False)
    monkeypatch.setattr(hub, "HfApi", RecordingApi)
    return RecordingApi


@pytest.fixture
def public(config: SedemConfig, backbone: Backbone) -> SeDeM:
    """A model whose backbone is on the hub."""
    return SeDeM(config.with_changes(encoder="owner/tiny"), backbone, backbone)


@pytest.fixture
def local(config: SedemConfig, tmp_path: Path, model: SeDeM) -> Path:
    """A checkpoint whose backbone is a folder of this machine."""
    save_tiny(tmp_path / "models" / "tiny")
    changed = config.with_changes(encoder=str(tmp_path / "models" / "tiny"))
    SeDeM(changed, model.encoder, model.decoder).save_pretrained(tmp_path / "final")
    return tmp_path / "final"


def test_the_checkpoints_files_and_a_card_are_uploaded(public: SeDeM, tmp_path: Path) -> None:
    assert public.push_to_hub(REPO, private=True, token="secret") == "https://hub.invalid/commit/1"
    assert RecordingApi.calls == [
        ("token", "secret"),
        ("create_repo", {"repo_id": REPO, "private": True, "exist_ok": True}),
        ("upload_folder", REPO),
    ]
    public.save_pretrained(tmp_path / "saved")
    files = [path for path in (tmp_path / "saved").rglob("*") if path.is_file()]
    expected = {str(path.relative_to(tmp_path / "saved")): path.read_bytes() for path in files}
    card = RecordingApi.uploaded.pop("README.md").decode()
    assert RecordingApi.uploaded == expected
    assert "base_model:\n- owner/tiny" in card
    assert "Not recorded" in card


def test_a_backbone_that_only_this_machine_has_is_refused(
    local: Path, api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"encoder is '/.*tiny', which only this machine has"):
        push_folder(local, REPO)
    model = SeDeM.from_pretrained(local, engine="eager")
    with pytest.raises(ConfigError, match="--with-backbone"):
        model.push_to_hub(REPO)
    # An older checkpoint may name a relative folder.
    entries = json.loads((local / "config.json").read_text())
    (local / "config.json").write_text(json.dumps({**entries, "encoder": "models/tiny"}))
    seal(local)
    monkeypatch.chdir(local.parent)
    with pytest.raises(ConfigError, match="only this machine has"):
        push_folder(local, REPO)
    assert api.calls == []


def test_a_backbone_may_be_uploaded_inside(local: Path) -> None:
    push_folder(local, REPO, with_backbone=True)
    pushed = RecordingApi.uploaded
    assert {"backbone/model.safetensors", "backbone/tokenizer.json"} <= pushed.keys()
    assert json.loads(pushed["config.json"])["encoder"] == "backbone"
    weights = "sedem.safetensors"
    assert pushed[weights] == (local / weights).read_bytes()
    backbone = pushed["backbone/model.safetensors"]
    listed = json.loads(pushed["manifest.json"])["files"]["backbone/model.safetensors"]
    assert listed == {"bytes": len(backbone), "sha256": hashlib.sha256(backbone).hexdigest()}
    assert not (local / "backbone").exists() and not (local / "README.md").exists()
    SeDeM.from_pretrained(local, engine="eager").push_to_hub(REPO, with_backbone=True)
    assert "backbone/model.safetensors" in RecordingApi.uploaded


def test_a_gguf_file_may_be_uploaded_inside(tiny_gguf: Path, tmp_path: Path) -> None:
    model = SeDeM.from_pretrained(tiny_gguf, engine="eager")
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(
        ConfigError, match=r"encoder is '/.*tiny\.gguf', which only this machine has"
    ):
        push_folder(tmp_path / "saved", REPO)
    push_folder(tmp_path / "saved", REPO, with_backbone=True)
    assert RecordingApi.uploaded["backbone/tiny.gguf"] == tiny_gguf.read_bytes()
    model.save_pretrained(tmp_path / "whole", with_backbone=True)
    tiny_gguf.unlink()
    inside = SeDeM.from_pretrained(tmp_path / "whole", engine="eager")
    assert inside.fingerprint() == model.fingerprint()


def test_a_hub_id_cannot_be_put_inside(public: SeDeM, tmp_path: Path) -> None:
    public.save_pretrained(tmp_path / "public")
    with pytest.raises(ConfigError, match="'owner/tiny' cannot be copied into the checkpoint"):
        push_folder(tmp_path / "public", REPO, with_backbone=True)


@pytest.mark.parametrize("name", ["sedem-nano", "sedem-smol"])
def test_shipped_checkpoints_can_be_pushed_with_their_own_cards(name: str) -> None:
    folder = Path(__file__).parents[3] / "checkpoints" / name
    push_folder(folder, REPO)
    assert RecordingApi.uploaded["README.md"] == (folder / "README.md").read_bytes()


def test_the_card_of_a_repository_is_kept(
    public: SeDeM, api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "there", frozenset({"README.md"}))
    public.push_to_hub(REPO)
    assert "README.md" not in RecordingApi.uploaded


def test_what_the_hub_refuses_is_one_sentence(public: SeDeM, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^the hub rejects 'x': bad name x$"):
        public.push_to_hub("x")
    with pytest.raises(CheckpointError, match=r"has no readable config\.json"):
        push_folder(tmp_path, REPO)


SUMMARY = {
    "recipe": {
        "start_from": "runs/stage1/final",
        "data": {
            "training": [
                {"path": "hotpotqa", "set": None, "records": ":400"},
                {"path": "/home/me/lease.jsonl", "set": "own", "records": None},
            ]
        },
        "text": None,
    },
    "steps": 1400,
    "examples_seen": 22400,
    "tokens_seen": 9876543,
    "seconds": 12.5,
    "trained_parameters": {"compressor": 1000, "lora": 234},
    "evaluation": {"eval_loss": 1.23456, "eval_recall": 0.5, "eval_runtime": 9.0, "step": 1400},
    "machine": {"device": "one GPU"},
    "versions": {"sedem": "0.1.0"},
}
ENTRIES = {"encoder": "owner/tiny", "decoder": None, "inject_layer": 2, "compression": 4}


def test_the_card_tells_budget_data_and_scores() -> None:
    card = model_card("me/reader", ENTRIES, SUMMARY)
    assert card.startswith("---\nbase_model:\n- owner/tiny\nlibrary_name: sedem\n")
    assert 'SeDeM.from_pretrained("me/reader")' in card
    for row in (
        "| encoder | owner/tiny |",
        "| inject_layer | 2 |",
        "| steps | 1,400 |",
        "| tokens | 9,876,543 |",
        "| trained parameters | 1,234 (compressor, lora) |",
        "- `hotpotqa`, records :400",
        "| loss | 1.235 |",
        "| recall | 0.5 |",
    ):
        assert row in card, row
    assert "continued from another checkpoint" in card
    assert "runtime" not in card and "decoder" not in card
    # A path of the author's machine is nobody's business.
    assert "- `lease.jsonl`, set own" in card and "/home/me" not in card


def test_the_card_of_a_baseline_says_how_to_evaluate_it() -> None:
    entries = {"method": "icae", "backbone": "sedem-nano/backbone", "memory": 32}
    summary = {**SUMMARY, "recipe": {"text": {"path": "hub:a/b", "windows": 10}}, "evaluation": {}}
    card = model_card("me/icae", entries, summary)
    assert "base_model" not in card
    assert "sedem eval icae --data questions.jsonl -m me/icae" in card
    assert "- `hub:a/b`, windows 10" in card
    assert "The run evaluated nothing." in card


def test_a_summary_is_found_beside_the_final_checkpoint_of_its_run(tmp_path: Path) -> None:
    final = tmp_path / "final"
    final.mkdir()
    assert summary_of(final) is None
    (tmp_path / SUMMARY_FILE).write_text(json.dumps({"steps": 3}))
    assert summary_of(final) == {"steps": 3}
    (tmp_path / "other").mkdir()
    assert summary_of(tmp_path / "other") is None
