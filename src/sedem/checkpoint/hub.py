"""Upload of a checkpoint to the hub, with a model card, if others can open it there."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData
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
from sedem.config import CONFIG_FILE, OLLAMA
from sedem.errors import CheckpointError, ConfigError
from sedem.untrusted import read_json

CARD_FILE = "README.md"
SUMMARY_FILE = "training.json"
UNTOLD = ("runtime", "per_second", "epoch", "step")
"""Endings of evaluation entries that are not losses."""

Rows = Mapping[str, object]


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


# The model card, from the settings and the summary of the training


def summary_of(checkpoint: Path) -> dict[str, Any] | None:
    """The summary of the training that wrote a checkpoint such as `OUTPUT/final`, or None."""
    places = [checkpoint]
    if checkpoint.is_dir() and checkpoint.resolve().name == "final":
        places.append(checkpoint.resolve().parent)
    for path in (place / SUMMARY_FILE for place in places):
        with suppress(FileNotFoundError):
            summary = read_json(path, CheckpointError)
            if not isinstance(summary, dict):
                raise CheckpointError(f"'{path}' is not a training summary; remove it")
            return summary
    return None


def model_card(repo_id: str, entries: Mapping[str, Any], summary: Mapping[str, Any] | None) -> str:
    """Write the card of a checkpoint of SeDeM or of a trained baseline.

    Args:
        entries: its config.json.
        summary: training.json of its run; None if it is not known.
    """
    parts = [*_head(repo_id, entries), *_training(summary)]
    return "\n\n".join(parts) + "\n"


def backbones_of(entries: Mapping[str, Any]) -> dict[str, str]:
    """Names of backbones by the setting of a config.json that names them."""
    settings = ("encoder", "decoder", "backbone")
    return {name: str(entries[name]) for name in settings if entries.get(name)}


def _head(repo_id: str, entries: Mapping[str, Any]) -> list[str]:
    """What a checkpoint is, how it is used, and its settings."""
    method, backbones = entries.get("method"), backbones_of(entries)
    named = [name for name in backbones.values() if "/" in name and embedded(name) is None]
    on_hub = ["/".join(name.split("/")[:2]) for name in named]  # without the name of a file
    data = ModelCardData(
        library_name="sedem",
        base_model=on_hub or None,
        tags=["sedem", "long-context", "question-answering"],
    )
    if method is None:
        what = "Reads documents once into hidden-state memory, then answers questions from it."
        use = f'from sedem import SeDeM\n\nmodel = SeDeM.from_pretrained("{repo_id}")'
        language = "python"
    else:
        what = f"The trained baseline `{method}` of sedem."
        use, language = f"sedem eval {method} --data questions.jsonl -m {repo_id}", ""
    settings = {
        name: value
        for name, value in entries.items()
        if value is not None and name not in backbones and name != "method"
    }
    return [
        f"---\n{data.to_yaml()}\n---",
        f"# {repo_id.rpartition('/')[2]}",
        what,
        f"```{language}\n{use}\n```",
        _table({**backbones, **settings}),
    ]


def _training(summary: Mapping[str, Any] | None) -> list[str]:
    """Budget, data and scores."""
    if summary is None:
        return ["## Training", f"Not recorded: the checkpoint came without its {SUMMARY_FILE}."]
    recipe = summary.get("recipe", {})
    parts = ["## Budget", _table(_budget(summary))]
    if recipe.get("start_from"):
        parts.append("The run continued from another checkpoint, whose budget is not counted here.")
    parts += ["## Data", _data(recipe), "## Scores"]
    scores = {
        name.removeprefix("eval_"): f"{value:.4g}"
        for name, value in summary.get("evaluation", {}).items()
        if isinstance(value, int | float) and not name.endswith(UNTOLD)
    }
    if not scores:
        return [*parts, "The run evaluated nothing."]
    return [
        *parts,
        "Losses on the evaluation data of the run; no answers were scored.",
        _table(scores),
    ]


def _budget(summary: Mapping[str, Any]) -> Rows:
    """Counts, trained parameters, machine and versions."""
    keys = {"steps": "steps", "examples": "examples_seen", "tokens": "tokens_seen"}
    keys["seconds"] = "seconds"
    counts = {name: f"{summary[key]:,}" for name, key in keys.items() if key in summary}
    trained = summary.get("trained_parameters", {})
    machine, versions = summary.get("machine", {}), summary.get("versions", {})
    return {
        **counts,
        "trained parameters": f"{sum(trained.values()):,} ({', '.join(trained)})",
        "machine": machine.get("device", "unknown"),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
    }


def _data(recipe: Mapping[str, Any]) -> str:
    """The data sets of a recipe; an absolute path is shown as its last part only."""
    questions = (recipe.get("data") or {}).get("training", ())
    sources = [*questions, *([recipe["text"]] if recipe.get("text") else [])]
    lines = []
    for source in sources:
        path = str(source["path"])
        told = {name: source.get(name) for name in ("set", "records", "windows", "tokens")}
        details = [f"{name} {value}" for name, value in told.items() if value is not None]
        name = Path(path).name if Path(path).is_absolute() else path
        lines.append(f"- {', '.join([f'`{name}`', *details])}")
    return "\n".join(lines)


def _table(rows: Rows) -> str:
    lines = [f"| {name} | {value} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *lines])
