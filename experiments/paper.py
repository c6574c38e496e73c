"""The paper's numbers, from data/paper-tables.json and nowhere else."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parent / "data" / "paper-tables.json"

BACKBONES = {
    "llama-3.2-1b": "Llama-3.2-1B-Base",
    "llama-3.2-3b": "Llama-3.2-3B-Base",
    "llama-3.2-1b-to-3b": "cross: 1B encoder -> 3B decoder",
}
DATASETS = {
    "hotpotqa": "HotpotQA-Distractor",
    "2wiki": "2WikiMHQA",
    "musique": "MuSiQue",
    "qasper": "QASPER",
}
"""Our key and the name that the paper's tables use."""


def rows(table: str) -> list[dict[str, Any]]:
    """Rows of a table, by its label in the paper."""
    return list(_tables()[table]["rows"])


def number(table: str, column: str, **where: Any) -> float | None:
    """One number: the column of the only row that fits; None where the paper prints none.

    Raises:
        LookupError: no row fits, or several do.
    """
    found = [row for row in rows(table) if all(row.get(k) == v for k, v in where.items())]
    if len(found) != 1:
        raise LookupError(f"{table}: {len(found)} rows have {where}")
    value = found[0].get(column)
    return None if value is None else float(value)


def row(table: str, key: str, **where: Any) -> dict[str, Any]:
    """The row of a set, which the tables call by longer and shorter names."""
    start = DATASETS[key][:5]
    found = [
        row
        for row in rows(table)
        if row["dataset"].startswith(start) and all(row.get(k) == v for k, v in where.items())
    ]
    if len(found) != 1:
        raise LookupError(f"{table}: {len(found)} rows are of {key} and have {where}")
    return found[0]


@cache
def _tables() -> dict[str, Any]:
    return dict(json.loads(TABLES.read_text(encoding="utf-8")))
