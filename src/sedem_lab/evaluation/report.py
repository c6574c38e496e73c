"""`sedem eval report`: finished runs side by side, each compared with the first; and their plot."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sedem.errors import ConfigError, DataError
from sedem.untrusted import JSON_BYTES, read_bytes, read_json
from sedem_lab.evaluation.compare import compare
from sedem_lab.evaluation.records import ANSWERS, Record
from sedem_lab.evaluation.results import SETTINGS
from sedem_lab.evaluation.run import METRICS, PREDICTIONS, read_predictions
from sedem_lab.pictures import pyplot_module, save

COLUMNS = (*ANSWERS, "recall", "mrr", "conditioning", "bytes_per_token", "ttft_ms")
"""Columns of the table. `recall` is recall@K for the largest K that was measured."""
RECALL = "recall@"
"""Prefix of the metrics of recall; K follows."""

COLORS = ("#2f855a", "#2b6cb0", "#b7791f", "#9b2c2c", "#6b46c1", "#4a5568")

ENDINGS = (".svg", ".png", ".pdf")


class Counts(BaseModel):
    """Counts of a metrics.json."""

    model_config = ConfigDict(strict=True)

    examples: int
    not_answered: int


class Summary(BaseModel):
    """A metric of a metrics.json."""

    model_config = ConfigDict(strict=True)

    mean: float
    interval: Annotated[list[float], Field(min_length=2, max_length=2)]


class ReportedMetrics(BaseModel):
    """The entries of a metrics.json that a report needs."""

    counts: Counts
    f1: Summary
    settings: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _shown_are_summaries(cls, entries: Any) -> Any:
        for name, value in entries.items() if isinstance(entries, dict) else ():
            if name.startswith(RECALL) and not re.fullmatch(r"[1-9]\d{0,8}", name[len(RECALL) :]):
                raise ValueError(f"'{name}' names no number of blocks")
            if value is not None and (name.startswith(RECALL) or name in COLUMNS):
                Summary.model_validate(value)
        return entries


@dataclass(frozen=True)
class EvaluatedRun:
    """A finished run: its folder, metrics.json and predictions."""

    folder: Path
    metrics: dict[str, Any]
    records: list[Record]

    def row(self) -> dict[str, Any]:
        """A row of the table, with JSON types and without the metrics that were not measured."""
        settings = self.metrics["settings"]
        recalls = [name for name in self.metrics if name.startswith(RECALL)]
        deepest = max(recalls, key=lambda name: int(name[len(RECALL) :]), default="recall")
        shown = {name: self.metrics.get(deepest if name == "recall" else name) for name in COLUMNS}
        return {
            "run": str(self.folder),
            **{name: settings.get(name) for name in ("method", "data", "k", "control")},
            "recall_at": int(deepest[len(RECALL) :]) if recalls else None,
            "n": len(self.records),
            "batch": max(record["batch"] for record in self.records),
            "not_answered": self.metrics["counts"]["not_answered"],
            "metrics": {name: value for name, value in shown.items() if value is not None},
        }


def report(folders: Sequence[Path]) -> dict[str, Any]:
    """Compare runs.

    Args:
        folders: folders given to `--out`; the others are compared with the first one.

    Returns:
        `runs`, one row for each run; `differences` between every run and the first, by metric;
        `problems`, one sentence for each folder that cannot be reported or compared.

    Raises:
        DataError: no folder has a finished run.
    """
    runs, problems = [], []
    for folder in folders:
        try:
            runs.append(load(folder))
        except DataError as error:
            problems.append(str(error))
    if not runs:
        raise DataError("; ".join(problems) or "there is no run to report; name the folders")
    differences = []
    for run in runs[1:]:
        try:
            by_metric = compare(runs[0].records, run.records)
        except DataError as error:
            problems.append(f"'{run.folder}' is not compared with '{runs[0].folder}': {error}")
            continue
        entries = {name: difference.to_dict() for name, difference in by_metric.items()}
        differences.append({"run": str(run.folder), "to": str(runs[0].folder), "metrics": entries})
    rows = [run.row() for run in runs]
    return {"runs": rows, "differences": differences, "problems": problems}


def load(folder: Path) -> EvaluatedRun:
    """Open a finished run.

    Raises:
        DataError: the folder has no finished run; the message says what it contains.
    """
    if not (folder / SETTINGS).is_file() or not (folder / PREDICTIONS).is_file():
        raise DataError(f"'{folder}' holds no results of 'sedem eval --out'")
    content = read_bytes(folder / PREDICTIONS, DataError, JSON_BYTES)
    if not (folder / METRICS).is_file():
        answered = content.count(b"\n")
        raise DataError(
            f"'{folder}' holds an unfinished run with {answered:,} examples answered; run its "
            "command again"
        )
    records = list(read_predictions(content, folder / PREDICTIONS))
    try:
        metrics = read_json(folder / METRICS, DataError)
        count = ReportedMetrics.model_validate(metrics).counts.examples
    except (DataError, ValueError):
        raise DataError(f"'{folder / METRICS}' is not a 'sedem eval' result") from None
    if not records:
        raise DataError(f"'{folder}' has no predictions; evaluate again into another folder")
    if count != len(records):
        raise DataError(
            f"'{folder}' has {len(records):,} predictions and metrics of {count:,}; "
            "evaluate again into another folder"
        )
    return EvaluatedRun(folder, metrics, records)


# The plot


def draw(compared: dict[str, Any], path: Path) -> None:
    """Draw a report.

    The left panel shows F1 of each run with its 95 % interval. The right panel shows F1 against the
    number of positions that the decoder's upper layers saw. The ending of the file, one of
    `ENDINGS`, selects the format.

    Raises:
        ConfigError: the file has another ending.
    """
    if path.suffix not in ENDINGS:
        raise ConfigError(f"the plot is '{path}'; give it a name that ends in {', '.join(ENDINGS)}")
    pyplot = pyplot_module()
    rows = compared["runs"]
    height = max(2.6, 0.9 + 0.45 * len(rows))
    figure, (bars, costs) = pyplot.subplots(1, 2, figsize=(11, height), layout="constrained")
    for index, row in enumerate(rows):
        color = COLORS[index % len(COLORS)]
        f1 = row["metrics"]["f1"]
        mean, (low, high) = f1["mean"], f1["interval"]
        error = [[mean - low], [high - mean]]
        bars.barh(index, mean, color=color, xerr=error, ecolor="#1a202c", height=0.6)
        positions = row["metrics"].get("conditioning")
        if positions is not None:
            point = positions["mean"], mean
            costs.errorbar(*point, yerr=error, fmt="o", color=color, capsize=3)
            costs.annotate(str(index + 1), point, xytext=(6, 4), textcoords="offset points")
    labels = [f"{number}  {name_of(row)}" for number, row in enumerate(rows, start=1)]
    bars.set_yticks(range(len(rows)), labels)
    bars.invert_yaxis()
    bars.set(xlabel="F1 (95 % interval)", xlim=(0, None))
    costs.set(xlabel="positions that the upper layers see", ylabel="F1", ylim=(0, None))
    costs.margins(x=0.15)
    costs.set_xlim(left=0)
    for axis in (bars, costs):
        axis.spines[["top", "right"]].set_visible(False)
    save(figure, path)


def name_of(row: dict[str, Any]) -> str:
    """A short name of a run: folder (unless it equals the method), method, K and control."""
    k = "" if row["k"] is None else f" K={row['k']}"
    control = "" if row["control"] in (None, "selected") else f" {row['control']}"
    folder, method = Path(row["run"]).name, row["method"]
    return f"{'' if folder == method else f'{folder}: '}{method}{k}{control}"
