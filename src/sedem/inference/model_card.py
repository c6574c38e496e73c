"""The model card of a checkpoint, written from its settings and the summary of its training."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from sedem.errors import CheckpointError
from sedem.inference.checkpoint import embedded
from sedem.untrusted import read_json

SUMMARY_FILE = "training.json"
UNTOLD = ("runtime", "per_second", "epoch", "step")
"""What the scores of a training have beside losses."""

Rows = Mapping[str, object]


def summary_of(checkpoint: Path) -> dict[str, Any] | None:
    """The summary of the training that wrote a checkpoint; None if it is not beside it.

    Args:
        checkpoint: folder of the checkpoint, such as that of a run, `OUTPUT/final`.

    Raises:
        CheckpointError: the summary cannot be read.
    """
    places = [checkpoint]
    if checkpoint.is_dir() and checkpoint.resolve().name == "final":
        places.append(checkpoint.resolve().parent)
    for path in (place / SUMMARY_FILE for place in places):
        with suppress(FileNotFoundError):
            summary = read_json(path, CheckpointError)
            if not isinstance(summary, dict):
                raise CheckpointError(f"'{path}' is no summary of a training; remove it")
            return summary
    return None


def model_card(
    repo_id: str,
    entries: Mapping[str, Any],
    backbones: Mapping[str, str],
    summary: Mapping[str, Any] | None,
) -> str:
    """Write the card of a checkpoint of SeDeM or of a trained baseline.

    Args:
        repo_id: its repository on the hub.
        entries: its config.json.
        backbones: the backbones by the setting that names them.
        summary: training.json of its run; None if it is not known.
    """
    method = entries.get("method")
    on_hub = [name for name in backbones.values() if "/" in name and embedded(name) is None]
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
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {repo_id.rpartition('/')[2]}",
        what,
        f"```{language}\n{use}\n```",
        _table({**backbones, **settings}),
        *_training(summary),
    ]
    return "\n\n".join(parts) + "\n"


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
    counts = {
        name: f"{summary[key]:,}"
        for name, key in (
            ("steps", "steps"),
            ("examples", "examples_seen"),
            ("tokens", "tokens_seen"),
            ("seconds", "seconds"),
        )
        if key in summary
    }
    trained = summary.get("trained_parameters", {})
    machine, versions = summary.get("machine", {}), summary.get("versions", {})
    return {
        **counts,
        "trained parameters": f"{sum(trained.values()):,} ({', '.join(trained)})",
        "machine": machine.get("device", "unknown"),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
    }


def _data(recipe: Mapping[str, Any]) -> str:
    """The sets of a recipe; of a path on the author's machine only the last part."""
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
