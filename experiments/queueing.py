"""Questions queueing at many machines, simulated from measured unit costs. Not in the paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.system.cells import Cell
from experiments.system.queueing import KINDS
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command

LOADS = {"smoke": (50,)}
NANO = (30, 50, 60, 70, 80, 90)
"""Loads of the engines, in percent."""
COLUMNS = {
    "first_p50_s": "first token, median, s",
    "first_p99_s": "first token, p99, s",
    "end_p99_s": "last token, p99, s",
}
CELL = Cell("queueing")


def loads(scale: str) -> tuple[int, ...]:
    """Loads of the engines at a scale, in percent."""
    return LOADS.get(scale, NANO)


def numbers(scale: Scale) -> list[Number]:
    """Waiting times by load and kind of arrivals."""
    return [
        Number(f"{kind}, load={load}", title, None, CELL, f"waits.{kind}.{load}.{name}", digits=2)
        for kind in KINDS
        for load in loads(scale.name)
        for name, title in COLUMNS.items()
    ]


def about(result: Mapping[str, Any]) -> str:
    """The cluster, the questions, and the machines needed at scale."""
    cluster, needed = result["cluster"], result["needed"]
    sentences = [
        "Load is the rate in percent of what the engines answer with all rows taken. "
        f"{cluster['engines']} engines and "
        f"{cluster['partitions']} partitions of a bank with {result['searched']:,} tokens, "
        f"{result['questions']:,} questions a point, seed {result['seed']}.",
    ]
    for rate, found in needed.items():
        calm, bursts = (
            f"{found[kind]['engines'] or 'no number of'} engines and {found[kind]['scorers']} "
            f"scorers of each of {found['partitions']} partitions"
            for kind in ("poisson", "bursts")
        )
        sentences.append(
            f"{float(rate):,.0f} questions a second need {calm}, all of one core, for a p99 of "
            f"{found['first_token_s']:g} s to the first token; with bursts {bursts}."
        )
    beside = result["beside_measured"]
    sentences.append(
        f"Beside the measured arrivals at {beside['rate']:g} a second (median "
        f"{beside['measured_p50_s']:.2f} s, p99 {beside['measured_p99_s']:.2f} s) the simulation "
        f"has {beside['simulated_p50_s']:.2f} s and {beside['simulated_p99_s']:.2f} s."
    )
    return " ".join(sentences)


STUDY = Study(
    "queueing",
    "Waiting for the first token by the load of engines, simulated",
    numbers,
    "The paper gives no numbers of this kind.",
    about=about,
    drawn=("first token",),
)

if __name__ == "__main__":
    command(STUDY)()
