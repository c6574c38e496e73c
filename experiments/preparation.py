"""Time and memory of preparing questions for stage 2. The paper has no such table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import main_model

SET = "hotpotqa"
WAYS = ("one by one", "together", "from disk")


def cell_of(scale: Scale) -> Cell:
    """The one measurement of a scale."""
    return Cell("preparation", variant=main_model(scale), questions=SET)


def numbers(scale: Scale) -> list[Number]:
    """Milliseconds per example by preparation method, and bytes per example in the arrays."""
    cell, result = cell_of(scale), []
    for way in WAYS:
        result.append(Number(way, "ms an example", None, cell, f"milliseconds.{way}", digits=2))
        result.append(Number(way, "times sooner", None, cell, f"times_sooner.{way}"))
        if way != WAYS[0]:
            result.append(Number(way, "bytes an example", None, cell, "bytes", digits=0))
    return result


def about(result: Mapping[str, Any]) -> str:
    """The questions, and which kind of time is reported."""
    return (
        f"{result['examples']} examples of {result['tokens']:,} tokens in all; medians of "
        "processor time, the ways in turn."
    )


STUDY = Study(
    "preparation",
    "Preparing questions for stage 2",
    numbers,
    "The paper gives no numbers of this kind.",
    about=about,
)

if __name__ == "__main__":
    command(STUDY)()
