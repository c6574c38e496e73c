"""Times of SeDeM by the type of the stored slots. The paper has no such table."""

from __future__ import annotations

from experiments.system import bench_tables
from experiments.system.bench import SEDEM_CONTEXTS, SLOT_TYPES, bench_cells
from experiments.system.scales import Scale
from experiments.system.study import Number, Study, command

FIGURES = {
    "online_ttft_ms.median": "online TTFT, ms",
    "prebuilt_ttft_ms.median": "prebuilt TTFT, ms",
    "stored_bytes_per_token": "bytes a token",
}


def numbers(scale: Scale) -> list[Number]:
    """Times and bytes by type."""
    return [
        Number(
            f"{name}, {tokens:,} tokens: {slots}",
            column,
            None,
            cell,
            f"results.{'sedem' if slots == 'bfloat16' else f'sedem-{slots}'}.{tokens}.{figure}",
        )
        for name, cell in bench_cells(scale, "memories").items()
        for tokens in SEDEM_CONTEXTS[scale.name]
        for slots in SLOT_TYPES
        for figure, column in FIGURES.items()
    ]


def render(scale: Scale) -> str:
    """The blocks of docs/performance.md."""
    return bench_tables.blocks(scale, "memories")


STUDY = Study(
    "memories",
    "Times with slots in fewer bytes",
    numbers,
    "The paper gives no numbers of this kind.",
    render=render,
)

if __name__ == "__main__":
    command(STUDY)()
