"""The numbers printed in the paper, from data/paper-tables.json and nowhere else."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parents[1] / "data" / "paper-tables.json"

BACKBONES = {
    "llama-3.2-1b": "Llama-3.2-1B-Base",
    "llama-3.2-3b": "Llama-3.2-3B-Base",
    "llama-3.2-1b-to-3b": "cross: 1B encoder -> 3B decoder",
}
"""Our name and the paper's name of a backbone."""

DATASETS = {
    "hotpotqa": "HotpotQA-Distractor",
    "2wiki": "2WikiMHQA",
    "musique": "MuSiQue",
    "qasper": "QASPER",
}
"""Our key and the paper's name of a set."""


def rows(table: str) -> list[dict[str, Any]]:
    """Rows of a table, by its label in the paper."""
    return list(_tables()[table]["rows"])


def number(table: str, column: str, **where: Any) -> float | None:
    """One number: a column of the only matching row; None if the paper prints none there."""
    found = [row for row in rows(table) if _fits(row, where)]
    if len(found) != 1:
        raise LookupError(f"{table}: {len(found)} rows have {where}; exactly one must fit")
    value = found[0].get(column)
    return None if value is None else float(value)


def row(table: str, key: str, **where: Any) -> dict[str, Any]:
    """The row of a set, as in `number`; some tables shorten the set's name."""
    start = DATASETS[key][:5]
    found = [r for r in rows(table) if r["dataset"].startswith(start) and _fits(r, where)]
    if len(found) != 1:
        raise LookupError(f"{table}: {len(found)} rows of {key} have {where}; exactly one must fit")
    return found[0]


def backbone_of(row: dict[str, Any]) -> str:
    """Our name of a row's backbone; some tables omit "-Base"."""
    return str(row["backbone"]).lower().removesuffix("-base")


def _fits(row: dict[str, Any], where: dict[str, Any]) -> bool:
    return all(row.get(key) == value for key, value in where.items())


@cache
def _tables() -> dict[str, Any]:
    return dict(json.loads(TABLES.read_text(encoding="utf-8")))
