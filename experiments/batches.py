"""Many questions over one bank: how many are answered per second. The paper has no such table."""

from __future__ import annotations

from experiments.system import bench_tables
from experiments.system.bench import BATCHES, SEDEM_CONTEXTS, bench_cells
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command


def numbers(scale: Scale) -> list[Number]:
    """Medians by the number of questions asked together."""
    return [
        Number(
            f"{name}, {tokens:,} tokens: {count} together",
            "questions a second",
            None,
            cell,
            f"results.sedem.{tokens}.batches.{count}.questions_per_s.median",
            digits=2,
        )
        for name, cell in bench_cells(scale, "batches").items()
        for tokens in SEDEM_CONTEXTS[scale.name]
        for count in BATCHES[scale.name]
    ]


def render(scale: Scale) -> str:
    """The blocks of docs/performance.md."""
    return bench_tables.blocks(scale, "batches")


STUDY = Study(
    "batches",
    "Many questions over one bank",
    numbers,
    "The paper gives no numbers of this kind.",
    render=render,
)

if __name__ == "__main__":
    command(STUDY)()
