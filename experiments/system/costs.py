"""Cells of the paper's two cost tables: a row for each method on each backbone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from experiments.system import paper
from experiments.system.cells import Cell
from experiments.system.peers import PEERS


def cost_rows(table: str) -> Iterator[tuple[str, Cell, dict[str, Any]]]:
    """Label, cell and printed numbers of every row.

    Args:
        table: its label in the paper.
    """
    for row in paper.rows(table):
        backbone = paper.backbone_of(row)
        cell = Cell("cost", PEERS[row["method"]], backbone=backbone)
        yield f"{backbone}: {row['method']}", cell, row
