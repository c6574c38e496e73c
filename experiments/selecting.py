"""Cost of selection by number of blocks, in the banks of `large_banks`. Not in the paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments import large_banks
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from sedem.bank.search import CANDIDATES

SERIES = {"every block": "exact", "pooled keys of every block": "coarse"}


def numbers(scale: Scale) -> list[Number]:
    """Processor time per question by the number of blocks N."""
    (cell,) = large_banks.STUDY.cells(scale)
    return [
        Number(
            f"{name}, N={size}",
            "CPU ms a question",
            None,
            cell,
            f"sizes.{size}.cpu_ms_per_question.{key}",
            digits=0,
        )
        for name, key in SERIES.items()
        for size in large_banks.sizes(scale.name)
    ]


def about(result: Mapping[str, Any]) -> str:
    """The number of questions scored together, and the cost of candidates."""
    candidates = result.get("candidates_cpu_ms_per_question")
    more = (
        f" {CANDIDATES:,} candidates take {candidates:,.0f} ms more, at any N."
        if candidates
        else ""
    )
    return f"{result['questions']['limit']} questions scored together, keys in float32.{more}"


STUDY = Study(
    "selecting",
    "What selecting costs by the number of blocks",
    numbers,
    "The paper gives no numbers of this kind.",
    about=about,
)

if __name__ == "__main__":
    command(STUDY)()
