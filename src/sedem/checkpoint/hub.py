"""Upload of a checkpoint to the hub, with a model card, if others can open it there."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from sedem.checkpoint.folder import (
    BACKBONE,
    OWN,
    check,
    copy_backbone,
    embedded,
    entries_of,
    local_backbone,
    seal,
)
from sedem.checkpoint.model_card import backbones_of, model_card, summary_of
from sedem.config import CONFIG_FILE, OLLAMA
from sedem.errors import CheckpointError, ConfigError

CARD_FILE = "README.md"


def push_folder(
    checkpoint: Path,
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    with_backbone: bool = False,
) -> str:
    """Upload a checkpoint, of SeDeM or of a trained baseline, as it is in its folder; see `upload`.

    Args:
        with_backbone: upload the folder of its backbone inside it.

    Raises:
        ConfigError: others could not open it, or it does not have exactly one backbone in a folder.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        shutil.copytree(checkpoint, folder)
        check(folder, *OWN, BACKBONE)
        entries = entries_of(folder)
        names = sorted(set(backbones_of(entries).values()))
        if with_backbone and not (names == [BACKBONE] and (folder / BACKBONE).is_dir()):
            places = [local_backbone(name) for name in names]
            if len(places) != 1 or places[0] is None:
                raise ConfigError(
                    f"'{', '.join(names)}' cannot be copied into the checkpoint; that needs one "
                    "backbone in a local folder or GGUF file"
                )
            copy_backbone(places[0], folder / BACKBONE)
            entries["backbone" if "method" in entries else "encoder"] = BACKBONE
            if "decoder" in entries:
                entries["decoder"] = None
            text = json.dumps(entries, indent=2) + "\n"
            (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
            seal(folder)
        return upload(folder, repo_id, private=private, token=token, trained_in=checkpoint)


def upload(
    folder: Path,
    repo_id: str,
    *,
    private: bool = False,
    token: str | None = None,
    trained_in: str | Path | None = None,
) -> str:
    """Upload a folder with a checkpoint, and return the URL of the commit.

    A card is written into the folder if neither it nor the repository has one.

    Args:
        repo_id: the repository, as "owner/name"; it is created if it does not exist.
        private: whether a new repository is private.
        token: access token; None means that of the logged-in user.
        trained_in: folder of the training that the card describes; None means that it is not known.

    Raises:
        ConfigError: it names a backbone that only this machine has.
        CheckpointError: the folder has no config.json, or the hub refuses the upload.
    """
    entries = entries_of(folder)
    # A backbone must be inside the checkpoint, shipped with sedem, or on the hub.
    for setting, name in backbones_of(entries).items():
        here = Path(name).exists() and embedded(name) is None
        own = Path(name).is_absolute() or name.startswith(OLLAMA)
        if own or (here and not (folder / name).is_dir()):
            raise ConfigError(
                f"{setting} is '{name}', which only this machine has; push the checkpoint "
                "with its backbone inside (with_backbone=True, --with-backbone), or name its hub "
                f"id in {CONFIG_FILE}"
            )
    api = HfApi(token=token)
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if not (folder / CARD_FILE).is_file() and not api.file_exists(repo_id, CARD_FILE):
            summary = None if trained_in is None else summary_of(Path(trained_in))
            card = model_card(repo_id, entries, summary)
            (folder / CARD_FILE).write_text(card, encoding="utf-8")
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message="Upload SeDeM"
        )
    except (HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"the hub rejects '{repo_id}': {reason}") from None
    return str(commit.commit_url)
