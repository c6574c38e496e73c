"""Questions arriving at random times: running and static batches. Not in the paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.system.arrivals import WAYS
from experiments.system.cells import Cell
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command
from experiments.system.variants import main_model

RATES = {"smoke": (50,)}
NANO = (2, 8)
COLUMNS = {
    "tokens_s": ("tokens a second", 1),
    "ttft_median_ms": ("median TTFT, ms", 0),
    "ttft_p99_ms": ("p99 TTFT, ms", 0),
    "end_mean_ms": ("mean time to the end, ms", 0),
}


def rates(scale: str) -> tuple[int, ...]:
    """Rates measured at a scale, in questions per second."""
    return RATES.get(scale, NANO)


def cell_of(scale: Scale) -> Cell:
    """The one measurement of a scale; the shipped model answers, except at smoke."""
    return Cell("arrivals", variant=main_model(scale) if scale.name == "smoke" else None)


def numbers(scale: Scale) -> list[Number]:
    """Throughput and waiting time by rate and kind of batch."""
    cell = cell_of(scale)
    return [
        Number(f"{rate} a second, {way}", title, None, cell, f"rates.{rate}.{way}.{name}", digits=d)
        for rate in rates(scale.name)
        for way in WAYS
        for name, (title, d) in COLUMNS.items()
    ]


def about(result: Mapping[str, Any]) -> str:
    """The questions and how often they were asked."""
    return (
        f"{result['questions']} questions with K of 1, 2 or 4 to a context of "
        f"{result['tokens']:,} tokens, up to {result['rows']} at once, seed {result['seed']}; "
        f"medians of {result['rounds']} rounds, in turn. TTFT is the time from the arrival of a "
        "question to its first token."
    )


STUDY = Study(
    "arrivals",
    "Questions that arrive at random",
    numbers,
    "The paper gives no numbers of this kind.",
    about=about,
)

if __name__ == "__main__":
    command(STUDY)()
