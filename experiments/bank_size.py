"""Opening, extending and reading a bank of up to a million blocks; not in the paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command

SIZES = {"smoke": (800, 4_000)}
NANO = (10_000, 100_000, 1_000_000)
COLUMNS = {
    "open_s": ("opening, s", 3),
    "open_mb": ("memory of opening, MB", 1),
    "spans_s": ("spans of all blocks, s", 3),
    "spans_mb": ("memory of them, MB", 1),
    "select_ms": ("8 blocks, ms", 2),
    "commit_ms": ("a commit of 800 blocks, ms", 1),
    "reload_ms": ("seeing another's commit, ms", 1),
}


def numbers(scale: Scale) -> list[Number]:
    """Costs by the number of blocks."""
    cell = Cell("bank-size")
    return [
        Number(f"N={size}", title, None, cell, f"sizes.{size}.{name}", digits=digits)
        for size in sizes(scale.name)
        for name, (title, digits) in COLUMNS.items()
    ]


def sizes(scale: str) -> tuple[int, ...]:
    """Numbers of blocks measured at a scale."""
    return SIZES.get(scale, NANO)


def about(result: Mapping[str, Any]) -> str:
    """The blocks, and which kind of time is reported."""
    return (
        f"Blocks of {result['slots']} slots, ten a document, {result['commit_blocks']} a commit; "
        "processor time."
    )


STUDY = Study(
    "bank_size",
    "Opening, appending and reading by the size of a bank",
    numbers,
    "The paper gives no numbers of this kind.",
    about=about,
)

if __name__ == "__main__":
    command(STUDY)()
