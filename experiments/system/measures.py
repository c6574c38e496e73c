"""How each kind of cell is measured; models that it needs are trained first."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import typer

from experiments.system import answers, bench, convention, learning, search, timing
from experiments.system.cells import Cell, results_of
from experiments.system.scales import Scale, tiny_backbone
from experiments.system.tables import Study
from sedem.durable_files import write_text
from sedem.provenance import provenance

MEASURES: Mapping[str, Callable[[Cell, Scale, Path], dict[str, Any]]] = {
    "answers": answers.answers,
    "constant": answers.constant,
    "budgets": answers.budgets,
    "memory": learning.memory,
    "loss": learning.loss,
    "losses": learning.by_budget,
    "rank": learning.rank,
    "block-recall": search.block_recall,
    "coarse-search": search.coarse_search,
    "large-banks": search.large_banks,
    "confidence": search.confidence,
    "cost": convention.cost,
    "training": learning.training,
    "search": learning.search,
    "probe": learning.probe,
    "bench": bench.bench,
    "batches": bench.bench,
    "memories": bench.bench,
    "kept": bench.bench,
    "peers": bench.bench,
    "arrivals": timing.arrivals,
    "condition-times": timing.condition_times,
    "preparation": timing.preparation,
    "bank-size": timing.bank_size,
}
"""The function that measures each kind of cell; its docstring says what it measures."""

DIGITS = 6
"""Significant digits of a result, so that what is committed stays small."""


def measure(cell: Cell, scale: Scale, data: Path, study: str, results: Path | None = None) -> None:
    """Measure a cell and keep the result in the folder of a study.

    Args:
        results: folder of results; None means the scale's.
    """
    if scale.name == "smoke":
        tiny_backbone()
    found = MEASURES[cell.measure](cell, scale, data)
    # The bench and evaluations sign what they measure, since they resume the work of others.
    result = json.dumps(found if "machine" in found else {**found, **provenance()})
    few_digits = json.loads(result, parse_float=lambda text: float(f"{float(text):.{DIGITS}g}"))
    path = (results or results_of(scale)) / study / f"{cell.name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    # On one line: indentation would be a quarter of all committed results.
    write_text(path, json.dumps(few_digits, separators=(",", ":")) + "\n")


def measure_missing(
    studies: Iterable[Study],
    scale: Scale,
    data: Path,
    only: str | None = None,
    again: bool = False,
) -> None:
    """Measure the missing cells of the given studies.

    A cell shared by several studies is kept in the folder of the first of them.

    Args:
        only: measure only cells whose name contains this.
        again: also measure cells that have a result, and replace it in its place.
    """
    owners: dict[Cell, str] = {}
    for study in studies:
        for cell in study.cells(scale):
            owners.setdefault(cell, study.name)
    for number, (cell, owner) in enumerate(owners.items(), start=1):
        if only and only not in cell.name:
            continue
        path = cell.path(scale)
        done = path is not None and not again
        state = "measured already" if done else "measuring"
        typer.echo(f"{number}/{len(owners)} {cell.name}: {state}", err=True)
        if not done:
            measure(cell, scale, data, path.parent.name if path else owner)
