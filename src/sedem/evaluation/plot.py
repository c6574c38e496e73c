"""The plot of a report: quality with its intervals, and quality against its cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sedem.errors import ConfigError
from sedem.pictures import pyplot_module, save

METRIC = "f1"
COLORS = ("#2f855a", "#2b6cb0", "#b7791f", "#9b2c2c", "#6b46c1", "#4a5568")

ENDINGS = (".svg", ".png", ".pdf")


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw a report.

    The left panel shows F1 of each run with its 95 % interval. The right panel shows F1 against the
    number of positions that the decoder's upper layers saw.

    Args:
        report: the result of `report.report`.
        path: the file. Its ending, one of `ENDINGS`, selects the format.

    Raises:
        ConfigError: the file has another ending.
    """
    if path.suffix not in ENDINGS:
        raise ConfigError(f"the plot is '{path}'; give it a name that ends in {', '.join(ENDINGS)}")
    pyplot = pyplot_module()
    rows = report["runs"]
    height = max(2.6, 0.9 + 0.45 * len(rows))
    figure, (bars, costs) = pyplot.subplots(1, 2, figsize=(11, height), layout="constrained")
    for index, row in enumerate(rows):
        color = COLORS[index % len(COLORS)]
        mean, low, high = _interval(row)
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


def _interval(row: dict[str, Any]) -> tuple[float, float, float]:
    value = row["metrics"][METRIC]
    low, high = value["interval"]
    return value["mean"], low, high
