"""The model card of a checkpoint, written from its settings and the summary of its training."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from sedem.checkpoint.folder import embedded
from sedem.errors import CheckpointError
from sedem.untrusted import read_json

SUMMARY_FILE = "training.json"
UNTOLD = ("runtime", "per_second", "epoch", "step")
"""Endings of evaluation entries that are not losses."""

Rows = Mapping[str, object]


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
